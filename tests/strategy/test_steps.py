"""Streams of steps: their messages, the order of calls, and that nothing remains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time

import dask
import numpy as np
import programs
import pytest
from conftest import eventually, frequent_heartbeats, messages_sent, new_cluster
from distributed import Client, Event, LocalCluster, Security, get_client, get_worker
from distributed.comm import connect, listen

import daskdist
from daskdist import Dataset, PerReplica, Ragged, errors
from daskdist.execute.callers import live_workers
from daskdist.execute.messages.failure import Packed
from daskdist.execute.messages.outbox import BatchStream
from daskdist.strategy.calls.outcomes import StaysOnWorker, loaded_structure, outcome_to_send, received_outcome
from daskdist.strategy.calls.worker.executor import Executor, run_ready
from daskdist.strategy.calls.worker.promises import Promise
from daskdist.strategy.replica.contract import internals_of
from daskdist.strategy.values.refs import FlatResult, list_spec


def count_on_worker(dask_worker):
    """Return the numbers of strategies' results and objects on a worker, and of their threads."""
    from daskdist.strategy.calls.worker.worker_streams import streams_of

    streams = streams_of(dask_worker)
    found = [] if streams is None else list(streams.by_token.values())
    return (
        len(found),
        sum(len(promises) for each in found for promises in each._promises.values()),
        sum(len(each._objects) for each in found),
        sum(thread.name.startswith(("daskdist replica", "daskdist combine")) for thread in threading.enumerate()),
    )


# --- promises and executors ---


def test_a_promise_is_waited_for_and_set_once():
    promise, called = Promise(), []
    promise.when_set(lambda: called.append(promise.get()))
    timer = threading.Timer(0.05, promise.set, (3,))
    timer.start()
    assert promise.get() == 3
    promise.set(4)
    promise.when_set(lambda: called.append("later"))
    timer.join()
    assert promise.get() == 3
    assert called == [3, "later"]


def test_an_executor_makes_calls_in_order_in_one_thread():
    entered, found = [], []
    executor = Executor("some executor", lambda: entered.append(threading.get_ident()))
    for number in range(100):
        executor.put(lambda number=number: found.append((number, threading.get_ident())))
    over = threading.Event()
    executor.put(over.set)
    assert over.wait(10)
    executor.close()
    assert found == [(number, entered[0]) for number in range(100)]


def test_chains_of_ready_calls_do_not_nest():
    num_calls, most = 0, 5000

    def call():
        nonlocal num_calls
        num_calls += 1
        if num_calls < most:
            run_ready(call)

    run_ready(call)
    assert num_calls == most


# --- what travels ---


def travelled(batch, protocol="tcp"):
    async def exchange():
        received = asyncio.get_running_loop().create_future()

        async def handle(comm):
            received.set_result(await BatchStream(comm).read())

        listener = await listen(f"{protocol}://", handle)
        comm = await connect(listener.contact_address)
        await BatchStream(comm).write(batch)
        try:
            return await asyncio.wait_for(received, 10)
        finally:
            comm.abort()
            listener.stop()

    return asyncio.run(exchange())


