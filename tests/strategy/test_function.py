"""`daskdist.function`: messages for a function of many steps, and the same results as of separate steps."""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
import time

import numpy as np
import pytest
from distributed import Event, get_worker

import daskdist
from daskdist import Dataset, PerReplica, errors


def floats(*values):
    return PerReplica([np.array(value, np.float64) for value in values])


@contextlib.contextmanager
def tasks_sent(client):
    """Record the keys of the tasks that are sent to a scheduler in the block."""

    def start(dask_scheduler):
        from distributed.diagnostics.plugin import SchedulerPlugin

        class Graphs(SchedulerPlugin):
            name = "graphs"

            def __init__(self):
                self.found = []

            def update_graph(self, scheduler, *, tasks, **kwargs):
                self.found += map(str, tasks)

        dask_scheduler.add_plugin(Graphs())

    def end(dask_scheduler):
        actual = dask_scheduler.plugins["graphs"].found
        dask_scheduler.remove_plugin(name="graphs")
        return actual

    client.run_on_scheduler(start)
    keys = []
    try:
        yield keys
    finally:
        keys += client.run_on_scheduler(end)


def total(x):
    return x.sum()


def plus(x, y):
    return x + y


def steps_of(strategy, num_steps=40, rows=8):
    return strategy.distribute_dataset(Dataset.range(num_steps * rows).map(lambda x: x + 0.0).batch(rows))


# --- messages ---


@pytest.mark.cluster
def test_steps_are_no_tasks_of_the_scheduler(on_cluster, client):
    @daskdist.function
    def epoch(iterator, num_steps):
        actual = 0.0
        for _ in range(num_steps):
            actual += on_cluster.reduce("SUM", on_cluster.run(total, args=(next(iterator),)), axis=None)
        return actual

    iterator = iter(steps_of(on_cluster))
    on_cluster.run(total, args=(next(iterator),))
    with tasks_sent(client) as keys:
        actual = epoch(iterator, 30)
        assert float(actual) == sum(range(8, 31 * 8))
    assert keys
    assert not [key for key in keys if key.startswith(("run-", "reduce", "apply"))]
    # The other calls are a reduction for each step, and additions of what has not arrived by then.
    assert re.search(r"epoch: 30 steps and [3-6]\d other calls\n  waited nowhere$", epoch.explain())


@pytest.mark.cluster
@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_reduced_value_reaches_the_next_step_without_the_program(on_cluster, num_steps):
    @daskdist.function
    def descend(x, weight):
        for _ in range(num_steps):
            gradient = on_cluster.reduce("MEAN", on_cluster.run(plus, args=(x, weight)), axis=None)
            weight = weight - 0.5 * gradient
        return weight

    x, expected = floats(1, 3), 10.0
    on_cluster.run(plus, args=(x, 1.0))
    actual = float(descend(x, 10.0))
    for _ in range(num_steps):
        expected -= 0.5 * (2 + expected)
    assert actual == expected
    assert descend.explain().endswith("waited nowhere")


@pytest.mark.cluster
def test_explain_reports_reads_of_values(on_cluster):
    def plus_one(x):
        # Results are looked at before they have come.
        time.sleep(0.2)
        return x + 1.0

    @daskdist.function
    def until(x, limit):
        steps = 0
        while True:
            x = on_cluster.run(plus_one, args=(x,))
            steps += 1
            if on_cluster.reduce("SUM", x, axis=None) > limit:
                return steps

    # The first call of a function waits until the structure of its result is known.
    on_cluster.local_results(on_cluster.run(plus_one, args=(floats(1, 2),)))
    assert until(floats(0, 0), 5) == 3
    first, *waits = until.explain().splitlines()
    assert re.search("until: 3 steps and [3-6] other calls$", first)
    assert len(waits) == 3
    assert all("waited because a result was looked at, in test_function.py, line" in line for line in waits)


