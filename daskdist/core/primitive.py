"""The primitives to which every operation is lowered. Interpreters and callers know these and no operations.

A pipeline is a tree of primitives. `Read` and `Compute` use values and never order, and become calls (tasks, on a
cluster). `Arrange` uses order and never values, and is arithmetic on the driver; if it needs a small fact about each
element, `Fact` computes that on the worker that has the element. `Stream` and `Chain` are for sequential data only: a
generator, and computations that carry a state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from daskdist.core.block import Rows
from daskdist.core.selection.runs import Run
from daskdist.core.structure import Leaves


class Exhausted(Exception):  # noqa: N818 - a signal, as StopIteration is
    """The end of a cursor."""


class NotReady(Exception):  # noqa: N818 - a signal, as StopIteration is
    """A signal that a cursor would have to wait for a row count; its state is unchanged, and pull can be repeated."""


class FailedRun(Exception):  # noqa: N818 - a signal, as StopIteration is
    """A signal that an element failed, and so has no fact, or no stream of its own.

    Cursors of arrangements pass it on: the element takes the place of their next one.

    Parameters
    ----------
    run
        The element.
    error
        Its error, if it did not fail before a position from which the stream continues, or there is none.
    """

    def __init__(self, run: Run, error: Exception | None = None) -> None:
        super().__init__("an element failed")
        self.run = run
        self.error = error


class Cursor(Protocol):
    """A position in a stream of elements."""

    def pull(self) -> Any:
        """Return at least one element: a `Run`, a `Zipped` of runs, or for a `Fact` a `Noted` of these.

        Raises
        ------
        Exhausted
            There are no more elements.
        NotReady
            The call would have to wait, and the context does not allow that.
        """
        ...


@runtime_checkable
class SkippingByArithmetic(Protocol):
    """A cursor that can skip elements without pulling each of them."""

    def skip(self, num_elements: int, /) -> int:
        """Skip at most so many elements, which were pulled before a position was taken, and return how many.

        It is called once, before any `Cursor.pull`.
        """
        ...


@runtime_checkable
class SkippingUnread(SkippingByArithmetic, Protocol):
    """A cursor that can skip elements in a first pass, too, if ``skips_unread``."""

    @property
    def skips_unread(self) -> bool:
        """True if nothing needs to see the elements that are skipped, and their number is known."""
        ...


@runtime_checkable
class KeepingElements(Protocol):
    """A cursor that keeps the elements of complete passes."""

    def resume(self, *, is_trial: bool) -> None:
        """Expect only the rest of a pass; called before any `Cursor.pull`. In a trial, nothing else changes."""
        ...


@runtime_checkable
class ReadingToDevices(Protocol):
    """A function of a `Read` that can leave columns on the device where it finds them."""

    @property
    def is_on_device(self) -> bool:
        """Return whether the columns are known to be on a device."""
        ...

    def kept_on_device(self) -> Callable[..., Rows]:
        """Return the function that leaves columns on their device."""
        ...


# The pass of a stream: first the pass numbers of the operations that count their passes, in the order of their places,
# or one number for all of them; then the number of each enclosing repetition, the outermost first.
Epoch = tuple[Any, ...]
Opener = Callable[[Epoch], Cursor]


class Context(Protocol):
    """The services of the interpreter for cursors."""

    @property
    def home(self) -> Hashable | None:
        """The caller's identifier for blocks that are kept for later passes; None if they cannot be used later."""
        ...

    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> AbstractContextManager[None]:
        """Return a context in which inputs wait only if ``is_needed``; otherwise they raise `NotReady`.

        With ``is_brief`` they may also run generators that have been fast so far.
        """
        ...

    def open(self, key: Any, element: str | None = None) -> Opener:
        """Return a function that opens the primitive from the arrangement's `primitive_of` for ``key``.

        Parameters
        ----------
        key
            Identifies the primitive.
        element
            The name of the element whose stream it is; None if it is not of one.

        Raises
        ------
        FailedRun
            The stream of an element cannot be made.
        """
        ...

    def recall(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; in a stream that continues from a position, what it returned before.

        Parameters
        ----------
        make
            Returns numbers, text or tuples of these. Calls are distinguished by their order.
        """
        ...

    def note_passes_over(self, num_passes: int) -> None:
        """Note that the first passes of a repetition are over at the position that it continues from."""
        ...

    def note_point(self, place: int, state: Any) -> None:
        """Record a state, as numbers and tuples, at a place in the elements."""
        ...

    def point_before(self, place: int) -> tuple[int, Any] | None:
        """Return the last state that was recorded at ``place`` or before it, with its place; None without one."""
        ...

    def note_length(self, number: int, length: int) -> None:
        """Record the length of part ``number``, when it is over, of a stream of consecutive parts."""
        ...

    def lengths(self) -> Sequence[tuple[int, int]]:
        """Return the lengths of parts that were over before a position was taken, each with how often it repeats."""
        ...

    def compact(self, run: Run, in_use: Iterable[Run]) -> Run:
        """Return the same elements, with blocks that have few rows left replaced by blocks of just those rows.

        Blocks of the runs ``in_use`` stay unchanged, because they are kept alive anyway.
        """
        ...


class Arrangement(Protocol):
    """Row arithmetic as a value; `open` starts it."""

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor: ...


@dataclass(frozen=True)
class ByCursor:
    """Row arithmetic that needs only the input's cursor, and arguments.

    Parameters
    ----------
    cursor
        Makes a cursor of the input's and the arguments: a class or a function of a module, as this is pickled.
    arguments
        The arguments.
    """

    cursor: Callable[..., Cursor]
    arguments: tuple[Any, ...] = ()

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return self.cursor(inputs[0](epoch), *self.arguments)


@dataclass(frozen=True, slots=True)
class Split:
    """The unit of reading.

    Parameters
    ----------
    label
        Its name in messages, such as a file and a row group.
    payload
        The data that the reader needs.
    num_rows
        Its number of rows; None if it is known only from reading.
    num_bytes
        Its size in memory, as far as it is known before reading.
    file
        The number of its file, in the order of the files; None if it is not in a file.
    path
        The path of its file; empty if it is not in a file.
    """

    label: str
    payload: Any
    num_rows: int | None = None
    num_bytes: int | None = None
    file: int | None = None
    path: str = ""

    def __reduce__(self) -> Any:
        # Calls that read many small files take many splits; what dataclasses do by default takes four times as long.
        return Split, (self.label, self.payload, self.num_rows, self.num_bytes, self.file, self.path)


@dataclass(frozen=True)
class LazySplits(Sequence[Split]):
    """Splits that are created when they are accessed; all but the last have the same number of rows."""

    number: int
    make: Callable[[int], Split]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        numbers = range(self.number)[index]
        return list(map(self.make, numbers)) if isinstance(numbers, range) else self.make(numbers)


@dataclass(frozen=True)
class EndlessSplits:
    """An endless sequence of splits, each created from its number when it is accessed."""

    make: Callable[[int], Split]

    def __getitem__(self, index: int) -> Split:
        return self.make(index)


# A function that returns the splits of a source, listed on first use.
Splits = Callable[[], Sequence[Split] | EndlessSplits]


@dataclass(frozen=True, eq=False)
class Read:
    """The blocks of a source, one for each split, in the order of the splits.

    Parameters
    ----------
    splits
        Returns the splits.
    function
        ``function(split)`` returns the block of a split; ``function(split, value)`` if there is a ``graph``.
    name
        The name of its tasks.
    factor
        The number of rows in the block for each row of the split; None if it is known only from reading, as after a
        filter.
    divide
        ``divide(split, start, stop)`` returns these rows of a split as a split, at no cost; None if splits are read
        whole.
    graph
        Returns a Dask graph; the payload of each split is then a key, whose value becomes the block.
    splits_of
        Returns the splits of a pass, if they differ between passes.
    in_order
        Whether blocks come in the order of the splits; otherwise in the order in which they finish.
    kept_for
        An object that lives as long as its data, if that is in memory already, as payloads of the splits or values of
        the ``graph``; then the data can be sent once and kept for later passes. None otherwise.
    costly
        The last function of users that ``function``, a composition, calls and that may be slow; None without one.
    may_be_large
        Whether a function of users may return, or load for itself, far more bytes for a row than it is given.
    is_of_rows
        Whether the payload of each split is a tuple of splits of a row each, which ``function`` reads in any groups.
    is_shuffled
        Whether rows of a split are needed far from each other, so that those of one call are few of many splits.
    """

    splits: Splits
    function: Callable[..., Rows]
    name: str
    factor: int | None = 1
    divide: Callable[[Split, int, int], Split] | None = None
    graph: Callable[[], dict[Any, Any]] | None = None
    splits_of: Callable[[Epoch], Sequence[Split] | EndlessSplits] | None = None
    in_order: bool = True
    kept_for: object = None
    costly: object = None
    may_be_large: bool = False
    is_of_rows: bool = False
    is_shuffled: bool = False
    grouped = 0


class ElementStream(Protocol):
    """A sequential stream of elements in this process."""

    @property
    def element_bytes(self) -> int | None:
        """The bytes of each element; None if they vary."""
        ...

    def __iter__(self) -> Iterator[Leaves]:
        """Return an iterator over the leaves of each element; may be called once."""
        ...

    def close(self) -> None:
        """Close the stream, in the thread in which it ran."""
        ...

    def rows(self, items: Sequence[Leaves], first: int) -> Rows:
        """Return elements as rows; ``first`` is the number of the first one."""
        ...


class RowReader(Protocol):
    """A sequential stream of elements as rows."""

    def take(self, num_rows: int, *, wait: bool) -> Rows:
        """Return the next elements, at most ``num_rows``.

        Raises
        ------
        Exhausted
            There are no more elements.
        NotReady
            ``wait`` is False, and no elements are available yet.
        """
        ...

    def take_exactly(self, num_rows: int) -> Rows:
        """Wait for ``num_rows`` elements and return them; fewer at the end."""
        ...

    @property
    def close(self) -> Callable[[], None]:
        """Close the stream."""
        ...


@dataclass(frozen=True, eq=False)
class Stream:
    """A sequential stream of elements that only this process can produce, such as those of a generator.

    Parameters
    ----------
    start
        Starts a pass of the stream from its beginning: ``start(epoch)``.
    name
        Its name in plans.
    held
        The handle of a source that stays on a worker; ``start`` is then unused.
    begin
        Starts a pass of ``held`` on its worker: ``begin([value], epoch, position)`` returns an object with the
        methods ``pull(num_rows, first_needed)`` and ``pull_from(first, num_rows)``.
    position
        Returns positions of such a pass, on its worker: ``position([value], first)`` is what another pass needs to have
        the same rows from ``first`` on. None if that needs nothing, as errors move no rows.
    read
        Starts a pass of elements as rows, in place of ``start``: ``read(epoch, in_order)``.
    in_order
        Whether such a pass must have the same order each time, even if it then takes longer.
    is_repeatable
        Whether another such pass has the same rows without a position, even if ``held`` is made again elsewhere.
    """

    start: Callable[[Epoch], ElementStream]
    name: str
    held: Any = None
    begin: Callable[[Sequence[Any], Epoch, bytes | None], Any] | None = None
    position: Callable[[Sequence[Any], int], bytes | None] | None = None
    read: Callable[[Epoch, bool], RowReader] | None = None
    in_order: bool = False
    is_repeatable: bool = True
    grouped = 0


@dataclass(frozen=True, eq=False)
class Compute:
    """Blocks computed from blocks, or if the source is grouped, bundles from bundles of its gathered batches.

    Parameters
    ----------
    source
        The input.
    function
        ``function(rows) -> rows``, pure and elementwise, so its result does not depend on how the input is cut.
    name
        The name of its tasks.
    factor
        The number of results for each element; None if that varies, as in a filter.
    unstacked
        Whether the function takes batches unstacked, as `Batches`.
    in_order
        Whether its blocks come in the order of the source; otherwise in the order in which they finish.
    is_full
        Whether each call waits for as many elements as are worth a call.
    costly
        The function of users that ``function`` calls and that may be slow; None without one.
    may_be_large
        Whether it may return, or load for itself, far more bytes for a row than it is given.
    """

    source: Primitive
    function: Callable[[Any], Rows]
    name: str
    factor: int | None
    unstacked: bool = False
    in_order: bool = True
    is_full: bool = False
    costly: object = None
    may_be_large: bool = False
    grouped = 0


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks computed sequentially from blocks, with a state carried from each to the next.

    Parameters
    ----------
    source
        The input.
    function
        ``function(rows, carried) -> (rows, carried)``, pure.
    initial
        The state before the first block.
    name
        The name of its tasks.
    factor
        The number of results for each element; None if that varies.
    may_be_large
        Whether it may return, or load for itself, far more bytes for a row than it is given.
    """

    source: Primitive
    function: Callable[[Rows, Any], tuple[Rows, Any]]
    initial: Any
    name: str
    factor: int | None = 1
    may_be_large: bool = False
    grouped = 0


@dataclass(frozen=True, slots=True)
class Noted:
    """Some elements and a fact about them.

    Parameters
    ----------
    run
        The elements.
    fact
        The result of the function for them, usually an array, shape ``(num_elements,)``.
    """

    run: Run
    fact: Any

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, part: slice) -> Noted:
        return Noted(self.run[part], self.fact[part])


