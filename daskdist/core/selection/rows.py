"""Selections: rows of blocks, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.intervals import Index, Stretched

# With fewer rows than so many in a stretch, on the average, a number for each row is no more.
_MANY_ROWS: Final = 8


class Selection:
    """Rows of blocks, in order.

    Either contiguous (``rows`` is a range, within the one block there is) or scattered (``rows`` is an
    integer array; ``which`` gives each row's block by its place in ``blocks``, or is None for just one).

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    rows
        Row numbers within their blocks.
    which
        One integer a row, an index into ``blocks``.
    """

    __slots__ = ("blocks", "rows", "which")

    def __init__(self, blocks: tuple[BlockRef, ...], rows: range | Index, which: Index | None = None) -> None:
        self.blocks = blocks
        self.rows = rows
        self.which = which

    @classmethod
    def whole(cls, ref: BlockRef) -> Selection:
        """All rows of a block."""
        return cls((ref,), range(ref.num_rows))

    @staticmethod
    def of(blocks: tuple[BlockRef, ...], stretches: Stretched, *, is_view: bool = True) -> Selection:
        """The rows of some stretches; of just one as a view, if that will do."""
        num_rows, num_stretches = int(stretches.bounds[-1]), len(stretches.which)
        if num_stretches == 1 and is_view:
            start = int(stretches.starts[0])
            return Selection((blocks[stretches.which[0]],), range(start, start + num_rows))
        if num_rows >= _MANY_ROWS * num_stretches:
            return Stretches(blocks, stretches)
        return Selection(blocks, stretches.rows, None if len(blocks) == 1 else stretches.which_rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_range(self) -> bool:
        """Whether they are contiguous, so that they can be had as a view."""
        return isinstance(self.rows, range)

    @property
    def row_numbers(self) -> Index:
        """``rows`` as an array."""
        return np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows

    @property
    def places(self) -> Index:
        """``which`` as an array."""
        return np.zeros(len(self.rows), np.intp) if self.which is None else self.which

    @property
    def element_bytes(self) -> float:
        """The size of an element, as far as known."""
        return max((ref.row_bytes for ref in self.blocks), default=0)

    def __getitem__(self, part: slice) -> Selection:
        return Selection(self.blocks, self.rows[part], None if self.which is None else self.which[part])

    @property
    def stretches(self) -> Stretched | None:
        """What tells the rows without a number for each; None where that takes one for each."""
        if not isinstance(self.rows, range):
            return None
        return Stretched(np.zeros(1, np.intp), np.array([self.rows.start]), np.array([0, len(self.rows)]))

    def by_stretch(self) -> Stretched:
        """The same, of one row each where there is no other way."""
        return self.stretches or Stretched(self.places, self.row_numbers, np.arange(len(self) + 1))

    def of_blocks(self, blocks: tuple[Any, ...]) -> Selection:
        """The same rows of other blocks."""
        return Selection(blocks, self.rows, self.which)

    def spans(self, starts: Index, stops: Index) -> Selection:
        """The elements from each start to its stop, one span after the other."""
        stretches = self.stretches
        if stretches is not None:
            return Selection.of(self.blocks, stretches.spans(starts, stops))
        lengths = stops - starts
        return self.take(np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum()))

    def take(self, index: Index) -> Selection:
        """The elements at these places."""
        rows = index + self.rows.start if isinstance(self.rows, range) else self.rows.take(index)
        return Selection(self.blocks, rows, None if self.which is None else self.which.take(index))

    @staticmethod
    def concat(parts: Sequence[Selection]) -> Selection:
        """The elements of all parts, one after the other."""
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
        stretches = [part.stretches for part in parts]
        if None not in stretches:
            return Selection.of(tuple(refs), Stretched.concat(stretches, numbers))  # type: ignore[arg-type]
        rows = np.concatenate([part.row_numbers for part in parts])
        which = [to.take(part.places) for part, to in zip(parts, numbers, strict=True)]
        return Selection(tuple(refs), rows, None if len(refs) == 1 else np.concatenate(which))

    def without_unused(self) -> Selection:
        """The same rows, holding on to no block that has none of them."""
        if self.which is None:
            return self if len(self) else Selection((), range(0))
        counts = np.bincount(self.which, minlength=len(self.blocks))
        used = np.flatnonzero(counts)
        if len(used) == len(self.blocks):
            return self
        blocks = tuple(self.blocks[i] for i in used)
        if len(used) <= 1:
            return Selection(blocks, self.rows)
        places = np.zeros(len(self.blocks), np.intp)
        places[used] = np.arange(len(used))
        return Selection(blocks, self.rows, places.take(self.which))

    def keep(self) -> None:
        """Let its blocks no longer count as outstanding."""
        for ref in self.blocks:
            ref.keep()

    def stay(self) -> None:
        """Note that its blocks are there and stay."""
        for ref in self.blocks:
            ref.is_kept = True


class Stretches(Selection):
    """A selection whose rows come in long stretches.

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    stretches
        Which rows.
    """

    __slots__ = ("_num_rows", "_stretches")

    def __init__(self, blocks: tuple[BlockRef, ...], stretches: Stretched) -> None:
        self.blocks = blocks
        self._stretches = stretches
        self._num_rows = int(stretches.bounds[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Stretches, (self.blocks, self._stretches)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rows(self) -> Index:  # type: ignore[override]
        return self._stretches.rows

    @property
    def which(self) -> Index | None:  # type: ignore[override]
        return self._stretches.which_rows if len(self.blocks) > 1 else None

    is_range = False

    @property
    def stretches(self) -> Stretched:
        return self._stretches

    def of_blocks(self, blocks: tuple[Any, ...]) -> Selection:
        return Stretches(blocks, self._stretches)

    def __getitem__(self, part: slice) -> Selection:
        start, stop, _ = part.indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        return self.spans(np.array([start]), np.array([max(stop, start)]))

    def take(self, index: Index) -> Selection:
        rows, which = self._stretches.taken(index)
        return Selection(self.blocks, rows, which if len(self.blocks) > 1 else None)

    def without_unused(self) -> Selection:
        stretches = self._stretches
        if len(self.blocks) == 1 and len(self):
            return self
        is_used = np.bincount(stretches.which, minlength=len(self.blocks)) > 0
        if is_used.all():
            return self
        blocks = tuple([self.blocks[place] for place in np.flatnonzero(is_used).tolist()])
        which = (np.cumsum(is_used) - 1).take(stretches.which)
        return Stretches(blocks, Stretched(which, stretches.starts, stretches.bounds))


def _join_ranges(parts: Sequence[Selection]) -> Selection | None:
    # Contiguous rows that follow on in one block stay a range, and so a view.
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
    """Each value of a small non-negative integer array, and where it stands.

    >>> [(value, at.tolist()) for value, at in places_by_value(np.array([2, 0, 2]))]
    [(0, [1]), (2, [0, 2])]
    """
    counts = np.bincount(values)
    # A stable sort of 16-bit integers is a radix sort: linear.
    order = np.argsort(values.astype(np.uint16) if len(counts) <= 2**16 else values, kind="stable")
    stops = np.cumsum(counts)
    for value in np.flatnonzero(counts).tolist():
        yield value, order[stops[value] - counts[value] : stops[value]]
