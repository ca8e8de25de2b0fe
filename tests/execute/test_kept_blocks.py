"""Small datasets in the program's memory are sent to a cluster once for any number of passes, and released."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from conftest import mirrored
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

import daskdist
from daskdist import Dataset, Options, Ragged
from daskdist.core.block import Block
from daskdist.core.structure import LONE
from daskdist.execute.callers.kept_blocks import KeptBlocks
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.replica.contract import internals_of
from daskdist.testing import same_elements

NUM_ROWS = 1280
ROWS = np.random.default_rng(0).random((NUM_ROWS, 16), np.float32)


class Tasks(SchedulerPlugin):
    """A counter of the tasks that workers have finished, by kind."""

    name = "daskdist-test-tasks"

    def __init__(self):
        self.counts = Counter()

    def transition(self, key, start, finish, *args, **kwargs):
        if start == "processing" and finish in ("memory", "erred"):
            self.counts[str(key).split("-")[0]] += 1


@pytest.fixture
def tasks(client: Client) -> Iterator[Counter]:
    """Count the tasks of a test."""
    plugin = Tasks()
    client.cluster.scheduler.add_plugin(plugin)
    yield plugin.counts
    client.cluster.scheduler.remove_plugin(plugin.name)


def batches_of(strategy, distributed, number=None):
    """Return the batches of a pass, each joined from the replicas' parts."""
    steps = []
    for step in distributed:
        steps.append(step)
        if len(steps) == number:
            break
    return [np.concatenate(strategy.local_results(step)) for step in steps]


def keys_there(client: Client, prefix: str) -> set[str]:
    """Return the keys of the results of a kind that workers have."""
    actual = client.run(lambda dask_worker: [str(key) for key in dask_worker.data])
    return {key for keys in actual.values() for key in keys if key.startswith(prefix)}


def keys_left(client: Client, prefix: str, before: set[str]) -> dict[str, object]:
    """Wait until the cluster has no more results of a kind than before; return those left, with their states."""
    end = time.monotonic() + 10
    while True:
        gc.collect()
        keys = keys_there(client, prefix) - before
        if not keys or time.monotonic() > end:
            known = client.cluster.scheduler.tasks
            return {key: (known[key], known[key].who_wants) if key in known else None for key in keys}
        time.sleep(0.05)


# --- kept blocks, without a cluster ---


@pytest.fixture
def kept() -> SimpleNamespace:
    """Return kept blocks whose ``sent`` lists all blocks that were sent; the blocks in ``lost`` are not available."""
    sent: list[Block] = []
    lost: set[int] = set()

    def send(block):
        sent.append(block)
        return len(sent)

    blocks = KeptBlocks(lambda handle: handle not in lost)
    return SimpleNamespace(blocks=blocks, sent=sent, lost=lost, of=lambda owner, b: blocks.handle_of(owner, b, send))


class Owner:
    pass


def lone(leaf):
    return Block(LONE, [leaf], "rows")


def test_a_block_is_sent_once_for_each_owner(kept):
    one, other, rows = Owner(), Owner(), lone(np.arange(6).reshape(3, 2))
    assert [kept.of(one, rows), kept.of(one, rows), kept.of(other, rows), kept.of(one, rows)] == [1, 1, 2, 1]
    assert len(kept.blocks) == 2
    del one
    gc.collect()
    assert len(kept.blocks) == 1
    kept.blocks.clear()
    assert len(kept.blocks) == 0
    assert kept.of(other, rows) == 3


def test_a_block_that_is_no_longer_there_is_sent_again(kept):
    owner, rows = Owner(), lone(np.arange(3))
    assert kept.of(owner, rows) == 1
    kept.lost.add(1)
    assert [kept.of(owner, rows), kept.of(owner, rows)] == [2, 2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.float64([1, 2, np.nan]), np.float64([1, 2, 3])),
        (np.float32([1, 0.0, 2]), np.float32([1, -0.0, 2])),
        (np.arange(3), np.arange(3).astype(np.float64).view(np.int64)),
        (np.arange(4, dtype=np.int32), np.arange(4, dtype=np.uint32)),
        (np.arange(6).reshape(3, 2), np.arange(6).reshape(2, 3)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array(["a", "b"], np.dtypes.StringDType()), np.array(["a", "b\0"], np.dtypes.StringDType())),
        (np.array(["a", b"b"], object), np.array(["a", "b"], object)),
        (Ragged.of([np.arange(2), np.arange(3)]), Ragged.of([np.arange(2), np.arange(3) + 1])),
        (Ragged.of([np.arange(2), np.array([0])]), Ragged.of([np.arange(1), np.array([1, 0])])),
        (np.array([1, 2], "M8[s]"), np.array([1, 3], "M8[s]")),
        (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8")),
    ],
)
def test_changed_data_is_sent_again(kept, before, after):
    owner = Owner()
    assert [kept.of(owner, lone(before)) for _ in range(2)] == [1, 1]
    assert [kept.of(owner, lone(after)) for _ in range(2)] == [2, 2]
    same_elements(list(kept.sent[1].elements()), list(lone(after).elements()), "what was sent")