@pytest.mark.parametrize("protocol", ["tcp", "inproc"])
@pytest.mark.parametrize("num_bytes", [8, 2**15, 2**20])
def test_messages_travel_with_their_arrays(num_bytes, protocol):
    array = np.arange(num_bytes // 8)
    ((kind, found, text),) = travelled([("run", array, b"x" * num_bytes)], protocol)
    assert kind == "run"
    np.testing.assert_array_equal(found, array)
    assert text == b"x" * num_bytes


class Own:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("leaves", [[1.5, None, np.float32(2)], [np.arange(3)], ["text", Own(3)]])
def test_small_results_come_along(leaves):
    structure, payload = outcome_to_send(FlatResult(leaves, list_spec(len(leaves))))
    assert loaded_structure(structure) == (list_spec(len(leaves)), tuple(leaf is None for leaf in leaves))
    ((payload,),) = travelled([(payload,)])
    found = received_outcome(structure, payload)
    for was, leaf in zip(leaves, found.leaves, strict=True):
        assert type(leaf) is type(was)
        same = leaf.value == was.value if isinstance(was, Own) else np.array_equal(leaf, was)
        assert same


def test_a_result_is_as_it_was_when_its_call_was_over():
    array = np.zeros(3)
    _, payload = outcome_to_send([array])
    array += 1
    assert type(payload) is Packed
    np.testing.assert_array_equal(received_outcome(None, payload)[0], np.zeros(3))


def test_large_and_unpicklable_results_stay_on_workers():
    assert outcome_to_send(FlatResult([np.zeros(2**17)], list_spec(1)))[1].num_bytes >= 2**20
    assert type(outcome_to_send([threading.Lock()])[1]) is StaysOnWorker


# --- on a cluster ---


@pytest.mark.cluster
def test_calls_are_made_in_the_programs_order(on_cluster):
    def note(number, seconds):
        time.sleep(seconds)
        worker = get_worker()
        worker.noted = [*getattr(worker, "noted", []), number]
        return len(worker.noted)

    def noted():
        return tuple(get_worker().__dict__.pop("noted"))

    on_cluster.run(note, args=(-1, 0.0))
    kept = [on_cluster.run(note, args=(k, PerReplica([0.02 if k % 3 == 0 else 0.0, 0.0]))) for k in range(12)]
    for found in on_cluster.local_results(on_cluster.run(noted)):
        assert found == tuple(range(-1, 12))
    assert on_cluster.local_results(kept[-1]) == (13, 13)


@pytest.mark.cluster
def test_results_and_objects_are_dropped_on_the_workers(on_cluster, client):
    def ones(size):
        return np.ones(size)

    kept = [on_cluster.run(ones, args=(2**18,)) for _ in range(3)]
    total = on_cluster.reduce("SUM", on_cluster.run(np.add, args=(kept[0], kept[1])), axis=None)
    assert float(total[0]) == 4.0
    counted = client.run(count_on_worker)
    assert all(num_results >= 3 for _, num_results, _, _ in counted.values())
    kept.clear()
    del total
    internals_of(on_cluster).backend.objects.clear()
    # Records of a function are dropped together with the function.
    del ones

    def is_gone():
        return all(num_results == 0 for _, num_results, _, _ in client.run(count_on_worker).values())

    eventually(is_gone)


@pytest.mark.cluster
def test_nothing_is_left_of_a_strategy_that_is_closed_or_dropped(client):
    before = dict.fromkeys(client.nthreads(), (0, 0, 0, 0))
    eventually(lambda: client.run(count_on_worker) == before)
    for how in ("closed", "dropped", "its client closed"):
        other = Client(client.scheduler.address, set_as_default=False)
        strategy = daskdist.MultiWorkerMirroredStrategy(other)
        value = strategy.run(np.ones, args=(2**18,))
        assert strategy.local_results(value)[0].sum() == 2**18
        assert all(
            found[0] == known[0] + 1
            for found, known in zip(client.run(count_on_worker).values(), before.values(), strict=True)
        )
        if how == "closed":
            strategy.close()
        elif how == "dropped":
            del strategy, value
            gc.collect()
        else:
            other.close()
        eventually(lambda: client.run(count_on_worker) == before)
        other.close()


@pytest.mark.cluster
def test_an_unreadable_failure_is_raised_by_the_next_read(on_cluster):
    def fail():
        raise ValueError("nobody looks at this")

    with pytest.raises(ValueError, match="nobody looks at this"):
        on_cluster.local_results(on_cluster.run(fail))
    fine = on_cluster.run(float, args=(1,))
    assert on_cluster.local_results(fine) == (1.0, 1.0)

    def fail_later(x):
        if x > 1:
            raise ValueError("this is too much")
        return x

    on_cluster.local_results(on_cluster.run(fail_later, args=(1.0,)))
    on_cluster.run(fail_later, args=(2.0,))

    def look(num_times):
        for _ in range(num_times):
            on_cluster.local_results(on_cluster.run(float, args=(1,)))

    with pytest.raises(ValueError, match="this is too much"):
        look(200)
    look(10)


def fail_from_2(x):
    if x >= 2:
        raise ValueError(f"{x} is too much")
    return x


@pytest.mark.cluster
def test_many_unread_failures_are_raised_together(on_cluster):
    on_cluster.local_results(on_cluster.run(fail_from_2, args=(1,)))
    for number in range(20):
        on_cluster.run(fail_from_2, args=(number,))
    # When this call has ended, all earlier calls have ended on both workers.
    last = on_cluster.reduce("SUM", on_cluster.run(fail_from_2, args=(1,)), axis=None)
    with pytest.raises(ValueError, match="2 is too much") as raised:
        last.result()
    assert any("17 more calls failed" in note for note in raised.value.__notes__)
    for _ in range(20):
        assert on_cluster.local_results(on_cluster.run(fail_from_2, args=(1,))) == (1, 1)


@pytest.mark.cluster
@pytest.mark.parametrize("where", ["pass", "function", "back-pressure"])
def test_an_unread_failure_is_raised_at_the_end_of_a_pass_or_function(on_cluster, where):
    def fail():
        on_cluster.run(fail_from_2, args=(2,))

    on_cluster.local_results(on_cluster.run(fail_from_2, args=(1,)))

    def fail_many():
        for _ in range(100):
            fail()

    @daskdist.function
    def fail_in_function():
        fail_and_wait()

    def fail_and_wait():
        fail()
        # The program knows of the failure once no call is under way.
        eventually(lambda: not internals_of(on_cluster).backend.streams.is_busy)

    def fail_in_pass():
        for _ in on_cluster.distribute_dataset(Dataset.range(4).batch(2)):
            fail_and_wait()

    ways = {"pass": fail_in_pass, "function": fail_in_function, "back-pressure": fail_many}
    with dask.config.set({"daskdist.max-steps-in-flight": 4}), pytest.raises(ValueError, match="2 is too much"):
        ways[where]()
    # Raise failures of later calls now, so that no other test gets them.
    with contextlib.suppress(ValueError):
        internals_of(on_cluster).backend.finish()


@pytest.mark.cluster
def test_failures_that_are_looked_at_together_are_raised_once(on_cluster):
    def fail(x):
        if np.max(x) >= 4:
            raise ValueError("this cannot be read")
        return x

    batches = on_cluster.distribute_dataset(Dataset.range(16).batch(4).map(fail))
    with pytest.raises(errors.UserFunctionError, match="this cannot be read"):
        on_cluster.local_results(list(batches))
    for _ in range(50):
        assert on_cluster.local_results(on_cluster.run(float, args=(1,))) == (1.0, 1.0)


@pytest.mark.cluster
def test_a_failure_is_raised_where_its_result_is_read_and_not_elsewhere(on_cluster):
    def choosy(x):
        if x > 1:
            raise ValueError("this is too much")
        return x

    on_cluster.local_results(on_cluster.run(choosy, args=(1.0,)))
    failed = on_cluster.reduce("SUM", on_cluster.run(choosy, args=(2.0,)), axis=None)
    for _ in range(20):
        assert on_cluster.local_results(on_cluster.run(choosy, args=(1.0,))) == (1.0, 1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="this is too much"):
            float(failed)


@pytest.mark.cluster
def test_a_reduction_that_fails_on_both_workers_is_raised_once(on_cluster):
    def rows_of_different_lengths(x):
        return Ragged(np.array([1, 2, 3]), [0, 2, 3])

    def slowly(x):
        time.sleep(0.1 * x)
        return np.ones(2)

    values = on_cluster.run(rows_of_different_lengths, args=(PerReplica([0, 1]),))
    numbers = on_cluster.run(slowly, args=(PerReplica([0, 1]),))
    for value in ([values, numbers], values):
        # The reduction fails on each of the two workers.
        with pytest.raises(errors.ArgumentError, match="rows of different lengths"):
            on_cluster.local_results(on_cluster.reduce("SUM", value, axis=0))
        for _ in range(5):
            assert float(on_cluster.reduce("SUM", numbers, axis=0)) == 4.0


@pytest.mark.cluster
def test_an_error_that_comes_after_another_one_of_its_step_was_raised_is_not_raised(on_cluster, tmp_path):
    def choosy(x):
        if x:
            raise ValueError("this is too much")
        return x

    def fail_late(x):
        while not (tmp_path / "raised").exists():
            time.sleep(0.02)
        raise ValueError("this came late")

    on_cluster.local_results(on_cluster.run(choosy, args=(PerReplica([0, 0]),)))
    made = on_cluster.run(choosy, args=(PerReplica([0, 1]),))
    with pytest.raises(ValueError, match="this is too much"):
        on_cluster.local_results(on_cluster.run(fail_late, args=(made,)))
    (tmp_path / "raised").touch()
    del made
    internals_of(on_cluster).backend.finish()
    assert on_cluster.local_results(on_cluster.run(float, args=(1,))) == (1.0, 1.0)


@pytest.mark.cluster
def test_large_results_are_fetched_once_for_all_their_parts(on_cluster):
    made = on_cluster.run(lambda: (np.zeros(2**17), np.ones(2**17)))
    with messages_sent(on_cluster) as messages:
        for zeros, ones in on_cluster.local_results(made):
            assert (zeros.sum(), ones.sum()) == (0, 2**17)
    assert len(messages) == 2


@pytest.mark.cluster
def test_large_results_are_fetched_by_several_threads(on_cluster):
    made = on_cluster.run(np.ones, args=(2**18,))
    found = []
    threads = [threading.Thread(target=lambda: found.append(on_cluster.local_results(made))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [part.sum() for parts in found for part in parts] == [2**18] * 16


@pytest.mark.cluster
@pytest.mark.parametrize("is_function", [False, True])
def test_no_more_calls_are_under_way_than_allowed(on_cluster, client, is_function):
    def wait(name):
        return Event(name).wait(20)

    gate = Event("in flight", client=client)
    gate.set()
    on_cluster.local_results(on_cluster.run(wait, args=("in flight",)))
    gate.clear()
    made = []

    def step():
        return on_cluster.run(wait, args=("in flight",))

    step = daskdist.function(step) if is_function else step

    def program():
        with dask.config.set({"daskdist.max-steps-in-flight": 4}):
            for _ in range(12):
                made.append(step())

    thread = threading.Thread(target=program)
    thread.start()
    eventually(lambda: len(made) >= 4)
    time.sleep(0.2)
    assert len(made) <= 5
    gate.set()
    thread.join(20)
    assert on_cluster.local_results(made) == ([True] * 12, [True] * 12)


@pytest.mark.cluster
def test_an_error_is_raised_while_later_steps_are_still_under_way(on_cluster, client):
    def fail_or_wait(name, number):
        if number == 0:
            raise ValueError("the first step fails")
        return Event(name).wait(20)

    gate = Event("after an error", client=client)
    gate.set()
    on_cluster.local_results(on_cluster.run(fail_or_wait, args=("after an error", 1)))
    gate.clear()

    def program():
        for number in range(20):
            on_cluster.run(fail_or_wait, args=("after an error", number))

    try:
        with dask.config.set({"daskdist.max-steps-in-flight": 8}), pytest.raises(ValueError, match="first step fails"):
            program()
        assert not gate.is_set()
    finally:
        gate.set()
    internals_of(on_cluster).backend.finish()


@pytest.mark.cluster
def test_functions_find_their_worker_and_its_client(on_cluster, client):
    def find():
        return get_worker().address, get_client().submit(abs, -3).result()

    found = on_cluster.local_results(on_cluster.run(find))
    assert sorted(found) == sorted((worker, 3) for worker in client.nthreads())


@pytest.mark.cluster
def test_reading_continues_while_a_step_is_computed(on_cluster, client):
    def wait(name):
        return Event(name).wait(20)

    gate = Event("reading", client=client)
    gate.set()
    on_cluster.local_results(on_cluster.run(wait, args=("reading",)))
    gate.clear()
    waiting = on_cluster.run(wait, args=("reading",))
    # Workers have one thread for tasks, which steps do not occupy.
    steps = list(on_cluster.distribute_dataset(Dataset.range(8).map(lambda x: x + 1).batch(4)))
    assert [np.concatenate(on_cluster.local_results(step)).tolist() for step in steps] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    gate.set()
    assert on_cluster.local_results(waiting) == (True, True)


@pytest.mark.cluster
def test_an_error_of_a_data_task_is_raised_where_its_step_is_looked_at(on_cluster):
    def fail(x):
        if x[0] >= 4:
            raise ValueError("this cannot be read")
        return x

    first, _, last = on_cluster.distribute_dataset(Dataset.range(6).batch(2).map(fail))
    assert on_cluster.local_results(on_cluster.run(np.sum, args=(first,))) == (0, 1)
    summed = on_cluster.run(np.sum, args=(last,))
    with pytest.raises(Exception, match="this cannot be read"):
        on_cluster.local_results(summed)


@pytest.mark.cluster
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
    # Steps that are far from the failed one have their rows in other blocks.
    for number in (*range(4), *range(14, 24)):
        assert float(losses[number]) == rows[2 * number : 2 * number + 2].sum()


@pytest.mark.cluster
def test_a_worker_that_is_killed_is_named_at_once():
    with (
        new_cluster() as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        pids = client.run(os.getpid)

        def wait():
            return float(Event("continue").wait(60))

        gate = Event("continue", client=client)
        gate.set()
        strategy.local_results(strategy.run(wait))
        gate.clear()
        waiting = strategy.reduce("SUM", strategy.run(wait), axis=None)
        worker = strategy.workers[1]
        since = time.monotonic()
        threading.Timer(0.2, os.kill, (pids[worker], signal.SIGKILL)).start()
        with pytest.raises(errors.ClusterError, match=f"lost {worker}"):
            float(waiting)
        assert time.monotonic() - since < 25
        gate.set()


def use_streams(address, security, relay):
    """Make steps on a cluster, with large values to the workers, from one to the other, and back."""
    protocol = address.partition(":")[0]
    with (
        Client(address, security=security, set_as_default=False) as client,
        dask.config.set({"daskdist.steps.relay": relay}),
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        for stream in internals_of(strategy).backend.streams._streams.values():
            assert stream.is_relayed == (relay is True)
            assert stream._comm.peer_address.startswith(f"{protocol}://")
        assert all(worker.startswith(f"{protocol}://") for worker in strategy.workers)
        batches = strategy.distribute_dataset(Dataset.range(8).batch(4))
        sums = [strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None) for batch in batches]
        large = strategy.reduce("SUM", strategy.run(np.add, args=(np.ones(2**20), 1)), axis=None)
        again = strategy.local_results(strategy.run(np.add, args=(large, 1)))
        assert [int(each) for each in sums] == [6, 22]
        assert [np.unique(each).tolist() for each in again] == [[5.0], [5.0]]


async def use_protocol(protocol, relay):
    """Make steps on a cluster of a protocol."""
    security = Security.temporary() if protocol in ("tls", "wss") else None
    async with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        host="127.0.0.1",
        protocol=protocol,
        security=security,
        processes=protocol == "tls",
        dashboard_address="127.0.0.1:0",
        asynchronous=True,
    ) as local:
        await asyncio.to_thread(use_streams, local.scheduler_address, security, relay)


@pytest.mark.cluster
@pytest.mark.parametrize("relay", ["auto", True])
def test_streams_are_encrypted_where_the_cluster_is(relay):
    pytest.importorskip("cryptography")
    asyncio.run(use_protocol("tls", relay))


@pytest.mark.cluster
@pytest.mark.parametrize(("protocol", "relay"), [("ws", "auto"), ("ws", True), ("wss", "auto")])
def test_streams_over_web_sockets(protocol, relay):
    if protocol == "wss":
        pytest.importorskip("cryptography")
    # A process of its own, as Dask leaves the sockets to the garbage collector. They would listen on all interfaces.
    program = f"""
import asyncio, sys
from tornado.httpserver import HTTPServer
sys.path[:0] = {sys.path!r}
listen = HTTPServer.listen
HTTPServer.listen = lambda self, port, address="127.0.0.1": listen(self, port, address)
from test_steps import use_protocol
asyncio.run(use_protocol({protocol!r}, {relay!r}))
print("done")
"""
    assert programs.run("-c", program, check=True, timeout=80).stdout == "done\n"


@pytest.fixture
def own_strategy():
    """Return a strategy on a cluster that no other test uses."""
    with (
        frequent_heartbeats(),
        new_cluster() as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        yield strategy


@pytest.mark.cluster
def test_a_worker_that_is_stopped_is_lost(own_strategy):
    strategy = own_strategy
    pids = strategy.client.run(os.getpid)
    assert strategy.local_results(strategy.run(float, args=(1,))) == (1.0, 1.0)
    worker = strategy.workers[1]
    os.kill(pids[worker], signal.SIGSTOP)
    try:
        with (
            dask.config.set({"daskdist.timeouts.silence": "1 s"}),
            pytest.raises(errors.ClusterError, match=rf"lost {worker}.*no answer for .*daskdist\.timeouts\.silence"),
        ):
            float(strategy.reduce("SUM", strategy.run(float, args=(1,)), axis=None))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[worker], signal.SIGCONT)
    assert float(strategy.run(float, args=(1,))) == 1.0


@pytest.mark.cluster
def test_a_worker_that_is_stopped_for_a_while_is_waited_for(on_cluster, caplog):
    worker = on_cluster.workers[1]
    pid = on_cluster.client.run(os.getpid)[worker]

    def release():
        try:
            eventually(lambda: f"{worker} has not answered for" in caplog.text)
        finally:
            os.kill(pid, signal.SIGCONT)

    with dask.config.set({"daskdist.timeouts.silence": "4 s"}):
        os.kill(pid, signal.SIGSTOP)
        resuming = threading.Thread(target=release)
        resuming.start()
        total = float(on_cluster.reduce("SUM", on_cluster.run(float, args=(1,)), axis=None))
        resuming.join()
    assert total == 2.0
    assert f"{worker} answers again" in caplog.text


@pytest.mark.cluster
def test_a_pass_continues_without_the_data_of_a_worker_that_is_stopped(own_strategy, monkeypatch):
    # A stopped worker does not end by itself.
    monkeypatch.setattr(live_workers, "_RESTART_S", 1.0)
    strategy = own_strategy
    worker = strategy.workers[1]
    pid = strategy.client.run(os.getpid)[worker]
    rows = []
    try:
        with dask.config.set({"daskdist.timeouts.silence": "1 s"}):
            for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(4_000).map(abs).batch(50))):
                rows += [row for values in strategy.local_results(batch) for row in values.tolist()]
                if number == 5:
                    os.kill(pid, signal.SIGSTOP)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert sorted(rows) == list(range(4_000))


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["run-hang", "reduce"])
def test_reading_a_hanging_result_times_out(on_cluster, client, name):
    def hang():
        return Event("hanging").wait(30)

    def hanging_sum(one, other):
        hang()
        return one + other

    gate = Event("hanging", client=client)
    gate.set()
    on_cluster.local_results(on_cluster.run(hang))
    gate.clear()
    if name == "reduce":
        hanging = on_cluster.reduce(hanging_sum, on_cluster.run(int, args=(1,)), axis=None)
    else:
        hanging = on_cluster.reduce("SUM", on_cluster.run(hang), axis=None)
    with (
        dask.config.set({"daskdist.timeouts.step": "1 s"}),
        pytest.raises(errors.ClusterError, match=rf"{name}.* has been running on .* daskdist\.timeouts\.step"),
    ):
        float(hanging)
    gate.set()
    assert float(hanging) == 2.0


