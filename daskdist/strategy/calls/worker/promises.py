"""Results that may not have arrived yet, and values that were sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.pickling import load_sent
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.replica.call_end import CallEnd
from daskdist.waiting import wait_intervals

_lock: Final = threading.Lock()
UNSET: Final = object()


class Promise:
    """The result of one call on a worker: unset until the call has finished, then a value or a `Failure`.

    Parameters
    ----------
    origin
        The address of the worker that sends the value; None if it is computed here.
    end
        The end of the replicas' call on this worker; None for other calls.
    """

    __slots__ = ("_callback", "_others", "end", "origin", "value")

    def __init__(self, origin: str | None = None, end: CallEnd | None = None) -> None:
        self.origin = origin
        self.end = end
        # `UNSET` until the result has arrived.
        self.value: Any = UNSET
        # There is mostly one callback, which is stored without a list, as the garbage collector examines all objects of
        # steps under way.
        self._callback: Callable[[], None] | None = None
        self._others: tuple[Callable[[], None], ...] = ()

    @property
    def is_set(self) -> bool:
        """Return whether the result has arrived."""
        return self.value is not UNSET

    @property
    def is_awaited(self) -> bool:
        """Return whether something here waits for the result."""
        return self._callback is not None

    def set(self, value: Any) -> None:
        """Set the result; a second one is ignored."""
        with _lock:
            if self.value is not UNSET:
                return
            self.value = value
            callback, others = self._callback, self._others
            self._callback, self._others = None, ()
        if callback is not None:
            callback()
            for other in others:
                other()

    def when_set(self, callback: Callable[[], None]) -> None:
        """Call a function when the result arrives, in the thread that sets it, or now if it has arrived."""
        with _lock:
            if self.value is UNSET:
                if self._callback is None:
                    self._callback = callback
                else:
                    self._others = (*self._others, callback)
                return
        callback()

    def get(self) -> Any:
        """Wait for the result and return it."""
        if self.value is UNSET:
            gate = threading.Lock()
            gate.acquire()
            self.when_set(gate.release)
            for within_s in wait_intervals(f"a result of {self.origin or 'an earlier call'}", None):
                if gate.acquire(timeout=within_s):
                    break
        return self.value


class SentValue:
    """A function or a large value that the program sent once; unpickled when a call first needs it.

    Parameters
    ----------
    value
        The pickle; or a NumPy array, which calls get read-only.
    """

    is_set = True
    origin = None

    def __init__(self, value: Any) -> None:
        self._value = value
        self._lock = threading.Lock()
        # The object in a tuple, once a call has needed it.
        self.made: tuple[Any] | None = None

    def when_set(self, callback: Callable[[], None]) -> None:
        callback()

    def get(self) -> Any:
        with self._lock:
            if self.made is None:
                try:
                    value = load_sent(self._value) if type(self._value) is bytes else self._value
                except BaseException as error:
                    return Failed(Failure.of(error), None)
                if isinstance(value, np.ndarray):
                    value = value.view()
                    value.flags.writeable = False
                self.made, self._value = (value,), None
            return self.made[0]
