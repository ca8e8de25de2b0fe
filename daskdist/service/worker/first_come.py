"""Delivery of each element to one consumer with room for it."""

from __future__ import annotations

from collections.abc import Collection

from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.delivery import Action, Consumer, Delivery, Done, Forget, PartSizes, Send
from daskdist.service.worker.task_messages import End

# At the end, a consumer is sent what is left, divided by this number for each consumer, so that all end together.
_SHARES_AT_THE_END = 2


class FirstCome(Delivery):
    """Delivery of each element to one consumer that has asked for some when the element is ready.

    The elements that a lost consumer has not used go to the others. So every element is used by exactly one of the
    surviving consumers. A slow consumer asks for few, so it does not keep many that others could use.

    Parameters
    ----------
    done
        The elements that were used in earlier attempts of the task.
    expected
        The names of the previous attempt's consumers, which may hold elements: nothing is sent until each has joined or
        is lost.
    """

    def __init__(self, done: Pairs = (), expected: Collection[str] = ()) -> None:
        super().__init__()
        self.done = Intervals(done)
        self._expected = set(expected)
        # The produced elements that no consumer has.
        self._ready = Intervals()
        self._sizes = PartSizes()
        self._is_done = False
        # All consumers have left or are lost; before the first one comes, elements are produced for it.
        self._is_left = False

    @property
    def is_wanted(self) -> bool:
        return not self._is_left

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        self._num_produced = stop
        self._sizes.add(first, stop, num_bytes)
        actions: list[Action] = [Forget(*pair) for pair in self.done.within(first, stop)]
        free = Intervals(self.done.missing(first, stop))
        for consumer in self._consumers.values():
            free.difference_update(consumer.held.within(first, stop))
        self._ready.update(free)
        return actions + self._send()

    def finished(self) -> list[Action]:
        self._is_finished = True
        return self._send()

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        self._is_left = False
        self._expected.discard(consumer.name)
        actions = self._note_done(None, done)
        self._ready.difference_update(consumer.held)
        self._consumers[consumer.name] = consumer
        return actions + self._send()

    def asked(self, name: str, used: Pairs, num_elements: int) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is not None:
            consumer.num_asked += num_elements
        return self._note_done(consumer, used) + self._send()

    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        self._expected.discard(name)
        consumer = self._consumers.pop(name, None)
        self._is_left = not self._consumers and not self._expected
        actions = self._note_done(consumer, done)
        if consumer is None:
            return actions + self._send()
        if not redeliver:
            return actions + self._note_done(consumer, list(consumer.held)) + self._send()
        for first, stop in consumer.held:
            # Those that are still to be reproduced are ready once they are.
            self._ready.add(first, min(stop, self._num_produced))
        return actions + self._send()

    def _note_done(self, consumer: Consumer | None, done: Pairs) -> list[Action]:
        used = [] if consumer is None else consumer.use(done)
        used += [part for pair in done for part in self._ready.within(*pair)]
        self._ready.difference_update(done)
        self.done.update(done)
        self._sizes.forget(self.done.first_missing())
        return [Forget(*pair) for pair in used]

    def _send(self) -> list[Action]:
        if self._expected:
            return []
        actions: list[Action] = []
        while len(self._ready):
            with_room = [consumer for consumer in self._consumers.values() if consumer.has_room]
            if not with_room:
                return actions
            # Prefer the consumer with the fewest elements.
            consumer = min(with_room, key=lambda candidate: len(candidate.held))
            most = -(-len(self._ready) // len(with_room))
            if self._is_finished and len(self._consumers) > 1:
                most = -(-len(self._ready) // (_SHARES_AT_THE_END * len(self._consumers))) - len(consumer.held)
                if most <= 0:
                    return actions
            actions.append(self._send_to(consumer, most))
        return actions + self._at_the_end() if self._is_finished else actions

    def _send_to(self, consumer: Consumer, most: int) -> Send:
        first = next(iter(self._ready))[0]
        size, after = self._sizes.part_of(first)
        first, stop = self._ready.pop_first(int(min(most, consumer.room_for(size), after - first)))
        return consumer.send(first, stop, size)

    def _at_the_end(self) -> list[Action]:
        # Nothing is ready or still to be produced, so only elements of consumers that are lost can follow.
        actions: list[Action] = []
        for consumer in self._consumers.values():
            if not len(consumer.held) and not consumer.has_ended:
                consumer.has_ended = True
                actions.append(End(consumer.name))
        if not self._is_done and not self.done.missing(0, self._num_produced):
            self._is_done = True
            actions.append(Done())
        return actions
