"""Arithmetic on numbers of elements that are known before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

INFINITE: Final = -1
UNKNOWN: Final = -2
# A placeholder for a number of parallel calls or prefetched elements, to be chosen at run time.
AUTOTUNE: Final = -1


def multiply(cardinality: int, count: int) -> int:
    """Return the number of elements of ``count`` passes; a negative ``count`` is endless.

    >>> multiply(3, 2), multiply(0, -1), multiply(3, -1), multiply(UNKNOWN, 0), multiply(UNKNOWN, 2)
    (6, 0, -1, 0, -2)
    """
    if count == 0 or cardinality == 0:
        return 0
    if count < 0:
        return INFINITE
    return cardinality * count if cardinality >= 0 else cardinality


def plus(cardinality: int, other: int) -> int:
    """Return the number of elements of two concatenated datasets.

    >>> plus(3, 2), plus(3, INFINITE), plus(UNKNOWN, 2), plus(UNKNOWN, INFINITE)
    (5, -1, -2, -1)
    """
    if INFINITE in (cardinality, other):
        return INFINITE
    return UNKNOWN if UNKNOWN in (cardinality, other) else cardinality + other


def shortest(cardinalities: Iterable[int]) -> int:
    """Return the number of elements of the shortest of several datasets.

    >>> shortest([3, 5]), shortest([3, INFINITE]), shortest([INFINITE]), shortest([3, UNKNOWN]), shortest([0, UNKNOWN])
    (3, 3, -1, -2, 0)
    """
    finite = {number for number in cardinalities if number != INFINITE}
    if not finite:
        return INFINITE
    return UNKNOWN if UNKNOWN in finite and 0 not in finite else min(number for number in finite if number >= 0)


def divide(cardinality: int, size: int, *, drop_remainder: bool) -> int:
    """Return the number of groups of ``size`` elements.

    >>> divide(5, 2, drop_remainder=False), divide(5, 2, drop_remainder=True), divide(INFINITE, 2, drop_remainder=True)
    (3, 2, -1)
    """
    if cardinality < 0:
        return cardinality
    return cardinality // size if drop_remainder else -(-cardinality // size)


def at_most(cardinality: int, count: int) -> int:
    """Return the number of elements left by ``take(count)``; a negative ``count`` takes all.

    >>> at_most(5, 3), at_most(5, -1), at_most(INFINITE, 3), at_most(UNKNOWN, 3), at_most(UNKNOWN, 0)
    (3, 5, 3, -2, 0)
    """
    if count < 0:
        return cardinality
    if count == 0 or cardinality == INFINITE:
        return count
    return min(cardinality, count) if cardinality >= 0 else UNKNOWN


def beyond(cardinality: int, count: int) -> int:
    """Return the number of elements left by ``skip(count)``; a negative ``count`` skips all.

    >>> beyond(5, 3), beyond(5, 9), beyond(5, -1), beyond(INFINITE, 3), beyond(UNKNOWN, 3)
    (2, 0, 0, -1, -2)
    """
    if count < 0:
        return 0
    return max(cardinality - count, 0) if cardinality >= 0 else cardinality


def counted(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "worker"), counted(2000, "worker"), counted(2, "batch")
    ('1 worker', '2,000 workers', '2 batches')
    """
    plural = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{plural}"
