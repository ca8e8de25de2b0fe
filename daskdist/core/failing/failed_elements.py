"""Elements whose computation failed, in their places among the others: whoever comes to one has its error raised."""

from __future__ import annotations

import copy
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from daskdist.core.block import Batches, Bundle, Rows, read_only
from daskdist.core.primitive import Split
from daskdist.core.structure import LONE, Leaves, Structure
from daskdist.errors import DaskdistError

_OF_ELEMENT: Final = "_daskdist_of_element"


class FailedElement:
    """Stands in rows for an element that could not be computed.

    Parameters
    ----------
    error
        Why.
    split
        The split of which nothing could be read, so that all its elements fail at once: whoever hands out elements
        raises that once. Empty where it is this element alone.
    """

    __slots__ = ("error", "split")

    def __init__(self, error: Exception, split: str = "") -> None:
        self.error = error
        self.split = split

    def again(self) -> Exception:
        """Return an equal error, with the traceback of the first, to be raised."""
        error = self.error
        try:
            found = copy.copy(error)
        except Exception:
            return of_element(error, self.split)
        if hasattr(error, "__notes__"):
            found.__notes__ = list(error.__notes__)
        found.__cause__, found.__suppress_context__ = error.__cause__, True
        return of_element(found.with_traceback(error.__traceback__), self.split)

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        for state in ((error, error.__traceback__, error.__cause__), (error, None, None)):
            try:
                pickled = pickle.dumps(state)
                pickle.loads(pickled)
            except Exception:
                continue
            return _unpickled, (pickled, self.split)
        # An error that does not pickle is replaced by one with its type and message.
        return _unpickled, (pickle.dumps((DaskdistError(f"{type(error).__name__}: {error}"), None, None)), self.split)


def _unpickled(pickled: bytes, split: str) -> FailedElement:
    error, trace, cause = pickle.loads(pickled)
    error.__cause__ = cause
    return FailedElement(error.with_traceback(trace), split)


def of_element(error: Exception, split: str = "") -> Exception:
    """Mark an error as one behind which an iterator goes on; of a whole split as `FailedElement` has it."""
    setattr(error, _OF_ELEMENT, split)
    return error


def is_of_element(error: BaseException) -> bool:
    """Return whether an iterator goes on behind an error."""
    return hasattr(error, _OF_ELEMENT)


class ReportedFailures:
    """The splits of which an iterator has told already that they cannot be read."""

    def __init__(self) -> None:
        self._splits: set[str] = set()

    def is_new(self, error: Exception) -> bool:
        """Return whether an error is to be raised; of a split that is so once."""
        split = getattr(error, _OF_ELEMENT, "")
        if split in self._splits:
            return False
        if split:
            self._splits.add(split)
        return True


def failed_of(rows: Rows) -> tuple[tuple[int, FailedElement], ...]:
    """Return the elements that failed, each with its place."""
    if not isinstance(rows, PartlyFailed):
        return ()
    items = ((index, rows.raw(index)) for index in range(len(rows)))
    return tuple((index, item) for index, item in items if isinstance(item, FailedElement))


