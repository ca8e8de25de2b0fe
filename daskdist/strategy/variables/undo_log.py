"""The log of one replica's changes of variables, by which calls are undone before they are made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from daskdist.execute.messages.sizes import size_of

# The most bytes of states that are kept besides those of the last call, as replicas need the memory.
_MOST_BYTES: Final = 2**26
# In place of a state: the replica had no value, or an object that may have been changed in place.
MISSING: Final = object()
UNKNOWN: Final = object()


class UndoLog:
    """The earlier states of variables that calls have changed, the oldest call first."""

    def __init__(self) -> None:
        # The number of a call -> the number of each variable that it has changed -> the state before.
        self._changes: dict[int, dict[int, Any]] = {}
        self._num_bytes = 0
        # Calls from this one on can be undone.
        self._first = 0
        # The running call, if its changes are noted.
        self._call: int | None = None

    def begin(self, call: int, first: int) -> None:
        """Note the changes of a call from now on; calls before ``first`` are never undone."""
        self._first = max(self._first, first)
        for number in [number for number in self._changes if number < first]:
            self._drop(number)
        self._call = call

    def end(self) -> None:
        """Note no more changes of the call."""
        self._call = None

    def note(self, variable: int, state: Any) -> None:
        """Note the state of a variable that the running call is going to change."""
        call = self._call
        if call is None or variable in self._changes.setdefault(call, {}):
            return
        self._changes[call][variable] = state
        self._num_bytes += _size(state)
        while self._num_bytes > _MOST_BYTES and (oldest := next(iter(self._changes))) != call:
            self._first = oldest + 1
            self._drop(oldest)

    def _drop(self, call: int) -> None:
        self._num_bytes -= sum(map(_size, self._changes.pop(call).values()))

    def undo(self, call: int, restore: Callable[[int, Any], None]) -> bool:
        """Restore the states before a call; return False, and restore nothing, if they are not known.

        Parameters
        ----------
        call
            The number of the first call to undo.
        restore
            Called with the number of a variable and its state, which may be `MISSING`.
        """
        later = [number for number in self._changes if number >= call]
        if self._first > call or any(state is UNKNOWN for number in later for state in self._changes[number].values()):
            return False
        for number in reversed(later):
            for variable, state in self._changes[number].items():
                restore(variable, state)
            self._drop(number)
        return True


def _size(state: Any) -> int:
    return 0 if state is MISSING or state is UNKNOWN else sum(map(size_of, state))
