"""Guarantees for consumers of the data service, under losses and any order of messages."""

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from service_simulation import Simulation

from daskdist.service.sharding_policy import ShardingPolicy

small = st.integers(0, 3)


class Service(RuleBasedStateMachine):
    """A job while workers and consumers come, leave and die, and connections are cut."""

    mode = ShardingPolicy.DYNAMIC
    is_leased = False
    redelivers = True
    window: int | None = None
    num_elements = 24

    @initialize(num_workers=st.integers(1, 3), num_consumers=st.integers(1, 3))
    def begin(self, num_workers, num_consumers):
        self.service = Simulation(
            self.mode,
            self.num_elements,
            is_leased=self.is_leased,
            redelivers=self.redelivers,
            window=self.window,
        )
        # The number of consumers that were killed, or whose connection may have been cut while they left.
        self.num_lost = 0
        for _ in range(num_workers):
            self.service.add_worker()
        for _ in range(num_consumers):
            self.service.add_consumer()

    @rule(numbers=st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    def messages_come(self, numbers):
        for number in numbers:
            steps = self.service.steps()
            if steps:
                steps[number % len(steps)]()

    @rule(number=small)
    def a_worker_produces(self, number):
        alive = [worker for worker in self.service.workers.values() if worker.is_alive]
        if alive:
            alive[number % len(alive)].produce()

    @rule(number=small, most=st.integers(1, 4), is_ahead=st.booleans())
    def a_program_takes(self, number, most, is_ahead):
        reading = self._reading()
        if reading:
            reading[number % len(reading)].take(most, is_ahead=is_ahead)

    @rule()
    def time_passes(self):
        self.service.tick()

    @precondition(lambda self: len(self.service.workers) < 6)
    @rule()
    def a_worker_comes(self):
        self.service.add_worker()

    @precondition(lambda self: len(self.service.consumers) < 6)
    @rule()
    def a_consumer_comes(self):
        self.service.add_consumer()

    @rule(number=small, num_kept=small)
    def a_worker_is_killed(self, number, num_kept):
        alive = [worker for worker in self.service.workers.values() if worker.is_alive]
        if alive:
            self.service.kill_worker(alive[number % len(alive)], num_kept)

    @rule(number=small, num_kept=small)
    def a_consumer_is_killed(self, number, num_kept):
        reading = self._reading()
        if reading:
            self.num_lost += 1
            self.service.kill_consumer(reading[number % len(reading)], num_kept)

    @precondition(lambda self: len(self.service.workers) < 6)
    @rule()
    def the_scheduler_restarts(self):
        self.service.restart_dispatcher()

    @rule(number=small)
    def a_consumer_closes(self, number):
        reading = self._reading()
        if reading:
            reading[number % len(reading)].close()

    @rule(number=small, num_kept=small)
    def a_connection_is_cut(self, number, num_kept):
        open_links = [link for link in self.service.links if not link.is_cut]
        if open_links:
            self.num_lost += 1
            open_links[number % len(open_links)].cut(num_kept)

    @invariant()
    def windows_hold(self):
        if self.window is not None and hasattr(self, "service"):
            for consumer in self.service.consumers.values():
                if consumer.is_alive:
                    assert consumer.num_out <= self.window

    def teardown(self):
        if hasattr(self, "service"):
            self.service.finish()
            self.check(self.service.counts(of_living=True), self.service.counts(of_living=False))

    def check(self, living, in_all):
        assert max(living.values(), default=1) == 1
        if self.redelivers or not self.num_lost:
            assert set(in_all) == set(range(self.num_elements))

    def _reading(self):
        return [consumer for consumer in self.service.consumers.values() if consumer.is_reading]


class Leased(Service):
    """A simulation in which runs of elements are leased to workers."""

    is_leased = True


class Files(Service):
    """A simulation in which each worker has a share of the elements."""

    mode = ShardingPolicy.FILE


class Dropped(Service):
    """A simulation with ``on_consumer_loss="drop"``: elements of a lost consumer are dropped."""

    redelivers = False
    is_leased = True


class FewOutstanding(Service):
    """A simulation in which at most two elements are under way to a consumer."""

    is_leased = True
    window = 2


class Copies(Service):
    """A simulation in which each worker produces the whole dataset."""

    mode = ShardingPolicy.OFF

    def check(self, living, in_all):
        assert set(in_all) == set(range(self.num_elements))


@pytest.mark.parametrize("machine", [Service, Leased, Files, Dropped, FewOutstanding, Copies])
def test_elements_are_delivered_as_often_as_guaranteed(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))