class PartlyFailed(Bundle):
    """Elements of which some failed: their errors are raised when they are looked at."""

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
        """Return whether every element failed, so that nothing tells how others are structured."""
        return next(self._good(), None) is None

    def item(self, index: int) -> Leaves:
        """Return the leaves of one element; raise its error if it failed."""
        item = self.raw(index)
        if isinstance(item, FailedElement):
            raise item.again()
        return item

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the elements from ``start`` to ``stop``, in order; the first that failed is the end."""
        return (self.structure.pack(self.item(k)) for k in range(*slice(start, stop).indices(len(self))))

    def raw(self, index: int) -> Leaves | FailedElement:
        """Return the leaves of one element, or what stands for it."""
        found: Leaves | FailedElement = self._items[index]
        return found

    def take(self, rows: Any) -> Bundle:
        """Return the given elements, in the given order."""
        return bundle(self.structure, [self._items[row] for row in rows], self.label)

    def slice(self, start: int, stop: int) -> Bundle:
        """Return elements ``start`` to ``stop``."""
        return bundle(self.structure, self._items[start:stop], self.label)


def _partly_failed(structure: Structure, items: Sequence[Any], label: str, skipped: tuple[Any, ...]) -> PartlyFailed:
    rows = PartlyFailed(structure, items, label)
    rows.skipped = skipped
    return rows


def bundle(structure: Structure, items: Sequence[Any], label: str, *, is_exclusive: bool = False) -> Bundle:
    """Return elements as a bundle, whether or not some of them failed."""
    kind = PartlyFailed if any(type(item) is FailedElement for item in items) else Bundle
    return kind(structure, items, label, is_exclusive=is_exclusive)


def raw_item(rows: Rows, index: int) -> Any:
    """Return the leaves of one element, or what stands for it where it failed."""
    return rows.raw(index) if isinstance(rows, PartlyFailed) else rows.item(index)


def structure_of(parts: Sequence[Rows]) -> Structure:
    """Return how the elements of parts are structured, as the first tells that has one which did not fail."""
    return next((part for part in parts if not (isinstance(part, PartlyFailed) and part.is_all)), parts[0]).structure


def _has_failed(rows: Rows) -> bool:
    return isinstance(rows, PartlyFailed) or (isinstance(rows, Batches) and isinstance(rows.rows, PartlyFailed))


def _failed_at(rows: Rows, index: int) -> FailedElement | None:
    if isinstance(rows, PartlyFailed):
        item = rows.raw(index)
        return item if isinstance(item, FailedElement) else None
    if isinstance(rows, Batches) and isinstance(rows.rows, PartlyFailed):
        places = range(rows.bounds[index], rows.bounds[index + 1])
        return next((failed for place in places if (failed := _failed_at(rows.rows, place))), None)
    return None


@dataclass(frozen=True)
class TryEach:
    """A function of rows, tried on one element after the other where it fails on all together.

    Parameters
    ----------
    function
        ``function(rows) -> rows``.
    factor
        How many elements it gives for each; None where that differs.
    """

    function: Callable[[Any], Rows]
    factor: int | None = None

    def __call__(self, rows: Rows) -> Rows:
        error = None
        if not _has_failed(rows):
            try:
                return self.function(rows)
            except Exception as failure:
                error = failure
        made = _Made(rows.label)
        for index in range(len(rows)):
            failed = _failed_at(rows, index)
            if failed is None:
                try:
                    made.add(self.function(rows.slice(index, index + 1)))
                except _OtherStructureError as other:
                    failed = FailedElement(error or other)
                except Exception as failure:
                    # The first that fails is what all failed on, and that error names the block.
                    failed = FailedElement(failure if error is None or made.has_failed else error)
            if failed is not None:
                made.items += [failed] * (1 if self.factor is None else self.factor)
        if error is not None and not made.has_failed:
            # It fails on some only where they are together.
            raise error
        return made.rows(rows)


class _OtherStructureError(DaskdistError):
    """An element is of another structure than those before."""


class _Made:
    # Elements that come of one after the other.
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
                raise _OtherStructureError(f"an element of the structure {rows.structure}, and {self.structure} before")
            self.structure = rows.structure
        self.items += [raw_item(rows, index) for index in range(len(rows))]
        self.skipped += rows.skipped

    def rows(self, given: Rows) -> Rows:
        made = bundle(given.structure if self.structure is None else self.structure, self.items, self.label)
        made.skipped = self.skipped
        return made


@dataclass(frozen=True)
class TryEachRead:
    """A reader and what is called with what it reads; of a split that cannot be read all elements failed.

    Parameters
    ----------
    function
        The reader; one that is fused with computations has them as its ``stages``.
    """

    function: Callable[..., Rows]

    def __call__(self, split: Split, *values: Any) -> Rows:
        try:
            return self.function(split, *values)
        except Exception as error:
            read, *computations = getattr(self.function, "stages", (self.function,))
            if not computations:
                return _none_of(split, error)
        try:
            rows: Rows = read(split, *values)
        except Exception as error:
            return _none_of(split, error)
        for function in computations:
            made = TryEach(function)(rows)
            if made is not rows:
                made.skipped = (*rows.skipped, *made.skipped)
            rows = made
        return rows


def _none_of(split: Split, error: Exception) -> Rows:
    number = 1 if split.num_rows is None else split.num_rows
    return PartlyFailed(LONE, [FailedElement(error, f"{split.label} {uuid.uuid4().hex}")] * number, split.label)


@dataclass(frozen=True)
class TryEachCarried:
    """A function that carries something on; what it fails on changes nothing of that."""

    function: Callable[[Rows, Any], tuple[Rows, Any]]

    def __call__(self, rows: Rows, carried: Any) -> tuple[Rows, Any]:
        if not _has_failed(rows):
            try:
                return self.function(rows, carried)
            except Exception as failure:
                error = failure
        else:
            error = None
        made = _Made(rows.label)
        for index in range(len(rows)):
            failed = _failed_at(rows, index)
            if failed is None:
                try:
                    part, carried = self.function(rows.slice(index, index + 1), carried)
                    made.add(part)
                except _OtherStructureError as other:
                    failed = FailedElement(error or other)
                except Exception as failure:
                    failed = FailedElement(failure)
            if failed is not None:
                made.items.append(failed)
        if error is not None and not made.has_failed:
            raise error
        return made.rows(rows), carried
