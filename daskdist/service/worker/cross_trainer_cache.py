"""Delivery of the same elements to several trainers, from a sliding window."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.delivery import Action, Consumer, Delivery, Done, Forget, Send
from daskdist.service.worker.task_messages import End, Passed


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
            self._next[consumer.trainer] >= self._num_produced and consumer.has_room
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
        self._consumers[consumer.name] = consumer
        self._next.setdefault(consumer.trainer, self._start)
        return [End(consumer.name)] if self._is_finished else self._send()

    def asked(self, name: str, used: Pairs, num_elements: int) -> list[Action]:
        consumer = self._consumers.get(name)
        if consumer is None:
            return []
        consumer.use(used)
        consumer.num_asked += num_elements
        return self._send()

    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return []
        consumer.use(done)
        if redeliver:
            self._again[consumer.trainer].update(consumer.held)
        return self._send()

    @property
    def _start(self) -> int:
        return self._firsts[0] if self._firsts else self._num_produced

    def _send(self) -> list[Action]:
        actions: list[Action] = []
        for consumer in self._consumers.values():
            again = self._again[consumer.trainer]
            while consumer.has_room:
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
                sending = self._send_to(consumer, first, most)
                again.remove(first, sending.stop)
                self._next[consumer.trainer] = max(position, sending.stop)
                actions.append(sending)
        return actions

    def _send_to(self, consumer: Consumer, first: int, most: int) -> Send:
        # Send the elements of one part that there is room for.
        place = bisect_right(self._firsts, first) - 1
        part_stop, num_bytes = self._parts[place]
        size = num_bytes / (part_stop - self._firsts[place])
        return consumer.send(first, min(first + consumer.room_for(size), part_stop, most), size)
