"""Values whose arrays are in files of shared memory, which are reused, as writing to new memory is far slower."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import time
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Final

import numpy as np

from daskdist.core.array_pool import take_fitting
from daskdist.execute.messages.failure import pickle_with_buffers

# Arrays of fewer bytes in total are sent in the message.
_SMALL_BYTES: Final = 2**16
# Arrays in a file begin at multiples of this.
_ALIGNMENT: Final = 64
# On Linux, files in this directory are in memory.
MEMORY: Final = Path("/dev/shm")
# The most bytes of files to keep for later values, and the most as a share of the directory's room.
_MOST_KEPT_BYTES: Final = 2**29
_PART_OF_ROOM: Final = 4
# The seconds without a request after which the files are removed.
_IDLE_S: Final = 10.0
# The most files of another process that a process has mapped to memory.
_MOST_MAPPED: Final = 256
# The most files that are kept for later values, and that values are in; for each that is mapped, a file is open, and
# many systems let a process open 1,024.
_MOST_FILES: Final = 128


class Segment:
    """A file of shared memory that is mapped to this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)

    def remove(self, *, is_unused: bool) -> None:
        """Remove the file, and if no process uses it, also its maps in other processes."""
        with contextlib.suppress(OSError):
            if is_unused:
                os.truncate(self.path, 0)
            os.unlink(self.path)


class Lease:
    """The base of arrays in a segment: the segment is free when the last of them is deleted.

    Parameters
    ----------
    segment
        The segment.
    owner
        The segments to which it is returned; None not to return it.
    """

    def __init__(self, segment: Segment, owner: Segments | None = None) -> None:
        self.segment = segment
        self._owner, self._num_forks = owner, Forks.number
        address = segment.memory.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "shape": segment.memory.shape,
            "typestr": "|u1",
            "data": (address, False),
        }

    def __del__(self) -> None:
        if self._owner is not None:
            self._owner.end_lease(self.segment, self._num_forks)


class Segments:
    """Segments that this process has created or received, and reuses.

    Parameters
    ----------
    folder
        The directory of the files.
    idle_s
        The seconds without a request after which the free segments are removed.
    """

    def __init__(self, folder: str, idle_s: float = _IDLE_S) -> None:
        self._folder, self._idle_s = folder, idle_s
        room = os.statvfs(folder) if hasattr(os, "statvfs") else None
        room_bytes = 0 if room is None else room.f_blocks * room.f_frsize
        self._most_bytes = min(_MOST_KEPT_BYTES, room_bytes // _PART_OF_ROOM) if Path(folder).parent == MEMORY else 0
        # Only atomic methods of the deque are used, as arrays are deleted in any thread at any time.
        self._free: deque[Segment] = deque()
        # An item for each segment that arrays are in.
        self._leases: deque[None] = deque()
        self._asked = 0.0
        self._watch: Thread | None = None
        _all.add(self)

    def pack(self, value: Any) -> tuple[PackedArrays, Segment | None]:
        """Return a packed value, and the segment of its arrays if they are in one."""
        segment: Segment | None = None

        def find(num_bytes: int) -> Segment | None:
            nonlocal segment
            segment = self.taken(num_bytes)
            return segment

        packed = PackedArrays.of(value, self._folder, find)
        if not packed.path:
            return packed, None
        return packed, segment or Segment(packed.path)

    def value(self, packed: PackedArrays, offered: Segment | None) -> Any:
        """Return a value that another process has packed, in the segment that it was offered or elsewhere."""
        if offered is not None and packed.path != offered.path:
            self.end(offered)
            offered = None
        if not packed.path:
            return packed.value()
        segment = offered or Segment(packed.path)
        if len(self._leases) >= _MOST_FILES:
            memory = segment.memory.copy()
            self.end(segment)
            return packed.value(memory)
        self._leases.append(None)
        return packed.value(np.asarray(Lease(segment, self)))

    def end_lease(self, segment: Segment, num_forks: int) -> None:
        """Note that no array is in a segment any more."""
        self._leases.pop()
        self.give_back(segment, num_forks)

    def end(self, *segments: Segment, is_used: bool = False) -> None:
        """End the use of segments; if something may refer to the memory of one, only its file is removed."""
        for segment in segments:
            if is_used:
                segment.remove(is_unused=False)
            else:
                self.give_back(segment, Forks.number)

    def taken(self, num_bytes: int) -> Segment | None:
        """Return a free segment of at least a number of bytes; None if there is none of about that size."""
        self._asked = time.monotonic()
        return take_fitting(self._free, lambda segment: num_bytes <= segment.memory.nbytes <= 2 * num_bytes)

    def give_back(self, segment: Segment, num_forks: int) -> None:
        """Keep an unused segment, if there is room and it was not in use at a fork."""
        if num_forks != Forks.number or not self._keeps():
            segment.remove(is_unused=num_forks == Forks.number)
            return
        free = self._free
        free.append(segment)
        with contextlib.suppress(IndexError):
            while len(free) > _MOST_FILES or sum([kept.memory.nbytes for kept in list(free)]) > self._most_bytes:
                free.popleft().remove(is_unused=True)

    def clear(self) -> None:
        """Remove the free segments."""
        with contextlib.suppress(IndexError):
            while True:
                self._free.popleft().remove(is_unused=True)

    def close(self) -> None:
        """Remove the free segments, and the others once they are free."""
        self._most_bytes = 0
        self.clear()

    def _keeps(self) -> bool:
        # Return whether a thread is running that removes free segments; none can be started at the end of the program.
        if not self._most_bytes:
            return False
        if self._watch is None or not self._watch.is_alive():
            watch = Thread(target=self._let_go, name="daskdist-memory", daemon=True)
            try:
                watch.start()
            except RuntimeError:
                return False
            self._watch = watch
        return True

    def _let_go(self) -> None:
        while (rest := self._asked + self._idle_s - time.monotonic()) > 0:
            time.sleep(rest)
        self._watch = None
        self.clear()


_all: Final[weakref.WeakSet[Segments]] = weakref.WeakSet()


class Forks:
    """The number of times that this process was forked, as memory of a forked process must not be written again."""

    number = 0


def _before_fork() -> None:
    Forks.number += 1
    for segments in list(_all):
        segments.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)

