"""Streams that are advanced to a position: by arithmetic where there is some, and by pulling elements otherwise."""

from __future__ import annotations

from typing import Any

from daskdist.core.failing.failed_elements import FailedBeforeError
from daskdist.core.primitive import Cursor, Exhausted, NotingBehind, SkippingByArithmetic


class SkippingCursor:
    """A cursor that can skip elements, and otherwise is the one it is made of.

    Parameters
    ----------
    cursor
        The cursor.
    is_exact
        Whether to pull each element, so that errors are raised in their places.
    """

    def __init__(self, cursor: Any, *, is_exact: bool) -> None:
        self.cursor: Cursor = cursor
        self._may_skip = not is_exact
        self._rest: Any = None

    def pull(self) -> Any:
        self._may_skip = False
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        return self.cursor.pull()

    def skip(self, num_elements: int) -> int:
        """Skip elements; return how many there were: fewer than ``num_elements`` only at the end of the stream."""
        may_skip, self._may_skip = self._may_skip and num_elements > 0, False
        num_skipped = 0
        if may_skip and isinstance(self.cursor, SkippingByArithmetic):
            num_skipped = self.cursor.skip(num_elements)
        while num_skipped < num_elements:
            try:
                run = self.pull()
            except Exhausted:
                break
            except FailedBeforeError:
                continue
            num_taken = min(len(run), num_elements - num_skipped)
            num_skipped += num_taken
            if num_taken < len(run):
                self._rest = run[num_taken:]
        if isinstance(self.cursor, NotingBehind):
            self.cursor.note_num_behind(num_skipped)
        return num_skipped
