"""Calls, losses, joins and calls made again, without processes: a model of the workers, and the program's real records.

The model's workers make calls in order, meet in them, report their ends late, and are lost at any point. Whatever
happens, each row counts once in the variable of each replica, and each reduction has the sum of its step.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace

import dask
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from daskdist.errors import ClusterError, CollectiveError, NotMadeAgainError
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.calls.calls import Call, Record, note_lost
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker
from daskdist.strategy.calls.recovery.call_log import CallLog
from daskdist.strategy.calls.recovery.repeated_calls import MOST_LOSSES, RepeatedCalls
from daskdist.strategy.calls.unobserved_failures import UnobservedFailures
from daskdist.strategy.variables.undo_log import UNKNOWN, UndoLog

VARIABLE = 0


def failed(error, origin=None):
    return None, Failed(Failure.of(error), origin)


class Worker:
    """A worker with one replica, whose variable is a number."""

    def __init__(self, name, value, opened_after):
        self.name = name
        self.value = value
        self.opened_after = opened_after
        self.is_alive = True
        self.undo_log = UndoLog()
        # Calls that were sent, and ends of calls that the program does not know yet.
        self.queue = deque()
        self.reports = deque()
        # The number of a call -> its result.
        self.results = {}

    def change(self, value):
        self.undo_log.note(VARIABLE, (self.value,))
        self.value = value

    def undo(self, call):
        def restore(variable, state):
            (self.value,) = state

        return self.undo_log.undo(call, restore)


class Meeting:
    """A call on all replicas that adds up what each gives, as a call with `all_reduce` does."""

    def __init__(self, call, workers, parts, undo_from):
        self.record = call.record
        self.workers = workers
        self.parts = dict(zip(workers, parts, strict=True))
        self.undo_from = undo_from
        self.came = set()

    def advance(self, worker):
        """Continue on a worker; return the end of the call there, or None if it has to wait."""
        number = self.record.number
        if worker not in self.came:
            if self.undo_from is not None:
                worker.undo_log.begin(number, self.undo_from)
            self.came.add(worker)
            return None
        missing = set(self.workers) - self.came
        if not missing:
            worker.change(worker.value + sum(self.parts.values()))
            worker.undo_log.end()
            worker.results[number] = self.parts[worker]
            return None, StaysOnWorker(8)
        if all(other.is_alive for other in missing):
            return None
        worker.undo_log.end()
        return failed(CollectiveError("a replica is missing"), number)


class Sum:
    """A call of one worker with the results of a call on replicas."""

    def __init__(self, call, source, workers, stays):
        self.record = call.record
        self.source = source.record
        self.workers = workers
        self.stays = stays

    def advance(self, worker):
        values = []
        for holder, outcome in zip(self.workers, self.source.outcomes, strict=True):
            if outcome is not None and type(outcome[1]) is Failed:
                return outcome
            if not holder.is_alive:
                return failed(ClusterError(f"{holder.name} is lost"), self.record.number)
            if self.source.number not in holder.results:
                return None
            values.append(holder.results[self.source.number])
        worker.results[self.record.number] = sum(values)
        return None, StaysOnWorker(8) if self.stays else sum(values)


class Model(RuleBasedStateMachine):
    @initialize(num_workers=st.integers(2, 4))
    def begin(self, num_workers):
        self.log = CallLog()
        self.dropped = deque()
        self.number = 0
        self.under_way = {}
        # What `RepeatedCalls` uses of the streams to workers.
        self.failures = UnobservedFailures()
        self.client = self
        self.connection = SimpleNamespace(is_lost=False)
        self.live_workers = SimpleNamespace(present=(), joined=set(), lost=())
        self.repeated = RepeatedCalls(self, self.log)
        self.workers = []
        for _ in range(num_workers):
            self.add_worker(0)
        self.live_workers.joined.clear()
        # What the variable has to be, and for each reduction that the program refers to what it has to be.
        self.expected = 0
        self.sums = []
        self.last = None
        # Losses that come while the program recovers: after so many advances of workers.
        self.later_losses = deque()
        # Whether a worker is lost at each point between undoing calls and making them again.
        self.losses_between = deque()
        self.num_joining = 0

    # --- the model of the streams ---

    def add_worker(self, value):
        self.number += 1
        name = f"worker {self.number}"
        self.workers.append(Worker(name, value, self.number))
        self.live_workers.joined.add(name)
        self.live_workers.present = tuple(worker.name for worker in self.workers)

    def is_there(self, name, number):
        return any(worker.name == name and worker.is_alive and worker.opened_after < number for worker in self.workers)

    def lost(self):
        return [worker.name for worker in self.workers if not worker.is_alive]

    def lost_error(self, lost):
        return ClusterError(f"lost {', '.join(lost)}")

    def wait(self, is_over, within_s=None):
        """Let the workers go on until a condition holds."""
        while not is_over():
            if self.later_losses and self.later_losses[0] == 0:
                self.later_losses.popleft()
                self.lose_one(len(self.later_losses))
            elif self.later_losses:
                self.later_losses[0] -= 1
            # Otherwise everything has stopped for ever.
            assert sum(self.advance(worker) or self.deliver(worker) for worker in self.workers) or is_over()

    def maybe_lose(self):
        if self.losses_between and self.losses_between.popleft():
            self.lose_one(0)

    def advance(self, worker):
        if not worker.is_alive or not worker.queue:
            return False
        call = worker.queue[0]
        had_come = isinstance(call, Meeting) and worker in call.came
        end = call.advance(worker)
        if end is None:
            return isinstance(call, Meeting) and not had_come
        worker.queue.popleft()
        worker.reports.append((call.record, end))
        return True

    def deliver(self, worker):
        if not worker.is_alive or not worker.reports:
            return False
        record, end = worker.reports.popleft()
        self.note(record, record.workers.index(worker.name), end)
        return True

    def note(self, record, place, end):
        if record.outcomes[place] is not None:
            return
        record.outcomes[place] = end
        record.has_failed |= type(end[1]) is Failed
        record.num_left -= 1
        if not record.num_left:
            record.outcomes = tuple(record.outcomes)
            del self.under_way[record.number]
            if not self.under_way:
                self.log.rest()

    def lose_one(self, number):
        alive = [worker for worker in self.workers if worker.is_alive]
        # The call that a worker was lost with twice is not made on the last one.
        if len(alive) <= 2:
            return
        lost = alive[number % len(alive)]
        lost.is_alive = False
        note_lost(list(self.under_way.values()), lost.name)
        for record in list(self.under_way.values()):
            for place, name in enumerate(record.workers):
                if name == lost.name:
                    self.note(record, place, failed(self.lost_error([lost.name])))

    def new_call(self, workers, name, *, is_of_replicas):
        if lost := [worker.name for worker in workers if not worker.is_alive]:
            raise self.lost_error(lost)
        self.number += 1
        names = tuple(worker.name for worker in workers)
        call = Call(Record(self.number, names, (), name, is_of_replicas=is_of_replicas), self.dropped)
        self.under_way[self.number] = call.record
        return call

    def send_meeting(self, rows, undo_from, group):
        workers = [worker for worker in self.workers if group is None or worker.name in group]
        parts = [sum(rows[place :: len(workers)]) for place in range(len(workers))]
        call = self.new_call(workers, "run", is_of_replicas=True)
        for worker in workers:
            worker.queue.append(Meeting(call, workers, parts, undo_from))
        # They meet in one.
        came = workers[0].queue[-1].came
        for worker in workers:
            worker.queue[-1].came = came
        return call

    def send_sum(self, source, stays, group):
        workers = [next(w for w in self.everyone if w.name == name) for name in source.workers]
        worker = next(worker for worker in self.workers if worker.is_alive)
        call = self.new_call([worker], "reduce", is_of_replicas=False)
        worker.queue.append(Sum(call, source, workers, stays))
        return call

    # --- the program ---

    @property
    def everyone(self):
        return [*self.workers, *self.gone]

    gone = ()

    def recover(self):
        """Continue with the remaining workers, as `WorkerRecovery` and `StrategyInternals` do."""
        while self.lost():
            self.gone = (*self.gone, *(worker for worker in self.workers if not worker.is_alive))
            self.workers = [worker for worker in self.workers if worker.is_alive]
            self.live_workers.present = tuple(worker.name for worker in self.workers)
            self.wait(lambda: not self.under_way)
            if self.lost():
                continue
            first = self.repeated.first_to_undo()
            if first is not None:
                are_undone = [worker.undo(first) for worker in self.workers if worker.is_alive]
                assert all(are_undone)
                self.repeated.note_undone()
            # As `align_on_replica` does: a worker may be lost before others have its value.
            self.maybe_lose()
            if not self.lost():
                for worker in self.workers:
                    worker.value = self.workers[0].value
                self.repeated.note_aligned()
            self.maybe_lose()
            if self.lost():
                continue
            # In the places of lost ones that Dask has started again.
            for _ in range(self.num_joining):
                self.add_worker(self.workers[0].value)
            self.num_joining = 0
            try:
                self.repeated.make_again(self.live_workers.present)
            except ClusterError:
                assert self.lost()

    def finish(self):
        self.later_losses.clear()
        self.losses_between.clear()
        self.recover()
        self.wait(lambda: not self.under_way)

    @rule(rows=st.lists(st.integers(1, 9), min_size=1, max_size=5))
    def step(self, rows):
        self.recover()
        make = partial(self.send_meeting, rows)
        undo_from = self.log.begin_call(takes_batch=True)
        self.last = call = make(undo_from, None)
        self.log.add(call, partial(make, 0), begins_step=True)
        self.expected += sum(rows)
        self.last_sum = sum(rows)

    @rule()
    def call_without_a_batch(self):
        self.recover()
        make = partial(self.send_meeting, [1])
        undo_from = self.log.begin_call(takes_batch=False)
        if undo_from is None:
            # It is not made again if it fails.
            self.finish()
            make(None, None)
            self.wait(lambda: not self.under_way)
        else:
            self.log.add(make(undo_from, None), partial(make, 0))
        self.expected += 1

    @precondition(lambda self: self.last is not None)
    @rule(stays=st.booleans())
    def reduce(self, stays=False):
        self.recover()
        self.add_up(self.last, stays, self.last_sum)

    @precondition(lambda self: self.sums)
    @rule(number=st.integers(0, 9), stays=st.booleans())
    def use_a_sum(self, number, stays):
        self.recover()
        call, expected = self.sums[number % len(self.sums)]
        self.add_up(call, stays, expected)

    def add_up(self, source, stays, expected):
        if any(not self.is_there(name, source.record.number) for name in source.workers):
            # Its results are gone: that is an error before the call is sent.
            return
        make = partial(self.send_sum, source, stays)
        call = make(None)
        self.log.add(call, make)
        self.sums.append((call, expected))

    @rule()
    def forget_results(self):
        self.last, self.sums = None, []

    @rule(number=st.integers(0, 9))
    def lose(self, number):
        self.lose_one(number)

    @rule(after=st.lists(st.integers(0, 9), max_size=4))
    def lose_while_it_recovers(self, after):
        self.later_losses.extend(after)

    @precondition(lambda self: len(self.workers) < 5)
    @rule()
    def join(self):
        self.finish()
        self.add_worker(self.workers[0].value)

    @rule(are_lost=st.lists(st.booleans(), max_size=4))
    def lose_between_undoing_and_making_again(self, are_lost):
        self.losses_between.extend(are_lost)

    @precondition(lambda self: len(self.workers) < 5)
    @rule(number=st.integers(1, 3))
    def join_while_it_recovers(self, number):
        self.num_joining = number

    @rule(number=st.integers(0, 9))
    def go_on(self, number):
        self.advance(self.workers[number % len(self.workers)])

    @rule(number=st.integers(0, 9))
    def report(self, number):
        self.deliver(self.workers[number % len(self.workers)])

    @rule()
    def look(self):
        self.finish()
        (value,) = {worker.value for worker in self.workers}
        if self.repeated.failed is not None:
            # The program is told that steps are not made again.
            self.repeated.failed, self.expected, self.sums = None, value, []
        assert value == self.expected
        for call, expected in self.sums:
            record = call.record
            _, value = record.outcomes[0]
            if record.has_failed:
                # What it needs was complete before the loss, and is not made again.
                assert isinstance(value.failure.error(), ClusterError)
            elif type(value) is not StaysOnWorker:
                assert value == expected
            elif self.is_there(record.workers[0], record.number):
                assert [w.results[record.number] for w in self.workers if w.name == record.workers[0]] == [expected]

    def teardown(self):
        if hasattr(self, "log"):
            self.look()


def test_a_worker_that_has_joined_since_does_not_make_a_call_again():
    model = Model()
    model.begin(num_workers=2)
    model.step(rows=[1])
    model.join()
    model.join()
    model.reduce()
    # The step is complete, and only its results are lost.
    model.lose(number=0)
    model.lose(number=0)
    model.step(rows=[2])
    model.look()
    assert model.expected == 3
    ((call, _),) = model.sums
    assert call.record.has_failed


def test_a_call_is_given_up_if_all_workers_that_undid_it_are_lost():
    model = Model()
    model.begin(num_workers=2)
    model.step(rows=[1])
    model.join()
    model.join()
    model.reduce()
    model.lose_between_undoing_and_making_again([True])
    model.lose(number=0)
    model.recover()
    # The joined workers have the changes of the step, which is not made again.
    assert [worker.value for worker in model.workers] == [1, 1]
    assert isinstance(model.repeated.failed.failure.error(), NotMadeAgainError)


def test_calls_are_undone_as_a_whole_or_not_at_all():
    undo_log, restored = UndoLog(), []
    undo_log.begin(1, 0)
    undo_log.note(VARIABLE, UNKNOWN)
    undo_log.note(VARIABLE + 1, (5,))
    assert not undo_log.undo(1, lambda *change: restored.append(change))
    assert restored == []
    undo_log.begin(9, 4)
    # What changed before is no longer known.
    assert not undo_log.undo(1, lambda *change: restored.append(change))
    undo_log.note(VARIABLE, (7,))
    assert undo_log.undo(9, lambda *change: restored.append(change))
    assert restored == [(VARIABLE, (7,))]


@pytest.mark.parametrize("is_complete", [False, True])
def test_calls_that_were_undone_are_made_by_workers_that_have_joined_since(is_complete):
    model = Model()
    model.begin(num_workers=3)
    for number in (1, 2, 3):
        model.step(rows=[number])
    if is_complete:
        model.wait(lambda: not model.under_way)
        # Its results are needed, and lost with a worker.
        model.reduce()
    model.lose(number=0)
    model.num_joining = 2
    make_again = model.repeated.make_again

    def with_losses(present):
        if len(present) == 4:
            # The other two that were there before are lost, too: at the first call, or before it.
            model.later_losses.extend([0, 0])
            if is_complete:
                model.lose_one(1)
                model.lose_one(0)
                model.later_losses.clear()
        make_again(present)

    model.repeated.make_again = with_losses
    model.look()
    assert model.expected == 6
    assert len(model.workers) == 2


class TestModel(Model.TestCase):
    settings = settings(max_examples=300, stateful_step_count=40, deadline=None)

    def runTest(self):  # noqa: N802
        # A call that is being made at many losses would fail.
        with dask.config.set({MOST_LOSSES: 1000}):
            super().runTest()
