"""Limits on outstanding bytes, for one pipeline and for all pipelines of this process together."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Final
from weakref import WeakValueDictionary

# A pipeline takes at most this many times the bytes that it leaves free in the shared budget. So a later one always
# finds room, whatever the others hold: a single one takes three quarters of the budget, two equal ones 3/7 each.
_TIMES_FREE: Final = 3
# The number of changes to accumulate before they are summed up, if the sum is not read in between.
_MOST_CHANGES: Final = 256


class Account:
    """A sum of bytes that any thread may change at any time."""

    def __init__(self) -> None:
        # The garbage collector may release blocks in the middle of a method here. Appending is atomic; waiting for a
        # lock could deadlock, because the thread may hold it already.
        self._changes: deque[int] = deque()
        self._summing = Lock()
        self._sum_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative."""
        self._changes.append(num_bytes)
        if len(self._changes) >= _MOST_CHANGES:
            self._sum_up()

    @property
    def used_bytes(self) -> int:
        """The outstanding bytes; slightly out of date while another thread is summing up."""
        self._sum_up()
        return self._sum_bytes

    def _sum_up(self) -> None:
        if self._summing.acquire(blocking=False):
            try:
                while self._changes:
                    self._sum_bytes += self._changes.popleft()
            finally:
                self._summing.release()


class ByteWindow:
    """A budget of bytes, acquired when data is requested and released when nothing refers to it any more.

    The limit is advisory: a pipeline that needs one more item to make progress acquires it even if there is no room.

    Parameters
    ----------
    limit_bytes
        The budget.
    shared
        The account shared with other pipelines; None if there is none.
    shared_limit_bytes
        The budget of all pipelines together.
    """

    def __init__(self, limit_bytes: int, shared: Account | None = None, shared_limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._own = Account()
        self._shared = shared
        self._shared_limit_bytes = shared_limit_bytes

    @property
    def used_bytes(self) -> int:
        """The outstanding bytes of this pipeline."""
        return self._own.used_bytes

    @property
    def shared_bytes(self) -> int:
        """The outstanding bytes of all pipelines that share the budget."""
        return self.used_bytes if self._shared is None else self._shared.used_bytes

    def has_room(self, num_bytes: int = 0) -> bool:
        """Return whether ``num_bytes`` more bytes fit."""
        used_bytes = self._own.used_bytes + num_bytes
        if used_bytes > self.limit_bytes or self._shared is None:
            return used_bytes <= self.limit_bytes
        return used_bytes <= _TIMES_FREE * (self._shared_limit_bytes - self.shared_bytes - num_bytes)

    def acquire(self, num_bytes: int) -> None:
        """Add to the outstanding bytes."""
        self._own.add(num_bytes)
        if self._shared is not None:
            self._shared.add(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Subtract from the outstanding bytes."""
        self.acquire(-num_bytes)


# The accounts shared by all pipelines, by kind and worker. Each is dropped with the last data that is counted in it.
_accounts: Final[WeakValueDictionary[tuple[str, str | None], Account]] = WeakValueDictionary()
_opening: Final = Lock()


class Windows(dict[str | None, ByteWindow]):
    """The windows of one pipeline by worker, created on first use; None stands for this process.

    Parameters
    ----------
    kind
        The kind of data: pipelines share a budget for each kind on each worker.
    limit_bytes
        The pipeline's own budget on each worker.
    shared_limit_bytes
        The budget of all pipelines together on each worker; None if the pipeline only records a graph and holds no
        data.
    """

    def __init__(self, kind: str, limit_bytes: int, shared_limit_bytes: int | None) -> None:
        super().__init__()
        self._kind = kind
        self._limit_bytes = limit_bytes
        self._shared_limit_bytes = shared_limit_bytes

    def __missing__(self, worker: str | None) -> ByteWindow:
        if self._shared_limit_bytes is None:
            window = ByteWindow(self._limit_bytes)
        else:
            with _opening:
                account = _accounts.setdefault((self._kind, worker), Account())
            window = ByteWindow(self._limit_bytes, account, self._shared_limit_bytes)
        self[worker] = window
        return window

    def has_room(self) -> bool:
        """Return whether more data may be requested on every worker."""
        return all(window.has_room() for window in self.values())
