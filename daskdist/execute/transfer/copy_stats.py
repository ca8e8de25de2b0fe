"""What came of copies to devices: how much, how fast, and how much of it nobody waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import RLock
from typing import Any, Final

# Copies that are over or not; of more the times are not told.
_MOST_TIMED: Final = 256

# Gives the bytes of a copy, its seconds, and those of them in which somebody waited; None until it is over.
Times = Callable[[], tuple[int, float, float] | None]


@dataclass
class CopyStats:
    """Sums.

    Parameters
    ----------
    num_bytes
        That were copied.
    timed_bytes, copy_s, waited_s
        Of the copies that are known to be over: bytes, how long they took, and how long of that somebody waited.
    num_stalls, stall_s
        How often, and how long, somebody waited on the host because nothing was ready.
    num_grown
        How often memory was taken beyond what is ahead, as chunks were kept.
    is_shrunk
        Whether a device had no memory, so that less is copied ahead.
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
    def of(cls, all_of_them: Iterable[CopyStats]) -> CopyStats:
        """The sums of several."""
        found = cls()
        for each in all_of_them:
            for field in fields(cls):
                setattr(found, field.name, getattr(found, field.name) + getattr(each, field.name))
        found.is_shrunk = bool(found.is_shrunk)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as users see them.

        Returns
        -------
        dict
            ``num_bytes`` copied to devices; ``copy_s``, how long those copies took that are over, and ``gb_per_s``,
            how fast they were; ``overlap``, the share of that time in which nobody waited for them; ``num_stalls`` and
            ``stall_s``, how often and how long the program waited because nothing was ready; ``num_grown``, how often
            memory was taken beyond what is ahead, as chunks were kept; ``is_shrunk``, whether a device had no memory,
            so that less is copied ahead.
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
    """Adds figures up, as copies are over; from any thread."""

    def __init__(self) -> None:
        self._figures = CopyStats()
        self._timed: deque[Times] = deque(maxlen=_MOST_TIMED)
        self._turn = RLock()

    def copied(self, num_bytes: int) -> None:
        """Note that so much is on its way."""
        with self._turn:
            self._figures.num_bytes += num_bytes

    def asked(self, times: Iterable[Times]) -> None:
        """Note copies that somebody has come for."""
        self._timed.extend(times)
        self._sum_up()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Note that somebody waits on the host for as long as this takes."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited(time.perf_counter() - begun_s)

    def waited(self, stall_s: float) -> None:
        """Note that somebody did."""
        with self._turn:
            self._figures.num_stalls += 1
            self._figures.stall_s += stall_s

    def grown(self) -> None:
        """Note that there is more than is ahead and in use."""
        with self._turn:
            self._figures.num_grown += 1

    def shrunk(self) -> None:
        """Note that less is ahead than should be."""
        self._figures.is_shrunk = True

    def stats(self) -> CopyStats:
        """Return the sums so far."""
        self._sum_up()
        with self._turn:
            return CopyStats.of([self._figures])

    def _sum_up(self) -> None:
        # Of several threads that ask, one at a time.
        figures, timed = self._figures, self._timed
        with self._turn:
            while timed and (times := timed[0]()) is not None:
                timed.popleft()
                num_bytes, copy_s, waited_s = times
                figures.timed_bytes += num_bytes
                figures.copy_s += copy_s
                figures.waited_s += waited_s
