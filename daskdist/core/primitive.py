"""The few things every operation comes down to. Interpreters and callers know these and no operation.

A pipeline is a tree of primitives. `Read` and `Compute` look at values and never at order, and become calls
(tasks, on a cluster). `Arrange` looks at order and never at values, and is arithmetic on the driver; where it
needs a small fact of each element, `Fact` has that made where the element lies. `Stream` and `Chain` are for
what comes one after the other only: a generator, and computations that carry something on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from daskdist.core.block import Rows
from daskdist.core.selection.runs import Run
from daskdist.core.structure import Leaves


class Exhausted(Exception):  # noqa: N818 - a signal, as StopIteration is
    """A cursor is at its end."""


class NotReady(Exception):  # noqa: N818 - a signal, as StopIteration is
    """A cursor would have to wait for a count that is not in yet; it has lost nothing and can be asked again."""


class Cursor(Protocol):
    """A place in a stream of elements."""

    def pull(self) -> Any:
        """Return some elements, at least one: a `Run`, a `Zipped` of runs, or a `Noted` of those for a `Fact`.

        Raises
        ------
        Exhausted
            There are no more.
        NotReady
            Only where the context does not wait.
        """
        ...


# The pass of a stream. First the pass number of each operation that counts its passes, in order of their places, or
# one number for all of them; then the number of each enclosing repetition, the outermost first.
Epoch = tuple[Any, ...]
Opener = Callable[[Epoch], Cursor]


class Context(Protocol):
    """The services of the interpreter that a cursor may use."""

    @property
    def home(self) -> Hashable | None:
        """The caller's place for blocks that are kept for later passes; None where they are of no use later."""
        ...

    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> AbstractContextManager[None]:
        """Let inputs wait, while this is entered, only for what is needed now; else they raise `NotReady`.

        With ``is_brief`` they may also run what has taken moments so far.
        """
        ...

    def open(self, key: Any) -> Opener:
        """Return a function that opens the primitive that the arrangement's `primitive_of` makes of ``key``."""
        ...

    def compact(self, run: Run, in_use: Iterable[Run]) -> Run:
        """Return the same elements, with blocks of which few rows are left replaced by blocks of just those rows.

        Blocks that runs ``in_use`` hold on to are left as they are: they would be kept anyway.
        """
        ...


