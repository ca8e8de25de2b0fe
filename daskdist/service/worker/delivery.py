"""Which consumer gets which elements of a task, as state machines without I/O.

The elements of a task are numbered from 0 on. A producer tells a delivery what it has produced and what consumers do,
and carries out the actions that it is given. All calls are made in one thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

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
class Withdraw:
    """Tell a consumer that was away to drop elements that others were given meanwhile."""

    consumer: str
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Passed:
    """Tell a consumer that it was too slow for so many elements, which are gone."""

    consumer: str
    num_elements: int


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


Action = Send | Recall | Withdraw | Passed | End | Forget | Done


class Delivery(Protocol):
    """The contract between a producer and a way to deliver the elements of a task."""

    @property
    def is_wanted(self) -> bool:
        """Return whether more elements are to be produced, as far as consumers are concerned."""
        ...

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers."""
        ...

    def produced(self, first: int, stop: int, num_bytes: int) -> list[Action]:
        """Note that elements were produced, the next in order, and their size."""
        ...

    def finished(self) -> list[Action]:
        """Note that no more are produced."""
        ...

    def joined(self, consumer: Consumer, done: Pairs = ()) -> list[Action]:
        """Add a consumer, or one that was away, and the elements that it has acknowledged before."""
        ...

    def resized(self, name: str, window_elements: int) -> list[Action]:
        """Note how many elements may be sent to a consumer and not acknowledged."""
        ...

    def away(self, name: str) -> None:
        """Send a consumer nothing until it joins again; what it has stays with it."""
        ...

    def acknowledged(self, name: str, pairs: Pairs) -> list[Action]:
        """Note that a consumer is done with elements."""
        ...

    def returned(self, name: str, pairs: Pairs) -> list[Action]:
        """Note what a consumer gives back after `Recall`."""
        ...

    def lost(self, name: str, done: Pairs = (), *, redeliver: bool = True) -> list[Action]:
        """Remove a consumer and note what it was done with; the rest of what it had goes to others, or is given up."""
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
    is_away: bool = False
    # Whether it was asked to give back, and whether it has answered and nothing was sent to it since.
    is_recalled: bool = False
    has_answered: bool = False
    has_ended: bool = False


class PartSizes:
    """The average size of an element of each part that was produced."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.sizes: list[float] = []

    def add(self, first: int, stop: int, num_bytes: int) -> None:
        """Add a part, behind all others."""
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


def has_room(consumer: Consumer) -> bool:
    """Return whether elements may be sent to a consumer."""
    num_held = len(consumer.held)
    if consumer.is_away or num_held >= consumer.window_elements:
        return False
    return num_held == 0 or consumer.held_bytes < consumer.window_bytes
