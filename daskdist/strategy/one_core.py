"""Threads that hardly do more than wait for one another, on one core.

Threads of one interpreter take turns anyway. On two cores each turn has to wake a core that fell asleep, which on a
virtual machine costs the one who wakes it 35 us, and 45 to 80 us pass until the other runs; on one core a turn is a
switch of some 5 us.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, Final

# What a turn gains on one core.
_GAIN_S: Final = 50e-6
# A thread that is awake for longer between two turns may have work for a core of its own.
_AWAKE_S: Final = 300e-6
# One that waits for longer waits for work, or for a core that has other things to do.
_WAIT_S: Final = 1e-3
# How long threads that have work again stay on one core, until the system spreads them.
_SPREAD_S: Final = 4e-3


class Turns:
    """How one thread waits for its turn, again and again."""

    def __init__(self) -> None:
        # What one core would have gained by now, but for the time that a second one is good for.
        self._gain_s = 0.0
        self._awake_since = 0.0
        self._cores: set[int] = set()
        self._one: set[int] = set()

    def wait(self, gate: Any, timeout_s: float) -> None:
        """Take a lock that another thread lets go of, or wait for so long.

        Where turns are quick and many, the thread wakes up on the core that all threads of the process then wake up on,
        if the system lets threads choose. On which it may run while it is awake stays as it was.
        """
        since = time.perf_counter()
        awake_s = since - self._awake_since
        if self._gain_s < _SPREAD_S or not self._acquire_on_one_core(gate, timeout_s):
            gate.acquire(timeout=timeout_s)
        self._awake_since = time.perf_counter()
        lost_s = max(awake_s - _AWAKE_S, 0) + max(self._awake_since - since - _WAIT_S, 0)
        self._gain_s = min(max(self._gain_s + _GAIN_S - lost_s, 0), 2 * _SPREAD_S)

    def _acquire_on_one_core(self, gate: Any, timeout_s: float) -> bool:
        try:
            cores = os.sched_getaffinity(0)
            if cores != self._cores:
                # Another one in each process, as far as there are.
                self._cores, self._one = cores, {sorted(cores)[os.getpid() % len(cores)]}
            if cores == self._one:
                return False
            os.sched_setaffinity(0, self._one)
        except (AttributeError, OSError):
            return False
        try:
            gate.acquire(timeout=timeout_s)
        finally:
            # Cores that were taken from the process meanwhile are none to go back to.
            with suppress(OSError):
                os.sched_setaffinity(0, cores)
        return True