def test_nan_keeps_its_bits_and_sent_data_is_a_copy(kept):
    owner, rows = Owner(), np.float32([np.nan, 1, 2, 3])[::2]
    assert [kept.of(owner, lone(rows)) for _ in range(2)] == [1, 1]
    rows[1] = 7
    assert kept.sent[0].leaves[0][1] == 2
    assert kept.of(owner, lone(rows)) == 2


@pytest.mark.parametrize(
    "leaf",
    [
        np.array(["a", ["b"]], object),
        np.array(["a", np.str_("b")], object),
        np.array(["a", "b" * (2**23)], np.dtypes.StringDType()),
        np.array(["a", None], np.dtypes.StringDType(na_object=None)),
        np.array(["a", "b" * (2**23)], object),
        np.zeros(2**23 + 8, np.uint8),
        Ragged.of([np.array([1, "a"], object)]),
        np.zeros(2, [("a", object)]),
    ],
)
def test_large_and_mutable_values_are_not_kept(kept, leaf):
    assert kept.of(Owner(), lone(leaf)) is None
    assert not kept.sent


def test_the_most_recently_used_are_kept(kept):
    owners, rows = [Owner() for _ in range(9)], lone(np.zeros(2**23, np.uint8))
    for number, owner in enumerate(owners[:8]):
        assert kept.of(owner, rows) == number + 1
    assert kept.of(owners[0], rows) == 1
    assert kept.of(owners[8], rows) == 9
    assert len(kept.blocks) == 8
    # The second owner's block was the least recently used, so it was dropped.
    assert kept.of(owners[0], rows) == 1
    assert kept.of(owners[1], rows) == 10


# --- on a cluster ---


@pytest.mark.cluster
def test_later_passes_send_nothing_and_take_a_task_a_worker(on_cluster, tasks):
    distributed = on_cluster.distribute_dataset(Dataset.from_tensor_slices(ROWS).batch(128))
    passes = [batches_of(on_cluster, distributed) for _ in range(4)]
    assert all(np.array_equal(np.concatenate(value), ROWS) for value in passes)
    # Reading the rows has waited for all tasks.
    assert tasks["from_tensor_slices"] == 1
    assert tasks["gather"] == 2 * 4
    assert not tasks["take"]
    assert not tasks["report"]


@pytest.mark.cluster
def test_repetitions_go_into_one_task_together(on_cluster, tasks):
    distributed = on_cluster.distribute_dataset(Dataset.from_tensor_slices(ROWS).repeat().batch(96))
    actual = np.concatenate(batches_of(on_cluster, distributed, 200))
    expected = np.concatenate([ROWS] * 16)[: len(actual)]
    assert np.array_equal(actual, expected)
    assert tasks["from_tensor_slices"] == 1
    # About 15 passes are needed for these batches.
    assert tasks["gather"] <= 20


@pytest.mark.cluster
def test_tiny_datasets_are_not_repeated_by_thousands_before_the_first_batch(on_cluster):
    dataset = Dataset.from_tensor_slices(np.arange(4)).repeat().batch(4)
    it = iter(on_cluster.distribute_dataset(dataset))
    step = next(it)
    assert it._interpreters[0].num_asked <= 200
    assert np.concatenate(on_cluster.local_results(step)).tolist() == [0, 1, 2, 3]


