"""Streams of steps where something fails, is interrupted or closed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from conftest import eventually, mirrored
from distributed import Client, Event, LocalCluster, get_worker
from distributed.comm import connect
from distributed.gc import disable_gc_diagnosis, enable_gc_diagnosis

import daskdist
from daskdist import Dataset, errors
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.calls.call_messages import CallOver, FailData
from daskdist.strategy.calls.calls import Record
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.calls.stream import OPERATION
from daskdist.strategy.calls.unobserved_failures import UnobservedFailures
from daskdist.strategy.calls.worker.worker_streams import streams_of
from daskdist.strategy.collectives.mailbox import mailbox_of
from daskdist.strategy.replica.contract import internals_of

pytestmark = pytest.mark.cluster


class NoKey:
    """A key of a dict that cannot be sent."""

    def __reduce__(self):
        raise TypeError("this key stays here")


class NoSize:
    """A result that cannot tell its size."""

    def __sizeof__(self):
        raise RuntimeError("the size is not known")


def replica_threads(dask_worker):
    """Return the names of the threads of replicas on a worker."""
    return [each.name for each in threading.enumerate() if each.name.startswith("daskdist replica")]


def test_a_result_with_a_key_that_does_not_pickle_fails_alone(on_cluster):
    def keyed():
        return {NoKey(): 1.0}

    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match=r"does not pickle.*this key stays here"):
            on_cluster.local_results(on_cluster.run(keyed))
        assert on_cluster.local_results(on_cluster.run(float, args=(2,))) == (2.0, 2.0)


def test_a_result_that_cannot_tell_its_size_is_looked_at(on_cluster):
    def sizeless():
        return NoSize()

    found = on_cluster.local_results(on_cluster.run(sizeless))
    assert [type(each).__name__ for each in found] == ["NoSize", "NoSize"]


@pytest.mark.parametrize("where", ["embedded", "cluster", "cluster, in a function"])
def test_an_interrupt_leaves_a_strategy_usable_or_closed(client, monkeypatch, where):
    def opened():
        return mirrored(2) if where == "embedded" else daskdist.MultiWorkerMirroredStrategy(client)

    def steps(number):
        value = strategy.run(add, args=(large, float(number)))
        for _ in range(100):
            value = strategy.run(add, args=(value, strategy.reduce("SUM", value, axis=None)))
            total = strategy.run(np.sum, args=(value,))
            if "function" not in where:
                strategy.local_results(total)

    def add(x, y):
        return x + y

    def interrupt(number, frame):
        raise KeyboardInterrupt

    # Python only prints an interrupt that comes while an object is deleted.
    printed, hook = [], sys.unraisablehook

    def note(error):
        if error.exc_type is KeyboardInterrupt:
            printed.append(error.exc_type)
        else:
            hook(error)

    monkeypatch.setattr(sys, "unraisablehook", note)
    chance = random.Random(5)
    strategy = opened()
    strategy.local_results(strategy.run(add, args=(1.0, 2.0)))
    large = np.ones(2**15)
    make_steps = daskdist.function(steps) if "function" in where else steps
    main, num_interrupts, said = threading.get_ident(), 0, []
    before = signal.signal(signal.SIGUSR1, interrupt)
    # Dask measures each collection of garbage, and fails if a measurement was interrupted.
    disable_gc_diagnosis(force=True)
    try:
        for number in range(150):
            timer = threading.Timer(chance.uniform(0, 0.006), signal.pthread_kill, (main, signal.SIGUSR1))
            try:
                timer.start()
                until = time.monotonic() + 0.01
                while time.monotonic() < until:
                    make_steps(number)
                timer.join()
            except KeyboardInterrupt:
                num_interrupts += 1
            timer.join()
            try:
                found = strategy.local_results(strategy.run(add, args=(number, 1)))
            except errors.ClusterError as error:
                said.append(str(error))
                strategy.close()
                strategy = opened()
            else:
                assert found == (number + 1, number + 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        enable_gc_diagnosis()
    assert num_interrupts + len(printed) == 150
    assert len(printed) < 15
    assert all("the strategy is closed" in each for each in said)
    strategy.close()
    eventually(lambda: not any(client.run(replica_threads).values()))


@pytest.mark.parametrize("num_calls", range(40, 48))
def test_results_for_other_workers_do_not_wait_for_the_next_call(on_cluster, client, num_calls):
    def wait(name):
        return Event(name).wait(20)

    first, second = Event("before many calls", client=client), Event("after many calls", client=client)
    # The first call of a function is waited for.
    first.set()
    second.clear()
    on_cluster.local_results((on_cluster.run(float, args=(1,)), on_cluster.run(wait, args=("before many calls",))))
    first.clear()
    try:
        # The calls queue up after the first one, so that workers send several of their results together.
        opened = on_cluster.run(wait, args=("before many calls",))
        totals = [on_cluster.reduce("SUM", on_cluster.run(float, args=(k,)), axis=None) for k in range(num_calls)]
        blocked = on_cluster.run(wait, args=("after many calls",))
        first.set()
        assert [float(total) for total in totals] == [2.0 * k for k in range(num_calls)]
        assert not second.is_set()
        second.set()
        assert on_cluster.local_results((opened, blocked)) == ((True, True), (True, True))
    finally:
        first.set()
        second.set()


def test_calls_that_wait_are_not_made_after_an_error_closed_the_strategy(client):
    def wait(name):
        worker = get_worker()
        worker.num_made = getattr(worker, "num_made", 0) + 1
        return Event(name).wait(20)

    def made(dask_worker):
        return dask_worker.__dict__.pop("num_made", 0)

    def is_open(token, dask_worker):
        return token in streams_of(dask_worker).by_token

    eventually(lambda: not any(client.run(replica_threads).values()))
    gate = Event("closed by an error", client=client)
    gate.set()
    with contextlib.suppress(RuntimeError), daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        strategy.local_results(strategy.run(wait, args=("closed by an error",)))
        client.run(made)
        gate.clear()
        steps = [strategy.run(wait, args=("closed by an error",)) for _ in range(10)]
        eventually(lambda: all(client.run(lambda dask_worker: getattr(dask_worker, "num_made", 0)).values()))
        token = internals_of(strategy).token
        raise RuntimeError("of the program")
    # The workers learn of it a moment later.
    eventually(lambda: not any(client.run(is_open, token).values()))
    gate.set()
    eventually(lambda: not any(client.run(replica_threads).values()))
    assert set(client.run(made).values()) == {1}
    assert len(steps) == 10


def test_workers_are_asked_for_an_answer_between_calls_only(on_cluster, client):
    streams = internals_of(on_cluster).backend.streams
    loop = client.loop.asyncio_loop

    async def ping():
        streams._ping()

    with streams.lock:
        before = [each.link.state.num_sent for each in streams._streams.values()]
        asked = asyncio.run_coroutine_threadsafe(ping(), loop)
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        assert [each.link.state.num_sent for each in streams._streams.values()] == before
    asked.result(10)


def test_everyone_who_sends_to_a_worker_that_is_not_reached_hears_of_it(on_cluster, client):
    async def send(dask_worker):
        links, reasons = mailbox_of(dask_worker).links, []
        for number in range(3):
            links.send("nowhere://x", number, reasons.append)
        while len(reasons) < 3:
            await asyncio.sleep(0.01)
        return len(reasons), None in reasons, list(links._links).count("nowhere://x")

    on_cluster.local_results(on_cluster.run(float, args=(1,)))
    assert set(client.run(send).values()) == {(3, False, 0)}


async def open_and_leave(group, dask_worker):
    """Open a stream to a worker over a connection that breaks before the worker answers."""
    comm = await connect(dask_worker.scheduler.address, **dask_worker.connection_args)
    comm.abort()
    with contextlib.suppress(OSError):
        await dask_worker.handlers[OPERATION](comm, group=group, is_relayed=False)


def test_nothing_is_left_of_a_stream_whose_program_is_gone_before_the_first_answer(on_cluster, client):
    other = daskdist.MultiWorkerMirroredStrategy(client)
    group = pickle.dumps(internals_of(other).group.now)
    other.close()
    eventually(lambda: [len(of) for of in client.run(replica_threads).values()] == [1, 1])
    client.run(open_and_leave, group)
    eventually(lambda: [len(of) for of in client.run(replica_threads).values()] == [1, 1])


def test_nothing_is_kept_of_data_that_came(on_cluster, client):
    def waits(dask_worker):
        from daskdist.strategy.calls.worker.data_keys import data_keys_of

        return len(data_keys_of(dask_worker)._events)

    batches = on_cluster.distribute_dataset(Dataset.range(64).batch(4))
    totals = [on_cluster.reduce("SUM", on_cluster.run(np.sum, args=(each,)), axis=None) for each in batches]
    assert sum(map(int, totals)) == sum(range(64))
    eventually(lambda: set(client.run(waits).values()) == {0})


def test_a_call_that_is_made_again_waits_for_data_that_failed_before(on_cluster, client):
    def waits_again(token, dask_worker):
        from daskdist.strategy.calls.worker.worker_streams import steps_of

        steps = steps_of(dask_worker, token)
        message = FailData("no such key", Failed(Failure.of(KeyError("gone")), None))
        first = steps.awaited("no such key")
        steps._handle([message])
        second = steps.awaited("no such key")
        are_set = first.is_set, second.is_set
        steps._handle([message])
        return *are_set, second.is_set

    token = internals_of(on_cluster).group.now.token
    assert set(client.run(waits_again, token).values()) == {(True, False, True)}


def test_a_worker_learns_from_the_program_that_data_is_gone(on_cluster, client):
    async def error_of(token, dask_worker):
        from daskdist.strategy.calls.worker.worker_streams import steps_of

        failed = await asyncio.to_thread(steps_of(dask_worker, token).awaited("no such key").get)
        return str(failed.failure.error())

    messages = client.run(error_of, internals_of(on_cluster).group.now.token).values()
    assert all("no such key is no longer on the cluster" in message for message in messages)
    # No call needs it, so no worker is in doubt because of it.
    assert not internals_of(on_cluster).backend.live_workers.in_doubt


def test_values_of_another_strategy_on_the_cluster_are_usable(on_cluster, client):
    def number(x):
        return np.full(3, float(x))

    def large(x):
        return np.full(2**17, float(x))

    with daskdist.MultiWorkerMirroredStrategy(client) as other:
        # Calls of both strategies have the same numbers.
        mine = [on_cluster.run(number, args=(k,)) for k in range(8)]
        theirs = [other.run(number, args=(10 + k,)) for k in range(8)]
        added = on_cluster.run(np.add, args=(mine[3], theirs[3]))
        assert [each.tolist() for each in on_cluster.local_results(added)] == [[16.0] * 3] * 2
        held = other.run(large, args=(7,))
        assert on_cluster.local_results(on_cluster.run(np.sum, args=(held,))) == (7.0 * 2**17, 7.0 * 2**17)
        assert np.asarray(on_cluster.reduce("SUM", theirs[1], axis=None)).tolist() == [22.0] * 3
        one = on_cluster.reduce("SUM", mine[1], axis=None)[0]
        ten = other.reduce("SUM", theirs[0], axis=None)[0]
        assert (float(one + ten), float(ten - one)) == (22.0, 18.0)
        assert on_cluster.local_results(on_cluster.run(float, args=(ten,))) == (20.0, 20.0)
        assert [each.tolist() for each in on_cluster.local_results(theirs[2])] == [[12.0] * 3] * 2


def test_large_batches_are_looked_at(on_cluster):
    (batch,) = on_cluster.distribute_dataset(Dataset.range(2**17).batch(2**17))
    found = on_cluster.local_results(batch)
    np.testing.assert_array_equal(np.concatenate(found), np.arange(2**17))


def test_workers_in_this_process_share_no_memory_with_the_program():
    def make():
        get_worker().made = np.zeros(2**17)
        return get_worker().made

    def change():
        get_worker().made += 1
        return float(get_worker().made[0])

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as local,
        Client(local, set_as_default=False) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        found = strategy.local_results(strategy.run(make))
        assert strategy.local_results(strategy.run(change)) == (1.0, 1.0)
        assert [each[0] for each in found] == [0.0, 0.0]
        for each in found:
            each += 100
        assert strategy.local_results(strategy.run(change)) == (2.0, 2.0)


# --- results and losses at the same time ---


@contextlib.contextmanager
def in_turns():
    """Let threads take turns as often as possible, as on a machine with many of them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(*functions):
    """Call functions at the same time, each in a thread; raise the error of the first that fails."""
    begin = threading.Barrier(len(functions))

    def call(function):
        begin.wait(10)
        function()

    with in_turns(), ThreadPoolExecutor(len(functions)) as pool:
        for called in [pool.submit(call, function) for function in functions]:
            called.result(60)


