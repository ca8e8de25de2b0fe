"""Variables in cross-replica context: assignments and aggregations outside of functions."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import mirrored
from variable_checks import copies, numbers, variable

import daskdist
from daskdist import PerReplica, Variable, errors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def strategy(any_strategy):
    return any_strategy


# --- between replicas ---


def between(function, *args):
    """Call a function in cross-replica context; for functions on replicas."""
    return daskdist.get_replica_context().merge_call(function, args=args)


def test_merge_call_can_read_and_assign_variables(strategy):
    var = variable(strategy, {"w": np.zeros(2, np.float32), "n": 0})

    def merged(strategy, own, x):
        before = own.read_value()
        own.assign({"w": before["w"] + strategy.reduce("SUM", x, axis=None), "n": 1})
        own.assign_add({"w": np.ones(2), "n": 2})
        # `numpy` gives the value after both assignments.
        return own.numpy()["w"]

    def step(x):
        given = between(merged, var, x)
        return given, var.read_value()["w"], var.read_value()["n"]

    size = strategy.num_replicas_in_sync
    for times in (1, 2):
        expected = [times * (sum(range(size)) + 1)] * 2
        for given, w, n in strategy.local_results(strategy.run(step, args=(numbers(strategy),))):
            assert (given.tolist(), w.tolist(), w.dtype, n) == (expected, expected, np.float32, 3)
    assert var.numpy()["w"].tolist() == expected


def test_merge_call_can_use_variables_that_are_not_arguments(strategy):
    var = variable(strategy, 1.0)

    def merged(strategy):
        assert float(var) == np.asarray(strategy.reduce("MAX", var, axis=None))
        var.assign(float(var) * 2)
        var.assign(strategy.reduce("MEAN", var, axis=None) + 1)

    strategy.local_results(strategy.run(lambda: [between(merged), 0][1]))
    assert copies(strategy, var) == [3] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("is_given", [False, True])
def test_merge_call_updates_the_copy_of_each_replica(strategy, is_given):
    var = variable(strategy, np.zeros(2), aggregation="SUM")

    def merged(strategy, x, given=var):
        total = strategy.reduce("SUM", x, axis=None)
        return strategy.extended.update(given, lambda own, x, total: own.assign_add(x + total), args=(x, total))

    def step(x):
        given = between(merged, *((x, var) if is_given else (x,)))
        assert given.tolist() == var.read_value().tolist()
        return var.read_value()

    size = strategy.num_replicas_in_sync
    expected = [[sum(range(size)) + k] * 2 for k in range(size)]
    values = strategy.run(step, args=(PerReplica([np.full(2, float(k)) for k in range(size)]),))
    assert [value.tolist() for value in strategy.local_results(values)] == expected
    assert copies(strategy, var) == expected


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "NONE"])
def test_cross_replica_reads_give_each_replicas_value(strategy, aggregation):
    var = variable(strategy, 0.0, synchronization="ON_READ", aggregation=aggregation)
    size = strategy.num_replicas_in_sync
    own = list(range(size))

    def merged(strategy, given):
        assert list(strategy.local_results(given)) == own
        if aggregation != "NONE":
            assert float(given) == (sum(own) if aggregation == "SUM" else sum(own) / size)
        given.assign(PerReplica([10.0 * k for k in own]) if size > 1 else 0.0)
        strategy.run(lambda: given.assign_add(daskdist.get_replica_context().replica_id_in_sync_group))

    def step(x):
        var.assign(x)
        between(merged, var)
        return var.read_value()

    actual = strategy.local_results(strategy.run(step, args=(numbers(strategy),)))
    assert list(actual) == copies(strategy, var) == [11 * k for k in own]


class Kept:
    def __init__(self, *seen):
        self.seen = list(seen)


def test_merge_call_can_assign_and_change_objects(strategy):
    var = variable(strategy, Kept)

    def merged(strategy, given):
        assert [item.seen for item in strategy.local_results(given.read_value())] == [["own"]] * size
        given.assign(Kept("new"))
        strategy.extended.update(given, lambda value, x: value.read_value().seen.append(x), args=(ids,))

    def step():
        var.read_value().seen.append("own")
        between(merged, var)
        var.read_value().seen.append("after")
        return var.read_value().seen

    size = strategy.num_replicas_in_sync
    ids = PerReplica([f"of {k}" for k in range(size)]) if size > 1 else "of 0"
    for number, actual in enumerate(strategy.local_results(strategy.run(step))):
        assert actual == ["new", f"of {number}", "after"]


class Steps:
    """An object such as an optimizer."""

    def __init__(self, kept):
        self.kept = kept

    def take(self, what):
        self.kept.seen.append(what)


@pytest.mark.parametrize("is_last", [False, True])
def test_cross_replica_objects_keep_shared_parts(strategy, is_last):
    var = variable(strategy, Kept)
    steps = variable(strategy, lambda: Steps(var.read_value()))

    def merged(strategy, given):
        strategy.extended.update(steps, lambda own: own.read_value().take("between"))
        return [value.seen for value in strategy.local_results(var)]

    def step():
        seen = between(merged, (steps, var) if is_last else (var, steps))
        steps.read_value().take("after")
        return seen, var.read_value().seen, steps.read_value().kept is var.read_value()

    size = strategy.num_replicas_in_sync
    for seen, actual, is_same in strategy.local_results(strategy.run(step)):
        assert list(seen) == [["between"]] * size
        assert (actual, is_same) == (["between", "after"], True)


def test_reading_objects_across_replicas_keeps_their_identity(strategy):
    var = variable(strategy, Kept)

    def step():
        before = var.read_value()
        between(lambda strategy, given: len(strategy.local_results(given.read_value())), var)
        return var.read_value() is before

    assert all(strategy.local_results(strategy.run(step)))


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_nested_cross_replica_calls_read_current_values(strategy, synchronization):
    var = variable(strategy, 0.0, synchronization=synchronization, aggregation="MEAN")

    def inner(strategy, given):
        given.assign_add(10.0)
        return float(given)

    def merged(strategy, given):
        var.assign_add(1.0)
        actual = strategy.run(lambda: (between(inner, given), var.read_value()))
        # The variable can be used as before.
        var.assign_add(100.0)
        return strategy.local_results(actual)

    def step():
        return between(merged, var), var.read_value()

    size = strategy.num_replicas_in_sync
    for given, own in strategy.local_results(strategy.run(step)):
        assert (list(given), own) == ([(11, 11)] * size, 111)
    assert copies(strategy, var) == [111] * size


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_replicas_may_give_different_variables_to_merge_call(strategy, synchronization):
    size = strategy.num_replicas_in_sync
    options = {"synchronization": synchronization, "aggregation": "MEAN"}
    made = [variable(strategy, [1.0] * k if k else {"n": 2.0}, **options) for k in range(size)]

    def merged(strategy, given):
        return str(strategy.local_results(given))

    given = PerReplica(made) if size > 1 else made[0]
    # The program sees the same values as the function in cross-replica context.
    expected = str(strategy.local_results(given))
    assert expected.startswith("({'n': np.float32(2.0)}")
    assert set(strategy.local_results(strategy.run(lambda own: between(merged, own), args=(given,)))) == {expected}


@pytest.mark.cluster
def test_a_failed_cross_replica_call_on_a_cluster_assigns_nothing(start_cluster):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 1), num_replicas_per_worker=2) as strategy:
        var = variable(strategy, 0.0)

        def merged(strategy):
            var.assign(1.0)
            strategy.extended.update(var, lambda own: own.assign_add(1.0))
            assert float(var) == 2
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            strategy.local_results(strategy.run(between, args=(merged,)))
        assert copies(strategy, var) == [0] * 4


@pytest.mark.cluster
def test_cross_replica_calls_on_a_cluster_see_only_their_arguments(on_cluster):
    var = variable(on_cluster, 0.0, synchronization="ON_READ", aggregation="SUM", name="own")
    kept = variable(on_cluster, Kept, name="kept")
    for function in (lambda _: float(var), lambda _: var.assign_add(1.0), lambda _: kept.read_value()):
        with pytest.raises(errors.ArgumentError, match=r"own|kept: each replica has its own value, .* pass it in args"):
            on_cluster.local_results(on_cluster.run(between, args=(function,)))
    # Assigning a new value needs no old one, so it is allowed.
    on_cluster.local_results(on_cluster.run(lambda: [between(lambda _: [var.assign(3.0), None][1]), 0][1]))
    assert float(var) == 3


@pytest.mark.cluster
def test_a_variable_cannot_be_created_in_merge_call_on_a_cluster(on_cluster):
    with pytest.raises(RuntimeError, match=r"late: created on a worker, in a function of merge_call; create it"):
        on_cluster.local_results(on_cluster.run(between, args=(lambda _: [Variable(0.0, name="late"), 0][1],)))


def test_a_variable_of_another_strategy_is_refused_in_merge_call(two):
    other = variable(mirrored(2), 0.0, name="other")

    def merged(strategy):
        other.assign(1.0)

    with pytest.raises(errors.ArgumentError, match="other: used"):
        two.local_results(two.run(between, args=(merged,)))
    assert float(other) == 0
