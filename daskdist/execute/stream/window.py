"""How many bytes may be outstanding: of one pipeline, and of all there are in this process together."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Final
from weakref import WeakValueDictionary

# Of the shared budget a pipeline takes at most so many times what it leaves free. So one that comes later always finds
# room, whatever the others hold: one alone has three quarters of the budget, two that are alike 3/7 each.
_TIMES_FREE: Final = 3
# Changes that wait to be summed up, where nobody asks for the sum.
_MOST_CHANGES: Final = 256


class Account:
    """A sum of bytes that any thread adds to and takes from, at any moment."""

    def __init__(self) -> None:
        # Blocks are let go by the garbage collector, also in the middle of this: appending is atomic, and a lock
        # that is waited for could be taken twice by one thread.
        self._changes: deque[int] = deque()
        self._summing = Lock()
        self._sum_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more, or less where negative."""
        self._changes.append(num_bytes)
        if len(self._changes) >= _MOST_CHANGES:
            self._sum_up()

    @property
    def used_bytes(self) -> int:
        """Bytes outstanding; while somebody else is summing up, as they were shortly before."""
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
    """A budget of bytes, taken when something is asked for and given back when nothing refers to it.

    It is advice: whoever needs one thing more to make progress takes it although there is no room.

    Parameters
    ----------
    limit_bytes
        The budget.
    shared
        Where others take from too; None where there is no such thing.
    shared_limit_bytes
        The budget of all of them together.
    """

    def __init__(self, limit_bytes: int, shared: Account | None = None, shared_limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._own = Account()
        self._shared = shared
        self._shared_limit_bytes = shared_limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes outstanding."""
        return self._own.used_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes outstanding of all who share the budget."""
        return self.used_bytes if self._shared is None else self._shared.used_bytes

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether so many bytes more fit."""
        used_bytes = self._own.used_bytes + num_bytes
        if used_bytes > self.limit_bytes or self._shared is None:
            return used_bytes <= self.limit_bytes
        return used_bytes <= _TIMES_FREE * (self._shared_limit_bytes - self.shared_bytes - num_bytes)

    def acquire(self, num_bytes: int) -> None:
        self._own.add(num_bytes)
        if self._shared is not None:
            self._shared.add(num_bytes)

    def release(self, num_bytes: int) -> None:
        self.acquire(-num_bytes)


# What is outstanding in all, by what it is for and the worker it is on. Each goes with the last thing outstanding.
_accounts: Final[WeakValueDictionary[tuple[str, str | None], Account]] = WeakValueDictionary()
_opening: Final = Lock()


class Windows(dict[str | None, ByteWindow]):
    """The windows of one pipeline by worker, None being this process; made when first asked for.

    Parameters
    ----------
    kind
        What they are for: pipelines share a budget for each kind on each worker.
    limit_bytes
        The pipeline's own budget on each worker.
    shared_limit_bytes
        The budget on each worker of all pipelines together; None where the pipeline holds nothing, but only notes what
        it would hold.
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
        """Whether something more may be asked for on every worker."""
        return all(window.has_room() for window in self.values())
