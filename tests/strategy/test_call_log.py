"""The log of calls that are made again after a worker was lost."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest

from daskdist.errors import ClusterError, CollectiveError, NotMadeAgainError, WaitTimeoutError
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.backend import CallRepetition, GenerationEndedError, PresentWorkers
from daskdist.strategy.calls.calls import Call, Record, note_lost
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.calls.recovery.call_log import CallLog
from daskdist.strategy.calls.recovery.generations import Generations
from daskdist.strategy.calls.recovery.scheduler_connection import SchedulerConnection
from daskdist.strategy.calls.recovery.worker_recovery import WorkerRecovery
from daskdist.strategy.group import Replica, ReplicaGroup


def a_call(number, is_of_replicas=False):
    return Call(Record(number, ("lost", "left"), (), f"call {number}", is_of_replicas=is_of_replicas), deque())


def end(log, call, error=None):
    record = call.record
    record.outcomes = [(None, Failed(Failure.of(error), record.number)) if error else (None, 0)] * 2
    record.num_left, record.has_failed = 0, error is not None
    log.rest()


def test_a_lost_result_that_nothing_refers_to_does_not_stay_in_the_log():
    log = CallLog()
    step, result = a_call(1, is_of_replicas=True), a_call(2)
    log.add(step, lambda group: a_call(3), begins_step=True)
    log.add(result, lambda group: a_call(4))
    end(log, step)
    end(log, result, ClusterError("worker lost is gone"))
    assert log
    del result
    for logged in log.calls_to_make_again(lambda worker: worker == "left"):
        log.make_again(logged, None)
    # Otherwise all later steps would be kept, and made again after the next loss.
    later = a_call(5, is_of_replicas=True)
    assert log.begin_call(takes_batch=True) == 0
    log.add(later, lambda group: a_call(6), begins_step=True)
    end(log, later)
    assert not log
    assert log.calls_to_make_again(lambda worker: False) == []


def test_a_lost_result_is_made_again_for_what_refers_to_it():
    log = CallLog()
    step, result = a_call(1, is_of_replicas=True), a_call(2)
    log.add(step, lambda group: a_call(3), begins_step=True)
    log.add(result, lambda group: a_call(4))
    end(log, step)
    end(log, result, ClusterError("worker lost is gone"))
    for logged in log.calls_to_make_again(lambda worker: worker == "left"):
        log.make_again(logged, None)
    assert result.record.number == 4
    assert log
    end(log, result)
    assert not log


def test_a_lost_worker_was_making_one_of_the_first_two_calls_of_each_of_its_replicas():
    def on(*workers, ended=(), is_of_replicas=True):
        record = Record(1, workers, (), "call", is_of_replicas=is_of_replicas)
        record.outcomes = [(None, 0) if place in ended else None for place in range(len(workers))]
        return record

    two_replicas = "lost", "left", "lost"
    over, first, second, third, fourth = [on(*two_replicas, ended=ended) for ended in ((0, 2), (0,), (), (), ())]
    reduction, elsewhere = on("lost", is_of_replicas=False), on("left")
    records = [elsewhere, over, first, reduction, second, third, fourth]
    note_lost(records, "lost")
    # The end of the first may not have been reported yet.
    assert [record.lost for record in records] == [(), (), ("lost",), (), ("lost",), ("lost",), ()]
    # A reduction is counted if nothing else is made.
    note_lost([reduction], "lost")
    assert reduction.lost == ("lost",)


def generations_of(group, recovery, align):
    backend = SimpleNamespace(live_workers=PresentWorkers(), recovery=recovery, repetition=CallRepetition())
    return Generations(group, backend, lambda: align)


@pytest.mark.parametrize("error", [ClusterError, CollectiveError])
def test_a_recovery_goes_on_if_another_worker_is_lost_while_replicas_meet(error):
    three = ReplicaGroup("token", tuple(Replica(name, "CPU:0") for name in "abc"))
    groups = [replace(three, replicas=three.replicas[:number]) for number in (2, 1)]

    class Recovery:
        in_doubt = True

        def recover(self, group):
            return groups.pop(0) if groups else group

    sizes = []

    def align(some_remain):
        sizes.append(len(current.now.replicas))
        if len(sizes) == 1:
            raise error("a replica is missing")

    current = generations_of(three, Recovery(), align)
    current.recover()
    assert sizes == [2, 1]


def test_a_recovery_goes_on_if_more_is_lost_while_others_are_looked_for():
    two = ReplicaGroup("token", (Replica("a", "CPU:0"), Replica("b", "CPU:0")))
    groups = [GenerationEndedError("more is lost"), replace(two, replicas=two.replicas[:1])]

    class Recovery:
        in_doubt = True

        def recover(self, group):
            found = groups.pop(0) if groups else group
            if isinstance(found, Exception):
                raise found
            return found

    aligned = []
    current = generations_of(two, Recovery(), aligned.append)
    current.recover()
    assert (aligned, len(current.now.replicas), groups) == ([True], 1, [])


def test_a_recovery_that_failed_is_continued_by_the_next_call():
    two = ReplicaGroup("token", (Replica("a", "CPU:0"), Replica("b", "CPU:0")))
    groups, errors, calls = [replace(two, replicas=two.replicas[:1])], [CollectiveError("first"), OSError("second")], []

    class Recovery:
        in_doubt = True

        def recover(self, group):
            self.in_doubt = False
            return groups.pop() if groups else group

    def align(some_remain):
        calls.append(some_remain)
        if errors:
            raise errors.pop(0)

    current = generations_of(two, Recovery(), align)
    with pytest.raises(OSError, match="second"):
        current.recover()
    assert current.is_recovering
    current.recover()
    assert not current.is_recovering
    current.recover()
    assert calls == [True] * 3


def test_steps_that_are_not_made_again_are_an_error_also_if_replicas_change():
    current = generations_of(1, None, None)

    def work():
        raise NotMadeAgainError("steps") if current.now == 1 else ClusterError("never")

    with pytest.raises(NotMadeAgainError):
        current.call(work, lambda: setattr(current, "now", 2))


@pytest.mark.parametrize("changed", ["replicas", "calls made again", "nothing"])
def test_what_fails_with_a_generation_is_called_again_in_the_next_one(changed):
    current, errors = generations_of(1, None, None), [ClusterError("lost"), ClusterError("lost again")]

    def recover():
        if changed == "replicas":
            current.now += 1
        elif changed == "calls made again":
            current._repetition.num_made_again += 1

    def work():
        if errors:
            raise errors.pop(0)
        return "result"

    if changed == "nothing":
        with pytest.raises(ClusterError, match=r"^lost$"):
            current.call(work, recover)
    else:
        assert current.call(work, recover) == "result"


def test_a_call_that_runs_too_long_while_a_worker_leaves_ends_the_recovery():
    def finish():
        raise WaitTimeoutError("too long")

    live_workers = LiveWorkers(["a", "b"])
    live_workers.note_leaving("a")
    client = SimpleNamespace(status="running")
    streams = SimpleNamespace(client=client, live_workers=live_workers, lost=list, finish=finish)
    recovery = WorkerRecovery(streams, SimpleNamespace(missing=list), None, None, None, None)
    two = ReplicaGroup("token", (Replica("a", "CPU:0"), Replica("b", "CPU:0")))
    current = generations_of(two, recovery, lambda some_remain: None)
    live_workers.in_doubt = True
    with pytest.raises(WaitTimeoutError, match="too long"):
        current.recover()
    assert live_workers.in_doubt


def test_a_scheduler_that_is_lost_while_the_client_has_no_connection_is_waited_for():
    client = SimpleNamespace(status="running", scheduler_comm=object(), _timeout=30)
    connection = SchedulerConnection(client)
    assert not connection.is_lost_again
    client.status, client.scheduler_comm = "connecting", None
    assert connection.is_lost
    assert connection.is_lost_again
    connection._renewed = client.scheduler_comm = object()
    client.status = "running"
    assert connection.is_lost
    assert not connection.is_lost_again
    client.status, client.scheduler_comm = "connecting", None
    assert connection.is_lost_again


def test_other_threads_wait_for_a_recovery_that_is_under_way():
    begun, gate, order = threading.Event(), threading.Event(), []
    first = ReplicaGroup("token", (Replica("a", "CPU:0"), Replica("b", "CPU:0")))
    left = replace(first, replicas=first.replicas[:1])

    class Recovery:
        in_doubt = True

        def recover(self, group):
            begun.set()
            assert gate.wait(20)
            self.in_doubt = False
            return left

    current = generations_of(first, Recovery(), lambda some_remain: None)

    def recover(name):
        current.recover()
        order.append((name, current.now is left))

    threads = [threading.Thread(target=recover, args=(name,)) for name in "ab"]
    threads[0].start()
    assert begun.wait(20)
    assert current.is_recovering
    threads[1].start()
    threads[1].join(0.05)
    assert order == []
    gate.set()
    for thread in threads:
        thread.join(20)
    assert sorted(order) == [("a", True), ("b", True)]
    assert not current.is_recovering
