"""The log of one replica's changes of variables, by which calls are undone before they are made again."""

from __future__ import annotations

from collections import deque
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
        # The number of the call, the number of the variable, and its state before.
        self._changes: deque[tuple[int, int, Any]] = deque()
        self._num_bytes = 0
        # Calls from this one on can be undone.
        self._first = 0
        # The running call, if its changes are noted, and the variables that it has changed.
        self._call: int | None = None
        self._changed: set[int] = set()

    def begin(self, call: int, first: int) -> None:
        """Note the changes of a call from now on; calls before ``first`` are never undone."""
        self._first = max(self._first, first)
        while self._changes and self._changes[0][0] < first:
            self._drop_first()
        self._call = call
        self._changed.clear()

    def end(self) -> None:
        """Note no more changes of the call."""
        self._call = None

    def note(self, variable: int, state: Any) -> None:
        """Note the state of a variable that the running call is going to change."""
        if self._call is None or variable in self._changed:
            return
        self._changed.add(variable)
        self._changes.append((self._call, variable, state))
        self._num_bytes += _size(state)
        while self._num_bytes > _MOST_BYTES and self._changes[0][0] != self._call:
            self._first = self._changes[0][0] + 1
            self._drop_first()

    def _drop_first(self) -> None:
        _, _, state = self._changes.popleft()
        self._num_bytes -= _size(state)

    def undo(self, call: int, restore: Callable[[int, Any], None]) -> bool:
        """Restore the states before a call; return False, and restore nothing, if they are not known.

        Parameters
        ----------
        call
            The number of the first call to undo.
        restore
            Called with the number of a variable and its state, which may be `MISSING`.
        """
        if self._first > call or any(number >= call and state is UNKNOWN for number, _, state in self._changes):
            return False
        while self._changes and self._changes[-1][0] >= call:
            _, variable, state = self._changes.pop()
            self._num_bytes -= _size(state)
            restore(variable, state)
        return True


def _size(state: Any) -> int:
    return 0 if state is MISSING or state is UNKNOWN else sum(map(size_of, state))
