"""The byte budget limits how far reading runs ahead, and iterators that are left keep nothing."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import dask
import numpy as np
import pytest
from conftest import threads_of_passes
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset
from daskdist.core.block import Block
from daskdist.core.node import Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.execute.stream.window import ByteWindow

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

MIB = 2**20
LONE = Structure.of(0)[1]
ROWS = 128
ROW_BYTES = 8192


class Counter:
    """A counter of the reads of each split."""

    def __init__(self):
        self.lock = threading.Lock()
        self.reads = {}
        self.threads = set()

    def __call__(self, number):
        with self.lock:
            self.reads[number] = self.reads.get(number, 0) + 1
            self.threads.add(threading.get_ident())

    @property
    def total(self):
        return sum(self.reads.values())


@dataclass(frozen=True, eq=False)
class Counted(Source):
    """Blocks of 1 MiB whose reading is counted.

    Parameters
    ----------
    num_splits
        The number of splits.
    counter
        Counts the reads.
    says_bytes, says_rows
        Whether the size and the number of rows of a split are known before it is read.
    """

    num_splits: int
    counter: Counter = field(repr=False)
    says_bytes: int | None = MIB
    says_rows: bool = True
    delay_s: float = 0.0

    name = "counted"
    background = True

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec(LONE, (TensorSpec((ROW_BYTES // 8,), np.dtype(np.int64)),))

    @property
    def cardinality(self) -> int:
        return self.num_splits * ROWS if self.says_rows else -2

    def splits(self) -> Sequence[Split]:
        rows = ROWS if self.says_rows else None
        return [Split(f"split {k}", k, rows, self.says_bytes) for k in range(self.num_splits)]

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, self._read, "counted", factor=1 if self.says_rows else None)

    def _read(self, split: Split) -> Block:
        self.counter(split.payload)
        time.sleep(self.delay_s)
        return Block(LONE, [np.full((ROWS, ROW_BYTES // 8), split.payload)], split.label)


@pytest.fixture(autouse=True)
def _eight_threads():
    with dask.config.set({"daskdist.num-threads": 8}):
        yield


def settled(counter):
    """Return the number of reads once it no longer changes."""
    last = -1
    while counter.total != last:
        last = counter.total
        time.sleep(0.05)
    return last


@pytest.mark.parametrize(("window_mib", "batch_size"), [(2, None), (4, 64), (8, 128), (2, 200), (8, None)])
def test_reading_ahead_stays_within_the_window(window_mib, batch_size):
    counter = Counter()
    ds = Dataset(Counted(60, counter))
    ds = ds if batch_size is None else ds.batch(batch_size)
    with dask.config.set({"daskdist.window-bytes": window_mib * MIB}):
        it = iter(ds)
        assert counter.total == 0
        seen = 0
        for _ in range(5):
            seen += np.atleast_2d(next(it)).size * 8
            # Half of the window is for blocks, half for batches; one more block may be needed to make progress, and the
            # consumer holds one.
            ahead_mib = settled(counter) - seen / MIB
            assert ahead_mib <= window_mib + 3, f"{ahead_mib} MiB are read ahead in a window of {window_mib}"
        it.close()


def test_blocks_of_many_sources_are_released(monkeypatch):
    blocks = weakref.WeakSet()
    read = Counted._read

    def noted(self, split):
        block = read(self, split)
        blocks.add(block)
        return block

    monkeypatch.setattr(Counted, "_read", noted)
    sources = [Dataset(Counted(1, Counter())) for _ in range(60)]
    most = 0
    with dask.config.set({"daskdist.window-bytes": 4 * MIB}):
        for _ in functools.reduce(Dataset.concatenate, sources).batch(ROWS):
            most = max(most, len(blocks))
    assert most <= 4 + 3


def test_a_wide_window_is_used():
    counter = Counter()
    it = iter(Dataset(Counted(60, counter)).batch(ROWS))
    next(it)
    assert settled(counter) > 4
    assert len(counter.threads) > 1
    it.close()


def test_a_tiny_window_makes_progress():
    counter = Counter()
    with dask.config.set({"daskdist.window-bytes": 1}):
        batches = list(Dataset(Counted(10, counter)).shuffle(300, seed=0).batch(100))
    assert sum(map(len, batches)) == 10 * ROWS
    assert counter.reads == dict.fromkeys(range(10), 1)


@pytest.mark.parametrize(("says_rows", "delay_s"), [(True, 0.0), (False, 0.0), (True, 0.01), (False, 0.01)])
def test_unknown_sizes_are_learned(says_rows, delay_s):
    # Splits may be far smaller than their blocks, as compressed ones are. Sizes are learned from the first blocks.
    counter = Counter()
    ds = Dataset(Counted(80, counter, says_bytes=1024, says_rows=says_rows, delay_s=delay_s))
    with dask.config.set({"daskdist.window-bytes": 4 * MIB}):
        it = iter(ds)
        for _ in range(12 * ROWS):
            next(it)
        ahead = settled(counter) - 12
        it.close()
    assert ahead <= 4 + 3, f"{ahead} MiB are read ahead in a window of 4"


def test_nothing_is_read_twice():
    counter = Counter()
    assert sum(1 for _ in Dataset(Counted(20, counter)).shuffle(500, seed=1)) == 20 * ROWS
    assert counter.reads == dict.fromkeys(range(20), 1)


def test_a_mapped_source_gives_its_first_element_early():
    # A split of small rows has many of them, and calling a function for all may be slow, so only some are computed.
    called = []
    ds = Dataset.range(100_000).map(lambda x: called.append(1) or x)
    assert ds.element_spec.shape == ()
    called.clear()
    next(iter(ds.batch(8)))
    assert len(called) <= 20_000, f"{len(called)} elements were mapped for the first batch of 8"


# --- early stop ---


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds,
        lambda ds: ds.batch(100),
        lambda ds: ds.batch(100).map(np.sum),
        lambda ds: ds.shuffle(200, seed=0).batch(10).prefetch(2),
        lambda ds: ds.repeat().batch(64),
        lambda ds: ds.filter(lambda x: x[0] % 2 == 0).batch(10),
    ],
)
def test_an_abandoned_pass_leaves_no_threads_or_bytes(build):
    counter = Counter()
    ds = build(Dataset(Counted(200, counter, delay_s=0.002)))
    with dask.config.set({"daskdist.window-bytes": 16 * MIB}):
        for number, _ in enumerate(ds):
            if number == 3:
                break
        gc.collect()
    assert not threads_of_passes()
    assert counter.total == settled(counter) < 100


def test_a_pass_left_by_an_exception_leaves_no_threads_or_bytes():
    counter = Counter()

    def loop():
        for _ in Dataset(Counted(200, counter)).batch(100):
            raise KeyError("of the user's")

    with pytest.raises(KeyError):
        loop()
    gc.collect()
    assert not threads_of_passes()
    assert counter.total == settled(counter) < 100


def test_a_failing_function_leaves_nothing():
    counter = Counter()

    def fail(x):
        if x[0] == 20:
            raise KeyError("of the function's")
        return x

    with pytest.raises(daskdist.errors.UserFunctionError, match="split 20"):
        list(Dataset(Counted(200, counter)).map(fail))
    gc.collect()
    assert not threads_of_passes()
    assert counter.total == settled(counter) < 100


def test_the_end_leaves_nothing():
    counter = Counter()
    it = iter(Dataset(Counted(5, counter)).batch(100))
    assert sum(map(len, it)) == 5 * ROWS
    assert not threads_of_passes()
    assert next(it, None) is None


@pytest.mark.parametrize("how", ["close", "drop", "end"])
def test_an_abandoned_distributed_pass_leaves_no_threads_or_bytes(how):
    counter = Counter()
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    it = iter(strategy.distribute_dataset(Dataset(Counted(20, counter)).batch(100)))
    next(it)
    if how == "close":
        it.close()
    elif how == "end":
        list(it)
    del it
    gc.collect()
    assert not threads_of_passes()
    assert counter.total == settled(counter)


def test_no_more_threads_run_than_configured():
    counter = Counter()
    with dask.config.set({"daskdist.num-threads": 3}):
        it = iter(Dataset(Counted(50, counter, delay_s=0.005)).batch(10))
        next(it)
        assert len(threads_of_passes()) <= 3
        it.close()
    assert 1 <= len(counter.threads) <= 3


def test_iterators_side_by_side():
    # Each has its own threads, and none waits for another.
    counter = Counter()
    ds = Dataset(Counted(12, counter)).batch(100)
    pairs = list(zip(ds, ds, strict=True))
    assert len(pairs) == -(-12 * ROWS // 100)
    assert counter.reads == dict.fromkeys(range(12), 2)
    assert not threads_of_passes()


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["break", "close"])
def test_an_abandoned_pass_leaves_nothing_on_a_cluster(client, how):
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    before = {key for keys in client.has_what().values() for key in keys}
    ds = Dataset.from_tensor_slices(np.zeros((20_000, 16))).shuffle(1000, seed=0).batch(100)
    with dask.config.set({"daskdist.split-bytes": 64 * 1024}):
        it = iter(strategy.distribute_dataset(ds))
        for number, step in enumerate(it):
            strategy.local_results(step)
            if number == 3:
                break
    if how == "close":
        it.close()
    del it, step
    gc.collect()
    deadline = time.monotonic() + 20
    while left := {key for keys in client.has_what().values() for key in keys} - before:
        assert time.monotonic() < deadline, f"workers still hold {len(left)} results, such as {sorted(left)[:3]}"
        time.sleep(0.05)


# --- the window itself ---


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=30), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_the_window_counts_acquired_and_released_bytes(steps, limit):
    window, used = ByteWindow(limit), 0
    for takes, num_bytes in steps:
        if takes:
            window.acquire(num_bytes)
            used += num_bytes
        elif num_bytes <= used:
            window.release(num_bytes)
            used -= num_bytes
        assert window.used_bytes == used
        assert window.has_room() == (used <= limit)
        assert window.has_room(50) == (used + 50 <= limit)


def test_window_is_released_from_any_thread():
    window = ByteWindow(10)
    window.acquire(4000)
    workers = [threading.Thread(target=lambda: [window.release(1) for _ in range(1000)]) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert window.used_bytes == 0


@pytest.mark.parametrize("prefetched", [False, True])
def test_large_chunks_that_are_kept_keep_their_rows(prefetched):
    x = np.arange(400_000 * 8).reshape(-1, 8)
    ds = Dataset.from_tensor_slices(x).shuffle(30_000, seed=3).batch(5_000)
    kept = list(ds.prefetch(1) if prefetched else ds)
    np.testing.assert_array_equal(np.sort(np.concatenate(kept)[:, 0]), x[:, 0])
    assert all((chunk - chunk[:, :1] == np.arange(8)).all() for chunk in kept)
