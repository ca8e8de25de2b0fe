"""Elements whose computation failed, at their places among the others; accessing one raises its error."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from daskdist.core.block import Batches, Bundle, Rows, read_only
from daskdist.core.failing.composed import stages_of
from daskdist.core.failing.error_copy import copied_error
from daskdist.core.failing.packed_error import pack_error, unpacked_error
from daskdist.core.failing.skip_errors import SkipErrorsRead
from daskdist.core.primitive import Split
from daskdist.core.structure import LONE, Leaves, Structure
from daskdist.errors import ClusterError, DaskdistError, UserFunctionError, WaitTimeoutError

_OF_ELEMENT: Final = "_daskdist_of_element"
_LEFT_UNCOUNTED: Final = "_daskdist_left_uncounted"
# The number of a computation of a block, and the number of its input that failed there.
Place = tuple[int, int]
# The most failed elements whose numbers are kept with a carried value.
_MOST_FAILED: Final = 1000
# The failed elements of a block that keep the frames of their errors, which hold the rows and take kilobytes each.
_MOST_WITH_FRAMES: Final = 100
# The place of a failure of the reader, which is the first computation of a block.
_NOT_READ: Final = (0, 0)


class FailedBeforeError(DaskdistError):
    """An element failed before a position was taken, and its error was raised then."""

    def __init__(self, message: str = "an element failed before the position was taken") -> None:
        super().__init__(message)


class LeftOut(NamedTuple):
    """An input of a computation that failed before a position was taken.

    Parameters
    ----------
    stage, number
        The computation, and the number of its input.
    is_raised
        Whether its error was raised: then the element fails again, with `FailedBeforeError`. Otherwise it is left out.
    """

    stage: int
    number: int
    is_raised: bool


class Uncounted(NamedTuple):
    """An element that failed in a call of a chain, so that the value which the chain carries does not count it.

    Parameters
    ----------
    chain
        The key of the chain, see `ChainFailures`.
    call, number
        The call, and the number of its input.
    """

    chain: str
    call: int
    number: int


class Carried(NamedTuple):
    """A value that a chain carries.

    Parameters
    ----------
    state
        The value.
    num_uncounted
        The number of elements before it that failed, so that it does not count them.
    failed
        Those that failed since ``first_call``, each as its call and the number of its input; of many, the last ones.
    first_call
        The first call that was made for this value.
    """

    state: Any
    num_uncounted: int = 0
    failed: tuple[tuple[int, int], ...] = ()
    first_call: int = 0

    def after(self, call: int, state: Any, num_uncounted: int, failed: tuple[int, ...]) -> Carried:
        """Return the value after a call, with the numbers of the elements that failed in it."""
        all_failed = (*self.failed, *[(call, number) for number in failed])[-_MOST_FAILED:]
        return Carried(state, self.num_uncounted + num_uncounted, all_failed, self.first_call)


class FailedElement:
    """A placeholder in rows for an element that could not be computed.

    Parameters
    ----------
    error
        The error of the computation.
    split
        The name of the split if nothing of it could be read, so that all its elements fail together and an iterator
        raises the error once. Empty if only this element failed.
    place
        The computation of its block that failed, and the number of its input there; None if that is unknown.
    uncounted
        The elements of chains that it is made of.
    """

    __slots__ = ("error", "place", "split", "uncounted")

    def __init__(
        self, error: Exception, split: str = "", place: Place | None = None, uncounted: tuple[Uncounted, ...] = ()
    ) -> None:
        self.error = error
        self.split = split
        self.place = place
        self.uncounted = uncounted

    def again(self) -> Exception:
        """Return an equal error to raise, with the traceback of the original."""
        error = copied_error(self.error).with_traceback(self.error.__traceback__)
        setattr(error, _LEFT_UNCOUNTED, self.uncounted)
        return of_element(error, self.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (pack_error(self.error), self.split, self.place, self.uncounted)


def _unpickled(packed: bytes, split: str, place: Place | None, uncounted: tuple[Uncounted, ...]) -> FailedElement:
    return FailedElement(unpacked_error(packed), split, place, uncounted)  # type: ignore[arg-type]


def joint_failure(items: Iterable[Any]) -> FailedElement | None:
    """Return the failure of an element made of several others; None if none of these failed."""
    failed = [item for item in items if isinstance(item, FailedElement)]
    if len(failed) < 2:
        return failed[0] if failed else None
    first, uncounted = failed[0], tuple([element for item in failed for element in item.uncounted])
    return FailedElement(first.error, first.split, first.place, uncounted)


def uncounted_of(error: Exception) -> tuple[Uncounted, ...]:
    """Return the elements of chains that the element of an error is made of."""
    uncounted: tuple[Uncounted, ...] = getattr(error, _LEFT_UNCOUNTED, ())
    return uncounted


# Errors of calls without a failed element: another cluster, the remaining workers, or a longer wait may have them.
NO_ELEMENT_FAILED: Final = ClusterError, WaitTimeoutError


def of_element(error: Exception, split: str = "") -> Exception:
    """Mark an error after which an iterator continues; ``split`` is as in `FailedElement`."""
    setattr(error, _OF_ELEMENT, split)
    return error


def is_of_element(error: BaseException) -> bool:
    """Return whether an iterator continues after an error."""
    return hasattr(error, _OF_ELEMENT)


class ReportedFailures:
    """The splits for which an iterator has already raised an error."""

    def __init__(self) -> None:
        self._splits: set[str] = set()

    def is_new(self, error: Exception) -> bool:
        """Return whether an error must be raised; an error of a split is raised once."""
        split = getattr(error, _OF_ELEMENT, "")
        if split in self._splits:
            return False
        if split:
            self._splits.add(split)
        return True


def failed_of(rows: Rows) -> tuple[tuple[int, FailedElement], ...]:
    """Return the failed elements, each with its place."""
    if not isinstance(rows, PartlyFailed):
        return ()
    items = ((index, rows.raw(index)) for index in range(len(rows)))
    return tuple((index, item) for index, item in items if isinstance(item, FailedElement))


class PartlyFailed(Bundle):
    """Elements some of which failed; accessing a failed one raises its error."""

    __slots__ = ()

    def __init__(
        self, structure: Structure, items: Sequence[Any], label: str = "", *, is_exclusive: bool = False
    ) -> None:
        super().__init__(structure, [], label)
        whole = is_exclusive
        self._items: list[Any] = [
            item if whole or type(item) is FailedElement else tuple(map(read_only, item)) for item in items
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _partly_failed, (self.structure, self._items, self.label, self.skipped)

    @property
    def nbytes(self) -> int:
        return sum(getattr(leaf, "nbytes", 0) for item in self._good() for leaf in item)

    def _good(self) -> Iterator[Leaves]:
        return (item for item in self._items if not isinstance(item, FailedElement))

    @property
    def is_all(self) -> bool:
        """Return whether every element failed, so that the structure is unknown."""
        return next(self._good(), None) is None

    def item(self, index: int) -> Leaves:
        """Return the leaves of one element; raise its error if it failed."""
        item = self.raw(index)
        if isinstance(item, FailedElement):
            raise item.again()
        return item

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the elements from ``start`` to ``stop``, in order, up to the first failed one."""
        return (self.structure.pack(self.item(k)) for k in range(*slice(start, stop).indices(len(self))))

    def raw(self, index: int) -> Leaves | FailedElement:
        """Return the leaves of one element, or its `FailedElement`."""
        item: Leaves | FailedElement = self._items[index]
        return item

    def take(self, rows: Any) -> Bundle:
        """Return the elements at some indices, in that order."""
        return bundle(self.structure, [self._items[row] for row in rows], self.label)

    def slice(self, start: int, stop: int) -> Bundle:
        """Return elements ``start`` to ``stop``."""
        return bundle(self.structure, self._items[start:stop], self.label)


