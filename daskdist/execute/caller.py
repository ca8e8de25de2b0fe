"""Callers: who makes the calls an interpreter asks for.

An interpreter says what is to be called, on which blocks and near which worker. A caller makes the call and
gives a **handle**, which stands for the result and can be an argument of further calls.

====================  ==========================================  =================================
caller                makes a call                                a handle is
====================  ==========================================  =================================
`Now`                 at once, in this thread                     the result
`Threads`             on a bounded pool of this process           a future of the pool
`graph.Record`        never: writes a Dask task                   a reference to the task
`submit.Submit`       on a Dask cluster, at once                  a Dask future
`NeverRun`            never: raises                               —
====================  ==========================================  =================================
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from daskdist.core.block import Rows
from daskdist.core.failures import FailedElement, failed_of, raw_item
from daskdist.core.origin import Skipped
from daskdist.core.primitive import Read, Split

Handle = Any
Graph = dict[Any, Any]
# Tells the workers that have the data of a split already.
SplitLocations = Callable[[Split], Sequence[str]]
MIB = 2**20


@dataclass(frozen=True)
class Report:
    """What a finished call says of its block.

    Parameters
    ----------
    num_rows
        Its elements.
    nbytes
        Its size in memory.
    skipped
        What was left out on the way to it.
    failed
        The elements that failed, each with its place.
    """

    num_rows: int
    nbytes: int
    skipped: tuple[Skipped, ...] = ()
    failed: tuple[tuple[int, FailedElement], ...] = ()


def report_of(rows: Rows) -> Report:
    """The report on a block."""
    return Report(len(rows), rows.nbytes, rows.skipped, failed_of(rows))


def lengths_of(blocks: Sequence[Rows]) -> tuple[int, ...]:
    """Of each element of a block, the length of its longest leaf along axis 0; 1 where it has none."""
    (rows,) = blocks
    items = (raw_item(rows, index) for index in range(len(rows)))
    # One that failed is told where it would be handed out.
    shapes = ([()] if isinstance(item, FailedElement) else [leaf.shape for leaf in item] for item in items)
    return tuple(max((shape[0] if shape else 1 for shape in each), default=1) for each in shapes)


class Caller(Protocol):
    """See the top of this file."""

    # Calls worth having under way beyond the one that is waited for.
    num_ahead: int
    # The most a bundle should hold.
    bundle_bytes: int
    bundle_chunks: int
    # Whether to spend calls on giving up memory early.
    compacts: bool
    # Whether a report costs no call.
    reports_freely: bool
    # Whether splits that can be divided are, so that the first elements come soon.
    divides: bool
    # Where results lie, the same for callers whose handles are of use to each other; None where of no use later.
    home: Hashable | None

    @property
    def backend(self) -> Any:
        """Return the source that brings results to the program that looks at them; the caller itself by default."""
        ...

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        worker: str | None = None,
        is_pinned: bool = False,
        is_cheap: bool = False,
        name: str,
    ) -> Handle:
        """Call ``function(results of the handles, *args)``, on worker ``on`` if that can be, or there only.

        A light call, which only makes views or copies a few rows, is not worth handing from one thread to another.
        """
        ...

    def source(self, function: Callable[..., Rows], *args: Any, worker: str | None = None, name: str) -> Handle:
        """Call ``function(*args)``."""
        ...

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        """The value of a key of a Dask graph."""
        ...

    def places(self, read: Read) -> SplitLocations | None:
        """What tells for each split of a source where its data lies already; None where nothing is known of that."""
        ...

    def kept(self, read: Read, split: Split, worker: str | None = None) -> Handle | None:
        """The payload of the only split of a source, where it is kept for all passes; asked for on worker ``on``.

        None where it is given anew to each call that needs it.
        """
        ...

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        """Call ``take()`` in this thread, at once; what it raises passes through."""
        ...

    def is_done(self, handle: Handle) -> bool:
        """Whether a result is there."""
        ...

    def wait_for_one(self, handles: Sequence[Handle]) -> None:
        """Wait until one of several results is there."""
        ...

    def report(self, handle: Handle, *, wait: bool) -> Report | None:
        """What is known of a result; None where it is not there yet and ``wait`` is False."""
        ...

    def result(self, handle: Handle) -> Any:
        """The result itself, waited for and brought here."""
        ...

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Several results, brought here together."""
        ...

    def close(self) -> None:
        """Drop what is under way; no call is made after it."""
        ...
