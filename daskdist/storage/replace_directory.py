"""Replacement of a directory, such as a Zarr store, by a finished one.

A pointer file beside the directory, written in one step, names the finished directory until that is renamed. A reader
that uses `current` sees the old directory before the pointer is written and the new one afterwards, whenever the
writing process is killed. Readers that do not know the pointer see no store during the replacement, never part of one:
the metadata is deleted first and copied last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from daskdist.storage.atomic_file import is_on_disk, name_of_temporary, temporary_beside

# The metadata files of a Zarr store; a directory without them is not a store.
METADATA: Final = ("zarr.json", ".zarray", ".zgroup", ".zmetadata", ".zattrs")


def pointer_to(path: str) -> str:
    """Return the path of a directory's pointer; for a glob of directories, the glob of their pointers.

    >>> pointer_to("/data/a.zarr")
    '/data/.a.zarr.daskdist.json'
    """
    parent, slash, last = path.rstrip("/").rpartition("/")
    return f"{parent}{slash}.{last}.daskdist.json"


def pointed_from(pointer: str) -> str:
    """Return the directory that a pointer belongs to."""
    parent, slash, last = pointer.rpartition("/")
    return parent + slash + last.removeprefix(".").removesuffix(".daskdist.json")


def current(fs: Any, path: str) -> str:
    """Return the current path of a directory: its own, or the one its pointer names.

    Parameters
    ----------
    fs
        Its file system.
    path
        Its path in the file system, without a slash at the end.
    """
    parent, slash, last = path.rpartition("/")
    try:
        name = json.loads(fs.cat_file(pointer_to(path)))["directory"]
    # There is no pointer. Some servers deny access rather than say so.
    except (OSError, ValueError, LookupError, TypeError):
        return path
    if not isinstance(name, str) or name_of_temporary(name) != last:
        return path
    place = f"{parent}{slash}{name}"
    return place if is_store(fs, place) else path


def is_store(fs: Any, path: str) -> bool:
    """Return whether a directory has the metadata of a Zarr store."""
    return any(fs.exists(f"{path}/{file}") for file in METADATA)


def replace_directory(fs: Any, new: str, path: str, put: Callable[[Any, str, bytes], None]) -> None:
    """Move a finished directory to a path beside it, in place of the existing directory.

    Notes
    -----
    Leftovers of killed processes are removed, so only one process at a time may write to a path.
    """
    put(fs, pointer_to(path), json.dumps({"directory": new.rpartition("/")[2]}).encode())
    # Only the local file system is known to rename a directory in one step.
    if is_on_disk(fs):
        if fs.exists(path):
            fs.mv(path, temporary_beside(path))
        fs.mv(new, path)
    else:
        _remove_store(fs, path)
        _copy_store(fs, new, path)
    fs.rm_file(pointer_to(path))
    remove_temporaries_beside(fs, path)


def remove_temporaries_beside(fs: Any, path: str) -> None:
    """Remove what a replacement left beside a directory, if possible; leftovers are hidden from readers."""
    parent, _, last = path.rpartition("/")
    fs.invalidate_cache(parent)
    with suppress(OSError):
        for entry in fs.ls(parent, detail=False):
            name = str(entry).rstrip("/").rpartition("/")[2]
            if name_of_temporary(name) == last:
                _remove_store(fs, str(entry).rstrip("/"))
            elif name_of_temporary(name) == pointer_to(last):
                fs.rm_file(entry)


def _files(fs: Any, path: str) -> tuple[list[str], list[str]]:
    # Return the metadata files, the outermost first, and the other files.
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
        # In object stores, where directories exist only in names of files, nothing may be left.
        fs.rm(path, recursive=True)
    fs.invalidate_cache(path)


def _copy_store(fs: Any, source: str, target: str) -> None:
    def targets(names: Sequence[str]) -> list[str]:
        return [target + name[len(source) :] for name in names]

    metadata, data = _files(fs, source)
    if data:
        fs.copy(data, targets(data))
    for name, copied in reversed(list(zip(metadata, targets(metadata), strict=True))):
        fs.cp_file(name, copied)
