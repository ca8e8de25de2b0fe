"""Datasets of files of any format."""

from __future__ import annotations

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.formats import DirectoryFormat, Format, endings, format_named
from daskdist.formats.guess import guess_format, warn_of_other_formats, with_storage
from daskdist.formats.zarr import stores
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


def read_files(paths: Paths, format: str | Format | None = None, *, storage_options: StorageOptions = None) -> Dataset:
    """Read the elements of files of any format, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted. A directory
        that is a single dataset, such as a Zarr store or the result of `Dataset.save`, is read as such.
    format
        A format with its options; the name of a built-in format or of one that is registered under the entry-point
        group ``daskdist.formats``, for its default options; or None to recognise the format by the first file. Other
        formats in the same directory are left out, with a warning.
    storage_options
        Options of the file system, such as credentials or an endpoint; a format with options has its own.

    Raises
    ------
    FileError
        No file matches, or the first one does not have the format, or no known format.
    ArgumentError
        The format does not exist.
    """
    storage = Storage(storage_options)
    is_guessed = format is None
    if format is None:
        format = guess_format(paths, storage)
    if isinstance(format, str):
        format = with_storage(format_named(format)(), storage)
    if not hasattr(format, "list_splits"):
        raise ArgumentError(
            f"read_files: format is {format!r:.80}; give a format, its name, or None to recognise it by the file"
        )
    if isinstance(format, DirectoryFormat):
        return Dataset(read_node(format, stores(paths, storage)))
    files = storage.expand(paths, endings(format))
    if is_guessed:
        warn_of_other_formats(format.name, files, storage.expand(paths, ("",)))
    return Dataset(read_node(format, files))