def check_any_is_there(rows: Rows) -> None:
    """Raise the error of the first element if all failed, since their structure is unknown."""
    if isinstance(rows, PartlyFailed) and len(rows) and rows.is_all:
        rows.item(0)


def _partly_failed(structure: Structure, items: Sequence[Any], label: str, skipped: tuple[Any, ...]) -> PartlyFailed:
    rows = PartlyFailed(structure, items, label)
    rows.skipped = skipped
    return rows


def bundle(structure: Structure, items: Sequence[Any], label: str, *, is_exclusive: bool = False) -> Bundle:
    """Return elements as a bundle; some may have failed."""
    kind = PartlyFailed if any(type(item) is FailedElement for item in items) else Bundle
    return kind(structure, items, label, is_exclusive=is_exclusive)


def raw_item(rows: Rows, index: int) -> Any:
    """Return the leaves of one element, or its `FailedElement` if it failed."""
    return rows.raw(index) if isinstance(rows, PartlyFailed) else rows.item(index)


def structure_of(parts: Sequence[Rows]) -> Structure:
    """Return the structure of the elements, by the first part with an element that did not fail."""
    return next((part for part in parts if not (isinstance(part, PartlyFailed) and part.is_all)), parts[0]).structure


def _has_failed(rows: Rows) -> bool:
    return isinstance(rows, PartlyFailed) or (isinstance(rows, Batches) and isinstance(rows.rows, PartlyFailed))


def _failed_at(rows: Rows, index: int) -> FailedElement | None:
    if isinstance(rows, PartlyFailed):
        item = rows.raw(index)
        return item if isinstance(item, FailedElement) else None
    if isinstance(rows, Batches) and isinstance(rows.rows, PartlyFailed):
        places = range(rows.bounds[index], rows.bounds[index + 1])
        return joint_failure(_failed_at(rows.rows, place) for place in places)
    return None


