"""`strategy.extended`: devices, and values that are reduced to, sent to and updated on given devices."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from conftest import messages_sent, mirrored, of_kind

import daskdist
from daskdist import PerReplica, errors
from daskdist.strategy.calls.call_messages import MakeCall, PassOn
from daskdist.strategy.values.async_value import AsyncValue


def arrays(*values):
    return PerReplica([np.array(value) for value in values])


# --- devices ---


def test_devices():
    extended = mirrored(2).extended
    assert extended.worker_devices == extended.parameter_devices == ("CPU:0", "CPU:1")
    assert extended.worker_devices_by_replica == (("CPU:0",), ("CPU:1",))
    assert extended.num_replicas_in_sync == 2
    assert isinstance(extended, daskdist.distribute.StrategyExtended)


@pytest.mark.cluster
def test_devices_on_a_cluster(start_cluster):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        one, other = strategy.workers
        expected = (f"{one}/CPU:0", f"{one}/CPU:1", f"{other}/CPU:0", f"{other}/CPU:1")
        assert strategy.extended.worker_devices == expected
        assert strategy.extended.worker_devices_by_replica == tuple((name,) for name in expected)


# --- reduce_to ---


@pytest.mark.parametrize("destinations", [None, "value"])
def test_a_reduced_value_on_every_replica(strategy, destinations):
    value = arrays([1.0, 2.0], [3.0, 5.0])
    actual = strategy.extended.reduce_to("SUM", value, value if destinations else None)
    assert isinstance(actual, PerReplica)
    doubled = strategy.run(lambda x, total: x - total, args=(value, actual))
    np.testing.assert_array_equal(strategy.local_results(doubled), [[-3, -5], [-1, -2]])


def test_a_nest_is_reduced_to_a_nest(strategy):
    actual = strategy.extended.reduce_to("MAX", {"a": arrays(1, 2), "b": [arrays(4, 3)]}, None)
    assert strategy.local_results(actual) == ({"a": 2, "b": [4]},) * 2


def test_a_reduced_value_on_one_replica(strategy):
    for name, replica in zip(strategy.extended.worker_devices, strategy.replicas, strict=True):
        for destination in (name, replica):
            assert int(strategy.extended.reduce_to("SUM", arrays(1, 2), destination)) == 3


def test_devices_in_any_spelling():
    assert mirrored(2).extended.reduce_to("SUM", arrays(1, 2), "/device:cpu:1") == 3


@pytest.mark.cluster
def test_a_value_is_reduced_on_its_destination(on_cluster):
    values = on_cluster.run(np.copy, args=(arrays([1.0], [2.0]),))
    for name, worker in zip(on_cluster.extended.worker_devices, on_cluster.workers, strict=True):
        with messages_sent(on_cluster) as messages:
            assert on_cluster.extended.reduce_to("SUM", values, name).tolist() == [3.0]
        # The last call of the reduction is made on that worker, so no further call moves the result.
        assert [where for where, *_ in of_kind(messages, MakeCall)] == [worker]


@pytest.mark.parametrize("op", ["MEAN", "MAX"])
def test_a_plain_value_is_put_on_every_replica(strategy, op):
    assert strategy.local_results(strategy.extended.reduce_to(op, 5, None)) == (5, 5)
    with pytest.raises(errors.ArgumentError, match="SUM over 2 replicas"):
        strategy.extended.reduce_to("SUM", 5, None)


def test_one_replica_has_its_value_in_a_per_replica():
    actual = mirrored(1).extended.reduce_to("SUM", np.float64(3), None)
    assert repr(actual) == "PerReplica:{\n  0: np.float64(3.0)\n}"
    assert mirrored(1).run(lambda x: x + 1, args=(actual,)) == 4


# --- batch_reduce_to ---


def test_several_values_at_once(strategy):
    first, second = strategy.extended.worker_devices
    pairs = [
        (arrays([1, 2], [3, 4]), None),
        (arrays(5.0, 6.0), second),
        ({"a": arrays(1, 1)}, first),
        (arrays(0, 1), second),
    ]
    actual = strategy.extended.batch_reduce_to("SUM", pairs)
    np.testing.assert_array_equal(strategy.local_results(actual[0]), [[4, 6], [4, 6]])
    assert (float(actual[1]), int(actual[2]["a"]), int(actual[3])) == (11, 2, 1)
    assert strategy.extended.batch_reduce_to("SUM", []) == []


@pytest.mark.parametrize("op", ["MEAN", "MAX"])
def test_a_nest_stays_a_nest_wherever_it_goes(strategy, op):
    nest = {"a": arrays(1, 1), "b": [arrays(2, 2), 5]}
    pairs = [(nest, name) for name in strategy.extended.worker_devices]
    for actual in strategy.extended.batch_reduce_to(op, pairs):
        assert isinstance(actual, dict)
        assert (int(actual["a"]), int(actual["b"][0]), int(actual["b"][1])) == (1, 2, 5)


@pytest.mark.cluster
def test_several_values_are_one_tree(on_cluster):
    with messages_sent(on_cluster) as messages:
        actual = on_cluster.extended.batch_reduce_to("SUM", [(arrays(number, number), None) for number in range(20)])
    assert len(of_kind(messages, MakeCall)) == 1
    assert [on_cluster.local_results(result) for result in actual] == [(2 * number,) * 2 for number in range(20)]


@pytest.mark.parametrize("pairs", [3, [3], [(1, 2, 3)], PerReplica([1, 2])])
def test_values_that_are_not_pairs(pairs):
    with pytest.raises(errors.ArgumentError, match=r"value_destination_pairs is .*; give a list of pairs"):
        mirrored(2).extended.batch_reduce_to("SUM", pairs)


# --- broadcast_to ---


def test_a_value_on_every_replica(strategy):
    actual = strategy.extended.broadcast_to({"w": np.arange(3), "name": "net", "rate": 0.5}, None)
    assert all(isinstance(result, PerReplica) for result in actual.values())
    sums = strategy.run(lambda nest: float(nest["w"].sum() * nest["rate"]) if nest["name"] else 0, args=(actual,))
    assert strategy.local_results(sums) == (1.5, 1.5)


def test_reduced_values_are_broadcast(strategy):
    total = strategy.reduce("SUM", arrays(1, 2), axis=None)
    actual = strategy.extended.broadcast_to(total, arrays(0, 0))
    assert strategy.local_results(strategy.run(lambda x, t: x + t, args=(arrays(1, 2), actual))) == (4, 5)


def test_a_value_on_one_replica(strategy):
    for name in strategy.extended.worker_devices:
        np.testing.assert_array_equal(strategy.extended.broadcast_to(np.arange(3), name), [0, 1, 2])


@pytest.mark.cluster
@pytest.mark.parametrize("num_rows", [10, 300_000])
def test_a_value_is_sent_once(on_cluster, num_rows):
    weights = np.arange(num_rows, dtype=np.float64)
    on_cluster.run(np.sum, args=(arrays([1.0], [2.0]),))
    with messages_sent(on_cluster) as messages:
        actual = on_cluster.extended.broadcast_to(weights, None)
    first = actual.values[0]
    assert isinstance(first, AsyncValue)
    assert all(item is first for item in actual.values)
    # Later changes make no difference.
    expected = weights.sum()
    weights[:] = 0
    with messages_sent(on_cluster) as later:
        for _ in range(3):
            assert on_cluster.local_results(on_cluster.run(np.sum, args=(actual,))) == (expected, expected)
    # One call creates the value on a worker, which sends it to the other worker.
    one, other = on_cluster.workers
    (call,) = of_kind(messages, MakeCall)
    assert call[0] == one
    assert [(where, message.target) for where, message in of_kind(later, PassOn)] == [(one, other)]
    assert len(pickle.dumps(later)) < 10_000


def test_per_replica_values_are_not_broadcast(strategy):
    with pytest.raises(errors.ArgumentError, match="broadcast_to: a value is a PerReplica"):
        strategy.extended.broadcast_to([1, arrays(1, 2)], None)


# --- destinations ---


@pytest.mark.parametrize("destination", ["CPU:7", "elsewhere", 3, np.ones(2), ["CPU:0"]], ids=str)
@pytest.mark.parametrize("operation", ["reduce_to", "broadcast_to"])
def test_invalid_destinations(operation, destination):
    args = ("SUM", arrays(1, 2)) if operation == "reduce_to" else (1,)
    with pytest.raises(errors.ArgumentError, match=rf"{operation}: .* is not a destination; give None.*CPU:0, CPU:1"):
        getattr(mirrored(2).extended, operation)(*args, destination)


def test_a_destination_of_another_strategy():
    with pytest.raises(errors.ArgumentError, match=r"broadcast_to: a PerReplica of 3 values.*2 replicas"):
        mirrored(2).extended.broadcast_to(1, PerReplica([1, 2, 3]))
    with pytest.raises(errors.ArgumentError, match="is not a destination"):
        mirrored(2).extended.broadcast_to(1, mirrored(3).replicas[2])


def test_a_variable_as_the_destination(strategy):
    extended, size = strategy.extended, strategy.num_replicas_in_sync
    with strategy.scope():
        weights, bias = daskdist.Variable(np.ones(2)), daskdist.Variable(1.0, synchronization="ON_READ")
    gradients = PerReplica([np.full(2, k + 1.0) for k in range(size)])
    total = size * (size + 1) / 2

    def values(reduced):
        return [np.asarray(part).tolist() for part in strategy.local_results(reduced)]

    assert values(extended.reduce_to("SUM", gradients, weights)) == [[total] * 2] * size
    pairs = [(gradients, weights), (PerReplica([2.0] * size), bias)]
    first, second = extended.batch_reduce_to("MEAN", pairs)
    assert values(first) == [[total / size] * 2] * size
    assert values(second) == [2] * size
    assert values(extended.broadcast_to(np.float64(3), weights)) == [3] * size

    def merged(strategy, gradient):
        (reduced,) = strategy.extended.batch_reduce_to("SUM", [(gradient, weights)])
        strategy.extended.update(weights, lambda var, change: var.assign_sub(0.5 * change), args=(reduced,))

    def step(gradient):
        daskdist.get_replica_context().merge_call(merged, args=(gradient,))
        return weights.read_value()

    assert values(strategy.run(step, args=(gradients,))) == [[1 - total / 2] * 2] * size


def test_a_variable_of_another_strategy_is_no_destination(strategy):
    other = mirrored(1)
    with other.scope():
        made = daskdist.Variable(1.0, name="theirs")
    with pytest.raises(errors.ArgumentError, match="theirs belongs to another strategy"):
        strategy.extended.broadcast_to(1, made)


# --- update and call_for_each_replica ---


def test_update(strategy):
    weights = strategy.extended.broadcast_to(np.ones(2), None)
    gradient = strategy.extended.reduce_to("SUM", arrays([1.0, 2.0], [3.0, 4.0]), None)

    def step(part, by, *, rate):
        return part - rate * by

    for _ in range(2):
        weights = strategy.extended.update(weights, step, args=(gradient,), kwargs={"rate": 0.5})
    np.testing.assert_array_equal(strategy.local_results(weights), [[-3, -5], [-3, -5]])


def test_update_part_by_part(strategy):
    actual = strategy.extended.update(arrays(1, 2), lambda part, x: part * x, args=[10], group=False)
    assert isinstance(actual, tuple)
    assert [int(result) for result in actual] == [10, 20]


@pytest.mark.cluster
def test_update_is_made_where_the_part_is(on_cluster):
    def address(part):
        from distributed import get_worker

        return get_worker().address

    actual = on_cluster.extended.update(arrays(1, 2), address)
    assert on_cluster.local_results(actual) == on_cluster.workers


def test_update_of_values_that_are_not_per_replica(strategy):
    with pytest.raises(errors.ArgumentError, match=r"update: var is int, which is not per replica.*broadcast_to"):
        strategy.extended.update(3, lambda part: part)
    assert mirrored(1).extended.update(3, lambda part: part + 1) == 4
    with pytest.raises(errors.ArgumentError, match=r"update: args is a int; give a tuple"):
        mirrored(2).extended.update(arrays(1, 2), max, args=3)


def test_call_for_each_replica(strategy):
    actual = strategy.extended.call_for_each_replica(np.add, (arrays(1, 2), 3))
    assert strategy.local_results(actual) == (4, 5)


# --- a step of training ---


def test_a_training_loop_fetches_nothing_before_its_end(strategy):
    """Weights and reduced gradients are on every replica, and nothing is fetched before the end."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3))
    y = x @ np.array([1.0, -2.0, 3.0])

    def gradient(weights, batch):
        features, target = batch
        return features.T @ (features @ weights - target) / len(target)

    extended = strategy.extended
    weights = extended.broadcast_to(np.zeros(3), None)
    ds = daskdist.Dataset.from_tensor_slices((x, y)).batch(16).repeat(2)
    for batch in strategy.distribute_dataset(ds):
        total = extended.reduce_to("MEAN", strategy.run(gradient, args=(weights, batch)), weights)
        weights = extended.update(weights, lambda part, by: part - 0.3 * by, args=(total,))
    one, other = strategy.local_results(weights)
    np.testing.assert_array_equal(one, other)
    expected = np.zeros(3)
    for start in [0, 16, 32, 48] * 2:
        expected -= 0.3 * gradient(expected, (x[start : start + 16], y[start : start + 16]))
    np.testing.assert_allclose(one, expected)
