"""Rows of blocks in a random order that is computed on access and takes no memory before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.numbered_rows import NumberedRows, NumberedSelection
from daskdist.core.selection.permutation import Permutation
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run

# A request for fewer rows than the first number computes the second number of rows, which takes no longer.
_FEW: Final = 2**12
_AHEAD: Final = 2**14


@dataclass(frozen=True, slots=True, eq=False)
class LazyPermutation:
    """A part of a random order of rows of blocks.

    Parameters
    ----------
    rows, block_index
        The rows before shuffling, as in a `Selection`, as intervals or by numbers.
    order
        The order of all rows.
    places
        The part of the order, as intervals (without blocks).
    """

    rows: range | Index | RowIntervals | NumberedRows
    block_index: Index | None
    order: Permutation
    places: RowIntervals

    def __len__(self) -> int:
        return int(self.places.bounds[-1])

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The intervals of the order, as pairs of start and stop."""
        starts = self.places.starts
        return list(zip(starts.tolist(), (starts + np.diff(self.places.bounds)).tolist(), strict=True))

    def part(self, start: int, stop: int) -> LazyPermutation:
        """Return the elements from one place to another in the order."""
        return replace(self, places=RowIntervals(np.zeros(1, np.intp), np.array([start]), np.array([0, stop - start])))

    def by_row(self) -> tuple[Index, Index | None]:
        """Return ``rows`` and ``block_index`` of the elements, one number for each row."""
        if len(self.places.starts) == 1:
            return self._rows_at(self.order.between(*self.parts[0]))
        return self._rows_at(self.order.at(self.places.rows))

    def locate(self, index: Index) -> tuple[Index, Index | None]:
        """Return the row numbers and block indices of some elements."""
        return self._rows_at(self.order.at(self.places.locate(index)[0]))

    def spans(self, starts: Index, stops: Index) -> LazyPermutation:
        """Return the elements from each start to its stop, in order."""
        return replace(self, places=self.places.spans(starts, stops))

    def _rows_at(self, places: Index) -> tuple[Index, Index | None]:
        if isinstance(self.rows, (RowIntervals, NumberedRows)):
            return self.rows.locate(places)
        if isinstance(self.rows, range):
            return places + self.rows.start if self.rows.start else places, None
        return self.rows.take(places), None if self.block_index is None else self.block_index.take(places)


# Number of a range -> the row numbers and block indices of its rows.
_Ahead = dict[int, tuple[Index, Index | None]]


class ShuffledSelection(Selection):
    """A selection in a random order.

    Parameters
    ----------
    blocks
        The blocks of the rows.
    permuted
        The rows, in order.
    ahead
        The rows that were computed ahead last, shared by all parts of one selection.
    """

    __slots__ = ("_ahead", "_found", "permuted")

    def __init__(self, blocks: tuple[BlockRef, ...], permuted: LazyPermutation, ahead: _Ahead | None = None) -> None:
        self.blocks = blocks
        self.permuted = permuted
        self._ahead = {} if ahead is None else ahead
        self._found: Selection | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        permuted = self.permuted
        if permuted.order.table is None and isinstance(permuted.rows, (range, RowIntervals)):
            return ShuffledSelection, (self.blocks, permuted)
        # Smaller than the whole order with all its rows.
        rows, block_index = permuted.by_row()
        selection = Selection(self.blocks, rows, block_index if len(self.blocks) > 1 else None).without_unused()
        return Selection, (selection.blocks, selection.rows, selection.block_index)

    def __len__(self) -> int:
        return len(self.permuted)

    def by_row(self) -> Selection:
        """Return an ordinary selection of the same rows in the same order."""
        if self._found is None:
            rows, block_index = self.permuted.by_row()
            self._found = Selection(self.blocks, rows, block_index if len(self.blocks) > 1 else None)
        return self._found

    @property
    def rows(self) -> range | Index:  # type: ignore[override]
        return self.by_row().rows

    @property
    def block_index(self) -> Index | None:  # type: ignore[override]
        """The index in ``blocks`` of each row's block."""
        return self.by_row().block_index

    is_range = False
    intervals = None

    def __getitem__(self, part: slice) -> Selection:
        start, stop, _ = part.indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        if 0 < stop - start < _FEW and len(self.permuted.places.starts) == 1:
            first = int(self.permuted.places.starts[0]) + start
            number, begin = divmod(first, _AHEAD)
            if begin + stop - start <= _AHEAD:
                return self._worked_out(number)[begin : begin + stop - start]
        return self.spans(np.array([start]), np.array([max(start, stop)]))

    def _worked_out(self, number: int) -> Selection:
        cached = self._ahead.get(number)
        if cached is None:
            start = number * _AHEAD
            stop = min(start + _AHEAD, self.permuted.order.length)
            rows, block_index = self.permuted.part(start, stop).by_row()
            # Keep one range at a time, as access is mostly sequential.
            self._ahead.clear()
            self._ahead[number] = cached = rows, block_index if len(self.blocks) > 1 else None
        return Selection(self.blocks, *cached)

    def spans(self, starts: Index, stops: Index) -> Selection:
        return ShuffledSelection(self.blocks, self.permuted.spans(starts, stops), self._ahead)

    def take(self, index: Index) -> Selection:
        rows, block_index = self.permuted.locate(index)
        return Selection(self.blocks, rows, block_index if len(self.blocks) > 1 else None)

    def without_unused(self) -> Selection:
        # A whole order has rows of all blocks.
        return self if len(self) == self.permuted.order.length else self.by_row().without_unused()


def shuffled(run: Run, rng: np.random.Generator, most_drawn: int | None = None) -> Run:
    """Return the elements of a run in a random order, without references to unused blocks; see `Permutation`."""
    order = Permutation(len(run), rng, most_drawn)
    if order.table is not None or isinstance(run, Groups):
        return run.take(order.between(0, len(run)))
    places = RowIntervals(np.zeros(1, np.intp), np.zeros(1, np.int64), np.array([0, len(run)]))
    if isinstance(run, NumberedSelection):
        return ShuffledSelection(run.blocks, LazyPermutation(run.numbered, None, order, places))
    if run.intervals is not None and not run.is_range:
        return ShuffledSelection(run.blocks, LazyPermutation(run.intervals, None, order, places))
    return ShuffledSelection(run.blocks, LazyPermutation(run.rows, run.block_index, order, places))
