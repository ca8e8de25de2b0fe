"""Rows of blocks as intervals: a few numbers for each interval, and none for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Index = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class RowIntervals:
    """Rows of blocks as intervals of consecutive rows.

    Parameters
    ----------
    block_index
        The index of each interval's block, shape ``(num_intervals,)``.
    starts
        The first row of each interval in its block, shape ``(num_intervals,)``.
    bounds
        The index among all rows of the beginning of each interval, and of the end of the last, shape
        ``(num_intervals + 1,)``.
    """

    block_index: Index
    starts: Index
    bounds: Index

    @property
    def rows(self) -> Index:
        """The number of each row in its block."""
        return np.repeat(self.starts - self.bounds[:-1], np.diff(self.bounds)) + np.arange(self.bounds[-1])

    @property
    def row_block_index(self) -> Index:
        """The index of each row's block."""
        return np.repeat(self.block_index, np.diff(self.bounds))

    def locate(self, index: Index) -> tuple[Index, Index]:
        """Return the row numbers and the block indices of the rows at some places."""
        at = np.searchsorted(self.bounds, index, "right") - 1
        return index + (self.starts - self.bounds[:-1]).take(at), self.block_index.take(at)

    def spans(self, starts: Index, stops: Index) -> RowIntervals:
        """Return the rows between each start and its stop."""
        if len(self.starts) == len(starts) == 1 and starts[0] < stops[0]:
            # The usual case of many small parts of a long interval.
            return RowIntervals(self.block_index, self.starts + starts, np.array([0, stops[0] - starts[0]]))
        first = np.searchsorted(self.bounds, starts, "right") - 1
        counts = np.where(stops > starts, np.searchsorted(self.bounds, stops, "left") - first, 0)
        ends = np.cumsum(counts)
        at = np.repeat(first - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
        begins = self.bounds[at]
        cut = np.maximum(np.repeat(starts, counts), begins)
        lengths = np.minimum(np.repeat(stops, counts), self.bounds[at + 1]) - cut
        return RowIntervals(
            self.block_index[at], self.starts[at] + cut - begins, np.concatenate([[0], np.cumsum(lengths)])
        )

    @staticmethod
    def concat(parts: Sequence[RowIntervals], numbers: Sequence[Index]) -> RowIntervals:
        """Return all parts in order; ``numbers`` are the new indices of each one's blocks."""
        lengths = np.concatenate([np.diff(part.bounds) for part in parts])
        block_index = np.concatenate([to.take(part.block_index) for part, to in zip(parts, numbers, strict=True)])
        return RowIntervals(
            block_index, np.concatenate([part.starts for part in parts]), np.concatenate([[0], np.cumsum(lengths)])
        )
