"""The few things every operation comes down to. Interpreters and callers know these and no operation.

A pipeline is a tree of primitives. `Read` and `Compute` look at values and never at order, and become calls
(tasks, on a cluster). `Arrange` looks at order and never at values, and is arithmetic on the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from daskdist.core.block import Rows
from daskdist.core.selection import Run


class Exhausted(Exception):  # noqa: N818 - a signal, as StopIteration is
    """A cursor is at its end."""


class NotReady(Exception):  # noqa: N818 - a signal, as StopIteration is
    """A cursor would have to wait for a count that is not in yet; it has lost nothing and can be asked again."""


class Cursor(Protocol):
    """A place in a stream of elements."""

    def pull(self) -> Run:
        """Some elements, at least one.

        Raises
        ------
        Exhausted
            There are no more.
        NotReady
            Only where the context does not wait.
        """
        ...


Epoch = tuple[int, ...]
Opener = Callable[[Epoch], Cursor]


class Context(Protocol):
    """What a cursor may ask of whoever runs it."""

    def compact(self, run: Run, in_use: Iterable[Run]) -> Run:
        """The same elements, where blocks with few rows left are replaced by blocks of just those rows.

        Blocks that runs ``in_use`` hold on to are left as they are: they would be kept anyway.
        """
        ...


class Arrangement(Protocol):
    """What an arrange operation does, as a value; `open` starts it."""

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor: ...


@dataclass(frozen=True, slots=True)
class Split:
    """The unit of reading.

    Parameters
    ----------
    label
        What a message calls it: a file and a row group, say.
    payload
        What the reader needs to read it.
    num_rows
        Its rows; None where only reading tells.
    num_bytes
        Its size in memory, as far as known before it is read.
    file
        The number of the file it is of, in listed order; None where it is of no file.
    """

    label: str
    payload: Any
    num_rows: int | None = None
    num_bytes: int | None = None
    file: int | None = None


class Splits(Protocol):
    """A source's splits, found when first looked at."""

    def __call__(self) -> Sequence[Split]: ...


@dataclass(frozen=True, eq=False)
class Read:
    """Blocks, one a split, in the order of the splits.

    Parameters
    ----------
    splits
        Gives the splits.
    function
        Makes a split a block: ``function(split)``, or ``function(split, value)`` where there is a ``graph``.
    name
        What tasks are called.
    factor
        Rows of the block for each row of the split; None where only reading tells, as after a filter.
    divide
        Gives rows ``start`` to ``stop`` of a split as a split, at no cost; None where a split is read whole.
    graph
        Gives a Dask graph, where the payload of each split is a key of it whose value the block is made of.
    """

    splits: Splits
    function: Callable[..., Rows]
    name: str
    factor: int | None = 1
    divide: Callable[[Split, int, int], Split] | None = None
    graph: Callable[[], dict[Any, Any]] | None = None
    grouped = False


@dataclass(frozen=True, eq=False)
class Compute:
    """Blocks made of blocks; where the source is grouped, bundles made of bundles of its gathered batches.

    Parameters
    ----------
    source
        What it is applied to.
    function
        ``function(rows) -> rows``, pure, and alike however its input is cut: it acts on each element by itself.
    name
        What tasks are called.
    factor
        How many elements it gives for each it takes; None where that differs, as in a filter.
    """

    source: Primitive
    function: Callable[[Rows], Rows]
    name: str
    factor: int | None
    grouped = False


@dataclass(frozen=True, eq=False)
class Arrange:
    """Elements in another order, number or grouping.

    Parameters
    ----------
    inputs
        The streams it arranges.
    arrangement
        What it does.
    grouped
        Whether its elements are batches not gathered yet (a run of it is `Groups`).
    name
        What plans call it.
    """

    inputs: tuple[Primitive, ...]
    arrangement: Arrangement
    grouped: bool
    name: str


Primitive = Read | Compute | Arrange
