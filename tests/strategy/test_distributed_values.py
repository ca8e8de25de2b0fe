"""Per-replica values: created on replicas, gathered, fetched, kept on workers, and as Dask collections."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import time

import dask
import numpy as np
import pytest
from conftest import eventually, messages_sent, mirrored
from distributed import Client, LocalCluster, get_worker
from distributed.client import futures_of

import daskdist
from daskdist import Dataset, DistributedValues, PerReplica, Ragged, TensorSpec, ValueContext, errors
from daskdist.core.dataset_base import node_of
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.testing.equality import same_elements


def arrays(*values):
    return PerReplica([np.array(value) for value in values])


# --- distribute_values_from_function ---


def test_each_replica_makes_its_own(strategy):
    actual = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group, "x": np.full(2, context.num_replicas_in_sync)}
    )
    assert isinstance(actual["id"], PerReplica)
    same_elements(strategy.local_results(actual), [{"id": 0, "x": np.array([2, 2])}, {"id": 1, "x": np.array([2, 2])}])
    doubled = strategy.run(lambda value: value["x"] * value["id"], args=(actual,))
    assert strategy.reduce("SUM", doubled, axis=0) == 4


def test_values_that_are_equal_are_a_replicas_own_too(strategy):
    for value in (7, None, "a", np.float32(1.5)):
        actual = strategy.distribute_values_from_function(lambda context, value=value: value)
        assert isinstance(actual, PerReplica)
        assert strategy.local_results(actual) == (value, value)


def test_one_object_of_all_replicas_is_wrapped():
    shared = np.ones(3)
    actual = mirrored(2).distribute_values_from_function(lambda context: shared)
    assert actual.values[0] is actual.values[1]
    assert actual.values[0].tolist() == [1, 1, 1]
    alone = mirrored(1).distribute_values_from_function(str)
    assert alone.values == ("ValueContext(replica id 0, total replicas in sync: 1)",)


def test_a_value_context_prints():
    assert str(ValueContext(1, 2)) == "ValueContext(replica id 1, total replicas in sync: 2)"
    assert ValueContext() == ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)


@pytest.mark.cluster
def test_values_are_made_on_their_workers(on_cluster):
    actual = on_cluster.distribute_values_from_function(lambda context: get_worker().address)
    assert on_cluster.local_results(actual) == on_cluster.workers


def test_a_function_that_makes_no_such_values(strategy):
    with pytest.raises(errors.ArgumentError, match="int is not a function; give one that takes a ValueContext"):
        strategy.distribute_values_from_function(3)
    with pytest.raises(errors.DaskdistError, match=r"returned value on replica 0 and \(value, value\) on replica 1"):
        strategy.distribute_values_from_function(lambda context: (1, 2) if context.replica_id_in_sync_group else 1)

    def fail(context):
        raise KeyError("not there")

    with pytest.raises(KeyError, match="not there") as failed:
        strategy.distribute_values_from_function(fail)
    # On a cluster, the error of the replica that raises first is reported.
    assert re.search(f"raised by replica [{'01' if strategy.workers[0] else '0'}]", str(failed.value.__notes__))


# --- gather ---


@pytest.mark.parametrize(
    ("value", "axis", "expected"),
    [
        (arrays([1, 2, 3], [5]), 0, [1, 2, 3, 5]),
        (arrays([8], np.zeros(0, int)), 0, [8]),
        (arrays(np.zeros(0, int), np.zeros(0, int)), 0, []),
        (arrays(np.ones((2, 3)), np.zeros((1, 3))), 0, [[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        (arrays(np.ones((2, 1)), np.zeros((2, 2))), 1, [[1, 0, 0], [1, 0, 0]]),
        (PerReplica([[1, 2], [3]]), 0, [1, 2, 3]),
        (arrays(["a"], ["bc"]), 0, ["a", "bc"]),
    ],
)
def test_gather(strategy, value, axis, expected):
    actual = strategy.gather(value, axis)
    assert isinstance(actual, AsyncValue) == (strategy.workers != (None,))
    np.testing.assert_array_equal(np.asarray(actual), expected)


def test_gather_of_nests_and_results(strategy):
    (batch,) = strategy.distribute_dataset(Dataset.range(7).batch(7))
    made = strategy.run(lambda x: {"x": x * 2, "y": (x[:, None],)}, args=(batch,))
    actual = strategy.gather({"made": made, "plain": 3}, axis=0)
    assert actual["plain"] == 3
    assert np.asarray(actual["made"]["x"]).tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert np.asarray(actual["made"]["y"][0]).shape == (7, 1)


def test_gather_of_rows_of_different_lengths(strategy):
    value = PerReplica([Ragged(np.arange(3), [0, 1, 3]), Ragged(np.arange(2), [0, 2])])
    actual = strategy.gather(value, 0)
    actual = actual.result() if isinstance(actual, AsyncValue) else actual
    assert [row.tolist() for row in actual] == [[0], [1, 2], [0, 1]]


def test_gather_keeps_masks(strategy):
    actual = strategy.gather(PerReplica([np.ma.array([1, 2], mask=[False, True]), np.array([3])]), 0)
    actual = actual.result() if isinstance(actual, AsyncValue) else actual
    assert actual.mask.tolist() == [False, True, False]
    assert actual.compressed().tolist() == [1, 3]


def test_a_plain_value_is_gathered_as_it_is(strategy):
    plain = {"a": np.ones(2), "b": 3}
    assert strategy.gather(plain, axis=0) is plain
    assert mirrored(1).gather(plain, axis=0) is plain


@pytest.mark.parametrize(
    ("value", "axis", "message"),
    [
        (arrays(1, 2), 0, r"replica 0 gives np.int64\(1\), a scalar, which has no axis 0"),
        (arrays([1], [2]), 1, r"axis 1 of a value of shape \(1,\), which replica 0 gives; give 0"),
        (arrays([1], [2]), -1, "axis is -1; give 0 or more"),
        (arrays([1], [2]), None, "axis is None; give a whole number"),
        (arrays(np.ones((1, 2)), np.ones((1, 3))), 0, r"0 gives \(1, 2\), replica 1 gives \(1, 3\); they may"),
        (arrays([1], [[2]]), 0, r"replica 0 gives \(1,\), replica 1 gives \(1, 1\)"),
        (
            PerReplica([Ragged(np.arange(1), [0, 1])] * 2),
            1,
            "rows of different lengths can only be concatenated along axis 0",
        ),
        (arrays([1], np.array(["2020"], "datetime64[D]")), 0, "int64, datetime64.* cannot be concatenated"),
        (arrays([1], [2], [3]), 0, "of 3 values was given to a strategy of 2 replicas"),
    ],
)
def test_values_that_are_not_gathered(strategy, value, axis, message):
    with pytest.raises(errors.ArgumentError, match=message):
        np.asarray(strategy.gather(value, axis))


# --- local results ---


@pytest.mark.cluster
def test_results_come_straight_from_the_workers(on_cluster, client):
    pieces = on_cluster.run(lambda: np.random.default_rng(0).random(300_000))
    scheduler = client.cluster.scheduler
    asked = []
    answer = scheduler.handlers["gather"]

    def counted(*args, **kwargs):
        asked.append(kwargs)
        return answer(*args, **kwargs)

    scheduler.handlers["gather"] = counted
    try:
        with messages_sent(on_cluster) as messages:
            actual = on_cluster.local_results(pieces)
        assert not asked
        # Check that the counter works.
        client.gather(client.submit(int), direct=False)
        assert len(asked) == 1
    finally:
        scheduler.handlers["gather"] = answer
    assert [result.shape for result in actual] == [(300_000,)] * 2
    assert [(where, message.name) for where, message in messages] == [(worker, "look") for worker in on_cluster.workers]


@pytest.mark.cluster
def test_a_cluster_knows_how_large_batches_are(on_cluster, client):
    (step,) = on_cluster.distribute_dataset(Dataset.from_tensor_slices(np.zeros((1000, 100))).batch(1000))
    keys = [value.ref.source.futures[value.ref.place].key for value in step.values]
    on_cluster.local_results(on_cluster.run(len, args=(step,)))
    # Workers report sizes to the scheduler some time after they report results to the program.
    eventually(lambda: all(size >= 400_000 for size in client.nbytes(keys, summary=False).values()))


# --- arrays as a dataset ---


def features(number=1000):
    return {"x": np.arange(number * 3, dtype=np.float32).reshape(number, 3), "y": np.arange(number)}


def rows_of(strategy, dataset):
    steps = [strategy.local_results(step) for step in strategy.distribute_dataset(dataset)]
    return np.concatenate([part["y"] for step in steps for part in step])


@pytest.fixture
def small_splits():
    """Make blocks of some 125 rows of `features`."""
    with dask.config.set({"daskdist.split-bytes": 2500}):
        yield


@pytest.mark.usefixtures("small_splits")
def test_arrays_are_a_dataset_of_their_slices(strategy):
    given = features()
    ds = strategy.experimental_make_numpy_dataset(given)
    assert ds.element_spec == {"x": TensorSpec((3,)), "y": TensorSpec((), "int64")}
    assert ds.cardinality() == 1000
    same_elements(list(ds), list(Dataset.from_tensor_slices(given)))
    assert rows_of(strategy, ds.batch(100)).tolist() == list(range(1000))

    def doubled(dataset):
        return dataset.shuffle(300, seed=3).map(lambda row: {"y": row["y"] * 2}).repeat(2)

    expected = [int(row["y"]) for row in doubled(Dataset.from_tensor_slices(given))]
    assert sorted(expected) == sorted(2 * [2 * k for k in range(1000)])
    assert rows_of(strategy, doubled(ds).batch(100)).tolist() == expected
    assert [int(row["y"]) for row in ds.shard(3, 1).take(4)] == [1, 4, 7, 10]


def test_arrays_that_make_no_dataset(strategy):
    make = strategy.experimental_make_numpy_dataset
    with pytest.raises(errors.ArgumentError, match=r"make_numpy_dataset: leaves differ in their number of rows: .*'a'"):
        make({"a": np.ones(2), "b": np.ones(3)})
    with pytest.raises(errors.ArgumentError, match=r"leaf .* is a scalar and has no rows"):
        make(np.float32(3))
    with pytest.raises(errors.ArgumentError, match="has no leaves; give at least one array"):
        make(())
    assert list(make(np.zeros((0, 2)))) == []
    assert [row.tolist() for row in make([np.array([1, 2]), np.array([3, 4])])] == [[1, 2], [3, 4]]


def placed_keys(client):
    return {
        key for key in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)) if "Block-" in key
    }


def sent_by_scheduler(client):
    # The keys that each worker sent to others, one dict for each transfer.
    return client.run(lambda dask_worker: [dict(value["keys"]) for value in dask_worker.transfer_outgoing_log])


@pytest.mark.cluster
@pytest.mark.usefixtures("small_splits")
def test_arrays_are_placed_once_and_read_where_they_lie(on_cluster, client):
    given = features()
    ds = on_cluster.experimental_make_numpy_dataset(given)
    keys = placed_keys(client)
    assert len(keys) == 8
    held = client.has_what()
    shares = [len(keys & set(held[worker])) for worker in on_cluster.workers]
    assert shares == [4, 4]
    given["y"][:] = -1
    dist = on_cluster.distribute_dataset(
        ds.map(lambda row: {**row, "at": np.int64(int(get_worker().address.rpartition(":")[2]))}).batch(125)
    )
    ports = [int(worker.rpartition(":")[2]) for worker in on_cluster.workers]
    for _ in range(2):
        for number, step in enumerate(dist):
            parts = on_cluster.local_results(step)
            assert np.concatenate([part["y"] for part in parts]).tolist() == list(
                range(number * 125, number * 125 + 125)
            )
            assert {int(port) for part in parts for port in part["at"]} == {ports[number % 2]}
    assert placed_keys(client) == keys
    moved = {key for log in sent_by_scheduler(client).values() for value in log for key in value}
    assert not moved & keys


@pytest.mark.cluster
def test_arrays_are_not_in_the_graph(on_cluster, client):
    array = np.zeros((40_000, 100))
    ds = on_cluster.experimental_make_numpy_dataset(array)
    graph = dict(ds.batch(1000).__dask_graph__())
    assert len(pickle.dumps(node_of(ds).splits())) < 2_000
    futures = futures_of(list(graph.values()))
    assert futures
    plain = {key: task for key, task in graph.items() if not hasattr(task, "client")}
    assert len(plain) >= 40
    assert len(pickle.dumps(plain)) < 100_000 < array.nbytes
    ((first, *_),) = dask.compute(ds.batch(20_000))
    assert first.shape == (20_000, 100)


@pytest.mark.cluster
def test_placed_arrays_are_freed(client):
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    before = placed_keys(client)
    ds = strategy.experimental_make_numpy_dataset(np.ones(10)).batch(5)
    other = strategy.experimental_make_numpy_dataset(np.ones(10))
    assert len(placed_keys(client) - before) == 2
    assert len(list(ds)) == 2
    del ds
    gc.collect()
    wait_until(lambda: len(placed_keys(client) - before) == 1)
    strategy.close()
    wait_until(lambda: placed_keys(client) <= before)
    with pytest.raises(
        errors.ClusterError, match=r"no longer on the cluster: the strategy that put it there is closed"
    ):
        list(other)


def wait_until(holds):
    for _ in range(500):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


@pytest.mark.cluster
def test_arrays_of_a_worker_that_is_lost():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
        dask.config.set({"daskdist.split-bytes": 800}),
    ):
        ds = strategy.experimental_make_numpy_dataset(np.arange(1000)).batch(100)
        lost = strategy.workers[0]
        os.kill(client.run(os.getpid)[lost], signal.SIGKILL)
        wait_until(lambda: lost not in workers_of(client))
        with pytest.raises(errors.ClusterError, match=f"lost {lost}|no longer on the cluster.*or the worker that had"):
            rows_of(strategy, ds.map(lambda y: {"y": y}))
        with pytest.raises(errors.ClusterError, match="no longer on the cluster"):
            list(ds)


@pytest.mark.cluster
def test_workers_in_this_process_have_arrays_of_their_own():
    # An array with fewer rows would be sent as a part of its task.
    rows = np.zeros(200_000)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        daskdist.MultiWorkerMirroredStrategy(cluster) as strategy,
    ):
        ds = strategy.experimental_make_numpy_dataset(rows).batch(len(rows))
        (sent,) = strategy.distribute_values_from_function(lambda context: context.num_replicas_in_sync).values
        total = strategy.run(lambda x, _: (time.sleep(0.1), x.sum())[1], args=(rows, sent))
        rows[:] = 1
        assert total == 0
        assert [np.asarray(batch).sum() for batch in strategy.distribute_dataset(ds)] == [0]


@pytest.mark.cluster
def test_equal_arrays_have_one_fingerprint(on_cluster):
    one, same, other = [on_cluster.experimental_make_numpy_dataset(np.full(4, k)) for k in (1, 1, 2)]
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


# --- values as Dask collections ---


def test_values_are_dask_collections(strategy):
    (batch,) = strategy.distribute_dataset(Dataset.range(4).batch(4))
    assert dask.is_dask_collection(batch)
    (nest,) = dask.compute({"a": batch, "b": [batch, 3]})
    expected = arrays([0, 1], [2, 3])
    assert repr(nest["a"]) == repr(nest["b"][0]) == repr(expected)
    assert all(type(value) is np.ndarray for value in nest["a"].values)
    made = strategy.run(lambda x: x * 2, args=(batch.persist(),))
    assert strategy.local_results(made)[1].tolist() == [4, 6]
    assert repr(made.compute()) == repr(arrays([0, 2], [4, 6]))
    assert len(batch.__dask_keys__()) == 2
    assert set(batch.__dask_keys__()) <= set(batch.__dask_graph__())


def test_values_of_any_kind_are_computed():
    value = PerReplica([(1, {"a": 2}), None])
    assert value.compute().values == ((1, {"a": 2}), None)
    assert isinstance(value, DistributedValues)
    same = PerReplica([(1, {"a": 2}), None])
    assert value.__dask_keys__() == same.__dask_keys__() != arrays(1, 2).__dask_keys__()


def test_a_function_takes_values_put_off(strategy):
    pieces = strategy.run(lambda x: x + 1, args=(arrays([1], [2]),))
    put_off = dask.delayed(lambda value: [int(item[0]) for item in value.values])(pieces)
    scheduler = {} if strategy.workers == (None,) else {"scheduler": strategy.client}
    assert put_off.compute(**scheduler) == [2, 3]


@pytest.mark.cluster
def test_asynchronous_values_are_dask_collections(on_cluster, client):
    pieces = on_cluster.run(lambda x: x + 1, args=(arrays([1], [2]),))
    total = on_cluster.reduce("SUM", pieces, axis=0)
    assert dask.is_dask_collection(total)
    assert total.ref is not None  # Nothing has waited for the value.
    actual, doubled, again = dask.compute(total, total * 2, pieces)
    assert (actual, doubled, repr(again)) == (5, 10, repr(arrays([2], [3])))
    assert client.compute(total, sync=True) == 5
    assert float(total.persist() + 1) == 6
    assert total.compute() == 5
    # Values that are in the program already can be computed together with others.
    float(total)
    assert dask.compute(total, on_cluster.reduce("SUM", pieces, axis=0)) == (5, 5)


@pytest.mark.cluster
def test_computed_values_stay_on_their_workers(on_cluster, client):
    made = on_cluster.run(lambda: np.zeros(1000))
    kept = made.persist()
    futures = [value.ref.source.futures[0] for value in kept.values]
    client.gather(futures)
    who = client.who_has(futures)
    assert [tuple(who[future.key]) for future in futures] == [(worker,) for worker in on_cluster.workers]


@pytest.mark.cluster
def test_failing_values_fail_when_computed(on_cluster):
    broken = on_cluster.reduce("SUM", arrays([1], [2, 3]), axis=None)
    with pytest.raises(errors.ArgumentError, match="shapes differ"):
        dask.compute(broken)


def test_graphs_of_values_are_not_rewritten():
    from dask.graph_manipulation import clone

    with pytest.raises(errors.ArgumentError, match="Dask does not rewrite their graphs"):
        clone(arrays(1, 2))


def test_the_graph_is_drawn(tmp_path):
    pytest.importorskip("graphviz")
    arrays(1, 2).visualize(str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().count("shape=circle") == 2


# --- shown ---


def test_html(strategy):
    pieces = strategy.run(lambda x: x * 2, args=(arrays([1, 2], [3]),))
    strategy.local_results(pieces)
    rows = re.findall("<tr>(.*?)</tr>", pieces._repr_html_())
    assert len(rows) == 3
    assert "<td>(2,)</td><td>int64</td>" in rows[1]
    assert "<code>[2 4]</code>" in rows[1]
    assert "<td>(1,)</td><td>int64</td>" in rows[2]
    for worker, row in zip(strategy.workers, rows[1:], strict=False):
        assert worker is None or worker in row


def test_html_of_values_that_are_not_arrays():
    html = PerReplica(["<b>" * 100, None, 1.5, np.zeros((1000, 1000))])._repr_html_().partition("</style>")[2]
    assert "<b>" not in html.removeprefix('\n<div class="dd-head"><b>')
    assert "&lt;b&gt;" in html
    assert "None" in html
    assert "<td>(1000, 1000)</td><td>float64</td>" in html
    assert "<td>()</td><td>float</td>" in html
    assert len(html) < 2500


def test_html_of_an_object_with_a_shape():
    class Square:
        shape = 3

        def __str__(self):
            return "a square"

    assert "<code>a square</code>" in PerReplica([Square()])._repr_html_()


@pytest.mark.cluster
def test_html_waits_for_nothing(on_cluster, tmp_path):
    def wait_for(path):
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return 4

    release = tmp_path / "continue"
    # `run` waits for the first call of a function.
    on_cluster.run(wait_for, args=(tmp_path,))
    large = on_cluster.run(lambda: np.random.default_rng(0).random(300_000))
    small = on_cluster.run(lambda: 3)
    pending = on_cluster.run(wait_for, args=(release,))
    with messages_sent(on_cluster) as messages:
        assert "Values stay on workers" in large._repr_html_()
        assert "Values stay on workers" in pending._repr_html_()
        assert "print(value)" in pending._repr_mimebundle_()["text/plain"]
    assert not messages
    release.touch()
    on_cluster.local_results(pending)
    assert small._repr_html_().count("<code>3</code>") == 2
    assert "0: 3,\n" in small._repr_mimebundle_()["text/plain"]