# The segments of another process that this one has mapped.
_mapped: Final[OrderedDict[str, Segment]] = OrderedDict()


def mapped(path: str) -> Segment:
    """Return a segment of another process, which is mapped once."""
    if path not in _mapped:
        _mapped[path] = Segment(path)
        while len(_mapped) > _MOST_MAPPED:
            _mapped.popitem(last=False)
    _mapped.move_to_end(path)
    return _mapped[path]


@dataclass(frozen=True)
class PackedArrays:
    """A pickled value whose arrays are in a file of shared memory.

    Parameters
    ----------
    pickled
        The pickle without its buffers.
    buffers
        The buffers, if they are small or the file has no room; None if they are in the file.
    path
        The file.
    spans
        The beginning, the end and the writability of each buffer in the file.
    """

    pickled: bytes
    buffers: list[bytearray] | None
    path: str = ""
    spans: tuple[tuple[int, int, bool], ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes in the file."""
        return self.spans[-1][1] if self.spans else 0

    @classmethod
    def of(cls, value: Any, folder: str, find: Callable[[int], Segment | None] = lambda _: None) -> PackedArrays:
        """Pickle a value; large arrays are written to a segment from ``find``, or else to a new file.

        Parameters
        ----------
        value
            The value.
        folder
            The directory of a new file.
        find
            Returns a segment, which may be too small, for a number of bytes; None without one.
        """
        pickled, buffers = pickle_with_buffers(value)
        views = [buffer.raw() for buffer in buffers]
        if sum(view.nbytes for view in views) < _SMALL_BYTES:
            return cls(pickled, list(map(bytearray, views)))
        spans, stop = [], 0
        for view in views:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + view.nbytes
            spans.append((start, stop, not view.readonly))
        segment = find(stop)
        if segment is not None and stop <= segment.memory.nbytes:
            for view, (start, end, _) in zip(views, spans, strict=True):
                segment.memory[start:end] = np.frombuffer(view, np.uint8)
            return cls(pickled, None, segment.path, tuple(spans))
        path = f"{folder}/{uuid.uuid4().hex}"
        if not _is_written(path, views, [start for start, *_ in spans]):
            return cls(pickled, list(map(bytearray, views)))
        return cls(pickled, None, path, tuple(spans))

    def value(self, memory: Any = None) -> Any:
        """Return the value, given the memory of its segment; without one, that of its file, which is removed."""
        if self.buffers is not None:
            return pickle.loads(self.pickled, buffers=self.buffers)
        if memory is None:
            segment = Segment(self.path)
            memory = np.asarray(Lease(segment))
            segment.remove(is_unused=False)
        views = [memoryview(memory)[start:stop] for start, stop, _ in self.spans]
        writable = [is_writable for *_, is_writable in self.spans]
        return pickle.loads(
            self.pickled, buffers=[view if w else view.toreadonly() for view, w in zip(views, writable, strict=True)]
        )


def _is_written(path: str, views: Sequence[memoryview], starts: Sequence[int]) -> bool:
    try:
        with open(path, "wb") as file:
            for view, start in zip(views, starts, strict=True):
                file.seek(start)
                file.write(view)
    except OSError:
        # There is no room left, such as in the 64 MB of shared memory of most containers.
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False
    return True
