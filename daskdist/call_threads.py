"""A pool of threads that call functions on replicas, as starting a thread takes longer than a short call."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Final

# Seconds after which a thread without calls ends.
_IDLE_S: Final = 2.0
# The beginning of the threads' names.
_NAME: Final = "daskdist idle"


class CallInThread:
    """A call to run in a thread, which must not raise; the two methods are those of `threading.Thread`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        # Only the thread of the call changes it, before it releases the lock; an event takes three times as long.
        self._is_alive = True
        self._under_way = threading.Lock()
        self._under_way.acquire(blocking=False)

    def run(self) -> None:
        """Make the call, and keep no references to it."""
        run, self._run = self._run, None
        if run is not None:
            run()

    def end(self) -> None:
        """Record that the call is over."""
        self._is_alive = False
        self._under_way.release()

    def is_alive(self) -> bool:
        """Return whether the call is running."""
        return self._is_alive

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the call, at most for some seconds."""
        # After an interrupt between the two lines, the lock may be held for ever.
        if self._is_alive and self._under_way.acquire(timeout=-1 if timeout is None else timeout):
            self._under_way.release()


class CallThreads:
    """A pool of daemon threads that grows as needed, since calls of replicas wait for each other."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the threads, of which a forked process has none."""
        self._idle: list[queue.SimpleQueue[CallInThread]] = []
        self._lock = threading.Lock()

    def start(self, call: CallInThread) -> None:
        """Run a call in a thread at once.

        Raises
        ------
        RuntimeError
            The system has no more threads.
        """
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(calls,), name=_NAME, daemon=True).start()
        calls.put(call)

    def _work(self, calls: queue.SimpleQueue[CallInThread]) -> None:
        while True:
            try:
                call = calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if calls in self._idle:
                        self._idle.remove(calls)
                        return
                # This thread was just given a call.
                continue
            try:
                call.run()
            finally:
                with self._lock:
                    self._idle.append(calls)
                call.end()
            # Keep no references while waiting.
            del call


CALL_THREADS: Final = CallThreads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALL_THREADS.forget)
