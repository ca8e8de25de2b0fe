"""How many bytes may be outstanding."""

from __future__ import annotations

from collections import deque


class Window:
    """A budget of bytes, taken when something is asked for and given back when nothing refers to it.

    It is advice: whoever needs one thing more to make progress takes it although there is no room.

    Parameters
    ----------
    limit_bytes
        The budget.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        # Blocks are let go by the garbage collector, in any thread and at any moment: appending is atomic, and
        # a lock could be taken twice by one thread.
        self._released: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes outstanding."""
        while self._released:
            self._used_bytes -= self._released.popleft()
        return self._used_bytes

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether so many bytes more fit."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def acquire(self, num_bytes: int) -> None:
        self._used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._released.append(num_bytes)
