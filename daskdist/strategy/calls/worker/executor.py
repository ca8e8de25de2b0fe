"""Threads that run the calls of one replica in the order of the program."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue


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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
