"""Memory that somebody else computes with, and that comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

# Bound, as a module's globals may be gone when the last objects go.
_is_finalizing: Final = sys.is_finalizing


class Borrowed:
    """Keeps memory, and calls a function when nobody has this any more, before the memory goes.

    Parameters
    ----------
    memory
        An array.
    back
        What is called with the memory, in whatever thread lets go of this last.
    """

    def __init__(self, memory: Any, back: Callable[[Any], None]) -> None:
        self._memory = memory
        self._back = back

    @property
    def __array_interface__(self) -> Any:
        # NumPy's arrays keep whom they have their memory from.
        return self._memory.__array_interface__

    def __del__(self) -> None:
        if not _is_finalizing():
            self._back(self._memory)