@dataclass(frozen=True)
class TryEach:
    """A function of rows, which is called for each element if it fails for all together.

    Parameters
    ----------
    function
        ``function(rows) -> rows``.
    factor
        The number of results for each element; None if that varies.
    stage
        The number of this computation among those of its block.
    left_out
        Elements that failed before.
    """

    function: Callable[[Any], Rows]
    factor: int | None = None
    stage: int = 0
    left_out: tuple[LeftOut, ...] = ()

    def __call__(self, rows: Rows) -> Rows:
        error = None
        if not (_has_failed(rows) or self.left_out):
            try:
                return _called(self.function, rows, self.stage)
            except Exception as failure:
                error = failure
        factor = 1 if self.factor is None else self.factor
        return _of_each(rows, self.function, error, factor, self.stage, self.left_out)


def _called(function: Callable[[Rows], Rows], rows: Rows, stage: int, index: int | None = None) -> Rows:
    # Add the computation, and the number of its input, to the notes of elements that were left out.
    result = function(rows)
    # A filter that keeps all rows returns them with the notes of the computation before.
    if result.skipped and result is not rows:
        result.skipped = tuple(
            note if note.place is None else replace(note, place=(stage, note.place[1] if index is None else index))
            for note in result.skipped
        )
    return result


def _of_each(
    rows: Rows,
    function: Callable[[Rows], Rows],
    error: Exception | None,
    factor: int = 1,
    stage: int = 0,
    left_out: tuple[LeftOut, ...] = (),
    *,
    is_pure: bool = True,
    error_before: Callable[[], Exception] = FailedBeforeError,
) -> Rows:
    """Return the results of a function for each element by itself.

    Parameters
    ----------
    rows, function
        The elements, and the function.
    error
        The error for all elements together; None if it was not called, because some failed before.
    factor
        The number of failed elements for each that fails.
    stage, left_out
        As in `TryEach`.
    is_pure
        Whether the function may be called again for the same elements.
    error_before
        Returns the error of an element that failed before.
    """
    results, num_failed = _Made(rows.label), 0
    before = {element.number: element.is_raised for element in left_out if element.stage == stage}
    for index in range(len(rows)):
        if index in before:
            results.items += [FailedElement(error_before(), "", (stage, index))] * before[index]
            continue
        failed = _failed_at(rows, index)
        if failed is None:
            try:
                results.add(_called(function, rows.slice(index, index + 1), stage, index))
            except _OtherStructureError as other:
                failed = FailedElement(error or other)
            except Exception as failure:
                # The first failing element caused the failure of all, whose error names the block.
                failed = FailedElement(failure if error is None or results.has_failed else error)
            if failed is not None:
                failed.place = (stage, index)
                num_failed += 1
                if num_failed > _MOST_WITH_FRAMES:
                    _drop_frames(failed.error)
        elif not stage:
            # The element failed before this block was computed.
            failed = FailedElement(failed.error, failed.split, (stage, index), failed.uncounted)
        if failed is not None:
            results.items += [failed] * factor
    if error is not None and is_pure and not results.has_failed:
        # The function fails only for several elements together, or the error was there only for a moment.
        return _called(function, rows, stage)
    return results.rows(rows)


def _drop_frames(error: BaseException | None) -> None:
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _OtherStructureError(DaskdistError):
    """The structure of an element differs from that of earlier ones."""


class _Made:
    # The results for single elements, collected.
    def __init__(self, label: str) -> None:
        self.items: list[Any] = []
        self.label = label
        self.skipped: tuple[Any, ...] = ()
        self.structure: Structure | None = None

    @property
    def has_failed(self) -> bool:
        return any(type(item) is FailedElement for item in self.items)

    def add(self, rows: Rows) -> None:
        if len(rows) and not (isinstance(rows, PartlyFailed) and rows.is_all):
            if self.structure is not None and rows.structure != self.structure:
                raise _OtherStructureError(f"an element has structure {rows.structure}, but {self.structure} before")
            self.structure = rows.structure
        self.items += [raw_item(rows, index) for index in range(len(rows))]
        self.skipped += rows.skipped

    def rows(self, rows_before: Rows) -> Rows:
        elements = bundle(rows_before.structure if self.structure is None else self.structure, self.items, self.label)
        elements.skipped = self.skipped
        return elements


