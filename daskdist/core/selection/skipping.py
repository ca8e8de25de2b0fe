"""Elements of streams that are skipped because they are before a position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from daskdist.core.primitive import SkippingUnread
from daskdist.errors import ArgumentError


def whole_parts(lengths: Iterable[tuple[int, int]], num_elements: int) -> tuple[int, int]:
    """Return how many parts are within the first elements of a stream, and how many elements those have.

    Parameters
    ----------
    lengths
        The lengths of parts, each with its number of repetitions.
    num_elements
        The number of elements. Empty parts that follow these elements count, too.

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


def skip_unread(cursor: Any, num_elements: int) -> int:
    """Skip at most so many elements by arithmetic, before any is pulled, and return how many.

    It asks cursors that skip in a first pass as they do at a position: those of data whose numbers of rows are known,
    and of operations on them that only count. Others have to see what they skip, such as a cache.
    """
    return int(cursor.skip(num_elements)) if may_skip_unread(cursor) and num_elements else 0


def may_skip_unread(cursor: Any) -> bool:
    """Return whether `skip_unread` may skip elements of a cursor."""
    return isinstance(cursor, SkippingUnread) and cursor.skips_unread


def advance(cursor: Any, num_elements: int) -> None:
    """Skip the elements before a position.

    Raises
    ------
    ArgumentError
        There are fewer.
    """
    num_skipped = cursor.skip(num_elements)
    if num_skipped < num_elements:
        raise shorter(num_elements, num_skipped)


def shorter(num_elements: int, num_now: int | None = None) -> ArgumentError:
    """Return the error for a stream of fewer elements than before a position was taken."""
    now = "fewer" if num_now is None else num_now
    return ArgumentError(
        f"load_state_dict: the position is after element {num_elements}, and there are {now}; the data or a function "
        "of the pipeline gives other elements than before"
    )
