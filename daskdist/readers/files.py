"""Datasets of files of any format, and what readers of all formats have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError, FileError
from daskdist.formats import DirectoryFormat, Format, format_named, installed
from daskdist.formats.zarr import stores
from daskdist.ops.read_files import ReadFiles
from daskdist.storage.compression import SUFFIXES
from daskdist.storage.filesystem import Paths, Storage, failures

StorageOptions = Mapping[str, Any] | None

# The first bytes of a file that formats tell themselves by.
_HEAD_BYTES: Final = 64


def read_files(paths: Paths, format: str | Format | None = None, *, storage_options: StorageOptions = None) -> Dataset:
    """Read the elements of files of any format, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted. A directory
        that is one dataset, a Zarr store or what `Dataset.save` wrote, is read as such.
    format
        A format with its options; the name of one, ours or registered under the entry-point group
        ``daskdist.formats``, to have it without any; or None to tell it by the first file.
    storage_options
        What the file system takes: credentials, an endpoint. A format that is given with its options has its own.

    Raises
    ------
    FileError
        No file matches, or the first is not of the format, or of none that is known.
    ArgumentError
        There is no such format.
    """
    storage = Storage(storage_options)
    if format is None:
        format = _guessed(paths, storage)
    if isinstance(format, str):
        format = _opening(format_named(format)(), storage)
    if not hasattr(format, "list_splits"):
        raise ArgumentError(
            f"read_files: format is {format!r:.80}; give a format, its name, or None to tell it by the file"
        )
    if isinstance(format, DirectoryFormat):
        return of_files(format, stores(paths, storage))
    return of_files(format, storage.expand(paths, endings(format)))


def _opening(form: Any, storage: Storage) -> Format:
    # A format that opens files in the way said.
    has_storage = is_dataclass(form) and any(each.name == "storage" for each in fields(form))
    made: Format = replace(form, storage=storage) if has_storage else form
    return made


def _guessed(paths: Paths, storage: Storage) -> str:
    forms = {name: format_named(name)() for name in installed()}
    for name, form in forms.items():
        if isinstance(form, DirectoryFormat) and _is_marked(paths, form, storage):
            return name
    path = storage.expand(paths, ("",))[0]
    head = storage.read(path, 0, _HEAD_BYTES)
    for name, form in forms.items():
        if form.guess(path, head):
            return name
    raise FileError(f"{path}: of no format that is known here; give format=, one of {', '.join(sorted(installed()))}")


def _is_marked(paths: Paths, form: Any, storage: Storage) -> bool:
    # Whether the first of what is named is a directory of the format.
    first = paths[:1] if isinstance(paths, Sequence) and not isinstance(paths, str) else paths
    # What is wrong with it is said where it is looked up as a file.
    with suppress(FileError, ArgumentError):
        path = stores(first, storage)[0]
        fs, root = storage.located(path)
        for mark in form.marks:
            place = f"{root.rstrip('/')}/{mark}"
            with failures(place, "cannot be looked up"):
                if fs.isfile(place):
                    with fs.open(place, "rb") as file:
                        return bool(form.guess(place, file.read(_HEAD_BYTES)))
    return False


def endings(form: Format) -> tuple[str, ...]:
    """Return the endings of the names of a format's files in a directory, compressed or not."""
    return tuple(end + more for end in form.suffixes for more in ("", *SUFFIXES)) or ("",)


def of_files(form: Format, paths: tuple[str, ...], name: str | None = None) -> Dataset:
    """Return a dataset of the elements of files, in the order of the files.

    Raises
    ------
    FileError
        The first is not of the format.
    """
    return Dataset(read_node(form, paths, name))


def read_node(form: Format, paths: tuple[str, ...], name: str | None = None) -> ReadFiles:
    """Return the node of a dataset of files, for datasets of a class of their own."""
    node = ReadFiles(paths, form, label=name)
    node.spec  # noqa: B018 - a file that is not of the format, or a column that is not there, shows now
    return node


def listed(filenames: Any, form: Format) -> tuple[str, ...]:
    """Return the files that TensorFlow's datasets are given: a path, a list of them, or a dataset of paths."""
    if isinstance(filenames, Dataset):
        filenames = [str(each) for each in filenames]
    return Storage().expand(filenames, endings(form))
