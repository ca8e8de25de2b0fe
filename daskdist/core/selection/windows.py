"""Rows of blocks as windows: a few numbers for any number of intervals that are equally long and equally far apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from daskdist.core.selection.intervals import Index, RowIntervals


class BlockWindows(NamedTuple):
    """Overlapping or separate windows of the rows of one block.

    Parameters
    ----------
    block
        The index of the block.
    first
        The first row of the first window.
    number
        The number of windows.
    size
        The number of rows in each.
    shift
        The number of rows between the starts of successive windows.
    """

    block: int
    first: int
    number: int
    size: int
    shift: int

    @property
    def num_rows(self) -> int:
        """The number of rows of all windows."""
        return self.number * self.size

    @property
    def bounds(self) -> Index:
        """The index among all rows of the beginning of each window, and of the end of the last."""
        return np.arange(self.number + 1) * self.size

    def part(self, start: int, stop: int) -> BlockWindows:
        """Return windows ``start`` to ``stop``."""
        return BlockWindows(self.block, self.first + start * self.shift, max(stop - start, 0), self.size, self.shift)

    def rows(self, start: int, stop: int) -> Iterator[BlockWindows]:
        """Yield the rows from ``start`` to ``stop``, of which parts of windows become windows of their own."""
        (first, begin), (last, end) = divmod(start, self.size), divmod(stop, self.size)
        if begin and first < last:
            yield self._replace(first=self.first + first * self.shift + begin, number=1, size=self.size - begin)
            first, begin = first + 1, 0
        if first < last:
            yield self.part(first, last)
        if begin < end:
            yield self._replace(first=self.first + last * self.shift + begin, number=1, size=end - begin)

    def take(self, numbers: Index) -> RowIntervals:
        """Return the windows with some numbers, in that order, as intervals."""
        bounds = np.arange(len(numbers) + 1) * self.size
        return RowIntervals(np.full(len(numbers), self.block), self.first + numbers * self.shift, bounds)


@dataclass(frozen=True, slots=True)
class RowWindows:
    """Rows of blocks as windows."""

    pieces: tuple[BlockWindows, ...]

    def __len__(self) -> int:
        return sum([piece.num_rows for piece in self.pieces])

    @property
    def intervals(self) -> RowIntervals:
        """The windows as intervals."""
        parts = [piece.take(np.arange(piece.number)) for piece in self.pieces]
        return RowIntervals.concat(parts, [np.arange(max(piece.block for piece in self.pieces) + 1)] * len(parts))

    def rows(self, start: int, stop: int) -> Iterator[BlockWindows]:
        """Yield the rows from ``start`` to ``stop``."""
        for piece in self.pieces:
            num_rows = piece.num_rows
            if start <= 0 and stop >= num_rows:
                yield piece
            elif start < num_rows and stop > 0:
                yield from piece.rows(max(start, 0), min(stop, num_rows))
            start, stop = start - num_rows, stop - num_rows


def windows_of(intervals: RowIntervals) -> RowWindows:
    """Return intervals as one window each."""
    columns = intervals.block_index.tolist(), intervals.starts.tolist(), np.diff(intervals.bounds).tolist()
    return RowWindows(
        tuple([BlockWindows(block, start, 1, size, size) for block, start, size in zip(*columns, strict=True)])
    )
