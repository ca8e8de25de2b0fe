"""``daskdist convert``: write the rows of files as files of another format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from daskdist.cli.reports import dataset_of, of_files, short_errors, write
from daskdist.dataset import Dataset
from daskdist.display.plan import count

# Format -> the method that writes it, and the option of the method for the rows per file.
_WRITERS: Final[dict[str, tuple[Callable[..., Any], str]]] = {
    "parquet": (Dataset.to_parquet, "rows_per_file"),
    "tfrecord": (Dataset.to_tfrecord, "rows_per_file"),
    "npy": (Dataset.to_npy, "rows_per_file"),
    "webdataset": (Dataset.to_webdataset, "rows_per_file"),
    "zarr": (Dataset.to_zarr, "chunk_rows"),
}


@click.command("convert", short_help="Write files of one format as files of another.")
@of_files
@click.argument("destination")
@click.option(
    "--to", "target", type=click.Choice(list(_WRITERS)), default="parquet", show_default=True, help="The new format."
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

    The new files appear when all are complete; after an interruption, start again.
    """
    writer, rows_option = _WRITERS[target]
    with short_errors():
        dataset = dataset_of(files, format_name)
        paths = writer(dataset, destination, overwrite=overwrite, **{rows_option: rows_per_file})
    write({"format": target, "files": paths}, f"{count(len(paths), 'file')} in {destination}", as_json=as_json)
