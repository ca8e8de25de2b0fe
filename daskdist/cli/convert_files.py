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
from daskdist.core.dataset_base import element_spec_of, node_of, primitive_of
from daskdist.core.node import Source, walk
from daskdist.core.spec import ElementSpec
from daskdist.dataset import Dataset
from daskdist.display.plan import count
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.stream.side_outputs import PortionSize, side_outputs_of
from daskdist.formats import WritableFormat
from daskdist.formats.parquet import Parquet
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.formats.webdataset.webdataset_format import WebDataset
from daskdist.formats.write import DirectoryWriter, WriteFile, Written, npy_to_write
from daskdist.long_work import shown
from daskdist.passes.seed import fingerprint
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

    The new files appear when all are complete. After an interruption, the same command continues with the first file
    that was not complete, as long as FILES are unchanged; a Zarr store is written from its start.
    """
    with short_errors():
        dataset = dataset_of(files, format_name)
        if target == _ZARR:
            num_kept, paths = 0, dataset.to_zarr(destination, chunk_rows=rows_per_file, overwrite=overwrite)
        else:
            num_kept, paths = _convert(dataset, destination, target, rows_per_file, overwrite=overwrite)
    kept = f", {num_kept} of them from an interrupted conversion" if num_kept else ""
    text = f"{count(len(paths), 'file')} in {destination}{kept}"
    write({"format": target, "files": paths, "kept": num_kept}, text, as_json=as_json)


def _convert(
    dataset: Dataset, destination: str, target: str, rows_per_file: int | None, *, overwrite: bool
) -> tuple[int, list[str]]:
    # Return the number of files that an interrupted conversion has left, and the paths of all.
    num_kept = 0

    def calls(write_file: WriteFile) -> Iterator[Written]:
        nonlocal num_kept
        num_kept = len(write_file.finished)
        rest = dataset.skip(sum(part.num_rows for part in write_file.finished))
        portions = PortionSize(in_bytes("bundle-bytes"), rows_per_file)
        caller = local_caller(node_of(rest), num_threads())
        written = side_outputs_of(primitive_of(rest), write_file, portions, caller, name="convert")
        return shown(chain(write_file.finished, written), "convert", dataset.cardinality, attrgetter("num_rows"))

    spec = element_spec_of(dataset)
    node = node_of(dataset)
    states = [state for source in walk(node) if isinstance(source, Source) for state in source.state() or [None]]
    # Files of which it is unknown whether they were changed are converted from the start.
    key = None if None in states else tokenize(fingerprint(node), target, rows_per_file)
    path = destination if is_remote(destination) else local(destination)
    files = DirectoryWriter("convert", _FORMS[target](spec), path, Storage(), overwrite, key)
    paths = files.write(spec, calls)
    return num_kept, paths