@dataclass(frozen=True)
class TryEachRead:
    """A reader with fused computations; if a split cannot be read, all its elements fail.

    Parameters
    ----------
    function
        The reader, or a `Composed` of a reader and computations.
    left_out
        Elements that failed before; the reader is the first computation.
    """

    function: Callable[..., Rows]
    left_out: tuple[LeftOut, ...] = ()

    def __call__(self, split: Split, *values: Any) -> Rows:
        read, *computations = stages_of(self.function)
        if LeftOut(*_NOT_READ, is_raised=True) in self.left_out:
            return PartlyFailed(LONE, [FailedElement(FailedBeforeError(), "", _NOT_READ)], split.label)
        try:
            rows: Rows = read(split, *values)
        except Exception as error:
            # Where damaged parts are left out, no number of rows was promised, so that one error is enough.
            number = None if isinstance(read, SkipErrorsRead) else split.num_rows
            return _none_of(split, error, 1 if number is None else number)
        rows = _with_failures_before(rows, self.left_out)
        return TryEachStage(tuple(computations), self.left_out, first_stage=1)(rows)


@dataclass(frozen=True)
class TryEachStage:
    """Functions of rows, each called with the result of the one before, and for each element if it fails.

    Parameters
    ----------
    functions
        The functions.
    left_out
        Elements that failed before.
    first_stage
        The number of the first function among the computations of the block.
    """

    functions: tuple[Callable[[Rows], Rows], ...]
    left_out: tuple[LeftOut, ...] = ()
    first_stage: int = 0

    def __call__(self, rows: Rows) -> Rows:
        for stage, function in enumerate(self.functions, self.first_stage):
            left_out = tuple([element for element in self.left_out if element.stage == stage])
            result = TryEach(function, None, stage, left_out)(rows)
            if result is not rows:
                result.skipped = (*rows.skipped, *result.skipped)
            rows = result
        return rows


def _none_of(split: Split, error: Exception, number: int) -> Rows:
    failed = FailedElement(error, f"{split.label} {uuid.uuid4().hex}", _NOT_READ)
    return PartlyFailed(LONE, [failed] * number, split.label)


def not_read(split: Split, index: int, error: Exception) -> Rows:
    """Return the only row of a split that cannot be read, which is one of several rows that are read together.

    Parameters
    ----------
    split, error
        The split, and the error of reading it.
    index
        The number of the row among those that are read together.
    """
    # Number 0 is that of all rows together.
    return PartlyFailed(LONE, [FailedElement(error, place=(0, index + 1))], split.label)


def _with_failures_before(rows: Rows, left_out: Sequence[LeftOut]) -> Rows:
    # Let the rows that could not be read before fail again.
    indices = {element.number - 1 for element in left_out if element.is_raised and not element.stage and element.number}
    if not indices:
        return rows
    items = [
        FailedElement(FailedBeforeError(), "", (0, index + 1)) if index in indices else raw_item(rows, index)
        for index in range(len(rows))
    ]
    result = PartlyFailed(rows.structure, items, rows.label)
    result.skipped = rows.skipped
    return result


@dataclass(frozen=True)
class TryEachCarried:
    """A function that carries a state; a failing element leaves the state unchanged, as do those that failed before."""

    function: Callable[[Rows, Any], tuple[Rows, Any]]

    def __call__(
        self, rows: Rows, carried: Carried, chain: str, call: int, left_out: tuple[LeftOut, ...]
    ) -> tuple[Rows, Carried]:
        """Return the results for some rows, and the value to carry on; ``chain`` and ``call`` are as in `Uncounted`."""
        result, state = self._tried(rows, carried.state, left_out)
        failed = failed_of(result)
        for number, element in failed:
            element.uncounted += (Uncounted(chain, call, number),)
        is_logged = [note.place is not None for note in result.skipped]
        num_here = len(failed) + sum(is_logged) + len([element for element in left_out if not element.is_raised])
        before = {element.number for element in left_out}
        return result, carried.after(call, state, num_here, tuple([n for n, _ in failed if n not in before]))

    def _tried(self, rows: Rows, state: Any, left_out: tuple[LeftOut, ...]) -> tuple[Rows, Any]:
        error = None
        if not (_has_failed(rows) or left_out):
            try:
                return self.function(rows, state)
            except Exception as failure:
                error = failure

        def of_one(row: Rows) -> Rows:
            nonlocal state
            part, state = self.function(row, state)
            return part

        # Other elements, such as windows, may be made of one that failed before; they fail with an error of their own.
        options: Any = {"left_out": left_out, "is_pure": False, "error_before": _made_of_failed}
        return _of_each(rows, of_one, error, **options), state


def _made_of_failed() -> Exception:
    return UserFunctionError("an element that this one is made of failed before the position was taken")


def type_and_arguments(error: Exception) -> tuple[type[Exception], tuple[Any, ...]]:
    """Return the type and the arguments of an equal error, without the traceback."""
    try:
        type(error)(*error.args)
    except Exception:
        return DaskdistError, (f"{type(error).__name__}: {error}",)
    return type(error), error.args
