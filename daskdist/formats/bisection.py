"""Searches for the invalid items among many, where a library only reports that there are some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def valid_parts(
    num_items: int, read: Callable[[int, int], Any], kinds: tuple[type[Exception], ...]
) -> Iterator[tuple[int, Any, Exception | None]]:
    """Yield the parts that can be read, as large as halving makes them, and the single items that cannot, in order.

    Parameters
    ----------
    num_items
        The number of items.
    read
        Returns the items from one number to before another.
    kinds
        The errors that it raises if one of them is invalid.

    Yields
    ------
    start, part, error
        The number of the first item, and either what ``read`` returned for the part, or its error for a single item.
    """
    rest = [(0, num_items)]
    while rest:
        start, stop = rest.pop()
        try:
            part = read(start, stop)
        except kinds as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                rest += [(middle, stop), (start, middle)]
            else:
                yield start, None, error
        else:
            yield start, part, None


def first_invalid(num_items: int, is_valid: Callable[[int, int], bool]) -> int:
    """Return the number of the first invalid item; there is one.

    >>> first_invalid(10, lambda start, stop: not start <= 6 < stop)
    6
    """
    start, stop = 0, num_items
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (middle, stop) if is_valid(start, middle) else (start, middle)
    return start
