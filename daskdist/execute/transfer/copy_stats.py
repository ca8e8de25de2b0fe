"""Statistics of copies to devices: their size, speed, and overlap with computation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import RLock
from typing import Any, Final

# The number of latest copies whose times are recorded.
_MOST_TIMED: Final = 256

# Returns the bytes of a copy, its duration in seconds, and the seconds for which the consumer waited; None until it is
# over.
Times = Callable[[], tuple[int, float, float] | None]


@dataclass
class CopyStats:
    """Sums over copies to devices.

    Parameters
    ----------
    num_bytes
        The bytes of all copies that were started.
    timed_bytes, copy_s, waited_s
        For the copies known to be over: their bytes, their duration, and the part of it that the consumer waited.
    num_stalls, stall_s
        The number and duration of waits on the host because nothing was ready.
    num_grown
        The number of times more memory was allocated because the consumer kept chunks.
    is_shrunk
        Whether a device ran out of memory, so that less is copied ahead.
    """

    num_bytes: int = 0
    timed_bytes: int = 0
    copy_s: float = 0.0
    waited_s: float = 0.0
    num_stalls: int = 0
    stall_s: float = 0.0
    num_grown: int = 0
    is_shrunk: bool = False

    @classmethod
    def of(cls, parts: Iterable[CopyStats]) -> CopyStats:
        """Return the sums of several statistics."""
        total = cls()
        for part in parts:
            for field in fields(cls):
                setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
        total.is_shrunk = bool(total.is_shrunk)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as users see them.

        Returns
        -------
        dict
            ``num_bytes`` copied to devices; ``copy_s`` and ``gb_per_s``, the duration and speed of the copies that are
            over; ``overlap``, the share of that time in which the program did not wait; ``num_stalls`` and ``stall_s``,
            the number and duration of waits because nothing was ready; ``num_grown``, the number of times more memory
            was allocated because the program kept chunks; ``is_shrunk``, whether a device ran out of memory, so that
            less is copied ahead.
        """
        return {
            "num_bytes": self.num_bytes,
            "copy_s": self.copy_s,
            "gb_per_s": self.timed_bytes / self.copy_s / 1e9 if self.copy_s else 0.0,
            "overlap": 1 - self.waited_s / self.copy_s if self.copy_s else 1.0,
            "num_stalls": self.num_stalls,
            "stall_s": self.stall_s,
            "num_grown": self.num_grown,
            "is_shrunk": self.is_shrunk,
        }


class CopyTimer:
    """A thread-safe collector of statistics, which adds the times of copies once they are over."""

    def __init__(self) -> None:
        self._stats = CopyStats()
        self._timed: deque[Times] = deque(maxlen=_MOST_TIMED)
        self._lock = RLock()

    def add_bytes(self, num_bytes: int) -> None:
        """Record that copies of this size were started."""
        with self._lock:
            self._stats.num_bytes += num_bytes

    def add_times(self, times: Iterable[Times]) -> None:
        """Record copies whose consumer has arrived."""
        self._timed.extend(times)
        self._sum_up()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Record the duration of this context as a wait on the host."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add_stall(time.perf_counter() - start_s)

    def add_stall(self, stall_s: float) -> None:
        """Record a wait on the host."""
        with self._lock:
            self._stats.num_stalls += 1
            self._stats.stall_s += stall_s

    def note_growth(self) -> None:
        """Record that more memory is in use than for the current unit and the units ahead."""
        with self._lock:
            self._stats.num_grown += 1

    def note_shrinkage(self) -> None:
        """Record that less is copied ahead than intended."""
        self._stats.is_shrunk = True

    def stats(self) -> CopyStats:
        """Return the sums so far."""
        self._sum_up()
        with self._lock:
            return CopyStats.of([self._stats])

    def _sum_up(self) -> None:
        # The lock lets one of several threads at a time take finished copies from the queue.
        stats, timed = self._stats, self._timed
        with self._lock:
            while timed and (times := timed[0]()) is not None:
                timed.popleft()
                num_bytes, copy_s, waited_s = times
                stats.timed_bytes += num_bytes
                stats.copy_s += copy_s
                stats.waited_s += waited_s
