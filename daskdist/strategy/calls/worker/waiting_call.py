"""Calls on a worker that are made as soon as their inputs have arrived."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.calls.worker.promises import Promise
from daskdist.strategy.values.encoding import Encoded

# A lock for all calls, as each step makes a call.
_lock: Final = threading.Lock()


class Maker(Protocol):
    """Interface of the maker of calls whose inputs have arrived."""

    def make_soon(self, call: WaitingCall) -> None:
        """Make a call whose inputs have arrived."""
        ...

    def finish(self, call: WaitingCall, outcome: Any) -> None:
        """Set the result of a call, and send it to the program."""
        ...


class WaitingCall:
    """A call of a function on inputs, some of which may not have arrived.

    Parameters
    ----------
    maker
        Makes the call once all inputs have arrived. If an input failed, the call is not made, without waiting for the
        others, which may never arrive.
    number
        The number of the call.
    promise
        The promise that gets the result.
    inputs
        The function, and the results that its arguments need.
    arguments
        The arguments.
    settings
        The settings of the program.
    name
        The name of the call.
    """

    # A single object without closures, as each step makes one and the garbage collector examines all objects.
    __slots__ = (
        "_is_begun",
        "_maker",
        "_num_left",
        "arguments",
        "inputs",
        "name",
        "number",
        "promise",
        "settings",
    )

    def __init__(
        self,
        maker: Maker,
        number: int,
        promise: Promise,
        inputs: Sequence[Any],
        arguments: Encoded,
        settings: Any,
        name: str,
    ) -> None:
        self._maker = maker
        self.number = number
        self.promise = promise
        self.inputs = inputs
        self.arguments = arguments
        self.settings = settings
        self.name = name
        self._num_left = 0
        self._is_begun = False

    def begin(self) -> None:
        """Make the call when all inputs have arrived, or now if they have."""
        missing = [call_input for call_input in self.inputs if not call_input.is_set]
        if not missing:
            self._maker.make_soon(self)
            return
        self._num_left = len(missing)
        for call_input in missing:
            call_input.when_set(self)

    def __call__(self) -> None:
        """Note that an input has arrived."""
        with _lock:
            self._num_left -= 1
            failed = self._failed() if self._num_left else None
            if self._is_begun or (self._num_left and failed is None):
                return
            self._is_begun = True
        if failed is None:
            self._maker.make_soon(self)
        else:
            self._maker.finish(self, failed)

    def _failed(self) -> Failed | None:
        for call_input in self.inputs:
            if type(call_input) is Promise and type(call_input.value) is Failed:
                return call_input.value
        return None
