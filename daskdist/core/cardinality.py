"""Numbers of elements, where they are known before anything is read."""

from __future__ import annotations

from typing import Final

INFINITE: Final = -1
UNKNOWN: Final = -2


def multiply(cardinality: int, count: int) -> int:
    """The number of elements of ``count`` passes; a negative ``count`` is endless.

    >>> multiply(3, 2), multiply(0, -1), multiply(3, -1), multiply(UNKNOWN, 0), multiply(UNKNOWN, 2)
    (6, 0, -1, 0, -2)
    """
    if count == 0 or cardinality == 0:
        return 0
    if count < 0:
        return INFINITE
    return cardinality * count if cardinality >= 0 else cardinality


def divide(cardinality: int, size: int, *, drop_remainder: bool) -> int:
    """The number of groups of ``size`` elements.

    >>> divide(5, 2, drop_remainder=False), divide(5, 2, drop_remainder=True), divide(INFINITE, 2, drop_remainder=True)
    (3, 2, -1)
    """
    if cardinality < 0:
        return cardinality
    return cardinality // size if drop_remainder else -(-cardinality // size)


def at_most(cardinality: int, count: int) -> int:
    """The number of elements left by ``take(count)``; a negative ``count`` takes all.

    >>> at_most(5, 3), at_most(5, -1), at_most(INFINITE, 3), at_most(UNKNOWN, 3), at_most(UNKNOWN, 0)
    (3, 5, 3, -2, 0)
    """
    if count < 0:
        return cardinality
    if count == 0 or cardinality == INFINITE:
        return count
    return min(cardinality, count) if cardinality >= 0 else UNKNOWN


def beyond(cardinality: int, count: int) -> int:
    """The number of elements left by ``skip(count)``; a negative ``count`` skips all.

    >>> beyond(5, 3), beyond(5, 9), beyond(5, -1), beyond(INFINITE, 3), beyond(UNKNOWN, 3)
    (2, 0, 0, -1, -2)
    """
    if count < 0:
        return 0
    return max(cardinality - count, 0) if cardinality >= 0 else cardinality
