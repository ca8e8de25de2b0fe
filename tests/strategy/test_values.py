"""Per-replica values, and asynchronous values that are used like the numbers and arrays that they will be."""

from __future__ import annotations

import copy
import math
import operator
import threading

import dask
import numpy as np
import optree
import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, PerReplica, TensorSpec, errors
from daskdist.strategy.values.async_value import AsyncValue

pytestmark = pytest.mark.cluster


@pytest.fixture
def reduced(on_cluster):
    """Return an asynchronous value of a number or array, made by a reduction over two replicas."""

    def make(value):
        actual = on_cluster.reduce("MEAN", PerReplica((value, value)), axis=None)
        assert isinstance(actual, AsyncValue)
        return actual

    return make


# --- arithmetic ---


@pytest.mark.parametrize(
    "operation",
    [
        lambda v: v + 1,
        lambda v: 1 + v,
        lambda v: v - 2.5,
        lambda v: 2.5 - v,
        lambda v: v * v,
        lambda v: v / 4,
        lambda v: 4 / v,
        lambda v: v // 2,
        lambda v: v % 2,
        lambda v: v**2,
        lambda v: 2**v,
        lambda v: -v,
        lambda v: abs(v - 100),
        lambda v: v + np.float32(1),
        lambda v: np.float64(3) * v,
        lambda v: np.arange(3) + v,
        lambda v: v * np.arange(3),
        lambda v: np.sqrt(v),
        lambda v: np.exp(-v) + np.maximum(v, 2),
        lambda v: np.where(v > 1, v, 0),
        lambda v: np.stack([v, v]),
        lambda v: np.mean([v, v + 1]),
        lambda v: v < 3,
        lambda v: v >= 2.5,
        lambda v: v == 2.5,
        lambda v: v != 2.5,
        lambda v: v @ v if np.ndim(v) else v,
        lambda v: divmod(v, 2)[1],
    ],
)
@pytest.mark.parametrize("value", [np.float64(2.5), np.array([1.0, 2.5, 7.0])], ids=["number", "array"])
def test_arithmetic_equals_that_of_the_value(reduced, operation, value):
    expected = operation(value)
    actual = operation(reduced(value))
    np.testing.assert_array_equal(np.asarray(actual), expected)
    assert np.asarray(actual).dtype == np.asarray(expected).dtype


@pytest.mark.parametrize("use", [float, int, bool, math.sqrt, round, np.asarray, np.ndim, np.shape, str, repr])
def test_a_number_is_waited_for(reduced, use):
    np.testing.assert_array_equal(use(reduced(np.float64(2.5))), use(np.float64(2.5)))


@pytest.mark.parametrize(
    "use",
    [
        len,
        list,
        lambda v: v[1],
        lambda v: v[::-1],
        lambda v: v[v > 1],
        lambda v: v.shape,
        lambda v: v.dtype,
        lambda v: v.ndim,
        lambda v: np.sum(v),
        lambda v: v.sum(),
        lambda v: v.mean(axis=0),
        lambda v: v.astype(int),
        lambda v: v.reshape(3, 1),
        lambda v: v.tolist(),
        lambda v: v.T,
        lambda v: np.concatenate([v, v]),
        lambda v: np.linalg.norm(v),
        lambda v: 2.5 in v,
        repr,
    ],
)
def test_an_asynchronous_array_is_used_like_its_value(reduced, use):
    value = np.array([1.0, 2.5, 7.0])
    np.testing.assert_array_equal(use(reduced(value)), use(value))


@pytest.mark.parametrize(("spec", "text"), [("", "2.5"), (".4f", "2.5000"), ("8.2e", "2.50e+00"), (">6", "   2.5")])
def test_format(reduced, spec, text):
    assert format(reduced(np.float64(2.5)), spec) == text
    loss = reduced(np.float64(2.5))
    assert f"{loss:.2f}" == "2.50"
    assert "%.1f" % loss == "2.5"  # noqa: UP031


def test_a_total_over_many_steps(on_cluster):
    total = 0.0
    for k in range(80):
        total += on_cluster.reduce("SUM", on_cluster.run(lambda x: x + 0.5, args=(k,)), axis=None)
    assert isinstance(total, AsyncValue)
    assert float(total / 80) == sum(2 * (k + 0.5) for k in range(80)) / 80


def test_an_array_is_added_to_in_place(reduced):
    totals = same = np.zeros(3)
    totals += reduced(np.array([1.0, 2.0, 3.0]))
    totals *= reduced(np.float64(2))
    np.testing.assert_array_equal(totals, [2, 4, 6])
    assert totals is same


