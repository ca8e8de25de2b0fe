"""Replicas that work together: contexts, all_reduce, all_gather and merge_call, in a process and over workers."""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import threading
import time
import warnings

import dask
import numpy as np
import pytest
from conftest import mirrored, new_cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import daskdist
from daskdist import PerReplica, Reduction, errors
from daskdist.strategy import current

pytestmark = pytest.mark.timeout(120)
# Examples are slow on a busy machine.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("a replica a worker", marks=pytest.mark.cluster),
        pytest.param("more replicas than threads", marks=pytest.mark.cluster),
    ]
)
def strategy(request):
    """Return replicas in this process, on two workers, or four on each of two workers of one thread."""
    if request.param == "embedded":
        yield mirrored(3)
        return
    client = request.getfixturevalue("start_cluster")(2, 1)
    per_worker = 1 if request.param == "a replica a worker" else 4
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=per_worker) as made:
        yield made


def values_of(strategy, make):
    return PerReplica([make(number) for number in range(strategy.num_replicas_in_sync)])


# --- where a function is ---


def test_outside_of_strategies_there_is_one_replica():
    context = daskdist.get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert not daskdist.has_strategy()
    assert not daskdist.in_cross_replica_context()
    assert daskdist.get_strategy() is context.strategy
    assert daskdist.get_strategy().num_replicas_in_sync == 1
    assert context.all_reduce("SUM", 2.0) == 2.0
    assert context.all_gather(np.ones(2), 0).tolist() == [1, 1]
    assert context.merge_call(lambda strategy, x: x + strategy.num_replicas_in_sync, args=(1,)) == 2


@pytest.fixture
def two_devices():
    """Let this process see two devices that are not the host."""
    strict_device = pytest.importorskip(
        "strict_device", reason="array-api-strict is not installed", exc_type=ImportError
    )
    strict_device.register(uuids=("one", "other"))
    current._default.cache_clear()
    yield
    current._default.cache_clear()
    strict_device.unregister()


def test_outside_of_strategies_there_is_one_replica_whatever_devices_there_are(two_devices):
    assert daskdist.MirroredStrategy().num_replicas_in_sync == 2
    strategy, context = daskdist.get_strategy(), daskdist.get_replica_context()
    assert strategy.num_replicas_in_sync == context.num_replicas_in_sync == 1
    assert strategy.extended.worker_devices == context.devices == ("CPU:0",)
    assert strategy.run(lambda x: (x, daskdist.get_replica_context().devices), args=(3,)) == (3, ("CPU:0",))


def test_in_a_scope_there_is_a_strategy_and_no_replica():
    strategy = mirrored(2)
    with strategy.scope() as entered:
        assert entered is strategy is daskdist.get_strategy()
        assert daskdist.get_replica_context() is None
        assert daskdist.in_cross_replica_context()
        assert daskdist.has_strategy()
        with strategy.scope():
            assert daskdist.get_strategy() is strategy
        assert daskdist.get_strategy() is strategy
    assert not daskdist.has_strategy()


def test_another_strategy_is_refused_in_a_scope():
    with mirrored(2).scope():
        with pytest.raises(RuntimeError, match="scope: a scope of another strategy is open"), mirrored(1).scope():
            pass
        with pytest.raises(RuntimeError, match="run: a scope of another strategy is open"):
            mirrored(1).run(len, args=("a",))


def where():
    context = daskdist.get_replica_context()
    return {
        "number": context.replica_id_in_sync_group,
        "size": context.num_replicas_in_sync,
        "devices": list(context.devices),
        "cross": daskdist.in_cross_replica_context(),
        "has": daskdist.has_strategy(),
        "one": context.strategy is daskdist.get_strategy(),
        "workers": len(daskdist.get_strategy().workers),
    }


