"""Permutations that are computed at the requested indices: they are valid, uniform, and rows follow them."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from itertools import islice
from math import sqrt

import dask
import numpy as np
import pytest
from conftest import every_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdist import Dataset
from daskdist.core.randomness.seed import generator
from daskdist.core.selection import lazy_shuffle, permutation
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.lazy_shuffle import LazyPermutation, ShuffledSelection, shuffled
from daskdist.core.selection.numbered_rows import NumberedSelection
from daskdist.core.selection.permutation import Permutation
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import concat, group
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.execute.stream.gather import Picks
from daskdist.testing import same_elements

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@pytest.fixture(params=["where they are gathered", "ahead"])
def few(request, monkeypatch):
    """Let orders of few rows be computed like those of many."""
    monkeypatch.setattr(permutation, "_SMALL", 3)
    monkeypatch.setattr(lazy_shuffle, "_FEW", 0 if request.param == "where they are gathered" else 5)
    monkeypatch.setattr(lazy_shuffle, "_AHEAD", 7)


def order_of(length, seed=0):
    return Permutation(length, np.random.default_rng(seed), 2**16)


# --- orders ---


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "lengths", [range(80), [255, 256, 257, 1023, 1025, 4095, 4097], [65_537, 2**18 + 1, 300_000]], ids=str
)
def test_a_permutation_has_each_number_once(lengths):
    for length, seed in itertools.product(lengths, range(3)):
        actual = Permutation(length, np.random.default_rng(seed)).at(np.arange(length))
        assert actual.dtype == np.int64
        assert np.array_equal(np.sort(actual), np.arange(length)), f"{length}, seed {seed}"


def plain(order, place):
    """Compute the permutation at one index with Python's integers."""
    high, low = place >> order.low_bits, place % 2**order.low_bits
    for number, key in enumerate(order.keys.tolist()):
        mixed = (high if number % 2 == 0 else low) ^ key
        for shift, factor in (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1):
            mixed = (mixed ^ mixed >> shift) * factor % 2**32
        if number % 2 == 0:
            low ^= mixed % 2**order.low_bits
        else:
            high = (high + mixed * order.num_high // 2**32) % order.num_high
    actual = high << order.low_bits | low
    return actual if actual < order.length else plain(order, actual)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", [2**18 + 1, 2**20, 10**6 + 3, 2**31 - 1, 2**32 + 5, 2**50 + 12345, 2**62])
def test_a_permutation_equals_its_definition(length):
    order = order_of(length, 7)
    places = np.concatenate([np.arange(20), np.random.default_rng(1).integers(length, size=300), [length - 1]])
    actual = order.at(places)
    assert actual.tolist() == [plain(order, place) for place in places.tolist()]
    assert actual.min() >= 0
    assert actual.max() < length


def test_the_order_of_a_seed_stays_the_same_in_all_versions():
    # The order of a seed stays the same in later versions.
    assert order_of(10**6).at(np.arange(5)).tolist() == GOLDEN


GOLDEN = [813252, 100015, 479340, 406926, 269342]


@pytest.mark.parametrize("length", [10, 2**16, 2**16 + 1, 2**18, 10**6])
def test_a_part_equals_that_of_the_whole_order(length):
    whole = order_of(length).at(np.arange(length))
    order = order_of(length)
    ends = {0, 1, 7, length // 2, length - 1, length}
    ends |= {2**14 * number + more for number in (1, 2, 3) for more in (-1, 0, 1, 50)}
    ends = sorted(end for end in ends if end <= length)
    for number, start in enumerate(ends):
        # Long parts take time.
        for stop in {*ends[number : number + 4], *ends[-1:]}:
            if start in ends[::3] or stop < length:
                assert np.array_equal(order.between(start, stop), whole[start:stop])
                places = np.random.default_rng(stop).permutation(np.arange(start, stop))[:300]
                assert np.array_equal(order.at(places), whole[places])


def test_an_unpickled_permutation_is_the_same():
    order = order_of(10**6)
    assert np.array_equal(pickle.loads(pickle.dumps(order)).at(np.arange(1000)), order.at(np.arange(1000)))


def too_far(counts, expected, degrees):
    """Return the excess of a chi-square statistic over its mean, in standard deviations."""
    return (np.sum((counts - expected) ** 2 / expected) - degrees) / sqrt(2 * degrees)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", [64, 100, 1000, 65_537])
def test_each_place_gets_all_numbers_equally_often(length):
    num_orders, places = 2000, np.array([0, 1, 2, length // 2, length - 1])
    actual = np.array([Permutation(length, np.random.default_rng(seed)).at(places) for seed in range(num_orders)])
    parts = actual * 16 // length
    sizes = np.bincount(np.arange(length) * 16 // length) / length
    for column in parts.T:
        assert too_far(np.bincount(column, minlength=16), num_orders * sizes, 15) < 4.5
    if length < 1000:
        return
    # Indices at two places are independent: pairs of parts are as frequent as the product of their sizes.
    for one, other in [(0, 1), (1, 2), (0, 3), (0, 4), (3, 4)]:
        pairs = np.bincount(parts[:, one] * 16 + parts[:, other], minlength=256)
        assert too_far(pairs, num_orders * np.outer(sizes, sizes).ravel(), 255) < 4.5


@pytest.mark.parametrize("length", [2**18 + 1, 10**6 + 3])
def test_neighbours_are_far_apart_afterwards(length):
    actual = order_of(length, 5).at(np.arange(length))
    for lag in (1, 2, 3, 16, 256, 511, 512, 513, 1024):
        steps = (actual[lag:] - actual[:-lag]) % length
        counts = np.bincount(steps * 256 // length, minlength=256)
        assert abs(too_far(counts, len(steps) / 256, 255)) < 4.5
    assert abs(np.corrcoef(actual, np.arange(length))[0, 1]) * sqrt(length) < 4.5


# --- rows in such an order ---


def blocks(sizes):
    return tuple(BlockRef(number, size, 8 * size) for number, size in enumerate(sizes))


def in_stretches(sizes):
    return concat([Selection.whole(ref) for ref in blocks(sizes)])


def scattered(sizes):
    refs = blocks(sizes)
    rows = np.concatenate([np.arange(size) for size in sizes])
    block_index = np.repeat(np.arange(len(sizes)), sizes)
    mixed = np.random.default_rng(3).permutation(len(rows))
    return Selection(refs, rows[mixed], block_index[mixed])


def numbered(sizes):
    rows = in_stretches(sizes)
    places = np.random.default_rng(3).permutation(sum(sizes[:-1]))[:40]
    return NumberedSelection.of_places(rows.blocks, rows.intervals, places)


SOURCES = {
    "a block": lambda: Selection.whole(blocks([50])[0]),
    "a part of one": lambda: Selection.whole(blocks([50])[0])[7:43],
    "blocks of one size": lambda: in_stretches([16, 16, 16]),
    "with a short last": lambda: in_stretches([16, 16, 3]),
    "with a long last": lambda: in_stretches([16, 16, 30]),
    "blocks of any size": lambda: in_stretches([16, 20, 9, 30]),
    "some rows by numbers": lambda: numbered([16, 20, 9, 30, 7]),
    "rows as they come": lambda: scattered([16, 20, 9]),
    "rows of one block": lambda: Selection(blocks([50]), np.arange(49, -1, -2)),
}


def of(selection):
    """Return the block and the row of each element."""
    handles = [ref.handle for ref in selection.blocks]
    places = selection.places.tolist()
    return [(handles[place], row) for place, row in zip(places, selection.row_numbers.tolist(), strict=True)]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("source", SOURCES)
def test_rows_follow_the_order(source):
    rows = SOURCES[source]()
    expected = rows.take(Permutation(len(rows), np.random.default_rng(4)).at(np.arange(len(rows))))
    actual = shuffled(rows, np.random.default_rng(4))
    assert isinstance(actual, ShuffledSelection)
    assert len(actual) == len(rows)
    assert of(actual) == of(expected)
    assert of(actual[:]) == of(actual.without_unused()) == of(expected)
    index = np.array([9, 0, 0, 3])
    assert of(actual.take(index)) == of(expected.take(index))
    assert of(concat([actual[5:9], actual[0:2], rows[:3]])) == of(concat([expected[5:9], expected[0:2], rows[:3]]))
    assert of(actual.spans(np.array([1, 8]), np.array([3, 12]))) == of(
        expected.spans(np.array([1, 8]), np.array([3, 12]))
    )
    assert of(actual.spans(np.array([1, 8]), np.array([3, 12]))[1:4]) == of(expected.take(np.array([2, 8, 9])))
    assert of(actual[4:5].without_unused()) == of(expected[4:5])
    assert len(actual[4:5].without_unused().blocks) == 1


@pytest.mark.usefixtures("few")
@given(st.sampled_from(sorted(SOURCES)), st.lists(st.tuples(st.integers(-3, 60), st.integers(-3, 60)), max_size=4))
@settings(deadline=None)
def test_parts_of_parts_are_parts(source, cuts):
    actual = shuffled(SOURCES[source](), np.random.default_rng(4))
    expected = of(actual)
    for start, stop in cuts:
        actual, expected = actual[start:stop], expected[start:stop]
        assert len(actual) == len(expected)
    assert of(actual) == expected


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("source", SOURCES)
def test_batches_follow_the_order(source):
    rows = SOURCES[source]()
    actual = shuffled(rows, np.random.default_rng(4))
    expected = Selection(rows.blocks, actual.row_numbers, actual.block_index)
    bounds = np.array([0, 5, 10, 12])
    for act in (
        lambda each: group(each, bounds).flat,
        lambda each: group(each, bounds)[1:].flat,
        lambda part: group(part, bounds).take(np.array([2, 0])).flat,
        lambda element: group(element, bounds).cut(2).flat,
        lambda item: group(item, bounds).ungroup(),
        lambda value: group(value, bounds).without_unused().flat,
    ):
        assert of(act(actual)) == of(act(expected))


@pytest.mark.usefixtures("few")
def test_batches_are_shuffled_by_the_same_order():
    rows = in_stretches([16, 20, 9, 30])
    batches = Groups(rows, np.arange(0, 76, 5))
    order = Permutation(15, np.random.default_rng(4)).at(np.arange(15))
    expected = [value for place in order.tolist() for value in of(rows)[5 * place : 5 * place + 5]]
    assert of(shuffled(batches, np.random.default_rng(4)).flat) == expected


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_sent_has_a_number_for_each_row(source):
    # Send a number for each row of the part, since the whole order may be much longer.
    actual = shuffled(SOURCES[source](), np.random.default_rng(4))[3:8]
    picks = Picks.of(actual)
    sent = pickle.loads(pickle.dumps(picks))
    assert isinstance(picks.rows, LazyPermutation)
    assert sent.rows.tolist() == actual.row_numbers.tolist()
    assert sent.block_index is None or sent.block_index.tolist() == actual.places.tolist()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_part_that_is_kept_is_no_larger_than_it_has_rows(source, is_drawn, monkeypatch):
    monkeypatch.setattr(permutation, "_SMALL", 3)
    monkeypatch.setattr(lazy_shuffle, "_FEW", 0)
    rows = SOURCES[source]()
    rows = Selection.concat([rows.take(np.arange(len(rows))) if is_drawn else rows])
    actual = shuffled(rows, np.random.default_rng(4))
    for part in (actual, actual[10:14]):
        again = pickle.loads(pickle.dumps(part))
        expected = part.by_row()
        assert of(again) == of(expected)
    many = shuffled(Selection((0,), np.arange(1_100_000)), np.random.default_rng(4))
    assert len(pickle.dumps(many[1000:1010])) < 2000


# --- pipelines ---


def expected_order(values, seed, epoch=(0,)):
    return np.asarray(values)[Permutation(len(values), generator(seed, 1, epoch)).at(np.arange(len(values)))]


PIPELINES = {
    "shuffle": lambda: Dataset.range(19).shuffle(30, seed=1),
    "shuffle and batch": lambda: Dataset.range(19).shuffle(19, seed=1).batch(4),
    "shuffle of a part": lambda: Dataset.range(19).shuffle(8, seed=1).batch(4),
    "shuffled twice": lambda: Dataset.range(19).shuffle(19, seed=1).shuffle(19, seed=2).batch(3),
    "batches": lambda: Dataset.range(19).batch(2).shuffle(19, seed=1),
    "repeat": lambda: Dataset.range(7).shuffle(9, seed=1).repeat(3).batch(4),
    "global": lambda: Dataset.from_tensor_slices(np.arange(19)).global_shuffle(seed=1).batch(3),
    "global of mapped": lambda: Dataset.range(19).map(lambda x: x + 1).global_shuffle(seed=1).batch(3),
    "global of batches": lambda: Dataset.range(19).map(lambda x: x + 1).batch(2).global_shuffle(seed=1),
    "global of nothing": lambda: Dataset.range(5).filter(lambda x: x < 0).global_shuffle(seed=1),
    "mapped": lambda: Dataset.range(19).shuffle(19, seed=1).map(lambda x: x * 2).batch(3),
    "filtered": lambda: Dataset.range(19).shuffle(19, seed=1).filter(lambda x: x % 3 > 0).batch(3),
    "zipped": lambda: Dataset.zip(Dataset.range(19).shuffle(19, seed=1), Dataset.range(19)).batch(3),
    "sharded": lambda: Dataset.range(19).shuffle(19, seed=1).shard(3, 1),
    "taken": lambda: Dataset.range(19).shuffle(19, seed=1).skip(3).take(9).batch(2),
    "windows": lambda: Dataset.range(19).shuffle(19, seed=1).window(4).flat_map(lambda value: value.batch(3)),
    "unbatched": lambda: Dataset.range(18).batch(3).unbatch().shuffle(18, seed=1),
}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "split_bytes", "caller"), every_pair(list(PIPELINES), [24, 2**24], [Synchronous, Threads])
)
def test_permuted_pipelines_continue_from_every_position(name, split_bytes, caller):
    with dask.config.set({"daskdist.split-bytes": split_bytes}), using(caller):
        whole = list(PIPELINES[name]())
        if name != "global of nothing":
            assert whole
        iterator = iter(PIPELINES[name]())
        for number in range(len(whole) + 1):
            again = iter(PIPELINES[name]())
            again.load_state_dict(pickle.loads(pickle.dumps(iterator.state_dict())))
            same_elements(list(again), whole[number:], f"continued from {number}")
            same_elements(list(islice(iterator, 1)), whole[number : number + 1], f"the iterator asked at {number}")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", PIPELINES)
def test_blocks_and_graphs_make_no_difference(name):
    expected = list(PIPELINES[name]())
    with dask.config.set({"daskdist.split-bytes": 24}):
        same_elements(list(PIPELINES[name]()), expected, "in small blocks")
        same_elements(list(dask.compute(PIPELINES[name]())[0]), expected, "in a graph")


@pytest.mark.parametrize("split_bytes", [8 * 7919, 2**24])
def test_orders_of_many_rows_are_complete(split_bytes, monkeypatch):
    # Orders of more rows than `_SMALL` are computed from keys.
    num_rows = 100_001
    monkeypatch.setattr(permutation, "_SMALL", 2**16)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        rows = Dataset.range(num_rows)
        actual = np.concatenate(list(rows.shuffle(num_rows, seed=5).batch(1000)))
        assert np.array_equal(actual, expected_order(range(num_rows), 5))
        actual = np.concatenate(list(rows.map(lambda x: x).global_shuffle(seed=5).batch(1000)))
        assert np.array_equal(np.sort(actual), np.arange(num_rows))
        # At its end, this shuffle computes an order for the rest of its buffer.
        actual = np.concatenate(list(rows.shuffle(80_000, seed=5).batch(1000)))
        assert np.array_equal(np.sort(actual), np.arange(num_rows))
        assert not np.array_equal(actual[:1000], np.arange(1000))


def test_the_first_rows_need_no_order_of_all_rows():
    # The rows take eight bytes each; an order of all rows would take as much again.
    num_rows = 4 * 10**6
    rows = iter(Dataset.range(num_rows).shuffle(num_rows, seed=1))
    tracemalloc.start()
    next(rows)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.5 * 8 * num_rows
