"""``daskdist convert``: write the rows of files as files of another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Final

import click
from dask.base import tokenize

from daskdist.cli.reports import dataset_of, of_files, short_errors, write
from daskdist.config import in_bytes, num_threads
from daskdist.core.cardinality import counted
from daskdist.core.dataset_base import element_spec_of, node_of, primitive_of
from daskdist.core.node import Source, walk
from daskdist.core.spec import ElementSpec
from daskdist.dataset import Dataset
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.stream.side_outputs import PortionSize, side_outputs_of
from daskdist.formats import WritableFormat
from daskdist.formats.parquet import Parquet
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.formats.webdataset.webdataset_format import WebDataset
from daskdist.formats.write import (
    DirectoryWriter,
    WriteChunk,
    WriteFile,
    Written,
    ZarrWriter,
    npy_to_write,
    rows_of_chunk,
)
from daskdist.long_work import shown
from daskdist.passes.fingerprint import fingerprint
from daskdist.storage.filesystem import Storage, is_remote, local

_ZARR: Final = "zarr"
# Format -> a function that returns its writer for elements of a spec.
_FORMS: Final[dict[str, Callable[[ElementSpec], WritableFormat]]] = {
    "parquet": lambda spec: Parquet(element_spec=spec),
    "tfrecord": lambda spec: TFRecord(),
    "npy": lambda spec: npy_to_write("convert", spec),
    "webdataset": lambda spec: WebDataset(),
}


@click.command("convert", short_help="Write files of one format as files of another.")
@of_files
@click.argument("destination")
@click.option(
    "--to",
    "target",
    type=click.Choice([*_FORMS, _ZARR]),
    default="parquet",
    show_default=True,
    help="The new format.",
)
@click.option(
    "--rows-per-file",
    metavar="N",
    type=click.IntRange(1),
    help="Rows in each new file or Zarr chunk.  [default: a few megabytes]",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files once the new ones are complete.")
def convert_files(
    files: tuple[str, ...],
    destination: str,
    format_name: str | None,
    as_json: bool,
    target: str,
    rows_per_file: int | None,
    overwrite: bool,
) -> None:
    """Write the rows of FILES to the directory or URL DESTINATION, in order.

    The new files appear when all are complete. After an interruption, the same command continues with the first file,
    or Zarr chunk, that was not complete, as long as FILES are unchanged.
    """
    with short_errors():
        dataset = dataset_of(files, format_name)
        num_kept, paths = _convert(dataset, destination, target, rows_per_file, overwrite=overwrite)
    is_zarr = target == _ZARR
    kept = f", {counted(num_kept, 'chunk' if is_zarr else 'file')} of it from an interrupted conversion"
    text = f"a Zarr store, {destination}" if is_zarr else f"{counted(len(paths), 'file')} in {destination}"
    text += kept if num_kept else ""
    write({"format": target, "files": paths, "kept": num_kept}, text, as_json=as_json)


def _convert(
    dataset: Dataset, destination: str, target: str, rows_per_file: int | None, *, overwrite: bool
) -> tuple[int, list[str]]:
    # Return the number of files or chunks that an interrupted conversion has left, and the paths of all files.
    num_kept = 0

    def calls(write_part: WriteFile | WriteChunk) -> Iterator[Written]:
        nonlocal num_kept
        num_kept = len(write_part.finished)
        rest = dataset.skip(sum(part.num_rows for part in write_part.finished))
        portions = PortionSize(in_bytes("bundle-bytes"), rows_per_file)
        caller = local_caller(node_of(rest), num_threads())
        written = side_outputs_of(primitive_of(rest), write_part, portions, caller, name="convert")
        return shown(chain(write_part.finished, written), "convert", dataset.cardinality, attrgetter("num_rows"))

    spec = element_spec_of(dataset)
    if target == _ZARR and rows_per_file is None:
        rows_per_file = rows_of_chunk(spec, dataset.cardinality())
    node = node_of(dataset)
    states = [state for source in walk(node) if isinstance(source, Source) for state in source.state() or [None]]
    # Files of which it is unknown whether they were changed are converted from the start.
    key = None if None in states else tokenize(fingerprint(node), target, rows_per_file)
    path = destination if is_remote(destination) else local(destination)
    writer: DirectoryWriter | ZarrWriter
    if rows_per_file is not None and target == _ZARR:
        writer = ZarrWriter("convert", path, rows_per_file, Storage(), overwrite, key)
    else:
        writer = DirectoryWriter("convert", _FORMS[target](spec), path, Storage(), overwrite, key)
    paths = writer.write(spec, calls)
    return num_kept, paths