@pytest.mark.cluster
def test_the_structure_of_results_is_learned_once_and_explained(on_cluster):
    def new(x):
        # Nothing is waited for if the result has arrived before.
        time.sleep(0.1)
        return {"twice": 2 * x}

    @daskdist.function
    def both(x):
        return on_cluster.run(new, args=(x,))["twice"], on_cluster.run(new, args=(x,))["twice"]

    assert [on_cluster.local_results(value) for value in both(floats(1, 2))] == [(2.0, 4.0)] * 2
    assert "what a function returns had to be learned from its first call" in both.explain()
    both(floats(1, 2))
    assert both.explain().endswith("both: 2 steps\n  waited nowhere")


def test_explain_of_a_function_without_messages():
    @daskdist.function
    def nothing():
        return 3

    assert nothing.explain().endswith("nothing: not called yet")
    assert nothing() == 3
    assert nothing.explain().endswith("nothing: nothing was sent to a cluster")


# --- results ---


def test_a_function_gives_the_results_of_its_steps(strategy):
    def loop(dataset, weight):
        losses = []
        for step in dataset:
            loss = strategy.run(lambda x, w: (x * w).sum(), args=(step, weight))
            weight = weight - 1e-3 * strategy.reduce("MEAN", loss, axis=None)
            losses.append(loss)
        return losses, weight

    alone, weight = loop(steps_of(strategy, 12), 1.0)
    together, same = daskdist.function(loop)(steps_of(strategy, 12), 1.0)
    assert float(same) == float(weight)
    assert [strategy.local_results(item) for item in together] == [strategy.local_results(value) for value in alone]


def test_loops_as_in_the_reference_pages(strategy):
    @daskdist.function
    def train(iterator, num_steps):
        actual = []
        for _ in range(num_steps):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            actual.append(strategy.reduce("SUM", strategy.run(total, args=(optional.get_value(),)), axis=None))
        return actual

    iterator = iter(steps_of(strategy, 5))
    assert [float(item) for item in train(iterator, 3)] == [28.0, 92.0, 156.0]
    assert [float(value) for value in train(iterator, 9)] == [220.0, 284.0]
    assert train(iterator, 9) == []


def test_arithmetic_and_nests_are_returned(strategy):
    @daskdist.function
    def mixed(x):
        value = strategy.reduce("SUM", x, axis=None)
        return {"a": [value * 2 + 1, strategy.run(plus, args=(x, value))], "b": (None, "text", 3)}

    actual = mixed(floats(1, 2))
    assert float(actual["a"][0]) == 7.0
    assert strategy.local_results(actual["a"][1]) == (4.0, 5.0)
    assert actual["b"] == (None, "text", 3)


@pytest.mark.cluster
def test_a_long_sum_is_computed_where_its_parts_are(on_cluster):
    @daskdist.function
    def many(x):
        actual = 0
        for _ in range(300):
            actual = actual + on_cluster.reduce("SUM", on_cluster.run(plus, args=(x, 0.0)), axis=None)
        return actual

    on_cluster.run(plus, args=(floats(1, 2), 1.0))
    assert float(many(floats(1, 2))) == 900.0
    assert many.explain().endswith("waited nowhere")


@pytest.mark.cluster
def test_nested_functions_are_captured_as_one(on_cluster):
    @daskdist.function
    def inner(x):
        return on_cluster.run(plus, args=(x, 1.0))

    @daskdist.function
    def outer(x):
        for _ in range(4):
            x = inner(x)
        return x

    inner(floats(1, 2))
    assert on_cluster.local_results(outer(floats(1, 2))) == (5.0, 6.0)
    assert outer.explain().endswith("outer: 4 steps\n  waited nowhere")


class Trainer:
    """A program that keeps its step as a method."""

    def __init__(self, strategy, by):
        self.strategy, self.by = strategy, by

    @daskdist.function
    def step(self, x):
        """Make one step."""
        return self.strategy.run(plus, args=(x, self.by))


def test_methods(strategy):
    first, second = Trainer(strategy, 1.0), Trainer(strategy, 2.0)
    assert strategy.local_results(first.step(floats(1, 2))) == (2.0, 3.0)
    assert strategy.local_results(second.step(floats(1, 2))) == (3.0, 4.0)
    assert Trainer.step.__name__ == "step"
    assert Trainer.step.__doc__ == "Make one step."