class Arrangement(Protocol):
    """An arrange operation as a value; `open` starts it."""

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
    path
        The path of that file; empty where it is of none.
    """

    label: str
    payload: Any
    num_rows: int | None = None
    num_bytes: int | None = None
    file: int | None = None
    path: str = ""


@dataclass(frozen=True)
class LazySplits(Sequence[Split]):
    """Splits that are made when they are looked at.

    Parameters
    ----------
    number
        How many there are.
    make
        Makes the split of a number.
    """

    number: int
    make: Callable[[int], Split]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        found = range(self.number)[index]
        return list(map(self.make, found)) if isinstance(found, range) else self.make(found)


@dataclass(frozen=True)
class EndlessSplits:
    """Splits without end, each made by its number when it is looked at."""

    make: Callable[[int], Split]

    def __getitem__(self, index: int) -> Split:
        return self.make(index)


class Splits(Protocol):
    """A source's splits, found when first looked at."""

    def __call__(self) -> Sequence[Split] | EndlessSplits: ...


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
    splits_of
        Gives the splits of a pass, where they are not the same in all.
    in_order
        Whether blocks come in the order of the splits; else as they are done.
    lenient
        What stands in for it where what cannot be read is left out: notes what that is. None where that is a
        whole split.
    kept_for
        What its data lives as long as, where that is in memory already: blocks as payloads of the splits, or values of
        the ``graph``. What is read again and again need not be sent each time then. None where it is not.
    """

    splits: Splits
    function: Callable[..., Rows]
    name: str
    factor: int | None = 1
    divide: Callable[[Split, int, int], Split] | None = None
    graph: Callable[[], dict[Any, Any]] | None = None
    splits_of: Callable[[Epoch], Sequence[Split] | EndlessSplits] | None = None
    in_order: bool = True
    lenient: Read | None = None
    kept_for: object = None
    grouped = 0


class ElementStream(Protocol):
    """Elements that come one after the other, in this process."""

    @property
    def element_bytes(self) -> int | None:
        """Bytes of each element; None where they differ."""
        ...

    def __iter__(self) -> Iterator[Leaves]:
        """Return what gives the leaves of each element, once."""
        ...

    def close(self) -> None:
        """Let go of what gives them, in the thread in which it ran."""
        ...

    def rows(self, items: Sequence[Leaves], first: int) -> Rows:
        """Return elements as rows; ``first`` is the number of the first of them."""
        ...


class RowReader(Protocol):
    """Elements that come one after the other, as rows."""

    def take(self, num_rows: int, *, wait: bool) -> Rows:
        """Return the next elements, at most so many.

        Raises
        ------
        Exhausted
            There are no more.
        NotReady
            Not to ``wait``, and none are there yet.
        """
        ...

    def take_exactly(self, num_rows: int) -> Rows:
        """Return so many elements, however long they take; fewer at the end."""
        ...

    @property
    def close(self) -> Callable[[], None]:
        """Let go of what gives them."""
        ...


@dataclass(frozen=True, eq=False)
class Stream:
    """Elements that come one after the other and from this process only, as a generator's do.

    Parameters
    ----------
    start
        Starts them anew.
    name
        What plans call it.
    held
        The handle of what it is of, where that is on a worker and stays there; ``start`` is of no use then.
    begin
        Starts a pass of what is held, on that worker: ``begin([value], epoch)`` gives what has the method
        ``pull(num_rows)``.
    read
        Starts a pass of elements that come as rows, instead of ``start``.
    """

    start: Callable[[], ElementStream]
    name: str
    held: Any = None
    begin: Callable[[Sequence[Any], Epoch], Any] | None = None
    read: Callable[[Epoch], RowReader] | None = None
    grouped = 0


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
    unstacked
        Whether the function takes batches as `Batches` of rows that are not stacked yet.
    in_order
        Whether its blocks come in the order of the source's; else as they are done.
    is_full
        Whether each call takes as many elements as are worth one, even if that means to wait for them.
    """

    source: Primitive
    function: Callable[[Any], Rows]
    name: str
    factor: int | None
    unstacked: bool = False
    in_order: bool = True
    is_full: bool = False
    grouped = 0


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks made of blocks one after the other, with something carried on from each to the next.

    Parameters
    ----------
    source
        What it is applied to.
    function
        ``function(rows, carried) -> (rows, carried)``, pure.
    initial
        What the first is given.
    name
        What tasks are called.
    factor
        How many elements it gives for each it takes; None where that differs.
    """

    source: Primitive
    function: Callable[[Rows, Any], tuple[Rows, Any]]
    initial: Any
    name: str
    factor: int | None = 1
    grouped = 0


@dataclass(frozen=True, slots=True)
class Noted:
    """Some elements and a fact of them.

    Parameters
    ----------
    run
        The elements.
    fact
        What the function made of them, commonly an array, shape ``(num_elements,)``.
    """

    run: Run
    fact: Any


@dataclass(frozen=True, eq=False)
class Fact:
    """Elements, each run with a small fact of it that an arrangement goes by.

    Parameters
    ----------
    source
        The elements.
    function
        ``function(rows) -> fact``, pure, run where the rows are; what it gives is brought to the driver.
    name
        What tasks are called.
    makes_rows
        Whether the function gives ``(rows, fact)``: other elements, of any number, and a fact of those.
    is_strict
        Whether its failing is raised even where elements that fail are left out: where it writes them, say.
    """

    source: Primitive
    function: Callable[[Rows], Any]
    name: str
    makes_rows: bool = False
    is_strict: bool = False

    @property
    def grouped(self) -> int:
        return self.source.grouped


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
        Of how many levels of batches that are not gathered yet its elements are (a run of such is `Groups`).
    name
        What plans call it.
    is_counted
        Whether what it does stands or falls with the order of its inputs, which is then kept in any case: where
        several pipelines count the same elements.
    on_stacked
        Does the same to rows of an input whose batches are stacked already; None for what keeps batches, or makes them.
    """

    inputs: tuple[Primitive, ...]
    arrangement: Arrangement
    grouped: int
    name: str
    is_counted: bool = False
    on_stacked: Callable[[Any], Rows] | None = None


Primitive = Read | Stream | Compute | Chain | Fact | Arrange


def same(rows: Rows) -> Rows:
    """Return the rows unchanged: a computation that only has them gathered."""
    return rows


def value_itself(split: Split, value: Any) -> Any:
    """Return the value: the function of a `Read` with a ``graph`` whose values are blocks already."""
    return value


def payload_itself(split: Split) -> Any:
    """Return the payload: the function of a `Read` whose splits have blocks as their payloads."""
    return split.payload


def gathered(primitive: Primitive) -> Primitive:
    """Return the stream with its ungathered batches gathered, so that its elements are rows of blocks."""
    return Compute(primitive, same, "gather", factor=1) if primitive.grouped else primitive


def same_nesting(primitives: Sequence[Primitive]) -> tuple[Primitive, ...]:
    """Streams as they can come one after the other: all of batches not gathered yet, or none."""
    levels = {each.grouped for each in primitives}
    return tuple(primitives) if len(levels) == 1 else tuple(map(gathered, primitives))
