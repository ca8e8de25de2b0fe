"""Rows of blocks in any order, whose blocks and row numbers are computed on access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.rows import Selection

# The number of rows to process together.
_AT_ONCE: Final = 65_536
# The number of rows that mostly show which intervals are used.
_FEW: Final = 16_384
# The table of `_interval_finder` has at most so many entries, as a power of 2.
_TABLE_BITS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class NumberedRows:
    """Some rows of intervals, in any order.

    Parameters
    ----------
    block_index, starts
        The index of each interval's block, and its first row in that block, shape ``(num_intervals,)``.
    firsts
        The number of each interval's first row, in ascending order, shape ``(num_intervals,)``.
    numbers
        The number of each row, shape ``(num_rows,)``.
    """

    block_index: Index
    starts: Index
    firsts: Index
    numbers: Index

    def locate(self, index: Index | slice) -> tuple[Index, Index]:
        """Return the row numbers and the block indices of the rows at some places."""
        numbers = self.numbers[index]
        at = np.searchsorted(self.firsts, numbers, "right") - 1
        return numbers + (self.starts - self.firsts).take(at), self.block_index.take(at)

    def rows_from(self, starts: Index) -> Index:
        """Return the row number that each row would have if the intervals began at other rows."""
        numbers, rows = self.numbers, np.empty(len(self.numbers), np.int64)
        before, intervals_of = starts - self.firsts, _interval_finder(self.firsts, numbers)
        # Few at a time stay in the processor's cache.
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            np.add(before.take(intervals_of(some)), some, out=rows[start : start + _AT_ONCE])
        return rows


class NumberedSelection(Selection):
    """A selection of rows of intervals in any order, without references to unused blocks.

    Parameters
    ----------
    blocks
        The blocks of the rows.
    numbered
        The rows.
    """

    __slots__ = ("numbered",)

    def __init__(self, blocks: tuple[BlockRef, ...], numbered: NumberedRows) -> None:
        self.blocks = blocks
        self.numbered = numbered

    @classmethod
    def of_places(cls, blocks: tuple[BlockRef, ...], intervals: RowIntervals, index: Index) -> NumberedSelection:
        """Select the rows of intervals at some places, of which there is at least one."""
        is_used = _are_used(intervals.bounds, index)
        used, block_index = np.unique(intervals.block_index[is_used], return_inverse=True)
        numbered = NumberedRows(block_index, intervals.starts[is_used], intervals.bounds[:-1][is_used], index)
        return cls(tuple([blocks[place] for place in used.tolist()]), numbered)

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.blocks, self.rows, self.block_index)

    def __len__(self) -> int:
        return len(self.numbered.numbers)

    @property
    def rows(self) -> Index:  # type: ignore[override]
        return self.numbered.locate(slice(None))[0]

    @property
    def block_index(self) -> Index:  # type: ignore[override]
        """The block of each row, by its place in ``blocks``."""
        return self.numbered.locate(slice(None))[1]

    is_range = False
    intervals = None

    def __getitem__(self, part: slice) -> Selection:
        return Selection(self.blocks, *self.numbered.locate(part))

    def take(self, index: Index) -> Selection:
        return Selection(self.blocks, *self.numbered.locate(index))

    def without_unused(self) -> Selection:
        return self


def _are_used(bounds: Index, numbers: Index) -> Index:
    # Return for each interval between bounds whether it has one of the numbers. Some of the numbers show that it has,
    # and the others are compared only with the few intervals that are left.
    num_intervals, step = len(bounds) - 1, -(-len(numbers) // _FEW)
    is_used = np.bincount(np.searchsorted(bounds, numbers[::step], "right") - 1, minlength=num_intervals) > 0
    left = np.flatnonzero(~is_used)
    if step > 1 and len(left):
        others = numbers[(numbers >= bounds[left[0]]) & (numbers < bounds[left[-1] + 1])]
        is_used |= np.bincount(np.searchsorted(bounds, others, "right") - 1, minlength=num_intervals) > 0
    return is_used


def _interval_finder(firsts: Index, numbers: Index) -> Callable[[Index], Index]:
    # Return a function that returns for each of some of the numbers the last interval that begins at it or before. Most
    # are found by a table of the intervals at the ends of ranges, which takes a fifth of the time of a search.
    start, stop = int(numbers.min()), int(numbers.max()) + 1
    shift = max((stop - start).bit_length() - _TABLE_BITS, 0)
    ends = start + (np.arange(1, ((stop - start) >> shift) + 2) << shift)
    at_ends = np.searchsorted(firsts, np.append(start, ends - 1), side="right") - 1
    if (np.diff(at_ends) > 1).any():
        return lambda some: np.searchsorted(firsts, some, side="right") - 1
    table = at_ends[1:].astype(np.int32)

    def intervals_of(some: Index) -> Index:
        intervals = table.take((some - start) >> shift)
        return intervals - (some < firsts.take(intervals))

    return intervals_of
