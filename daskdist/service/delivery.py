"""Which consumer gets which elements of a task, as state machines without I/O.

The elements of a task are numbered from 0 on. A producer tells a delivery what it has produced and what consumers do,
and carries out the actions that it is given. All calls are made in one thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from daskdist.errors import ArgumentError
from daskdist.service.intervals import Intervals

Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Send:
    """Send elements ``first`` to before ``stop`` to a consumer."""

    consumer: str
    first: int
    stop: int


@dataclass(frozen=True)
class Recall:
    """Ask a consumer to give back the elements that it has not handed on."""

    consumer: str


@dataclass(frozen=True)
class End:
    """Tell a consumer that no more elements come to it from this task."""

    consumer: str


@dataclass(frozen=True)
class Forget:
    """Free the elements ``first`` to before ``stop``: nobody needs them any more."""

    first: int
    stop: int


@dataclass(frozen=True)
class Done:
    """The task is over: all its elements were acknowledged."""


Action = Send | Recall | End | Forget | Done


class Delivery(Protocol):
    """What a producer asks of the ways to deliver the elements of a task."""

    @property
    def is_wanted(self) -> bool:
        """Whether more elements are to be produced, as far as consumers are concerned."""
        ...

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        """Note that elements were produced, the next in order, and their size."""
        ...

    def finished(self) -> list[Action]:
        """Note that no more are produced."""
        ...

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        """Add a consumer, and the elements that it has acknowledged before."""
        ...

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        """Note that a consumer is done with elements."""
        ...

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        """Note what a consumer gives back after `Recall`."""
        ...

    def lost(self, name: str, *, redeliver: bool = True) -> list[Action]:
        """Remove a consumer; what it had not acknowledged goes to others, or is given up."""
        ...

    def tick(self) -> list[Action]:
        """Note that some time has passed."""
        ...


@dataclass
class Consumer:
    """A consumer, as a delivery knows it.

    Parameters
    ----------
    name
        Tells it from others.
    window_elements, window_bytes
        The most that may be sent to it and not acknowledged; one element is sent whatever its size.
    index
        Its place among the consumers of coordinated reads.
    trainer
        The trainer it is of, where trainers share a cache.
    held
        Elements that it has of the task from before, which were not acknowledged.
    """

    name: str
    window_elements: int
    window_bytes: int
    index: int = 0
    trainer: str = ""
    held: Intervals = field(default_factory=Intervals)
    held_bytes: float = 0
    # Whether it was asked to give back, and whether it has answered and nothing was sent to it since.
    is_recalled: bool = False
    has_answered: bool = False
    has_ended: bool = False


class _Sizes:
    # The average size of an element of each part that was produced.
    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.sizes: list[float] = []

    def add(self, first: int, stop: int, num_bytes: int) -> None:
        self.firsts.append(first)
        self.sizes.append(num_bytes / (stop - first))

    def part_of(self, number: int) -> tuple[float, float]:
        """Return the size of an element, and where the part begins that comes after its own."""
        place = bisect_right(self.firsts, number) - 1
        if place < 0:
            return 0.0, self.firsts[0] if self.firsts else float("inf")
        after = self.firsts[place + 1] if place + 1 < len(self.firsts) else float("inf")
        return self.sizes[place], after

    def total(self, first: int, stop: int) -> float:
        """Return the size of some elements."""
        total = 0.0
        while first < stop:
            size, after = self.part_of(first)
            end = min(stop, after)
            total += size * (end - first)
            first = int(end)
        return total

    def forget(self, below: int) -> None:
        """Forget the sizes of elements below a number."""
        place = bisect_right(self.firsts, below) - 1
        if place > 64:
            del self.firsts[:place], self.sizes[:place]


class FirstCome:
    """Each element goes to one consumer: whoever has room when it is there.

    A consumer that is lost leaves what it has not acknowledged to the others. One that waits while others hold elements
    that they have not handed on gets some of those. So every element is acknowledged by exactly one of the consumers
    that live, and a slow one does not keep what others wait for.

    Parameters
    ----------
    done
        Elements that were acknowledged before, where the task begins anew.
    expected
        The names of consumers of before, which may hold elements: nothing is sent before they have joined or are lost.
    """

    def __init__(self, done: Pairs = (), expected: Collection[str] = ()) -> None:
        self.done = Intervals(done)
        self.num_given_up = 0
        self._expected = set(expected)
        self._consumers: dict[str, Consumer] = {}
        # Elements that were produced, and are with nobody.
        self._ready = Intervals()
        self._sizes = _Sizes()
        self._num_produced = 0
        self._is_finished = self._is_done = False

    @property
    def is_wanted(self) -> bool:
        return True

    @property
    def names(self) -> list[str]:
        """The names of the consumers."""
        return list(self._consumers)

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        self._num_produced = stop
        self._sizes.add(first, stop, num_bytes)
        actions: list[Action] = [Forget(*pair) for pair in self.done.within(first, stop)]
        free = Intervals(self.done.missing(first, stop))
        for consumer in self._consumers.values():
            free.difference_update(consumer.held.within(first, stop))
        self._ready.update(free)
        return actions + self._hand_out()

    def finished(self) -> list[Action]:
        self._is_finished = True
        return self._hand_out()

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        self._expected.discard(consumer.name)
        self.done.update(done)
        actions: list[Action] = [Forget(*part) for pair in done for part in self._ready.within(*pair)]
        self._ready.difference_update(done)
        # Of what it holds, others may have been given some while it was away.
        taken = Intervals(self.done)
        for other in self._consumers.values():
            taken.update(other.held)
        consumer.held.difference_update(taken)
        self._ready.difference_update(consumer.held)
        consumer.held_bytes = sum(self._sizes.total(*pair) for pair in consumer.held)
        self._consumers[consumer.name] = consumer
        return actions + self._hand_out()

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is None:
            return []
        actions = self._acknowledge(consumer, pairs)
        return actions + self._hand_out()

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is None:
            return []
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            self._take_back(consumer, first, stop)
            self._ready.update(self._produced_of(first, stop))
        consumer.is_recalled, consumer.has_answered = False, True
        return self._hand_out()

    def lost(self, name: str, *, redeliver: bool = True) -> list[Action]:
        self._expected.discard(name)
        consumer = self._consumers.pop(name, None)
        actions: list[Action] = []
        if consumer is not None and redeliver:
            for pair in consumer.held:
                self._ready.update(self._produced_of(*pair))
        elif consumer is not None:
            self.num_given_up += len(consumer.held)
            actions = self._acknowledge(consumer, consumer.held)
        return actions + self._hand_out()

    def _produced_of(self, first: int, stop: int) -> Pairs:
        # Of elements that are still to be produced again, none is ready.
        stop = min(stop, self._num_produced)
        return [(first, stop)] if first < stop else []

    def _acknowledge(self, consumer: Consumer, pairs: Pairs) -> list[Action]:
        actions: list[Action] = []
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            self._take_back(consumer, first, stop)
            self.done.add(first, stop)
            actions.append(Forget(first, stop))
        self._sizes.forget(self.done.first_missing())
        return actions

    def _take_back(self, consumer: Consumer, first: int, stop: int) -> None:
        consumer.held.remove(first, stop)
        # It may hold elements of which the size is not known yet.
        consumer.held_bytes = max(consumer.held_bytes - self._sizes.total(first, stop), 0.0) if consumer.held else 0.0

    def _hand_out(self) -> list[Action]:
        if self._expected:
            return []
        actions: list[Action] = []
        # Those that have least come first, and of those who has not just given elements back.
        while len(self._ready):
            with_room = [each for each in self._consumers.values() if _has_room(each)]
            if not with_room:
                return actions
            consumer = min(with_room, key=lambda each: (len(each.held), each.has_answered))
            actions.append(self._send(consumer, -(-len(self._ready) // len(with_room))))
        return actions + self._at_the_end() if self._is_finished else actions

    def _send(self, consumer: Consumer, most: int) -> Send:
        first = next(iter(self._ready))[0]
        size, after = self._sizes.part_of(first)
        room = consumer.window_elements - len(consumer.held)
        if size > 0:
            room = min(room, max(int((consumer.window_bytes - consumer.held_bytes) // size), 1))
        first, stop = self._ready.pop_first(int(min(max(min(most, room), 1), after - first)))
        consumer.held.add(first, stop)
        consumer.held_bytes += size * (stop - first)
        consumer.has_answered = consumer.has_ended = False
        return Send(consumer.name, first, stop)

    def _at_the_end(self) -> list[Action]:
        # Nothing is ready and nothing is to come, but what consumers give back.
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
        # Not at once, or an element that no consumer has taken yet would go back and forth between them.
        actions: list[Action] = []
        if self._is_finished and not len(self._ready) and self._waiting():
            for consumer in self._unanswered():
                if not consumer.is_recalled:
                    consumer.is_recalled = True
                    actions.append(Recall(consumer.name))
        return actions

    def _waiting(self) -> list[Consumer]:
        return [each for each in self._consumers.values() if not len(each.held) and not each.has_ended]

    def _unanswered(self) -> list[Consumer]:
        # They may give something back.
        return [each for each in self._consumers.values() if len(each.held) and not each.has_answered]

    def _all_done(self) -> bool:
        return not self.done.missing(0, self._num_produced)


def _has_room(consumer: Consumer) -> bool:
    num_held = len(consumer.held)
    return num_held == 0 or (num_held < consumer.window_elements and consumer.held_bytes < consumer.window_bytes)


class Rounds:
    """Coordinated reads: of each ``num_consumers`` elements in a row, each consumer gets the one of its index.

    What a consumer that is lost has not acknowledged waits for another of its index.

    Parameters
    ----------
    num_consumers
        How many there are.
    """

    def __init__(self, num_consumers: int, done: Pairs = ()) -> None:
        self.done = Intervals(done)
        self._num_consumers = num_consumers
        self._consumers: dict[int, Consumer] = {}
        # Of each index, the next element to send.
        self._next = list(range(num_consumers))
        self._sizes = _Sizes()
        self._num_produced = 0
        self._is_finished = self._is_done = False

    @property
    def is_wanted(self) -> bool:
        return True

    @property
    def names(self) -> list[str]:
        """The names of the consumers."""
        return [each.name for each in self._consumers.values()]

    @property
    def missing(self) -> list[int]:
        """The indexes that no consumer has."""
        return [index for index in range(self._num_consumers) if index not in self._consumers]

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        self._num_produced = stop
        self._sizes.add(first, stop, num_bytes)
        actions: list[Action] = [Forget(*pair) for pair in self.done.within(first, stop)]
        return actions + [action for consumer in self._consumers.values() for action in self._send(consumer)]

    def finished(self) -> list[Action]:
        self._is_finished = True
        return [action for consumer in self._consumers.values() for action in self._send(consumer)] + self._end()

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        self.done.update(done)
        if consumer.index in self._consumers:
            other = self._consumers[consumer.index].name
            raise ArgumentError(f"consumer_index {consumer.index} is taken by the consumer {other}; give each its own")
        self._consumers[consumer.index] = consumer
        first = consumer.index
        while first in self.done or first in consumer.held:
            first += self._num_consumers
        self._next[consumer.index] = first
        return self._send(consumer) + self._end()

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        consumer = self._named(name)
        if consumer is None:
            return []
        actions: list[Action] = []
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            consumer.held.remove(first, stop)
            consumer.held_bytes -= self._sizes.total(first, stop)
            self.done.add(first, stop)
            actions.append(Forget(first, stop))
        return actions + self._send(consumer) + self._end()

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        return []

    def lost(self, name: str, *, redeliver: bool = True) -> list[Action]:
        consumer = self._named(name)
        if consumer is None:
            return []
        del self._consumers[consumer.index]
        if redeliver:
            return []
        held, consumer.held = consumer.held, Intervals()
        self.done.update(held)
        return [Forget(*pair) for pair in held]

    def tick(self) -> list[Action]:
        return []

    def _named(self, name: str) -> Consumer | None:
        return next((each for each in self._consumers.values() if each.name == name), None)

    def _send(self, consumer: Consumer) -> list[Action]:
        actions: list[Action] = []
        while (number := self._next[consumer.index]) < self._num_produced and _has_room(consumer):
            consumer.held.add(number, number + 1)
            consumer.held_bytes += self._sizes.part_of(number)[0]
            self._next[consumer.index] += self._num_consumers
            if number in self.done:
                consumer.held.remove(number, number + 1)
                continue
            actions.append(Send(consumer.name, number, number + 1))
        return actions

    def _end(self) -> list[Action]:
        if not self._is_finished:
            return []
        actions: list[Action] = []
        for consumer in self._consumers.values():
            if not len(consumer.held) and self._next[consumer.index] >= self._num_produced and not consumer.has_ended:
                consumer.has_ended = True
                actions.append(End(consumer.name))
        if not self._is_done and not self.done.missing(0, self._num_produced):
            self._is_done = True
            actions.append(Done())
        return actions


class SharedWindow:
    """Each trainer gets all elements of late, at its own pace, from a window that slides.

    Elements are produced for the fastest trainer. One that is slower than the window passes over what has gone.

    Parameters
    ----------
    window_bytes
        The most bytes to keep; one part is kept whatever its size.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._consumers: dict[str, Consumer] = {}
        # Of each trainer, the next element to send.
        self._next: dict[str, int] = {}
        # The parts in the window, each with its first and stop, and its size.
        self._parts: list[tuple[int, int, int]] = []
        self._num_produced = 0

    @property
    def is_wanted(self) -> bool:
        return any(
            self._next[each.trainer] >= self._num_produced and _has_room(each) for each in self._consumers.values()
        )

    @property
    def names(self) -> list[str]:
        """The names of the consumers."""
        return list(self._consumers)

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        self._num_produced = stop
        self._parts.append((first, stop, num_bytes))
        actions = self._send()
        while len(self._parts) > 1 and sum(size for *_, size in self._parts) > self._window_bytes:
            first, stop, _ = self._parts.pop(0)
            actions.append(Forget(first, stop))
        return actions

    def finished(self) -> list[Action]:
        actions: list[Action] = [End(name) for name in self._consumers]
        return [*actions, Done()]

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        self._consumers[consumer.name] = consumer
        self._next.setdefault(consumer.trainer, self._start)
        return self._send()

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is None:
            return []
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            consumer.held.remove(first, stop)
            consumer.held_bytes = max(consumer.held_bytes - self._size(first) * (stop - first), 0.0)
        if not len(consumer.held):
            consumer.held_bytes = 0.0
        return self._send()

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        return []

    def lost(self, name: str, *, redeliver: bool = True) -> list[Action]:
        self._consumers.pop(name, None)
        return []

    def tick(self) -> list[Action]:
        return []

    @property
    def _start(self) -> int:
        return self._parts[0][0] if self._parts else self._num_produced

    def _size(self, number: int) -> float:
        for first, stop, num_bytes in self._parts:
            if first <= number < stop:
                return num_bytes / (stop - first)
        return 0.0

    def _send(self) -> list[Action]:
        actions: list[Action] = []
        for consumer in self._consumers.values():
            while self._next[consumer.trainer] < self._num_produced and _has_room(consumer):
                first = max(self._next[consumer.trainer], self._start)
                part = next(each for each in self._parts if each[0] <= first < each[1])
                size = part[2] / (part[1] - part[0])
                room = consumer.window_elements - len(consumer.held)
                if size > 0:
                    room = min(room, int((consumer.window_bytes - consumer.held_bytes) // size))
                stop = min(first + max(room, 1), part[1])
                consumer.held.add(first, stop)
                consumer.held_bytes += size * (stop - first)
                self._next[consumer.trainer] = stop
                actions.append(Send(consumer.name, first, stop))
        return actions


def delivery_of(options: Any, done: Pairs = (), expected: Collection[str] = ()) -> Delivery:
    """Return the delivery of a task, by the options of its job: ``num_consumers`` and ``cache_bytes``."""
    if options.num_consumers is not None:
        return Rounds(options.num_consumers, done)
    if options.cache_bytes is not None:
        return SharedWindow(options.cache_bytes)
    return FirstCome(done, expected)
