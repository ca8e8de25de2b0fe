"""Variables that are objects: a copy for each replica, aggregated where they are assigned."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import PerReplica, Variable, errors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["one", "embedded", pytest.param("cluster", marks=pytest.mark.cluster)])
def strategy(request):
    """Return one or three replicas in this process, or two on each of two workers."""
    if request.param != "cluster":
        yield mirrored(1 if request.param == "one" else 3)
        return
    client = request.getfixturevalue("start_cluster")(2, 1)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=2) as made:
        yield made


def variable(strategy, *args, **options):
    with strategy.scope():
        return Variable(*args, **options)


class Counter:
    """An object that is no array, and has no state_dict."""

    def __init__(self, number=0, names=()):
        self.number = number
        self.names = set(names)


class Model:
    """An object with a state_dict, and with an attribute that cannot be pickled."""

    def __init__(self, weights):
        self.weights = np.array(weights)
        self.lock = threading.Lock()

    def state_dict(self):
        return {"weights": self.weights}


def number():
    return daskdist.get_replica_context().replica_id_in_sync_group


def added(made):
    """Return a function in which each replica adds to its object in place, and returns it once all have."""

    def step():
        made.read_value().number += number() + 1
        daskdist.get_replica_context().all_reduce("SUM", 1)
        return made.read_value().number

    return step


def adding(amount):
    def add(x):
        return x + amount

    return add


def calling_itself(amount):
    def count(x):
        return count(x - amount)

    return count


# --- a copy for each ---


def test_each_replica_gets_its_copy_of_an_assigned_object(strategy):
    size = strategy.num_replicas_in_sync
    var = variable(strategy, Counter)
    given = Counter(10)
    for _ in range(2):
        var.assign(given)
        assert strategy.local_results(strategy.run(added(var))) == tuple(10 + k + 1 for k in range(size))
    # The program's object and those of the replicas do not affect each other.
    assert given.number == 10
    given.number = 0
    assert strategy.local_results(strategy.run(lambda: var.read_value().number)) == tuple(11 + k for k in range(size))
    other = variable(strategy, Counter)
    other.assign(var)
    assert strategy.local_results(strategy.run(added(other))) == tuple(10 + 2 * (k + 1) for k in range(size))
    assert strategy.local_results(strategy.run(lambda: var.read_value().number)) == tuple(11 + k for k in range(size))


def test_objects_assigned_per_replica_belong_to_that_replica(strategy):
    size = strategy.num_replicas_in_sync
    var = variable(strategy, Counter)
    given = [Counter(10 * k) for k in range(size)]
    var.assign(PerReplica(given))
    assert strategy.local_results(strategy.run(added(var))) == tuple(10 * k + k + 1 for k in range(size))
    assert [value.number for value in given] == [10 * k for k in range(size)]


def test_each_replica_gets_its_copy_of_a_functions_result(strategy):
    shared = Counter(5)
    var = variable(strategy, lambda: shared)
    size = strategy.num_replicas_in_sync
    assert strategy.local_results(strategy.run(added(var))) == tuple(5 + k + 1 for k in range(size))


def test_an_object_shared_by_replicas_becomes_one_for_each(strategy):
    shared = Counter(5)
    var = variable(strategy, Counter)
    strategy.run(lambda: var.assign(shared))
    size = strategy.num_replicas_in_sync
    assert strategy.local_results(strategy.run(added(var))) == tuple(5 + k + 1 for k in range(size))


@pytest.mark.cluster
def test_values_read_by_the_program_stay_unchanged(on_cluster):
    var = variable(on_cluster, Counter)
    before = var.read_value(), var.values, var.assign(Counter(3))
    on_cluster.local_results(on_cluster.run(added(var)))
    assert [[item.number for item in on_cluster.local_results(value)] for value in before] == [[0, 0], [0, 0], [3, 3]]


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_an_object_in_nests_of_several_replicas_becomes_one_for_each(strategy, synchronization):
    shared = Counter(5)
    var = variable(strategy, Counter, synchronization=synchronization)
    strategy.run(lambda: var.assign({"counter": shared}))

    def step():
        var.read_value()["counter"].number += number() + 1
        daskdist.get_replica_context().all_reduce("SUM", 1)
        return var.read_value()["counter"].number

    size = strategy.num_replicas_in_sync
    assert strategy.local_results(strategy.run(step)) == tuple(5 + k + 1 for k in range(size))


def test_assigning_one_object_on_all_replicas_makes_copies(strategy):
    shared = Counter(5)
    var = variable(strategy, Counter, synchronization="ON_READ")
    strategy.run(lambda: var.assign(shared))
    size = strategy.num_replicas_in_sync
    assert strategy.local_results(strategy.run(added(var))) == tuple(5 + k + 1 for k in range(size))
    other = variable(strategy, Counter)
    shared = Counter(5)
    strategy.extended.update(other, lambda counter: counter.assign(shared))
    assert strategy.local_results(strategy.run(added(other))) == tuple(5 + k + 1 for k in range(size))


def test_an_object_that_cannot_be_copied_is_an_error():
    strategy = mirrored(2)
    var = variable(strategy, Counter, name="thing")
    with pytest.raises(
        errors.ArgumentError, match=r"thing.assign: each replica needs a copy, and generator cannot be copied.*"
    ):
        var.assign(value for value in ())
    own = variable(strategy, Counter, synchronization="ON_READ")
    strategy.run(lambda: own.assign(item for item in (number(), 7)))
    assert strategy.local_results(strategy.run(lambda: next(own.read_value()))) == (0, 1)


# --- aggregated ---


def test_the_first_replicas_object_is_copied_to_all(strategy):
    size = strategy.num_replicas_in_sync
    var = variable(strategy, Counter, aggregation="ONLY_FIRST_REPLICA")

    def step():
        actual = var.assign(Counter(number() + 7))
        return actual is var.read_value()

    assert strategy.local_results(strategy.run(step)) == (True,) * size
    assert [value.number for value in strategy.local_results(var)] == [7] * size
    assert strategy.local_results(strategy.run(added(var))) == tuple(7 + k + 1 for k in range(size))


def test_without_aggregation_objects_are_the_same(strategy):
    var = variable(strategy, Counter, name="thing")
    # Each replica has a separate object, with its text in another order.
    strategy.run(lambda: var.assign(Counter(3, "abc" if number() else "cba")))
    size = strategy.num_replicas_in_sync
    assert [(part.number, part.names) for part in strategy.local_results(var)] == [(3, {"a", "b", "c"})] * size
    if size == 1:
        return
    with pytest.raises(errors.CollectiveError, match=r"thing.assign: replica \d gives another value than replica 0;.*"):
        strategy.local_results(strategy.run(lambda: var.assign(Counter(number()))))
    assert [item.number for item in strategy.local_results(var)] == [3] * size


def test_without_aggregation_objects_are_the_same_by_their_states():
    strategy = mirrored(2)
    var = variable(strategy, lambda: Model([0.0]), name="model")
    strategy.run(lambda: var.assign(Model(np.ones(2))))
    assert [item.weights.tolist() for item in strategy.local_results(var)] == [[1, 1]] * 2
    with pytest.raises(errors.CollectiveError, match=r"model.assign: replica 1 gives another value than replica 0"):
        strategy.run(lambda: var.assign(Model(np.full(2, float(number())))))
    lock = variable(strategy, threading.Lock, name="lock")
    with pytest.raises(errors.ArgumentError, match=r"lock.assign: lock cannot be compared between replicas"):
        strategy.run(lambda: lock.assign(threading.Lock()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"w": np.zeros(2), "name": None}, {"w": np.zeros(3), "name": None}),
        ({"w": np.zeros(2), "name": None}, {"w": np.zeros(2, np.float32), "name": None}),
        ({"w": np.zeros(2), "name": None}, {"v": np.zeros(2), "name": None}),
        (Counter(names="ab"), Counter(names="ac")),
        ([1, "a"], (1, "a")),
        ("text", b"text"),
        (Counter, Model),
        ([lambda: 1], [lambda: 2]),
        ([adding(1)], [adding(2)]),
        ([adding([adding(1)])], [adding([adding(2)])]),
        ([calling_itself(1)], [calling_itself(2)]),
        ([{1: 2}.get], [{1: 3}.get]),
        ([len], [max]),
    ],
)
def test_different_values_are_an_error(one, other):
    strategy = mirrored(2)
    var = variable(strategy, object)
    for value in (one, other):
        strategy.run(lambda value=value: var.assign(value))
    with pytest.raises(errors.CollectiveError, match="gives another value"):
        strategy.run(lambda: var.assign(other if number() else one))


def test_functions_that_are_made_alike_are_the_same(strategy):
    var = variable(strategy, Counter)
    strategy.run(lambda: var.assign([adding(2), calling_itself(1), lambda: list("ab"), {1: 2}.get, len]))
    for value in strategy.local_results(strategy.run(lambda: var.read_value()[0](1))):
        assert value == 3


def test_objects_of_on_read_variables_differ(strategy):
    var = variable(strategy, Counter, synchronization="ON_READ")
    strategy.run(lambda: var.assign(Counter(number())))
    size = strategy.num_replicas_in_sync
    assert [value.number for value in strategy.local_results(var)] == list(range(size))


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", lambda n: n * (n + 1) / 2), ("MEAN", lambda n: (n + 1) / 2)]
)
def test_nests_of_arrays_of_a_framework_are_added_up(strategy, aggregation, expected):
    pytest.importorskip("array_api_strict")

    def make():
        import array_api_strict as xp

        return {"w": xp.zeros(2, dtype=xp.float32), "b": [xp.asarray(0.0)]}

    var = variable(strategy, make, aggregation=aggregation)

    def step():
        import array_api_strict as xp

        one = xp.ones(2, dtype=xp.float32) * float(number() + 1)
        given = {"w": one, "b": [xp.asarray(float(number() + 1))]}
        var.assign(given)
        actual = var.assign_add(given)
        return [type(actual["w"]).__name__, str(actual["w"].dtype), *map(float, actual["w"]), float(actual["b"][0])]

    size = strategy.num_replicas_in_sync
    total = 2 * (expected(size) if size > 1 else 1.0)
    kind = ["Array", "array_api_strict.float32"]
    assert strategy.local_results(strategy.run(step)) == ([*kind, total, total, total],) * size
    actual = strategy.local_results(var.assign_sub(make()))
    assert [float(result["b"][0]) for result in actual] == [total] * size
    with pytest.raises(errors.ArgumentError, match="differ in structure or shape"):
        strategy.local_results(var.assign_add({"w": 1.0}))


def test_each_replica_can_make_arrays_of_a_framework_of_another_shape(strategy):
    pytest.importorskip("array_api_strict")

    def make():
        import array_api_strict as xp

        return xp.zeros(number() + 1)

    var = variable(strategy, make)
    size = strategy.num_replicas_in_sync
    actual = strategy.run(lambda: var.read_value().shape[0])
    assert [int(value) for value in strategy.local_results(actual)] == [k + 1 for k in range(size)]


def test_objects_that_cannot_be_added_are_an_error():
    strict = pytest.importorskip("array_api_strict")
    strategy = mirrored(2)
    with pytest.raises(errors.ArgumentError, match=r"aggregation MEAN of .*int64.* would not be a whole number"):
        variable(strategy, lambda: [strict.asarray(1)], aggregation="MEAN")
    with pytest.raises(errors.ArgumentError, match="aggregation SUM is for arrays, and the value is list"):
        variable(strategy, lambda: [strict.ones(1), None], aggregation="SUM")
    with pytest.raises(errors.ArgumentError, match=r"aggregation SUM of each replica's own value \(ON_READ\)"):
        variable(strategy, lambda: [strict.ones(1)], aggregation="SUM", synchronization="ON_READ")
    var = variable(strategy, lambda: [strict.ones(1)], aggregation="SUM", name="thing")
    with pytest.raises(errors.ArgumentError, match=r"thing.assign: aggregation SUM is for nests of arrays: .*Counter"):
        strategy.run(lambda: var.assign([Counter()]))
    with pytest.raises(
        errors.ArgumentError, match=r"thing.assign: aggregation SUM of bool results in int64; give arrays of"
    ):
        strategy.run(lambda: var.assign([strict.asarray([True])]))
    mean = variable(strategy, lambda: [strict.ones(1)], aggregation="MEAN", name="mean")
    with pytest.raises(
        errors.ArgumentError, match=r"mean.assign: aggregation MEAN of int64 results in float64; give arrays of"
    ):
        strategy.run(lambda: mean.assign([strict.asarray([number()])]))
    assert [float(item[0][0]) for item in strategy.local_results(mean)] == [1, 1]


# --- arrays of frameworks as the value ---


def test_arrays_of_a_framework_are_taken_as_numpys(strategy):
    strict = pytest.importorskip("array_api_strict")
    var = variable(strategy, {"w": strict.ones(2, dtype=strict.float32), "b": 1.0}, aggregation="SUM")
    assert var.numpy()["w"].dtype == np.float32
    var.assign({"w": strict.full(2, 3.0, dtype=strict.float32), "b": strict.asarray(2.0)})
    var.assign_add({"w": strict.ones(2, dtype=strict.float32), "b": 0.0})
    actual = strategy.local_results(strategy.run(lambda: (type(var.read_value()["w"]).__name__, var.read_value())))
    assert [(kind, item["w"].tolist(), float(item["b"])) for kind, item in actual] == (
        [("ndarray", [4, 4], 2)] * strategy.num_replicas_in_sync
    )
    with pytest.raises(errors.ArgumentError, match="the value is Counter; give an array or a number"):
        var.assign({"w": Counter(), "b": 0})