@pytest.mark.cluster
def test_arrays_changed_later_in_a_function_keep_the_value_at_their_use(on_cluster):
    @daskdist.function
    def change(x):
        given, found = np.zeros(2_000), []
        for number in range(4):
            given[:] = number
            small = np.array([number * 1.0])
            found.append(on_cluster.run(lambda x, g, s: x + g.mean() + s[0], args=(x, given, small)))
        return found

    assert [on_cluster.local_results(value) for value in change(floats(0, 1))] == [
        (2.0 * k, 2.0 * k + 1) for k in range(4)
    ]


@pytest.mark.cluster
def test_views_lists_and_indices_changed_later_keep_the_value_at_their_use(on_cluster):
    rate, added, place = np.array(1.0), [1.0, 2.0, 3.0], np.array([0])
    seen_only = np.broadcast_to(rate, (3,))

    @daskdist.function
    def step(x):
        (first, _) = on_cluster.run(plus, args=(x, seen_only)).values
        actual = first + added, first[place, None]
        rate[...], added[0], place[0] = 100.0, 100.0, 2
        return actual

    total, part = step(PerReplica([np.arange(3.0), np.arange(3.0)]))
    assert total.tolist() == [2.0, 4.0, 6.0]
    assert part.tolist() == [[1.0]]


