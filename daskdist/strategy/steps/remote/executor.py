"""Threads that run the calls of one replica in the order of the program."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

# The number of calls without a wait after which results for other workers are sent together, and the most that are.
_NUM_WITHOUT_WAITS: Final = 4
_MOST_HELD: Final = 8


class Executor:
    """One thread with a queue of calls.

    Parameters
    ----------
    name
        The name of its thread.
    prepare
        Called in the thread before anything else.
    """

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        # The calls since one had to wait for a result, and the results for other workers that are not sent yet.
        self.num_without_waits = self.num_held = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def thread(self) -> int:
        """Return the identity of the thread."""
        return self._thread.ident or 0

    def can_hold(self) -> bool:
        """Return whether a result for another worker can wait for later ones, as further calls follow at once."""
        self.num_held += 1
        if self.num_held < _MOST_HELD and self.num_without_waits >= _NUM_WITHOUT_WAITS and self.has_more:
            return True
        self.num_held = 0
        return False

    @property
    def has_more(self) -> bool:
        """Return whether more calls wait."""
        return not self._queue.empty()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise, after the earlier ones."""
        self._queue.put(call)

    def close(self) -> None:
        """End the thread after the running call; queued calls are dropped."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        self._prepare()
        get = self._queue.get
        while (call := get()) is not None and not self._is_closed:
            call()
            # Drop the call before waiting for the next one, as it refers to its results.
            del call


_ready: threading.local = threading.local()


def run_ready(call: Callable[[], None]) -> None:
    """Run a call in this thread: now, or after the running one. So a chain of calls does not become a deep stack."""
    waiting: deque[Callable[[], None]] | None = getattr(_ready, "calls", None)
    if waiting is not None:
        waiting.append(call)
        return
    waiting = _ready.calls = deque((call,))
    try:
        while waiting:
            waiting.popleft()()
    finally:
        del _ready.calls
