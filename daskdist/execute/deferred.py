"""What will come of calls that are noted: handles of results that are on their way to a cluster with others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from distributed import Future

from daskdist.errors import ClusterError

if TYPE_CHECKING:
    from daskdist.execute.noting import Group


class Noted:
    """A call that was noted, on all its lanes."""

    __slots__ = ("__weakref__", "depth", "error", "group", "place", "tasks", "values")

    def __init__(self, group: Group, place: int) -> None:
        # Until it is sent, the calls it will be one of; then the tasks those are, one a lane.
        self.group: Group | None = group
        self.tasks: tuple[SentTask, ...] = ()
        # The number of the call in its task; None where the task gives the value itself.
        self.place: int | None = place
        # Why it could not be sent.
        self.error: BaseException | None = None
        # About how many tasks Dask keeps note of for as long as it is there: those it is made of.
        self.depth = 0
        # By lane, what it gave, where that came here along with something else.
        self.values: dict[int, Any] = {}

    def task(self, lane: int) -> SentTask:
        """The task it is a call of."""
        if not self.tasks:
            raise self.error or ClusterError("this was never sent to the cluster")
        return self.tasks[lane]


class Deferred:
    """What a call will give on one lane, which goes to the cluster with others."""

    __slots__ = ("lane", "noted")

    def __init__(self, noted: Noted, lane: int = 0) -> None:
        self.noted = noted
        self.lane = lane

    @property
    def task(self) -> SentTask:
        """The task it comes of."""
        return self.noted.task(self.lane)

    @property
    def future(self) -> Future:
        """The future of its task."""
        return self.task.future


class Results(Sequence[Deferred]):
    """What a call will give, by lane."""

    __slots__ = ("_found", "_size", "noted")

    def __init__(self, noted: Noted, size: int) -> None:
        self.noted = noted
        self._size = size
        # Not kept by what is noted: that goes when nobody has a result of it any more.
        self._found: tuple[Deferred, ...] | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, lane: Any) -> Any:
        if self._found is None:
            self._found = tuple([Deferred(self.noted, each) for each in range(self._size)])
        return self._found[lane]


# Either of them.
NOTED: Final = frozenset({Deferred, Results})


@dataclass(frozen=True)
class SentTask:
    """A task that was sent.

    Parameters
    ----------
    future
        Of its `Outputs`.
    worker
        The address of the worker it is to run on; None for any.
    calls
        What was noted of each of its calls, for as long as somebody has a result of it.
    num_outputs
        The calls whose results are kept.
    """

    future: Future
    worker: str | None = None
    calls: Sequence[weakref.ref[Noted]] = ()
    num_outputs: int = 1
