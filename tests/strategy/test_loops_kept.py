"""Whole loops on replicas over data that lies on the cluster already."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.dataset_base import node_of
from daskdist.testing import afresh

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def as_lists(element):
    if isinstance(element, dict):
        return {name: as_lists(value) for name, value in element.items()}
    return np.asarray(element).tolist()


def loop(it):
    return repr([as_lists(x) for x in it])


def by_loops(strategy, dataset):
    return list(
        map(str, strategy.local_results(strategy.run(loop, args=(strategy.distribute_dataset(afresh(dataset)),))))
    )


def by_steps(strategy, dataset):
    actual = [[] for _ in range(strategy.num_replicas_in_sync)]
    for step in strategy.distribute_dataset(afresh(dataset)):
        for result, value in zip(actual, strategy.local_results(step), strict=True):
            result.append(as_lists(value))
    return list(map(repr, actual))


def persisted(client, collection):
    """Persist a dataset, and return it once it is computed or has failed."""
    actual = client.persist(collection)
    for future in client.futures_of(actual):
        future.exception()
    return actual


MADE = {
    "array": lambda client: Dataset.from_dask(persisted(client, da.arange(48, chunks=6))),
    "of what is persisted": lambda client: Dataset.from_dask(persisted(client, da.arange(48, chunks=6)) * 2 + 1),
    "frame": lambda client: Dataset.from_dask(
        persisted(client, dd.from_pandas(pd.DataFrame({"a": np.arange(24), "b": np.arange(24) / 2}), npartitions=4))
    ),
    "bag": lambda client: Dataset.from_dask(persisted(client, db.from_sequence(range(24), npartitions=5))),
    "dataset": lambda client: persisted(client, Dataset.range(24).map(lambda x: x * 3)),
    "still under way": lambda client: Dataset.from_dask(
        client.persist(da.arange(12, chunks=3).map_blocks(slowly, dtype=np.int64))
    ),
}


def slowly(x):
    time.sleep(0.1)
    return x


@pytest.mark.parametrize("per_worker", [1, 2])
def test_numpy_dataset(start_cluster, per_worker):
    with (
        daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 1), num_replicas_per_worker=per_worker) as strategy,
        dask.config.set({"daskdist.split-bytes": 100}),
    ):
        arrays = {"x": np.arange(90, dtype=np.float32).reshape(30, 3), "y": np.arange(30)}
        dataset = strategy.experimental_make_numpy_dataset(arrays).shuffle(8, seed=2).batch(7)
        assert by_loops(strategy, dataset) == by_steps(strategy, dataset)


@pytest.mark.parametrize("name", MADE)
def test_persisted_collections(client, on_cluster, name):
    dataset = MADE[name](client).batch(5)
    assert by_loops(on_cluster, dataset) == by_steps(on_cluster, dataset)


def test_workers_that_are_threads():
    with (
        Client(
            processes=False, n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", set_as_default=False
        ) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
        dask.config.set({"daskdist.split-bytes": 40}),
    ):
        dataset = strategy.experimental_make_numpy_dataset(np.arange(30)).batch(4)
        assert by_loops(strategy, dataset) == by_steps(strategy, dataset)


def test_kept_data_serves_several_iterators_and_passes(on_cluster):
    with dask.config.set({"daskdist.split-bytes": 40}):
        distributed = on_cluster.distribute_dataset(on_cluster.experimental_make_numpy_dataset(np.arange(20)).batch(4))

    def both(it, other):
        pairs = [(int(x.sum()), int(y.sum())) for _ in range(2) for x, y in zip(it, other, strict=True)]
        return repr(pairs)

    own, others = on_cluster.local_results(on_cluster.run(both, args=(distributed, distributed)))
    assert str(own) == repr([(sum(range(k, k + 2)),) * 2 for k in range(0, 20, 4)] * 2)
    assert str(others) == repr([(sum(range(k, k + 2)),) * 2 for k in range(2, 20, 4)] * 2)


def test_data_is_sent_from_worker_to_worker(client, on_cluster):
    def sent_there(dask_worker):
        # The log has a limited length and forgets the oldest transfers, so compare sets of them and not their numbers.
        return {(value["start"], value["who"]) for value in dask_worker.transfer_outgoing_log if value["keys"]}

    def num_transitions(dask_scheduler):
        return dask_scheduler.transition_counter

    with dask.config.set({"daskdist.split-bytes": 2**16}):
        distributed = on_cluster.distribute_dataset(
            on_cluster.experimental_make_numpy_dataset(np.ones((2**12, 16), np.float32)).batch(64)
        )

    def total(it):
        return sum(float(x.sum()) for x in it)

    # Reading results waits until the loop has ended on each replica.
    list(map(float, on_cluster.local_results(on_cluster.run(total, args=(distributed,)))))
    before = client.run(sent_there)
    first = client.run_on_scheduler(num_transitions)
    actual = on_cluster.local_results(on_cluster.run(total, args=(distributed,)))
    assert list(map(float, actual)) == [2**15, 2**15]
    after = client.run(sent_there)
    sent = {worker: Counter(who for _, who in after[worker] - before[worker]) for worker in after}
    one, other = on_cluster.workers
    # Each worker sends two of its four blocks to the other one.
    assert sent[one][other] == 2
    assert sent[other][one] == 2
    assert client.run_on_scheduler(num_transitions) - first < 40


def test_functions_can_use_persisted_data_of_their_closure(client, on_cluster):
    kept = client.persist(da.arange(40, chunks=7))
    dataset = daskdist.Dataset.range(3).flat_map(lambda _: daskdist.Dataset.from_dask(kept)).batch(8)
    distributed = on_cluster.distribute_dataset(dataset)
    actual = on_cluster.local_results(on_cluster.run(lambda it: [int(x.sum()) for x in it], args=(distributed,)))
    expected = [on_cluster.local_results(on_cluster.run(np.sum, args=(batch,))) for batch in distributed]
    assert [tuple(map(int, item)) for item in zip(*actual, strict=True)] == [
        tuple(map(int, value)) for value in expected
    ]
    assert sum(map(sum, actual)) == 3 * sum(range(40))


class LookedAtSlowly(MaterializedLayer):
    """A part of a graph that takes the scheduler some time."""

    def __reduce__(self):
        return looked_at_slowly, (dict(self.mapping),)

    def __iter__(self):
        if getattr(self, "is_there", False):
            time.sleep(0.3)
        return super().__iter__()


def looked_at_slowly(mapping):
    layer = LookedAtSlowly(mapping)
    layer.is_there = True
    return layer


def test_a_function_has_it_from_around_it_while_the_scheduler_looks_at_its_graph(client, on_cluster):
    made = da.arange(40, chunks=7)
    graph = HighLevelGraph({made.name: LookedAtSlowly(dict(made.dask))}, {made.name: set()})
    kept = client.persist(da.Array(graph, made.name, made.chunks, made.dtype))
    dataset = daskdist.Dataset.range(2).flat_map(lambda _: daskdist.Dataset.from_dask(kept)).batch(8)
    distributed = on_cluster.distribute_dataset(dataset)
    actual = on_cluster.local_results(on_cluster.run(lambda it: sum(int(x.sum()) for x in it), args=(distributed,)))
    assert sum(map(int, actual)) == 2 * sum(range(40))


def test_data_read_on_workers_is_read_only(on_cluster):
    dataset = on_cluster.experimental_make_numpy_dataset(np.zeros(8)).batch(8)

    def change(it):
        for x in it:
            with contextlib.suppress(ValueError):
                x += 1
        return 0

    on_cluster.local_results(on_cluster.run(change, args=(on_cluster.distribute_dataset(dataset),)))
    assert [x.tolist() for x in dataset] == [[0.0] * 8]


# --- how long it stays ---


def test_data_is_kept_until_the_call_ends(client, on_cluster, tmp_path):
    gate = tmp_path / "gate"

    def later(it, is_last):
        first = next(it)
        end = time.monotonic() + 20
        while is_last and not gate.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return int(first.sum()) + sum(int(x.sum()) for x in it)

    with dask.config.set({"daskdist.split-bytes": 80}):
        dataset = on_cluster.experimental_make_numpy_dataset(np.arange(400)).batch(4)
    (key, *_) = [block.key for block in node_of(dataset).inputs[0].placing.blocks]
    distributed = on_cluster.distribute_dataset(dataset)
    on_cluster.local_results(on_cluster.run(later, args=(distributed, False)))
    returned = on_cluster.run(later, args=(distributed, True))
    del dataset, distributed
    gc.collect()
    gate.touch()
    assert sum(map(int, on_cluster.local_results(returned))) == sum(range(400))
    end = time.monotonic() + 10
    while client.run_on_scheduler(has_key, key=key) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert not client.run_on_scheduler(has_key, key=key)


def has_key(key, dask_scheduler):
    return key in dask_scheduler.tasks


def test_moved_data_is_found(client, on_cluster):
    array = persisted(client, da.arange(32, chunks=8))
    distributed = on_cluster.distribute_dataset(Dataset.from_dask(array).batch(4))
    one, other = on_cluster.workers

    def move(it):
        first = next(it)
        return int(first.sum()) + sum(int(x.sum()) for x in it)

    assert sum(map(int, on_cluster.local_results(on_cluster.run(move, args=(distributed,))))) == sum(range(32))
    for worker in (one, other):
        client.replicate(array, workers=[one, other])
        client.replicate(array, n=1, workers=[worker])
        assert sum(map(int, on_cluster.local_results(on_cluster.run(move, args=(distributed,))))) == sum(range(32))


# --- errors ---


def test_lost_data(client, on_cluster):
    array = persisted(client, da.arange(32, chunks=8))
    distributed = on_cluster.distribute_dataset(Dataset.from_dask(array).batch(4))
    (future, *_) = client.futures_of(array)
    client.cancel(client.futures_of(array), force=True)
    begin = time.monotonic()
    with pytest.raises(errors.ClusterError, match=r"arange.* is no longer on the cluster"):
        on_cluster.run(loop, args=(distributed,))
    assert time.monotonic() - begin < 25
    assert future.cancelled()


def test_data_lost_in_the_middle(client, on_cluster, tmp_path):
    with dask.config.set({"daskdist.split-bytes": 800, "daskdist.window-bytes": 3200}):
        dataset = on_cluster.experimental_make_numpy_dataset(np.arange(20_000)).batch(10)
    distributed = on_cluster.distribute_dataset(dataset.with_options(Options(memory_budget_bytes=3200)))
    keys = [block.key for block in node_of(dataset).inputs[0].placing.blocks]
    ready, gate = tmp_path / "ready", tmp_path / "gate"

    def waiting(it):
        next(it)
        ready.touch()
        end = time.monotonic() + 20
        while not gate.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return sum(int(x.sum()) for x in it)

    gate.touch()
    on_cluster.local_results(on_cluster.run(waiting, args=(distributed,)))
    gate.unlink()
    ready.unlink()
    returned = on_cluster.run(waiting, args=(distributed,))
    end = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.01)
    client.cancel([block.future for block in node_of(dataset).inputs[0].placing.blocks], force=True)
    while client.run_on_scheduler(has_key, key=keys[-1]) and time.monotonic() < end:
        time.sleep(0.05)
    gate.touch()
    begin = time.monotonic()
    with pytest.raises(errors.ClusterError, match=r"is no longer on the cluster"):
        on_cluster.local_results(returned)
    assert time.monotonic() - begin < 25


def test_failed_data_is_an_error_of_the_loop(client, on_cluster):
    def refuse(x):
        if x[0] == 8:
            raise ValueError("no eights")
        return x

    array = da.arange(32, chunks=8).map_blocks(refuse, dtype=np.int64)
    array = persisted(client, array)
    distributed = on_cluster.distribute_dataset(Dataset.from_dask(array).batch(4))
    with pytest.raises(ValueError, match="no eights"):
        on_cluster.run(loop, args=(distributed,))


def test_data_on_another_cluster(on_cluster, start_cluster):
    other = start_cluster(1, 1)
    array = persisted(other, da.arange(32, chunks=8))
    distributed = on_cluster.distribute_dataset(Dataset.from_dask(array).batch(4))
    with pytest.raises(errors.ArgumentError, match=r"is on another cluster, at tcp.*persist it on the cluster of"):
        on_cluster.run(loop, args=(distributed,))
