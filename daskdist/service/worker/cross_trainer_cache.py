"""Delivery of the same elements to several trainers, from a sliding window."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.delivery import Action, Consumer, Delivery, Done, Forget, Send, has_room
from daskdist.service.worker.task_messages import Confirm, End, Passed


class SharedCache(Delivery):
    """Delivery of all elements to each trainer, at its own pace, from a sliding window.

    Elements are produced for the fastest trainer. A trainer that is too slow misses the elements that have left the
    window, and is sent their number.

    Parameters
    ----------
    window_bytes
        The largest number of bytes to keep; one part is kept whatever its size.
    """

    def __init__(self, window_bytes: int) -> None:
        super().__init__()
        self._window_bytes = window_bytes
        # By trainer: the next element to send, and those to send again because a consumer was lost with them.
        self._next: dict[str, int] = {}
        self._again: defaultdict[str, Intervals] = defaultdict(Intervals)
        # The parts in the window: the first element of each, its stop, and its size.
        self._firsts: list[int] = []
        self._parts: list[tuple[int, int]] = []
        self._num_bytes = 0

    @property
    def is_wanted(self) -> bool:
        return any(
            self._next[consumer.trainer] >= self._num_produced and has_room(consumer)
            for consumer in self._consumers.values()
        )

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        self._num_produced = stop
        self._firsts.append(first)
        self._parts.append((stop, num_bytes))
        self._num_bytes += num_bytes
        actions = self._send()
        while len(self._parts) > 1 and self._num_bytes > self._window_bytes:
            first, (stop, num_bytes) = self._firsts.pop(0), self._parts.pop(0)
            self._num_bytes -= num_bytes
            actions.append(Forget(first, stop))
        return actions

    def finished(self) -> list[Action]:
        # The dataset has no end, so this is a failure.
        self._is_finished = True
        return [*map(End, self._consumers), Done()]

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        before = self._consumers.get(consumer.name)
        if before is not None:
            before.held.difference_update([*consumer.held, *done])
            self._again[consumer.trainer].update(before.held)
        consumer.unconfirmed.update(done)
        self._consumers[consumer.name] = consumer
        self._next.setdefault(consumer.trainer, self._start)
        return [End(consumer.name)] if self._is_finished else self._send()

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is None:
            return []
        consumer.unconfirmed.update(pairs)
        for first, stop in [part for pair in pairs for part in consumer.held.within(*pair)]:
            consumer.held.remove(first, stop)
            # The sizes of elements that have left the window are no longer known.
            consumer.held_bytes *= len(consumer.held) / (len(consumer.held) + stop - first)
        return self._send()

    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return []
        consumer.held.difference_update(done)
        if redeliver:
            self._again[consumer.trainer].update(consumer.held)
        return self._send()

    def tick(self) -> list[Action]:
        actions: list[Action] = []
        for consumer in self._consumers.values():
            if len(consumer.unconfirmed) and not consumer.is_away:
                actions.append(Confirm(consumer.name, tuple(consumer.unconfirmed)))
                consumer.unconfirmed = Intervals()
        return actions

    @property
    def _start(self) -> int:
        return self._firsts[0] if self._firsts else self._num_produced

    def _send(self) -> list[Action]:
        actions: list[Action] = []
        for consumer in self._consumers.values():
            again = self._again[consumer.trainer]
            while has_room(consumer):
                passed = again.within(0, self._start)
                again.difference_update(passed)
                num_passed = sum(stop - first for first, stop in passed)
                position = self._next[consumer.trainer]
                if position < self._start:
                    num_passed += self._start - position
                    position = self._next[consumer.trainer] = self._start
                if num_passed:
                    actions.append(Passed(consumer.name, num_passed))
                if len(again):
                    first, most = next(iter(again))
                elif position < self._num_produced:
                    first, most = position, self._num_produced
                else:
                    break
                stop = self._sent(consumer, first, most)
                again.remove(first, stop)
                self._next[consumer.trainer] = max(position, stop)
                actions.append(Send(consumer.name, first, stop))
        return actions

    def _sent(self, consumer: Consumer, first: int, most: int) -> int:
        """Record as sent the elements of one part that there is room for, and return where they stop."""
        place = bisect_right(self._firsts, first) - 1
        part_stop, num_bytes = self._parts[place]
        size = num_bytes / (part_stop - self._firsts[place])
        room = consumer.window_elements - len(consumer.held)
        if size > 0:
            room = min(room, int((consumer.window_bytes - consumer.held_bytes) // size))
        stop = min(first + max(room, 1), part_stop, most)
        consumer.held.add(first, stop)
        consumer.held_bytes += size * (stop - first)
        return stop