def test_a_replica_knows_where_it_is(strategy):
    num_replicas = strategy.num_replicas_in_sync
    for number, actual in enumerate(strategy.local_results(strategy.run(where))):
        assert actual == {
            "number": number,
            "size": num_replicas,
            "devices": [strategy.replicas[number].device],
            "cross": False,
            "has": True,
            "one": True,
            "workers": len(strategy.workers),
        }


def test_a_replica_opens_no_scope():
    strategy = mirrored(2)

    def step():
        with strategy.scope():
            pass

    with pytest.raises(RuntimeError, match="scope: called by replica 0"):
        strategy.run(step)


# --- what replicas do together ---


def reduced(x):
    return daskdist.get_replica_context().all_reduce("SUM", x)


def test_all_reduce_gives_all_replicas_the_same(strategy):
    num_replicas = strategy.num_replicas_in_sync
    values = values_of(strategy, lambda k: {"w": np.arange(6.0).reshape(2, 3) * k, "n": k})
    total = sum(range(num_replicas))
    for actual in strategy.local_results(strategy.run(reduced, args=(values,))):
        assert actual["w"].tolist() == (np.arange(6.0).reshape(2, 3) * total).tolist()
        assert actual["n"] == total


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", 3.0),
        ("MEAN", 1.5),
        ("MIN", 1.0),
        ("MAX", 2.0),
        ("PROD", 2.0),
        (np.logaddexp, np.logaddexp(1.0, 2.0)),
        (Reduction(lambda x, axis: x * x, np.add, np.sqrt), np.sqrt(5.0)),
    ],
    ids=["sum", "MEAN", "MIN", "MAX", "PROD", "ufunc", "reduction"],
)
@pytest.mark.cluster
def test_reductions_over_workers(on_cluster, op, expected):
    def step(x):
        return daskdist.get_replica_context().all_reduce(op, x)

    actual = on_cluster.local_results(on_cluster.run(step, args=(PerReplica([1.0, 2.0]),)))
    assert actual == (expected, expected)


@unhurried
@given(st.lists(hnp.arrays(np.float32, (3, 2), elements=st.floats(-1e6, 1e6, width=32)), min_size=2, max_size=5))
def test_all_reduce_gives_the_bits_that_reduce_gives(arrays):
    strategy = mirrored(len(arrays))
    expected = strategy.reduce("SUM", PerReplica(arrays), axis=None)
    for actual in strategy.local_results(strategy.run(reduced, args=(PerReplica(arrays),))):
        assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD", np.logaddexp])
@settings(deadline=None)
@given(data=st.data(), size=st.integers(2, 4))
def test_all_reduce_of_numbers_gives_the_bits_and_types_that_reduce_gives(data, op, size):
    kinds = [
        st.floats(width=32).map(np.float32),
        st.floats(),
        st.floats().map(np.float64),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(-(2**63), 2**63 - 1).map(np.int64),
        st.integers(2**63, 2**64 - 1),
        st.integers(-100, 100).map(np.int8),
        st.booleans(),
    ]
    numbers = data.draw(st.sampled_from(kinds).flatmap(lambda kind: st.lists(kind, min_size=size, max_size=size)))
    if data.draw(st.booleans()):
        numbers = data.draw(st.permutations([*numbers[1:], 1.5]))
    strategy = mirrored(size)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = strategy.reduce(op, PerReplica(numbers), axis=None)
        actual = strategy.run(lambda x: daskdist.get_replica_context().all_reduce(op, x), args=(PerReplica(numbers),))
    for value in actual.values:
        assert type(value) is type(expected)
        # The sign of the NaN that NumPy gives for two NaNs depends on the length of the arrays.
        is_nan = value != value and expected != expected
        assert is_nan or np.asarray(value).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.cluster
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_large_values_are_reduced_in_parts(start_cluster, op):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(3, 1)) as strategy:
        # The length is not a multiple of the number of replicas.
        draws = [np.random.default_rng(k).random((250_001, 2), np.float32) for k in range(3)]

        def step(number):
            large = np.random.default_rng(number).random((250_001, 2), np.float32)
            return daskdist.get_replica_context().all_reduce(op, {"large": large, "small": number})

        results = strategy.local_results(strategy.run(step, args=(PerReplica([0, 1, 2]),)))
        expected = strategy.local_results(strategy.reduce(op, PerReplica(draws), axis=None))[0]
        for actual in results:
            assert actual["large"].tobytes() == np.asarray(expected).tobytes()
            assert actual["small"] == {"SUM": 3, "MEAN": 1, "MAX": 2}[op]


