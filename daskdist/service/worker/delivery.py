"""The delivery of a task's elements to consumers: the contract of its state machines, which do no I/O.

The elements of a task are numbered from 0 on. A producer reports to a delivery what it has produced and what consumers
do, and carries out the actions that are returned. All calls are made in one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field

from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.task_messages import Confirm, End, Passed, Recall, Withdraw


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
    """The end of the task: all its elements were acknowledged."""


Action = Send | Recall | Withdraw | Confirm | Passed | End | Forget | Done


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
        """Add a new or returning consumer, and the elements that it acknowledged before."""

    def resized(self, name: str, window_elements: int) -> list[Action]:
        """Set how many elements may be sent to a consumer and not acknowledged."""
        if name in self._consumers:
            self._consumers[name].window_elements = window_elements
        return self._send()

    def away(self, name: str) -> None:
        """Send a consumer nothing until it joins again; it keeps its elements."""
        if name in self._consumers:
            consumer = self._consumers[name]
            consumer.is_away, consumer.is_recalled, consumer.answer = True, False, 0

    @abstractmethod
    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        """Record that a consumer has used elements."""

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        """Record the elements that a consumer gives back after `Recall`."""
        return []

    @abstractmethod
    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        """Remove a consumer and record what it used; the rest of its elements go to others, or are given up."""

    def tick(self) -> list[Action]:
        """Do what is due after some time has passed."""
        return []

    @abstractmethod
    def _send(self) -> list[Action]:
        """Send elements to the consumers that have room."""


@dataclass
class Consumer:
    """The state of a consumer in a delivery.

    Parameters
    ----------
    name
        The unique name of the consumer.
    window_elements, window_bytes
        The number and the bytes of elements that may be sent and not acknowledged; one element is sent whatever its
        size.
    index
        The index of the consumer in coordinated reads.
    trainer
        The trainer of the consumer, if trainers share a cache.
    held
        Elements of the task that it has from before and that were not acknowledged.
    """

    name: str
    window_elements: int
    window_bytes: int
    index: int = 0
    trainer: str = ""
    held: Intervals = field(default_factory=Intervals)
    held_bytes: float = 0
    is_away: bool = False
    # Whether a `Recall` is open, and the number of its last answer; 0 if there was none since something was sent.
    is_recalled: bool = False
    answer: int = 0
    has_ended: bool = False
    # If trainers share a cache: the elements it has used, since this was last confirmed to it.
    unconfirmed: Intervals = field(default_factory=Intervals)


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
        """Return the size of an element, and the first element of the next part."""
        place = bisect_right(self.firsts, number) - 1
        if place < 0:
            return 0.0, self.firsts[0] if self.firsts else float("inf")
        after = self.firsts[place + 1] if place + 1 < len(self.firsts) else float("inf")
        return self.sizes[place], after

    def total(self, first: int, stop: int) -> float:
        """Return the total size of elements."""
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


def has_room(consumer: Consumer) -> bool:
    """Return whether elements may be sent to a consumer."""
    num_held = len(consumer.held)
    if consumer.is_away or num_held >= consumer.window_elements:
        return False
    return num_held == 0 or consumer.held_bytes < consumer.window_bytes
