"""The steps of one replica, and the time in them and in waiting for their input."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

_RESTING, _WAITING, _WORKING = range(3)
_AT_REST: Final = (_RESTING, 0.0)
Totals = tuple[int, int, float, float]


class ReplicaTimes:
    """The numbers of steps and rows of one replica, and the seconds in steps and in waiting for their input.

    The replica's thread records its activity; any thread may read the totals.
    """

    __slots__ = ("_num_rows", "_num_steps", "_since", "_waiting_s", "_working_s")

    def __init__(self) -> None:
        self._num_steps = self._num_rows = 0
        self._waiting_s = self._working_s = 0.0
        # The current activity, and its beginning.
        self._since = _AT_REST

    def wait(self) -> None:
        """Record that the replica waits for input."""
        now = monotonic()
        state, since = self._since
        if state == _WORKING:
            self._working_s += now - since
        self._since = _WAITING, now

    def work(self) -> None:
        """Record that the replica is in a step, or in another call of the program."""
        now = monotonic()
        state, since = self._since
        if state == _WAITING:
            self._waiting_s += now - since
        self._since = _WORKING, now

    def rest(self) -> None:
        """Record that the replica has nothing to do."""
        state, since = self._since
        self._since = _AT_REST
        if state == _WORKING:
            self._working_s += monotonic() - since
        elif state == _WAITING:
            self._waiting_s += monotonic() - since

    def count(self, batch: Any) -> None:
        """Count a step, and the rows of its batch; None if it has no part of a dataset."""
        self._num_steps += 1
        self._num_rows += 0 if batch is None else rows_in(batch)

    def totals(self) -> Totals:
        """Return the steps, the rows, and the seconds in steps and in waiting for input, until now."""
        state, since = self._since
        so_far = monotonic() - since
        working_s = self._working_s + so_far * (state == _WORKING)
        return self._num_steps, self._num_rows, working_s, self._waiting_s + so_far * (state == _WAITING)


def rows_in(element: Any) -> int:
    """Return the number of rows of a batch: the first length of its first array."""
    while not hasattr(element, "shape"):
        if not isinstance(element, (tuple, list, dict)) or not element:
            return 1
        element = next(iter(element.values() if isinstance(element, dict) else element))
    shape = element.shape
    return shape[0] if shape and type(shape[0]) is int else 1
