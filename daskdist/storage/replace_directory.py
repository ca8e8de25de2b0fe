"""Put a finished directory, such as a Zarr store, in the place of another.

A pointer beside the place, written in one step, says where the finished directory is until it has its name. Whoever
looks for the directory by `current` has the old one before that and the new one from then on, whenever the process that
replaces it is killed. Others, who do not know the pointer, find no store while it is being replaced, and never a part
of one: its metadata goes first and comes last.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

# Without these files a directory is no Zarr store.
METADATA: Final = ("zarr.json", ".zarray", ".zgroup", ".zmetadata", ".zattrs")


def temporary_beside(path: str) -> str:
    """Return a new hidden name beside a directory, for what is to take its place."""
    parent, _, last = path.rpartition("/")
    return f"{parent}/.{last}.{uuid.uuid4().hex}.tmp"


def pointer_to(path: str) -> str:
    """Return the path of the pointer of a directory; of a glob of directories, that of their pointers.

    >>> pointer_to("/data/a.zarr")
    '/data/.a.zarr.daskdist.json'
    """
    parent, slash, last = path.rstrip("/").rpartition("/")
    return f"{parent}{slash}.{last}.daskdist.json"


def pointed_from(pointer: str) -> str:
    """Return the directory whose pointer a path is."""
    parent, slash, last = pointer.rpartition("/")
    return parent + slash + last.removeprefix(".").removesuffix(".daskdist.json")


def current(fs: Any, path: str) -> str:
    """Return where a directory is now: at its path, or where its pointer says.

    Parameters
    ----------
    fs
        Its file system.
    path
        Its path there, without a slash at the end.
    """
    parent, slash, last = path.rpartition("/")
    try:
        name = json.loads(fs.cat_file(pointer_to(path)))["directory"]
    # Where there is none. Some servers refuse to say that.
    except (OSError, ValueError, LookupError, TypeError):
        return path
    if not isinstance(name, str) or not _temporaries(last).fullmatch(name):
        return path
    place = f"{parent}{slash}{name}"
    return place if any(fs.exists(f"{place}/{each}") for each in METADATA) else path


def replace_directory(fs: Any, new: str, path: str, put: Callable[[Any, str, bytes], None]) -> None:
    """Give a finished directory beside a path that path, in place of what is there.

    Parameters
    ----------
    fs
        The file system.
    new
        The finished directory, of a name that `temporary_beside` gave.
    path
        The name it is to have.
    put
        Writes a small file in one step.

    Notes
    -----
    What killed processes left beside it is removed, so only one process at a time may write to a path.
    """
    put(fs, pointer_to(path), json.dumps({"directory": new.rpartition("/")[2]}).encode())
    if _renames(fs):
        if fs.exists(path):
            fs.mv(path, temporary_beside(path))
        fs.mv(new, path)
    else:
        _remove_store(fs, path)
        _copy_store(fs, new, path)
    fs.rm_file(pointer_to(path))
    remove_temporaries_beside(fs, path)


def remove_temporaries_beside(fs: Any, path: str) -> None:
    """Remove what replacing a directory left beside it; as far as that can be, for what stays is hidden."""
    parent, _, last = path.rpartition("/")
    fs.invalidate_cache(parent)
    with suppress(OSError):
        for entry in fs.ls(parent, detail=False):
            name = str(entry).rstrip("/").rpartition("/")[2]
            if _temporaries(last).fullmatch(name):
                _remove_store(fs, str(entry).rstrip("/"))
            elif _temporaries(pointer_to(last)).fullmatch(name):
                fs.rm_file(entry)


def _temporaries(last: str) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(last)}\.[0-9a-f]{{32}}\.tmp")


def _renames(fs: Any) -> bool:
    # In one step, and a directory too. Of others that say they do, that is not known.
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _files(fs: Any, path: str) -> tuple[list[str], list[str]]:
    # The files that make it a store, the outermost first, and the other files.
    fs.invalidate_cache(path)
    names = [str(name) for name in fs.find(path)]
    metadata = [name for name in names if name.rpartition("/")[2] in METADATA]
    return sorted(metadata, key=lambda name: (name.count("/"), name)), sorted(set(names) - set(metadata))


def _remove_store(fs: Any, path: str) -> None:
    if not fs.exists(path):
        return
    for name in _files(fs, path)[0]:
        fs.rm_file(name)
    with suppress(FileNotFoundError):
        # Where directories are but names of files, there may be nothing left.
        fs.rm(path, recursive=True)
    fs.invalidate_cache(path)


def _copy_store(fs: Any, source: str, target: str) -> None:
    def targets(names: Sequence[str]) -> list[str]:
        return [target + name[len(source) :] for name in names]

    metadata, others = _files(fs, source)
    if others:
        fs.copy(others, targets(others))
    for name, copied in reversed(list(zip(metadata, targets(metadata), strict=True))):
        fs.cp_file(name, copied)
