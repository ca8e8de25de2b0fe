"""A measured limit on the threads of a pool that call a function row by row at the same time.

Python runs in one thread at a time. A function that mostly runs Python gains nothing from a second thread. One that
often releases the interpreter for a few microseconds, such as decoders of small images, becomes slower, because threads
then wait for each other at each call, including threads that read the next rows. One that waits, or computes outside of
Python for long, becomes faster. The code does not show which. So one thread works at first, and more if alternating
measurements on some of the rows prove to be faster.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from itertools import chain, islice
from operator import length_hint
from time import perf_counter
from typing import Any, Final

# The least duration of a phase under one of two compared limits, and the least number of rows of each thread; it also
# lasts a whole call of each thread, with the work before and after its rows, or a part of a call if calls are long.
_PHASE_S: Final = 0.05
_PHASE_ROWS: Final = 4
_LONGEST_PHASE_S: Final = 2.0
# The least speedup for which more threads are used, as they take processor time from other work.
_GAIN: Final = 1.1
# The lead in pairs of phases that decides for more threads, and for fewer. Because of it noise seldom decides, least of
# all for more threads.
_LEAD_OF_MORE: Final = 3
_LEAD_OF_FEWER: Final = 2
# The seconds of running before the first comparison, and between two comparisons: at first, and at most.
_FIRST_REST_S: Final = 0.1
_REST_S: Final = 4.0
_LONGEST_REST_S: Final = 60.0
# The approximate duration of a piece of a loop; threads switch between pieces.
_PIECE_S: Final = 0.002
_MOST_ROWS: Final = 4096
# Waiting threads continue if no running one finished a piece for this time, as the running ones may wait for them.
_PATIENCE_S: Final = 1.0


class LimitChooser:
    """The choice of a limit by the speed of loops under different limits.

    It uses no clock and no thread. `limit` is the current limit; during a comparison it alternates between two: fewer,
    more, more, fewer, and so on, so that a gradual change of the speed favours neither.

    Parameters
    ----------
    num_threads
        The number of threads, at least two; a limit of that number is no limit.
    """

    def __init__(self, num_threads: int) -> None:
        powers = [1 << k for k in range(num_threads.bit_length())]
        self._levels = [*(power for power in powers if power < num_threads), num_threads]
        self._chosen = 0
        # First compare all threads with one.
        self._other = len(self._levels) - 1
        self._is_upwards = True
        # The seconds until the next comparison, and the seconds between comparisons.
        self._left_s, self._rest_s = _FIRST_REST_S, _REST_S
        self._is_comparing = False
        self._phase = 0
        self._rates: dict[int, float] = {}
        self._lead = 0
        self._clear()

    @property
    def limit(self) -> int:
        """Return the number of threads that may run now."""
        return self._levels[self._level if self._is_comparing else self._chosen]

    @property
    def chosen(self) -> int:
        """The best limit so far."""
        return self._levels[self._chosen]

    @property
    def _level(self) -> int:
        return sorted((self._chosen, self._other))[self._phase % 4 in (1, 2)]

    def note(self, num_rows: int, num_over: int, seconds: float, num_running: int, num_waiting: int) -> None:
        """Record the work done in a period in which the running threads did not change.

        Parameters
        ----------
        num_rows
            The number of rows of all threads.
        num_over
            The number of calls that ended with the period.
        seconds
            The duration of the period.
        num_running
            The number of threads that ran, at least one.
        num_waiting
            The number of threads that waited.
        """
        if not self._is_comparing:
            self._left_s -= seconds
            if self._left_s <= 0:
                self._is_comparing, self._phase, self._lead = True, 0, 0
                self._clear()
        elif num_running == min(self.limit, num_running + num_waiting):
            # Otherwise threads of the previous phase have yet to stop, or new ones to start.
            self._num_rows += num_rows
            self._num_over += num_over
            self._seconds += seconds
            is_whole = self._num_over >= num_running or self._seconds >= _LONGEST_PHASE_S
            if is_whole and self._seconds >= _PHASE_S and self._num_rows >= _PHASE_ROWS * num_running:
                self._end_phase()

    def give_up(self) -> None:
        """Let all threads run, for a longer time after each failure."""
        self._chosen = len(self._levels) - 1
        self._other = self._chosen - 1
        self._left_s = self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        self._is_comparing = False

    def _end_phase(self) -> None:
        self._rates[self._level] = self._num_rows / self._seconds
        self._clear()
        self._phase += 1
        if self._phase % 2 == 0:
            fewer, more = sorted(self._rates)
            self._lead += 1 if self._rates[more] > _GAIN * self._rates[fewer] else -1
            self._rates.clear()
            if self._lead in (_LEAD_OF_MORE, -_LEAD_OF_FEWER):
                self._decide(more if self._lead > 0 else fewer)

    def _clear(self) -> None:
        self._num_rows, self._num_over, self._seconds = 0, 0, 0.0

    def _decide(self, best: int) -> None:
        before, self._chosen = self._chosen, best
        is_same = best == before
        if is_same:
            self._is_upwards = not self._is_upwards
        elif best == len(self._levels) - 1:
            self._is_upwards = False
        step = 1 if self._is_upwards else -1
        self._other = best + step if 0 <= best + step < len(self._levels) else best - step
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S) if is_same else _REST_S
        # If the choice changed, a limit further in that direction may be better still.
        self._left_s = self._rest_s if is_same or self._other == before else 0.0
        self._is_comparing = False


class ThreadLimit:
    """A limiter of the threads that call one function row by row, which uses the fastest limit."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._chooser: LimitChooser | None = None
        self._running: list[_Call] = []
        self._waiting: deque[_Call] = deque()
        # The time and the number of rows at the last measurement, and the rows of calls that are not running.
        self._seen_s, self._seen_rows, self._num_rows = 0.0, 0, 0
        self._num_pieces = 0
        self._piece_rows = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Measurements do not apply to another process.
        return ThreadLimit, ()

    def loop(self, elements: Iterable[Any], num_rows: int) -> Iterable[Any]:
        """Return an iterable of the arguments of the function, which waits until it is this thread's turn.

        Outside of a pool's threads, or if the pool has one thread, the elements are returned unchanged.
        """
        call: _Call | None = getattr(_current, "call", None)
        if call is None or call.pool.num_threads < 2 or not num_rows:
            return elements
        limit = call.limit
        if limit is None:
            limit = call.limit = call.pool.limit or self
            limit.enter(call)
        return chain.from_iterable(limit.pieces(call, iter(elements), num_rows))

    def enter(self, call: _Call) -> None:
        """Wait until a call may continue."""
        with self.changed:
            self._chooser = self._chooser or LimitChooser(call.pool.num_threads)
            self._waiting.append(call)
            self._wait(call)

    def leave(self, call: _Call) -> None:
        """Record the end of a call, and let others continue."""
        with self.changed:
            self._look(num_over=1)
            self._stop(call)
            self.changed.notify_all()

    def pieces(self, call: _Call, elements: Iterator[Any], num_rows: int) -> Iterator[Iterator[Any]]:
        """Yield iterators over pieces of the elements; other calls may continue between pieces."""
        while num_rows > 0:
            piece_rows = min(self._piece_rows, num_rows)
            start = perf_counter()
            yield call.begin(list(islice(elements, piece_rows)))
            seconds = perf_counter() - start
            self._piece_rows = _next_rows(piece_rows, seconds)
            call.loop_s += seconds
            num_rows -= piece_rows
            with self.changed:
                self._num_pieces += 1
                self._look()
                if num_rows > 0 and len(self._running) > self._limit:
                    # Insert at the front, so that later calls wait longer.
                    self._stop(call)
                    self._waiting.appendleft(call)
                    self._wait(call)

    @property
    def _limit(self) -> int:
        return self._chooser.limit if self._chooser else 1

    def _look(self, *, num_over: int = 0) -> None:
        # Called with the lock held, before each change, and from time to time.
        now, num_rows = perf_counter(), self._num_rows + sum(call.num_rows for call in self._running)
        if self._running and self._chooser:
            before = self._limit
            seen = num_rows - self._seen_rows, num_over, now - self._seen_s
            self._chooser.note(*seen, len(self._running), len(self._waiting))
            if before < self._limit:
                self.changed.notify_all()
        self._seen_s, self._seen_rows = now, num_rows

    def _stop(self, call: _Call) -> None:
        self._running.remove(call)
        self._num_rows += call.num_rows

    def _wait(self, call: _Call) -> None:
        # Called with the lock held, by a waiting call, which is running afterwards.
        start = perf_counter()
        try:
            while not call.pool.is_closed and (self._waiting[0] is not call or len(self._running) >= self._limit):
                num_pieces = self._num_pieces
                if not self.changed.wait(_PATIENCE_S) and num_pieces == self._num_pieces:
                    # The running calls may wait for this one, or are so slow that the limit matters little.
                    if self._chooser:
                        self._chooser.give_up()
                    self.changed.notify_all()
        finally:
            self._look()
            self._waiting.remove(call)
            self._num_rows -= call.num_rows
            self._running.append(call)
            self.changed.notify_all()
            call.waiting_s += perf_counter() - start


