"""Loops on replicas that make no progress: the log says so, and they are not waited for without end."""

from __future__ import annotations

import itertools
import signal
import threading

import dask
import pytest
from distributed import Event

from daskdist import Dataset, MirroredStrategy, errors, get_replica_context
from daskdist.strategy.input.shared_reader import SharedPass
from daskdist.strategy.replica.call_end import CallEnd

pytestmark = pytest.mark.timeout(120)

_LIMIT_S = 3


def steps_of(strategy):
    return strategy.distribute_dataset(Dataset.range(40).batch(4))


@pytest.mark.cluster
@pytest.mark.parametrize("begins", [True, False])
def test_a_loop_that_makes_no_progress_is_named(on_cluster, client, caplog, begins):
    def loop(batches):
        context = get_replica_context()
        is_hanging = context.replica_id_in_sync_group == 1
        if not begins:
            Event("hung").wait(60)
        for number, _ in enumerate(batches):
            if is_hanging and number == 3:
                # The other replica waits in a collective operation, which has a limit of its own.
                Event("hung").wait(60)
            context.all_reduce("SUM", 1)
        return number

    gate = Event("hung", client=client)
    gate.clear()
    where = rf"loop of replica 1 on {on_cluster.workers[1]}" if begins else r"loop of replica \d on .*"
    last = "its last one was batch 3" if begins else "it has made none"
    try:
        with (
            dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}),
            pytest.raises(errors.ClusterError, match=rf"{where} has taken no batch .*daskdist\.timeouts\.loop; {last}"),
        ):
            on_cluster.local_results(on_cluster.run(loop, args=(steps_of(on_cluster),)))
    finally:
        gate.set()
    messages = [record.message for record in caplog.records if "daskdist.timeouts.loop" in record.message]
    assert 1 <= len(messages) <= 4
    assert all(last in message for message in messages)
    # The loop ends now, and others follow it.
    assert on_cluster.local_results(on_cluster.run(loop, args=(steps_of(on_cluster),))) == (9, 9)


@pytest.mark.cluster
def test_a_loop_may_take_any_time_in_all(on_cluster):
    def loop(batches):
        total = 0
        for number, _ in enumerate(batches):
            # Each step takes much less than the limit, and all together longer.
            threading.Event().wait(0.5)
            total += get_replica_context().all_reduce("SUM", number)
        return total

    with dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}):
        assert on_cluster.local_results(on_cluster.run(loop, args=(steps_of(on_cluster),))) == (90, 90)


@pytest.mark.parametrize("which", [0, 1])
def test_loops_in_threads_end_if_one_makes_no_progress(caplog, which):
    gate = threading.Event()
    errors_of_loops = []

    def loop(batches):
        is_hanging = get_replica_context().replica_id_in_sync_group == which
        try:
            for number, _ in enumerate(batches):
                if is_hanging and number == 3:
                    gate.wait(60)
        except errors.ClusterError as error:
            errors_of_loops.append(error)
            # The replica in the program's own thread continues only now.
            gate.set()
            raise

    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    endless = strategy.distribute_dataset(Dataset.range(4).repeat().batch(2))
    message = rf"loop of replica {which} has taken no batch .*daskdist\.timeouts\.loop; its last one was batch 3"
    with dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}), pytest.raises(errors.ClusterError, match=message):
        strategy.run(loop, args=(endless,))
    gate.set()
    assert any("daskdist.timeouts.loop" in record.message for record in caplog.records)
    assert errors_of_loops


def test_a_loop_in_a_thread_that_ends_last_is_not_waited_for_without_end():
    gate = threading.Event()

    def loop(batches):
        for number, _ in enumerate(batches):
            if number == 3 and get_replica_context().replica_id_in_sync_group:
                gate.wait(60)

    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    try:
        with (
            dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}),
            pytest.raises(errors.ClusterError, match=r"loop of replica 1 .* batch 3; it continues in its thread"),
        ):
            strategy.run(loop, args=(steps_of(strategy),))
    finally:
        gate.set()
    assert strategy.run(len, args=([],)).values == (0, 0)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals are sent to threads on POSIX systems only")
@pytest.mark.parametrize("waits", [True, False])
def test_loops_in_threads_end_if_the_program_is_interrupted(waits):
    messages, kept, is_over = [], [], threading.Event()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def loop(batches):
        if not get_replica_context().replica_id_in_sync_group:
            # The program's own replica waits for the others, or still takes batches. Its iterator is kept: Python
            # ignores an interrupt that comes while an iterator is being collected.
            kept.append(iter(batches))
            return sum(1 for _ in itertools.islice(kept[0], 3 if waits else None))
        try:
            for number, _ in enumerate(batches):
                if number == 50:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        except errors.ClusterError as error:
            messages.append(str(error))
        is_over.set()
        return 0

    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    endless = strategy.distribute_dataset(Dataset.range(4).repeat().batch(2))
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(loop, args=(endless,))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_over.wait(10)
    assert messages == ["the call was interrupted"]


def test_an_interrupt_at_the_end_of_a_loop_is_not_lost(monkeypatch):
    leave = SharedPass.leave

    def interrupted(self, lane):
        leave(self, lane)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def loop(batches):
        return sum(1 for _ in itertools.islice(batches, 3))

    monkeypatch.setattr(SharedPass, "leave", interrupted)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(KeyboardInterrupt):
        strategy.run(loop, args=(steps_of(strategy),))


def test_a_loop_in_a_thread_may_take_any_time_after_that_of_the_caller():
    def loop(batches):
        total = 0
        for number, _ in enumerate(batches):
            if get_replica_context().replica_id_in_sync_group:
                # Longer than the limit in all.
                threading.Event().wait(0.4)
            total += number
        return total

    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with dask.config.set({"daskdist.timeouts.loop": _LIMIT_S}):
        assert strategy.run(loop, args=(steps_of(strategy),)).values == (45, 45)


def test_a_call_notes_what_its_replicas_did_last():
    end = CallEnd()
    assert end.last(0) is None
    end.note(0, "batch", 2)
    end.note(1, "all_reduce(SUM)", begins=True)
    assert [end.last(number)[0] for number in (0, 1)] == ["batch 2", "all_reduce(SUM)"]
    assert end.last(0)[1] > end.last(1)[1] == 0
    assert end.last(2) is None
