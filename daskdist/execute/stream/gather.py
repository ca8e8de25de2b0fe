"""The functions of gather tasks, which assemble rows of blocks into chunks: pure functions that any caller can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.array_pool import NUMBERS
from daskdist.core.block import (
    Batches,
    Block,
    Bundle,
    PartlyFailed,
    Rows,
    bundle,
    join,
    nested,
    structure_of,
    without_rows,
)
from daskdist.core.columns import stack
from daskdist.core.failing.failed_element import FailedElement
from daskdist.core.failing.origin import Origin, SelectedOrigins
from daskdist.core.ragged import Ragged, concat
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.lazy_shuffle import LazyPermutation, ShuffledSelection
from daskdist.core.selection.rows import Selection, WindowSelection, places_by_value
from daskdist.core.selection.runs import Run, Zipped
from daskdist.core.selection.windows import RowWindows
from daskdist.core.structure import Leaves, Structure
from daskdist.errors import StackError
from daskdist.execute.caller import Caller

# Copying this many bytes takes about as long as handing the copy to another thread.
CHEAP_BYTES: Final = 2**18

# Allocates an array of a shape and a dtype without setting its values, as `numpy.empty` does.
Empty = Callable[[tuple[int, ...], Any], Any]
# Copy each interval of rows separately if there are at most so many of them, such as the ends of two blocks that make
# up a batch, or if the intervals are of several blocks and have at least so many bytes each.
_FEW_INTERVALS: Final = 3
_MANY_BYTES: Final = 2048
# Copy rows of at least this size one by one in any order, which copies them once, instead of block by block and then
# into order.
_WIDE_ROW_BYTES: Final = 8192
# Copying rows of fewer bytes takes as long as copying rows of this size.
_FEW_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Picks:
    """Rows to gather from blocks, which are passed separately.

    Parameters
    ----------
    rows, block_index
        The rows of all elements: numbers as in a `Selection`, intervals, windows, or a permutation to be computed here.
    bounds, inners
        The batches that the rows form, as in `Groups`; None if the rows themselves are the elements.
    """

    rows: range | Index | RowIntervals | RowWindows | LazyPermutation
    block_index: Index | None
    bounds: Index | None
    inners: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, run: Run) -> Picks:
        """Return the picks for a run."""
        flat, bounds, inners = (run, None, None) if isinstance(run, Selection) else (run.flat, run.bounds, run.inners)
        if isinstance(flat, ShuffledSelection):
            return cls(flat.permuted, None, bounds, inners)
        if isinstance(flat, WindowSelection):
            return cls(flat.windows, None, bounds, inners)
        intervals = None if flat.is_range else flat.intervals
        if intervals is None:
            return cls(flat.rows, flat.block_index, bounds, inners)
        return cls(intervals, None, bounds, inners)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        if isinstance(self.rows, RowIntervals):
            return int(self.rows.bounds[-1])
        return len(self.rows)

    def by_row(self) -> tuple[range | Index, Index | None]:
        """Return ``rows`` and ``block_index`` with a number for each row."""
        if isinstance(self.rows, (RowIntervals, RowWindows)):
            intervals = self.rows if isinstance(self.rows, RowIntervals) else self.rows.intervals
            return intervals.rows, intervals.row_block_index
        if isinstance(self.rows, LazyPermutation):
            return self.rows.by_row()
        return self.rows, self.block_index

    def __reduce__(self) -> tuple[Any, ...]:
        # Index arrays pass through the scheduler with their task; four bytes suffice for the rows of any block.
        rows, block_index = self.by_row() if isinstance(self.rows, LazyPermutation) else (self.rows, self.block_index)
        return Picks, (_narrow(rows), _narrow(block_index), _narrow(self.bounds), self.inners)


def _narrow(index: Any) -> Any:
    if isinstance(index, RowIntervals):
        return RowIntervals(_narrow(index.block_index), _narrow(index.starts), _narrow(index.bounds))
    return index.astype(np.int32) if isinstance(index, np.ndarray) else index


@dataclass(frozen=True, slots=True)
class Joins:
    """Elements that each consist of one element of every part."""

    picks: tuple[Picks, ...]
    num_blocks: tuple[int, ...]
    structure: Structure

    @classmethod
    def of(cls, run: Zipped) -> Joins:
        """Return the joins for a run."""
        num_blocks = tuple(len(blocks_of(part)) for part in run.parts)
        return cls(tuple(map(Picks.of, run.parts)), num_blocks, run.structure)


def blocks_of(run: Run | Zipped) -> tuple[BlockRef, ...]:
    """Return the blocks of a run."""
    if isinstance(run, Zipped):
        return tuple(ref for part in run.parts for ref in blocks_of(part))
    return run.blocks if isinstance(run, Selection) else run.flat.blocks


def gather(
    blocks: Sequence[Rows],
    picks: Picks | Joins,
    function: Callable[[Rows], Any] | None = None,
    unstacked: bool = False,
    empty: Empty | None = None,
    *,
    as_views: bool = False,
) -> Any:
    """Gather picked rows of blocks, as a block or as batches, and apply a function to them.

    Parameters
    ----------
    blocks
        The blocks.
    picks
        The rows to gather.
    function
        Applied to the gathered rows; None returns them.
    unstacked
        Whether the elements of a batch are left unstacked, so that their shapes may differ.
    empty
        Allocates the arrays that columns of numbers are copied into. The rows then go to a single consumer, which may
        write into the copies.
    as_views
        Whether batches of consecutive rows may be views of their blocks instead of copies.
    """
    _check_structures(blocks if isinstance(picks, Picks) else ())
    if isinstance(picks, Joins):
        rows = _joined(blocks, picks, function)
    else:
        views = _views(blocks, picks, empty) if as_views else None
        rows = _gathered(blocks, picks, function, unstacked, empty) if views is None else views
    return rows if function is None else function(rows)


def _check_structures(blocks: Sequence[Rows]) -> None:
    # Without this check, leaves of one block would be returned under the names of another block's. Empty blocks have no
    # meaningful structure.
    first: Structure | None = None
    for block in blocks:
        structure = block.structure
        if structure is first or not len(block) or block.is_all_failed:
            continue
        if first is None:
            first = structure
        elif structure != first:
            raise StackError(
                f"elements of {_joined_label(blocks) or 'one dataset'} differ in structure, {first} and {structure}: "
                "change the function that makes them to return one structure"
            )


def _joined(blocks: Sequence[Rows], joins: Joins, function: Callable[[Rows], Any] | None) -> Rows:
    parts: list[Rows] = []
    start = 0
    for picks, num_blocks in zip(joins.picks, joins.num_blocks, strict=True):
        _check_structures(blocks[start : start + num_blocks])
        parts.append(_gathered(blocks[start : start + num_blocks], picks, function, False, None))
        start += num_blocks
    return join(parts, joins.structure)


def _gathered(
    blocks: Sequence[Rows], picks: Picks, function: Callable[[Rows], Any] | None, unstacked: bool, empty: Empty | None
) -> Rows:
    picked, block_index = picks.rows, picks.block_index
    if isinstance(picked, LazyPermutation):
        picked, block_index = picked.by_row()
        picks = replace(picks, rows=picked, block_index=block_index)
    label = _joined_label(blocks)
    columnar = [block for block in blocks if isinstance(block, Block)]
    rows: Block | Bundle
    if len(columnar) == len(blocks) and all(map(columnar[0].is_like, columnar[1:])):
        rows = _gather_columns(columnar, picked, block_index, label, empty)
        # An error of the function has to name the row; rows that are only moved do not record their origin.
        rows.origin = (
            Origin(label, is_exact=False)
            if function is None
            else SelectedOrigins([block.origin for block in columnar], *picks.by_row())
        )
    else:
        if isinstance(picked, range) and isinstance(blocks[0], PartlyFailed):
            # The others keep their origins.
            rows = blocks[0].slice(picked.start, picked.stop)
        else:
            rows = bundle(structure_of(blocks), _gather_items(blocks, picks), label)
        if picks.bounds is not None and not unstacked and not isinstance(rows, Block):
            items = (block.raw(row) for block in blocks for row in range(len(block)))
            like = next((item for item in items if not isinstance(item, FailedElement)), ())
            return _stacked(rows, picks.bounds, picks.inners, like, empty)
    return rows if picks.bounds is None else Batches(rows, picks.bounds.tolist(), picks.inners)


def _gather_columns(
    blocks: Sequence[Block],
    rows: range | Index | RowIntervals | RowWindows,
    block_index: Index | None,
    label: str,
    empty: Empty | None,
) -> Block:
    first = blocks[0]
    if isinstance(rows, RowWindows):
        if all(_is_compact(leaf) and leaf.size for block in blocks for leaf in block.leaves):
            columns = zip(*[block.leaves for block in blocks], strict=True)
            return _block_like(first, [_copied_windows(column, rows, empty) for column in columns], label, empty)
        rows = rows.intervals
    row_bytes = max(first.nbytes // max(len(first), 1), _FEW_BYTES)
    if isinstance(rows, RowIntervals):
        # As an int: the index arrays may have 32 bits.
        num_rows = int(rows.bounds[-1])
        # A view of few of their rows would keep the blocks.
        is_worthy = num_rows * row_bytes >= CHEAP_BYTES and 2 * num_rows >= sum(map(len, blocks))
        joined = _in_one_array(blocks, rows) if is_worthy else None
        if joined is not None and len(joined[1].starts) == 1:
            begin, stop = joined[1].starts[0], joined[1].starts[0] + num_rows
            return _block_like(first, [column[begin:stop] for column in joined[0]], label, empty)
        are_long = len(blocks) > 1 and num_rows * row_bytes >= _MANY_BYTES * len(rows.starts)
        if are_long or len(rows.starts) <= _FEW_INTERVALS:
            return _copied_intervals(blocks, rows, label, empty)
        block_index, rows = rows.row_block_index, rows.rows
    if isinstance(rows, range):
        return _block_like(first, [leaf[rows.start : rows.stop] for leaf in first.leaves], label, empty)
    if block_index is None or len(blocks) == 1:
        return _block_like(first, [_taken(leaf, rows, empty) for leaf in first.leaves], label, empty)
    if row_bytes >= _WIDE_ROW_BYTES:
        return _copied_intervals(blocks, RowIntervals(block_index, rows, np.arange(len(rows) + 1)), label, empty)
    wholes = [_whole(column, len(rows)) for column in zip(*[block.leaves for block in blocks], strict=True)]
    if None not in wholes:
        return _block_like(first, _of_wholes(wholes, rows, block_index, empty), label, empty)
    # Read block by block and write from front to back, then reorder: scattered writes would cost more.
    order, parts = [], []
    for place, at in places_by_value(block_index):
        order.append(at)
        parts.append((blocks[place].leaves, rows[at], len(at)))
    places = np.concatenate(order)
    inverse = None
    if not _is_consecutive(places):
        inverse = np.empty(len(rows), np.intp)
        inverse[places] = np.arange(len(rows))
    leaves: list[Any] = []
    for number, leaf in enumerate(first.leaves):
        if isinstance(leaf, Ragged):
            column = Ragged.concat([block_leaves[number].take(part_rows) for block_leaves, part_rows, _ in parts])
            leaves.append(column if inverse is None else column.take(inverse))
            continue
        # Only the last copy goes into memory that the consumer allocates.
        gathered = _empty((len(rows), *leaf.shape[1:]), leaf.dtype, empty if inverse is None else None)
        start = 0
        for block_leaves, part_rows, count in parts:
            # All rows are within bounds; the mode "clip" lets NumPy write without a buffer.
            np.take(block_leaves[number], part_rows, axis=0, out=gathered[start : start + count], mode="clip")
            start += count
        leaves.append(gathered if inverse is None else _taken(gathered, inverse, empty))
    return _block_like(first, leaves, label, empty)


def _block_like(like: Block, leaves: Sequence[Any], label: str, empty: Empty | None) -> Block:
    # With ``empty`` the block goes to a single consumer. Views of blocks remain read-only.
    return Block(like.structure, leaves, label, is_exclusive=empty is not None)


def _whole(column: Sequence[Any], num_rows: int) -> tuple[Any, Index] | None:
    # Return the array of which all parts of a column are consecutive rows, and the row at which each begins; None if
    # there is none, or if there are too few rows for the search to be worthwhile.
    whole = getattr(column[0], "base", None)
    if type(whole) is not np.ndarray or not whole.size or not whole.flags.c_contiguous or num_rows < 8 * len(column):
        return None
    shape, dtype = whole.shape[1:], whole.dtype
    if dtype.kind not in NUMBERS:
        return None
    for part in column:
        is_plain = type(part) is np.ndarray and part.base is whole and part.flags.c_contiguous
        if not is_plain or part.shape[1:] != shape or part.dtype != dtype:
            return None
    begins = np.array([part.__array_interface__["data"][0] for part in column])
    starts, rest = np.divmod(begins - whole.__array_interface__["data"][0], whole.strides[0])
    return None if rest.any() else (whole, starts)


def _in_one_array(blocks: Sequence[Block], rows: RowIntervals) -> tuple[tuple[Any, ...], RowIntervals] | None:
    # Return the columns of which the blocks are parts, as those of an array in memory are, and intervals of their rows:
    # intervals that follow each other in memory become one. None if the blocks are not parts of the same columns.
    if len(blocks) < 2:
        return None
    columns: list[Any] = []
    firsts: Index | None = None
    for column in zip(*[block.leaves for block in blocks], strict=True):
        whole = _whole(column, int(rows.bounds[-1]))
        if whole is None:
            return None
        array, starts = whole
        begin = starts.min()
        if firsts is not None and not np.array_equal(firsts, starts - begin):
            return None
        firsts = starts - begin
        view = array[begin:]
        view.flags.writeable = False
        columns.append(view)
    if firsts is None:
        return None
    begins = firsts[rows.block_index] + rows.starts
    is_new = np.ones(len(begins), bool)
    is_new[1:] = begins[1:] != begins[:-1] + np.diff(rows.bounds[:-1])
    number = np.count_nonzero(is_new)
    bounds = np.append(rows.bounds[:-1][is_new], rows.bounds[-1])
    return tuple(columns), RowIntervals(np.zeros(number, np.intp), begins[is_new], bounds)


def _of_wholes(wholes: Sequence[Any], rows: Index, block_index: Index, empty: Empty | None) -> list[Any]:
    leaves: list[Any] = []
    at, last_starts = rows, None
    for whole, starts in wholes:
        if last_starts is None or not np.array_equal(starts, last_starts):
            at, last_starts = starts.take(block_index), starts
            at += rows
        leaves.append(_taken(whole, at, empty))
    return leaves


def _empty(shape: tuple[int, ...], dtype: Any, empty: Empty | None) -> Any:
    return np.empty(shape, dtype) if empty is None or dtype.kind not in NUMBERS else empty(shape, dtype)


def _taken(leaf: Any, rows: Index, empty: Empty | None) -> Any:
    if empty is None or isinstance(leaf, Ragged):
        return leaf.take(rows, axis=0)
    out = _empty((len(rows), *leaf.shape[1:]), leaf.dtype, empty)
    # All rows are within bounds; the mode "clip" lets NumPy write without a buffer.
    return np.take(leaf, rows, axis=0, out=out, mode="clip")


def _copied_intervals(blocks: Sequence[Block], intervals: RowIntervals, label: str, empty: Empty | None) -> Block:
    starts, lengths = intervals.starts.tolist(), np.diff(intervals.bounds).tolist()
    cuts = [(k, slice(n, n + m)) for k, n, m in zip(intervals.block_index.tolist(), starts, lengths, strict=True)]
    columns = zip(*[block.leaves for block in blocks], strict=True)
    joined = [_concatenated([column[place][cut] for place, cut in cuts], empty) for column in columns]
    return _block_like(blocks[0], joined, label, empty)


def _copied_windows(column: Sequence[Any], windows: RowWindows, empty: Empty | None) -> Any:
    first = column[0]
    out = _empty((len(windows), *first.shape[1:]), first.dtype, empty)
    # The stride of a single row may be of any size.
    row_bytes, start = first.itemsize * prod(first.shape[1:]), 0
    for are_single, pieces in groupby(windows.pieces, lambda piece: piece.number == 1):
        if are_single:
            cuts = [column[piece.block][piece.first : piece.first + piece.size] for piece in pieces]
            stop = start + sum(map(len, cuts))
            np.concatenate(cuts, out=out[start:stop])
            start = stop
            continue
        for block, begin, number, size, shift in pieces:
            # Each window is copied as one item: NumPy takes twice as long for an axis of rows.
            item, stop = f"V{size * row_bytes}", start + number * size
            strided = np.ndarray((number,), item, column[block], begin * row_bytes, (shift * row_bytes,))
            np.copyto(out[start:stop].reshape(-1).view(item), strided)
            start = stop
    return out


def _views(blocks: Sequence[Rows], picks: Picks, empty: Empty | None) -> Bundle | None:
    # Return batches as views of their blocks; None if few batches are consecutive rows, or if a leaf is not a
    # contiguous array of numbers: a view would keep the memory between its rows, and would be slow to read.
    if picks.bounds is None or not isinstance(picks.rows, RowIntervals):
        return None
    columnar = [block for block in blocks if isinstance(block, Block)]
    if len(columnar) < len(blocks) or not all(map(columnar[0].is_like, columnar)):
        return None
    leaves, rows = [block.leaves for block in columnar], picks.rows
    if not all(map(_is_compact, chain.from_iterable(leaves))):
        return None
    joined = _in_one_array(columnar, rows)
    if joined is not None:
        leaves, rows = [joined[0]], joined[1]
    spans = rows.spans(picks.bounds[:-1], picks.bounds[1:])
    firsts = np.searchsorted(spans.bounds, picks.bounds)
    if len(spans.block_index) > 2 * len(picks.bounds):
        return None
    starts, lengths = spans.starts.tolist(), np.diff(spans.bounds).tolist()
    parts = [
        [leaf[n : n + m] for leaf in leaves[k]]
        for k, n, m in zip(spans.block_index.tolist(), starts, lengths, strict=True)
    ]
    items = []
    for number, (first, stop) in enumerate(pairwise(firsts.tolist())):
        batch = tuple(
            parts[first]
            if stop - first == 1
            else [_concatenated(column, empty) for column in zip(*parts[first:stop], strict=True)]
        )
        items.append(batch if picks.inners is None else nested(batch, picks.inners[number]))
    return Bundle(blocks[0].structure, items, _joined_label(blocks), is_exclusive=empty is not None)


def _is_compact(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype.kind in NUMBERS and leaf.flags.c_contiguous


def _concatenated(parts: Sequence[Any], empty: Empty | None) -> Any:
    first = parts[0]
    if isinstance(first, Ragged) or first.dtype.kind not in NUMBERS:
        return concat(parts)
    # Without ``out``, `numpy.concatenate` would convert to this machine's byte order.
    return np.concatenate(parts, out=_empty((sum(map(len, parts)), *first.shape[1:]), first.dtype, empty))


def _is_consecutive(index: Index) -> bool:
    return int(index[-1]) - int(index[0]) == len(index) - 1 and bool((np.diff(index) == 1).all())


def _gather_items(blocks: Sequence[Rows], picks: Picks) -> list[Any]:
    by_row, block_index = picks.by_row()
    rows = by_row if isinstance(by_row, range) else by_row.tolist()
    if block_index is None:
        return [blocks[0].raw(row) for row in rows]
    return [blocks[place].raw(row) for place, row in zip(block_index.tolist(), rows, strict=True)]


def _stacked(
    elements: Bundle, bounds: Index, inners: tuple[tuple[int, ...], ...] | None, like: Leaves, empty: Empty | None
) -> Bundle:
    chunks: list[Any] = []
    for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
        items = [elements.raw(k) for k in range(start, stop)]
        # A batch with a failed element fails, as does one that cannot be stacked; other batches are not affected.
        failed = next((item for item in items if isinstance(item, FailedElement)), None)
        if failed is not None:
            chunks.append(failed)
            continue
        try:
            leaves = stack(elements.structure, items, elements.label) if items else without_rows(like)
        except StackError as error:
            chunks.append(FailedElement(error))
            continue
        if inners is not None:
            leaves = nested(leaves, inners[number])
        chunks.append(leaves)
    return bundle(elements.structure, chunks, elements.label, is_exclusive=empty is not None)


def _joined_label(blocks: Sequence[Rows]) -> str:
    labels = list(dict.fromkeys(block.label for block in blocks if block.label))
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def run_bytes(run: Run | Zipped) -> float:
    """Return the size in bytes of all elements of a run, as far as known."""
    if isinstance(run, Groups):
        run = run.flat
    return run.element_bytes * len(run)


def is_view(run: Run | Zipped) -> bool:
    """Return whether a run is one interval of a block, which is gathered without a copy."""
    if isinstance(run, Zipped):
        return all(map(is_view, run.parts))
    return (run.flat if isinstance(run, Groups) else run).is_range


def bundle_size(caller: Caller, run: Run | Zipped, most_bytes: float) -> int:
    """Return the number of elements of a run that one call should take, within the caller's limits."""
    num_elements = max(int(min(caller.bundle_bytes, most_bytes) // max(run.element_bytes, 1)), 1)
    return min(num_elements, caller.bundle_chunks) if isinstance(run, Groups) else num_elements
