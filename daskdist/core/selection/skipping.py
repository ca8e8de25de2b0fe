"""Elements of streams that are skipped because they are before a position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from daskdist.core.failing.failed_elements import FailedBeforeError
from daskdist.core.primitive import Exhausted, SkippingUnread
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


def advance(cursor: Any, num_elements: int, num_errors: int) -> None:
    """Skip elements and errors, which were raised before the last of the elements was handed out or right after it.

    Raises
    ------
    ArgumentError
        There are fewer.
    """
    num_skipped = 0
    while num_errors:
        try:
            run = cursor.pull()
        except Exhausted:
            raise shorter(num_elements, num_skipped) from None
        except FailedBeforeError:
            continue
        except Exception:
            num_errors -= 1
            continue
        num_skipped += len(run)
        if num_skipped > num_elements:
            raise ArgumentError(
                f"load_state_dict: {num_errors} more elements failed before the position was taken than fail now"
            )
    num_skipped += cursor.skip(num_elements - num_skipped)
    if num_skipped < num_elements:
        raise shorter(num_elements, num_skipped)


def shorter(num_elements: int, num_now: int | None = None) -> ArgumentError:
    """Return the error for a stream of fewer elements than before a position was taken."""
    now = "fewer" if num_now is None else num_now
    return ArgumentError(
        f"load_state_dict: the position is after element {num_elements}, and there are {now}; the data or a function "
        "of the pipeline gives other elements than before"
    )
