"""Delivery of each element to one consumer with room for it."""

from __future__ import annotations

from collections.abc import Collection

from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.delivery import Action, Consumer, Delivery, Done, Forget, PartSizes, Send, has_room
from daskdist.service.worker.task_messages import End, Recall, Withdraw


class FirstCome(Delivery):
    """Delivery of each element to one consumer that has room when the element is ready.

    The elements that a lost consumer has not acknowledged go to the others. A consumer without elements gets some that
    others hold and have not passed to their programs. So every element is acknowledged by exactly one of the surviving
    consumers, and a slow consumer does not keep elements that others wait for.

    Parameters
    ----------
    done
        The elements that were acknowledged in earlier attempts of the task.
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
        self._num_answers = 0
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
        before = self._consumers.pop(consumer.name, None)
        # Acknowledgements and elements may have been lost in transit.
        actions = self._note_done(before, done)
        # Elements that it holds may have been given to others while it was considered lost.
        taken = [part for pair in consumer.held for part in self._taken_within(*pair)]
        consumer.held.difference_update(taken)
        if taken:
            actions.append(Withdraw(consumer.name, tuple(taken)))
        self._ready.difference_update(consumer.held)
        if before is not None:
            before.held.difference_update(consumer.held)
            actions += self._offer(before.held)
        consumer.held_bytes = sum(self._sizes.total(*pair) for pair in consumer.held)
        self._consumers[consumer.name] = consumer
        return actions + self._send()

    def _taken_within(self, first: int, stop: int) -> Intervals:
        taken = Intervals(self.done.within(first, stop))
        for other in self._consumers.values():
            taken.update(other.held.within(first, stop))
        return taken

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        # Elements that were taken from a consumer that was considered lost are used all the same.
        return self._note_done(self._consumers.get(name), pairs) + self._send()

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is None:
            return []
        actions: list[Action] = []
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            self._remove_from(consumer, first, stop)
            actions += self._offer([(first, stop)])
        self._num_answers += 1
        consumer.is_recalled, consumer.answer = False, self._num_answers
        return actions + self._send()

    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        self._expected.discard(name)
        consumer = self._consumers.pop(name, None)
        self._is_left = not self._consumers and not self._expected
        actions = self._note_done(consumer, done)
        if consumer is not None:
            actions += self._offer(consumer.held) if redeliver else self._acknowledge(consumer, consumer.held)
        return actions + self._send()

    def _note_done(self, consumer: Consumer | None, done: Pairs) -> list[Action]:
        actions = [] if consumer is None else self._acknowledge(consumer, done)
        actions += [Forget(*part) for pair in done for part in self._ready.within(*pair)]
        self._ready.difference_update(done)
        self.done.update(done)
        return actions

    def _offer(self, pairs: Pairs) -> list[Action]:
        # Skip elements that another has acknowledged; those still to be reproduced are offered once they are.
        actions: list[Action] = []
        for first, stop in pairs:
            stop = min(stop, self._num_produced)
            self._ready.update(self.done.missing(first, stop))
            actions += [Forget(*pair) for pair in self.done.within(first, stop)]
        return actions

    def _acknowledge(self, consumer: Consumer, pairs: Pairs) -> list[Action]:
        actions: list[Action] = []
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            self._remove_from(consumer, first, stop)
            self.done.add(first, stop)
            actions.append(Forget(first, stop))
        self._sizes.forget(self.done.first_missing())
        return actions

    def _remove_from(self, consumer: Consumer, first: int, stop: int) -> None:
        consumer.held.remove(first, stop)
        # The consumer may hold elements that were not produced again, whose sizes are unknown.
        consumer.held_bytes = max(consumer.held_bytes - self._sizes.total(first, stop), 0.0) if consumer.held else 0.0

    def _send(self) -> list[Action]:
        if self._expected:
            return []
        actions: list[Action] = []
        # Prefer the consumer with the fewest elements, then the one that gave elements back longest ago.
        while len(self._ready):
            with_room = [consumer for consumer in self._consumers.values() if has_room(consumer)]
            if not with_room:
                return actions
            consumer = min(with_room, key=lambda candidate: (len(candidate.held), candidate.answer))
            actions.append(self._send_to(consumer, -(-len(self._ready) // len(with_room))))
        return actions + self._at_the_end() if self._is_finished else actions

    def _send_to(self, consumer: Consumer, most: int) -> Send:
        first = next(iter(self._ready))[0]
        size, after = self._sizes.part_of(first)
        room = consumer.window_elements - len(consumer.held)
        if size > 0:
            room = min(room, max(int((consumer.window_bytes - consumer.held_bytes) // size), 1))
        first, stop = self._ready.pop_first(int(min(max(min(most, room), 1), after - first)))
        consumer.held.add(first, stop)
        consumer.held_bytes += size * (stop - first)
        consumer.answer, consumer.has_ended = 0, False
        return Send(consumer.name, first, stop)

    def _at_the_end(self) -> list[Action]:
        # Nothing is ready or still to be produced, so only elements that consumers give back can follow.
        actions: list[Action] = []
        if not self._unanswered():
            for consumer in self._waiting():
                consumer.has_ended = True
                actions.append(End(consumer.name))
        if len(self.done) >= self._num_produced and not self._is_done and self._all_done():
            self._is_done = True
            actions.append(Done())
        return actions

    def tick(self) -> list[Action]:
        # Recalls wait for a tick, or an element that no program has taken would go back and forth between consumers.
        actions: list[Action] = []
        if self._is_finished and not len(self._ready) and self._waiting():
            for consumer in self._unanswered():
                if not consumer.is_recalled and not consumer.is_away:
                    consumer.is_recalled = True
                    actions.append(Recall(consumer.name))
        return actions

    def _waiting(self) -> list[Consumer]:
        waiting = [consumer for consumer in self._consumers.values() if not len(consumer.held)]
        return [consumer for consumer in waiting if not consumer.has_ended and not consumer.is_away]

    def _unanswered(self) -> list[Consumer]:
        # Consumers that may give elements back.
        return [consumer for consumer in self._consumers.values() if len(consumer.held) and not consumer.answer]

    def _all_done(self) -> bool:
        return not self.done.missing(0, self._num_produced)