def test_changes_of_one_replica_do_not_affect_others(strategy):
    def step(x):
        actual = daskdist.get_replica_context().all_reduce("SUM", x)
        actual += daskdist.get_replica_context().replica_id_in_sync_group
        daskdist.get_replica_context().all_reduce("SUM", 0)
        return actual

    num_replicas = strategy.num_replicas_in_sync
    actual = strategy.local_results(strategy.run(step, args=(np.ones(3),)))
    assert [result.tolist() for result in actual] == [[num_replicas + k] * 3 for k in range(num_replicas)]


def test_changes_to_results_of_merge_call_do_not_affect_others(strategy):
    def step():
        context = daskdist.get_replica_context()
        actual = context.merge_call(lambda strategy: {"x": np.ones(3)})
        actual["x"] += context.replica_id_in_sync_group
        context.all_reduce("SUM", 0)
        return actual["x"]

    actual = strategy.local_results(strategy.run(step))
    assert [result.tolist() for result in actual] == [[1 + k] * 3 for k in range(strategy.num_replicas_in_sync)]


def test_all_gather_puts_rows_together_in_replica_order(strategy):
    def step(x):
        return daskdist.get_replica_context().all_gather({"x": x}, axis=0)

    values = values_of(strategy, lambda k: np.full((k % 3, 2), k))
    expected = [[k, k] for k in range(strategy.num_replicas_in_sync) for _ in range(k % 3)]
    for actual in strategy.local_results(strategy.run(step, args=(values,))):
        assert actual["x"].tolist() == expected


def test_merge_call_is_called_once(strategy):
    def merged(strategy, x, shared, scale):
        assert daskdist.in_cross_replica_context()
        assert daskdist.get_replica_context() is None
        total = strategy.reduce("SUM", x, axis=None) * strategy.reduce("MEAN", scale, axis=None)
        own = PerReplica([k * 10 for k in range(strategy.num_replicas_in_sync)])
        return total, own, os.getpid(), shared

    def step(x):
        return daskdist.get_replica_context().merge_call(merged, args=(x, "all"), kwargs={"scale": 2})

    num_replicas = strategy.num_replicas_in_sync
    actual = strategy.local_results(strategy.run(step, args=(values_of(strategy, float),)))
    assert [part[3] for part in actual] == ["all"] * num_replicas
    assert [item[0] for item in actual] == [2.0 * sum(range(num_replicas))] * num_replicas
    assert [value[1] for value in actual] == [k * 10 for k in range(num_replicas)]
    assert len({result[2] for result in actual}) == 1


# --- variables among what replicas give ---


def own_variable(strategy, **options):
    """Return a variable whose value on replica k is [k, k]."""
    with strategy.scope():
        var = daskdist.Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM", **options)
    strategy.run(lambda x: var.assign(np.full(2, x)), args=(values_of(strategy, float),))
    return var


def test_of_a_variable_each_replica_reduces_its_own_copy(strategy):
    made = own_variable(strategy)
    size = strategy.num_replicas_in_sync
    total = [sum(range(size))] * 2

    def step():
        context = daskdist.get_replica_context()
        return context.all_reduce("SUM", made), context.all_reduce("MAX", {"own": made, "one": 1})

    for one, nest in strategy.local_results(strategy.run(step)):
        assert one.tolist() == total
        assert (nest["own"].tolist(), nest["one"]) == ([size - 1] * 2, 1)


