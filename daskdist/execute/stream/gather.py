"""What gather tasks do: rows of blocks put together as chunks. Pure functions, run wherever a caller runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from daskdist.core.array_pool import NUMBERS
from daskdist.core.block import Batches, Block, Bundle, Rows, join, nested, stack, without_rows
from daskdist.core.failures import FailedElement, PartlyFailed, bundle, raw_item, structure_of
from daskdist.core.origin import Origin, SelectedOrigins
from daskdist.core.ragged import Ragged, concat
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.lazy_shuffle import LazyPermutation, ShuffledSelection
from daskdist.core.selection.rows import Selection, places_by_value
from daskdist.core.selection.runs import Run, Zipped
from daskdist.core.structure import Leaves, Structure
from daskdist.errors import StackError
from daskdist.execute.caller import Caller

# To copy so much takes about as long as to hand it to another thread.
CHEAP_BYTES: Final = 2**18

# Makes an array of a shape and a dtype whose values are not set, as `numpy.empty` does.
Empty = Callable[[tuple[int, ...], Any], Any]
# Stretches in which no series is looked for, such as the ends of two blocks that make up a batch.
_FEW: Final = 3


@dataclass(frozen=True, slots=True)
class Picks:
    """Rows to gather of blocks that are given apart.

    Parameters
    ----------
    rows, block_index
        The rows of all elements, as in a `Selection`, in stretches, or in an order that is worked out here.
    bounds, inners
        How they are batches, as in `Groups`; None where the elements are the rows themselves.
    """

    rows: range | Index | RowIntervals | LazyPermutation
    block_index: Index | None
    bounds: Index | None
    inners: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, run: Run) -> Picks:
        """What gathers a run."""
        flat, bounds, inners = (run, None, None) if isinstance(run, Selection) else (run.flat, run.bounds, run.inners)
        if isinstance(flat, ShuffledSelection):
            return cls(flat.permuted, None, bounds, inners)
        intervals = None if flat.is_range else flat.intervals
        if intervals is None:
            return cls(flat.rows, flat.block_index, bounds, inners)
        return cls(intervals, None, bounds, inners)

    @property
    def num_rows(self) -> int:
        """How many there are."""
        if isinstance(self.rows, RowIntervals):
            return int(self.rows.bounds[-1])
        return len(self.rows)

    def by_row(self) -> tuple[range | Index, Index | None]:
        """``rows`` and ``block_index`` with a number for each row."""
        if isinstance(self.rows, RowIntervals):
            return self.rows.rows, self.rows.row_block_index
        if isinstance(self.rows, LazyPermutation):
            return self.rows.by_row()
        return self.rows, self.block_index

    def __reduce__(self) -> tuple[Any, ...]:
        # Index arrays travel through the scheduler with their task: four bytes do for any block there can be.
        rows, block_index = self.by_row() if isinstance(self.rows, LazyPermutation) else (self.rows, self.block_index)
        return Picks, (_narrow(rows), _narrow(block_index), _narrow(self.bounds), self.inners)


def _narrow(index: Any) -> Any:
    if isinstance(index, RowIntervals):
        return RowIntervals(_narrow(index.block_index), _narrow(index.starts), _narrow(index.bounds))
    return index.astype(np.int32) if isinstance(index, np.ndarray) else index


@dataclass(frozen=True, slots=True)
class Joins:
    """Elements to make of one element each of what several picks give.

    Parameters
    ----------
    picks
        Of each part.
    num_blocks
        Of each part how many of the blocks are its.
    structure
        How the parts' elements nest.
    """

    picks: tuple[Picks, ...]
    num_blocks: tuple[int, ...]
    structure: Structure

    @classmethod
    def of(cls, run: Zipped) -> Joins:
        """What gathers a run."""
        num_blocks = tuple(len(blocks_of(part)) for part in run.parts)
        return cls(tuple(map(Picks.of, run.parts)), num_blocks, run.structure)


def blocks_of(run: Run | Zipped) -> tuple[BlockRef, ...]:
    """The blocks a run has rows of."""
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
    """The rows picked of the blocks, as a block or as batches; then what ``function`` makes of them.

    The elements of a batch that is wanted ``unstacked`` need not stack. Columns of numbers that have to be copied are
    copied into arrays that ``empty`` makes, if given: then the rows go to one consumer, who may write into what was
    copied. What need not be copied, as each batch is consecutive rows, is not if batches may be ``as_views``.
    """
    _check_structures(blocks if isinstance(picks, Picks) else ())
    if isinstance(picks, Joins):
        rows = _joined(blocks, picks, function)
    else:
        views = _views(blocks, picks, empty) if as_views else None
        rows = _gathered(blocks, picks, function, unstacked, empty) if views is None else views
    return rows if function is None else function(rows)


def _check_structures(blocks: Sequence[Rows]) -> None:
    # Else leaves of one would go by the names that another has for its own. Those without elements say nothing.
    first: Structure | None = None
    for block in blocks:
        structure = block.structure
        if structure is first or not len(block) or (isinstance(block, PartlyFailed) and block.is_all):
            continue
        if first is None:
            first = structure
        elif structure != first:
            raise StackError(
                f"elements of {_joined_label(blocks) or 'one dataset'} differ in structure, {first} and {structure}: "
                "have the function that makes them give all of them one structure"
            )


def _joined(blocks: Sequence[Rows], joins: Joins, function: Callable[[Rows], Any] | None) -> Rows:
    parts: list[Rows] = []
    start = 0
    for picks, num_blocks in zip(joins.picks, joins.num_blocks, strict=True):
        _check_structures(blocks[start : start + num_blocks])
        parts.append(_gathered(blocks[start : start + num_blocks], picks, function, False, None))
        start += num_blocks
    if not any(isinstance(part, PartlyFailed) for part in parts):
        return join(parts, joins.structure)
    # Elements of several parts fail where one of those does.
    structure, items = joins.structure.nest([structure_of([part]) for part in parts]), []
    for index in range(len(parts[0])):
        found = [raw_item(part, index) for part in parts]
        failed = next((item for item in found if isinstance(item, FailedElement)), None)
        items.append(tuple(leaf for item in found for leaf in item) if failed is None else failed)
    return bundle(structure, items, ", ".join(dict.fromkeys(part.label for part in parts if part.label)))


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
        # A message of the function may have to say which row it was. Rows that only move do not take that along.
        rows.origin = (
            Origin(label, is_exact=False)
            if function is None
            else SelectedOrigins([block.origin for block in columnar], *picks.by_row())
        )
    else:
        rows = bundle(structure_of(blocks), _gather_items(blocks, picks), label)
        if picks.bounds is not None and not unstacked:
            items = (raw_item(block, row) for block in blocks for row in range(len(block)))
            like = next((item for item in items if not isinstance(item, FailedElement)), ())
            return _stacked(rows, picks.bounds, picks.inners, like, empty)
    return rows if picks.bounds is None else Batches(rows, picks.bounds.tolist(), picks.inners)


def _gather_columns(
    blocks: Sequence[Block],
    rows: range | Index | RowIntervals,
    block_index: Index | None,
    label: str,
    empty: Empty | None,
) -> Block:
    first = blocks[0]
    if isinstance(rows, RowIntervals):
        return _one_after_another(blocks, rows, label, empty)
    if isinstance(rows, range):
        return _made(first, [leaf[rows.start : rows.stop] for leaf in first.leaves], label, empty)
    if block_index is None or len(blocks) == 1:
        return _made(first, [_taken(leaf, rows, empty) for leaf in first.leaves], label, empty)
    intervals = _intervals(rows, block_index, 2 * len(blocks))
    if intervals is not None:
        return _one_after_another(blocks, intervals, label, empty)
    wholes = [_whole(column, len(rows)) for column in zip(*[block.leaves for block in blocks], strict=True)]
    if None not in wholes:
        return _made(first, _of_wholes(wholes, rows, block_index, empty), label, empty)
    # Read block by block, written from front to back; then put in order. Scattered writes would cost more.
    order, parts = [], []
    for place, at in places_by_value(block_index):
        order.append(at)
        parts.append((blocks[place].leaves, rows[at], len(at)))
    if all(_is_consecutive(wanted) for _, wanted, _ in parts):
        # By turns from several blocks, and from each one after the other: written where they go at once.
        dealt = [_dealt(number, parts, order, empty) for number in range(len(first.leaves))]
        return _made(first, dealt, label, empty)
    places = np.concatenate(order)
    inverse = None
    if not _is_consecutive(places):
        inverse = np.empty(len(rows), np.intp)
        inverse[places] = np.arange(len(rows))
    leaves: list[Any] = []
    for number, leaf in enumerate(first.leaves):
        if isinstance(leaf, Ragged):
            column = Ragged.concat([of_block[number].take(wanted) for of_block, wanted, _ in parts])
            leaves.append(column if inverse is None else column.take(inverse))
            continue
        # The last copy is the one that goes where the consumer wants it.
        found = _empty((len(rows), *leaf.shape[1:]), leaf.dtype, empty if inverse is None else None)
        start = 0
        for of_block, wanted, count in parts:
            # The rows are there: "clip" only spares NumPy a buffer.
            np.take(of_block[number], wanted, axis=0, out=found[start : start + count], mode="clip")
            start += count
        leaves.append(found if inverse is None else _taken(found, inverse, empty))
    return _made(first, leaves, label, empty)


def _made(like: Block, leaves: Sequence[Any], label: str, empty: Empty | None) -> Block:
    # What is gathered last goes to one consumer; what is no copy of a block is read-only as the block is.
    return Block(like.structure, leaves, label, is_exclusive=empty is not None)


def _whole(column: Sequence[Any], num_rows: int) -> tuple[Any, Index] | None:
    # The array that all parts of a column are consecutive rows of, and at which row each begins; for few rows it is not
    # worth looking.
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


def _of_wholes(wholes: Sequence[Any], rows: Index, block_index: Index, empty: Empty | None) -> list[Any]:
    found: list[Any] = []
    at, before = rows, None
    for whole, starts in wholes:
        if before is None or not np.array_equal(starts, before):
            at, before = starts.take(block_index), starts
            at += rows
        found.append(_taken(whole, at, empty))
    return found


def _empty(shape: tuple[int, ...], dtype: Any, empty: Empty | None) -> Any:
    return np.empty(shape, dtype) if empty is None or dtype.kind not in NUMBERS else empty(shape, dtype)


def _taken(leaf: Any, rows: Index, empty: Empty | None) -> Any:
    if empty is None or isinstance(leaf, Ragged):
        return leaf.take(rows, axis=0)
    found = _empty((len(rows), *leaf.shape[1:]), leaf.dtype, empty)
    # The rows are there: "clip" only spares NumPy a buffer.
    return np.take(leaf, rows, axis=0, out=found, mode="clip")


def _one_after_another(blocks: Sequence[Block], intervals: RowIntervals, label: str, empty: Empty | None) -> Block:
    columns = zip(*[block.leaves for block in blocks], strict=True)
    if len(intervals.starts) <= _FEW:
        starts, lengths = intervals.starts.tolist(), np.diff(intervals.bounds).tolist()
        cuts = [(k, slice(n, n + m)) for k, n, m in zip(intervals.block_index.tolist(), starts, lengths, strict=True)]
        joined = [_end_to_end([column[place][cut] for place, cut in cuts], empty) for column in columns]
        return _made(blocks[0], joined, label, empty)
    series = _in_series(intervals)
    return _made(blocks[0], [_strung(column, series, empty) for column in columns], label, empty)


def _views(blocks: Sequence[Rows], picks: Picks, empty: Empty | None) -> Bundle | None:
    # Batches as they lie in their blocks; None where few do, or not all is numbers that lie next to each other: what
    # lies between them would stay, too, and they would be slow to read.
    if picks.bounds is None or not isinstance(picks.rows, RowIntervals):
        return None
    columnar = [block for block in blocks if isinstance(block, Block)]
    if len(columnar) < len(blocks) or not all(map(columnar[0].is_like, columnar)):
        return None
    leaves = [block.leaves for block in columnar]
    if not all(map(_is_compact, chain.from_iterable(leaves))):
        return None
    spans = picks.rows.spans(picks.bounds[:-1], picks.bounds[1:])
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
        found = tuple(
            parts[first]
            if stop - first == 1
            else [_end_to_end(column, empty) for column in zip(*parts[first:stop], strict=True)]
        )
        items.append(found if picks.inners is None else nested(found, picks.inners[number]))
    return Bundle(blocks[0].structure, items, _joined_label(blocks), is_exclusive=empty is not None)


def _is_compact(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype.kind in NUMBERS and leaf.flags.c_contiguous


def _end_to_end(parts: Sequence[Any], empty: Empty | None) -> Any:
    first = parts[0]
    if isinstance(first, Ragged) or first.dtype.kind not in NUMBERS:
        return concat(parts)
    # By itself it would make them of this machine's byte order.
    return np.concatenate(parts, out=_empty((sum(map(len, parts)), *first.shape[1:]), first.dtype, empty))


class _Series(NamedTuple):
    # Stretches of one block that are equally long and equally far apart, such as a replica's rows of each batch.
    place: int
    start: int
    length: int
    times: int
    step: int

    def of(self, leaf: Any) -> Any:
        """The rows of one leaf, shape ``(times, length, ...)``: a view."""
        rows = leaf[self.start :]
        if self.times == 1:
            return rows[None, : self.length]
        shape, strides = leaf.shape[1:], leaf.strides
        return as_strided(rows, (self.times, self.length, *shape), (self.step * strides[0], *strides), writeable=False)


def _in_series(intervals: RowIntervals) -> list[_Series]:
    block_index, starts, lengths = intervals.block_index, intervals.starts, np.diff(intervals.bounds)
    steps = np.diff(starts)
    goes_on = (steps > 0) & (block_index[1:] == block_index[:-1]) & (lengths[1:] == lengths[:-1])
    # Where another step begins after one that went on, another series does.
    goes_on[1:] &= ~goes_on[:-1] | (steps[1:] == steps[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    counts = np.diff(first, append=len(starts))
    columns = (block_index[first], starts[first], lengths[first], counts, np.append(steps, 0)[first])
    return list(map(_Series, *[column.tolist() for column in columns]))


def _strung(column: Sequence[Any], series: Sequence[_Series], empty: Empty | None) -> Any:
    # Of one leaf of all blocks the rows of some stretches, one after the other: one copy.
    first = column[0]
    if isinstance(first, Ragged) or first.dtype.kind not in NUMBERS:
        # What NumPy has no views of at will.
        starts = [(each, each.start + number * each.step) for each in series for number in range(each.times)]
        return concat([column[each.place][start : start + each.length] for each, start in starts])
    found = _empty((sum(each.times * each.length for each in series), *first.shape[1:]), first.dtype, empty)
    end = 0
    for each in series:
        begin, end = end, end + each.times * each.length
        found[begin:end].reshape(each.times, each.length, *first.shape[1:])[...] = each.of(column[each.place])
    return found


def _is_consecutive(index: Index) -> bool:
    return int(index[-1]) - int(index[0]) == len(index) - 1 and bool((np.diff(index) == 1).all())


def _dealt(number: int, parts: Sequence[tuple[Leaves, Index, int]], order: Sequence[Index], empty: Empty | None) -> Any:
    # One leaf: consecutive rows of each block, to the places that `order` gives for each.
    columns = [leaves[number][int(wanted[0]) : int(wanted[0]) + count] for leaves, wanted, count in parts]
    num_rows = sum(map(len, columns))
    if isinstance(columns[0], Ragged):
        inverse = np.empty(num_rows, np.intp)
        inverse[np.concatenate(order)] = np.arange(num_rows)
        return Ragged.concat(columns).take(inverse)
    found = _empty((num_rows, *columns[0].shape[1:]), columns[0].dtype, empty)
    for at, column in zip(order, columns, strict=True):
        step = int(at[1] - at[0]) if len(at) > 1 else 1
        is_regular = int(at[-1]) - int(at[0]) == step * (len(at) - 1) and bool((np.diff(at) == step).all())
        found[slice(int(at[0]), int(at[-1]) + 1, step) if is_regular else at] = column
    return found


def _intervals(rows: Index, block_index: Index, at_most: int) -> RowIntervals | None:
    # Rows in stretches, where these are few.
    starts = np.flatnonzero((rows[1:] != rows[:-1] + 1) | (block_index[1:] != block_index[:-1])) + 1
    if len(starts) >= at_most:
        return None
    starts = np.concatenate([[0], starts])
    return RowIntervals(block_index[starts], rows[starts], np.append(starts, len(rows)))


def _gather_items(blocks: Sequence[Rows], picks: Picks) -> list[Leaves]:
    by_row, block_index = picks.by_row()
    rows = by_row if isinstance(by_row, range) else by_row.tolist()
    if block_index is None:
        return [raw_item(blocks[0], row) for row in rows]
    return [raw_item(blocks[place], row) for place, row in zip(block_index.tolist(), rows, strict=True)]


def _stacked(
    elements: Bundle, bounds: Index, inners: tuple[tuple[int, ...], ...] | None, like: Leaves, empty: Empty | None
) -> Bundle:
    chunks: list[Any] = []
    for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
        items = [raw_item(elements, k) for k in range(start, stop)]
        # A batch with an element that failed fails; so does one that does not stack, and no other with it.
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
    """The size of all elements of a run, as far as known."""
    if isinstance(run, Groups):
        run = run.flat
    return run.element_bytes * len(run)


def is_view(run: Run | Zipped) -> bool:
    """Whether a run is one stretch of a block, of which gathering makes no copy."""
    if isinstance(run, Zipped):
        return all(map(is_view, run.parts))
    return (run.flat if isinstance(run, Groups) else run).is_range


def bundle_size(caller: Caller, run: Run | Zipped, most_bytes: float) -> int:
    """How many elements of a run one call should take: up to so many bytes, and not more chunks than agreed."""
    num_elements = max(int(min(caller.bundle_bytes, most_bytes) // max(run.element_bytes, 1)), 1)
    return min(num_elements, caller.bundle_chunks) if isinstance(run, Groups) else num_elements
