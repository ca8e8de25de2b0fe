"""The contract of callers, which make the calls that an interpreter requests.

An interpreter decides which function to call, on which blocks and near which worker. A caller makes the call and
returns a **handle**, which stands for the result and can be an argument of further calls.

====================  ==========================================  =================================
caller                makes a call                                a handle is
====================  ==========================================  =================================
`Synchronous`         at once, in this thread                     the result
`Threads`             on a bounded pool of this process           a future of the pool
`Processes`           in local processes, for functions           a future of the pool
`graph.RecordCaller`  never: writes a Dask task                   a reference to the task
`submit.Submit`       on a Dask cluster, at once                  a Dask future
`NeverRun`            never: raises                               —
====================  ==========================================  =================================
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from daskdist.core.block import Rows
from daskdist.core.failing.failed_element import FAILED
from daskdist.core.failing.origin import Skipped
from daskdist.core.primitive import Read, Split
from daskdist.core.structure import Nested
from daskdist.errors import StackError
from daskdist.execute.task_times import TaskTimes

Handle = Any
Graph = dict[Any, Any]
# Returns the function and the arguments of a call that is made again; None if it cannot be.
CallAgain = Callable[[], tuple[Any, ...] | None]
# Returns the workers that already have the data of a split.
SplitLocations = Callable[[Split], Sequence[str]]
MIB = 2**20


@dataclass(frozen=True)
class Report:
    """Facts about the block that a finished call returned.

    Parameters
    ----------
    num_rows
        The number of elements.
    nbytes
        The size in memory.
    skipped
        Elements that were left out while the block was computed.
    seconds
        The time that computing the elements took, if it was measured and is known to this process.
    """

    num_rows: int
    nbytes: int
    skipped: tuple[Skipped, ...] = ()
    seconds: float | None = None


# The seconds that `Timed` measured, by its result.
_SECONDS: Final[WeakKeyDictionary[Any, float]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Timed:
    """A function that returns rows, with its time measured for `report_of`."""

    function: Callable[..., Rows]

    def __call__(self, *args: Any) -> Rows:
        begun_at = perf_counter()
        rows = self.function(*args)
        _SECONDS[rows] = perf_counter() - begun_at
        return rows


def report_of(rows: Rows) -> Report:
    """Return the report on a block."""
    return Report(len(rows), rows.nbytes, rows.skipped, _SECONDS.get(rows))


def lengths_of(blocks: Sequence[Rows]) -> tuple[int, ...]:
    """Return for each element of a block the length of its longest leaf along axis 0, or 1 if it has no leaf.

    That of an element which failed is `FAILED`.
    """
    (rows,) = blocks
    return tuple([_length_of(rows, index) for index in range(len(rows))])


def _length_of(rows: Rows, index: int) -> int:
    if rows.failed_at(index) is not None:
        return FAILED
    try:
        shapes = [() if isinstance(leaf, Nested) else leaf.shape for leaf in rows.item(index)]
    except StackError:
        # A batch that is a view of its block is stacked here.
        return FAILED
    return max((shape[0] if shape else 1 for shape in shapes), default=1)


class Caller(Protocol):
    """An object that makes calls and returns handles; the module docstring lists the kinds."""

    # The number of calls to keep running besides the one that is waited for.
    num_ahead: int
    # Upper limits on the size of a bundle.
    bundle_bytes: int
    bundle_chunks: int
    # True if extra calls are worth making to free memory early.
    compacts: bool
    # True if a report needs no separate call.
    reports_freely: bool
    # True if divisible splits are divided, so that the first elements arrive soon.
    divides: bool
    # True if sources ``by_row`` are read only by the calls that need some of their rows.
    reads_by_row: bool
    # An identifier shared by callers that can use each other's handles; None if handles are of no use later.
    home: Hashable | None

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit of the worker with the least memory; None without a limit."""
        ...

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        worker: str | None = None,
        is_pinned: bool = False,
        is_cheap: bool = False,
        is_costly: bool = True,
        again: CallAgain | None = None,
        name: str,
    ) -> Handle:
        """Call ``function(results of the handles, *args)``.

        Parameters
        ----------
        function, handles, args
            The function, and the arguments that it is called with.
        worker
            The worker to make the call on, if possible.
        is_pinned
            Whether no other worker may make it.
        is_cheap
            Whether the call only makes views or copies a few rows, so that handing it to another thread would cost
            more than the call itself.
        is_costly
            Whether the call may take longer than sending its arguments and its result to another process and back.
        again
            Returns the call that is made instead, with as many arguments, if the result is lost with the scheduler of a
            cluster; it is the same call if this is None.
        name
            The name of the task.
        """
        ...

    def source(
        self,
        function: Callable[..., Rows],
        *args: Any,
        worker: str | None = None,
        by_row: bool = False,
        name: str,
    ) -> Handle:
        """Call ``function(*args)``.

        With ``by_row``, the argument is a split of splits of a row each, which the function reads in any groups.
        """
        ...

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        """Return a handle of the value of a key of a Dask graph."""
        ...

    def split_locations(self, read: Read) -> SplitLocations | None:
        """Return a function from a split of a source to the workers that have its data; None if nothing is known."""
        ...

    def kept_handle(self, read: Read, split: Split, worker: str | None = None) -> Handle | None:
        """Return a handle of the payload of a source's only split, if that is kept for all passes.

        Returns
        -------
        handle
            The payload, placed on ``worker`` if it is not on the cluster yet; None if the payload is passed again to
            each call that needs it.
        """
        ...

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        """Call ``take()`` at once in this thread; exceptions propagate."""
        ...

    def is_done(self, handle: Handle) -> bool:
        """Return whether a result is available."""
        ...

    def wait_for_one(self, handles: Sequence[Handle]) -> None:
        """Wait until one of several results is available."""
        ...

    def raise_given_up(self) -> None:
        """Raise the error of a call that is not made again, since workers were lost each time that it was made."""
        ...

    def report(self, handle: Handle, *, wait: bool) -> Report | None:
        """Return the report on a result; None if it is not available yet and ``wait`` is False."""
        ...

    def result(self, handle: Handle) -> Any:
        """Wait for a result and return it."""
        ...

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Wait for several results and return them, fetched together."""
        ...

    def close(self) -> None:
        """Drop the calls that are running; no call is made afterwards."""
        ...


class LocalCaller:
    """The base of callers without a cluster: they know no locations of data, and keep no blocks.

    It measures how long calls take. Unless a subclass says otherwise, results are there at once, or never waited for.
    """

    num_ahead = 0
    bundle_bytes = 4 * MIB
    bundle_chunks = 64
    compacts = True
    reports_freely = True
    divides = True
    reads_by_row = False
    home: Hashable | None = None
    memory_bytes: int | None = None

    def __init__(self) -> None:
        self.busy = TaskTimes()

    def timed(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` and record the time that it takes."""
        begun_at = perf_counter()
        try:
            return function(*args)
        finally:
            self.busy.add(name, begun_at)

    def split_locations(self, read: Read) -> SplitLocations | None:
        return None

    def kept_handle(self, read: Read, split: Split, worker: str | None = None) -> Handle | None:
        return None

    def is_done(self, handle: Handle) -> bool:
        return True

    def wait_for_one(self, handles: Sequence[Handle]) -> None:
        pass

    def raise_given_up(self) -> None:
        pass

    def result(self, handle: Handle) -> Any:
        return handle

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        return list(map(self.result, handles))

    def close(self) -> None:
        pass


class WritingStrategy(Protocol):
    """A strategy whose workers write a dataset."""

    @property
    def workers(self) -> tuple[str | None, ...]:
        """The address of each worker; ``(None,)`` for this process."""
        ...

    def _reader(self, dataset: Any) -> Caller:
        """Return a caller for one pass over a dataset, closed with the pass."""
        ...
