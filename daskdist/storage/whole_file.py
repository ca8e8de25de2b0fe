"""Files that take their name once they are whole, so that a reader never sees half of one."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from daskdist.errors import FileError

TEMPORARY: Final = re.compile(r"\.(.*)\.[0-9a-f]{32}\.tmp")


def located(directory: str) -> tuple[Any, str]:
    """Return the file system of a directory, and its path there."""
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(directory)
    # ImportError: of a file system whose library is not installed.
    except (ValueError, ImportError) as error:
        raise FileError(f"{directory!r} cannot be opened: {error}") from None
    return fs, root.rstrip("/")


@contextmanager
def writing(directory: str, name: str) -> Iterator[Any]:
    """Open a file for writing, which takes its name once it is whole.

    Raises
    ------
    FileError
        It cannot be written; what was written of it is removed.

    Notes
    -----
    A process that dies leaves a temporary file, never half a file of that name. A machine that loses power
    may: nothing waits for the disk.
    """
    fs, root = located(directory)
    with whole_file(fs, f"{root}/{name}") as file:
        yield file


@contextmanager
def whole_file(fs: Any, path: str) -> Iterator[Any]:
    """Open a file for writing like `writing`, given a file system and a path there."""
    root, _, name = path.rpartition("/")
    temporary = f"{root}/.{name}.{uuid.uuid4().hex}.tmp"
    try:
        if root:
            fs.makedirs(root, exist_ok=True)
        with fs.open(temporary, "wb") as file:
            yield file
        rename(fs, temporary, path)
    except BaseException as error:
        with suppress(Exception):
            fs.rm_file(temporary)
        if isinstance(error, OSError):
            raise FileError(f"{path}: cannot be written: {error}") from error
        raise


def remove_temporaries(fs: Any, path: str) -> None:
    """Delete what processes that died have left of a file, where nobody else writes it now; as far as it can be."""
    root, _, name = path.rpartition("/")
    with suppress(Exception):
        for entry in fs.ls(root, detail=False):
            match = TEMPORARY.fullmatch(str(entry).rpartition("/")[2])
            if match is not None and match[1] == name:
                fs.rm_file(entry)


def rename(fs: Any, source: str, target: str) -> None:
    """Rename a file; where files cannot be renamed, copy and delete it."""
    from fsspec import AbstractFileSystem

    if type(fs).mv is not AbstractFileSystem.mv:
        fs.mv(source, target)
        return
    # The generic method of fsspec takes names with brackets for patterns.
    fs.cp_file(source, target)
    fs.rm_file(source)


def put(fs: Any, path: str, data: bytes) -> None:
    """Write a small file in place of the one there is: at any time one of them is there, and whole.

    Raises
    ------
    FileError
        It cannot be written.
    """
    from fsspec import AbstractFileSystem

    if type(fs).mv is AbstractFileSystem.mv:
        # In an object store an object appears once it is complete.
        fs.pipe_file(path, data)
        return
    with whole_file(fs, path) as file:
        file.write(data)
        file.flush()
        # Not all file systems have a disk behind them.
        with suppress(OSError, AttributeError):
            os.fsync(file.fileno())