@pytest.mark.cluster
def test_each_thread_captures_separately(on_cluster):
    @daskdist.function
    def sums(x, num_steps):
        actual = 0
        for _ in range(num_steps):
            actual = actual + on_cluster.reduce("SUM", on_cluster.run(plus, args=(x, 1.0)), axis=None)
        return actual

    sums(floats(1, 2), 1)
    actual = {}
    threads = [
        threading.Thread(target=lambda k=k: actual.update({k: float(sums(floats(k, k), 5))}), name=f"of {k}")
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert actual == {k: 10.0 * (k + 1) for k in range(4)}


# --- what goes wrong ---


def choosy(x):
    if x > 5:
        raise ValueError(f"{x} is too much")
    return x


@pytest.mark.cluster
def test_an_error_is_of_its_step_and_of_those_that_depend_on_it(on_cluster):
    on_cluster.run(choosy, args=(floats(1, 2),))
    on_cluster.run(plus, args=(floats(1, 2), 1.0))

    @daskdist.function
    def steps():
        fine = on_cluster.run(choosy, args=(floats(1, 2),))
        failing = on_cluster.run(choosy, args=(floats(1, 7),))
        later = on_cluster.reduce("SUM", on_cluster.run(plus, args=(failing, 1.0)), axis=None)
        after = on_cluster.run(choosy, args=(floats(3, 4),))
        return fine, failing, later, after

    fine, failing, later, after = steps()
    assert on_cluster.local_results(fine) == (1.0, 2.0)
    assert on_cluster.local_results(after) == (3.0, 4.0)
    for value in (failing, later, failing.values[0]):
        with pytest.raises(ValueError, match=r"7\.0 is too much") as caught:
            on_cluster.local_results(value)
        assert "raised by replica 1" in str(caught.value)
    assert on_cluster.local_results(on_cluster.run(choosy, args=(floats(1, 2),))) == (1.0, 2.0)


@pytest.mark.cluster
def test_an_error_of_the_function_itself_leaves_its_steps_made(on_cluster, client):
    kept = []

    @daskdist.function
    def breaks(x):
        kept.append(on_cluster.run(plus, args=(x, 1.0)))
        raise RuntimeError("half way")

    on_cluster.run(plus, args=(floats(1, 2), 1.0))
    with pytest.raises(RuntimeError, match="half way"):
        breaks(floats(1, 2))
    assert on_cluster.local_results(kept[0]) == (2.0, 3.0)


@pytest.mark.cluster
def test_a_step_that_returns_nothing_fails_when_its_function_ends(on_cluster):
    def note(x):
        if x > 5:
            raise ValueError("too much to note")

    @daskdist.function
    def notes(x):
        for _ in range(3):
            assert on_cluster.run(note, args=(x,)) is None

    notes(floats(1, 2))
    notes(floats(1, 2))
    assert notes.explain().splitlines()[0].endswith("notes: 3 steps")
    with pytest.raises(ValueError, match="too much to note"):
        notes(floats(1, 7))


@pytest.mark.cluster
def test_a_function_is_usable_after_an_error_of_pickling(on_cluster):
    lock = threading.Lock()

    @daskdist.function
    def locked(x, what):
        return on_cluster.run(plus, args=(x, what))

    with pytest.raises(errors.ArgumentError, match=r"args\[1\] \(_thread.lock\) does not pickle"):
        locked(floats(1, 2), lock)
    assert on_cluster.local_results(locked(floats(1, 2), 1.0)) == (2.0, 3.0)


@pytest.mark.cluster
def test_a_result_that_does_not_pickle_does_not_affect_others(on_cluster):
    def made():
        return threading.Lock()

    on_cluster.run(made)

    @daskdist.function
    def steps(x):
        return on_cluster.run(plus, args=(x, 1.0)), on_cluster.run(made), on_cluster.run(plus, args=(x, 2.0))

    steps(floats(1, 2))
    first, lock, second = steps(floats(1, 2))
    assert on_cluster.local_results(second) == (3.0, 4.0)
    assert on_cluster.local_results(first) == (2.0, 3.0)
    with pytest.raises(errors.ArgumentError, match=r"does not pickle.*lock"):
        on_cluster.local_results(lock)


@pytest.mark.cluster
def test_exiting_on_a_worker_is_an_error_of_the_call_only(on_cluster):
    def ends(x, kind):
        if x > 5:
            raise kind("enough")
        return x

    @daskdist.function
    def steps(x, kind):
        return on_cluster.run(plus, args=(x, 1.0)), on_cluster.run(ends, args=(x, kind))

    steps(floats(1, 2), SystemExit)
    for kind, raised in (
        (SystemExit, errors.DaskdistError),
        (KeyboardInterrupt, errors.DaskdistError),
        (pytest.fail.Exception, pytest.fail.Exception),
    ):
        fine, ended = steps(floats(1, 7), kind)
        with pytest.raises(raised, match="enough") as caught:
            on_cluster.local_results(ended)
        report = [str(caught.value), *getattr(caught.value, "__notes__", ())]
        assert any("raised by replica 1" in text for text in report)
        assert on_cluster.local_results(fine) == (2.0, 8.0)


# --- sessions ---


@pytest.mark.cluster
def test_steps_before_a_function_are_not_part_of_it(on_cluster, client):
    def wait(name):
        return Event(name).wait()

    @daskdist.function
    def step(x):
        return on_cluster.run(plus, args=(x, 1.0))

    gate = Event("before", client=client)
    gate.set()
    step(floats(1, 2))
    on_cluster.local_results(on_cluster.run(wait, args=("before",)))
    gate.clear()
    waiting = [on_cluster.run(wait, args=("before",)) for _ in range(5)]
    actual = step(floats(1, 2))
    gate.set()
    assert step.explain().endswith("step: 1 step\n  waited nowhere")
    assert on_cluster.local_results((waiting, actual))[0] == ([True] * 5, 2.0)


@pytest.mark.cluster
def test_work_after_a_function_is_not_captured(on_cluster, client):
    @daskdist.function
    def step(x):
        return on_cluster.run(plus, args=(x, 1.0)), contextvars.copy_context()

    def leave(number):
        get_worker().plugins["left"] = number
        return number

    _, later = step(floats(1, 2))
    on_cluster.local_results(on_cluster.run(leave, args=(1,)))
    # The call is made, although its result is never used.
    later.run(on_cluster.run, leave, args=(2,))
    on_cluster.local_results(on_cluster.run(plus, args=(floats(1, 2), 1.0)))
    assert list(client.run(lambda dask_worker: dask_worker.plugins.pop("left")).values()) == [2, 2]


# --- input_signature ---


def test_a_signature_is_checked_on_each_call(strategy):
    dist = strategy.distribute_dataset(Dataset.range(12).map(lambda x: (x, x * 1.5)).batch(4))

    @daskdist.function(input_signature=[dist.element_spec])
    def step(batch):
        return strategy.run(lambda pair: pair[1].sum(), args=(batch,))

    for batch in dist:
        strategy.local_results(step(batch))
    whole = floats([1.0, 2], [3])
    ints = PerReplica([np.array([1, 2]), np.array([3])])
    assert strategy.local_results(step((ints, whole))) == (3.0, 3.0)
    for args, words in (
        (((ints, ints),), [r"argument \(0, 1\)", "dtype int64", "float64"]),
        (((ints, floats(1, 2)),), [r"shape \(\)", "shape=\\(None,\\)"]),
        (((ints, PerReplica([np.ones(2)] * 3)),), ["3 values", "PerReplicaSpec"]),
        (((ints, np.ones(2)),), ["ndarray", "PerReplicaSpec"]),
        ((ints,), ["the arguments are ", "input_signature has"]),
        (((ints, whole), 3), ["2 positional arguments", "input_signature has 1"]),
        ((), ["0 positional arguments", "input_signature has 1"]),
    ):
        with pytest.raises(errors.ArgumentError) as caught:
            step(*args)
        for word in ["step", *words]:
            caught.match(word)


@pytest.mark.cluster
def test_a_signature_of_known_length_is_checked_where_the_values_are(on_cluster, client):
    from daskdist import PerReplicaSpec, TensorSpec

    four = PerReplicaSpec(*[TensorSpec((4,), np.float64)] * 2)

    @daskdist.function(input_signature=[four])
    def step(batch):
        return on_cluster.run(total, args=(batch,))

    first, last = (
        steps_of(on_cluster, 1, 8),
        on_cluster.distribute_dataset(Dataset.range(6).map(lambda x: x + 0.0).batch(8)),
    )
    assert on_cluster.local_results(step(next(iter(first)))) == (6.0, 22.0)
    with pytest.raises(errors.ArgumentError, match=r"shape \(3,\).*shape=\(4,\)"):
        step(next(iter(last)))


def test_only_functions_are_functions():
    with pytest.raises(errors.ArgumentError, match="function: int is not a function"):
        daskdist.function(3)


# --- order ---


def tell(what, told):
    told = getattr(get_worker(), told, [])
    get_worker().told = [*told, int(what)]
    return np.float64(what)


def all_told():
    return np.array(vars(get_worker()).pop("told"))


@pytest.mark.cluster
def test_calls_of_a_replica_are_made_in_their_order(on_cluster):
    @daskdist.function
    def in_turns(number):
        on_cluster.run(tell, args=(number, "told"))
        actual = on_cluster.reduce("MAX", on_cluster.run(tell, args=(number + 1, "told")), axis=None)
        on_cluster.run(tell, args=(actual + 1, "told"))
        on_cluster.run(tell, args=(number + 3, "told"))
        return on_cluster.run(all_told)

    in_turns(0)
    for number in (4, 8):
        report = on_cluster.local_results(in_turns(number))
        assert [value.tolist() for value in report] == [list(range(number, number + 4))] * 2


@pytest.mark.cluster
def test_an_index_of_several_parts_is_captured(on_cluster):
    def rows(x):
        return np.arange(12.0).reshape(3, 4) + x

    def one(x):
        return 1

    both = PerReplica([0, 1])

    @daskdist.function
    def pick():
        table, row = on_cluster.run(rows, args=(both,)).values[0], on_cluster.run(one, args=(both,)).values[0]
        return table[row, 2]

    pick()
    assert float(pick()) == 6.0
    # What has arrived by then is computed here.
    assert re.search(r"pick: 2 steps( and 1 other call)?$", pick.explain().splitlines()[0])


@pytest.mark.cluster
def test_an_error_of_pickling_is_raised_at_the_use(on_cluster):
    lock = threading.Lock()
    values = on_cluster.run(float, args=(PerReplica([1, 2]),))
    with pytest.raises(errors.ArgumentError, match=r"reduce: the function .* does not pickle"):
        on_cluster.reduce(lambda a, b: a + b if lock else None, values, axis=None)
    assert float(on_cluster.reduce("SUM", values, axis=None)) == 3