@pytest.mark.cluster
def test_an_unread_failure_is_logged_at_the_end_of_the_program(client, tmp_path):
    program = f"""
import pathlib, time, daskdist
from daskdist.strategy.replica.contract import internals_of

def fail(path):
    if path:
        pathlib.Path(path + str(daskdist.get_replica_context().replica_id_in_sync_group)).touch()
        raise ValueError("nobody looks at this")
    return 1.0

strategy = daskdist.MultiWorkerMirroredStrategy({client.scheduler.address!r})
strategy.local_results(strategy.run(fail, args=("",)))
strategy.run(fail, args=({str(tmp_path / "made ")!r},))
while len(list(pathlib.Path({str(tmp_path)!r}).iterdir())) < 2 or internals_of(strategy).backend.streams._under_way:
    time.sleep(0.01)
"""
    done = programs.run("-c", program, check=True)
    assert "a step failed, and its results were not read: ValueError: nobody looks at this" in done.stderr
    assert done.stderr.count("its results were not read") == 1


# --- the scheduler's view ---


def closable(dask_scheduler):
    """Return the workers that adaptive scaling may close."""
    return sorted(dask_scheduler.workers_to_close(n=2))


@pytest.mark.cluster
def test_workers_in_use_are_not_closed_to_scale_down(client):
    workers = sorted(client.nthreads())
    assert client.run_on_scheduler(closable) == workers
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker={workers[0]: 1, workers[1]: 0}):
        assert client.run_on_scheduler(closable) == workers[1:]
        with daskdist.MultiWorkerMirroredStrategy(client):
            assert client.run_on_scheduler(closable) == []
        eventually(lambda: client.run_on_scheduler(closable) == workers[1:])
    eventually(lambda: client.run_on_scheduler(closable) == workers)


