"""Buffers whose elements are drawn and replaced, for shuffling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.numbered_rows import NumberedSelection
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run

# The number of rows to process together.
_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class Draws:
    """Sequential draws of slots of a buffer, each of which replaces the occupant by the next incoming element.

    Parameters
    ----------
    output
        The result of each draw, shape ``(num_draws,)``: a slot for its original occupant, or ``size + t`` for the
        incoming element of draw t.
    slots
        The drawn slots, each once, in ascending order.
    last
        For each of them its last draw.
    """

    output: Index
    slots: Index
    last: Index

    @classmethod
    def of(cls, slots: Index, size: int) -> Draws:
        """Create the draws from the slot of each.

        The output of draw t is the incoming element of the latest earlier draw of its slot, or the slot's original
        occupant: sorting the draws by (slot, t) finds it for all of them at once.

        >>> Draws.of(np.array([1, 0, 1, 1]), 2)
        Draws(output=array([1, 0, 2, 4]), slots=array([0, 1]), last=array([1, 3]))
        """
        num_draws = len(slots)
        # The draw's number in the low bits makes the keys unique, so that any sort is stable.
        bits = num_draws.bit_length()
        keys: Index = slots.astype(np.uint32 if size << bits < 2**32 else np.int64)
        keys = np.sort((keys << bits) | np.arange(num_draws, dtype=keys.dtype))
        slot, draw = (keys >> bits).astype(np.intp), (keys & ((1 << bits) - 1)).astype(np.intp)
        is_first = np.ones(num_draws, bool)
        np.not_equal(slot[1:], slot[:-1], out=is_first[1:])
        previous = np.empty(num_draws, np.intp)
        previous[1:] = draw[:-1] + size
        np.copyto(previous, slot, where=is_first)
        output = np.empty(num_draws, np.intp)
        output[draw] = previous
        is_last = np.append(is_first[1:], True)[:num_draws]
        return cls(output, slot[is_last], draw[is_last])


class RowBuffer:
    """A buffer of rows; the cost of an exchange depends on the number of draws, not on the size of the buffer."""

    def __init__(self, rows: Selection) -> None:
        # The original rows until the first exchange, then None; a buffer of all rows has no exchange.
        self._rows: Selection | None = rows
        self._blocks: list[BlockRef] = []
        self._place_of: dict[int, int] = {}
        self._codes: Index = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._codes if self._rows is None else self._rows)

    def exchange(self, draws: Draws, incoming: Selection) -> Selection:
        """Return the elements that draws select from the buffer and the incoming rows; the rest stays."""
        if self._rows is not None:
            self._codes, self._rows = self._coded(self._rows), None
        new = self._coded(incoming)
        is_new = draws.output >= len(self)
        output = self._codes.take(np.where(is_new, 0, draws.output))
        output[is_new] = new.take(draws.output[is_new] - len(self))
        self._codes[draws.slots] = new.take(draws.last)
        return self._decoded(output)

    def tidy(self, compact: Callable[[Run], Run]) -> None:
        """Drop references to blocks without rows here, and apply ``compact`` to others."""
        # Process parts, and only rows of blocks that are more than half empty: arrays of all rows of a large buffer
        # would take as much memory as could be freed.
        blocks, parts = self._blocks, np.split(self._codes, range(_AT_ONCE, len(self), _AT_ONCE))
        counts = np.sum([np.bincount(part >> 32, minlength=len(blocks)) for part in parts], axis=0)
        is_sparse = np.array([2 * count < ref.num_rows for count, ref in zip(counts, blocks, strict=True)])
        at = np.flatnonzero(np.concatenate([is_sparse.take(part >> 32) for part in parts]))
        sparse_rows = self._decoded(self._codes.take(at), np.int32).without_unused()
        self._blocks, self._place_of = [], {}
        stay = [count and not sparse for count, sparse in zip(counts, is_sparse, strict=True)]
        places = np.array([self._place(ref) if stays else 0 for ref, stays in zip(blocks, stay, strict=True)], np.int64)
        for part in parts:
            part[:] = (places.take(part >> 32) << 32) + (part & 0xFFFFFFFF)
        if len(at):
            self._codes[at] = self._coded(compact(sparse_rows))  # type: ignore[arg-type]  # rows stay rows

    def rest(self) -> Selection:
        """Return the elements of the buffer in the order of the slots."""
        return self._decoded(self._codes, np.int32) if self._rows is None else self._rows

    def _coded(self, rows: Selection) -> Index:
        # Encode a row as one number, the index of the block in the high bits: half as much data to move.
        places = np.array([self._place(ref) for ref in rows.blocks], np.int64) << 32
        if isinstance(rows, NumberedSelection):
            numbered = rows.numbered
            return numbered.rows_from(numbered.starts + places.take(numbered.block_index))
        if rows.block_index is None:
            return rows.row_numbers.astype(np.int64) + (places[0] if len(places) else 0)
        codes: Index = places.take(rows.block_index)
        codes += rows.row_numbers
        return codes

    def _decoded(self, codes: Index, dtype: Any = np.int64) -> Selection:
        rows, block_index = (codes & 0xFFFFFFFF).astype(dtype, copy=False), (codes >> 32).astype(dtype, copy=False)
        return Selection(tuple(self._blocks), rows, block_index)

    def _place(self, ref: BlockRef) -> int:
        place = self._place_of.setdefault(id(ref), len(self._blocks))
        if place == len(self._blocks):
            self._blocks.append(ref)
        return place


class BatchBuffer:
    """A buffer of ungathered batches."""

    def __init__(self, batches: Groups) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def exchange(self, draws: Draws, incoming: Groups) -> Groups:
        """Return the elements that draws select from the buffer and the incoming batches; the rest stays."""
        pool = Groups.concat([self._batches, incoming])
        occupants = np.arange(len(self))
        occupants[draws.slots] = draws.last + len(self)
        self._batches = pool.take(occupants)
        return pool.take(draws.output).without_unused()

    def tidy(self, compact: Callable[[Run], Run]) -> None:
        """Drop references to blocks without rows here, and apply ``compact`` to others."""
        self._batches = compact(self._batches.without_unused())  # type: ignore[assignment]  # batches stay batches

    def rest(self) -> Groups:
        """Return the elements of the buffer in the order of the slots."""
        return self._batches


def buffer_of(run: Run) -> RowBuffer | BatchBuffer:
    """Return a buffer that holds the elements of a run."""
    return BatchBuffer(run) if isinstance(run, Groups) else RowBuffer(run)


def buffer_of_places(run: Run, places: Index) -> RowBuffer | BatchBuffer:
    """Return a buffer that holds the elements at some places of a run, one for each slot."""
    if isinstance(run, Selection) and run.intervals is not None:
        return RowBuffer(NumberedSelection.of_places(run.blocks, run.intervals, places))
    return buffer_of(run.take(places).without_unused())
