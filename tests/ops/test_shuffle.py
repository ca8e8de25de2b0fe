"""``shuffle``: its order is that of drawing one slot after another, and its memory is near that of its buffer."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import dask
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_lists import shuffled

import daskdist
from daskdist import Dataset
from daskdist.core.dataset_base import node_of
from daskdist.core.node import lower
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import concat
from daskdist.core.selection.shuffle_buffer import Draws, buffer_of_places
from daskdist.errors import ArgumentError
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import BundleBuilder
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.window import ByteWindow
from daskdist.passes.fuse import fuse

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def ints(ds):
    return [int(element) for element in ds]


def elements_of(rows):
    """Return the handle of the block and the row number of each row."""
    handles = [rows.blocks[place].handle for place in rows.places]
    return list(zip(handles, rows.row_numbers.tolist(), strict=True))


@given(st.data(), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_draws_equal_those_of_a_buffer(data, size):
    slots = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40))
    buffer, expected = list(range(size)), []
    for draw, slot in enumerate(slots):
        expected.append(buffer[slot])
        buffer[slot] = size + draw
    draws = Draws.of(np.array(slots, np.int64), size)
    output, occupants = draws.output, np.arange(size)
    occupants[draws.slots] = draws.last + size
    assert output.tolist() == expected
    assert occupants.tolist() == buffer


@given(st.integers(0, 200), st.integers(1, 60), st.integers(0, 2**64), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_the_order_equals_that_of_a_buffer(num_rows, buffer_size, seed, passes):
    ds = Dataset.range(num_rows).shuffle(buffer_size, seed=seed)
    for _ in range(passes):
        list(ds)
    assert ints(ds) == shuffled(list(range(num_rows)), buffer_size, seed, epoch=(passes,))


@pytest.mark.parametrize("buffer_size", [1, 1000, 1024, 1025, 32_768, 40_000])
def test_the_order_of_many_rows_equals_that_of_a_buffer(buffer_size):
    # There are more rows than are drawn together, and the length of blocks is a prime.
    num_rows = 90_000
    with dask.config.set({"daskdist.split-bytes": 8 * 7919}):
        actual = np.concatenate(list(Dataset.range(num_rows).shuffle(buffer_size, seed=5).batch(1000)))
    assert actual.tolist() == shuffled(list(range(num_rows)), buffer_size, 5, epoch=(0,))


@pytest.mark.parametrize("split_bytes", [8, 24, 800, 2**24])
@pytest.mark.parametrize("window_bytes", [1, 2**28])
@pytest.mark.parametrize("caller", [Synchronous, Threads])
def test_order_does_not_depend_on_blocks(split_bytes, window_bytes, caller):
    expected = shuffled(list(range(100)), 30, 4, epoch=(0,))
    sizes = {"daskdist.split-bytes": split_bytes, "daskdist.window-bytes": window_bytes}
    with dask.config.set(sizes), using(caller):
        assert ints(Dataset.range(100).shuffle(30, seed=4)) == expected
        batches = list(Dataset.range(100).shuffle(30, seed=4).batch(7))
    assert np.concatenate(batches).tolist() == expected


def test_order_does_not_depend_on_bundles():
    # A graph has one chunk per task, and a pass in memory many chunks per bundle.
    ds = Dataset.range(300).shuffle(50, seed=2).batch(3).shuffle(20, seed=2)
    with dask.config.set({"daskdist.split-bytes": 100}):
        assert np.array_equal(np.concatenate(dask.compute(ds)[0]), np.concatenate(list(ds)))


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_buffer_of_all_gives_a_permutation(num_rows, more, seed):
    actual = ints(Dataset.range(num_rows).shuffle(max(num_rows, 1) + more, seed=seed))
    assert sorted(actual) == list(range(num_rows))


def test_an_element_waits_for_its_buffer():
    # Element k can come out at place k - buffer + 1 at the earliest.
    for seed in range(20):
        actual = ints(Dataset.range(200).shuffle(16, seed=seed))
        assert all(place >= value - 15 for place, value in enumerate(actual))


def chi_square(counts, expected):
    return sum((count - expected) ** 2 / expected for count in counts)


def test_every_order_is_equally_likely():
    counts = Counter(tuple(ints(Dataset.range(4).shuffle(4, seed=seed))) for seed in range(1440))
    actual = chi_square([counts[order] for order in permutations(range(4))], 60)
    # This is the 99.9 % quantile of chi-square with 23 degrees of freedom. Seeds are fixed, so the test is not flaky.
    assert actual < 49.7


def test_each_draw_is_uniform_over_the_buffer():
    num_seeds, buffer_size, num_rows = 1200, 8, 24
    runs = np.array([ints(Dataset.range(num_rows).shuffle(buffer_size, seed=seed)) for seed in range(num_seeds)])
    # Each of the first eight rows is the first element with equal probability, and the last of the eight to come.
    for counts in (
        np.bincount(runs[:, 0], minlength=buffer_size),
        np.bincount([max(range(8), key=run.tolist().index) for run in runs], minlength=buffer_size),
    ):
        assert len(counts) == buffer_size
        # This is the 99.9 % quantile of chi-square with 7 degrees of freedom.
        assert chi_square(counts, num_seeds / buffer_size) < 24.3
    # At each draw, an element leaves the full buffer with probability 1/8.
    waits = np.array([run.tolist().index(0) for run in runs])
    for draw in range(10):
        remaining = np.sum(waits >= draw)
        left = np.sum(waits == draw)
        assert abs(left - remaining / 8) < 4 * np.sqrt(remaining / 8 * 7 / 8)


# --- passes ---


def test_reshuffles_each_iteration():
    ds = Dataset.range(50).shuffle(50, seed=3)
    passes = [ints(ds) for _ in range(3)]
    assert len(set(map(tuple, passes))) == 3
    again = Dataset.range(50).shuffle(50, seed=3)
    assert [ints(again) for _ in range(3)] == passes


def test_does_not_reshuffle_if_told():
    ds = Dataset.range(50).shuffle(50, seed=3, reshuffle_each_iteration=False)
    assert ints(ds) == ints(ds)
    twice = ints(ds.repeat(2))
    assert twice[:50] == twice[50:] == ints(ds)


def test_reshuffles_each_repetition():
    actual = ints(Dataset.range(50).shuffle(50, seed=3).repeat(3))
    parts = [actual[:50], actual[50:100], actual[100:]]
    assert all(sorted(part) == list(range(50)) for part in parts)
    assert len(set(map(tuple, parts))) == 3


def test_repetitions_within_repetitions_differ():
    actual = ints(Dataset.range(30).shuffle(30, seed=3).repeat(2).repeat(2))
    parts = [tuple(actual[start : start + 30]) for start in range(0, 120, 30)]
    assert len(set(parts)) == 4


def test_shuffling_repeated_elements_mixes_passes():
    actual = ints(Dataset.range(20).repeat(2).shuffle(40, seed=1))
    assert sorted(actual) == sorted([*range(20)] * 2)
    assert sorted(actual[:20]) != list(range(20))


def test_two_shuffles_with_the_same_seed_draw_alike():
    once = Dataset.range(50).shuffle(50, seed=3, reshuffle_each_iteration=False)
    order = ints(once)
    twice = ints(once.shuffle(50, seed=3, reshuffle_each_iteration=False))
    assert [order[k] for k in order] == twice


def test_two_shuffles_without_seeds_draw_differently():
    once = Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)
    options = daskdist.Options(seed=3)
    order = ints(once.with_options(options))
    twice = ints(once.shuffle(50, reshuffle_each_iteration=False).with_options(options))
    assert [order[k] for k in order] != twice


def test_without_a_seed_orders_differ_between_datasets():
    orders = {tuple(Dataset.range(50).shuffle(50)) for _ in range(3)}
    assert len(orders) == 3


def test_without_a_seed_one_dataset_is_one_order():
    # The seed is drawn when the dataset is built, so graphs and passes agree.
    ds = Dataset.range(50).shuffle(50)
    assert ints(ds) == [int(value) for value in dask.compute(ds)[0]]


@pytest.mark.parametrize("seed", [3, -1, 2**70])
def test_a_seed_is_any_whole_number(seed):
    order = ints(Dataset.range(30).shuffle(30, seed=seed))
    assert sorted(order) == list(range(30))
    if -(2**63) <= seed < 2**63:
        assert ints(Dataset.range(30).shuffle(30, seed=np.int64(seed))) == order


def test_two_iterators_at_once():
    ds = Dataset.range(30).shuffle(30, seed=1)
    first, second = iter(ds), iter(ds)
    mixed = [(int(a), int(b)) for a, b in zip(first, second, strict=True)]
    fresh = Dataset.range(30).shuffle(30, seed=1)
    assert [a for a, _ in mixed] == ints(fresh)
    assert [b for _, b in mixed] == ints(fresh)


@pytest.mark.parametrize("size", [0, -1])
def test_buffer_size_is_checked(size):
    with pytest.raises(ArgumentError, match="buffer_size"):
        Dataset.range(3).shuffle(size)


# --- memory ---


class PeakWindow(ByteWindow):
    """A window that records the most bytes that were outstanding."""

    peak_bytes = 0

    def acquire(self, num_bytes):
        super().acquire(num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


def peak_of(ds, caller=None):
    """Return the window, which knows the most bytes of blocks that were alive at once, and the number of elements."""
    interpreter = Interpreter(caller or Synchronous())
    interpreter.reads[None] = window = PeakWindow(interpreter.reads[None].limit_bytes)
    elements = 0
    for bundle in BundleBuilder(interpreter, fuse(lower(node_of(ds))), StreamPosition((0,), [])):
        elements += len(bundle)
    return window, elements


class NeverCompacts(Synchronous):
    compacts = False


def test_memory_stays_near_the_buffer():
    # Blocks have 1,638 rows. A row that stays in the buffer keeps its whole block, unless the block is compacted.
    # The rows fill twelve buffers: after nine, a block has no rows left, and no more memory is held than before.
    num_rows, row_bytes, buffer_size = 480_000, 200, 40_000
    ds = Dataset.from_tensor_slices(np.zeros((num_rows, row_bytes // 8))).shuffle(buffer_size, seed=0).batch(10)
    with dask.config.set({"daskdist.split-bytes": 1638 * row_bytes, "daskdist.window-bytes": "64 MiB"}):
        window, elements = peak_of(ds)
        without, _ = peak_of(ds, NeverCompacts())
    assert elements == num_rows // 10
    # The limit covers the buffer, the rows drawn from it, blocks that have lost up to three quarters of their rows,
    # and an eighth of the window for blocks with too few rows to be worth a call.
    assert window.peak_bytes < 3 * buffer_size * row_bytes + 8 * 2**20, window.peak_bytes / 2**20
    assert without.peak_bytes > 2 * window.peak_bytes
    assert window.used_bytes == 0


@pytest.mark.parametrize("rows_a_batch", [10, 1000])
def test_a_small_buffer_of_batches_reads_little(rows_a_batch):
    # Four batches are in the buffer: a thousand more need not be read before the first comes out.
    ds = Dataset.from_tensor_slices(np.zeros((400_000, 10))).batch(rows_a_batch).shuffle(4, seed=0)
    batch_bytes = rows_a_batch * 80
    with dask.config.set({"daskdist.split-bytes": 8 * batch_bytes}):
        window, elements = peak_of(ds)
    assert elements == 400_000 // rows_a_batch
    assert window.peak_bytes <= max(100 * batch_bytes, 2**22), f"{window.peak_bytes / batch_bytes} batches"


def test_an_abandoned_shuffle_releases_its_bytes():
    ds = Dataset.from_tensor_slices(np.zeros((10_000, 10))).shuffle(500, seed=0).batch(10)
    with dask.config.set({"daskdist.split-bytes": 4096}):
        interpreter = Interpreter(Synchronous())
        builder = BundleBuilder(interpreter, fuse(lower(node_of(ds))), StreamPosition((0,), []))
        bundles = iter(builder)
        next(bundles), next(bundles)
        assert interpreter.reads[None].used_bytes > 0
        del bundles, builder
    assert interpreter.reads[None].used_bytes == 0
    assert interpreter.bundles[None].used_bytes == 0


@pytest.mark.cluster
def test_order_on_a_cluster(client):
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    ds = Dataset.range(200).shuffle(64, seed=9).batch(16)
    with dask.config.set({"daskdist.split-bytes": 160}):
        steps = [np.concatenate(strategy.local_results(step)) for step in strategy.distribute_dataset(ds)]
    assert np.concatenate(steps).tolist() == shuffled(list(range(200)), 64, 9, epoch=(0,))


@pytest.mark.parametrize("lengths", [[1000], [61, 259, 70_003, 200_000], [1, 1, 1, 300_000, 2, 1, 90_000], [40] * 400])
@pytest.mark.parametrize("are_intervals", [True, False])
def test_a_buffer_of_places_has_the_rows_at_those_places(lengths, are_intervals):
    rng = np.random.default_rng(len(lengths))
    refs = [BlockRef(place, length + 3) for place, length in enumerate(lengths)]
    run = concat([Selection.whole(ref)[3:] for ref in refs])
    expected = [(place, row) for place, length in enumerate(lengths) for row in range(3, length + 3)]
    bounds = np.cumsum(lengths)[:-1]
    some = rng.choice(len(expected) - lengths[-1] // 2, min(len(expected) // 2, 5000))
    places = rng.permutation(np.unique(np.concatenate([some, bounds - 1, bounds])))
    buffer = buffer_of_places(run if are_intervals else run.take(np.arange(len(run))), places)
    assert elements_of(buffer.rest()) == [expected[place] for place in places]
    # The first exchange stores the rows in another form.
    drawn = buffer.exchange(Draws.of(np.array([7, 7]), len(places)), Selection.whole(BlockRef("new", 2)))
    assert elements_of(drawn) == [expected[places[7]], ("new", 0)]
    rest = [expected[place] for place in places]
    rest[7] = ("new", 1)
    assert elements_of(buffer.rest()) == rest