def test_of_a_variable_each_replica_gathers_its_own_copy(strategy):
    made = own_variable(strategy)
    expected = [k for k in range(strategy.num_replicas_in_sync) for _ in range(2)]
    actual = strategy.run(lambda: daskdist.get_replica_context().all_gather(made, axis=0))
    assert [value.tolist() for value in strategy.local_results(actual)] == [expected] * strategy.num_replicas_in_sync


def test_a_variable_that_is_a_nest_is_reduced_as_one(strategy):
    with strategy.scope():
        var = daskdist.Variable({"w": np.ones(2), "b": 0.0}, synchronization="ON_READ")
    strategy.run(lambda x: var.assign_add({"w": np.full(2, x), "b": x}), args=(values_of(strategy, float),))
    size = strategy.num_replicas_in_sync
    for actual in strategy.local_results(strategy.run(reduced, args=(var,))):
        assert actual["w"].tolist() == [size + sum(range(size))] * 2
        assert actual["b"] == sum(range(size))


def test_merge_call_gets_all_copies_of_a_variable(strategy):
    made = own_variable(strategy)

    def merged(strategy, own, x):
        assert type(own) is daskdist.Variable
        copies = [value.tolist() for value in strategy.local_results(own)]
        return {"copies": copies, "sum": strategy.reduce("SUM", [own, x], axis=None)}

    def step(x):
        return daskdist.get_replica_context().merge_call(merged, args=(made,), kwargs={"x": x})

    size = strategy.num_replicas_in_sync
    for actual in strategy.local_results(strategy.run(step, args=(values_of(strategy, float),))):
        assert actual["copies"] == [[k, k] for k in range(size)]
        assert actual["sum"][0].tolist() == [sum(range(size))] * 2
        assert actual["sum"][1] == sum(range(size))


