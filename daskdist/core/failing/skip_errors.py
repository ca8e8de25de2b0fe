"""Rewriting of streams to leave out elements whose computation fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from daskdist.core.block import Batches, Bundle, Rows, merge
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.failing.origin import Skipped
from daskdist.core.node import Node
from daskdist.core.primitive import (
    Arrange,
    Chain,
    Compute,
    ElementStream,
    Epoch,
    Fact,
    Primitive,
    Read,
    Split,
    Stream,
    gathered,
    same,
)
from daskdist.core.structure import LONE, Leaves
from daskdist.errors import DamagedFileError

_R = TypeVar("_R")


def skip_errors(primitive: Primitive) -> Primitive:
    """Return the stream without failing elements; each call records the elements that it leaves out."""
    match primitive:
        case Read():
            lenient = primitive.lenient or primitive
            return replace(lenient, function=SkipErrorsRead(lenient.function), factor=None)
        case Stream():
            return replace(primitive, start=SkipErrorsStart(primitive.start))
        case Compute():
            # Take batches unstacked, so that one that does not stack fails alone.
            source = skip_errors(primitive.source)
            compute = stacked if primitive.function is same else primitive.function
            return replace(primitive, source=source, function=SkipErrorsCompute(compute), factor=None, unstacked=True)
        case Chain():
            source = skip_errors(primitive.source)
            return replace(primitive, source=source, function=SkipErrorsChain(primitive.function), factor=None)
        case Fact(is_strict=True):
            return replace(primitive, source=skip_errors(primitive.source))
        case Fact():
            function = SkipErrorsFact(primitive.function, primitive.makes_rows)
            return replace(primitive, source=skip_errors(primitive.source), function=function, makes_rows=True)
        case Arrange():
            inputs = primitive.inputs
            levels = primitive.grouped - max(stream.grouped for stream in inputs)
            if levels > 0:
                # Batches of batches are stacked level by level, so that one that does not stack fails alone.
                inputs = tuple(map(gathered, inputs))
            inputs = _as_alike(inputs, tuple(map(skip_errors, inputs)))
            if primitive.on_stacked is not None and not inputs[0].grouped:
                return Compute(inputs[0], SkipErrorsCompute(primitive.on_stacked), primitive.name, None, unstacked=True)
            grouped = max(stream.grouped for stream in inputs) + levels
            arrangement = primitive.lenient or primitive.arrangement
            return replace(primitive, inputs=inputs, arrangement=arrangement, grouped=grouped)


def left_out(where: str, error: Exception, name: str) -> Primitive:
    """Return a stream of no elements, which records an element that has none of its own because of an error."""
    note = _note(where, error)
    return Read(lambda: [Split(where, note)], _no_rows, name)


def _no_rows(split: Split) -> Rows:
    return with_skipped(Bundle(LONE, [], split.label), [split.payload])


def _as_alike(before: Sequence[Primitive], after: tuple[Primitive, ...]) -> tuple[Primitive, ...]:
    """Return the streams with equal nesting, as before the rewriting: gathered if it no longer is equal."""
    levels: dict[int, set[int]] = {}
    for old, new in zip(before, after, strict=True):
        levels.setdefault(old.grouped, set()).add(new.grouped)
    return tuple(
        [gathered(new) if len(levels[old.grouped]) > 1 else new for old, new in zip(before, after, strict=True)]
    )


def cardinality_with_skips(node: Node) -> int:
    """Return the number of elements of a node if failing elements and unreadable files may be left out."""
    try:
        number = node.cardinality
    except DamagedFileError:
        return UNKNOWN
    return number if number <= 0 else UNKNOWN


def stacked(rows: Rows) -> Rows:
    """Return the rows with their batches stacked; batches that do not stack fail here."""
    if isinstance(rows, Batches):
        return Bundle(rows.structure, [rows.item(index) for index in range(len(rows))], rows.label)
    return rows


def with_skipped(rows: Rows, notes: Sequence[Skipped]) -> Rows:
    """Add records of data that was left out upstream to rows, and return them."""
    if notes:
        rows.skipped = (*notes, *rows.skipped)
    return rows


def _note(where: str, error: Exception, file: str = "", place: tuple[int, int] | None = None) -> Skipped:
    return Skipped(where, f"{type(error).__name__}: {error}", file, place)


def _of_each(rows: Rows, function: Callable[[Rows], _R]) -> tuple[list[_R], list[Skipped]]:
    # Return the results of a function for each element by itself, and notes of those for which it fails.
    results, notes = [], []
    for index in range(len(rows)):
        try:
            results.append(function(rows.slice(index, index + 1)))
        except Exception as error:
            notes.append(_note(rows.where(index), error, place=(0, index)))
    return results, notes


@dataclass(frozen=True)
class SkipErrorsCompute:
    """A function of rows, which is called for each element if it fails for all together."""

    function: Callable[[Any], Rows]

    def __call__(self, rows: Rows) -> Rows:
        try:
            return self.function(rows)
        except Exception:
            parts, notes = _of_each(rows, self.function)
            return with_skipped(merge(parts, rows), notes)


@dataclass(frozen=True)
class SkipErrorsRead:
    """A reader that returns no rows for a split whose file is damaged."""

    function: Callable[..., Rows]

    def __call__(self, split: Split, *values: Any) -> Rows:
        try:
            return self.function(split, *values)
        except DamagedFileError as error:
            return with_skipped(Bundle(LONE, [], split.label), [_note(split.label, error, split.path)])


@dataclass(frozen=True)
class SkipErrorsStart:
    """The start of a stream, which ends when an element fails."""

    start: Callable[[Epoch], ElementStream]

    def __call__(self, epoch: Epoch) -> ElementStream:
        return SkipErrorsElements(self.start(epoch))


class SkipErrorsElements:
    """The elements of a stream up to the first that fails."""

    def __init__(self, elements: ElementStream) -> None:
        self._elements = elements
        self._note: Skipped | None = None

    @property
    def element_bytes(self) -> int | None:
        """The bytes of each element; None if they vary."""
        return self._elements.element_bytes

    def __iter__(self) -> Iterator[Leaves]:
        """Return an iterator over the leaves of each element."""
        try:
            yield from self._elements
        except Exception as error:
            self._note = _note("the rest of a stream", error)

    def close(self) -> None:
        """Close the underlying stream."""
        self._elements.close()

    def rows(self, items: Sequence[Leaves], first: int) -> Rows:
        """Return elements as rows with a record of the failure."""
        note, self._note = self._note, None
        return with_skipped(self._elements.rows(items, first), [] if note is None else [note])


@dataclass(frozen=True)
class SkipErrorsChain:
    """A function that carries a state; a failing element leaves the state unchanged."""

    function: Callable[[Rows, Any], tuple[Rows, Any]]

    def __call__(self, rows: Rows, carried: Any) -> tuple[Rows, Any]:
        try:
            return self.function(rows, carried)
        except Exception:

            def of_one(row: Rows) -> Rows:
                nonlocal carried
                part, carried = self.function(row, carried)
                return part

            parts, notes = _of_each(rows, of_one)
            return with_skipped(merge(parts, rows), notes), carried


@dataclass(frozen=True)
class SkipErrorsFact:
    """A function that computes facts; elements for which it fails are left out."""

    function: Callable[[Rows], Any]
    makes_rows: bool

    def __call__(self, rows: Rows) -> tuple[Rows, Any]:
        try:
            return self._of(rows)
        except Exception:
            results, notes = _of_each(rows, self._of)
            parts = [part for part, _ in results]
            return with_skipped(merge(parts, rows), notes), _joined([fact for _, fact in results])

    def _of(self, rows: Rows) -> tuple[Rows, Any]:
        return self.function(rows) if self.makes_rows else (rows, self.function(rows))


@dataclass(frozen=True)
class WithoutInputs:
    """A function that computes facts without some elements, given by number, which failed before the position."""

    function: Callable[[Rows], tuple[Rows, Any]]
    left_out: frozenset[int]

    def __call__(self, rows: Rows) -> tuple[Rows, Any]:
        return self.function(rows.take(np.array([k for k in range(len(rows)) if k not in self.left_out], np.intp)))


def _joined(facts: list[Any]) -> Any:
    if not facts:
        return np.zeros(0, np.intp)
    return [part for fact in facts for part in fact] if isinstance(facts[0], list) else np.concatenate(facts)
