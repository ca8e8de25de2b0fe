"""Backpressure: what is read ahead is bounded in bytes a worker, for all iterators of a process together."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import dask
import numpy as np
import pytest
from conftest import mirrored
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, Options, read_npy
from daskdist.core.block import Block
from daskdist.core.node import Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError
from daskdist.execute.callers.threads import Threads
from daskdist.execute.stream.window import Account, ByteWindow, Windows

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

MIB = 2**20
WINDOW = 16 * MIB
ROW_BYTES = 4096
BLOCK_ROWS = MIB // ROW_BYTES
NUM_ITERATORS = 10
LONE = Structure.of(0)[1]


@pytest.fixture(autouse=True)
def _sizes():
    sizes = {"window-bytes": WINDOW, "split-bytes": MIB, "bundle-bytes": MIB, "num-threads": 4}
    with dask.config.set({f"daskdist.{name}": value for name, value in sizes.items()}):
        yield


class Live:
    """Counters of the blocks that were created and of those in memory."""

    def __init__(self):
        self.made = 0
        self.gone = []
        self.lock = threading.Lock()

    def note(self, array):
        with self.lock:
            self.made += 1
        # Blocks are freed in any thread, and appending to a list is atomic.
        weakref.finalize(array, self.gone.append, None)
        return array

    @property
    def num_blocks(self):
        return self.made - len(self.gone)


@dataclass(frozen=True, eq=False)
class Blocks(Source):
    """Blocks of 1 MiB that are counted while they are in memory; the rows of a block have its number."""

    num_blocks: int
    live: Live = field(repr=False)

    name = "blocks"
    background = True

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec(LONE, (TensorSpec((ROW_BYTES // 8,), np.dtype(np.int64)),))

    @property
    def cardinality(self) -> int:
        return self.num_blocks * BLOCK_ROWS

    def splits(self) -> Sequence[Split]:
        return [Split(f"block {k}", k, BLOCK_ROWS, MIB) for k in range(self.num_blocks)]

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, self._read, "blocks")

    def _read(self, split: Split) -> Block:
        return Block(LONE, [self.live.note(np.full((BLOCK_ROWS, ROW_BYTES // 8), split.payload))], split.label)


def settled(value):
    """Return a number once it no longer changes."""
    last = None
    while (now := value()) != last:
        last = now
        time.sleep(0.1)
    return now


def outstanding(worker=None):
    """Return the bytes that all pipelines count as outstanding on a worker."""
    return sum(Windows(kind, 1, 1)[worker].shared_bytes for kind in ("reads", "bundles"))


BUILD = {
    "elements": lambda ds: ds,
    "batches": lambda ds: ds.batch(100),
    "shuffled": lambda ds: ds.shuffle(BLOCK_ROWS, seed=0).batch(64),
    "mapped": lambda ds: ds.map(lambda x: x + 1).batch(64),
}


# --- in this process ---


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_iterators_of_a_process_share_the_window(build):
    live = Live()
    ds = build(Dataset(Blocks(100, live)))
    iterators = [iter(ds) for _ in range(NUM_ITERATORS)]
    for it in iterators:
        next(it)
    num_blocks = settled(lambda: live.num_blocks)
    # A shuffle keeps its buffer and the blocks that fill it.
    each = 3 if build is BUILD["shuffled"] else 1
    assert num_blocks <= WINDOW // MIB + each * NUM_ITERATORS
    for it in iterators:
        it.close()


def test_one_iterator_alone_reads_less_than_the_window():
    live = Live()
    it = iter(Dataset(Blocks(100, live)).batch(100))
    next(it)
    assert 4 <= settled(lambda: live.num_blocks) <= WINDOW // MIB
    it.close()


def test_a_late_iterator_gets_its_part_of_the_window():
    # An iterator that nobody uses further holds its part of the window, and leaves the rest to others.
    first, second = Live(), Live()
    with dask.config.set({"daskdist.num-threads": 64, "daskdist.window-bytes": 4 * WINDOW}):
        idle, busy = iter(Dataset(Blocks(200, first))), iter(Dataset(Blocks(200, second)))
        for _ in range(3 * BLOCK_ROWS):
            next(idle)
        taken = settled(lambda: first.num_blocks)
        for _ in range(3 * BLOCK_ROWS):
            next(busy)
        assert taken > WINDOW // MIB
        assert settled(lambda: second.num_blocks) >= 8
        assert settled(lambda: first.num_blocks) == taken
    idle.close()
    busy.close()


def test_many_iterators_all_complete():
    live = Live()
    ds = Dataset(Blocks(12, live)).batch(100)
    with dask.config.set({"daskdist.window-bytes": 1}):
        rounds = list(zip(*[iter(ds) for _ in range(NUM_ITERATORS)], strict=True))
    assert sum(len(value[0]) for value in rounds) == 12 * BLOCK_ROWS
    assert all((batch == item[0]).all() for item in rounds for batch in item)


def test_a_pipelines_own_budget_bounds_it_besides():
    live = Live()
    ds = Dataset(Blocks(100, live)).with_options(Options(memory_budget_bytes=4 * MIB))
    it = iter(ds)
    next(it)
    assert settled(lambda: live.num_blocks) <= 4
    it.close()


def test_a_budget_above_the_window_does_not_widen_it():
    live = Live()
    ds = Dataset(Blocks(100, live)).with_options(Options(memory_budget_bytes=64 * MIB, num_threads=64))
    it = iter(ds)
    next(it)
    assert settled(lambda: live.num_blocks) <= WINDOW // MIB
    it.close()


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_a_dropped_iterator_releases_everything(build):
    live = Live()
    # Releases of other tests must not interfere.
    gc.collect()
    before = outstanding()
    it = iter(build(Dataset(Blocks(100, live))))
    next(it)
    assert outstanding() > before
    del it
    # The bytes are released at once, without the garbage collector.
    assert outstanding() == before
    gc.collect()
    assert settled(lambda: live.num_blocks) == 0


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_an_iterator_that_is_closed_holds_nothing(build):
    live = Live()
    # Releases of other tests must not interfere.
    gc.collect()
    before = outstanding()
    it = iter(build(Dataset(Blocks(100, live))))
    next(it)
    it.close()
    assert outstanding() == before
    gc.collect()
    assert settled(lambda: live.num_blocks) == 0
    assert next(it, None) is None
    with pytest.raises(ArgumentError, match="state_dict: this iterator is closed; take the position"):
        it.state_dict()


@pytest.mark.parametrize("kind", ["source", "call", "cheap call"])
def test_a_failed_call_in_a_thread_frees_what_it_was_given_with_its_handle(kind):
    def fail(*args):
        raise KeyError("of the function's")

    caller = Threads(1)
    given = np.zeros(1)
    if kind == "source":
        handle = caller.source(fail, given, name="fails")
    else:
        operand = caller.source(lambda value: value, given, name="operand")
        handle = caller.call(fail, [operand], is_cheap=kind == "cheap call", name="fails")
        del operand
    caller.wait_for_one([handle])
    assert isinstance(handle.exception(), KeyError)
    caller.close()
    gc.collect()
    gc.disable()
    try:
        freed = weakref.ref(given)
        del given, handle
        assert freed() is None
    finally:
        gc.enable()


def test_an_iterator_dropped_while_it_fails_releases_everything():
    live = Live()
    # Releases of other tests must not interfere.
    gc.collect()
    before = outstanding()

    def fail(x):
        if x[0] == 7:
            raise KeyError("of the function's")
        return x

    with pytest.raises(daskdist.errors.UserFunctionError, match="block 7"):
        list(Dataset(Blocks(100, live)).map(fail, vectorized=False).batch(64))
    # The traceback refers to the iterator until it is collected.
    gc.collect()
    assert outstanding() == before


def test_distributed_iterators_share_the_window():
    live = Live()
    dist = mirrored(2).distribute_dataset(Dataset(Blocks(100, live)).batch(100))
    iterators = [iter(dist) for _ in range(NUM_ITERATORS)]
    for it in iterators:
        next(it)
    assert settled(lambda: live.num_blocks) <= WINDOW // MIB + NUM_ITERATORS
    for it in iterators:
        it.close()


@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_slow_consumer_of_an_endless_dataset_holds_memory_flat(is_distributed):
    live, actual, release, has_one = Live(), [], threading.Semaphore(0), threading.Semaphore(0)
    ds = Dataset(Blocks(3, live)).repeat().batch(BLOCK_ROWS)
    ds = mirrored(1).distribute_dataset(ds) if is_distributed else ds

    def consume():
        for batch, _ in zip(ds, range(40), strict=False):
            actual.append(int(batch[0, 0]))
            has_one.release()
            release.acquire()

    consumer = threading.Thread(target=consume)
    consumer.start()
    for _ in range(40):
        assert has_one.acquire(timeout=10)
        assert live.num_blocks <= WINDOW // MIB + 1
        release.release()
    consumer.join()
    assert actual == [number % 3 for number in range(40)]


# --- on a cluster ---


@pytest.fixture
def large_file(tmp_path):
    """Return a sparse file of 256 MiB of zeros, which takes no space on disk."""
    path = tmp_path / "large.npy"
    np.lib.format.open_memmap(path, "w+", np.int64, (64 * 1024, ROW_BYTES // 8))
    return str(path)


def held_bytes(client):
    """Return the bytes that each worker holds, according to Dask."""
    sizes = client.nbytes(summary=False)
    return {worker: sum(sizes.get(key, 0) for key in keys) for worker, keys in client.has_what().items()}


def is_idle(client):
    return not any(client.processing().values())


def settled_bytes(client):
    """Return the bytes that each worker holds once nothing is being computed."""
    last = None
    while (now := (is_idle(client), held_bytes(client))) != last or not now[0]:
        last = now
        time.sleep(0.1)
    return now[1]


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["data", "off"])
def test_iterators_on_a_cluster_share_the_window(client, on_cluster, large_file, policy):
    gc.collect()
    before = settled_bytes(client)
    ds = read_npy(large_file).batch(64).with_options(Options(auto_shard_policy=policy))
    dist = on_cluster.distribute_dataset(ds)
    iterators = [iter(dist) for _ in range(NUM_ITERATORS)]
    steps = [next(it) for it in iterators]
    held = settled_bytes(client)
    for worker, num_bytes in held.items():
        ahead = num_bytes - before.get(worker, 0)
        # Besides the window, each iterator may hold the block that it takes rows from, and the step that it returned.
        assert ahead <= WINDOW + NUM_ITERATORS * (MIB + 64 * ROW_BYTES), ahead / MIB
        assert ahead > WINDOW / 4
    del steps
    for it in iterators:
        it.close()
    del it, iterators
    gc.collect()
    for worker in held:
        assert outstanding(worker) == 0


@pytest.mark.cluster
def test_a_slow_consumer_on_a_cluster_holds_memory_flat(client, on_cluster, large_file):
    gc.collect()
    before = settled_bytes(client)
    it = iter(on_cluster.distribute_dataset(read_npy(large_file).repeat().batch(128)))
    for number in range(60):
        on_cluster.local_results(next(it))
        if number % 20 == 19:
            for worker, num_bytes in settled_bytes(client).items():
                assert num_bytes - before.get(worker, 0) <= WINDOW + 2 * MIB
    it.close()


@pytest.mark.cluster
def test_elements_handed_out_do_not_count_as_read_ahead(on_cluster, large_file):
    # Steps that a program keeps must not slow down other passes.
    dist = on_cluster.distribute_dataset(read_npy(large_file).take(64 * BLOCK_ROWS).batch(64))
    kept = list(dist)
    assert len(kept) == 64 * BLOCK_ROWS // 64
    for worker in on_cluster.workers:
        assert outstanding(worker) == 0


# --- accounts ---


@given(st.lists(st.integers(-100, 100), max_size=600))
@settings(max_examples=30, deadline=None)
def test_an_account_is_a_sum(changes):
    account = Account()
    for change in changes:
        account.add(change)
    assert account.used_bytes == sum(changes)


def test_an_account_that_is_never_read_stays_small():
    account = Account()
    for _ in range(10_000):
        account.add(1)
    assert sys.getsizeof(account._changes) < 20_000
    assert account.used_bytes == 10_000


def test_an_account_is_of_all_threads():
    account = Account()
    done = threading.Barrier(8)

    def change():
        done.wait()
        for _ in range(5_000):
            account.add(3)
            assert account.used_bytes > -5_000 * 8
            account.add(-3)

    workers = [threading.Thread(target=change) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert account.used_bytes == 0


def test_releases_during_a_summation_are_counted():
    # The garbage collector may run, and so release bytes, in the middle of a summation.
    account = Account()

    class Meddling(int):
        def __radd__(self, other):
            account.add(-1)
            assert account.used_bytes >= 0
            return int(self) + other

    account.add(5)
    account.add(Meddling(7))
    assert account.used_bytes == 11


@pytest.mark.parametrize(("others", "fits"), [(0, 75), (75, 18), (90, 7), (100, 0), (150, 0)])
def test_a_window_leaves_room_for_others(others, fits):
    # A window may use up to three times as many bytes as it leaves free.
    shared = Account()
    shared.add(others)
    window = ByteWindow(1_000, shared, 100)
    assert max((number for number in range(200) if window.has_room(number)), default=0) == fits
    assert window.has_room(fits + 1) is False


def test_windows_of_one_kind_on_one_worker_share():
    first, second = Windows("test", 100, 100), Windows("test", 100, 100)
    first["a"].acquire(101)
    assert second["a"].shared_bytes == 101
    assert second["b"].shared_bytes == Windows("other", 100, 100)["a"].shared_bytes == 0
    assert not second["a"].has_room()
    assert second["b"].has_room(1)
    assert not second.has_room()
    first["a"].release(101)
    assert second.has_room()


def test_accounts_are_dropped_with_their_last_reference():
    window = Windows("gone", 100, 100)["a"]
    window.acquire(10)
    del window
    gc.collect()
    assert Windows("gone", 100, 100)["a"].shared_bytes == 0


def test_a_window_without_a_limit_takes_no_room_from_others():
    noting = Windows("noted", 100, None)
    noting["a"].acquire(100)
    assert Windows("noted", 100, 100)["a"].shared_bytes == 0
    assert noting["a"].has_room()