def test_merge_call_with_variables_of_some_replicas_and_values_of_others(strategy):
    made = own_variable(strategy)

    def merged(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    def step(x):
        return daskdist.get_replica_context().merge_call(merged, args=(made if not x.any() else x,))

    size = strategy.num_replicas_in_sync
    values = PerReplica([np.full(2, float(k)) for k in range(size)]) if size > 1 else np.zeros(2)
    for actual in strategy.local_results(strategy.run(step, args=(values,))):
        assert actual.tolist() == [sum(range(size))] * 2


def test_in_the_program_a_variable_for_each_replica_is_that_ones_copy(strategy):
    made = own_variable(strategy)
    size = strategy.num_replicas_in_sync
    each = PerReplica([made] * size)
    assert np.asarray(strategy.reduce("SUM", each, axis=None)).tolist() == [sum(range(size))] * 2
    assert np.asarray(strategy.gather({"own": each}, 0)["own"]).tolist() == [k for k in range(size) for _ in range(2)]
    sent = strategy.extended.broadcast_to(made, None)
    assert [np.asarray(part).tolist() for part in strategy.local_results(sent)] == [[sum(range(size))] * 2] * size


# --- many calls ---


def test_many_collectives_follow_one_another(strategy):
    def step(x):
        context = daskdist.get_replica_context()
        for number in range(20):
            x = context.all_reduce("MEAN", x + number)
            (total,) = context.all_gather(np.array([x]), axis=0).sum(keepdims=True)
        return x, total

    num_replicas = strategy.num_replicas_in_sync
    for x, total in strategy.local_results(strategy.run(step, args=(values_of(strategy, float),))):
        assert x == (num_replicas - 1) / 2 + sum(range(20))
        assert total == x * num_replicas


def test_steps_follow_one_another(strategy):
    total = 0.0
    for number in range(12):
        values = values_of(strategy, lambda k, number=number: float(k + number))
        total += strategy.reduce("MEAN", strategy.run(reduced, args=(values,)), axis=None)
    num_replicas = strategy.num_replicas_in_sync
    assert float(total) == sum(sum(range(num_replicas)) + num_replicas * number for number in range(12))


@pytest.mark.cluster
def test_in_a_captured_function(on_cluster):
    @daskdist.function
    def train(x, num_steps):
        for _ in range(num_steps):
            x = on_cluster.run(reduced, args=(x,))
        return x

    float(on_cluster.local_results(train(PerReplica([1.0, 2.0]), 1))[0])
    assert on_cluster.local_results(train(PerReplica([1.0, 2.0]), 10)) == (3.0 * 2**9, 3.0 * 2**9)
    assert train.explain().endswith("train: 10 steps\n  waited nowhere")


# --- what goes wrong ---


def test_different_shapes_are_an_error(strategy):
    values = values_of(strategy, lambda k: np.ones(3 if k else 2))
    with pytest.raises(
        errors.CollectiveError, match=r"all_reduce\(SUM\).*replica 0 gives \(2,\), replica \d gives \(3,"
    ):
        strategy.local_results(strategy.run(reduced, args=(values,)))


def gathered(x, axis):
    return daskdist.get_replica_context().all_gather(x, axis)


@pytest.mark.parametrize(
    ("make", "axis", "message"),
    [
        (
            lambda k: np.ones((k + 1, 4 if k else 3)),
            0,
            r"all_gather\(axis=0\): values of replicas differ in shape: replica 0 gives \(1, 3\), replica 1 gives "
            r"\(2, 4\); they may differ along axis 0 only",
        ),
        (
            lambda k: {"x": np.ones((4 if k else 3, 2))},
            1,
            r"all_gather\(axis=1\): .*: replica 0 gives \(3, 2\), replica 1 gives \(4, 2\); .* along axis 1 only",
        ),
        (
            lambda k: np.ones((2,) * (1 + (k > 0))),
            0,
            r"all_gather\(axis=0\): values of replicas differ in .* shape: replica 0 gives \(2,\), replica \d gives "
            r"\(2, 2\)",
        ),
        (float, 0, r"all_gather\(axis=0\): replica 0 gives .*0.0.*, a scalar, which has no axis 0; give x\[None\]"),
        (lambda k: np.ones(2), 3, r"all_gather\(axis=3\): axis 3 of a value of shape \(2,\), which replica 0 gives; "),
    ],
    ids=["another axis", "in a nest", "axes", "scalar", "no such axis"],
)
def test_incompatible_shapes_are_an_error(strategy, make, axis, message):
    with pytest.raises((errors.ArgumentError, errors.CollectiveError), match=message):
        strategy.local_results(strategy.run(gathered, args=(values_of(strategy, make), axis)))
    actual = strategy.local_results(strategy.run(gathered, args=(np.ones(1), 0)))
    assert [len(result) for result in actual] == [strategy.num_replicas_in_sync] * strategy.num_replicas_in_sync


def test_calls_in_different_orders_are_an_error(strategy):
    def step():
        context = daskdist.get_replica_context()
        context.all_reduce("SUM", 1)
        if context.replica_id_in_sync_group:
            context.all_gather(np.ones(1), axis=0)
        context.all_reduce("MAX", 1)

    words = (
        r"replica 0 calls all_reduce\(SUM\), all_reduce\(MAX\); "
        r"replica \d calls all_reduce\(SUM\), all_gather\(axis=0\)"
    )
    with pytest.raises(errors.CollectiveError, match=words):
        strategy.local_results(strategy.run(step))


def test_a_replica_that_raises_releases_the_others(strategy):
    last = strategy.num_replicas_in_sync - 1

    def step():
        context = daskdist.get_replica_context()
        context.all_reduce("SUM", 1)
        if context.replica_id_in_sync_group == last:
            raise KeyError("no such thing")
        try:
            return context.all_reduce("SUM", 1)
        except errors.CollectiveError as error:
            return str(error)

    begin = time.monotonic()
    with pytest.raises(KeyError, match="no such thing"):
        strategy.local_results(strategy.run(step))
    assert time.monotonic() - begin < 25


def test_a_replica_that_raises_before_anybody_waits_releases_the_others(strategy, tmp_path):
    last = strategy.num_replicas_in_sync - 1
    folder = str(tmp_path)

    def step():
        context = daskdist.get_replica_context()
        number = context.replica_id_in_sync_group
        if number == last:
            open(f"{folder}/raised", "w").close()
            raise KeyError("no such thing")
        # Wait up to a second, so that the other replica raises before this one calls.
        for _ in range(20 if number == last - 1 else 0):
            if os.path.exists(f"{folder}/raised"):
                break
            time.sleep(0.05)
        return context.all_reduce("SUM", 1)

    begin = time.monotonic()
    with pytest.raises((KeyError, errors.CollectiveError), match="no such thing"):
        strategy.local_results(strategy.run(step))
    for value in () if strategy.workers == (None,) else range(last):
        with pytest.raises((KeyError, errors.CollectiveError), match="no such thing"):
            strategy.run(step).values[value].result()
        break
    assert time.monotonic() - begin < 25


@pytest.mark.cluster
def test_errors_of_other_replicas_name_the_one_that_raised(on_cluster):
    def step():
        context = daskdist.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise KeyError("no such thing")
        return context.all_reduce("SUM", 1)

    def told():
        try:
            return step()
        except errors.CollectiveError as error:
            return str(error)
        except KeyError:
            return ""

    actual = on_cluster.local_results(on_cluster.run(told))
    assert "by some replicas only: replica 1 raised" in actual[0] or "has ended" in actual[0]
    # The program gets the replica's own error, rather than the error of another replica that waits for its call.
    with pytest.raises(KeyError, match="no such thing"):
        on_cluster.run(step).values[0].result()


def test_a_replica_without_a_call_is_named(strategy):
    def step():
        context = daskdist.get_replica_context()
        return context.replica_id_in_sync_group and context.all_reduce("SUM", 1)

    begin = time.monotonic()
    with pytest.raises(errors.CollectiveError, match=r"is called by some replicas only: replica 0 has ended"):
        strategy.local_results(strategy.run(step))
    assert time.monotonic() - begin < 25


def test_a_replica_that_ends_early_is_named(strategy):
    def step():
        context = daskdist.get_replica_context()
        context.all_reduce("SUM", 1)
        return context.replica_id_in_sync_group or context.all_reduce("SUM", 1)

    begin = time.monotonic()
    with pytest.raises(
        errors.CollectiveError, match=r"all_reduce\(SUM\) is called by some replicas only: replica \d has"
    ):
        strategy.local_results(strategy.run(step))
    assert time.monotonic() - begin < 25


@pytest.mark.cluster
def test_timeout_for_a_replica_that_never_calls(on_cluster, tmp_path):
    def step(told):
        context = daskdist.get_replica_context()
        if context.replica_id_in_sync_group:
            end = time.monotonic() + 30
            while not told.exists() and time.monotonic() < end:
                time.sleep(0.02)
            return 1
        try:
            with dask.config.set({"daskdist.timeouts.collective": "500 ms"}):
                return context.all_reduce("SUM", 1)
        finally:
            told.touch()

    with pytest.raises(errors.CollectiveError, match=r"replica 1 did not call it within 0.5 s, .*timeouts.collective"):
        on_cluster.local_results(on_cluster.run(step, args=(tmp_path / "told",)))


@pytest.mark.parametrize("given", ["soon", None, -1, "5 potatoes"])
def test_invalid_timeouts_are_refused(given):
    with (
        dask.config.set({"daskdist.timeouts.collective": given}),
        pytest.raises(ValueError, match=r"daskdist.timeouts.collective is .*; give seconds, such as 5 or '5 s'"),
    ):
        mirrored(2).run(lambda: daskdist.get_replica_context().all_reduce("SUM", 1))


def test_embedded_timeout_for_a_replica_that_never_calls():
    strategy = mirrored(2)
    over = threading.Event()

    def step():
        context = daskdist.get_replica_context()
        if context.replica_id_in_sync_group:
            over.wait(30)
            return 0
        try:
            return context.all_reduce("SUM", 1)
        finally:
            over.set()

    with (
        dask.config.set({"daskdist.timeouts.collective": 0.2}),
        pytest.raises(errors.CollectiveError, match=r"all_reduce\(SUM\): replica 1 did not call it within 0.2 s"),
    ):
        strategy.run(step)


def test_embedded_a_setting_made_between_calls_applies_to_the_second():
    strategy = mirrored(2)
    over = threading.Event()

    def step():
        context = daskdist.get_replica_context()
        context.all_reduce("SUM", 1)
        if context.replica_id_in_sync_group:
            over.wait(10)
            return 0
        try:
            with dask.config.set({"daskdist.timeouts.collective": 0.2}):
                return context.all_reduce("SUM", 1)
        finally:
            over.set()

    with pytest.raises(errors.CollectiveError, match=r"replica 1 did not call it within 0.2 s"):
        strategy.run(step)


@pytest.mark.parametrize("hangs", [0, 1])
def test_embedded_the_program_is_told_at_once_of_an_error_while_others_do_not_come_back(hangs, caplog):
    strategy = mirrored(2)
    report = threading.Event()

    class Tell(logging.Handler):
        def emit(self, record):
            report.set()

    def step():
        context = daskdist.get_replica_context()
        context.all_reduce("SUM", 1)
        if context.replica_id_in_sync_group == hangs:
            return report.wait(30)
        return context.all_reduce("SUM", 1)

    handler = Tell()
    logging.getLogger("daskdist").addHandler(handler)
    begin = time.monotonic()
    try:
        with (
            dask.config.set({"daskdist.timeouts.collective": 0.2}),
            pytest.raises(errors.CollectiveError, match=f"replica {hangs} did not call it"),
        ):
            strategy.run(step)
    finally:
        logging.getLogger("daskdist").removeHandler(handler)
    assert time.monotonic() - begin < 25
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        f"replica {1 - hangs} raised CollectiveError: all_reduce(SUM): replica {hangs} did not call it within 0.2 s"
    )
    assert record.getMessage().endswith(f"; waiting for replica {hangs}")