# --- state of an endless task ---

# The limit is far below the number of elements, but above the number in flight and used since the last tick.
MOST_KEPT = 100


def sizes(service):
    """Return the numbers of intervals that the parts of the service keep."""
    consumers = [item for item in service.consumers.values() if item.is_reading]
    used = [numbers for value in consumers for numbers in value.reading._done.values()]
    tasks = [task.done for iteration in service.dispatcher.iterations() for task in iteration.tasks.values()]
    return [len(list(numbers)) for numbers in (*used, *tasks)]


@pytest.mark.parametrize(
    ("mode", "num_elements", "options"),
    [
        (ShardingPolicy.DATA, 100_000, {}),
        (ShardingPolicy.DATA, 12_000, {"num_consumers": 3}),
        (ShardingPolicy.DYNAMIC, 100_000, {"cache_bytes": 1 << 20}),
    ],
    ids=["first come", "rounds", "cache"],
)
def test_state_of_a_long_shared_task_is_bounded(mode, num_elements, options):
    draw = random.Random(0)
    service = Simulation(mode, num_elements, window=250, part=100, **options)
    service.add_worker()
    for _ in range(3):
        service.add_consumer()
    # Five connections are cut, a worker is lost, and the scheduler is restarted.
    faults = dict.fromkeys(range(100, 600, 100), "cut") | {650: "worker", 700: "scheduler"}
    if "cache_bytes" in options:
        # Workers and dispatchers are not replaced here, since another worker would start with an empty cache.
        faults = {number: fault for number, fault in faults.items() if fault == "cut"}
    largest = number = 0
    while any(entry.is_reading for entry in service.consumers.values()):
        number += 1
        for step in service.steps():
            step()
        for worker in [item for item in service.workers.values() if item.is_alive]:
            worker.produce()
        for consumer in service.consumers.values():
            if consumer.is_reading:
                consumer.take(draw.choice((40, 100, 100, 100)))
        if number % 10 == 0:
            service.tick()
            largest = max(largest, *sizes(service))
        fault = faults.pop(number, None)
        if fault == "cut":
            draw.choice([link for link in service.links if not link.is_cut]).cut(draw.randint(0, 3))
        elif fault == "worker":
            service.kill_worker(next(value for value in service.workers.values() if value.is_alive), 1)
        elif fault == "scheduler":
            service.restart_dispatcher()
        if fault in ("worker", "scheduler"):
            service.add_worker()
    assert not faults
    assert largest < MOST_KEPT
    counts = service.counts(of_living=True)
    assert len(counts) == num_elements
    assert max(counts.values()) == 1


def test_elements_given_up_with_their_consumer_are_not_produced_again():
    service = Simulation(ShardingPolicy.DATA, 24, redelivers=False)
    service.add_worker()
    service.add_consumer()
    lost, worker = service.consumers["consumer-1"], service.workers["worker-0"]
    while not lost.taken:
        for step in service.steps():
            step()
        worker.produce()
        lost.take(2)
    service.kill_consumer(lost, 0)
    while steps := service.steps():
        steps[0]()
    # Let the worker report the dropped elements before it is lost.
    service.tick()
    while steps := service.steps():
        steps[0]()
    service.kill_worker(worker, 0)
    service.finish()
    counts = service.counts(of_living=False)
    assert max(counts.values()) == 1
    assert len(counts) < 24


@pytest.mark.parametrize("mode", [ShardingPolicy.DYNAMIC, ShardingPolicy.FILE])
def test_consumers_that_are_read_by_turns_do_not_wait_for_each_other(mode):
    draw = random.Random(0)
    for _ in range(50):
        service = Simulation(mode, 24, is_leased=mode is ShardingPolicy.DYNAMIC)
        for _ in range(2):
            service.add_worker()
            service.add_consumer()
        turns = itertools.cycle(service.consumers.values())
        consumer, number = next(turns), 0
        while any(value.is_reading for value in service.consumers.values()):
            number += 1
            assert number < 2_000
            for step in draw.sample(service.steps(), k=draw.randint(0, len(service.steps()))):
                step()
            for worker in service.workers.values():
                worker.produce()
            service.tick()
            num_taken = len(consumer.taken)
            consumer.take(1)
            if len(consumer.taken) > num_taken or not consumer.is_reading:
                consumer = next(turns)
        counts = service.counts(of_living=True)
        assert counts == dict.fromkeys(range(24), 1)
