"""`run`: which objects it sends, how often, and how errors of replicas are reported."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pickle
import sys
import threading
import traceback
import weakref

import numpy as np
import optree
import pytest
from conftest import mirrored
from distributed import Client, LocalCluster, get_worker

import daskdist
from daskdist import PerReplica, errors
from daskdist.strategy.calls.local_calls import Calls
from daskdist.strategy.replica.contract import internals_of


def floats(*values):
    return PerReplica([np.array(value, np.float64) for value in values])


def num_tasks(client):
    return client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))


# --- plain values ---


class Counted:
    """An object that counts how often it was unpickled in a process."""

    num_made = 0

    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        type(self).num_made += 1
        self.__dict__.update(state)


def scaled(x, by):
    return x * by.value, type(by).num_made


@pytest.mark.cluster
def test_an_object_is_sent_to_a_worker_once_however_many_steps_use_it(on_cluster):
    given, x = Counted(3.0), floats(1, 2)
    for step in range(12):
        values, counts = on_cluster.run(scaled, args=(x,), kwargs={"by": given})
        assert on_cluster.local_results(values) == (3.0, 6.0)
        # The object is unpickled on the workers at most in the first steps, and not in each step.
        if step == 0:
            first = on_cluster.local_results(counts)
    assert on_cluster.local_results(counts) == first


@pytest.mark.cluster
@pytest.mark.parametrize("length", [20, 2_000, 200_000], ids=["small", "middling", "large"])
def test_an_array_is_sent_once_and_again_when_it_was_changed(on_cluster, client, length):
    def total(weights):
        return weights.sum(), id(weights)

    weights, nothing = np.ones(length), ()
    on_cluster.run(total, args=(weights, *nothing))
    seen = set()
    for _ in range(4):
        sums, places = on_cluster.run(total, args=(weights,))
        assert on_cluster.local_results(sums) == (length, length)
        seen.add(on_cluster.local_results(places))
    if length > 10_000:
        assert len(seen) == 1, "each worker should have one array for all steps"
    weights[0] = 11
    assert on_cluster.local_results(on_cluster.run(total, args=(weights,))[0]) == (length + 10, length + 10)
    frozen = np.full(length, 2.0)
    frozen.flags.writeable = False
    for _ in range(2):
        assert on_cluster.local_results(on_cluster.run(total, args=(frozen,))[0]) == (2 * length, 2 * length)


@pytest.mark.cluster
def test_an_array_that_was_read_only_for_a_while_is_sent_again_when_it_was_changed(on_cluster):
    weights = np.ones(2_000)
    for expected in (2_000, 2_009):
        weights.flags.writeable = False
        assert on_cluster.local_results(on_cluster.run(np.sum, args=(weights,))) == (expected, expected)
        weights.flags.writeable = True
        weights[0] = 10


@pytest.mark.cluster
@pytest.mark.parametrize("length", [2_000, 200_000], ids=["middling", "large"])
def test_a_function_cannot_change_an_array_that_later_steps_are_given(on_cluster, length):
    def first(weights):
        with contextlib.suppress(ValueError):
            weights += 1
        return weights[0]

    weights = np.zeros(length)
    for given in (weights, PerReplica([weights, weights])):
        assert on_cluster.local_results(on_cluster.run(first, args=(given,))) == (0, 0)
        assert on_cluster.local_results(on_cluster.run(first, args=(given,))) == (0, 0)


@pytest.mark.cluster
def test_fields_of_an_array_may_be_in_any_order(on_cluster):
    rows = np.zeros(500, [("a", "i4"), ("b", "f8"), ("c", "i4")])
    rows["c"] = 7
    total = on_cluster.run(lambda part: int(part["c"].sum()), args=(rows[["c", "a"]],))
    assert on_cluster.local_results(total) == (3_500, 3_500)


@pytest.mark.cluster
def test_a_function_redefined_in_each_step_is_sent_once(on_cluster, client):
    x, before = floats(1, 2), None
    for step in range(10):
        assert on_cluster.local_results(on_cluster.run(lambda x: x + 1, args=(x,))) == (2.0, 3.0)
        keys = client.run_on_scheduler(lambda dask_scheduler: {k for k in dask_scheduler.tasks if "value-" in str(k)})
        if step:
            assert keys == before
        before = keys


@pytest.mark.cluster
def test_a_function_sees_values_at_the_time_of_run(on_cluster):
    by = 1

    def scale(x):
        return x * by

    x = floats(1, 2)
    first = on_cluster.run(scale, args=(x,))
    by = 10
    second = on_cluster.run(scale, args=(x,))
    assert on_cluster.local_results(first) == (1.0, 2.0)
    assert on_cluster.local_results(second) == (10.0, 20.0)


def replica():
    return daskdist.get_replica_context().replica_id_in_sync_group


def test_a_result_that_a_later_call_changes_is_reduced_as_it_was(strategy):
    counts = {}

    def count(shape):
        own = counts.setdefault(replica(), np.zeros(shape))
        own += 1
        return own[1:], {"large": own}

    strategy.run(count, args=(2**18,))
    sums = [strategy.reduce("SUM", strategy.run(count, args=(2**18,)), axis=None) for _ in range(8)]
    for number, (part, whole) in enumerate(sums, 2):
        for total in (part, whole["large"]):
            assert (np.min(total), np.max(total)) == (2 * number, 2 * number)


@pytest.mark.cluster
def test_a_function_cannot_change_a_result_that_others_use(on_cluster):
    def change(x):
        x += 1
        return x

    made = on_cluster.run(np.ones, args=(2**18,))
    total = on_cluster.reduce("SUM", made, axis=None)
    with pytest.raises(ValueError, match=r"read-only \(raised by replica 0"):
        on_cluster.local_results(on_cluster.run(change, args=(made,)))
    assert (np.min(total), np.max(total)) == (2, 2)
    assert on_cluster.local_results(made)[0].max() == 1


Named = collections.namedtuple("Named", "value")


@pytest.mark.parametrize("wrap", [lambda nest: nest, Named], ids=["plain", "in a named tuple"])
def test_dicts_keep_the_order_of_their_keys(strategy, wrap):
    def keys(given, **kwargs):
        nest = wrap({"c": replica(), "d": 0})
        return ",".join([*(given[0] if wrap is Named else given), *kwargs]), nest

    for names in ("ba", "ab", "ba"):
        given = dict.fromkeys(names, 0)
        found, nest = strategy.run(keys, args=(wrap(given),), kwargs={"y": 1, "x": given})
        assert set(strategy.local_results(found)) == {f"{names[0]},{names[1]},y,x"}
        assert list(nest[0] if wrap is Named else nest) == ["c", "d"]

    def reversed_keys():
        return wrap({"d": 0, "c": replica()})

    nest = strategy.run(reversed_keys)
    assert list(nest[0] if wrap is Named else nest) == ["d", "c"]


# --- what fails on a replica ---


def deep(x):
    if x > 5:
        raise KeyError("no such pupil")
    return x


def teach(x):
    return deep(x)


def test_an_error_names_replica_worker_and_device_and_has_the_remote_traceback(strategy):
    with pytest.raises(KeyError, match="no such pupil") as caught:
        strategy.local_results(strategy.run(teach, args=(floats(1, 7),)))
    (note,) = caught.value.__notes__
    where = strategy.replicas[1]
    assert "replica 1" in note
    assert where.device in note
    assert "teach" in note
    assert where.worker is None or where.worker in note
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["teach", "deep"]


@pytest.mark.cluster
def test_an_error_is_raised_at_the_first_look_at_any_result_of_its_step(on_cluster):
    on_cluster.run(teach, args=(floats(1, 2),))
    for look in (
        lambda step: repr(step),
        lambda step: float(step.values[0]),
        lambda step: float(step.values[1]),
        on_cluster.local_results,
        lambda step: float(on_cluster.reduce("SUM", step, axis=None)),
        lambda step: on_cluster.local_results(on_cluster.gather(PerReplica([v[None] for v in step.values]), axis=0)),
        lambda step: step.compute(),
    ):
        step = on_cluster.run(teach, args=(floats(1, 7),))
        with pytest.raises(KeyError, match="no such pupil"):
            look(step)


@pytest.mark.cluster
def test_later_steps_fail_with_the_same_cause_and_the_strategy_continues(on_cluster):
    def double(x):
        return 2 * x

    on_cluster.run(teach, args=(floats(1, 2),))
    on_cluster.run(double, args=(floats(1, 2),))
    failing = on_cluster.run(teach, args=(floats(7, 1),))
    later = on_cluster.run(double, args=(on_cluster.run(double, args=(failing,)),))
    total = on_cluster.reduce("MEAN", later, axis=None) + 1
    for value in (later, total):
        with pytest.raises(KeyError, match="no such pupil") as caught:
            on_cluster.local_results(value)
        assert "replica 0" in caught.value.__notes__[0]
    assert on_cluster.local_results(on_cluster.run(teach, args=(floats(3, 4),))) == (3.0, 4.0)


class AwkwardError(Exception):
    """An error that cannot be unpickled, since it takes two arguments and keeps one."""

    def __init__(self, first, second):
        super().__init__(first)


@pytest.mark.cluster
def test_an_error_whose_own_pickle_fails_keeps_its_type(on_cluster):
    def fail():
        raise AwkwardError("one", "two")

    with pytest.raises(AwkwardError, match="one") as caught:
        on_cluster.local_results(on_cluster.run(fail))
    assert "replica 0" in str(caught.value)
    assert caught.traceback[-1].name == "fail"


# --- what does not pickle ---


@pytest.mark.cluster
def test_objects_that_do_not_pickle_are_named(on_cluster):
    lock = threading.Lock()

    class Holder:
        def __init__(self):
            self.inner = {"lock": lock}

    holder = Holder()
    for call, words in (
        (lambda: on_cluster.run(lambda: lock), [r"the function .*<lambda>", "because of lock", "_thread.lock"]),
        (lambda: on_cluster.run(len, args=([1, {"a": lock}],)), [r"args\[0\]\[1\]\['a'\]", "_thread.lock"]),
        (lambda: on_cluster.run(len, kwargs={"x": holder}), [r"kwargs\['x'\]", r"inner\['lock'\]", "_thread.lock"]),
        (lambda: on_cluster.run(lambda: on_cluster), ["because of on_cluster", "a strategy stays in its program"]),
    ):
        with pytest.raises(errors.ArgumentError) as caught:
            call()
        for word in words:
            caught.match(word)
    # Nothing was sent in part, so that the strategy still works.
    assert on_cluster.local_results(on_cluster.run(lambda: 1)) == (1, 1)


@pytest.mark.cluster
def test_a_result_that_does_not_pickle_is_of_use_where_it_is(on_cluster):
    def count():
        return (number for number in range(4))

    made = on_cluster.run(count)
    with pytest.raises(errors.ArgumentError, match=r"does not pickle.*generator"):
        on_cluster.local_results(made)
    assert on_cluster.local_results(on_cluster.run(sum, args=(made,))) == (6, 6)


@pytest.mark.cluster
def test_a_value_that_does_not_pickle_leaves_no_step_half_made(on_cluster, client):
    def leave(value):
        get_worker().plugins["left"] = value
        return value

    with pytest.raises(errors.ArgumentError, match="lock"):
        on_cluster.run(leave, args=(PerReplica([1, threading.Lock()]),))
    on_cluster.local_results(on_cluster.run(lambda: 1))
    left = client.run(lambda dask_worker: dask_worker.plugins.pop("left", None))
    assert list(left.values()) == [None, None]


# --- where run and reduce cannot be used ---


def test_a_replica_cannot_run(strategy):
    def nested():
        return mirrored(2).run(lambda: 1)

    with pytest.raises(RuntimeError, match=r"run: called by replica [01], inside the function"):
        strategy.local_results(strategy.run(nested))
    assert strategy.local_results(strategy.run(lambda: 1)) == (1, 1)


@pytest.mark.cluster
def test_a_value_of_another_cluster_is_refused(on_cluster):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as other,
        Client(other, set_as_default=False) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as stranger,
    ):
        value = on_cluster.run(abs, args=(floats(-1, 2),))
        large = on_cluster.run(lambda: np.zeros(2**15))
        for use in (
            lambda: stranger.run(abs, args=(value,)),
            lambda: stranger.reduce("SUM", value, axis=None),
            lambda: stranger.gather(value, axis=0),
            lambda: stranger.run(abs, args=(large.values[0] + 1,)),
            lambda: mirrored(2).run(abs, args=(value,)),
        ):
            with pytest.raises(errors.ArgumentError, match="belongs to a strategy on another cluster"):
                use()
        on_cluster.local_results(value)
        # A value that was fetched to this program can be used with any strategy.
        assert stranger.local_results(stranger.run(abs, args=(value,))) == (1.0, 2.0)


def test_bad_calls(strategy):
    with pytest.raises(errors.ArgumentError, match="run: int is not a function"):
        strategy.run(3)
    with pytest.raises(errors.ArgumentError, match=r"args is a ndarray; give a tuple"):
        strategy.run(abs, args=np.ones(2))
    with pytest.raises(errors.ArgumentError, match="PerReplica of 3 values was given to a strategy of 2 replicas"):
        strategy.run(abs, args=(floats(1, 2, 3),))


# --- many steps ---


@pytest.mark.cluster
def test_state_carried_from_step_to_step_keeps_no_ancestors(on_cluster, client):
    def grow(state):
        return state + 1

    state = floats(0, 10)
    most = 0
    for step in range(500):
        state = on_cluster.run(grow, args=(state,))
        if step % 50 == 49:
            on_cluster.local_results(state.values[0] + 0)
            most = max(most, num_tasks(client))
    assert on_cluster.local_results(state) == (500.0, 510.0)
    # 500 steps are 1,000 tasks; the scheduler may know those of the last 200 steps, and some more.
    assert most < 700


@pytest.mark.cluster
def test_a_call_is_made_without_its_result_being_kept(on_cluster, client):
    def leave(number):
        get_worker().plugins.setdefault("left", []).append(number)
        return number

    for number in range(5):
        on_cluster.run(leave, args=(number,))
    on_cluster.local_results(on_cluster.run(leave, args=(5,)))
    left = client.run(lambda dask_worker: dask_worker.plugins.pop("left"))
    assert [sorted(each) for each in left.values()] == [list(range(6))] * 2


@pytest.mark.cluster
def test_an_unreferenced_strategy_is_freed(client):
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    strategy.run(np.sum, args=(np.ones(2_000),))
    # The last reference frees the strategy at once. The garbage collector may run in the client's thread, which cannot
    # close the cluster.
    there = weakref.ref(strategy)
    del strategy
    assert there() is None


@pytest.mark.cluster
def test_calls_are_waited_for_at_the_end(client, tmp_path):
    def leave(number):
        (tmp_path / f"{get_worker().name}-{number}").touch()
        return number

    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        for number in range(25):
            strategy.run(leave, args=(number,))
    assert len(list(tmp_path.iterdir())) == 50
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    for number in range(25, 30):
        strategy.run(leave, args=(number,))
    strategy.close()
    assert len(list(tmp_path.iterdir())) == 60


@pytest.mark.cluster
def test_after_an_error_nothing_is_waited_for(client, tmp_path):
    release = tmp_path / "continue"

    def wait_for_it():
        while not release.exists():
            threading.Event().wait(0.01)
        return 1

    def leave():
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            strategy.run(abs, args=(-1,))
            for _ in range(3):
                internals_of(strategy).backend.call(
                    lambda _: wait_for_it(), [], worker=strategy.workers[0], name="wait"
                )
            raise RuntimeError("half way")

    try:
        with pytest.raises(RuntimeError, match="half way"):
            leave()
    finally:
        release.touch()


@pytest.mark.cluster
def test_the_structure_of_results_is_learned_again_when_a_callee_changes(on_cluster):
    variables = {}
    exec("def made(x): return x\ndef step(x): return made(x)", variables)
    assert on_cluster.local_results(on_cluster.run(variables["step"], args=(floats(1, 2),))) == (1.0, 2.0)
    exec("def made(x): return x, -x", variables)
    both = on_cluster.run(variables["step"], args=(floats(1, 2),))
    assert [on_cluster.local_results(each) for each in both] == [(1.0, 2.0), (-1.0, -2.0)]

    def repeated(n):
        def several(x, n=n):
            return [x] * n

        return several

    assert len(on_cluster.run(repeated(2), args=(floats(1, 2),))) == 2
    assert len(on_cluster.run(repeated(3), args=(floats(1, 2),))) == 3


def doubled(nest):
    return [doubled(part) for part in nest] if isinstance(nest, list) else 2 * nest


@pytest.mark.parametrize("is_defined_again", [False, True])
def test_the_structure_of_results_may_depend_on_that_of_the_arguments(strategy, is_defined_again):
    for nest in (floats(1, 2), [floats(1, 2), floats(3, 4)], [], floats(5, 6), [floats(7, 8), [floats(9, 0)]]):
        # A function that is defined again in each step is the same function.
        fn = (lambda nest: doubled(nest)) if is_defined_again else doubled
        found = strategy.run(fn, args=(nest,))
        expected = optree.tree_map(lambda value: tuple(2 * part for part in value.values), nest)
        assert optree.tree_map(strategy.local_results, found) == expected


def test_a_message_of_different_structures_has_the_start_of_long_ones(strategy):
    def returned(k):
        return [(1, 2)] * 1_000 if k else {"a": 1}

    error = r"\{'a': value\} on replica 0 and \[\(value, value\), .*\.\.\. \(2,000 values\) on replica 1; it must"
    with pytest.raises(errors.DaskdistError, match=error) as raised:
        strategy.run(returned, args=(PerReplica([0, 1]),))
    assert len(str(raised.value)) < 600


# The functions belong to no module, and are therefore sent with their code.
SOURCE = """
addend = 10

