"""Memory of a device that somebody may compute with still, in streams that nobody knows."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

# So much of it is held before no more is given out: each is as much as is copied at a time.
_MOST_HELD: Final = 3
_END: Final = object()


class DeferredRelease:
    """Holds memory that was let go of until what was to be done with it is done.

    Frameworks that keep their streams to themselves let go of an array when they have been told what to compute with
    it. To wait for them here would be to wait for all the steps that they have been told of; so a thread of its own
    does, and new memory is taken meanwhile.

    Parameters
    ----------
    wait
        Waits until all that the framework has been told by now is done. The thread calls it.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._held = _HeldMemory()
        # It ends with this.
        weakref.finalize(self, self._held.let_go.put, _END)
        threading.Thread(target=self._held.release, args=(wait,), name="daskdist holding", daemon=True).start()

    def hold(self, memory: Any) -> None:
        """Hold memory."""
        self._held.memory.append(memory)
        self._held.let_go.put(None)

    def await_room(self, most: int = _MOST_HELD) -> None:
        """Wait until no more than so much is held."""
        held = self._held
        with held.changed:
            held.changed.wait_for(lambda: len(held.memory) <= most)


class _HeldMemory:
    def __init__(self) -> None:
        # Memory is let go of anywhere, in the midst of anything: neither of these takes a lock that anybody has.
        self.memory: deque[Any] = deque()
        self.let_go: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.changed = threading.Condition()

    def release(self, wait: Callable[[], None]) -> None:
        while self.let_go.get() is not _END:
            # Where the framework fails nothing is computed any more.
            with contextlib.suppress(Exception):
                wait()
            self.memory.popleft()
            with self.changed:
                self.changed.notify_all()
