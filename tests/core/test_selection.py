"""Selections, groups of them, and gathering, against plain lists of rows."""

from __future__ import annotations

import pickle
from itertools import chain, pairwise, takewhile
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.ragged import Ragged
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups, WindowGroups
from daskdist.core.selection.numbered_rows import NumberedSelection
from daskdist.core.selection.rows import IntervalSelection, Selection, WindowSelection, places_by_value
from daskdist.core.selection.runs import RunQueue, concat, group
from daskdist.core.selection.windows import BlockWindows
from daskdist.core.structure import Structure
from daskdist.errors import StackError
from daskdist.execute.stream.gather import Picks, gather

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

LONE = Structure.of(0)[1]
quick = settings(max_examples=100, deadline=None)


def block(first, num_rows):
    """Return a block of consecutive numbers."""
    return Block(LONE, [np.arange(first, first + num_rows)], f"block at {first}")


@st.composite
def refs(draw):
    # Selections of long blocks are stored as ranges, those of short ones row by row.
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5) | st.lists(st.integers(20, 60), max_size=4))
    lengths = lengths or [1]
    return [BlockRef(block(100 * number, length), length, 8 * length) for number, length in enumerate(lengths)]


def rows_of(run):
    """Return the rows of a selection, or of each batch of groups, as lists of numbers."""
    if isinstance(run, Groups):
        flat = rows_of(run.flat)
        inners = run.inners or [()] * len(run)
        batches = [flat[start:stop] for start, stop in pairwise(run.bounds.tolist())]
        return [_nested(batch, inner) for batch, inner in zip(batches, inners, strict=True)]
    places = run.places.tolist()
    return [int(run.blocks[place].handle.leaves[0][row]) for place, row in zip(places, run.row_numbers, strict=True)]


def _nested(batch, inner):
    for size in reversed(inner):
        batch = [batch[start : start + size] for start in range(0, len(batch), size)]
    return batch


def gathered(run):
    blocks = run.blocks if isinstance(run, Selection) else run.flat.blocks
    rows = gather([ref.handle for ref in blocks], Picks.of(run))
    if isinstance(run, Selection):
        return [int(element) for element in rows.elements()]
    return [value.tolist() for value in rows.elements()]