def test_an_asynchronous_array_can_be_a_mask(reduced):
    v = reduced(np.array([1.0, 2.0, 3.0]))
    assert np.add(v, 1, where=v > 1, out=np.zeros(3)).tolist() == [0, 3, 4]
    assert np.add(np.ones(3), 1, where=v > 2, out=np.zeros(3)).tolist() == [0, 0, 2]


def test_an_asynchronous_value_can_be_assigned_to_items(reduced):
    losses = np.zeros(2)
    losses[1] = reduced(np.float64(2.5))
    losses[:1] = reduced(np.array([1.5]))
    np.testing.assert_array_equal(losses, [1.5, 2.5])


def test_arguments_are_taken_as_they_are_at_the_time(reduced):
    weights = np.zeros(3)
    moved = weights - reduced(np.ones(3))
    weights += 100
    np.testing.assert_array_equal(moved, [-1, -1, -1])


def test_arguments_have_their_values_at_the_time_of_run(on_cluster):
    weights = np.zeros(1000)
    seen = []
    for _ in range(20):
        seen.append((weights[0], on_cluster.run(np.max, args=(weights,))))
        weights += 1
    for expected, actual in seen:
        assert [float(value) for value in on_cluster.local_results(actual)] == [expected] * 2


def test_copies_are_independent(reduced):
    value = reduced(np.ones(3))
    mine = np.array(value)
    mine += 1
    np.testing.assert_array_equal(value, np.ones(3))
    np.testing.assert_array_equal(np.asarray(copy.deepcopy(value)), np.ones(3))


def test_equality_is_elementwise_and_so_there_is_no_hash(reduced):
    with pytest.raises(TypeError):
        hash(reduced(np.float64(1)))
    assert bool((reduced(np.arange(3)) == np.arange(3)).result().all())


def test_an_asynchronous_integer_is_an_index(reduced, on_cluster):
    number = on_cluster.reduce("SUM", PerReplica((np.int64(1), np.int64(1))), axis=None)
    assert operator.index(number) == 2
    assert list(range(number)) == [0, 1]
    assert "abc"[number] == "c"


def test_an_error_is_raised_at_each_read(on_cluster):
    broken = on_cluster.reduce("SUM", PerReplica((np.ones(2), np.ones(3))), axis=None) + 1
    for look in (float, str, np.asarray, lambda v: f"{v:.2f}"):
        with pytest.raises(daskdist.errors.ArgumentError, match="shapes differ"):
            look(broken)


# --- values of replicas ---


def test_printing_on_a_cluster(on_cluster):
    pieces = PerReplica((np.array([1, 2], np.int32), np.array([3, 4], np.int32)))
    text = "PerReplica:{\n  0: array([1, 2], dtype=int32),\n  1: array([3, 4], dtype=int32)\n}"
    same = on_cluster.run(lambda x: x + 0, args=(pieces,))
    assert repr(same) == str(same) == repr(pieces) == text
    (batch,) = on_cluster.distribute_dataset(daskdist.data.Dataset.from_tensor_slices([1, 2, 3, 4]).batch(4))
    assert str(batch) == text


def test_asynchronous_values_are_arguments(on_cluster):
    mean = on_cluster.reduce("MEAN", PerReplica((1.0, 2.0)), axis=None)
    doubled = on_cluster.run(lambda x, scale: x["a"] * scale, args=({"a": mean + 1},), kwargs={"scale": mean * 2})
    assert on_cluster.local_results(doubled) == (7.5, 7.5)
    again = on_cluster.run(operator.add, args=(doubled, mean))
    assert on_cluster.local_results(again) == (9.0, 9.0)


def test_values_do_not_travel_when_they_are_arguments(on_cluster, client):
    pieces = on_cluster.run(lambda: np.zeros(4))
    # Wait until the values and their tasks exist.
    assert [len(value) for value in on_cluster.local_results(pieces)] == [4, 4]
    on_cluster.run(np.sum, args=(pieces,))

    def tasks():
        return client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.tasks))

    before = tasks()
    total = on_cluster.run(np.sum, args=(pieces,))
    assert all(key.startswith("run-sum") for key in tasks() - before)  # Each replica has its own task.
    assert on_cluster.local_results(total) == (0, 0)


