"""Recognition of the format of files by their names and first bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from daskdist.core.cardinality import counted
from daskdist.errors import ArgumentError, FileError
from daskdist.formats import DirectoryFormat, Format, endings, format_named, installed
from daskdist.formats.zarr import stores
from daskdist.storage.failures import failures
from daskdist.storage.filesystem import Paths, Storage

logger: Final = logging.getLogger("daskdist")

# The number of first bytes that formats are recognised by.
_HEAD_BYTES: Final = 64


def with_storage(form: Any, storage: Storage) -> Format:
    """Return a format that opens files by a storage, if it opens files at all."""
    has_storage = is_dataclass(form) and any(field.name == "storage" for field in fields(form))
    opening: Format = replace(form, storage=storage) if has_storage else form
    return opening


def guess_format(paths: Paths, storage: Storage) -> str:
    """Return the name of the format of the first of some files.

    Raises
    ------
    FileError
        No file matches, or the first has no known format.
    """
    forms = {name: format_named(name)() for name in installed()}
    directory = _first_directory(paths, storage)
    for name, form in forms.items():
        if directory is not None and isinstance(form, DirectoryFormat) and _is_marked(directory, form, storage):
            return name
    path = storage.expand(paths, ("",))[0]
    head = storage.read(path, 0, _HEAD_BYTES)
    for name, form in forms.items():
        if form.guess(path, head):
            return name
    raise FileError(f"{path}: the format is not recognised; give format=, one of {', '.join(sorted(installed()))}")


def warn_of_other_formats(format_name: str, files: tuple[str, ...], all_files: tuple[str, ...]) -> None:
    """Log how many of all files are of other formats than the one whose files are read."""
    ends = tuple(end for name in installed() for end in endings(format_named(name)()) if end)
    others = [file for file in set(all_files).difference(files) if file.lower().endswith(ends)]
    if others:
        logger.warning(
            "read_files: the format is %s, as that of the first file; left out %s of other formats, such as %s; give "
            "format= to choose one",
            format_name,
            counted(len(others), "file"),
            min(others),
        )


def _first_directory(paths: Paths, storage: Storage) -> str | None:
    # Return the first path, if it is not that of a file.
    first: Any = paths[:1] if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]
    # Looking up the path as a file will raise the error.
    with suppress(FileError, ArgumentError, IndexError, TypeError):
        return None if storage.is_file(os.fspath(first[0])) else stores(first, storage)[0]
    return None


def _is_marked(path: str, form: Any, storage: Storage) -> bool:
    # Return whether a directory is one of the format.
    with suppress(FileError, ArgumentError):
        fs, root = storage.located(path)
        for mark in form.marks:
            place = f"{root.rstrip('/')}/{mark}"
            with failures(place, "cannot be looked up"):
                if fs.isfile(place):
                    with fs.open(place, "rb") as file:
                        return bool(form.guess(place, file.read(_HEAD_BYTES)))
    return False
