"""Results that may not have arrived yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

_lock: Final = threading.Lock()
_UNSET: Final = object()


class Cell:
    """One result of one call on a worker: empty until the call has finished, then a value or a `Failure`.

    Parameters
    ----------
    origin
        The address of the worker that sends the value; None if it is computed here.
    """

    __slots__ = ("_callbacks", "_value", "origin")

    def __init__(self, origin: str | None = None) -> None:
        self.origin = origin
        self._value: Any = _UNSET
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Return whether the result has arrived."""
        return self._value is not _UNSET

    @property
    def is_awaited(self) -> bool:
        """Return whether something here waits for the result."""
        return bool(self._callbacks)

    def set(self, value: Any) -> None:
        """Fill the cell; a second value is ignored."""
        with _lock:
            if self._value is not _UNSET:
                return
            self._value = value
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_set(self, callback: Callable[[], None]) -> None:
        """Call a function when the result arrives, in the thread that fills the cell, or now if it has arrived."""
        with _lock:
            if self._value is _UNSET:
                self._callbacks.append(callback)
                return
        callback()

    def get(self) -> Any:
        """Wait for the result and return it."""
        if self._value is _UNSET:
            gate = threading.Lock()
            gate.acquire()
            self.when_set(gate.release)
            gate.acquire()
        return self._value
