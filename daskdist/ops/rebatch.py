"""``rebatch``: batches of other sizes, across the boundaries of the input's batches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Compute, Cursor, Exhausted, Primitive, gathered
from daskdist.core.selection.runs import Run, RunQueue, group
from daskdist.core.spec import ElementSpec, RaggedRowSpec, SpecUnknown, known_spec
from daskdist.errors import ArgumentError
from daskdist.ops.ragged_batch import RaggedRows
from daskdist.ops.unbatch import row_spec, ungrouped

# The most batches of one pull.
_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Rebatch(Transformation):
    """The rows of all elements in batches of ``sizes``, which are used cyclically."""

    sizes: tuple[int, ...]
    drop_remainder: bool = False

    name = "rebatch"
    facts = Facts(per_worker=True, regroups=True)

    def __post_init__(self) -> None:
        for size in self.sizes:
            whole_number(self.name, "batch_size", size, at_least=0 if len(self.sizes) > 1 else 1)
        yes_or_no(self.name, "drop_remainder", self.drop_remainder)
        if not any(self.sizes):
            raise ArgumentError(f"rebatch: batch_size is {list(self.sizes)}; give at least one size of 1 or more")
        with contextlib.suppress(SpecUnknown):
            row_spec(self.name, self.source.spec)

    @property
    def rows_per_element(self) -> int | None:
        return self.sizes[0] if len(self.sizes) == 1 else None

    @property
    def drops_remainder(self) -> bool:
        return self.drop_remainder

    @property
    def spec(self) -> ElementSpec:
        size = self.sizes[0] if len(set(self.sizes)) == 1 and self.drop_remainder else None
        return row_spec(self.name, self.source.spec).grouped(size)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows = gathered(ungrouped(inputs[0]))
        rebatched = ByCursor(RebatchCursor, (self.sizes, self.drop_remainder))
        batches = Arrange((rows,), rebatched, grouped=1, name=self.name)
        spec = known_spec(self.source)
        if spec is not None:
            leaves = row_spec(self.name, spec).leaves
            is_ragged = tuple(isinstance(leaf, RaggedRowSpec) for leaf in leaves)
            if any(is_ragged):
                return Compute(batches, RaggedRows(is_ragged, np.dtype(np.int64)), self.name, factor=1, unstacked=True)
        # Empty batches need gathering: a gathered batch without rows is an element like others.
        return batches if all(self.sizes) else gathered(batches)


@dataclass
class RebatchCursor:
    """A cursor of batches: rows not yet in a batch are in ``waiting``; ``number`` batches are done."""

    source: Cursor
    sizes: tuple[int, ...]
    drop_remainder: bool
    number: int = 0
    waiting: RunQueue = field(default_factory=RunQueue)

    def pull(self) -> Run:
        coming = np.roll(self.sizes, -(self.number % len(self.sizes)))
        first = int(np.argmax(coming > 0))
        # Complete rounds that end before a non-empty batch: empty batches come with the one before them, so that the
        # end does not depend on how the rows were cut.
        coming = np.resize(coming, (_AT_ONCE // len(coming) + 1) * len(coming) + first)
        try:
            self.waiting.fill(self.source.pull, int(coming[first]))
        except Exhausted:
            return self._last(coming, first)
        stops = np.cumsum(coming)
        num_rows = max(len(self.waiting.runs[0]), int(stops[first]))
        return self._made(stops[: int(np.searchsorted(stops, num_rows, side="right"))])

    def _last(self, coming: np.ndarray[tuple[int], np.dtype[np.intp]], first: int) -> Run:
        # Empty batches at the very beginning come even if the first non-empty one is incomplete.
        num_batches = first if self.drop_remainder else first + 1
        if not self.waiting or not num_batches:
            raise Exhausted
        stops = np.zeros(num_batches, np.intp)
        stops[first:] = len(self.waiting)
        return self._made(stops)

    def _made(self, stops: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Run:
        self.number += len(stops)
        # At least one row, which gives empty batches their shape and dtype.
        return group(self.waiting.pop(max(int(stops[-1]), 1)), np.concatenate([[0], stops]))
