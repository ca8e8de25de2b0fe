"""Delivery for coordinated reads, in rounds."""

from __future__ import annotations

from daskdist.errors import ArgumentError
from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.delivery import Action, Consumer, Delivery, Done, Forget, PartSizes
from daskdist.service.worker.task_messages import End


class CoordinatedReads(Delivery):
    """Delivery for coordinated reads: of every ``num_consumers`` elements, each consumer gets that at its index.

    The elements that a lost consumer has not used wait for another consumer of the same index.
    """

    def __init__(self, num_consumers: int, done: Pairs = ()) -> None:
        super().__init__()
        self.done = Intervals(done)
        self._num_consumers = num_consumers
        # By index: the next element to send.
        self._next = list(range(num_consumers))
        self._sizes = PartSizes()
        self._is_done = False
        # All consumers have left or are lost; before the first one comes, elements are produced for it.
        self._is_left = False

    @property
    def is_wanted(self) -> bool:
        return not self._is_left

    @property
    def missing(self) -> list[int]:
        """The indexes without a consumer."""
        return sorted(set(range(self._num_consumers)) - {consumer.index for consumer in self.consumers})

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        self._num_produced = stop
        self._sizes.add(first, stop, num_bytes)
        actions: list[Action] = [Forget(*pair) for pair in self.done.within(first, stop)]
        return actions + self._send()

    def finished(self) -> list[Action]:
        self._is_finished = True
        return self._send()

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        other = next((other for other in self.consumers if other.index == consumer.index), consumer)
        if other.name != consumer.name:
            raise ArgumentError(
                f"consumer_index {consumer.index} is taken by the consumer {other.name}; give each another index"
            )
        actions = self._note_done(done)
        self._consumers[consumer.name] = consumer
        self._is_left = False
        # All elements before the first that is missing are done.
        first = self.done.first_missing()
        first += (consumer.index - first) % self._num_consumers
        while first in self.done or first in consumer.held:
            first += self._num_consumers
        self._next[consumer.index] = first
        return actions + self._send()

    def asked(self, name: str, used: Pairs, num_elements: int) -> list[Action]:
        if consumer := self._consumers.get(name):
            consumer.use(used)
            consumer.num_asked += num_elements
        actions = self._note_done(used)
        self._sizes.forget(self.done.first_missing())
        return actions + self._send()

    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        actions = self._note_done(done)
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return actions
        self._is_left = not self._consumers
        return actions if redeliver else actions + self._note_done(consumer.held)

    def _note_done(self, done: Pairs) -> list[Action]:
        new = [part for pair in done for part in self.done.missing(*pair)]
        self.done.update(new)
        return self._forget(new)

    def _forget(self, pairs: Pairs) -> list[Action]:
        # Elements that are not reproduced yet are freed when they are.
        num_produced = self._num_produced
        return [Forget(first, min(stop, num_produced)) for first, stop in pairs if first < num_produced]

    def _send(self) -> list[Action]:
        actions: list[Action] = []
        for consumer in self._consumers.values():
            while (number := self._next[consumer.index]) < self._num_produced and consumer.has_room:
                self._next[consumer.index] += self._num_consumers
                if number not in self.done and number not in consumer.held:
                    actions.append(consumer.send(number, number + 1, self._sizes.part_of(number)[0]))
        return actions + self._end() if self._is_finished else actions

    def _end(self) -> list[Action]:
        actions: list[Action] = []
        for consumer in self._consumers.values():
            if not len(consumer.held) and self._next[consumer.index] >= self._num_produced and not consumer.has_ended:
                consumer.has_ended = True
                actions.append(End(consumer.name))
        if not self._is_done and not self.done.missing(0, self._num_produced):
            self._is_done = True
            actions.append(Done())
        return actions