@dataclass(frozen=True, eq=False)
class Fact:
    """Elements with a small fact about each run, for an arrangement.

    Parameters
    ----------
    source
        The elements.
    function
        ``function(rows) -> fact``, pure, called on the worker that has the rows; the fact is sent to the driver.
    name
        The name of its tasks.
    makes_rows
        Whether the function returns ``(rows, numbers)``: any number of other elements for each, and how many.
    is_strict
        Whether its failure ends the pass, for example because it writes the elements; it is called for those that
        failed, too.
    is_of_pass
        Whether the fact is of use in its own pass only. In a pass that was resumed, calls before the position have
        None.
    """

    source: Primitive
    function: Callable[[Rows], Any]
    name: str
    makes_rows: bool = False
    is_strict: bool = False
    is_of_pass: bool = False

    @property
    def grouped(self) -> int:
        return self.source.grouped


@dataclass(frozen=True, eq=False)
class Arrange:
    """Elements in another order, number or grouping.

    Parameters
    ----------
    inputs
        The input streams.
    arrangement
        The row arithmetic.
    grouped
        The number of levels of ungathered batches in its elements, whose runs are then `Groups`.
    name
        Its name in plans.
    is_counted
        Whether its elements depend on the numbers of those of its inputs, which then come in order in any case: several
        pipelines count the same elements, such as for parts of a dataset, or it joins elements by their numbers.
    is_of_pairs
        Whether it joins elements of several inputs, so that none may lack an unknown number of them.
    on_stacked
        Does the same for an input whose batches are stacked already; None if it keeps or creates batches.
    lenient
        The replacement of ``arrangement`` if elements that fail are left out; None if it opens no other streams.
    """

    inputs: tuple[Primitive, ...]
    arrangement: Arrangement
    grouped: int
    name: str
    is_counted: bool = False
    is_of_pairs: bool = False
    on_stacked: Callable[[Any], Rows] | None = None
    lenient: Arrangement | None = None


Primitive = Read | Stream | Compute | Chain | Fact | Arrange


def same(rows: Rows) -> Rows:
    """Return the rows unchanged: a computation that only gathers them."""
    return rows


def value_itself(split: Split, value: Any) -> Any:
    """Return the value: the function of a `Read` with a ``graph`` whose values are blocks."""
    return value


def payload_itself(split: Split) -> Any:
    """Return the payload: the function of a `Read` whose payloads are blocks."""
    return split.payload


def gathered(primitive: Primitive) -> Primitive:
    """Return the stream with its ungathered batches gathered, so that its elements are rows of blocks."""
    return Compute(primitive, same, "gather", factor=1) if primitive.grouped else primitive


def same_nesting(primitives: Sequence[Primitive]) -> tuple[Primitive, ...]:
    """Return streams that can be concatenated: with ungathered batches in all of them or in none."""
    levels = {primitive.grouped for primitive in primitives}
    return tuple(primitives) if len(levels) == 1 else tuple(map(gathered, primitives))
