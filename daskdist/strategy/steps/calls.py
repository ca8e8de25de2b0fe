"""Handles of calls that were sent to workers, and of their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distributed import Future

from daskdist.strategy.steps.outcomes import Failed


class Record:
    """A call that was sent, as the program knows it.

    Parameters
    ----------
    number
        Its number, in the program's order.
    workers
        For each of its results the address of the worker that makes it.
    needs
        What has to stay until the call is over: its arguments.
    name
        Its name.
    is_step
        Whether it is a call of `run`.
    kind
        The same for calls that do the same with other values, whose results any worker could compute; None for others.
    """

    __slots__ = (
        "again",
        "holders",
        "is_dropped",
        "is_replicated",
        "is_shared",
        "is_step",
        "kind",
        "name",
        "needs",
        "num_left",
        "number",
        "outcomes",
        "told_with",
        "workers",
    )

    def __init__(
        self,
        number: int,
        workers: Sequence[str],
        needs: Any,
        name: str,
        *,
        is_step: bool,
        kind: Any = None,
    ) -> None:
        self.number = number
        self.workers = workers
        self.needs = needs
        self.name = name
        self.is_step = is_step
        self.kind = kind
        # Whether all results are the same, each worker having computed its own.
        self.is_replicated = kind is not None and len(workers) > 1
        # Whether a worker other than the first needed a result that is the same for all.
        self.is_shared = False
        # For each result the number of its structure and what came of it; None until the call is over.
        self.outcomes: list[tuple[Any, Any] | None] = [None] * len(workers)
        self.num_left = len(workers)
        # The workers that have a result of it, or will have one; more than `workers` where one was passed on.
        self.holders: set[str] = set(workers)
        self.is_dropped = False
        # Of a call that was given a result of this one, and failed: the number of the call whose error it has.
        self.told_with: int | None = None
        # Makes the call again on another worker, where nothing of it is lost for good.
        self.again: Callable[[], Result] | None = None

    def failures(self) -> list[Failed]:
        """Return the failures of its results, one for each call that raised."""
        found = {each[1].origin: each[1] for each in self.outcomes if each is not None and type(each[1]) is Failed}
        return list(found.values())


class Call(Sequence["Result"]):
    """The handle of a call: as long as somebody has it, workers keep its results."""

    __slots__ = ("_dropped", "passed_on", "record", "streams")

    def __init__(self, record: Record, dropped: deque[Record], streams: Callable[[], Any]) -> None:
        self.record = record
        # A weak reference to the streams it was sent by.
        self.streams = streams
        self._dropped = dropped
        # Results that were sent on to other workers, with those.
        self.passed_on: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return len(self.record.outcomes)

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self.record.outcomes):
            raise IndexError(place)
        return Result(self, place)

    def __iter__(self) -> Iterator[Result]:
        return iter([Result(self, place) for place in range(len(self.record.outcomes))])

    def __del__(self) -> None:
        self._dropped.append(self.record)


class Result:
    """The handle of one result of a call.

    Parameters
    ----------
    call
        The call.
    place
        Which of its results it is.
    """

    __slots__ = ("call", "place")

    def __init__(self, call: Call, place: int) -> None:
        self.call = call
        self.place = place

    @property
    def worker(self) -> str:
        """The address of the worker that makes it."""
        return self.call.record.workers[self.place]

    @property
    def is_over(self) -> bool:
        """Return whether the call is over for it."""
        return self.call.record.outcomes[self.place] is not None


def futures_in(needs: Any) -> list[Future]:
    """Return the results of Dask's tasks that a call needs."""
    return [
        part for each in needs or () for part in (each if type(each) is tuple else (each,)) if isinstance(part, Future)
    ]


def records_in(needs: Any) -> list[Record]:
    """Return the records of the calls whose results a call needs."""
    calls = []
    for each in needs or ():
        if type(each) is Call:
            calls.append(each)
        else:
            calls += [part.call for part in (each if type(each) is tuple else (each,)) if type(part) is Result]
    return [each.record for each in calls]
