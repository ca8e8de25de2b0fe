"""Strategies: results of run and reduce, embedded and on a cluster, and that nothing remains."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections import namedtuple

import dask
import numpy as np
import pytest
from conftest import mirrored, threads_of_passes
from distributed import get_worker

import daskdist
from daskdist import Dataset, PerReplica, PerReplicaSpec, ReduceOp, TensorSpec, errors, read_parquet
from daskdist.execute.callers import submit
from daskdist.strategy.calls import stream_set
from daskdist.strategy.values.async_value import AsyncValue

Point = namedtuple("Point", "x y")


def arrays(*values):
    return PerReplica([np.array(value) for value in values])


def floats(*values):
    return PerReplica([np.array(value, np.float64) for value in values])


# --- reduce ---


@pytest.mark.parametrize(
    ("value", "op", "axis", "expected"),
    [
        (floats([1, 2], [3, 5]), "SUM", None, [4.0, 7.0]),
        (floats([1, 2], [3, 5]), "MEAN", None, [2, 3.5]),
        (floats([1, 2], [3, 5]), "SUM", 0, 11.0),
        (floats([1, 2], [3, 5]), "MEAN", 0, 2.75),
        (floats([1, 2, 3], [5]), "SUM", 0, 11.0),
        (floats([1, 2, 3], [5]), "MEAN", 0, 2.75),
        (floats([1, 2], []), "SUM", 0, 3.0),
        (floats([1, 2], []), "MEAN", 0, 1.5),
        (floats([], [7]), "MEAN", 0, 7.0),
        (floats([8], []), "SUM", 0, 8.0),
        (floats([], []), "SUM", 0, 0.0),
        (floats([], []), "MEAN", 0, np.nan),
        (arrays(1, 2), "SUM", None, 3),
        (arrays(1, 2), "MEAN", None, 1.5),
        (arrays([1, 2], [2]), "MEAN", 0, 5 / 3),
        (arrays([1, 2], [2]), "SUM", 0, 5),
        (floats(np.ones((2, 3)), np.ones((1, 3))), "SUM", (0, 1), 9.0),
        (floats(np.ones((2, 3)), np.ones((1, 3))), "MEAN", (0, 1), 1.0),
        (floats(np.ones((2, 3)), np.ones((1, 3))), "MEAN", [0, 1], 1.0),
        (floats(np.ones((2, 3)), np.ones((1, 3))), "SUM", 0, [3.0, 3.0, 3.0]),
        (floats([[1, 2], [3, 4]], [[5, 6], [7, 8]]), "MEAN", 1, [3.5, 5.5]),
        (floats([[1, 2], [3, 4]], [[5, 6], [7, 8]]), "MEAN", -1, [3.5, 5.5]),
        (floats([[1, 2], [3, 4]], [[5, 6], [7, 8]]), "MEAN", -2, [4.0, 5.0]),
        (floats([[1, 2], [3, 4]], [[5, 6]]), "MEAN", (0, -1), 3.5),
        (floats([[1, 2], [3, 4]], np.zeros((0, 2))), "MEAN", 0, [2.0, 3.0]),
        (PerReplica((np.float32([1, 2]), np.float32([4]))), "MEAN", 0, np.float32(7 / 3)),
        (PerReplica((np.uint8(200), np.uint8(200))), "MEAN", None, 200.0),
        (PerReplica((np.int8([100, 100]), np.int8([100]))), "MEAN", 0, 100.0),
        (PerReplica((np.int8([100, 100]), np.int8([100]))), "SUM", 0, 300),
        (PerReplica((np.bool_([True, False]), np.bool_([True]))), "MEAN", 0, 2 / 3),
        (PerReplica((np.bool_([True, False]), np.bool_([True]))), "SUM", 0, 2),
        (PerReplica((np.True_, np.True_)), "MEAN", None, 1.0),
        (PerReplica((np.True_, np.True_)), "SUM", None, 2),
        (PerReplica((1, 2)), "SUM", None, 3),
        (PerReplica((1, 2)), "MEAN", None, 1.5),
        (PerReplica((2**31 - 1, 2**31 - 1)), "SUM", None, 2**32 - 2),
        (PerReplica((0.1, 0.2)), "SUM", None, 0.1 + 0.2),
        (PerReplica((1 + 2j, 3 - 1j)), "MEAN", None, 2 + 0.5j),
        (PerReplica(([1.0, 2.0], [3.0, 5.0])), "SUM", None, [4.0, 7.0]),
    ],
)
def test_reduce(strategy, value, op, axis, expected):
    for spelled in (op, op.lower(), ReduceOp[op]):
        actual = np.asarray(strategy.reduce(spelled, value, axis=axis))
        np.testing.assert_allclose(actual, expected, rtol=1e-7 if actual.dtype == np.float32 else 1e-15)
    assert actual.shape == np.shape(expected)
    given = np.asarray(value.values[0]).dtype
    if op == "MEAN":
        assert actual.dtype == (given if given.kind in "fc" else np.float64)
    elif given.kind == "f":
        assert actual.dtype == given


def test_reduce_is_over_the_replicas_only_by_default(strategy):
    (batch,) = strategy.distribute_dataset(Dataset.range(8).batch(8))
    assert np.asarray(strategy.reduce("SUM", batch)).tolist() == [0 + 4, 1 + 5, 2 + 6, 3 + 7]
    assert float(strategy.reduce("MEAN", batch, axis=0)) == 3.5


def test_reduce_of_nests(strategy):
    nest = {"a": floats([1, 2], [3]), "b": (floats([1], [2]), Point(floats([5], []), floats([[1]], [[2]])))}
    actual = strategy.reduce("SUM", nest, axis=0)
    assert type(actual["b"][1]) is Point
    assert (float(actual["a"]), float(actual["b"][0]), float(actual["b"][1].x)) == (6, 3, 5)
    np.testing.assert_array_equal(actual["b"][1].y, [3])
    apart = strategy.reduce("MEAN", (arrays(1, 2), {"k": arrays(3, 5)}), axis=None)
    assert (float(apart[0]), float(apart[1]["k"])) == (1.5, 4)


def test_mean_of_a_plain_value_is_the_value(strategy):
    plain = np.array([1, 2])
    assert strategy.reduce("MEAN", plain, axis=None) is plain
    assert strategy.reduce("MEAN", plain, axis=0) is plain
    mixed = strategy.reduce("MEAN", {"a": 7, "b": arrays(1, 3)}, axis=None)
    assert (mixed["a"], float(mixed["b"])) == (7, 2)


def test_counts_of_a_function_are_summed(strategy):
    # Values of replicas count separately, even if they happen to be the same object.
    pieces = arrays([1, 2, 3, 4], [5, 6, 7, 8])
    for count in (len, lambda x: 4, lambda x: float(len(x)) * 0 + 4.0, lambda x: bool(len(x)) * 4):
        assert int(strategy.reduce("SUM", strategy.run(count, args=(pieces,)), axis=None)) == 8


def test_a_reduction_is_the_same_to_the_last_bit(strategy):
    rng = np.random.default_rng(0)
    pieces = PerReplica([rng.normal(size=(n, 5)).astype(np.float32) * 10.0**n for n in (7, 4)])
    rows = strategy.run(lambda x: x * 1.1, args=(pieces,))
    actual = [np.asarray(strategy.reduce("MEAN", rows, axis=0)).tobytes() for _ in range(4)]
    assert len(set(actual)) == 1
    embedded = mirrored(2)
    assert (
        np.asarray(embedded.reduce("MEAN", embedded.run(lambda x: x * 1.1, args=(pieces,)), axis=0)).tobytes()
        == (actual[0])
    )


@pytest.mark.parametrize("split_every", [2, 3, 8])
def test_the_sum_is_right_for_any_split_every(split_every):
    values = PerReplica([np.float64(k) for k in range(7)])
    with dask.config.set({"daskdist.split-every": split_every}):
        assert mirrored(7).reduce("SUM", values, axis=None) == 21
        assert mirrored(7).reduce("MEAN", values, axis=None) == 3


# --- run ---


def test_results_are_unpacked(strategy):
    dist = strategy.distribute_dataset(Dataset.range(8).batch(4))
    for batch in dist:
        loss, accuracy = strategy.run(lambda x: (x.sum(), x.mean()), args=(batch,))
        total = strategy.reduce("SUM", loss, axis=None)
    assert float(total) == 4 + 5 + 6 + 7
    assert strategy.local_results(accuracy) == (4.5, 6.5)


def test_results_keep_their_structure(strategy):
    actual = strategy.run(lambda x: {"p": Point(x, x + 1), "q": [x * 2, (x * 3,)]}, args=(arrays(1, 2),))
    assert type(actual["p"]) is Point
    assert strategy.local_results(actual["p"].y) == (2, 3)
    assert strategy.local_results(actual) == (
        {"p": Point(1, 2), "q": [2, (3,)]},
        {"p": Point(2, 3), "q": [4, (6,)]},
    )


@pytest.mark.parametrize(
    ("function", "shows"),
    [
        (lambda x: None, "None"),
        (lambda x: (), "()"),
        (lambda x: {}, "{}"),
        (lambda x: (None, None), "(None, None)"),
    ],
)
def test_none_is_returned_as_none(strategy, function, shows):
    assert repr(strategy.run(function, args=(arrays(1, 2),))) == shows


def test_none_from_some_replicas(strategy):
    actual = strategy.run(lambda x: None if x == 1 else x, args=(arrays(1, 2),))
    assert strategy.local_results(actual) == (None, 2)


def now_and_then(step):
    return None if step % 2 == 0 else step


def test_none_in_the_first_call_only(strategy):
    assert strategy.run(now_and_then, args=(0,)) is None
    assert [int(value) for value in strategy.local_results(strategy.run(now_and_then, args=(7,)))] == [7, 7]


def power(exponent):
    def raise_to(x):
        return x**exponent if exponent < 3 else (x, x**exponent)

    return raise_to


def test_functions_of_one_code_are_functions_of_their_own(strategy):
    assert strategy.local_results(strategy.run(power(2), args=(arrays(1, 3),))) == (1, 9)
    assert strategy.local_results(strategy.run(power(3), args=(arrays(1, 3),))) == ((1, 1), (3, 27))


class Unhashable:
    __hash__ = None

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def method(self, x):
        return x + self.factor


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Unhashable(3), (3, 6)),
        (Unhashable(3).method, (4, 5)),
        (functools.partial(np.add, 5), (6, 7)),
        (np.sqrt, (1.0, 2**0.5)),
    ],
    ids=["object", "method", "partial", "ufunc"],
)
def test_any_callable_can_be_run(strategy, function, expected):
    assert strategy.local_results(strategy.run(function, args=(arrays(1, 2),))) == expected


@pytest.mark.cluster
def test_a_replica_runs_on_its_own_worker(on_cluster):
    def where(seconds):
        time.sleep(seconds)
        return get_worker().address

    # One replica is slow, so that its calls wait in a row while the other's worker has nothing to do.
    actual = [on_cluster.run(where, args=(PerReplica((0.05, 0)),)) for _ in range(8)]
    assert {on_cluster.local_results(result) for result in actual} == {on_cluster.workers}


def test_arguments_in_any_nest(strategy):
    actual = strategy.run(
        lambda nest, plain, *, scale: (nest["a"][0] + nest["b"] + plain) * scale,
        args=({"a": [arrays(1, 2)], "b": 10}, 100),
        kwargs={"scale": arrays(1, -1)},
    )
    assert strategy.local_results(actual) == (111, -112)


def test_the_older_spellings(strategy):
    dist = strategy.experimental_distribute_dataset(Dataset.range(4).batch(4))
    (actual,) = [strategy.experimental_run_v2(np.sum, args=(batch,)) for batch in dist]
    assert strategy.experimental_local_results(actual) == (1, 5)
    # This one takes the next step of an iterator.
    iterator = iter(dist)
    assert strategy.experimental_local_results(strategy.experimental_run(np.sum, iterator)) == (1, 5)
    with pytest.raises(errors.OutOfRangeError):
        strategy.experimental_run(np.sum, iterator)
    assert strategy.experimental_local_results(strategy.experimental_run(lambda: 2)) == (2, 2)


def test_a_large_argument_and_large_data_in_memory(strategy):
    weights = np.ones(3_000_000)
    assert strategy.local_results(strategy.run(np.sum, args=(weights,))) == (3e6, 3e6)
    ds = Dataset.from_tensor_slices(np.ones((600_000, 8), np.float32)).batch(300_000)
    totals = [strategy.reduce("SUM", batch, axis=(0, 1)) for batch in strategy.distribute_dataset(ds)]
    assert [float(total) for total in totals] == [2_400_000.0] * 2


def test_an_object_all_replicas_return_comes_bare():
    shared = np.ones(3)
    strategy = mirrored(2)
    bare = strategy.run(lambda: shared)
    actual = strategy.run(lambda x: (shared, x), args=(arrays(1, 2),))
    # These are copies, which the function cannot fill again.
    shared[:] = 7
    for value in (bare, actual[0]):
        assert type(value) is np.ndarray
        assert value.tolist() == [1, 1, 1]
    assert isinstance(actual[1], PerReplica)
    assert isinstance(strategy.run(lambda: np.ones(3)), PerReplica)


# --- one replica ---


def test_one_replica_has_plain_values():
    strategy = mirrored(1)
    (batch,) = strategy.distribute_dataset(Dataset.range(3).batch(3))
    assert type(batch) is np.ndarray
    assert strategy.run(np.sum, args=(batch,)) == 3
    assert strategy.reduce("SUM", batch, axis=0) == 3
    assert strategy.reduce("MEAN", batch, axis=0) == 1.0
    np.testing.assert_array_equal(strategy.reduce("SUM", batch, axis=None), batch)
    assert strategy.reduce("SUM", 5, axis=None) == 5
    assert strategy.local_results(batch) == (batch,)
    assert strategy.distribute_dataset(Dataset.range(3).batch(3)).element_spec == TensorSpec((None,), "int64")
    # With one replica nothing is split, so elements may be scalars.
    assert [int(x) for x in strategy.distribute_dataset(Dataset.range(3))] == [0, 1, 2]


@pytest.mark.cluster
def test_one_replica_on_a_cluster_has_plain_values(start_cluster):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(1, 1)) as strategy:
        (batch,) = strategy.distribute_dataset(Dataset.range(3).batch(3))
        assert isinstance(batch, AsyncValue)
        assert repr(batch) == "array([0, 1, 2])"
        assert float(strategy.run(np.sum, args=(batch,))) == 3
        assert float(strategy.reduce("MEAN", batch, axis=0)) == 1
        assert strategy.local_results(strategy.run(np.max, args=(batch,))) == (2,)


# --- the face ---


def test_local_results(strategy):
    assert strategy.local_results(3) == (3,)
    assert strategy.local_results({"a": 1}) == ({"a": 1},)
    assert strategy.local_results({"a": arrays(1, 2), "b": 0}) == ({"a": 1, "b": 0}, {"a": 2, "b": 0})
    actual = strategy.local_results(strategy.run(lambda x: x, args=(arrays([1], [2]),)))
    assert [type(value) for value in actual] == [np.ndarray, np.ndarray]


def test_scope(strategy):
    with strategy.scope() as inside, strategy.scope():
        assert inside is strategy
        with pytest.raises(RuntimeError, match="another strategy"), mirrored(2).scope():
            pass
    with mirrored(2).scope():
        pass


def test_properties_of_a_strategy(strategy):
    assert strategy.num_replicas_in_sync == 2
    assert len(strategy.replicas) == 2
    assert "2 replicas" in repr(strategy)
    assert strategy.workers == (None,) or len(set(strategy.workers)) == 2


def test_printing():
    pieces = PerReplica((np.array([1, 2], np.int32), np.array([3, 4], np.int32)))
    text = "PerReplica:{\n  0: array([1, 2], dtype=int32),\n  1: array([3, 4], dtype=int32)\n}"
    assert repr(pieces) == str(pieces) == text
    assert repr(PerReplica((np.float32(1.5), None))) == "PerReplica:{\n  0: np.float32(1.5),\n  1: None\n}"


def test_get_next_as_optional(strategy):
    iterator = iter(strategy.distribute_dataset(Dataset.range(10).batch(4)))
    total = 0
    optional = iterator.get_next_as_optional()
    while optional.has_value():
        total += strategy.reduce("SUM", optional.get_value(), axis=0)
        optional = iterator.get_next_as_optional()
    assert int(total) == 45
    assert not iterator.get_next_as_optional().has_value()
    assert optional.element_spec == iterator.element_spec


def test_iterators_are_independent_and_start_over(strategy):
    dist = strategy.distribute_dataset(Dataset.range(8).batch(4))
    one, other = iter(dist), iter(dist)
    first = repr(next(one))
    next(one)
    assert repr(next(other)) == first
    assert next(one, None) is None
    assert repr(next(iter(dist))) == first


@pytest.mark.parametrize("reshuffle", [True, False])
def test_reshuffling(strategy, reshuffle):
    ds = Dataset.range(40).shuffle(40, seed=1, reshuffle_each_iteration=reshuffle).batch(40)
    dist = strategy.distribute_dataset(ds)
    passes = [np.concatenate(strategy.local_results(next(iter(dist)))).tolist() for _ in range(2)]
    assert (passes[0] != passes[1]) is reshuffle
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(40))
    # The same seed gives the same order here as without replicas.
    alone = Dataset.range(40).shuffle(40, seed=1, reshuffle_each_iteration=reshuffle).batch(40)
    assert next(iter(alone)).tolist() == passes[0]


@pytest.mark.parametrize(
    ("batch", "drop_remainder", "rows"), [(4, False, None), (4, True, 2), (5, True, None), (8, True, 4)]
)
def test_element_spec(batch, drop_remainder, rows):
    ds = Dataset.from_tensor_slices({"x": np.zeros((9, 3), np.float32), "y": np.zeros(9, np.int8)})
    dist = mirrored(2).distribute_dataset(ds.batch(batch, drop_remainder=drop_remainder))
    expected = {
        "x": PerReplicaSpec(*[TensorSpec((rows, 3))] * 2),
        "y": PerReplicaSpec(*[TensorSpec((rows,), "int8")] * 2),
    }
    assert dist.element_spec == iter(dist).element_spec == expected
    for step in dist:
        for name, leaf in step.items():
            pairs = zip(expected[name].specs, leaf.values, strict=True)
            assert all(spec.is_compatible_with(value) for spec, value in pairs)


@pytest.mark.cluster
def test_element_spec_on_a_cluster_has_no_length(on_cluster):
    dist = on_cluster.distribute_dataset(Dataset.from_tensor_slices(np.zeros((8, 3))).batch(4, drop_remainder=True))
    assert dist.element_spec == PerReplicaSpec(*[TensorSpec((None, 3), "float64")] * 2)


def test_input_signature(strategy):
    dist = strategy.distribute_dataset(Dataset.range(8).batch(4))

    @daskdist.function(input_signature=[dist.element_spec])
    def step(batch):
        return strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None)

    assert [int(step(batch)) for batch in dist] == [6, 22]
    with pytest.raises(daskdist.errors.ArgumentError, match=r"step.*float64"):
        step(floats([1], [2]))


# --- leftovers ---


def tasks_of(client) -> set[str]:
    # Functions and other plain values are kept for later steps.
    keys = client.run_on_scheduler(lambda dask_scheduler: set(map(str, dask_scheduler.tasks)))
    return {key for key in keys if not key.startswith("value-")}


def remaining_tasks(client, before: set[str], within_s: float = 4) -> set[str]:
    """Return new tasks that are still there when the time is up; return at once when there are none."""
    deadline = time.monotonic() + within_s
    while (actual := tasks_of(client) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return actual


def part_of_a_loop(strategy, ds, num_steps, use):
    for number, batch in enumerate(strategy.distribute_dataset(ds)):
        use(strategy, batch)
        if number + 1 == num_steps:
            return


def slowly(row):
    time.sleep(0.01)
    return row


def look(strategy, batch):
    strategy.local_results(batch)


def step(strategy, batch):
    float(strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None))


@pytest.mark.cluster
@pytest.mark.parametrize("num_steps", [1, 5, 1000])
@pytest.mark.parametrize("use", [look, step])
@pytest.mark.parametrize("policy", ["data", "file"])
def test_a_loop_left_half_way_leaves_nothing_on_the_cluster(on_cluster, client, parquet_files, num_steps, use, policy):
    before = tasks_of(client)
    ds = read_parquet(parquet_files(30, files=4, row_group=5), "id").shuffle(20).batch(6)
    ds = ds.with_options(daskdist.Options(auto_shard_policy=policy))
    part_of_a_loop(on_cluster, ds, num_steps, use)
    assert remaining_tasks(client, before) == set()


@pytest.mark.cluster
def test_a_loop_that_waits_for_long_leaves_nothing_to_the_garbage_collector(client, monkeypatch):
    # Waiting looks for failures and for lost workers; let it do so many times during a step.
    monkeypatch.setattr(stream_set, "_LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(submit, "LOOK_EVERY_S", 0.002)
    before = tasks_of(client)
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:

        def slow(x):
            time.sleep(0.008)
            return x

        gc.collect()
        gc.disable()
        try:
            part_of_a_loop(strategy, Dataset.range(60).map(slow).batch(6), 2, step)
            part_of_a_loop(strategy, Dataset.range(60).map(slow).batch(6), 2, look)
            assert remaining_tasks(client, before) == set()
        finally:
            gc.enable()


@pytest.mark.cluster
def test_an_error_leaves_nothing_on_the_cluster(client, parquet_files):
    before = tasks_of(client)
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        ds = read_parquet(parquet_files(30, row_group=5), "id").map(lambda x: x + 1 // int(x != 17)).batch(6)
        with pytest.raises(daskdist.errors.UserFunctionError):
            part_of_a_loop(strategy, ds, 1000, look)
    assert remaining_tasks(client, before) == set()


def test_a_loop_left_half_way_leaves_no_threads(parquet_files):
    before, used = threads_of_passes(), []

    def noted(x):
        used.append(threading.current_thread().name)
        return slowly(x)

    # Reading takes some time, so that it goes on when the loop is left.
    ds = read_parquet(parquet_files(30, files=4, row_group=5), "id").map(noted).shuffle(20).batch(6).prefetch(2)
    for strategy in (mirrored(1), mirrored(2)):
        part_of_a_loop(strategy, ds, 3, look)
        iterator = iter(strategy.distribute_dataset(ds))
        next(iterator)
        assert "daskdist" in used
        used.clear()
        del iterator
        deadline = time.monotonic() + 5
        while threads_of_passes() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not threads_of_passes() - before


def test_a_loop_to_the_end_leaves_no_threads_and_no_cycles(parquet_files):
    before = threads_of_passes()
    ds = read_parquet(parquet_files(30, files=2, row_group=5), "id").batch(6)
    iterator = iter(mirrored(2).distribute_dataset(ds))
    assert len(list(iterator)) == 10
    assert not threads_of_passes() - before


@pytest.mark.cluster
def test_a_dropped_iterator_is_freed(on_cluster):
    gc.collect()
    gc.disable()
    try:
        iterator = iter(on_cluster.distribute_dataset(Dataset.range(8).batch(4)))
        for batch in iterator:
            on_cluster.local_results(batch)
        gone = weakref.ref(iterator)
        del iterator, batch
        assert gone() is None
    finally:
        gc.enable()


def test_shapes_that_differ_once_reduced_are_not_stretched(strategy):
    values = PerReplica((np.ones((2, 1)), np.ones((2, 3))))
    with pytest.raises(errors.ArgumentError, match=r"along axis 0, .*\(1,\), \(3,\)"):
        np.asarray(strategy.reduce("SUM", values, axis=0))


def test_a_tree_that_would_not_narrow_is_refused(strategy):
    with dask.config.set({"daskdist.split-every": 1}), pytest.raises(errors.ArgumentError, match="split-every is 1"):
        strategy.reduce("SUM", PerReplica((1, 2)), axis=None)


def test_elements_before_an_error_are_handed_out(strategy):
    def count():
        yield from range(5)
        raise ValueError("at five")

    ds = Dataset.from_generator(count, output_signature=TensorSpec((), np.int64)).batch(2)
    iterator = iter(strategy.distribute_dataset(ds))
    for expected in (0, 1), (2, 3):
        assert [value.tolist() for value in strategy.local_results(next(iterator))] == [[row] for row in expected]
    with pytest.raises(RuntimeError, match="at five"):
        strategy.local_results(next(iterator))
    # A generator that raised has ended.
    assert next(iterator, None) is None
