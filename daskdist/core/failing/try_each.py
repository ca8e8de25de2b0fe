"""Functions of rows of which some may fail: those elements fail in their places, and the others do not."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from daskdist.core.block import PartlyFailed, Rows, bundle
from daskdist.core.failing.composed import Composed, stages_of
from daskdist.core.failing.failed_element import FailedElement
from daskdist.core.primitive import Split, same
from daskdist.core.structure import LONE, Structure
from daskdist.errors import DamagedFileError, DaskdistError, FileError

# The failed elements of a block that keep the frames of their errors, which hold the rows and take kilobytes each.
_MOST_WITH_FRAMES: Final = 100


def not_made(error: Exception, where: str) -> Rows:
    """Return one failed element as rows: one whose stream of elements cannot be made."""
    # It is an error all the same where elements that failed are left out, unless a file is damaged.
    is_of_file = isinstance(error, FileError) and not isinstance(error, DamagedFileError)
    return bundle(LONE, [FailedElement(error, where, "", f"{where} {uuid.uuid4().hex}" if is_of_file else "")])


def not_read(split: Split, error: Exception) -> Rows:
    """Return the elements of a split of which nothing can be read; one if their number is unknown."""
    name, is_unknown = f"{split.label} {uuid.uuid4().hex}", split.num_rows is None
    failed = FailedElement(error, split.label, split.path, name, stands_for_many=is_unknown)
    return bundle(LONE, [failed] * (split.num_rows or is_unknown), split.label)


@runtime_checkable
class TakesFailed(Protocol):
    """A function of rows that is called with elements that failed, too."""

    takes_failed: bool


def takes_failed(function: Any) -> bool:
    """Return whether a function of rows is called with elements that failed, too."""
    return isinstance(function, TakesFailed) and function.takes_failed


@dataclass(frozen=True)
class TryEach:
    """A function of rows, which is called for each element if it fails for all together.

    Parameters
    ----------
    function
        ``function(rows) -> rows``. The functions of a `Composed` are called one after the other in this way.
    factor
        The number of results for each element, of which as many fail with it; if None, that varies, and one does.
    """

    function: Callable[[Any], Rows]
    factor: int | None = None

    def __call__(self, rows: Rows) -> Rows:
        for function, factor in stages_of(self.function, self.factor):
            result = _tried(rows, function, factor)
            if result is not rows:
                result.skipped = (*rows.skipped, *result.skipped)
            rows = result
        return rows


@dataclass(frozen=True)
class TryEachMany:
    """A function that makes rows and returns how many for each element; one that fails has one, which fails."""

    function: Callable[[Rows], tuple[Rows, Any]]

    def __call__(self, rows: Rows) -> tuple[Rows, Any]:
        error = None
        if not rows.has_failed:
            try:
                return self.function(rows)
            except Exception as failure:
                error = failure
        results, numbers = _of_each(rows, lambda row: self.function(row)[0], error)
        return results, np.array(numbers, np.intp)


@dataclass(frozen=True)
class TryEachRead:
    """A reader with fused computations; if a split cannot be read, all its elements fail.

    Parameters
    ----------
    function
        The reader, or a `Composed` of a reader and computations.
    is_paired
        Whether its elements are joined with others by their numbers.

    Raises
    ------
    FileError
        The number of damaged elements is unknown, and they are joined with others.
    """

    function: Callable[..., Rows]
    is_paired: bool = False

    def __call__(self, split: Split, *values: Any) -> Rows:
        (read, _), *computations = stages_of(self.function, None)
        try:
            rows: Rows = read(split, *values)
        except Exception as error:
            rows = not_read(split, error)
        if self.is_paired and isinstance(rows, PartlyFailed):
            _check_number(rows)
        return TryEach(Composed(tuple(computations)))(rows)


def _check_number(rows: PartlyFailed) -> None:
    for item in rows.failed.values():
        if item.stands_for_many:
            raise FileError(
                f"{item.error}; zip joins elements by their numbers, and how many are missing here is unknown: leave "
                "the file out, or join the elements by a key"
            ) from item.error


@dataclass(frozen=True)
class TryEachCarried:
    """A function that carries a state; an element that fails leaves the state unchanged."""

    function: Callable[[Rows, Any], tuple[Rows, Any]]

    def __call__(self, rows: Rows, state: Any) -> tuple[Rows, Any]:
        """Return the results for some rows, and the state to carry on."""
        error = None
        if not rows.has_failed:
            try:
                return self.function(rows, state)
            except Exception as failure:
                error = failure

        def of_one(row: Rows) -> Rows:
            nonlocal state
            part, state = self.function(row, state)
            return part

        results, _ = _of_each(rows, of_one, error)
        return results, state


def _tried(rows: Rows, function: Callable[[Rows], Rows], factor: int | None) -> Rows:
    if function is same or takes_failed(function):
        return function(rows)
    error = None
    if not rows.has_failed:
        try:
            return function(rows)
        except Exception as failure:
            error = failure
    result, _ = _of_each(rows, function, error, factor)
    if error is not None and not result.has_failed:
        # The function fails only for several elements together, or the error was there only for a moment.
        return function(rows)
    return result


def _of_each(
    rows: Rows, function: Callable[[Rows], Rows], error: Exception | None, factor: int | None = None
) -> tuple[Rows, list[int]]:
    # Return the results of a function for each element by itself, and their numbers; ``error`` is the one for all
    # elements together.
    results, numbers = _Results(rows.label), []
    for index in range(len(rows)):
        num_before = len(results.items)
        failed = rows.failed_at(index) or results.add(rows, index, function, error)
        if failed is not None:
            results.items += [failed] * (1 if factor is None else factor)
        numbers.append(len(results.items) - num_before)
    return results.rows(rows), numbers


def _drop_frames(error: BaseException | None) -> None:
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _OtherStructureError(DaskdistError):
    """The structure of an element differs from that of earlier ones."""


class _Results:
    # The results for single elements, collected, and how many of these failed here.
    def __init__(self, label: str) -> None:
        self.items: list[Any] = []
        self.label = label
        self.skipped: tuple[Any, ...] = ()
        self.structure: Structure | None = None
        self._num_failed = 0

    def add(
        self, rows: Rows, index: int, function: Callable[[Rows], Rows], error: Exception | None
    ) -> FailedElement | None:
        """Add the results for an element; return the element if it fails."""
        try:
            self._add(function(rows.slice(index, index + 1)))
        except _OtherStructureError as other:
            failure: Exception = error or other
        except Exception as own:
            # The first failing element caused the failure of all, whose error names the block.
            failure = own if error is None or self._num_failed else error
        else:
            return None
        self._num_failed += 1
        if self._num_failed > _MOST_WITH_FRAMES:
            _drop_frames(failure)
        return FailedElement(failure, rows.where(index))

    def _add(self, rows: Rows) -> None:
        if len(rows) and not rows.is_all_failed:
            if self.structure is not None and rows.structure != self.structure:
                raise _OtherStructureError(f"an element has structure {rows.structure}, but {self.structure} before")
            self.structure = rows.structure
        self.items += [rows.raw(index) for index in range(len(rows))]
        self.skipped += rows.skipped

    def rows(self, rows_before: Rows) -> Rows:
        elements = bundle(rows_before.structure if self.structure is None else self.structure, self.items, self.label)
        elements.skipped = self.skipped
        return elements
