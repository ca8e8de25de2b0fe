"""Variables, whose values replicas keep between calls, in a process and on workers."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from functools import partial

import numpy as np
import optree
import pytest
from conftest import mirrored
from variable_checks import copies, numbers, variable

import daskdist
from daskdist import PerReplica, Variable, VariableAggregation, VariableSynchronization, devices, errors
from daskdist.strategy.replica.context import store_of
from daskdist.strategy.values.variable_contract import variable_number

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def strategy(any_strategy):
    return any_strategy


# --- reading ---


def test_all_replicas_have_the_initial_value(strategy):
    made = variable(strategy, np.arange(6.0).reshape(2, 3), name="weights")
    assert (made.name, made.shape, made.dtype, made.ndim, made.size) == ("weights", (2, 3), np.float64, 2, 6)
    assert made.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies(strategy, made) == [[[0, 1, 2], [3, 4, 5]]] * strategy.num_replicas_in_sync
    assert [each.tolist() for each in strategy.local_results(strategy.run(lambda: made[1] + made[0]))] == (
        [[3, 5, 7]] * strategy.num_replicas_in_sync
    )


def test_later_changes_of_the_array_do_not_reach_it(strategy):
    array = np.zeros(3)
    made = variable(strategy, array)
    array += 1
    assert made.numpy().tolist() == [0, 0, 0]
    made.assign(array)
    array += 1
    assert made.numpy().tolist() == [1, 1, 1]


def test_values_read_on_a_replica_are_read_only(strategy):
    made = variable(strategy, np.zeros(3))

    def step():
        made.read_value()[0] = 1

    with pytest.raises(ValueError, match="read-only"):
        strategy.local_results(strategy.run(step))


def test_the_program_uses_a_variable_like_its_value(two):
    made = variable(two, np.array([1.0, 2.0]))
    assert (made + 1).tolist() == [2, 3]
    assert (2 * made).tolist() == [2, 4]
    assert np.exp(made)[0] == pytest.approx(np.e)
    assert float(made @ np.array([1.0, 1.0])) == 3
    assert (made == np.array([1.0, 0.0])).tolist() == [True, False]
    assert np.asarray(made).tolist() == list(made) == [1, 2]
    assert len(made) == 2
    scalar = variable(two, 3)
    assert (int(scalar), float(scalar), bool(scalar), f"{scalar}", range(5)[scalar]) == (3, 3.0, True, "3", 3)
    total = made
    total += 1
    assert total.tolist() == [2, 3]
    assert made.numpy().tolist() == [1, 2]


def test_variables_can_be_in_arguments(strategy):
    made = variable(strategy, 2.0)
    found = strategy.run(lambda where, x: where["scale"] * x, args=({"scale": made}, numbers(strategy)))
    assert [float(each) for each in strategy.local_results(found)] == [
        2.0 * k for k in range(strategy.num_replicas_in_sync)
    ]


def test_a_returned_variable_becomes_its_value(strategy):
    made = variable(strategy, [1.0, 2.0])
    found = strategy.run(lambda: (made, {"twice": made * 2}))
    size = strategy.num_replicas_in_sync
    both = strategy.local_results(found)
    assert [(one.tolist(), other["twice"].tolist()) for one, other in both] == [([1, 2], [2, 4])] * size
    if size > 1:
        assert np.asarray(strategy.reduce("SUM", found[0], axis=None)).tolist() == [size, 2 * size]
    nest = variable(strategy, [np.zeros(2), np.ones(3)])
    assert [len(each) for each in nest.numpy()] == [2, 3]
    with pytest.raises(AttributeError, match="nest of arrays"):
        np.asarray(nest)


def test_nests_of_arrays_are_one_variable(strategy):
    size = strategy.num_replicas_in_sync
    made = variable(strategy, {"w": np.zeros(2), "b": 0.0}, aggregation="SUM")

    def step(x):
        read = made.assign_add({"w": np.ones(2) * x, "b": x})
        return read["w"].sum() + made.read_value()["b"]

    total = sum(range(size))
    assert [float(each) for each in strategy.local_results(strategy.run(step, args=(numbers(strategy),)))] == (
        [3.0 * total] * size
    )
    assert {name: np.asarray(each).tolist() for name, each in made.numpy().items()} == {"w": [total] * 2, "b": total}
    with pytest.raises(AttributeError, match="nest of arrays, which has no shape"):
        made.shape  # noqa: B018
    with pytest.raises(errors.ArgumentError, match="different structures"):
        made.assign({"w": np.zeros(2)})


# --- assigning on replicas ---


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("SUM", lambda n: 5 * n + n * (n - 1) / 2),
        ("MEAN", lambda n: 5 + (n - 1) / 2),
        ("ONLY_FIRST_REPLICA", lambda n: 5),
    ],
)
def test_assigned_values_are_aggregated(strategy, aggregation, expected):
    made = variable(strategy, 0.0, aggregation=aggregation)
    found = strategy.run(lambda x: made.assign(x + 5), args=(numbers(strategy),))
    size = strategy.num_replicas_in_sync
    assert [float(each) for each in strategy.local_results(found)] == [expected(size)] * size
    assert copies(strategy, made) == [expected(size)] * size


@pytest.mark.parametrize(("how", "sign"), [("assign_add", 1), ("assign_sub", -1)])
def test_added_values_are_aggregated_first(strategy, how, sign):
    made = variable(strategy, np.array([10.0, 20.0]), aggregation="SUM")
    for _ in range(3):
        strategy.run(lambda x, how=how: getattr(made, how)(np.array([x, 1.0])), args=(numbers(strategy),))
    size = strategy.num_replicas_in_sync
    total = 3 * sum(range(size))
    assert copies(strategy, made) == [[10 + sign * total, 20 + sign * 3 * size]] * size


def test_without_aggregation_replicas_assign_the_same(strategy):
    made = variable(strategy, 0.0, name="rate")
    strategy.run(lambda: made.assign(0.5))
    assert float(made) == 0.5
    if strategy.num_replicas_in_sync == 1:
        return
    with pytest.raises(errors.CollectiveError, match=r"rate.assign: replica 1 gives another value than replica 0;.*"):
        strategy.local_results(strategy.run(lambda x: made.assign(x), args=(numbers(strategy),)))
    assert float(made) == 0.5


def test_values_that_are_not_numbers_are_the_same_if_their_bits_are(two):
    made = variable(two, np.zeros(2))
    two.local_results(two.run(lambda: made.assign(np.array([np.nan, np.inf]))))
    assert np.isnan(made.numpy()[0])


def test_python_numbers_are_not_summed(two):
    made = variable(two, 0.0, aggregation="SUM", name="total")
    with pytest.raises(errors.ArgumentError, match=r"total.assign_add: a Python number on each of 2 replicas"):
        two.local_results(two.run(lambda: made.assign_add(1)))
    mean = variable(two, 0.0, aggregation="MEAN")
    two.local_results(two.run(lambda: mean.assign_add(1)))
    assert float(mean) == 1


def test_in_an_update_each_replica_changes_its_own_copy(two):
    made = variable(two, 1.0, aggregation="SUM")
    found = two.extended.update(made, lambda own, x: own.assign_add(x), args=(numbers(two),), group=False)
    assert [float(each) for each in found] == [1, 2]
    assert copies(two, made) == [1, 2]


# --- each replica its own ---


def test_on_read_each_replica_has_its_own_which_the_program_reads_as_one(strategy):
    size = strategy.num_replicas_in_sync
    for aggregation, expected in [("SUM", 3 * sum(range(size))), ("MEAN", 3 * (size - 1) / 2)]:
        made = variable(strategy, 0.0, synchronization="ON_READ", aggregation=aggregation)
        for _ in range(3):
            strategy.run(lambda x, made=made: made.assign_add(x), args=(numbers(strategy),))
        assert copies(strategy, made) == [3.0 * k for k in range(size)]
        assert float(made) == pytest.approx(expected)
    first = variable(strategy, 7, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")
    assert int(first) == 7
    apart = variable(strategy, 7, synchronization="ON_READ", name="apart")
    with pytest.raises(errors.ArgumentError, match="apart: each replica has its own value"):
        apart.read_value()
    assert copies(strategy, apart.values) == [7] * size


def test_the_program_assigns_a_sum_in_equal_parts(two):
    made = variable(two, 0.0, synchronization="ON_READ", aggregation="SUM", name="seen")
    made.assign(10)
    assert copies(two, made) == [5, 5]
    assert float(made) == 10
    with pytest.raises(errors.ArgumentError, match=r"seen.assign_add: the replicas' values are summed"):
        made.assign_add(1)
    mean = variable(two, 1.0, synchronization="ON_READ", aggregation="MEAN")
    mean.assign_add(1)
    mean.assign_sub(np.float64(0.5))
    assert copies(two, mean) == [1.5, 1.5]


def test_a_sum_of_whole_numbers_is_assigned_in_whole_parts(two):
    made = variable(two, 3, synchronization="ON_READ", aggregation="SUM", name="seen")
    for number in (0, 7, -7):
        assert int(made.assign(number)) == int(made) == number
    assert copies(two, made) == [-3, -4]
    made.assign(two.reduce("SUM", two.run(lambda: np.int64(2)), axis=None) + 1)
    assert copies(two, made) == [3, 2]
    state = made.state_dict()
    made.assign(0)
    made.load_state_dict(state)
    assert int(made) == 5
    with pytest.raises(errors.ArgumentError, match="dtype float64, but the variable has int32"):
        made.assign(1.5)
    with pytest.raises(errors.ArgumentError, match=r"seen.assign: the value is str"):
        made.assign("x")


def test_values_assigned_by_the_program_are_read_unchanged(two):
    mean = variable(two, 0.0, synchronization="ON_READ", aggregation="MEAN")
    assert float(mean.assign(numbers(two))) == 0.5
    total = variable(two, 0.0, synchronization="ON_READ", aggregation="SUM")
    assert float(total.assign(10)) == 10


@pytest.mark.parametrize(("aggregation", "expected"), [("SUM", 3), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1)])
def test_an_on_read_variable_is_assigned_by_its_value(two, aggregation, expected):
    own = variable(two, 0.0, synchronization="ON_READ", aggregation=aggregation)
    two.run(lambda x: own.assign(x + 1), args=(numbers(two),))
    made = variable(two, 1.0)
    made.assign(own)
    assert copies(two, made) == [expected] * 2
    made.assign_add(own)
    assert copies(two, made) == [2 * expected] * 2


# --- in the program ---


def test_the_program_assigns_to_all(strategy):
    size = strategy.num_replicas_in_sync
    made = variable(strategy, np.zeros(2), aggregation="SUM")
    assert np.asarray(made.assign(np.array([1.0, 2.0]))).tolist() == [1, 2]
    assert np.asarray(made.assign_add([1, 1])).tolist() == [2, 3]
    made.assign_sub(made)
    assert copies(strategy, made) == [[0, 0]] * size
    made.assign(PerReplica([np.full(2, float(number)) for number in range(size)]))
    assert copies(strategy, made) == [[float(number)] * 2 for number in range(size)]


def test_results_of_steps_are_assigned_without_fetching(two):
    made = variable(two, 0.0)
    loss = two.reduce("SUM", two.run(lambda x: x + 1, args=(numbers(two),)), axis=None)
    made.assign(loss * 2)
    assert float(made) == 6


def test_calls_that_use_a_variable_are_made_in_their_order(two):
    made = variable(two, np.float64(0), aggregation="MEAN")
    seen = []
    for number in range(24):
        two.run(lambda number=number: made.assign(made * 2 + number))
        if number % 7 == 0:
            made.assign_add(1)
        if number % 10 == 0:
            seen.append(made.read_value())
    expected, read = 0.0, []
    for number in range(24):
        expected = expected * 2 + number + (number % 7 == 0)
        if number % 10 == 0:
            read.append(expected)
    assert float(made) == expected
    assert [float(each) for each in seen] == read


def test_functions_that_use_a_variable_are_made_in_their_order(two):
    made = variable(two, np.float64(0), aggregation="MEAN")

    @daskdist.function
    def doubled(number):
        for _ in range(3):
            two.run(lambda number: made.assign(made * 2 + number), args=(np.float64(number),))

    for number in range(12):
        doubled(number)
        if number == 5:
            made.assign_add(1)
    expected = 0.0
    for number in range(12):
        for _ in range(3):
            expected = expected * 2 + number
        expected += number == 5
    assert float(made) == expected


def test_each_thread_of_the_program_has_its_order(two):
    made = [variable(two, np.float64(0), aggregation="MEAN") for _ in range(3)]
    seen = {}

    def use(thread):
        own, reads = made[thread], []
        for number in range(40):
            two.run(lambda number=number: own.assign(own * 2 + number))
            if number % 7 == 0:
                own.assign_add(1)
            if number % 10 == 0:
                reads.append((own.read_value(), two.reduce("SUM", two.run(lambda: own * 1.0), axis=None)))
        seen[thread] = [(float(value), float(total)) for value, total in reads]

    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected, read = 0.0, []
    for number in range(40):
        expected = expected * 2 + number + (number % 7 == 0)
        if number % 10 == 0:
            read.append((expected, 2 * expected))
    assert seen == dict.fromkeys(range(3), read)
    assert [float(each) for each in made] == [expected] * 3


def test_training_with_variables(two):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    weights = variable(two, np.zeros(3), aggregation="MEAN")
    batches = two.distribute_dataset(daskdist.Dataset.from_tensor_slices((x, y)).batch(16).repeat(12))

    def step(batch):
        inputs, wanted = batch
        gradient = 2 * inputs.T @ (inputs @ weights - wanted) / len(wanted)
        weights.assign_sub(0.3 * gradient)

    for batch in batches:
        two.run(step, args=(batch,))
    assert np.allclose(weights, [1, -2, 0.5], atol=1e-2)


# --- initial values ---


def test_initial_values_from_a_function_are_equal_on_all_replicas(strategy):
    made = variable(strategy, lambda: np.random.default_rng().normal(size=4), dtype=np.float32)
    found = copies(strategy, made)
    assert made.dtype == np.float32
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == 4


class Counter:
    """An object that is no array."""

    def __init__(self, start=0):
        self.number = start

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_each_replica_makes_and_keeps_its_own_object(strategy):
    made = variable(strategy, lambda: Counter(10 * daskdist.get_replica_context().replica_id_in_sync_group))

    def step():
        made.read_value().number += 1
        return made.read_value().number

    for _ in range(4):
        found = strategy.run(step)
    size = strategy.num_replicas_in_sync
    assert [int(each) for each in strategy.local_results(found)] == [10 * k + 4 for k in range(size)]
    assert [each.number for each in strategy.local_results(made)] == [10 * k + 4 for k in range(size)]
    strategy.run(lambda: made.assign(Counter(3)))
    assert [each.number for each in strategy.local_results(made.read_value())] == [3] * size
    with pytest.raises(errors.ArgumentError, match="Counter, not an array"):
        strategy.local_results(strategy.run(lambda: made.assign_add(1)))
    with pytest.raises(AttributeError, match="is an object"):
        made.dtype  # noqa: B018


def test_an_object_that_is_a_nest_is_kept_as_it_is(two):
    made = variable(two, list)
    for number in range(3):
        two.run(lambda number=number: made.read_value().append(number))
    assert two.local_results(made) == ([0, 1, 2], [0, 1, 2])


# --- saved and restored ---


def test_its_state_is_saved_and_loaded(strategy):
    size = strategy.num_replicas_in_sync
    made = [
        variable(strategy, np.arange(3.0), aggregation="MEAN"),
        variable(strategy, {"w": np.ones(2, np.float32), "b": 0}, aggregation="SUM"),
        variable(strategy, 0.0, synchronization="ON_READ", aggregation="SUM"),
        variable(strategy, 0.0, synchronization="ON_READ"),
        variable(strategy, Counter),
        variable(strategy, Counter, synchronization="ON_READ"),
    ]

    def step(x):
        for each in made[2:4]:
            each.assign_add(x + 1)
        for each in made[4:]:
            each.read_value().number += int(x) + 1

    strategy.run(step, args=(numbers(strategy),))
    states = [pickle.loads(pickle.dumps(each.state_dict())) for each in made]
    total = size * (size + 1) / 2
    assert states[0]["value"].tolist() == [0, 1, 2]
    assert (states[1]["value"]["w"].dtype, int(states[1]["value"]["b"])) == (np.float32, 0)
    assert states[2] == {"value": total}
    assert states[3] == {"replicas": [k + 1 for k in range(size)]}
    assert states[4] == {"value": {"number": 1}}
    assert states[5] == {"replicas": [{"number": k + 1} for k in range(size)]}
    made[0].assign(np.zeros(3))
    made[1].assign({"w": np.zeros(2, np.float32), "b": 1})
    strategy.run(step, args=(numbers(strategy),))
    for each, state in zip(made, states, strict=True):
        each.load_state_dict(state)
    assert made[0].numpy().tolist() == [0, 1, 2]
    assert made[1].numpy()["w"].tolist() == [1, 1]
    assert copies(strategy, made[2]) == [total / size] * size
    assert copies(strategy, made[3]) == [k + 1 for k in range(size)]
    assert [each.number for each in strategy.local_results(made[4])] == [1] * size
    assert [each.number for each in strategy.local_results(made[5])] == [k + 1 for k in range(size)]


def test_a_state_that_does_not_fit_is_refused(two):
    made = variable(two, np.zeros(3), name="weights")
    with pytest.raises(errors.ArgumentError, match=r"\(2,\)"):
        made.load_state_dict({"value": np.zeros(2)})
    with pytest.raises(errors.ArgumentError, match="weights: the state has no 'value'"):
        made.load_state_dict({"replicas": []})
    apart = variable(two, 0.0, synchronization="ON_READ", name="apart")
    with pytest.raises(errors.ArgumentError, match="apart: each replica has its own value; the state has 3"):
        apart.load_state_dict({"replicas": [1.0, 2.0, 3.0]})
    locked = variable(two, object, name="thing")
    with pytest.raises(errors.ArgumentError, match="thing: object cannot be saved"):
        locked.state_dict()


# --- bad input ---


def test_a_variable_without_a_scope_belongs_to_the_default_strategy(tmp_path):
    epoch, weights = Variable(np.int64(0), name="epoch"), Variable(lambda: np.ones(3))
    assert int(epoch.assign_add(1)) == int(epoch.numpy()) == 1
    default = daskdist.get_strategy()
    assert int(default.run(lambda: epoch.assign_add(4))) == 5
    assert (weights + epoch).tolist() == [6, 6, 6]
    daskdist.Checkpoint(epoch=epoch).save(tmp_path / "state")
    epoch.assign(0)
    daskdist.Checkpoint(epoch=epoch).restore(tmp_path / "state")
    assert int(epoch) == 5
    with pytest.raises(errors.ArgumentError, match="epoch: used on a replica of another strategy"):
        mirrored(2).run(lambda: epoch.assign_add(1))
    with default.scope():
        assert int(Variable(3) + epoch) == 8


def test_python_numbers_have_the_dtypes_of_tensorflow(two):
    dtypes = {
        "float32": [1.0, [1.0, 2.0], [[1], [2.5]], lambda: 1.5, {"a": 1.0}, (1.0, np.float32(2))],
        "int32": [0, [1, 2], lambda: 7, -(2**31)],
        "int64": [2**31, [1, 2**40], np.int64(3), np.arange(2)],
        "float64": [np.float64(1), np.ones(2), {"a": np.ones(1)}],
        "bool": [True, [True, False]],
    }
    for dtype, values in dtypes.items():
        for value in values:
            made = variable(two, value)
            (part,) = {str(np.asarray(leaf).dtype) for leaf in optree.tree_leaves(two.local_results(made))}
            assert part == dtype, f"{value!r}"
    assert variable(two, 1, dtype=np.float64).dtype == np.float64
    assert variable(two, [1, 2], dtype="int16").dtype == np.int16


def test_an_integer_that_would_change_is_not_assigned(two):
    made = variable(two, 5, name="count")
    for value in (np.int64(2**31), np.uint32(2**31 + 7), np.int64(-(2**40))):
        for assign in (made.assign, made.assign_add, lambda value: two.run(made.assign, (value,))):
            with pytest.raises(errors.ArgumentError, match="does not fit into the variable's int32; create the"):
                two.local_results(assign(value))
    made.assign(np.int64(2**31 - 1))
    assert copies(two, made) == [2**31 - 1] * 2


def test_a_variable_cannot_be_created_on_a_replica(two):
    with pytest.raises(RuntimeError, match=r"created by replica \d, in the function that it runs"):
        two.local_results(two.run(lambda: Variable(0)))


def test_a_variable_cannot_be_used_by_another_strategy(two):
    other = mirrored(2)
    made = variable(other, 0.0, name="weights")
    with pytest.raises(errors.ArgumentError, match="weights belongs to another strategy"):
        two.run(lambda x: x, args=(made,))
    for operation, use in (
        ("reduce", lambda value: two.reduce("SUM", value, axis=None)),
        ("gather", lambda value: two.gather(value, 0)),
        ("local_results", two.local_results),
    ):
        for value in (made, {"part": PerReplica([made, made])}):
            with pytest.raises(errors.ArgumentError, match=f"{operation}: weights belongs to another strategy"):
                use(value)
    with pytest.raises(errors.ArgumentError, match="weights: used on a replica of another strategy"):
        two.local_results(two.run(lambda: made + 1))
    with two.scope(), pytest.raises(errors.ArgumentError, match="weights: used in the scope of another strategy"):
        made.assign(1)
    own = variable(two, 0.0, name="own")
    with pytest.raises(errors.ArgumentError, match="own: used on a replica of another strategy"):
        other.run(lambda: own + 1)


@pytest.mark.cluster
def test_replicas_know_whether_a_variable_is_trainable(on_cluster):
    weights, steps = variable(on_cluster, 0.0), variable(on_cluster, 0, trainable=False)
    known = on_cluster.local_results(on_cluster.run(lambda: (weights.trainable, steps.trainable)))
    assert known == ((True, False),) * on_cluster.num_replicas_in_sync


@pytest.mark.cluster
def test_a_variable_on_a_worker_is_usable_by_replicas_only(on_cluster):
    made = variable(on_cluster, 0.0, name="weights")
    with pytest.raises(errors.ArgumentError, match="weights: used outside of its strategy"):
        on_cluster.client.submit(lambda: float(made), pure=False).result()


@pytest.mark.cluster
def test_a_variable_of_a_closed_strategy_is_an_error(client):
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        made = variable(strategy, 0.0)
        assert float(made) == 0
    with pytest.raises(errors.ClusterError, match="before the strategy or its client is closed"):
        made.numpy()


def test_values_that_do_not_fit_are_refused(two):
    made = variable(two, np.zeros(3, np.int32), aggregation="SUM", name="weights")
    with pytest.raises(
        errors.ArgumentError, match=r"weights.assign: the value has shape \(2,\); the variable has \(3,\)"
    ):
        made.assign(np.zeros(2, np.int32))
    with pytest.raises(errors.ArgumentError, match="dtype float64, but the variable has int32"):
        made.assign(np.zeros(3))
    with pytest.raises(errors.ArgumentError, match=r"weights.assign_add: the value is str"):
        made.assign_add("x")
    with pytest.raises(errors.ArgumentError, match=r"weights.assign: the value has shape \(\)"):
        two.local_results(two.run(lambda: made.assign(np.int32(1))))


def test_a_python_number_goes_wherever_it_fits(two):
    made = variable(two, np.uint8(9), name="small")
    two.run(lambda: made.assign_sub(4))
    made.assign_add(200)
    assert copies(two, made) == [205, 205]
    for number in (-1, 256):
        with pytest.raises(errors.ArgumentError, match=f"{number} does not fit into the variable's uint8"):
            made.assign(number)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "MAX"}, "'MAX' is not a VariableAggregation; give one of NONE, SUM, MEAN, ONLY_FIRST_REPLICA"),
        ({"synchronization": "NONE"}, "'NONE' is not a VariableSynchronization; give one of AUTO, ON_WRITE, ON_READ"),
        ({"initial_value": 1, "aggregation": "MEAN"}, "aggregation MEAN of int32 would not be a whole number"),
        ({"initial_value": "x"}, "initial_value is str; give arrays and numbers"),
        ({"initial_value": Counter()}, "initial_value is Counter; give arrays and numbers"),
        ({"initial_value": Counter, "aggregation": "SUM"}, "aggregation SUM is for arrays, and the value is Counter"),
    ],
)
def test_invalid_options_of_variables(options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        variable(mirrored(2), **{"initial_value": 0.0, **options})


def test_names_of_enumerations_are_taken_in_any_case():
    made = variable(mirrored(2), 0.0, aggregation="sum", synchronization=VariableSynchronization.ON_READ)
    assert made.aggregation is VariableAggregation.SUM
    assert "ON_READ, SUM" in repr(made)


def test_an_error_of_a_function_is_raised(two):
    def make():
        raise ValueError("no seed")

    with pytest.raises(ValueError, match="no seed"):
        variable(two, make)
    assert float(variable(two, partial(float, 2))) == 2


def test_a_variable_is_usable_after_a_step_that_raises(two):
    made = variable(two, 0.0, aggregation="SUM")

    def step(x, fails):
        if fails:
            raise ValueError("not today")
        return made.assign_add(x + 1)

    two.run(step, args=(numbers(two), False))
    with pytest.raises(ValueError, match="not today"):
        two.local_results(two.run(step, args=(numbers(two), True)))
    two.run(step, args=(numbers(two), False))
    assert float(made) == 6


def test_only_some_replicas_assign(two):
    made = variable(two, 0.0, aggregation="SUM", name="total")

    def step():
        if daskdist.get_replica_context().replica_id_in_sync_group == 0:
            made.assign_add(np.float64(1))

    with pytest.raises(errors.CollectiveError, match="is called by some replicas only: replica 1 has ended"):
        two.local_results(two.run(step))
    assert float(made) == 0


# --- on a device ---


def test_variables_of_devices_are_arrays_of_the_device(monkeypatch):
    strict = pytest.importorskip("array_api_strict")
    monkeypatch.setitem(devices.KINDS, "STRICT", ("strict_device:StrictDevice", "array_api_strict"))
    strategy = daskdist.MirroredStrategy(["STRICT:0", "STRICT:1"])
    made = [
        variable(strategy, np.arange(3, dtype=np.float32), aggregation="SUM"),
        variable(strategy, lambda: {"w": strict.ones(2), "b": 0.0}, aggregation="MEAN"),
        variable(strategy, np.zeros(2), synchronization="ON_READ", aggregation="SUM"),
    ]
    kinds = []

    def step(x):
        first, nest, own = made
        kinds.append([type(first.read_value()), type(nest.read_value()["w"]), type(own.read_value())])
        first.assign_add(strict.full(3, float(x), dtype=strict.float32))
        nest.assign({"w": first.read_value()[:2] * 2.0, "b": np.float64(x)})
        own.assign_sub(np.ones(2))
        return daskdist.get_replica_context().devices

    found = strategy.run(step, args=(PerReplica([1.0, 2.0]),))
    assert strategy.local_results(found) == (("STRICT:0",), ("STRICT:1",))
    assert kinds == [[type(strict.ones(1))] * 3] * 2
    assert made[0].numpy().tolist() == [3, 4, 5]
    assert type(made[0].numpy()) is np.ndarray
    assert made[1].numpy()["w"].tolist() == [6, 8]
    assert float(made[1].numpy()["b"]) == 1.5
    assert made[2].numpy().tolist() == [-2, -2]
    states = [each.state_dict() for each in made]
    for each, state in zip(made, states, strict=True):
        each.load_state_dict(state)
    made[0].assign_add(np.ones(3, np.float32))
    assert copies(strategy, made[0]) == [[4, 5, 6]] * 2


# --- released values ---


def test_unreferenced_variables_are_freed(strategy):
    def number_of_one_that_goes():
        made = variable(strategy, np.zeros(1000), name="large")
        strategy.run(lambda: made.assign_add(np.ones(1000)))
        assert made.numpy()[0] == 1
        return variable_number(made)

    number = number_of_one_that_goes()
    gc.collect()
    variable(strategy, 0.0)

    def kept():
        return int(number in store_of(daskdist.get_replica_context())._states)

    deadline = time.monotonic() + 20
    while any(map(int, strategy.local_results(strategy.run(kept)))):
        assert time.monotonic() < deadline
        gc.collect()
        variable(strategy, 0.0)


class Model:
    """An object with a variable, and a method that uses it."""

    def __init__(self, made):
        self.weights = made

    def step(self):
        return self.weights[0]


@pytest.mark.cluster
def test_an_object_is_freed_after_a_call_of_its_method(on_cluster):
    def made_and_called():
        model = Model(variable(on_cluster, np.zeros(3)))
        assert on_cluster.local_results(on_cluster.run(model.step)) == (0, 0)
        return weakref.ref(model)

    models = [made_and_called() for _ in range(4)]
    gc.collect()
    assert [model() for model in models] == [None] * 4


def test_refused_values_are_freed(two):
    def kept():
        states = store_of(daskdist.get_replica_context())._states
        return sum(Refused.__name__ in str(each) for each in states.values())

    with pytest.raises(errors.ArgumentError, match="aggregation SUM is for arrays"):
        variable(two, Refused, aggregation="SUM")
    deadline = time.monotonic() + 20
    while any(map(int, two.local_results(two.run(kept)))):
        assert time.monotonic() < deadline
        gc.collect()
        variable(two, 0.0)


class Refused:
    """An object that no other test creates."""


def test_many_steps_with_a_variable_do_not_make_a_chain_without_end(two):
    made = variable(two, 0.0, aggregation="SUM")
    one = np.float64(1)
    for _ in range(600):
        two.run(lambda: made.assign_add(one))
    assert float(made) == 1200