def fill(values, make):
    for place in range(len(values)):
        values[place] = make()


@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_result_that_comes_while_its_worker_is_given_up_counts_once(on_cluster, num_losses):
    streams = internals_of(on_cluster).backend.streams
    first, second = on_cluster.workers
    lost = Failed(Failure.of(errors.ClusterError("lost")), None)
    for _ in range(30):
        calls = [streams.new_call((first, second), None, "call", is_step=True) for _ in range(500)]
        numbers = [call.record.number for call in calls]
        come = partial(streams._handle, streams._streams[first], [CallOver(number, 0, None, 0) for number in numbers])
        at_once(come, *[partial(streams._fail_calls, first, lost)] * num_losses)
        assert [call.record.num_left for call in calls] == [1] * len(calls)
        assert {*numbers} <= streams._under_way.keys()
        # Steps are sent while results of earlier ones come.
        come = partial(streams._handle, streams._streams[second], [CallOver(number, 1, None, 0) for number in numbers])
        later = [None] * 500
        at_once(come, partial(fill, later, lambda: streams.new_call((second,), None, "call", is_step=True)))
        assert streams.num_steps == len(later)
        streams._fail_calls(second, lost)
        assert (streams.num_steps, streams.is_busy) == (0, False)


def test_each_failure_is_raised_once_while_others_come():
    failures, raised = UnobservedFailures(), []
    failed = [Failed(Failure.of(ValueError(number)), number) for number in range(2000)]

    def record(number):
        call = Record(number, ("a",), None, "call")
        call.is_dropped = True
        return call

    def add():
        for number, failure in enumerate(failed):
            # Both fail with the error of the first.
            failures.add(record(number), failure)
            failures.add(record(len(failed) + number), failure)

    def take():
        while len(raised) < 2 * len(failed) and not (adding.done() and not failures):
            if error := failures.take_error():
                (more,) = getattr(error, "__notes__", None) or ["0 more"]
                raised.append(error.args[0])
                raised.extend([None] * int(more.split()[0]))

    with in_turns(), ThreadPoolExecutor(3) as pool:
        adding = pool.submit(add)
        for taking in [pool.submit(take) for _ in range(2)]:
            taking.result(60)
    assert len(raised) == len(failed)


def test_a_failure_that_was_raised_is_not_raised_again_once_its_result_is_dropped():
    failures = UnobservedFailures()

    def fail(number):
        record, failed = Record(number, ("a",), None, "call"), Failed(Failure.of(ValueError(number)), number)
        record.fail(failed)
        failures.add(record, failed)
        return record, failed

    first, failed = fail(1)
    failures.mark_observed(failed)
    # Only the last ones are remembered.
    for number in range(2, 2000):
        failures.mark_observed(fail(number)[1])
    first.is_dropped = True
    failures.drop(first)
    assert failures.take_error() is None
    failures.validate()