def test_errors_in_merge_call_are_raised_on_all_replicas(strategy):
    def merged(strategy):
        raise ZeroDivisionError("between replicas")

    def step():
        try:
            return daskdist.get_replica_context().merge_call(merged)
        except ZeroDivisionError as error:
            return [str(error), daskdist.get_replica_context().replica_id_in_sync_group]

    actual = strategy.local_results(strategy.run(step))
    assert actual == tuple(["between replicas", k] for k in range(strategy.num_replicas_in_sync))


class Numbered(Exception):  # noqa: N818
    """An error whose message differs from its argument."""

    def __init__(self, number):
        super().__init__(f"number {number}")
        self.number = number


class Told(Exception):  # noqa: N818
    """An error whose message is its argument."""


@pytest.mark.parametrize("kind", [Numbered, Told])
def test_embedded_all_replicas_raise_the_error_of_merge_call(kind):
    def merged(strategy):
        error = kind(7)
        error.more = "more"
        error.add_note("a note")
        raise error from KeyError("a cause")

    def step():
        with pytest.raises(kind) as raised:
            daskdist.get_replica_context().merge_call(merged)
        error = raised.value
        return [str(error), getattr(error, "number", None), error.more, error.__notes__, str(error.__cause__)]

    actual = mirrored(3).run(step)
    expected = ["number 7", 7] if kind is Numbered else ["7", None]
    assert mirrored(3).local_results(actual) == ([*expected, "more", ["a note"], "'a cause'"],) * 3


