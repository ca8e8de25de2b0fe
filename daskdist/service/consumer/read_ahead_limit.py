"""The limit on the elements that a local pipeline takes ahead of its program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# A pipeline takes this many elements ahead of its program, or what the program uses in this time if that is more.
LEAST_AHEAD: Final = 4
MOMENT_S: Final = 0.01
# At most this many times the elements that it just used, or that were on their way: the time of a few says little.
_GROWTH: Final = 2
_GROWTH_ON_THE_WAY: Final = 4
# This many elements may be on their way from workers, or what the program uses in this time if that is more.
LEAST_ON_THE_WAY: Final = 8
_ON_THE_WAY_S: Final = 0.2
# A consumer asks again when it has used a part of so many of what may be on its way.
PARTS_ON_THE_WAY: Final = 4


class ReadAheadLimit:
    """A limit on the elements a pipeline takes ahead: they are lost to other consumers when its iterator is closed.

    Parameters
    ----------
    most
        The largest number of elements to take at a time; None for no limit.
    clock
        Returns the time, in seconds.
    """

    def __init__(self, most: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = most
        self._clock = clock
        self._moment = LEAST_AHEAD
        self._on_the_way = LEAST_ON_THE_WAY
        # Since the program last waited for an element: the numbers of elements taken, and taken ahead; and the times of
        # the end and of the beginning of that wait.
        self._num_taken = self._num_ahead = 0
        self._began_at = self._waits_at = clock()

    def waits(self) -> None:
        """Record that the program waits for the next element, so it has used all that were taken."""
        now = self._clock()
        used_s, since_wait_s = now - self._began_at, now - self._waits_at
        self._waits_at = now
        self._moment = LEAST_AHEAD
        if self._num_taken:
            used_in_moment = int(self._num_taken * MOMENT_S / max(used_s, 1e-6))
            self._moment = max(min(used_in_moment, _GROWTH * self._num_taken), LEAST_AHEAD)
            # Where few of those on the way arrive at a time, the program uses no more than what is produced.
            is_limit = self._num_taken * PARTS_ON_THE_WAY >= self._on_the_way
            used_meanwhile = int(self._num_taken * _ON_THE_WAY_S / max(used_s if is_limit else since_wait_s, 1e-6))
            self._on_the_way = max(min(used_meanwhile, _GROWTH_ON_THE_WAY * self._on_the_way), LEAST_ON_THE_WAY)
        self._num_taken = self._num_ahead = 0

    @property
    def on_the_way(self) -> int:
        """The number of elements that may be on their way from workers, or here and unused."""
        return self._on_the_way if self._most is None else self._most

    def allowed(self, *, wait: bool) -> int:
        """Return how many elements may be taken now."""
        allowed = self._moment if wait else self._moment - self._num_ahead
        return allowed if self._most is None else min(allowed, self._most)

    def took(self, num_elements: int, *, wait: bool) -> None:
        """Record that elements were taken."""
        if wait:
            self._began_at = self._clock()
        else:
            self._num_ahead += num_elements
        self._num_taken += num_elements
