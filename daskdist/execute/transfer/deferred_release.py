"""Device memory that a framework may still be using in streams that are not known here."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from daskdist.waiting import wait_intervals

# The number of buffers to hold before new memory has to wait: each is as large as one copied unit.
_MOST_HELD: Final = 3
_END: Final = object()


class DeferredRelease:
    """Released memory that is held until the computations that use it are done.

    A framework with private streams releases an array as soon as the computation with it is queued. Waiting for the
    framework here would wait for all queued steps, so a separate thread waits, and new memory is used meanwhile.

    Parameters
    ----------
    wait
        Waits until everything queued in the framework so far is done; called by the thread.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._held = _HeldMemory()
        # The thread ends when this object is collected.
        weakref.finalize(self, self._held.released.put, _END)
        threading.Thread(target=self._held.release, args=(wait,), name="daskdist holding", daemon=True).start()

    def hold(self, memory: Any) -> None:
        """Hold memory."""
        self._held.memory.append(memory)
        self._held.released.put(None)

    def await_room(self, most: int = _MOST_HELD) -> None:
        """Wait until at most ``most`` buffers are held.

        Raises
        ------
        WaitTimeoutError
            The framework does not end its computations within ``daskdist.timeouts.step``.
        """
        held = self._held
        with held.changed:
            for within_s in wait_intervals(
                "computations of a framework that use memory of earlier steps", "timeouts.step"
            ):
                if held.changed.wait_for(lambda: len(held.memory) <= most, within_s):
                    return


class _HeldMemory:
    def __init__(self) -> None:
        # The garbage collector may release memory in the middle of any code, so neither of these waits for a lock.
        self.memory: deque[Any] = deque()
        self.released: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.changed = threading.Condition()

    def release(self, wait: Callable[[], None]) -> None:
        while self.released.get() is not _END:
            # A framework that failed computes nothing more.
            with contextlib.suppress(Exception):
                wait()
            self.memory.popleft()
            with self.changed:
                self.changed.notify_all()
