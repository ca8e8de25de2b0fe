"""The steps of one replica, and the time in them and in waiting for their input."""

from __future__ import annotations

from time import monotonic
from typing import Any

_RESTING, _WAITING, _WORKING = range(3)
Totals = tuple[int, int, float, float]


class ReplicaTimes:
    """The numbers of steps and rows of one replica, and the seconds in steps and in waiting for their input.

    The replica's thread records its activity; any thread may read the totals.
    """

    __slots__ = ("_num_rows", "_num_steps", "_seconds", "_since")

    def __init__(self) -> None:
        self._num_steps = self._num_rows = 0
        # The seconds of each activity that is over.
        self._seconds = [0.0, 0.0, 0.0]
        # The current activity, and its beginning.
        self._since = _RESTING, monotonic()

    def wait(self) -> None:
        """Record that the replica waits for input."""
        self._begin(_WAITING)

    def work(self) -> None:
        """Record that the replica is in a step, or in another call of the program."""
        self._begin(_WORKING)

    def rest(self) -> None:
        """Record that the replica has nothing to do."""
        self._begin(_RESTING)

    def _begin(self, activity: int) -> None:
        now = monotonic()
        before, since = self._since
        self._since = activity, now
        self._seconds[before] += now - since

    def count(self, batch: Any) -> None:
        """Count a step, and the rows of its batch; None if it has no part of a dataset."""
        self._num_steps += 1
        self._num_rows += 0 if batch is None else rows_in(batch)

    def totals(self) -> Totals:
        """Return the steps, the rows, and the seconds in steps and in waiting for input, until now."""
        activity, since = self._since
        _, waiting_s, working_s = self._seconds
        so_far = monotonic() - since
        working_s += so_far * (activity == _WORKING)
        return self._num_steps, self._num_rows, working_s, waiting_s + so_far * (activity == _WAITING)


def rows_in(element: Any) -> int:
    """Return the number of rows of a batch: the first length of its first array."""
    while not hasattr(element, "shape"):
        if not isinstance(element, (tuple, list, dict)) or not element:
            return 1
        element = next(iter(element.values() if isinstance(element, dict) else element))
    shape = element.shape
    return shape[0] if shape and type(shape[0]) is int else 1
