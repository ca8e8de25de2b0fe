"""The progress of calls that read and compute data, by which threads that wait for them see that they are alive."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Sized
from typing import Any, Final


class CallProgress:
    """The progress of one call; its own thread writes, others read.

    Parameters
    ----------
    name
        The name of the call, such as that of its task.

    Attributes
    ----------
    function
        The user's function that is being called, with its operation's name; None if there is none.
    num_begun
        A number that grows with each call of a user's function and each wait that begins.
    results
        A list to which a loop adds the results of a user's function, so that the loop need not count its calls.
    """

    __slots__ = ("function", "name", "num_begun", "results")

    def __init__(self, name: str) -> None:
        self.name = name
        self.function: Any = None
        self.num_begun = 0
        self.results: Sized = ()

    def look(self) -> tuple[int, int]:
        """Return numbers that differ from those before if there was progress."""
        return self.num_begun, len(self.results)

    def __str__(self) -> str:
        function = self.function
        return self.name if function is None else f"{function.operation}: {function}"


class _UnderWay(threading.local):
    call: CallProgress | None = None


# ``under_way.call`` is the progress of the call of this thread; None if nobody waits for it.
under_way: Final = _UnderWay()


def note_call(function: Any) -> None:
    """Record that this thread calls a user's function, until it calls another."""
    call = under_way.call
    if call is not None:
        call.function = function
        call.num_begun += 1


class calling:  # noqa: N801 - used like a function
    """A context in which a user's function is called.

    Parameters
    ----------
    function
        The function.
    results
        A list that grows with each call.
    """

    __slots__ = ("_before", "_call", "_function", "_results")

    def __init__(self, function: Any, results: Sequence[Any] = ()) -> None:
        self._function, self._results = function, results

    def __enter__(self) -> None:
        call = self._call = under_way.call
        if call is not None:
            self._before = call.function, call.results
            call.function, call.results = self._function, self._results
            call.num_begun += 1

    def __exit__(self, *error: object) -> None:
        call = self._call
        if call is not None:
            call.function, call.results = self._before
            call.num_begun += 1