@pytest.mark.cluster
def test_a_cluster_that_adapts_keeps_the_workers_of_a_strategy():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            (worker,) = strategy.workers
            local.adapt(minimum=0, maximum=1, interval="50ms", wait_count=1)
            # This takes longer than adaptive scaling takes to close an idle worker.
            for _ in range(20):
                assert float(strategy.run(float, args=(1,))) == 1.0
                time.sleep(0.1)
            assert list(client.nthreads()) == [worker]
        eventually(lambda: not client.nthreads())


@pytest.mark.cluster
def test_a_worker_is_retired_after_its_current_step():
    def wait():
        return float(Event("retired").wait(20))

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        gate = Event("retired", client=client)
        gate.set()
        strategy.local_results(strategy.run(wait))
        gate.clear()
        loss = strategy.reduce("SUM", strategy.run(wait), axis=None)
        eventually(lambda: all(each.running for each in strategy.status().workers))
        retired = client.retire_workers([strategy.workers[1]])
        assert list(retired) == [strategy.workers[1]]
        gate.set()
        assert float(loss) == 2.0

        def continues_alone():
            with contextlib.suppress(errors.ClusterError):
                strategy.local_results(strategy.run(wait))
            return strategy.num_replicas_in_sync == 1

        eventually(continues_alone)
        assert strategy.run(wait).result() == 1.0
