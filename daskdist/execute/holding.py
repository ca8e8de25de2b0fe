"""Memory of a device that somebody may compute with still, in streams that nobody knows."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

# So much of it is held before no more is given out: each is as much as is copied at a time.
_MOST_HELD: Final = 3


class Holding:
    """Holds memory that was let go of until what was to be done with it is done.

    Frameworks that keep their streams to themselves let go of an array when they have been told what to compute with
    it. To wait for them here would be to wait for all the steps that they have been told of; so others do, and new
    memory is taken meanwhile.

    Parameters
    ----------
    wait
        Waits until all that the framework has been told by now is done. It is called in a thread of its own.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        # Memory is let go of anywhere, in the midst of anything: to put it here takes no lock that anybody has.
        self._let_go: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_waiting = False
        self._changed = threading.Condition()
        threading.Thread(target=self._release, name="daskdist holding", daemon=True).start()

    def hold(self, memory: Any) -> None:
        """Hold memory."""
        self._let_go.put(memory)

    def await_room(self, most: int = _MOST_HELD) -> None:
        """Wait until no more than so much is held."""
        with self._changed:
            self._changed.wait_for(lambda: self._let_go.qsize() + self._is_waiting <= most)

    def _release(self) -> None:
        while True:
            memory = self._let_go.get()
            self._is_waiting = True
            # Where the framework fails nothing is computed any more.
            with contextlib.suppress(Exception):
                self._wait()
            del memory
            with self._changed:
                self._is_waiting = False
                self._changed.notify_all()