PIPELINES = {
    "batch": lambda ds: ds.batch(300),
    "batch, dropped rest": lambda ds: ds.batch(100, drop_remainder=True).repeat(3),
    "repeat": lambda ds: ds.repeat(3).batch(300),
    "shuffle": lambda ds: ds.shuffle(NUM_ROWS, seed=3).batch(300).repeat(3),
    "shuffle of few": lambda ds: ds.shuffle(50, seed=3).repeat(3).batch(300),
    "shuffled batches": lambda ds: ds.batch(300).shuffle(5, seed=3).repeat(3),
    "map": lambda ds: ds.map(lambda x: x * 2).repeat(2).batch(300),
    "filter": lambda ds: ds.filter(lambda x: x[0] > 0.5).repeat(2).batch(300),
    "map of batches": lambda ds: ds.repeat(2).batch(300).map(lambda x: x + 1),
    "zip with itself": lambda ds: Dataset.zip((ds, ds.shuffle(NUM_ROWS, seed=1))).repeat(2).batch(200),
    "cache": lambda ds: ds.shuffle(NUM_ROWS, seed=2).cache().repeat(3).batch(300),
    "parts": lambda ds: ds.skip(7).take(1000).shard(3, 1).repeat(4).batch(300),
    "interleave": lambda ds: Dataset.range(3).interleave(lambda i: ds.skip(i).take(200), cycle_length=2).batch(100),
    "windows": lambda ds: ds.take(90).window(30).flat_map(lambda value: value.batch(10)).repeat(2),
    "concatenate": lambda ds: ds.take(300).concatenate(ds.map(lambda x: -x)).repeat(2).batch(300),
    "errors left out": lambda ds: ds.take(60).map(_or_fail).ignore_errors().repeat(2).batch(30),
    "not in order": lambda ds: ds.batch(300).repeat(2).with_options(_any_order()),
}


def _or_fail(x):
    if x[0] > 0.9:
        raise ValueError("too much")
    return x


def _any_order():
    options = Options()
    options.deterministic = False
    return options


@pytest.mark.cluster
@pytest.mark.parametrize("name", PIPELINES)
def test_elements_and_their_order_are_those_of_a_strategy_in_this_process(on_cluster, name):
    def passes(strategy):
        dataset = PIPELINES[name](Dataset.from_tensor_slices(ROWS))
        distributed = strategy.distribute_dataset(dataset)
        return [[strategy.local_results(step) for step in distributed] for _ in range(2)]

    for one, other in zip(passes(on_cluster), passes(mirrored(2)), strict=True):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            for a, b in zip(left, right, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["DATA", "OFF"])
def test_kept_blocks_are_used_under_each_policy(on_cluster, tasks, policy):
    dataset = Dataset.from_tensor_slices(ROWS).batch(128).with_options(Options(auto_shard_policy=policy))
    distributed = on_cluster.distribute_dataset(dataset)
    actual = [np.concatenate(batches_of(on_cluster, distributed)) for _ in range(2)]
    times = 2 if policy == "OFF" else 1
    for result in actual:
        assert np.array_equal(np.sort(result, axis=0), np.sort(np.concatenate([ROWS] * times), axis=0))
    assert tasks["from_tensor_slices"] == 1


@pytest.mark.cluster
def test_arrays_that_the_program_writes_into_between_passes(on_cluster, tasks):
    rows = np.arange(64)
    distributed = on_cluster.distribute_dataset(Dataset.from_tensor_slices(rows).batch(16))
    for number in range(3):
        rows += number
        assert np.array_equal(np.concatenate(batches_of(on_cluster, distributed)), rows)
    assert tasks["from_tensor_slices"] == 3


@pytest.mark.cluster
def test_text_and_rows_of_different_lengths(on_cluster, tasks):
    lengths = np.arange(1280) % 5
    nest = {"text": [f"row {n}" for n in range(1280)], "lengths": Ragged.of([np.arange(n) for n in lengths])}
    distributed = on_cluster.distribute_dataset(Dataset.from_tensor_slices(nest).batch(128))
    for _ in range(3):
        parts = [part for step in distributed for part in on_cluster.local_results(step)]
        assert [str(item) for part in parts for item in part["text"]] == nest["text"]
        assert [len(value) for part in parts for value in part["lengths"]] == lengths.tolist()
    assert tasks["from_tensor_slices"] == 1


@pytest.mark.cluster
def test_nothing_stays_of_a_dataset_that_is_gone(on_cluster, client):
    rows, before = ROWS.copy(), keys_there(client, "from_tensor_slices")
    distributed = on_cluster.distribute_dataset(Dataset.from_tensor_slices(rows).batch(128))
    batches_of(on_cluster, distributed)
    assert len(internals_of(on_cluster).input._submit.kept_blocks) == 1
    assert keys_there(client, "from_tensor_slices") - before
    del distributed
    gc.collect()
    assert len(internals_of(on_cluster).input._submit.kept_blocks) == 0
    assert keys_left(client, "from_tensor_slices", before) == {}


@pytest.mark.cluster
def test_nothing_stays_of_a_strategy_that_is_closed(client):
    dataset, before = Dataset.from_tensor_slices(ROWS).batch(128), keys_there(client, "from_tensor_slices")
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    distributed = strategy.distribute_dataset(dataset)
    it = iter(distributed)
    next(it)
    strategy.close()
    assert keys_left(client, "from_tensor_slices", before) == {}
    # Another strategy sends the block again.
    with daskdist.MultiWorkerMirroredStrategy(client) as other:
        assert np.array_equal(np.concatenate(batches_of(other, other.distribute_dataset(dataset))), ROWS)


