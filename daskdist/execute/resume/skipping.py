"""Streams that are advanced to a position: by arithmetic if possible, or else by pulling elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskdist.core.failing.failed_elements import FailedBeforeError
from daskdist.core.primitive import Cursor, Exhausted, NotingPosition, SkippingByArithmetic
from daskdist.core.selection.skipping import may_skip_unread, shorter


class SkippingCursor:
    """A cursor that can skip elements, and otherwise behaves like the one that it wraps.

    Parameters
    ----------
    cursor
        The cursor.
    is_exact
        Whether to pull each element, so that errors are raised in their places.
    is_advancing
        Returns whether the stream is not at the position yet.
    """

    def __init__(self, cursor: Any, *, is_exact: bool, is_advancing: Callable[[], bool]) -> None:
        self.cursor: Cursor = cursor
        self._may_skip = not is_exact
        self._is_advancing = is_advancing
        # The number of elements that were skipped or pulled until the position.
        self._num_pulled = 0
        self._rest: Any = None

    @property
    def skips_unread(self) -> bool:
        """Return whether the cursor skips elements without reading them, wherever the position is."""
        return may_skip_unread(self.cursor)

    def pull(self) -> Any:
        self._may_skip = False
        rest, self._rest = self._rest, None
        run = self.cursor.pull() if rest is None else rest
        if self._is_advancing():
            self._num_pulled += len(run)
            self.note_num_passed(self._num_pulled)
        return run

    def skip(self, num_elements: int) -> int:
        """Skip elements; return how many there were: fewer than ``num_elements`` only at the end of the stream.

        Raises
        ------
        ArgumentError
            The stream ends before an element that is needed again.
        """
        may_skip, self._may_skip = self._may_skip and num_elements > 0, False
        num_skipped = num_left = 0
        if may_skip and isinstance(self.cursor, SkippingByArithmetic):
            try:
                num_skipped = self._num_pulled = self.cursor.skip(num_elements)
            except Exhausted:
                raise shorter(num_elements) from None
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
                num_left = len(run) - num_taken
        if self._is_advancing():
            self._num_pulled -= num_left
            self.note_num_passed(self._num_pulled)
        return num_skipped

    def note_num_passed(self, num_elements: int) -> None:
        """Note that the position is after this many elements."""
        if isinstance(self.cursor, NotingPosition):
            self.cursor.note_num_passed(num_elements)