def between_replicas(strategy):
    return strategy.num_replicas_in_sync


@pytest.mark.parametrize("which", [0, 1])
def test_merge_call_on_one_replica_only_is_an_error(strategy, which):
    def step():
        context = daskdist.get_replica_context()
        return context.replica_id_in_sync_group == which and context.merge_call(between_replicas)

    begin = time.monotonic()
    words = rf"merge_call\(between_replicas\) is called by some replicas only: replica [^{which}] has"
    with pytest.raises(errors.CollectiveError, match=words):
        strategy.local_results(strategy.run(step))
    assert time.monotonic() - begin < 25
    # The strategy can be used afterwards.
    actual = strategy.run(lambda: daskdist.get_replica_context().merge_call(between_replicas))
    assert [int(value) for value in strategy.local_results(actual)] == (
        [strategy.num_replicas_in_sync] * strategy.num_replicas_in_sync
    )


def test_none_is_refused_as_a_value(strategy):
    with pytest.raises(errors.ArgumentError, match="all_reduce: a value is NoneType; give the value of this replica"):
        strategy.local_results(strategy.run(reduced, args=(None,)))


def test_unknown_operations():
    with pytest.raises(errors.ArgumentError, match="'TOTAL' is not a reduction"):
        mirrored(2).run(lambda: daskdist.get_replica_context().all_reduce("TOTAL", 1))
    with pytest.raises(errors.ArgumentError, match="all_gather: axis is -1"):
        mirrored(2).run(lambda: daskdist.get_replica_context().all_gather(np.ones(2), -1))
    with pytest.raises(errors.ArgumentError, match="merge_call: args is a int"):
        mirrored(2).run(lambda: daskdist.get_replica_context().merge_call(print, 1))


