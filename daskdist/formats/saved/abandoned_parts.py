"""Parts of caches and snapshots that no running pass owns, and their removal.

The parts of a killed pass remain. They are in no manifest, so they are never read. Several processes may fill the
same cache, even in an object store, which has no locks; so ownership is by lease: the name of a part contains the pass
that wrote it, and each new part of a pass renews the lease on all of its parts.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from daskdist.errors import FileError
from daskdist.formats.saved.manifest import MANIFEST, SavedPart, exists, read_manifest
from daskdist.storage.atomic_file import located, name_of_temporary

# The time for which a pass owns its parts after it wrote the last of them.
LEASE_S: Final = 24 * 3600

# The name of a part from `part_name`, or from versions without owners; complete, or still being written.
_PART: Final = re.compile(r"\.?part-(?:([0-9a-f]{12})-)?[0-9a-f]{32}\.arrow(\.[0-9a-f]{32}\.tmp)?")
# The directory of a pipeline, named by its fingerprint, and that of a worker's share.
_PIPELINE: Final = re.compile(r"[0-9a-f]{32}")
_SHARE: Final = re.compile(r"shard-\d+-of-\d+")
# The number of times that a directory is listed whose files are being removed.
_MOST_LISTINGS: Final = 100
# The names that file systems use for the time of the last change, or of creation for immutable objects.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")


def new_owner() -> str:
    """Return a name for a pass, which distinguishes its parts from those of others."""
    return uuid.uuid4().hex[:12]


def part_name(owner: str) -> str:
    """Return a new name for a part of a pass, without its suffix."""
    return f"part-{owner}-{uuid.uuid4().hex}"


def missing_parts(directory: str, parts: Iterable[SavedPart]) -> list[str]:
    """Return the names of the parts that no longer exist."""
    fs, root = located(directory)
    fs.invalidate_cache(root)
    names = {_last(entry["name"]) for entry in _entries(fs, root)}
    return [part.name for part in parts if part.name not in names]


def remove_abandoned(directory: str, *, with_others: bool) -> None:
    """Remove parts that no manifest lists and whose lease is over, if possible.

    Parameters
    ----------
    directory
        The directory of a cache or a snapshot of one pipeline.
    with_others
        Whether to include the directories of other pipelines beside it, and of workers' shares.

    Notes
    -----
    A lease ends a day after the pass wrote its last part. A pass that stalls for longer may lose parts; it checks for
    them before it writes its manifest, and then writes none. If a file system does not record when a file was written,
    the file stays.
    """
    with suppress(OSError, ValueError, NotImplementedError, FileError):
        fs, root = located(directory)
        for part_directory in [root, *(_others(fs, root) if with_others else ())]:
            _remove_abandoned(fs, part_directory)


def _others(fs: Any, root: str) -> list[str]:
    # Return the directories of all pipelines in the user's directory, and below them those of shares.
    pipeline = root.rpartition("/")[0] if _SHARE.fullmatch(_last(root)) else root
    home = pipeline.rpartition("/")[0]
    pipelines = _directories(fs, home, _PIPELINE)
    shares = [share for pipeline in pipelines for share in _directories(fs, pipeline, _SHARE)]
    return [directory for directory in (*pipelines, *shares) if directory != root]


def _directories(fs: Any, root: str, name: re.Pattern[str]) -> list[str]:
    fs.invalidate_cache(root)
    entries = [entry for entry in _entries(fs, root) if entry["type"] == "directory"]
    return [place for place in (str(entry["name"]).rstrip("/") for entry in entries) if name.fullmatch(_last(place))]


def _remove_abandoned(fs: Any, root: str) -> None:
    fs.invalidate_cache(root)
    files: dict[str | None, list[tuple[str, float | None]]] = defaultdict(list)
    for entry in _entries(fs, root):
        name = _last(entry["name"])
        part = _PART.fullmatch(name)
        if part is not None:
            files[part[1]].append((name, _written_at(entry)))
        elif name_of_temporary(name) == MANIFEST:
            files[name].append((name, _written_at(entry)))
    now = time.time()
    over = [
        name
        for written in files.values()
        if all(at is not None and now - at > LEASE_S for _, at in written)
        for name, _ in written
    ]
    if not over:
        return
    directory = fs.unstrip_protocol(root)
    listed = {part.name for part in read_manifest(directory).parts} if exists(directory) else set()
    for name in over:
        if name not in listed:
            with suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{name}")
    if not _entries(fs, root):
        fs.rmdir(root)


def _entries(fs: Any, root: str) -> list[Mapping[str, Any]]:
    for tries_left in reversed(range(_MOST_LISTINGS)):
        try:
            return [entry for entry in fs.ls(root, detail=True) if str(entry["name"]).rstrip("/") != root]
        except FileNotFoundError:
            return []
        except KeyError:
            # Memory file systems of fsspec raise this if another thread removes a file while they list.
            if not tries_left:
                raise
    return []


def _last(name: str) -> str:
    return str(name).rstrip("/").rpartition("/")[2]


def _written_at(entry: Mapping[str, Any]) -> float | None:
    # Return seconds since 1970; None if the file system does not record it.
    at = next((entry[name] for name in _TIMES if entry.get(name) is not None), None)
    if isinstance(at, str):
        try:
            at = datetime.fromisoformat(at)
        except ValueError:
            return None
    if isinstance(at, datetime):
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return float(at) if isinstance(at, int | float) else None
