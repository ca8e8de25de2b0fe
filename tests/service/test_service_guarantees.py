"""What consumers of the data service can rely on, whatever is lost and in whichever order messages come."""

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

from daskdist.service.modes import ShardingPolicy

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
        # Consumers that were killed, or may have been cut off while they left.
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
        alive = [each for each in self.service.workers.values() if each.is_alive]
        if alive:
            alive[number % len(alive)].produce()

    @rule(number=small, most=st.integers(1, 4), is_ahead=st.booleans())
    def a_program_takes(self, number, most, is_ahead):
        reading = self._reading()
        if reading:
            reading[number % len(reading)].take(most, is_ahead=is_ahead)

    @rule()
    def time_passes(self):
        for worker in self.service.workers.values():
            if worker.is_alive:
                worker.producers.tick()

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
        alive = [each for each in self.service.workers.values() if each.is_alive]
        if alive:
            self.service.kill_worker(alive[number % len(alive)], num_kept)

    @rule(number=small, num_kept=small)
    def a_consumer_is_killed(self, number, num_kept):
        reading = self._reading()
        if reading:
            self.num_lost += 1
            self.service.kill_consumer(reading[number % len(reading)], num_kept)

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
        return [each for each in self.service.consumers.values() if each.is_reading]


class Leased(Service):
    """Runs of elements are leased to workers."""

    is_leased = True


class Files(Service):
    """Each worker has a share."""

    mode = ShardingPolicy.FILE


class Dropped(Service):
    """What a lost consumer had is given up."""

    redelivers = False
    is_leased = True


class FewOutstanding(Service):
    """Not more than two elements are on their way to a consumer."""

    is_leased = True
    window = 2


class Copies(Service):
    """Each worker produces the whole dataset."""

    mode = ShardingPolicy.OFF

    def check(self, living, in_all):
        assert set(in_all) == set(range(self.num_elements))


@pytest.mark.parametrize("machine", [Service, Leased, Files, Dropped, FewOutstanding, Copies])
def test_elements_come_as_often_as_is_promised(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))
