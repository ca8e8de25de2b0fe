"""A limit of the threads that call a function row by row at the same time, chosen by measuring.

Python runs in one thread at a time. A function that runs Python for most of its time gains nothing from a second
thread; one that often gives other threads a turn for a few microseconds, as the decoders of small images do, becomes
slower by it, because threads then wait for each other at each call. One that waits, or computes outside of Python for
long, becomes faster. Which it is cannot be told from the code, so that some of the rows are computed either way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any, Final

# A phase of a comparison takes at least so long, and so many pieces of the loop. Pieces that are not done at its end,
# such as those of a thread that waits for Python, are not counted: in a short one that makes many threads look faster.
_PHASE_S: Final = 0.08
_PHASE_PIECES: Final = 3
# Phases of each of both limits that are compared.
_NUM_PAIRS: Final = 5
# How long the outcome of a comparison holds: at first, and at most.
_FIRST_HOLD_S: Final = 4.0
_LONGEST_HOLD_S: Final = 60.0
# More threads are taken where they give so much more: they take processor time from others.
_GAIN: Final = 1.1
# A piece of a loop takes about so long.
_PIECE_S: Final = 0.002
_MOST_ROWS: Final = 4096
# Threads that wait for their turn go on when no other has finished a piece for so long: they may be waited for.
_PATIENCE_S: Final = 1.0


class LimitChooser:
    """The choice of a limit, by what pieces of loops took under different limits.

    It knows no clock and no thread. `limit` is what counts at the moment; in a comparison that is in turns one limit
    and the other.

    Parameters
    ----------
    num_threads
        The number of threads there are, two or more; as a limit, that is the same as none.
    """

    def __init__(self, num_threads: int) -> None:
        powers: list[int] = [1 << k for k in range(num_threads.bit_length())]
        self._levels = [*(power for power in powers if power < num_threads), num_threads]
        self._chosen = len(self._levels) - 1
        self._other: int | None = None
        self._is_up = True
        # Raised with each change of the limit: pieces that began before it tell nothing.
        self.phase = 0
        self._rates: tuple[list[float], list[float]] = [], []
        self._num_rows = self._num_pieces = 0
        self._seconds = 0.0
        self._hold_s = _FIRST_HOLD_S
        # First all threads against one.
        self._begin(0)

    @property
    def limit(self) -> int:
        """Return the number of threads that may call the function now."""
        return self._levels[self._chosen if self._other is None or self.phase % 2 == 0 else self._other]

    @property
    def chosen(self) -> int:
        """The limit that was the best so far."""
        return self._levels[self._chosen]

    def note(self, num_rows: int, seconds: float, num_running: int) -> None:
        """Note what a piece of a loop took.

        Parameters
        ----------
        num_rows
            The rows of the piece.
        seconds
            The time it took its thread.
        num_running
            The number of threads that called the function in that time.
        """
        self._num_rows += num_rows
        self._num_pieces += 1
        # Each thread stands for a share of the time that went by.
        self._seconds += seconds / num_running
        if self._other is None:
            if self._seconds >= self._hold_s:
                self._begin(self._neighbour())
        elif self._seconds >= _PHASE_S and self._num_pieces >= _PHASE_PIECES * self.limit:
            self._rates[self.phase % 2].append(self._num_rows / max(self._seconds, 1e-9))
            self._next_phase()
            if len(self._rates[1]) == _NUM_PAIRS:
                self._decide(self._other)

    def _neighbour(self) -> int:
        self._is_up = not self._is_up
        places = [self._chosen + 1, self._chosen - 1] if self._is_up else [self._chosen - 1, self._chosen + 1]
        return next(place for place in places if 0 <= place < len(self._levels))

    def _begin(self, other: int) -> None:
        self._other = other
        self._rates = [], []
        self._next_phase()
        # The chosen one is first.
        self.phase += self.phase % 2

    def _next_phase(self) -> None:
        self.phase += 1
        self._num_rows = self._num_pieces = 0
        self._seconds = 0.0

    def _decide(self, compared: int) -> None:
        ratio = median(other / chosen for chosen, other in zip(*self._rates, strict=True))
        gain = ratio if compared > self._chosen else 1 / max(ratio, 1e-9)
        fewer, more = sorted((compared, self._chosen))
        best = more if gain > _GAIN else fewer
        self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S) if best == self._chosen else _FIRST_HOLD_S
        self._chosen, self._other = best, None
        self._next_phase()


class LoopLimit:
    """The threads of pools that call one function row by row, held to the limit that proves the fastest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chooser: LimitChooser | None = None
        self._waiting: deque[object] = deque()
        self._num_running = 0
        self._num_pieces = 0
        self._piece_rows = 1
        self._is_off = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Of another process it tells nothing.
        return LoopLimit, ()

    @contextmanager
    def loop(self, elements: Iterable[Any], num_rows: int) -> Iterator[Iterable[Any]]:
        """Give the elements that the function is to be called with, a turn at a time.

        Outside of the threads of a pool, and where that has one only, they are given as they are.

        Parameters
        ----------
        elements
            The elements.
        num_rows
            How many there are.
        """
        num_threads = getattr(_pool, "num_threads", 1)
        if num_threads < 2 or self._is_off:
            yield elements
            return
        with self._changed:
            if self._chooser is None:
                self._chooser = LimitChooser(num_threads)
            chooser = self._chooser
            self._wait(chooser)
        try:
            yield self._pieces(iter(elements), num_rows, chooser)
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _pieces(self, elements: Iterator[Any], num_rows: int, chooser: LimitChooser) -> Iterator[Any]:
        while num_rows > 0:
            piece_rows, num_running, phase = min(self._piece_rows, num_rows), self._num_running, chooser.phase
            start = perf_counter()
            yield from islice(elements, piece_rows)
            seconds = perf_counter() - start
            num_rows -= piece_rows
            self._piece_rows = _next_rows(piece_rows, seconds)
            with self._changed:
                self._num_pieces += 1
                if num_running == self._num_running and phase == chooser.phase:
                    chooser.note(piece_rows, seconds, num_running)
                    if phase != chooser.phase:
                        self._changed.notify_all()
                if num_rows > 0 and self._num_running > chooser.limit:
                    # Those that come later wait longer.
                    self._num_running -= 1
                    self._wait(chooser, is_first=True)

    def _wait(self, chooser: LimitChooser, *, is_first: bool = False) -> None:
        # Called with the lock; afterwards this thread is one that runs.
        ticket = object()
        if is_first:
            self._waiting.appendleft(ticket)
        else:
            self._waiting.append(ticket)
        try:
            while not self._is_off and not (self._waiting[0] is ticket and self._num_running < chooser.limit):
                num_pieces = self._num_pieces
                if not self._changed.wait(_PATIENCE_S) and num_pieces == self._num_pieces:
                    # Whoever runs may wait for this one, or takes so long for a row that turns do not matter.
                    self._is_off = True
                    self._changed.notify_all()
        finally:
            self._waiting.remove(ticket)
            self._num_running += 1
            self._changed.notify_all()


def _next_rows(num_rows: int, seconds: float) -> int:
    # Of the next piece, by the one before.
    fitting = int(num_rows * _PIECE_S / max(seconds, 1e-9))
    return max(1, min(fitting, 2 * num_rows, _MOST_ROWS))


_pool: Final = threading.local()


def enter_pool(num_threads: int) -> None:
    """Note that this thread is one of so many that make the calls of a pipeline."""
    _pool.num_threads = num_threads
