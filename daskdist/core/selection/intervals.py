"""Rows of blocks in stretches of consecutive ones: a few numbers for each stretch, and none for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Index = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class RowIntervals:
    """Rows of blocks in stretches of consecutive ones.

    Parameters
    ----------
    which
        Of each stretch the place of its block, shape ``(num_stretches,)``.
    starts
        Its first row there, shape ``(num_stretches,)``.
    bounds
        Where among all rows each stretch begins and the last ends, shape ``(num_stretches + 1,)``.
    """

    block_index: Index
    starts: Index
    bounds: Index

    @property
    def rows(self) -> Index:
        """The row number of each row."""
        return np.repeat(self.starts - self.bounds[:-1], np.diff(self.bounds)) + np.arange(self.bounds[-1])

    @property
    def row_block_index(self) -> Index:
        """The place of each row's block."""
        return np.repeat(self.block_index, np.diff(self.bounds))

    def locate(self, index: Index) -> tuple[Index, Index]:
        """Return the row numbers of the rows in some places, and the index of each one's block."""
        length = int(self.bounds[1]) if len(self.starts) else 0
        if (np.diff(self.bounds[:-1]) == length).all() and self.bounds[-1] <= length * len(self.starts):
            # All as long as the first, but for the last: a tenth of the time.
            at = index // length
        else:
            at = np.searchsorted(self.bounds, index, "right") - 1
        return index + (self.starts - self.bounds[:-1]).take(at), self.block_index.take(at)

    def spans(self, starts: Index, stops: Index) -> RowIntervals:
        """Return the rows between each start and its stop."""
        if len(self.starts) == len(starts) == 1 and starts[0] < stops[0]:
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
        """Return all parts, one after the other; ``numbers`` are the new places of each one's blocks."""
        lengths = np.concatenate([np.diff(part.bounds) for part in parts])
        block_index = np.concatenate([to.take(part.block_index) for part, to in zip(parts, numbers, strict=True)])
        return RowIntervals(
            block_index, np.concatenate([part.starts for part in parts]), np.concatenate([[0], np.cumsum(lengths)])
        )
