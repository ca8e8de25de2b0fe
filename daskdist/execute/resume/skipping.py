"""Streams that are advanced to a position: by arithmetic where there is some, and by pulling elements otherwise."""

from __future__ import annotations

from typing import Any

from daskdist.core.failing.failed_elements import FailedBeforeError
from daskdist.core.primitive import Cursor, Exhausted, SkippingByArithmetic


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
        self._skip_some = cursor.skip if isinstance(cursor, SkippingByArithmetic) and not is_exact else None
        self._rest: Any = None

    def pull(self) -> Any:
        self._skip_some = None
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        return self.cursor.pull()

    def skip(self, num_elements: int) -> int:
        """Skip elements; return how many there were: fewer than ``num_elements`` only at the end of the stream."""
        skip_some, self._skip_some = self._skip_some, None
        num_skipped = 0 if skip_some is None or not num_elements else skip_some(num_elements)
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
        return num_skipped
