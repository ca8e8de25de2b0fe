"""Streams that are advanced to a position: by arithmetic if possible, or else by pulling elements."""

from __future__ import annotations

from typing import Any

from daskdist.core.primitive import Cursor, Exhausted, SkippingByArithmetic
from daskdist.core.selection.skipping import may_skip_unread, shorter
from daskdist.errors import ArgumentError


class SkippingCursor:
    """A cursor that can skip elements, and otherwise behaves like the one that it wraps.

    Parameters
    ----------
    cursor
        The cursor.
    """

    def __init__(self, cursor: Any) -> None:
        self.cursor: Cursor = cursor
        self._may_skip = True
        self._rest: Any = None

    @property
    def skips_unread(self) -> bool:
        """Return whether the cursor skips elements without reading them, wherever the position is."""
        return may_skip_unread(self.cursor)

    def pull(self) -> Any:
        self._may_skip = False
        rest, self._rest = self._rest, None
        return self.cursor.pull() if rest is None else rest

    def skip(self, num_elements: int) -> int:
        """Skip elements; return how many there were: fewer than ``num_elements`` only at the end of the stream.

        Raises
        ------
        ArgumentError
            The stream ends before an element that is needed again, or such an element fails now.
        """
        may_skip, self._may_skip = self._may_skip and num_elements > 0, False
        num_skipped = 0
        if may_skip and isinstance(self.cursor, SkippingByArithmetic):
            try:
                num_skipped = self.cursor.skip(num_elements)
            except Exhausted:
                raise shorter(num_elements) from None
        while num_skipped < num_elements:
            try:
                run = self.pull()
            except Exhausted:
                break
            if (error := getattr(self.cursor, "failed_now", None)) is not None:
                raise ArgumentError(
                    f"load_state_dict: an element fails that did not fail before the position was taken: {error}"
                ) from error
            num_taken = min(len(run), num_elements - num_skipped)
            num_skipped += num_taken
            if num_taken < len(run):
                self._rest = run[num_taken:]
        return num_skipped