def test_waiting_leaves_the_scheduler_of_others_alone(on_cluster, tmp_path):
    release = tmp_path / "continue"

    def wait_for_it():
        while not release.exists():
            threading.Event().wait(0.01)
        return 1

    waiting = [threading.Thread(target=lambda: on_cluster.run(wait_for_it)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    try:
        for _ in range(20):
            assert dask.config.get("scheduler", None) is None
            assert dask.compute(dask.delayed(abs)(-3)) == (3,)
            threading.Event().wait(0.005)
    finally:
        release.touch()
        for thread in waiting:
            thread.join()
    assert dask.config.get("scheduler", None) is None


def test_values_of_a_closed_connection(client):
    strategy = daskdist.MultiWorkerMirroredStrategy(client.scheduler.address)
    value = strategy.run(lambda: np.ones(2**15))
    strategy.close()
    for look in (
        lambda: repr(value),
        lambda: dask.compute(value),
        lambda: strategy.gather(value, 0),
        lambda: strategy.run(abs, args=(1,)),
    ):
        with pytest.raises(errors.ClusterError, match=r"connection to the cluster is closed.* fetch results"):
            look()


@pytest.mark.parametrize("convert", [np.asarray, np.sum, float, int, complex, "{:.2f}".format])
def test_a_value_per_replica_is_no_array_and_no_number(convert):
    value = PerReplica([np.array([1, 2]), np.array([3, 4])])
    with pytest.raises(TypeError, match=r"one value for each replica.*strategy\.reduce.*strategy\.local_results"):
        convert(value)
    assert f"{value}" == str(value)


# --- arrays that a function fills again ---


def test_rows_of_a_structured_array_that_is_filled_again_keep_their_values(two):
    shared = np.zeros(1, [("a", "i8")])

    def row_of(x):
        shared[0] = (int(x),)
        return shared[0]

    def rows():
        for x in range(5):
            yield row_of(x)

    numbers = Dataset.range(5)
    for dataset in (
        Dataset.from_generator(rows, output_signature=TensorSpec((), shared.dtype)),
        numbers.map(row_of),
        numbers.scan(0, lambda total, x: (total, {"x": row_of(x)})).map(lambda row: row["x"]),
    ):
        assert [int(row["a"]) for row in dataset] == [*range(5)]
        assert np.concatenate([batch["a"] for batch in dataset.batch(3)]).tolist() == [*range(5)]
    results = [two.run(row_of, args=(x,)) for x in range(3)]
    assert [[int(row["a"]) for row in two.local_results(result)] for result in results] == [[0, 0], [1, 1], [2, 2]]
    values = two.distribute_values_from_function(lambda context: row_of(context.replica_id_in_sync_group))
    assert [int(row["a"]) for row in two.local_results(values)] == [0, 1]


@pytest.mark.parametrize("nest", [lambda array: array, lambda array: {"a": array[:], "b": (array, "text")}])
def test_results_keep_their_values_when_a_function_fills_their_array_again(nest, two):
    results = [two.run(Filled(nest), args=(step,)) for step in range(4)]
    for step, result in enumerate(results):
        arrays = [leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, PerReplica)]
        arrays = arrays[: 1 if isinstance(result, PerReplica) else 2]
        assert all([float(array[0]) for array in two.local_results(leaf)] == [step, step + 1] for leaf in arrays)


class Filled:
    """A function that fills one array of its process and returns what is made of it."""

    array = np.zeros(1)

    def __init__(self, nest):
        self.nest = nest

    def __call__(self, step):
        context = daskdist.get_replica_context()
        self.array[:] = step + int(context.replica_id_in_sync_group)
        return self.nest(self.array)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_values_and_merged_values_keep_their_values_when_their_array_is_filled_again(num_replicas):
    array, strategy = np.zeros(1), mirrored(num_replicas)

    def of_replica(context):
        array[:] = context.replica_id_in_sync_group + 1
        return array

    values = strategy.local_results(strategy.experimental_distribute_values_from_function(of_replica))
    assert [float(value[0]) for value in values] == [1, 2][:num_replicas]

    def count(_strategy):
        array[:] += 1
        return array

    def step():
        first, second = [daskdist.get_replica_context().merge_call(count) for _ in range(2)]
        return float(second[0] - first[0])

    assert strategy.local_results(strategy.run(step)) == (1.0,) * num_replicas


def test_an_array_that_all_replicas_return_unchanged_is_one():
    array, strategy = np.arange(3), mirrored(3)
    result = strategy.run(lambda: {"same": array, "new": array + 1})
    assert isinstance(result["same"], np.ndarray)
    assert isinstance(result["new"], PerReplica)
    array[:] = 9
    assert result["same"].tolist() == [0, 1, 2]


def large_and_small(on_cluster):
    """Return an asynchronous array that stays on its worker, and a number that has not been looked at."""
    values = on_cluster.run(lambda: (np.full(2**15, 2.0), 3.0))
    return values[0].values[0], values[1].values[1]


@pytest.mark.cluster
def test_functions_cannot_change_results_of_arithmetic(on_cluster):
    large, _ = large_and_small(on_cluster)
    for value in (large * 2, large[:3]):
        with pytest.raises(ValueError, match="read-only"):
            on_cluster.local_results(on_cluster.run(lambda x: x.fill(-1), args=(value,)))
    assert float(large[0]) == 2


@pytest.mark.cluster
def test_an_operation_in_place_is_refused(on_cluster):
    large, _ = large_and_small(on_cluster)
    with pytest.raises(TypeError):
        np.add.at(large, [0], 1)
    assert float(large[0]) == 2


@pytest.mark.cluster
def test_values_inside_nests_are_looked_at(on_cluster):
    large, small = large_and_small(on_cluster)
    (first, number), (second, _) = on_cluster.local_results(PerReplica([(large, 1), (small, 2)]))
    assert (type(first), number, second) == (np.ndarray, 1, 3)


@pytest.mark.cluster
def test_arithmetic_with_a_variable(on_cluster):
    _, small = large_and_small(on_cluster)
    with on_cluster.scope():
        factor = daskdist.Variable(2.0)
    assert (float(small * factor), float(factor * small), float(small + factor)) == (6, 6, 5)


class WithLock:
    """An operand that cannot be sent to a worker."""

    def __init__(self):
        self.lock = threading.Lock()

    def __radd__(self, other):
        return float(other) + 1


@pytest.mark.cluster
def test_operands_that_do_not_pickle_are_used_here(on_cluster):
    large, small = large_and_small(on_cluster)
    assert float(small + WithLock()) == 4
    assert float(np.frompyfunc(lambda x: x * 2, 1, 1)(large)[0]) == 4
    with pytest.raises(errors.ArgumentError, match="PerReplica"):
        large + PerReplica([1, 2])


@pytest.mark.cluster
def test_arithmetic_with_numbers_that_have_arrived_needs_no_cluster(client):
    with daskdist.MultiWorkerMirroredStrategy(client.scheduler.address) as strategy:
        total = strategy.reduce("SUM", strategy.run(float, args=(3,)), axis=None)
        assert float(total) == 6
    assert float(total * 2) == 12


@pytest.mark.cluster
def test_arithmetic_with_values_of_several_sources(on_cluster):
    large, small = large_and_small(on_cluster)
    kept = large.persist()
    assert [float((one + other)[0]) for one, other in ((kept, large), (large, kept), (kept, small))] == [4, 4, 5]
    other = daskdist.MultiWorkerMirroredStrategy(on_cluster.client)
    with other:
        assert float((large + other.run(lambda: np.full(2**15, 5.0)).values[0])[0]) == 7


@pytest.mark.cluster
def test_user_code_in_arithmetic_does_not_run_in_the_event_loop(on_cluster):
    _, small = large_and_small(on_cluster)
    names = [(small + WithThread()).result() for _ in range(3)]
    assert "MainThread" not in names


class WithThread:
    """An operand whose sum with another is the name of the thread that adds them."""

    def __radd__(self, other):
        return threading.current_thread().name


@pytest.mark.cluster
def test_the_error_of_an_operation_that_nobody_reads_is_not_raised_elsewhere(on_cluster):
    large, _ = large_and_small(on_cluster)
    wrong = large[2**20]
    on_cluster.local_results(on_cluster.run(abs, args=(1,)))
    del wrong
    for _ in range(3):
        on_cluster.local_results(on_cluster.run(abs, args=(1,)))
    with pytest.raises(IndexError):
        float(large[2**20])


@pytest.mark.cluster
def test_arithmetic_with_a_value_of_a_closed_strategy_that_was_read(on_cluster, client):
    _, small = large_and_small(on_cluster)
    large, _ = large_and_small(on_cluster)
    with daskdist.MultiWorkerMirroredStrategy(client.scheduler.address) as other:
        known = other.reduce("SUM", other.run(float, args=(3,)), axis=None)
        assert float(known) == 6
    assert (float(known + small), float(small + known), float((known + large)[0])) == (9, 9, 8)


@pytest.mark.cluster
def test_an_asynchronous_value_is_no_output(on_cluster):
    large, _ = large_and_small(on_cluster)
    with pytest.raises(TypeError, match="add: out is an asynchronous value"):
        np.add(np.ones(3), 1, out=large)
    counts = np.zeros(3)
    np.add.at(counts, on_cluster.run(lambda: np.array([0, 2, 2])).values[0], 1)
    assert counts.tolist() == [1, 0, 2]
