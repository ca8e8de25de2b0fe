"""Selections: ordered rows of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.windows import BlockWindows, RowWindows, windows_of

# With fewer rows per interval on average, a number for each row takes less memory.
_MANY_ROWS: Final = 8
# With more pieces, windows are not kept as such.
_MOST_PIECES: Final = 512
# So many rows mostly use all blocks.
_ENOUGH_ROWS: Final = 65_536


class Selection:
    """Ordered rows of blocks.

    Either contiguous (``rows`` is a range within the only block) or scattered (``rows`` is an integer array, and
    ``block_index`` has the index of each row's block in ``blocks``, or is None for a single block).

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    rows
        The numbers of the rows in their blocks.
    block_index
        One integer for each row, an index into ``blocks``.
    """

    __slots__ = ("block_index", "blocks", "rows")

    def __init__(self, blocks: tuple[BlockRef, ...], rows: range | Index, block_index: Index | None = None) -> None:
        self.blocks = blocks
        self.rows = rows
        self.block_index = block_index

    @classmethod
    def whole(cls, ref: BlockRef) -> Selection:
        """Select all rows of a block."""
        return cls((ref,), range(ref.num_rows))

    @staticmethod
    def of(blocks: tuple[BlockRef, ...], intervals: RowIntervals, *, is_view: bool = True) -> Selection:
        """Select the rows of intervals; a single interval becomes a range if ``is_view``."""
        num_rows, num_intervals = int(intervals.bounds[-1]), len(intervals.block_index)
        if num_intervals == 1 and is_view:
            start = int(intervals.starts[0])
            return Selection((blocks[intervals.block_index[0]],), range(start, start + num_rows))
        if num_rows >= _MANY_ROWS * num_intervals:
            return IntervalSelection(blocks, intervals)
        return Selection(blocks, intervals.rows, None if len(blocks) == 1 else intervals.row_block_index)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_range(self) -> bool:
        """True if the rows are contiguous, so that they can be read as a view."""
        return isinstance(self.rows, range)

    @property
    def row_numbers(self) -> Index:
        """``rows`` as an array."""
        return np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows

    @property
    def places(self) -> Index:
        """``block_index`` as an array."""
        return np.zeros(len(self.rows), np.intp) if self.block_index is None else self.block_index

    @property
    def element_bytes(self) -> float:
        """The bytes of an element, as far as they are known."""
        return max((ref.row_bytes for ref in self.blocks), default=0)

    def __getitem__(self, part: slice) -> Selection:
        return Selection(self.blocks, self.rows[part], None if self.block_index is None else self.block_index[part])

    @property
    def intervals(self) -> RowIntervals | None:
        """The rows as intervals; None if intervals would be too short to save memory."""
        if not isinstance(self.rows, range):
            return None
        return RowIntervals(np.zeros(1, np.intp), np.array([self.rows.start]), np.array([0, len(self.rows)]))

    def to_intervals(self) -> RowIntervals:
        """Return the rows as intervals, of one row each if necessary."""
        return self.intervals or RowIntervals(self.places, self.row_numbers, np.arange(len(self) + 1))

    def spans(self, starts: Index, stops: Index) -> Selection:
        """Return the elements from each start to its stop, in order."""
        intervals = self.intervals
        if intervals is not None:
            return Selection.of(self.blocks, intervals.spans(starts, stops))
        lengths = stops - starts
        return self.take(np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum()))

    def take(self, index: Index) -> Selection:
        """Return the elements at these places."""
        rows = index + self.rows.start if isinstance(self.rows, range) else self.rows.take(index)
        return Selection(self.blocks, rows, None if self.block_index is None else self.block_index.take(index))

    @staticmethod
    def concat(parts: Sequence[Selection]) -> Selection:
        """Return the elements of all parts in order."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        joined = _join_ranges(parts)
        if joined is not None:
            return joined
        places: dict[int, int] = {}
        refs: list[BlockRef] = []
        numbers = []
        for part in parts:
            for ref in part.blocks:
                if id(ref) not in places:
                    places[id(ref)] = len(refs)
                    refs.append(ref)
            numbers.append(np.array([places[id(ref)] for ref in part.blocks], np.intp))
        if any(isinstance(part, WindowSelection) for part in parts):
            windows = _join_windows(parts, numbers)
            if windows is not None:
                return WindowSelection(tuple(refs), windows)
        intervals = [part.intervals for part in parts]
        if None not in intervals:
            return Selection.of(tuple(refs), RowIntervals.concat(intervals, numbers))  # type: ignore[arg-type]
        rows = np.concatenate([part.row_numbers for part in parts])
        block_index = [to.take(part.places) for part, to in zip(parts, numbers, strict=True)]
        return Selection(tuple(refs), rows, None if len(refs) == 1 else np.concatenate(block_index))

    def without_unused(self) -> Selection:
        """Return the same rows without unused blocks."""
        if self.block_index is None:
            return self if len(self) else Selection((), range(0))
        index, num_blocks = self.block_index, len(self.blocks)
        # The first of many rows may already show that all blocks are used.
        if len(index) > _ENOUGH_ROWS and np.bincount(index[:_ENOUGH_ROWS], minlength=num_blocks).all():
            return self
        used = np.flatnonzero(np.bincount(index, minlength=num_blocks))
        if len(used) == num_blocks:
            return self
        blocks = tuple(self.blocks[i] for i in used)
        if len(used) <= 1:
            return Selection(blocks, self.rows)
        places = np.zeros(num_blocks, np.intp)
        places[used] = np.arange(len(used))
        return Selection(blocks, self.rows, places.take(index))

    def keep(self) -> None:
        """Stop counting its blocks as outstanding."""
        for ref in self.blocks:
            ref.keep()

    def stay(self) -> None:
        """Record that its blocks exist and stay."""
        for ref in self.blocks:
            ref.is_kept = True


class IntervalSelection(Selection):
    """A selection of long intervals of rows.

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    intervals
        The rows.
    """

    __slots__ = ("_intervals", "_num_rows")

    def __init__(self, blocks: tuple[BlockRef, ...], intervals: RowIntervals) -> None:
        self.blocks = blocks
        self._intervals = intervals
        self._num_rows = int(intervals.bounds[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return IntervalSelection, (self.blocks, self._intervals)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rows(self) -> Index:  # type: ignore[override]
        return self.intervals.rows

    @property
    def block_index(self) -> Index | None:  # type: ignore[override]
        """The block of each row, by its place in ``blocks``."""
        return self.intervals.row_block_index if len(self.blocks) > 1 else None

    is_range = False

    @property
    def intervals(self) -> RowIntervals:
        return self._intervals

    def __getitem__(self, part: slice) -> Selection:
        start, stop, _ = part.indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        return self.spans(np.array([start]), np.array([max(stop, start)]))

    def take(self, index: Index) -> Selection:
        rows, block_index = self.intervals.locate(index)
        return Selection(self.blocks, rows, block_index if len(self.blocks) > 1 else None)

    def without_unused(self) -> Selection:
        intervals = self._intervals
        if len(self.blocks) == 1 and len(self):
            return self
        is_used = np.bincount(intervals.block_index, minlength=len(self.blocks)) > 0
        if is_used.all():
            return self
        blocks = tuple([self.blocks[place] for place in np.flatnonzero(is_used).tolist()])
        block_index = (np.cumsum(is_used) - 1).take(intervals.block_index)
        return IntervalSelection(blocks, RowIntervals(block_index, intervals.starts, intervals.bounds))


class WindowSelection(IntervalSelection):
    """A selection of the rows of windows.

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    windows
        The rows; there is at least one.
    """

    __slots__ = ("windows",)

    def __init__(self, blocks: tuple[BlockRef, ...], windows: RowWindows) -> None:
        self.blocks = blocks
        self.windows = windows

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowSelection, (self.blocks, self.windows)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def intervals(self) -> RowIntervals:
        return self.windows.intervals

    def __getitem__(self, part: slice) -> Selection:
        start, stop, _ = part.indices(len(self))
        if start >= stop:
            return Selection(self.blocks[:1], range(0))
        return WindowSelection(self.blocks, RowWindows(tuple(self.windows.rows(start, stop)))).without_unused()

    def spans(self, starts: Index, stops: Index) -> Selection:
        if len(self.windows.pieces) > 1 or len(starts) > _MOST_PIECES:
            return super().spans(starts, stops)
        (windows,) = self.windows.pieces
        parts = [windows.rows(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        pieces = tuple(chain.from_iterable(parts))
        return WindowSelection(self.blocks, RowWindows(pieces)) if pieces else Selection(self.blocks, range(0))

    def without_unused(self) -> Selection:
        if len(self.blocks) == 1:
            return self
        used = dict.fromkeys([piece.block for piece in self.windows.pieces])
        places = dict(zip(used, range(len(used)), strict=True))
        pieces = [BlockWindows(places[piece.block], *piece[1:]) for piece in self.windows.pieces]
        return WindowSelection(tuple([self.blocks[place] for place in used]), RowWindows(tuple(pieces)))


def _join_windows(parts: Sequence[Selection], numbers: Sequence[Index]) -> RowWindows | None:
    # Return all rows as windows; None if they are too many pieces. The numbers are the new indices of blocks.
    rows = [part.windows if isinstance(part, WindowSelection) else part.to_intervals() for part in parts]
    if sum([len(part.pieces if isinstance(part, RowWindows) else part.starts) for part in rows]) > _MOST_PIECES:
        return None
    pieces: list[BlockWindows] = []
    for part_rows, to in zip(rows, numbers, strict=True):
        windows, places = part_rows if isinstance(part_rows, RowWindows) else windows_of(part_rows), to.tolist()
        pieces += [BlockWindows(places[piece.block], *piece[1:]) for piece in windows.pieces]
    return RowWindows(tuple(pieces))


def _join_ranges(parts: Sequence[Selection]) -> Selection | None:
    # Adjacent ranges of one block stay a range, and so a view.
    first = parts[0]
    if not all(part.is_range for part in parts):
        return None
    start = stop = first.rows.start  # type: ignore[union-attr]
    for part in parts:
        if part.rows.start != stop or part.blocks != first.blocks:  # type: ignore[union-attr]
            return None
        stop = part.rows.stop  # type: ignore[union-attr]
    return Selection(first.blocks, range(start, stop))


def places_by_value(values: Index) -> Iterator[tuple[int, Index]]:
    """Yield each value of an array of small non-negative integers with its indices.

    >>> [(value, at.tolist()) for value, at in places_by_value(np.array([2, 0, 2]))]
    [(0, [1]), (2, [0, 2])]
    """
    counts = np.bincount(values)
    # A stable sort of 16-bit integers is a linear radix sort.
    order = np.argsort(values.astype(np.uint16) if len(counts) <= 2**16 else values, kind="stable")
    stops = np.cumsum(counts)
    for value in np.flatnonzero(counts).tolist():
        yield value, order[stops[value] - counts[value] : stops[value]]