def with_addend(x):
    return x + addend

def made_with(constant):
    def fn(x, factor=2):
        return with_addend(x) * factor + constant
    return fn
"""


def test_a_function_is_inspected_again_when_a_part_of_it_changes(on_cluster):
    names = {}
    exec(SOURCE, names)
    fn = names["made_with"](1)

    def found():
        return [float(each) for each in on_cluster.run(fn, args=(PerReplica([1.0, 2.0]),)).values]

    assert found() == [23, 25]
    names["addend"] = 20
    assert found() == [43, 45]
    fn.__defaults__ = (3,)
    assert found() == [64, 67]
    fn.__closure__[0].cell_contents = 5
    assert found() == [68, 71]
    names["with_addend"] = abs
    assert found() == [8, 11]
    fn.__code__ = (lambda constant: lambda x, factor=2: x - factor - constant)(0).__code__
    assert found() == [-7, -6]


@pytest.mark.cluster
@pytest.mark.parametrize("where", ["embedded", "cluster", "client"])
def test_calls_after_close_are_refused(client, where):
    other = Client(client.scheduler.address, set_as_default=False)
    strategy = mirrored(2) if where == "embedded" else daskdist.MultiWorkerMirroredStrategy(other)
    with strategy.scope():
        variable = daskdist.Variable(1.0)
    batches = strategy.distribute_dataset(daskdist.Dataset.range(40).batch(4))
    iterator = iter(batches)
    values, total = strategy.run(np.ones, args=(2**17,)), strategy.reduce("SUM", next(iterator), axis=None)
    assert float(np.sum(total)) == 6.0
    other.close() if where == "client" else strategy.close()
    other.close()
    words = "connection to the cluster is closed" if where != "embedded" else "the strategy is closed"

    @daskdist.function
    def step():
        return strategy.run(abs, args=(1,))

    calls = [
        lambda: strategy.run(abs, args=(1,)),
        step,
        lambda: strategy.reduce("SUM", values, axis=None),
        lambda: strategy.gather(values, axis=0),
        lambda: strategy.experimental_make_numpy_dataset(np.ones(4)),
        variable.numpy,
        lambda: variable.assign(2.0),
    ]
    if where != "embedded":
        # In this process, they need no call.
        calls += [
            lambda: strategy.local_results(values),
            lambda: strategy.local_results(next(iterator)),
            lambda: strategy.local_results(list(batches)),
        ]
    for call in calls:
        with pytest.raises(errors.ClusterError, match=words):
            call()
    # A result that was read is in this process.
    assert float(np.sum(total)) == 6.0
    with pytest.raises(TypeError, match="a strategy stays in its program"):
        pickle.dumps(strategy)


@pytest.mark.cluster
def test_a_closed_strategy_says_so_while_its_client_is_open(client):
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        values = strategy.run(np.ones, args=(2**17,))
    for call in (
        lambda: strategy.run(abs, args=(1,)),
        lambda: strategy.local_results(values),
        lambda: strategy.experimental_make_numpy_dataset(np.ones(4)),
    ):
        with pytest.raises(errors.ClusterError, match="the strategy is closed, and its results on the cluster"):
            call()


def test_a_replica_cannot_close_its_strategy(strategy):
    def close():
        daskdist.get_replica_context().strategy.close()

    def leave():
        with daskdist.get_replica_context().strategy:
            raise ValueError("the block ends with an error")

    for function in (close, leave):
        with pytest.raises(RuntimeError, match=r"close: called by replica [01], inside the function"):
            strategy.local_results(strategy.run(function))
    assert strategy.local_results(strategy.run(abs, args=(-1,))) == (1, 1)


# --- one call for each replica ---

# Seconds in which those who watch a call look at it twice.
TWO_LOOKS_S = 0.045


@contextlib.contextmanager
def slow_lines(cls):
    """Let this thread take long for each line of the methods of a class, as on a busy machine."""

    def on_line(frame, event, argument):
        if event == "line":
            threading.Event().wait(TWO_LOOKS_S)
        return on_line

    def on_call(frame, event, argument):
        return on_line if type(frame.f_locals.get("self")) is cls else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def own_number():
    return daskdist.get_replica_context().replica_id_in_sync_group


def rows_of(steps):
    return [own_number(), *(int(row) for batch in steps for row in batch)]


def rows_and_sum(rows):
    return own_number(), *rows, daskdist.get_replica_context().all_reduce("SUM", len(rows))


@pytest.mark.parametrize("fn", [rows_of, rows_and_sum, lambda rows: [own_number(), *rows]])
def test_each_replica_is_called_once_however_slow_the_program_is(fn):
    calls, num_replicas = collections.Counter(), 3

    def counted(given):
        calls[own_number()] += 1
        return fn(given)

    strategy = mirrored(num_replicas)
    rows = np.arange(4 * num_replicas)
    steps = strategy.distribute_dataset(daskdist.Dataset.from_tensor_slices(rows).batch(2 * num_replicas))
    given = steps if fn is rows_of else PerReplica(np.split(rows, num_replicas))
    with slow_lines(Calls):
        values = strategy.local_results(strategy.run(counted, args=(given,)))
    assert calls == dict.fromkeys(range(num_replicas), 1)
    assert [value[0] for value in values] == [*range(num_replicas)]
    expected = 4 * num_replicas + (num_replicas if fn is rows_and_sum else 0)
    assert sum(len(value) - 1 for value in values) == expected


def test_no_replica_is_called_after_the_program_was_interrupted():
    called, interrupted = [], []

    def interrupt(frame, event, argument):
        if frame.f_code is Calls._call.__code__:
            interrupted.append(frame.f_locals["self"])
            sys.settrace(before)
            raise KeyboardInterrupt

    strategy, before = mirrored(3), sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(lambda: called.append(own_number()))
    finally:
        sys.settrace(before)
    # A watcher may have been about to begin the other replicas.
    interrupted[0].begin_rest()
    assert not interrupted[0]._threads
    assert not called


class StopAllError(BaseException):
    """An error that `except Exception` does not catch."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopAllError("all")])
def test_a_loop_that_ends_the_program_raises_its_own_error(error):
    def loop(steps):
        for batch in steps:
            if own_number() == 2 and 4 in batch:
                raise error

    strategy = mirrored(3)
    steps = strategy.distribute_dataset(daskdist.Dataset.range(3000).batch(6))
    with pytest.raises(type(error)) as caught:
        strategy.run(loop, args=(steps,))
    assert caught.value is error
