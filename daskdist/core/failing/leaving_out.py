"""Leaving out elements that failed: a filter of the good ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from daskdist.core.block import Batches, Block, Bundle, PartlyFailed, Rows, bundle, from_items
from daskdist.core.failing.failed_element import FailedElement
from daskdist.core.failing.origin import Origin, Skipped
from daskdist.core.failing.try_each import takes_failed
from daskdist.core.primitive import Arrange, Chain, Compute, Fact, Primitive, Read, Stream, gathered
from daskdist.core.ragged import Ragged
from daskdist.errors import DamagedFileError, StackError


def without_failed(primitive: Primitive) -> Primitive:
    """Return the stream without elements that failed, before operations that group elements and at its end.

    What a damaged file has left is read.
    """
    return _filtered(_before_groups(primitive))


def _filtered(primitive: Primitive) -> Primitive:
    return Compute(gathered(primitive), LeaveOutFailed(), "left-out", factor=None)


def _before_groups(primitive: Primitive) -> Primitive:
    match primitive:
        case Read() | Stream():
            return primitive
        case Compute():
            return replace(primitive, source=_before_groups(primitive.source))
        case Chain():
            return replace(primitive, source=without_failed(primitive.source))
        case Fact(is_strict=True) if not takes_failed(primitive.function):
            return replace(primitive, source=without_failed(primitive.source))
        case Fact():
            return replace(primitive, source=_before_groups(primitive.source))
        case Arrange():
            inputs = primitive.inputs
            levels = primitive.grouped - max(stream.grouped for stream in inputs)
            changed = [_of_groups(source) if levels > 0 else _before_groups(source) for source in inputs]
            inputs = _as_alike(inputs, changed)
            if primitive.on_stacked is not None and not inputs[0].grouped:
                return Compute(inputs[0], primitive.on_stacked, primitive.name, factor=None)
            grouped = max(stream.grouped for stream in inputs) + levels
            arrangement = primitive.lenient or primitive.arrangement
            return replace(primitive, inputs=inputs, arrangement=arrangement, grouped=grouped)


def _of_groups(primitive: Primitive) -> Primitive:
    # Return the input of an operation that groups elements.
    if isinstance(primitive, Fact):
        return replace(primitive, source=without_failed(primitive.source))
    return without_failed(primitive)


def _as_alike(before: Sequence[Primitive], after: Sequence[Primitive]) -> tuple[Primitive, ...]:
    # Return the streams with equal nesting where it was equal before: gathered if it no longer is.
    levels: dict[int, set[int]] = {}
    for old, new in zip(before, after, strict=True):
        levels.setdefault(old.grouped, set()).add(new.grouped)
    return tuple(
        [gathered(new) if len(levels[old.grouped]) > 1 else new for old, new in zip(before, after, strict=True)]
    )


@dataclass(frozen=True)
class LeaveOutFailed:
    """A filter of the elements that did not fail; it notes the others, and all that failed together as one.

    Of the elements that could not be read, those of damaged files are left out.
    """

    # It is called with elements that failed, see `TryEach`.
    takes_failed: ClassVar[bool] = True

    def __call__(self, rows: Rows) -> Rows:
        if isinstance(rows, Batches):
            rows = _stacked(rows)
        if not isinstance(rows, PartlyFailed):
            return rows
        kept: dict[int, FailedElement] = {}
        notes, seen = list[Skipped](), set[str]()
        for number, (place, item) in enumerate(sorted(rows.failed.items())):
            if item.split and not isinstance(item.error, DamagedFileError):
                kept[place - number + len(kept)] = item
            elif not item.split or item.split not in seen:
                seen.add(item.split)
                notes.append(Skipped(item.where or "an element", _reason(item), item.file))
        good = _columns(rows.good)
        result = PartlyFailed(good, kept) if kept else good
        result.skipped = tuple(notes)
        return result


def _columns(rows: Rows) -> Any:
    # Return elements in other rows, which can be noted on: as a block if they are alike.
    if not isinstance(rows, Bundle):
        return rows.slice(0, len(rows))
    items = [rows.item(index) for index in range(len(rows))]
    return from_items(rows.structure, items, rows.label, Origin(rows.label, is_exact=False))


def _stacked(rows: Batches) -> Rows:
    # Return the batches with those that do not stack as failed ones.
    if isinstance(rows.rows, Block) and not any(isinstance(leaf, Ragged) for leaf in rows.rows.leaves):
        return rows
    items: list[Any] = []
    for index in range(len(rows)):
        try:
            items.append(rows.item(index))
        except StackError as error:
            items.append(FailedElement(error, rows.where(index)))
    return bundle(rows.structure, items, rows.label)


def _reason(item: FailedElement) -> str:
    # The error of a damaged part begins with its name.
    kind = "" if item.file else f"{type(item.error).__name__}: "
    return f"{kind}{item.error}".removeprefix(f"{item.where}: ")
