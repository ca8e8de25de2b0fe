"""``batch_by_size``: batches with as many elements as a budget of lengths allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.core.block import Rows
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    Noted,
    Opener,
    Primitive,
    gathered,
)
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.resume_points import ResumableSource
from daskdist.core.selection.runs import Run, RunQueue, group
from daskdist.core.spec import ElementSpec, known_spec
from daskdist.core.vectorize.apply import Vectorised
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.ops.group_by_window import KeysOf
from daskdist.ops.padded_batch import Padding, PadRows
from daskdist.ops.ragged_batch import RaggedRows, is_ragged, ragged_spec


@dataclass(frozen=True, eq=False)
class BatchBySize(Transformation):
    """Batches of consecutive elements, or of elements of similar length, within a budget.

    Parameters
    ----------
    length_function
        Returns an element's length.
    budget
        The limit on the size of a batch: the number of its elements times the longest length if they are padded, else
        the sum of their lengths.
    buffer_size
        The number of consecutive elements to sort by length before they are batched; None not to sort.
    round_size
        The number of batches of each buffer is a multiple of this, if it has enough elements.
    padding
        The shapes and values to pad to; None for `Ragged` batches.
    """

    length_function: UserFunction
    budget: int
    buffer_size: int | None = None
    round_size: int = 1
    padding: Padding | None = field(default=None, repr=False)

    name = "batch_by_size"
    facts = Facts(per_worker=True, regroups=True, levels=1)

    def __post_init__(self) -> None:
        whole_number(self.name, "budget", self.budget, at_least=1)
        whole_number(self.name, "round_size", self.round_size, at_least=1)
        if self.buffer_size is not None:
            whole_number(self.name, "buffer_size", self.buffer_size, at_least=1)
        elif self.round_size > 1:
            raise ArgumentError(
                f"batch_by_size: round_size is {self.round_size} without a buffer_size; give the number of elements to "
                "sort, from which rounds of batches of similar lengths are made"
            )

    @property
    def spec(self) -> ElementSpec:
        spec = self.source.spec
        return ragged_spec(spec, None) if self.padding is None else self.padding.spec(spec, None)

    @property
    def note(self) -> str:
        """Describe whether the length function is called for many rows at once, and if not, why; nothing is read."""
        return Vectorised(self.length_function).note(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        lengths = LengthsOf(KeysOf(self.length_function, Vectorised(self.length_function), "length"), self.budget)
        measured = Fact(gathered(inputs[0]), lengths, f"{self.name}-lengths")
        rows = SizeRows(self.budget, self.buffer_size, self.round_size, is_padded=self.padding is not None)
        batches = Arrange((measured,), rows, grouped=1, name=self.name)
        if self.padding is not None:
            return Compute(batches, PadRows(self.padding), self.name, factor=1, unstacked=True)
        spec = known_spec(self.source)
        function = RaggedRows(None if spec is None else tuple(map(is_ragged, spec.leaves)), np.dtype(np.int64))
        return Compute(batches, function, self.name, factor=1, unstacked=True)


@dataclass(frozen=True)
class LengthsOf:
    """A function that returns the length of each element, shape ``(num_rows,)``; an empty element counts as 1."""

    lengths: KeysOf
    budget: int

    def __call__(self, rows: Rows) -> Index:
        lengths = self.lengths(rows)
        wrong = (lengths < 0) | (lengths > self.budget)
        if wrong.any():
            row = int(np.argmax(wrong))
            advice = (
                "return the number of tokens, rows or bytes of the element"
                if lengths[row] < 0
                else "leave longer elements out with filter(...), cut them with map(...), or give a larger budget"
            )
            raise UserFunctionError(
                f"batch_by_size: {self.lengths.function} returned {lengths[row]} on {rows.where(row)}, but a length is "
                f"from 0 to the budget, {self.budget}; {advice}"
            )
        return np.maximum(lengths, 1)


@dataclass(frozen=True)
class SizeRows:
    """The row arithmetic of `batch_by_size`; its input is a stream with each element's length."""

    budget: int
    buffer_size: int | None
    round_size: int
    is_padded: bool

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        source = ResumableSource(inputs[0](epoch), context)
        if self.buffer_size is None:
            return InOrderCursor(source, self)
        # A multiple of the round size, so that rounds are complete even if every batch has one element.
        buffer_size = -(-self.buffer_size // self.round_size) * self.round_size
        return SortedCursor(source, self, buffer_size)


# The incomplete batch: the number of its elements, their longest and their total length.
Open = tuple[int, int, int]
_NONE_OPEN: Final[Open] = 0, 0, 0


def full_batches(lengths: Sequence[int], rows: SizeRows, open_batch: Open = _NONE_OPEN) -> tuple[list[int], Open]:
    """Return the sizes of the complete batches of elements with these lengths, and the incomplete batch.

    >>> full_batches([2, 1, 3, 1], SizeRows(6, None, 1, is_padded=True))
    ([2], (2, 3, 4))
    """
    sizes = []
    budget, is_padded = rows.budget, rows.is_padded
    number, longest, total = open_batch
    for length in lengths:
        longest = max(longest, length)
        total += length
        if (longest * (number + 1) if is_padded else total) > budget:
            sizes.append(number)
            number, longest, total = 0, length, length
        number += 1
    return sizes, (number, longest, total)


@dataclass
class SizeCursor(ABC):
    """A cursor of batches; the elements that are not yet in a batch are in ``waiting``."""

    source: ResumableSource
    rows: SizeRows
    waiting: RunQueue = field(default_factory=RunQueue, kw_only=True)
    num_batches: int = field(default=0, kw_only=True)
    is_over: bool = field(default=False, kw_only=True)

    def skip(self, num_batches: int) -> int:
        """Skip batches; of the elements before the last resume point, pull only those that were in no batch there."""
        point = self.source.resume(num_batches)
        if point is None:
            return 0
        for noted in self.source.rest(point):
            self.add(noted)
        self.num_batches = point.place
        return point.place

    @abstractmethod
    def add(self, noted: Noted) -> list[int]:
        """Add elements of the input; return the sizes of the batches that they complete."""

    def pulled(self) -> list[int]:
        """Add the next elements of the input; return the sizes of the batches that they complete."""
        try:
            return self.add(self.source.pull())
        except Exhausted:
            self.is_over = True
            return []

    def batches(self, run: Run, sizes: Sequence[int]) -> Run:
        """Return the elements of a run in batches of these sizes, and record that they were returned."""
        self.num_batches += len(sizes)
        self.source.note_rest(self.num_batches, len(self.waiting))
        return group(run, np.cumsum([0, *sizes]))


@dataclass
class InOrderCursor(SizeCursor):
    """A cursor of batches in the input's order."""

    open_batch: Open = _NONE_OPEN

    def add(self, noted: Noted) -> list[int]:
        self.waiting.push(noted.run)
        sizes, self.open_batch = full_batches(noted.fact.tolist(), self.rows, self.open_batch)
        return sizes

    def pull(self) -> Run:
        while not self.is_over:
            if sizes := self.pulled():
                return self.batches(self.waiting.pop(sum(sizes)), sizes)
        if not self.waiting:
            raise Exhausted
        number = len(self.waiting)
        return self.batches(self.waiting.pop(number), [number])


@dataclass
class SortedCursor(SizeCursor):
    """A cursor of batches of sorted buffers."""

    buffer_size: int
    lengths: list[Index] = field(default_factory=list)

    def add(self, noted: Noted) -> list[int]:
        self.waiting.push(noted.run)
        self.lengths.append(noted.fact)
        return []

    def pull(self) -> Run:
        while len(self.waiting) < self.buffer_size and not self.is_over:
            self.pulled()
        if not self.waiting:
            raise Exhausted
        lengths = np.concatenate(self.lengths)
        lengths, rest = lengths[: self.buffer_size], lengths[self.buffer_size :]
        self.lengths = [rest]
        order = np.argsort(lengths, kind="stable")
        sizes = self._sizes(lengths[order].tolist())
        return self.batches(self.waiting.pop(self.buffer_size).take(order), sizes)

    def _sizes(self, lengths: list[int]) -> list[int]:
        sizes, (num_open, *_) = full_batches(lengths, self.rows)
        sizes.append(num_open)
        # Split the largest batches until rounds are complete.
        while len(sizes) % self.rows.round_size and len(sizes) < len(lengths):
            place = sizes.index(max(sizes))
            sizes[place : place + 1] = sizes[place] - sizes[place] // 2, sizes[place] // 2
        return sizes
