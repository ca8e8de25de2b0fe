"""Sets of whole numbers as sorted intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

# Intervals ``(first, stop)``, without ``stop``.
Pairs = Iterable[tuple[int, int]]


class Intervals:
    """A set of whole numbers, kept as sorted intervals that do not touch.

    Parameters
    ----------
    pairs
        Intervals ``(first, stop)``, without ``stop``, in any order; they may overlap.

    >>> numbers = Intervals([(0, 4), (6, 8)])
    >>> numbers.add(4, 6)
    >>> numbers.remove(2, 3)
    >>> list(numbers), len(numbers), 2 in numbers
    ([(0, 2), (3, 8)], 7, False)
    """

    __slots__ = ("_firsts", "_num", "_stops")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._stops: list[int] = []
        self._num = 0
        for first, stop in pairs:
            self.add(first, stop)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Return the intervals, in order."""
        return iter(list(zip(self._firsts, self._stops, strict=True)))

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number < self._stops[place]

    def add(self, first: int, stop: int) -> None:
        """Add the numbers from ``first`` to before ``stop``."""
        if first >= stop:
            return
        begin, end = bisect_left(self._stops, first), bisect_right(self._firsts, stop)
        if begin < end:
            first, stop = min(first, self._firsts[begin]), max(stop, self._stops[end - 1])
        self._num += stop - first - self._count(begin, end)
        self._firsts[begin:end], self._stops[begin:end] = [first], [stop]

    def remove(self, first: int, stop: int) -> None:
        """Remove the numbers from ``first`` to before ``stop`` from the set."""
        if first >= stop:
            return
        begin, end = bisect_right(self._stops, first), bisect_left(self._firsts, stop)
        if begin >= end:
            return
        rest = [(self._firsts[begin], first), (stop, self._stops[end - 1])]
        rest = [(low, high) for low, high in rest if low < high]
        self._num += sum(high - low for low, high in rest) - self._count(begin, end)
        self._firsts[begin:end], self._stops[begin:end] = [low for low, _ in rest], [high for _, high in rest]

    def update(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Add intervals."""
        for first, stop in pairs:
            self.add(first, stop)

    def difference_update(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Remove intervals."""
        for first, stop in pairs:
            self.remove(first, stop)

    def within(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the intervals of the set's numbers from ``first`` to before ``stop``."""
        begin, end = bisect_right(self._stops, first), bisect_left(self._firsts, stop)
        pairs = zip(self._firsts[begin:end], self._stops[begin:end], strict=True)
        return [(max(low, first), min(high, stop)) for low, high in pairs]

    def first(self, most: int) -> list[tuple[int, int]]:
        """Return the first intervals, at most ``most``."""
        return list(zip(self._firsts[:most], self._stops[:most], strict=True))

    def missing(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the intervals of numbers from ``first`` to before ``stop`` that are not in the set."""
        lacks = []
        for low, high in self.within(first, stop):
            if first < low:
                lacks.append((first, low))
            first = high
        return [*lacks, (first, stop)] if first < stop else lacks

    def first_missing(self) -> int:
        """Return the smallest number from 0 on that is not in the set."""
        return self._stops[0] if self._firsts and self._firsts[0] == 0 else 0

    def pop_first(self, most: int) -> tuple[int, int]:
        """Remove and return the first interval, or its first ``most`` numbers."""
        first, stop = self._firsts[0], min(self._stops[0], self._firsts[0] + most)
        self.remove(first, stop)
        return first, stop

    def _count(self, begin: int, end: int) -> int:
        return sum(self._stops[begin:end]) - sum(self._firsts[begin:end])
