"""From what users write for files to a list of files."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from daskdist.errors import ArgumentError, FileError


def expand(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], suffix: str) -> tuple[str, ...]:
    """The files that paths, globs and directories name: those of one pattern sorted, patterns in given order.

    Parameters
    ----------
    paths
        Local paths or fsspec URLs, each a file, a glob or a directory.
    suffix
        How the names of the files taken from a directory end.

    Raises
    ------
    FileError
        A path or pattern names no file.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Sequence):
        raise ArgumentError(f"expected a path, a glob, or a list of them, got {type(paths).__name__}")
    if not paths:
        raise FileError("the list of files is empty; give a path, a glob, or a list of them")
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentError(f"the list of files has {path!r:.80}; give paths and globs")
    return tuple(file for path in paths for file in _expand_one(os.fspath(path), suffix))


def _expand_one(path: str, suffix: str) -> list[str]:
    found = _expand_remote(path, suffix) if is_remote(path) else _expand_local(path, suffix)
    if found:
        return found
    if not is_remote(path) and os.path.isdir(_local(path)):
        raise FileError(f"no file matches: the directory {path!r} has none whose name ends in {suffix!r}")
    kind = "no file matches" if glob.has_magic(path) else "no such file:"
    where = "" if is_remote(path) else f" (looked in {Path(_local(path)).parent})"
    raise FileError(f"{kind} {path!r}{where}")


def _expand_local(path: str, suffix: str) -> list[str]:
    path = _local(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "**", f"*{suffix}")
    return sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))


def _local(path: str) -> str:
    # Absolute, because a worker's working directory is another.
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def _expand_remote(path: str, suffix: str) -> list[str]:
    import fsspec

    try:
        fs, inner = fsspec.core.url_to_fs(path)
    except ValueError as error:
        raise FileError(f"{path!r} cannot be opened: {error}") from None
    if glob.has_magic(inner):
        names = fs.glob(inner)
    elif fs.isdir(inner):
        names = [name for name in fs.find(inner) if name.endswith(suffix)]
    else:
        names = [inner] if fs.exists(inner) else []
    return sorted(fs.unstrip_protocol(name) for name in names)


def is_remote(path: str) -> bool:
    """Whether a path is a URL of something other than the local file system."""
    return "://" in path and not path.startswith("file://")