@pytest.mark.cluster
def test_data_over_the_budget_of_a_pipeline_is_read_in_parts(on_cluster, tasks):
    dataset = Dataset.from_tensor_slices(ROWS).batch(128).with_options(Options(memory_budget_bytes=40_000))
    assert np.array_equal(np.concatenate(batches_of(on_cluster, on_cluster.distribute_dataset(dataset))), ROWS)
    assert tasks["from_tensor_slices"] > 1
    assert len(internals_of(on_cluster).input._submit.kept_blocks) == 0


@pytest.mark.cluster
def test_a_lost_workers_block_is_made_again():
    with contextlib.ExitStack() as opened:
        cluster = opened.enter_context(
            LocalCluster(
                n_workers=3,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                silence_logs=50,
            )
        )
        client = opened.enter_context(Client(cluster, set_as_default=False))
        strategy = opened.enter_context(daskdist.MultiWorkerMirroredStrategy(client))
        distributed = strategy.distribute_dataset(Dataset.from_tensor_slices(ROWS).batch(128))
        assert np.array_equal(np.concatenate(batches_of(strategy, distributed)), ROWS)
        for _ in range(2):
            # Kill a worker that has the block; after some seconds, Dask may have no other copy of it.
            key = next(key for key in map(str, client.who_has()) if key.startswith("from_tensor_slices"))
            holder = client.who_has()[key][0]
            os.kill(client.run(os.getpid)[holder], signal.SIGKILL)
            end = time.monotonic() + 20
            while holder in workers_of(client) and time.monotonic() < end:
                time.sleep(0.02)
            with contextlib.suppress(daskdist.errors.ClusterError):
                strategy.local_results(strategy.run(os.getpid))
            assert np.array_equal(np.concatenate(batches_of(strategy, distributed)), ROWS)
            # The lost worker is gone, but restarted workers may have replaced it.
            assert holder not in strategy.workers


@pytest.mark.cluster
def test_arrays_on_workers_are_not_copied_when_few_of_their_rows_are_left(on_cluster, tasks):
    with dask.config.set({"daskdist.bundle-bytes": 1000}):
        placed = on_cluster.experimental_make_numpy_dataset(ROWS)
        distributed = on_cluster.distribute_dataset(placed.shuffle(300, seed=1).repeat(2).batch(128))
        actual = np.concatenate(batches_of(on_cluster, distributed))
    assert np.array_equal(np.sort(actual, axis=0), np.sort(np.concatenate([ROWS] * 2), axis=0))
    assert not tasks["compact"]
    assert not tasks["report"]


@pytest.mark.cluster
def test_parts_grow_across_repetitions(on_cluster, tasks):
    dataset = Dataset.from_tensor_slices(ROWS).map(lambda x: x + 1).repeat().batch(128)
    actual = np.concatenate(batches_of(on_cluster, on_cluster.distribute_dataset(dataset), 200))
    assert np.array_equal(actual, np.concatenate([ROWS + 1] * 20))
    # If parts began small in each of the 20 repetitions, there would be seven in each, 140 in all. The exact number
    # depends on how far is read ahead, and so on time.
    assert tasks["from_tensor_slices"] <= 3 * 20
    assert tasks["report"] < 20


@pytest.mark.cluster
def test_a_cache_is_replayed_by_few_tasks(on_cluster, tasks):
    dataset = Dataset.from_tensor_slices(ROWS).map(lambda x: x + 1).cache().batch(128)
    distributed = on_cluster.distribute_dataset(dataset)
    assert np.array_equal(np.concatenate(batches_of(on_cluster, distributed)), ROWS + 1)
    tasks.clear()
    for _ in range(3):
        assert np.array_equal(np.concatenate(batches_of(on_cluster, distributed)), ROWS + 1)
    # Each pass takes a bundle for each of the two replicas, and at most one transfer from each worker to the other.
    assert not tasks["from_tensor_slices"]
    assert tasks["gather"] == 2 * 3
    assert tasks["take"] <= 2 * 3


@pytest.mark.cluster
def test_a_small_array_is_sent_to_the_other_worker_once(on_cluster, tasks):
    distributed = on_cluster.distribute_dataset(on_cluster.experimental_make_numpy_dataset(ROWS).batch(128))
    for _ in range(3):
        assert np.array_equal(np.concatenate(batches_of(on_cluster, distributed)), ROWS)
    assert tasks["gather"] == 2 * 3
    assert not tasks["take"]
