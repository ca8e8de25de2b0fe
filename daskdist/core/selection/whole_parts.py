"""Parts of streams that are skipped as a whole."""

from __future__ import annotations

from collections.abc import Iterable


def whole_parts(lengths: Iterable[tuple[int, int]], num_elements: int) -> tuple[int, int]:
    """Return how many parts are within the first elements of a stream, and how many elements those have.

    Parameters
    ----------
    lengths
        The lengths of parts, each with how often it follows.
    num_elements
        The number of elements. Parts without elements that begin behind them count, too.

    >>> whole_parts([(5, 3), (0, 1), (4, 1)], 16)
    (4, 15)
    """
    num_parts = num_within = 0
    for length, number in lengths:
        num_whole = min(number, (num_elements - num_within) // length) if length else number
        num_parts += num_whole
        num_within += num_whole * length
        if num_whole < number:
            break
    return num_parts, num_within
