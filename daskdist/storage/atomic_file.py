"""Atomic writes of files: a file gets its name when it is complete, so that a reader never sees part of one."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from daskdist.errors import FileError
from daskdist.storage.filesystem import Storage
from daskdist.storage.libraries import fsspec
from daskdist.url_secrets import shown_cause

_TEMPORARY: Final = re.compile(r"\.(.*)\.[0-9a-f]{32}\.tmp", re.DOTALL)


def located(directory: str) -> tuple[Any, str]:
    """Return the file system of a directory, and its path within it."""
    fs, root = Storage().located(directory)
    return fs, root.rstrip("/")


@contextmanager
def writing(directory: str, name: str) -> Iterator[Any]:
    """Open a file for writing, which gets its name when it is complete.

    Raises
    ------
    FileError
        The file cannot be written; the partial file is removed.

    Notes
    -----
    A process that dies leaves a temporary file, never a partial file of that name. A power failure may leave one,
    because nothing waits for the disk.
    """
    fs, root = located(directory)
    with atomic_file(fs, f"{root}/{name}") as file:
        yield file


@contextmanager
def atomic_file(
    fs: Any, path: str, check: Callable[[], None] = lambda: None, *, is_private: bool = False
) -> Iterator[Any]:
    """Open a file for writing like `writing`, by a file system and a path within it.

    ``check`` is called before the file gets its name; if it raises an error, the file is removed. If ``is_private``,
    nobody else can read a file on a local disk.
    """
    root, temporary = path.rpartition("/")[0], temporary_beside(path)
    try:
        if root:
            fs.makedirs(root, exist_ok=True)
        with _private(temporary) if is_private and is_on_disk(fs) else fs.open(temporary, "wb") as file:
            yield file
        check()
        rename(fs, temporary, path)
    except BaseException as error:
        with suppress(Exception):
            fs.rm_file(temporary)
        if isinstance(error, OSError):
            raise FileError(f"{path}: cannot be written: {error}") from shown_cause(error)
        raise


def is_on_disk(fs: Any) -> bool:
    """Return whether a file system is that of this machine."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _private(path: str) -> Any:
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    # The umask may have left out permissions of the user, too.
    os.chmod(path, 0o600)
    return os.fdopen(file, "wb")


def temporary_beside(path: str, key: str | None = None) -> str:
    """Return a hidden path beside a file or directory: a new one, or that of a key of 32 hex digits."""
    parent, _, last = path.rpartition("/")
    return f"{parent}/.{last}.{key or uuid.uuid4().hex}.tmp"


def name_of_temporary(name: str) -> str | None:
    """Return the name of the file or directory that a temporary one is for; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else match[1]


def remove_temporaries(fs: Any, path: str) -> None:
    """Delete temporary files of a file that dead processes left, if possible; no process may be writing the file."""
    root, _, name = path.rpartition("/")
    with suppress(Exception):
        for entry in fs.ls(root, detail=False):
            if name_of_temporary(str(entry).rpartition("/")[2]) == name:
                fs.rm_file(entry)


def rename(fs: Any, source: str, target: str) -> None:
    """Rename a file; copy and delete it if the file system cannot rename."""
    if type(fs).mv is not fsspec.AbstractFileSystem.mv:
        fs.mv(source, target)
        return
    # fsspec's generic method reads names with brackets as patterns.
    fs.cp_file(source, target)
    fs.rm_file(source)


def put(fs: Any, path: str, data: bytes, *, is_private: bool = False) -> None:
    """Replace a small file in one step: readers see the old content or the new one.

    If ``is_private``, nobody else can read a file on a local disk.

    Raises
    ------
    FileError
        The file cannot be written.
    """
    if type(fs).mv is fsspec.AbstractFileSystem.mv:
        # In an object store an object appears when it is complete.
        fs.pipe_file(path, data)
        return
    with atomic_file(fs, path, is_private=is_private) as file:
        file.write(data)
        file.flush()
        # Some file systems cannot flush to a disk.
        with suppress(OSError, AttributeError):
            os.fsync(file.fileno())
