"""The delivery of a task's elements to consumers: the contract of its state machines, which do no I/O.

The elements of a task are numbered from 0 on. A producer reports to a delivery what it has produced and what consumers
do, and carries out the actions that are returned. All calls are made in one thread.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field

from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.task_messages import End, Passed


@dataclass(frozen=True)
class Send:
    """Send elements ``first`` to before ``stop`` to a consumer."""

    consumer: str
    first: int
    stop: int


@dataclass(frozen=True)
class Forget:
    """Free the elements ``first`` to before ``stop``, which are no longer needed."""

    first: int
    stop: int


@dataclass(frozen=True)
class Done:
    """The end of the task: all its elements were used."""


Action = Send | Passed | End | Forget | Done


class Delivery(ABC):
    """The contract between a producer and a way to deliver the elements of a task."""

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}
        self._num_produced = 0
        self._is_finished = False

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """Return whether consumers need more elements to be produced."""

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers."""
        return list(self._consumers.values())

    @abstractmethod
    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        """Record that the next elements in order were produced, and their size."""

    @abstractmethod
    def finished(self) -> list[Action]:
        """Record that no more elements will be produced."""

    @abstractmethod
    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        """Add a consumer, and the elements that it used in earlier attempts."""

    @abstractmethod
    def asked(self, name: str, used: Pairs, num_elements: int) -> list[Action]:
        """Record that a consumer has used elements, and asks for so many more."""

    @abstractmethod
    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        """Remove a consumer and record what it used; the rest of its elements go to others, or are given up."""


@dataclass
class Consumer:
    """The state of a consumer in a delivery.

    Parameters
    ----------
    name
        The unique name of the consumer.
    num_asked
        The number of elements that it has asked for and was not sent.
    window_bytes
        The bytes of elements that may be sent and not used; one element is sent whatever its size.
    index
        The index of the consumer in coordinated reads.
    trainer
        The trainer of the consumer, if trainers share a cache.
    held
        Elements of the task that it was sent, also in earlier attempts, and has not used.
    """

    name: str
    num_asked: int
    window_bytes: int
    index: int = 0
    trainer: str = ""
    held: Intervals = field(default_factory=Intervals)
    held_bytes: float = 0
    has_ended: bool = False

    @property
    def has_room(self) -> bool:
        """Return whether elements may be sent to it."""
        # After the end it asks for none, and gets those of consumers that are lost.
        is_wanted = self.num_asked > 0 or self.has_ended
        return is_wanted and (not len(self.held) or self.held_bytes < self.window_bytes)

    def room_for(self, size: float) -> int:
        """Return how many elements of a size in bytes may be sent to it, at least 1."""
        num_wanted = sys.maxsize if self.has_ended else self.num_asked
        in_bytes = num_wanted if size <= 0 else int((self.window_bytes - self.held_bytes) // size)
        return max(min(num_wanted, in_bytes), 1)

    def send(self, first: int, stop: int, size: float) -> Send:
        """Record that elements of a size are sent to it."""
        self.held.add(first, stop)
        self.held_bytes += size * (stop - first)
        self.num_asked = max(self.num_asked - (stop - first), 0)
        self.has_ended = False
        return Send(self.name, first, stop)

    def use(self, pairs: Pairs) -> list[tuple[int, int]]:
        """Record that it has used elements; return those of them that it was sent."""
        used = [part for pair in pairs for part in self.held.within(*pair)]
        num_held = len(self.held)
        self.held.difference_update(used)
        if num_held:
            # The sizes of elements from earlier attempts are not known.
            self.held_bytes *= len(self.held) / num_held
        return used


class PartSizes:
    """The average element size of each part that was produced."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.sizes: list[float] = []

    def add(self, first: int, stop: int, num_bytes: int) -> None:
        """Add a part after all others."""
        self.firsts.append(first)
        self.sizes.append(num_bytes / (stop - first))

    def part_of(self, number: int) -> tuple[float, float]:
        """Return the size of a produced element, and the first element of the next part."""
        place = bisect_right(self.firsts, number) - 1
        return self.sizes[place], self.firsts[place + 1] if place + 1 < len(self.firsts) else float("inf")

    def forget(self, below: int) -> None:
        """Forget the sizes of elements below a number."""
        place = bisect_right(self.firsts, below) - 1
        if place > 64:
            del self.firsts[:place], self.sizes[:place]