@st.composite
def windows(draw):
    """Draw windows of blocks, and the same windows as lists of numbers."""
    parts, expected = [], []
    for ref in draw(refs()):
        size = draw(st.integers(1, ref.num_rows))
        first = draw(st.integers(0, ref.num_rows - size))
        shift = draw(st.integers(1, 2 * size))
        number = draw(st.integers(1, (ref.num_rows - size - first) // shift + 1))
        parts.append(WindowGroups(ref, BlockWindows(0, first, number, size, shift)))
        rows = ref.handle.leaves[0].tolist()
        expected += [rows[start : start + size] for start in range(first, first + number * shift, shift)]
    return concat(parts), expected


@st.composite
def selections(draw):
    """Draw a selection that is made in some steps, and its rows, which are made by the same steps on lists."""
    if draw(st.booleans()):
        made, lists = draw(windows())
        run, expected = made.flat, list(chain.from_iterable(lists))
    else:
        run = concat([Selection.whole(ref) for ref in draw(refs())])
        expected = rows_of(run)
    for step in draw(st.lists(st.sampled_from(["slice", "take", "number", "double", "drop"]), max_size=4)):
        if step == "slice":
            start, stop = sorted((draw(st.integers(0, len(run))), draw(st.integers(0, len(run)))))
            run, expected = run[start:stop], expected[start:stop]
        elif step == "take" and len(run):
            index = np.array(draw(st.lists(st.integers(0, len(run) - 1), min_size=1, max_size=12)))
            run, expected = run.take(index), [expected[k] for k in index]
        elif step == "number" and len(run) and run.intervals is not None:
            index = np.array(draw(st.lists(st.integers(0, len(run) - 1), min_size=1, max_size=12)))
            run = NumberedSelection.of_places(run.blocks, run.intervals, index)
            expected = [expected[k] for k in index]
        elif step == "double":
            run, expected = concat([run, run]), expected * 2
        elif step == "drop":
            run = run.without_unused()
    return run, expected


@given(selections())
@quick
def test_selections_are_lists(made):
    run, expected = made
    assert len(run) == len(expected)
    assert rows_of(run) == expected
    if expected:
        assert gathered(run) == expected


@given(selections())
@quick
def test_nothing_unused_is_kept(made):
    run, expected = made
    kept = run.without_unused()
    assert rows_of(kept) == expected
    used = {value // 100 for value in expected}
    assert {int(ref.handle.leaves[0][0]) // 100 for ref in kept.blocks} == used


@given(selections(), st.data())
@quick
def test_spans_are_slices(made, data):
    run, expected = made
    places = st.integers(0, len(run))
    spans = sorted(tuple(sorted(data.draw(st.tuples(places, places)))) for _ in range(data.draw(st.integers(1, 5))))
    starts, stops = np.array(spans).T
    actual = run.spans(starts, stops)
    assert rows_of(actual) == [row for start, stop in spans for row in expected[start:stop]]
    assert rows_of(pickle.loads(pickle.dumps(actual))) == rows_of(actual)


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("last", [0, 1, 3])
def test_blocks_of_few_of_many_numbered_rows_are_kept(first, last):
    # Some of the numbers show that the large block is used. Whether small ones are, is found by the others.
    refs = [BlockRef(block(10**6 * number, length), length) for number, length in enumerate([1, 1, 3, 10**6, 3, 1, 1])]
    run = concat([Selection.whole(ref) for ref in refs])
    index = np.random.default_rng(0).permutation(np.arange(first, len(run) - last))[:500_000]
    index[100_003] = first
    index[200_003] = len(run) - last - 1
    rows = NumberedSelection.of_places(run.blocks, run.intervals, index)
    assert rows.blocks == run.take(index).without_unused().blocks
    some = np.array([100_003, 0, 200_003])
    assert rows_of(rows.take(some)) == rows_of(run.take(index[some]))


def test_long_ranges_are_pickled_as_a_few_numbers():
    refs = [BlockRef(block(1_000 * number, 1_000), 1_000, 8_000) for number in range(4)]
    run = concat([Selection.whole(ref)[10:900] for ref in refs])
    assert type(run) is IntervalSelection
    assert len(pickle.dumps(Picks.of(run))) < 600
    batches = group(run, np.arange(0, 3_001, 100))
    every_fourth = batches.take(np.arange(0, 30, 4))
    assert type(every_fourth.flat) is IntervalSelection
    assert gathered(every_fourth) == [rows_of(batches)[k] for k in range(0, 30, 4)]
    # Rows in another order are stored as one number for each.
    assert type(run.take(np.arange(100)[::-1])) is Selection
    # A single range is a slice.
    assert type(run[900:1_000]) is Selection
    assert run[900:1_000].is_range


@st.composite
def groups(draw):
    """Draw batches of a selection, and the same batches as lists of lists."""
    if draw(st.booleans()):
        return draw(windows())
    run, expected = draw(selections())
    size = draw(st.integers(1, 4))
    bounds = np.array(sorted({*range(0, len(run), size), len(run)} | {0}))
    return group(run, bounds), [expected[start:stop] for start, stop in pairwise(bounds.tolist())]


@given(groups(), st.data())
@quick
def test_groups_are_lists_of_lists(made, data):
    run, expected = made
    for step in data.draw(st.lists(st.sampled_from(["slice", "take", "double", "drop"]), max_size=4)):
        if step == "slice":
            start, stop = sorted((data.draw(st.integers(0, len(run))), data.draw(st.integers(0, len(run)))))
            run, expected = run[start:stop], expected[start:stop]
        elif step == "take" and len(run):
            index = np.array(data.draw(st.lists(st.integers(0, len(run) - 1), min_size=1, max_size=8)))
            run, expected = run.take(index), [expected[k] for k in index]
        elif step == "double":
            run, expected = concat([run, run]), expected * 2
        elif step == "drop":
            run = run.without_unused()
    assert len(run) == len(expected)
    assert rows_of(run) == expected
    assert run.lengths.tolist() == list(map(len, expected))
    if expected:
        assert gathered(run) == expected


@given(refs(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@quick
def test_groups_of_groups(made, size, outer, outermost):
    run = concat([Selection.whole(ref) for ref in made])
    expected = rows_of(run)
    for item in (size, outer, outermost):
        number = len(run) // item
        if not number:
            return
        run = group(run, np.arange(0, number * item + 1, item))
        expected = [expected[k * item : (k + 1) * item] for k in range(number)]
    assert rows_of(run) == expected
    assert gathered(run) == expected
    assert prod(run.inners[0]) == size * outer


@given(windows(), st.integers(1, 3), st.data())
@quick
def test_batches_of_windows(made, size, data):
    run, expected = made
    number = len(list(takewhile(lambda window: len(window) == len(expected[0]), expected)))
    run, expected = run[:number], expected[:number]
    bounds = np.array([*range(0, number, size), number])
    batches, expected = group(run, bounds), [expected[start : start + size] for start in range(0, number, size)]
    assert rows_of(batches) == gathered(batches) == expected
    start = data.draw(st.integers(0, len(expected) - 1))
    assert gathered(batches[start:]) == expected[start:]
    assert rows_of(batches[start:].ungroup()) == list(chain.from_iterable(expected[start:]))


def test_windows_of_a_block_are_a_few_numbers():
    refs = [BlockRef(block(1_000 * number, 1_000), 1_000, 8_000) for number in range(2)]
    runs = [WindowGroups(ref, BlockWindows(0, 0, 900, 20, 1)) for ref in refs]
    batches = group(concat(runs), np.arange(0, 1_801, 100))
    assert type(batches.flat) is WindowSelection
    assert len(pickle.dumps(Picks.of(batches))) < 1_000
    # A shuffle takes a few of many batches again and again.
    few = group(runs[0], np.arange(0, 901, 100)).take(np.array([7, 2]))
    assert few.flat.windows.pieces == (BlockWindows(0, 700, 100, 20, 1), BlockWindows(0, 200, 100, 20, 1))
    # Windows across the ends of blocks are pieces of their own.
    ends = concat(
        [runs[0], group(concat([Selection.whole(ref) for ref in refs])[990:1010], np.array([0, 20])), runs[1]]
    )
    assert len(ends.flat.windows.pieces) == 4
    assert gathered(ends)[899:902] == [[*range(899, 919)], [*range(990, 1010)], [*range(1000, 1020)]]


@given(groups(), st.integers(1, 5))
@quick
def test_cutting(made, num_pieces):
    run, expected = made
    pieces = []
    for batch in expected:
        size = -(-len(batch) // num_pieces)
        pieces += [batch[k * size : (k + 1) * size] for k in range(num_pieces)]
    assert rows_of(run.cut(num_pieces)) == pieces


def test_batches_of_different_sizes_do_not_stack():
    run = group(Selection.whole(BlockRef(block(0, 5), 5)), np.array([0, 2, 4, 5]))
    with pytest.raises(StackError, match="batches of 1, 2 rows do not stack"):
        group(run, np.array([0, 3]))
    # A shorter batch can be alone in a batch of batches.
    assert rows_of(group(run, np.array([0, 2, 3]))) == [[[0, 1], [2, 3]], [[4]]]


def test_rows_that_follow_on_stay_a_range():
    ref = BlockRef(block(0, 9), 9)
    whole = Selection.whole(ref)
    joined = concat([whole[0:3], whole[3:4], whole[4:9]])
    assert joined.rows == range(9)
    assert joined.block_index is None
    assert isinstance(concat([whole[0:3], whole[4:9]]).rows, np.ndarray)


def test_gathering_a_range_is_a_view():
    source = block(0, 9)
    made = gather([source], Picks.of(Selection.whole(BlockRef(source, 9))[2:5]))
    assert np.shares_memory(made.leaves[0], source.leaves[0])
    assert not made.leaves[0].flags.writeable


@given(st.lists(st.integers(0, 5), min_size=1))
@quick
def test_places_by_value(values):
    actual = dict(places_by_value(np.array(values)))
    assert {value: at.tolist() for value, at in actual.items()} == {
        value: [k for k, item in enumerate(values) if item == value] for value in sorted(set(values))
    }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=8))
@quick
def test_queue(lengths, wanted):
    queue, expected = RunQueue(), []
    for number, length in enumerate(lengths):
        queue.push(Selection.whole(BlockRef(block(100 * number, length), length)))
        expected += range(100 * number, 100 * number + length)
    for number in wanted:
        if not queue:
            break
        assert rows_of(queue.pop(number)) == expected[:number]
        expected = expected[number:]
        assert len(queue) == len(expected)


@given(selections())
@quick
def test_picks_travel(made):
    run, expected = made
    if not expected:
        return
    picks = pickle.loads(pickle.dumps(Picks.of(run)))
    rows = gather([ref.handle for ref in run.blocks], picks)
    assert [int(element) for element in rows.elements()] == expected


def test_pickled_picks_contain_no_block():
    ref = BlockRef(Block(LONE, [np.zeros(10**6)]), 10**6)
    assert len(pickle.dumps(Picks.of(Selection.whole(ref)[:10]))) < 1000


def test_a_reference_is_released_once():
    released = []
    ref = BlockRef(None, 3, 24, None, released.append)
    selection = Selection.whole(ref)[1:]
    del ref
    assert released == []
    del selection
    assert released == [24]


# --- blocks of different kinds meet ---


def _items(*shapes):
    return [(np.zeros(shape),) for shape in shapes]


def test_elements_of_different_shapes_are_a_bundle():
    assert isinstance(from_items(LONE, _items((2,), (2,))), Block)
    assert isinstance(from_items(LONE, _items((2, 2), (3, 3))), Bundle)
    assert isinstance(from_items(LONE, _items((2,), (3,))).leaves[0], Ragged)


# Arrays of which blocks may be slices: contiguous ones, and ones with other memory layouts.
WHOLES = {
    "numbers": np.arange(64, dtype=np.int16),
    "rows": np.arange(64 * 6, dtype=np.float32).reshape(64, 2, 3),
    "rows of nothing": np.zeros((64, 0)),
    "columns first": np.asfortranarray(np.arange(128.0).reshape(64, 2)),
    "every other column": np.arange(256.0).reshape(64, 4)[:, ::2],
    "of the other byte order": np.arange(64, dtype=">i4"),
    "read only": np.frombuffer(np.arange(64).tobytes(), np.int64),
    "numbers of others": np.arange(128, dtype=np.int32).view(np.int64),
    "in other rows": np.arange(256).reshape(32, 8).reshape(64, 4),
    "a subclass": np.arange(128).reshape(64, 2).view(np.recarray),
    "text": np.array([f"text {k}" for k in range(64)], np.dtypes.StringDType()),
    "short text": np.array([f"text {k}" for k in range(64)]),
    "objects": np.array([*range(63), None], object),
    "times": np.arange(64).astype("M8[s]"),
}
CUTS = {
    "one after the other": [(0, 16), (16, 20), (20, 64)],
    "in any order": [(40, 64), (3, 16), (16, 30)],
    "of the same rows": [(0, 30), (10, 40)],
}


@pytest.mark.parametrize("empty", [None, np.empty], ids=["NumPy's", "asked for"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [*WHOLES, "two of different ones", "one and a copy"])
def test_rows_of_slices_of_an_array_are_as_those_of_copies(name, cut, empty):
    def leaves(start, stop):
        if name == "two of different ones":
            return [WHOLES["numbers"][start:stop], WHOLES["rows"][64 - stop : 64 - start]]
        if name == "one and a copy":
            return [WHOLES["numbers"][start:stop], WHOLES["rows"][start:stop].copy()]
        return [WHOLES[name][start:stop]]

    structure = Structure.of((0, 0))[1] if len(leaves(0, 1)) == 2 else LONE
    slices = [Block(structure, leaves(*item), "a") for item in CUTS[cut]]
    copies = [Block(structure, [leaf.copy() for leaf in leaves(*value)], "a") for value in CUTS[cut]]
    rng = np.random.default_rng(0)
    block_index = rng.integers(len(slices), size=200)
    rows = np.array([rng.integers(len(slices[place])) for place in block_index])
    picks = Picks(rows, block_index, None, None)
    before = rows.copy(), block_index.copy()
    actual, expected = gather(slices, picks, empty=empty), gather(copies, picks, empty=empty)
    for one, other in zip(actual.leaves, expected.leaves, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
        assert one.flags.writeable == other.flags.writeable
    assert np.array_equal(rows, before[0])
    assert np.array_equal(block_index, before[1])


@pytest.mark.parametrize("empty", [None, np.empty], ids=["NumPy's", "asked for"])
@pytest.mark.parametrize("name", [*WHOLES, "ragged"])
def test_windows_of_arrays(name, empty):
    ragged = Ragged(np.arange(128), np.minimum(np.arange(65) ** 2, 128))
    whole = ragged if name == "ragged" else WHOLES[name]
    refs = [BlockRef(Block(LONE, [whole[start:stop]], "a"), stop - start, 8) for start, stop in [(0, 30), (30, 64)]]
    run = concat([WindowGroups(ref, BlockWindows(0, 3, 9, 4, 2)) for ref in refs])
    assert type(run.flat) is WindowSelection
    (actual,) = gather([ref.handle for ref in refs], Picks.of(run), empty=empty).rows.leaves
    windows = [whole[start : start + 4] for first in (3, 33) for start in range(first, first + 18, 2)]
    assert actual.dtype == whole.dtype
    assert actual.tolist() == [row for window in windows for row in window.tolist()]
    if isinstance(actual, np.ndarray):
        # Windows have rows in common, but no memory.
        assert not np.shares_memory(actual, whole)
        assert actual.flags.c_contiguous or name == "columns first"


@pytest.mark.parametrize("shapes", [[(2,), (2,)], [(2,), (3,)]])
def test_gathering_elements_of_blocks_of_different_shapes(shapes):
    # In each block, elements have one shape. The two blocks' shapes may differ, since elements are not batched.
    blocks = [from_items(LONE, _items(shape, shape)) for shape in shapes]
    selection = concat([Selection.whole(BlockRef(value, 2)) for value in blocks]).take(np.array([0, 2, 1, 3]))
    rows = gather(blocks, Picks.of(selection))
    assert [element.shape for element in rows.elements()] == [shapes[0], shapes[1], shapes[0], shapes[1]]


def test_gathering_batches_of_blocks_of_different_shapes():
    # Each batch has rows of one block, so it stacks.
    blocks = [from_items(LONE, _items(shape, shape)) for shape in [(2,), (3,)]]
    whole = concat([Selection.whole(BlockRef(value, 2)) for value in blocks])
    rows = gather(blocks, Picks.of(group(whole, np.array([0, 2, 4]))))
    assert [element.shape for element in rows.elements()] == [(2, 2), (2, 3)]
    # A batch with rows of both blocks raises an error in its place.
    rows = gather(blocks, Picks.of(group(whole, np.array([0, 1, 3, 4])))).elements()
    assert next(rows).shape == (1, 2)
    with pytest.raises(StackError, match="do not stack"):
        next(rows)


def test_gathering_blocks_and_bundles():
    blocks = [from_items(LONE, _items((2,), (2,))), from_items(LONE, _items((3,), (4,)))]
    whole = concat([Selection.whole(BlockRef(value, 2)) for value in blocks])
    assert [element.shape for element in gather(blocks, Picks.of(whole)).elements()] == [(2,), (2,), (3,), (4,)]


@pytest.mark.parametrize("inner", [(2,), (2, 2)])
def test_batches_of_batches_of_nothing(inner):
    # Rows have no bytes, so the number of batches cannot be computed from sizes.
    source = Block(LONE, [np.zeros((8, 0))])
    run = Selection.whole(BlockRef(source, 8))
    for size in inner:
        run = group(run, np.arange(0, len(run) + 1, size))
    run = group(run, np.array([0, len(run)]))
    (batch,) = gather([source], Picks.of(run)).elements()
    assert batch.shape == (8 // prod(inner), *inner, 0)


@given(st.lists(st.integers(0, 5), max_size=9))
@quick
def test_taking_rows_says_where_they_were(index):
    source = block(10, 6)
    locate = source.take(np.array(index, np.intp))
    again = locate.take(np.arange(len(index))[::-1])
    for place, row in enumerate(reversed(index)):
        assert again.where(place) == f"row {row} of block at 10"


def test_rows_that_were_moved_do_not_claim_a_number():
    source = block(10, 6)
    moved = gather([source], Picks(np.array([5, 3]), None, None, None))
    assert moved.where(0) == "a row of block at 10"
    assert moved.take(np.array([1])).where(0) == "a row of block at 10"