def _next_rows(num_rows: int, seconds: float) -> int:
    # Return the number of rows of the next piece, by the duration of the previous one.
    fitting = int(num_rows * _PIECE_S / max(seconds, 1e-9))
    return max(1, min(fitting, 2 * num_rows, _MOST_ROWS))


class _Call:
    """A call in a thread of a pool with its progress, which other threads read."""

    def __init__(self, pool: LoopPool) -> None:
        self.pool = pool
        # The limit that applies to the call; None before its first loop.
        self.limit: ThreadLimit | None = None
        self.loop_s = self.waiting_s = 0.0
        self._num_rows = 0
        self._piece: Iterator[Any] = iter(())

    @property
    def num_rows(self) -> int:
        """The number of rows that functions were called with."""
        return self._num_rows - length_hint(self._piece)

    def begin(self, piece: list[Any]) -> Iterator[Any]:
        """Return an iterator over a piece."""
        self._num_rows += len(piece)
        self._piece = iter(piece)
        return self._piece


class LoopPool:
    """The state that the threads of a pool share."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        # The limit for whole calls, set if they consist mostly of loops: then their other work should not run beside a
        # loop either. Longer reads continue beside loops.
        self.limit: ThreadLimit | None = None
        self._loop_s = self._busy_s = 0.0
        self.is_closed = False

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` in a thread of the pool when it is its turn."""
        call, start = _Call(self), perf_counter()
        call.limit = self.limit
        if call.limit:
            call.limit.enter(call)
        _current.call = call
        try:
            if self.is_closed:
                raise CancelledError
            return function(*args)
        finally:
            _current.call = None
            # The traceback of an error refers to this frame, and the arguments may contain what will have the error.
            del args
            # A race between threads may lose the time of one call, which is harmless.
            self._busy_s += perf_counter() - start - call.waiting_s
            self._loop_s += call.loop_s
            if call.limit:
                self.limit = call.limit if self._loop_s > self._busy_s / 2 else None
                call.limit.leave(call)

    def close(self) -> None:
        """Cancel the calls that have not begun."""
        self.is_closed = True
        # A call that ends meanwhile sets the limit.
        limit = self.limit
        if limit is not None:
            with limit.changed:
                limit.changed.notify_all()


_current: Final = threading.local()