@pytest.mark.cluster
def test_a_strategy_is_unusable_on_a_worker_after_merge_call(on_cluster):
    def step():
        kept = []
        daskdist.get_replica_context().merge_call(kept.append)
        # The strategy can be used inside of `merge_call`, but not afterwards.
        for strategy in kept:
            contextvars.Context().run(strategy.run, len, ("a",))
        return 0

    with pytest.raises(RuntimeError, match="run: called on a worker"):
        on_cluster.local_results(on_cluster.run(step))


@pytest.mark.cluster
def test_a_worker_lost_in_a_collective_releases_the_others(tmp_path):
    with new_cluster(3) as client:
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        lost = strategy.workers[1]

        def step(folder):
            context = daskdist.get_replica_context()
            begin = time.monotonic()
            try:
                # Do one collective first; even its message from the lost replica may not have been sent.
                context.all_reduce("SUM", 1)
                if context.replica_id_in_sync_group == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                context.all_reduce("SUM", 1)
            except errors.CollectiveError as error:
                report = f"{time.monotonic() - begin:.1f} {error}"
                part = folder / f"part {context.replica_id_in_sync_group}"
                part.write_text(report)
                part.rename(folder / f"told {context.replica_id_in_sync_group}")
                raise

        with pytest.raises((errors.CollectiveError, errors.ClusterError), match="lost"):
            strategy.local_results(strategy.run(step, args=(tmp_path,)))
        for number in (0, 2):
            end = time.monotonic() + 20
            while not (report := tmp_path / f"told {number}").exists() and time.monotonic() < end:
                time.sleep(0.05)
            seconds, words = report.read_text().split(" ", 1)
            assert float(seconds) < 10
            assert f"lost {lost}, and with it replica 1" in words
        # The remaining replicas continue.
        assert lost not in strategy.workers
        assert strategy.local_results(strategy.run(reduced, args=(1.0,))) == (2.0, 2.0)
        strategy.close()


@pytest.mark.cluster
def test_nothing_is_left_on_workers(on_cluster):
    def desk_sizes(dask_worker):
        from daskdist.strategy.collectives.mailbox import mailbox_of

        mailbox = mailbox_of(dask_worker)
        return len(mailbox._rendezvous), len(mailbox._mail)

    before = on_cluster.client.run(desk_sizes)
    for _ in range(5):
        on_cluster.local_results(on_cluster.run(reduced, args=(1.0,)))
    assert on_cluster.client.run(desk_sizes) == before
