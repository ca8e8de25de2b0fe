"""`CallEnd`: the reason why a call on replicas is to end before its function returns."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from daskdist.errors import ClusterError

# A lock for all calls, as each step makes a call.
_lock: Final = threading.Lock()


class CallEnd:
    """The reason why a call on the replicas of a worker is to end early; there is none at first.

    A function cannot be interrupted. Its next batch, collective operation or checkpoint raises an error.
    """

    __slots__ = ("_callbacks", "_last", "_refuses_saves", "_why")

    def __init__(self) -> None:
        self._why: str | None = None
        self._refuses_saves = False
        self._callbacks: list[Callable[[], None]] = []
        # Replica -> what it did last, for a batch its number, and the time.
        self._last: dict[int, tuple[str, int | None, float]] = {}

    def note(self, replica: int, action: str, number: int | None = None, *, begins: bool = False) -> None:
        """Note what a replica does that shows that its function continues, such as taking a batch.

        Something that only ``begins`` has a time limit of its own.
        """
        self._last[replica] = action, number, math.inf if begins else monotonic()

    def last(self, replica: int) -> tuple[str, float] | None:
        """Return what a replica noted last, and the seconds since; None if it noted nothing."""
        noted = self._last.get(replica)
        if noted is None:
            return None
        action, number, at = noted
        return action if number is None else f"{action} {number}", max(monotonic() - at, 0.0)

    @property
    def is_over(self) -> bool:
        """Return whether the call is to end."""
        return self._why is not None

    def end(self, why: str, *, refuses_saves: bool = False) -> None:
        """End the call; only the first reason counts.

        ``refuses_saves`` also refuses checkpoints that are being written.
        """
        with _lock:
            self._refuses_saves |= refuses_saves
            if self._why is not None:
                return
            self._why = why
            callbacks = list(self._callbacks)
        if callbacks:
            # Use another thread: this one may be an event loop, and the callbacks acquire locks.
            threading.Thread(target=_call_all, args=(callbacks,), name="daskdist end of call", daemon=True).start()

    def check(self) -> None:
        """Raise an error if the call is to end.

        Raises
        ------
        ClusterError
            The call has ended; the message has the reason.
        """
        if self._why is not None:
            raise ClusterError(self._why)

    def check_saves(self) -> None:
        """Raise the error of `check` if checkpoints that are being written are refused."""
        if self._refuses_saves:
            self.check()

    def on_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call a function in a separate thread when the call is to end; return a function that cancels this."""
        with _lock:
            self._callbacks.append(callback)

        def undo() -> None:
            with _lock, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return undo


# That of the calls that nothing ends early.
NEVER: Final = CallEnd()


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
