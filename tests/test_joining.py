"""Functions that wait for a busy cluster and go together: each gives what it would give alone."""

from __future__ import annotations

import builtins
import threading

import dask
import numpy as np
import pytest
from distributed import Event

import daskdist
from daskdist import Dataset, PerReplica, errors

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def busy(on_cluster):
    """Makes the cluster busy with two graphs until it is told to go on."""
    client = on_cluster.client
    event = Event("go on", client=client)

    def wait(_):
        Event("go on").wait(30)
        return 0

    @daskdist.function
    def blocked():
        return on_cluster.run(wait, args=(0,))

    event.set()
    on_cluster.local_results(on_cluster.run(wait, args=(0,)))
    kept = []

    def begin():
        event.clear()
        kept.extend([blocked(), blocked()])

    yield begin, event.set
    event.set()
    on_cluster.local_results(kept)


def noted(name):
    """A function that notes on its worker that it was called, and gives what has been called there."""

    def note(x):
        builtins.called = [*getattr(builtins, "called", []), name]
        return " ".join(builtins.called)

    return note


def forget(x):
    builtins.called = []
    return 0


def test_functions_called_meanwhile_are_one_graph(on_cluster, busy):
    begin, go_on = busy

    def plus(x, y):
        return x + y

    @daskdist.function
    def step(x):
        return on_cluster.reduce("SUM", on_cluster.run(plus, args=(x, 1.0)), axis=None)

    assert float(step(PerReplica([1.0, 2.0]))) == 5.0
    begin()
    found = [step(PerReplica([float(k), 0.0])) for k in range(6)]
    go_on()
    assert [float(each) for each in found] == [k + 2.0 for k in range(6)]
    assert "step: 1 step in 1 graph" in step.explain()
    assert "and 5 steps of other calls" in step.explain()


def test_what_one_function_gives_is_used_in_the_next(on_cluster, busy):
    begin, go_on = busy

    def grow(w, gradient):
        return w * 2 + gradient

    @daskdist.function
    def step(w):
        w = on_cluster.run(grow, args=(w, 1.0))
        return w, on_cluster.reduce("SUM", w, axis=None)

    w = PerReplica([1.0, 2.0])
    step(w)
    begin()
    totals = []
    for _ in range(5):
        w, total = step(w)
        totals.append(total)
    go_on()
    assert [float(each) for each in totals] == [8.0, 18.0, 38.0, 78.0, 158.0]


def test_one_batch_that_cannot_be_read_fails_its_own_step(on_cluster):
    def refuse(x):
        if x[0] == 17:
            raise ValueError("no such row")
        return x

    def total(x):
        return float(x.sum())

    @daskdist.function
    def step(x):
        return on_cluster.reduce("SUM", on_cluster.run(total, args=(x,)), axis=None)

    rows = np.arange(48.0)[:, None] * np.ones(1000)
    with dask.config.set({"daskdist.split-bytes": 16_000, "daskdist.bundle-bytes": 16_000}):
        ds = Dataset.from_tensor_slices(rows).map(refuse).batch(2)
        losses = [step(x) for x in on_cluster.distribute_dataset(ds)]
    with pytest.raises(errors.UserFunctionError, match="no such row"):
        float(losses[8])
    # Those far from it are of other blocks.
    for number in (*range(4), *range(14, 24)):
        assert float(losses[number]) == rows[2 * number : 2 * number + 2].sum()


def test_values_of_two_places_in_another_order(on_cluster, busy):
    begin, go_on = busy
    first, second = on_cluster.extended.worker_devices
    to = on_cluster.extended.broadcast_to

    @daskdist.function
    def one():
        a, b, c, d = to(1, first), to(2, first), to(10, second), to(20, second)
        return a + c + d + b * 0

    @daskdist.function
    def other():
        a, b, c, d = to(1, first), to(2, first), to(10, second), to(20, second)
        return c + a + b + d * 0

    assert (int(one()), int(other())) == (31, 13)
    begin()
    found = [one(), other(), one()]
    go_on()
    assert [int(each) for each in found] == [31, 13, 31]


def test_what_was_called_before_is_made_before(on_cluster, busy):
    begin, go_on = busy
    train, look = noted("train"), noted("look")
    both = PerReplica([0, 1])

    @daskdist.function
    def training():
        return on_cluster.run(train, args=(both,))

    @daskdist.function
    def evaluation():
        found = on_cluster.run(look, args=(both,))
        return on_cluster.local_results(found)

    training(), evaluation()
    on_cluster.local_results(on_cluster.run(forget, args=(both,)))
    begin()
    for _ in range(3):
        training()
    # The evaluation waits for what it looks at, and so for all that is before it.
    threading.Timer(0.2, go_on).start()
    assert evaluation() == ("train train train look",) * 2


def test_calls_of_a_replica_are_in_order_whatever_they_need(start_cluster):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2)) as strategy:
        client = strategy.client
        event = Event("second", client=client)

        def slow(x):
            if x:
                Event("second").wait(10)
            return noted("slow")(x) and x

        quick = noted("quick")
        both = PerReplica([0, 1])
        event.set()
        strategy.run(slow, args=(both,))

        @daskdist.function
        def step():
            first = strategy.run(slow, args=(both,)).values[0]
            return strategy.run(lambda x, y: quick(x), args=(both, first))

        step()
        strategy.local_results(strategy.run(forget, args=(both,)))
        event.clear()
        found = step()
        event.set()
        assert strategy.local_results(found) == ("slow quick", "slow quick")


def test_what_does_not_pickle_fails_alone(on_cluster, busy):
    begin, go_on = busy
    lock = threading.Lock()
    large = np.arange(50_000.0)

    def locked(a, b):
        return a + b if lock else None

    def first(x, y):
        return x

    @daskdist.function
    def bad():
        return on_cluster.reduce(locked, on_cluster.run(first, args=(PerReplica([1, 2]), large)), axis=None)

    @daskdist.function
    def good():
        return on_cluster.reduce("SUM", on_cluster.run(first, args=(PerReplica([1, 2]), large)), axis=None)

    assert int(good()) == 3
    begin()
    found = [good(), bad(), good()]
    go_on()
    assert (int(found[0]), int(found[2])) == (3, 3)
    with pytest.raises(errors.ArgumentError, match="does not pickle"):
        int(found[1])


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
    assert "2 steps in 1 graph" in pick.explain()


def test_no_more_steps_are_ahead_than_allowed(on_cluster, busy):
    begin, go_on = busy

    def one(x):
        return 1

    @daskdist.function
    def step():
        return on_cluster.run(one, args=(PerReplica([0, 1]),))

    step()
    returned = []

    def loop():
        for number in range(40):
            step()
            returned.append(number)

    begin()
    with dask.config.set({"daskdist.max-steps-in-flight": 4}):
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join(1.0)
        # Two wait already.
        assert thread.is_alive()
        assert len(returned) <= 6
        go_on()
        thread.join(60)
    assert len(returned) == 40


def test_functions_of_much_make_several_graphs(on_cluster, busy):
    begin, go_on = busy

    def total(x):
        return float(x.sum())

    @daskdist.function
    def step(number):
        return on_cluster.reduce("SUM", on_cluster.run(total, args=(np.full(8_000, number, float),)), axis=None)

    float(step(0))
    begin()
    with dask.config.set({"daskdist.max-steps-in-flight": 1_000}):
        found = [step(number) for number in range(200)]
    go_on()
    # Dask warns of a graph of 10 MiB, and warnings are errors here.
    assert [float(each) for each in found] == [2 * 8_000 * number for number in range(200)]
