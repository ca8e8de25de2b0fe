"""Memory with a callback when it is released."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

# Bound here, as module globals may be gone when the last objects are deleted.
_is_finalizing: Final = sys.is_finalizing


class Borrowed:
    """An owner of memory that calls a function when it is released, before the memory is freed.

    Parameters
    ----------
    memory
        An array.
    on_release
        Called with the memory, in the thread that drops the last reference.
    """

    def __init__(self, memory: Any, on_release: Callable[[Any], None]) -> None:
        self._memory = memory
        self._on_release = on_release

    @property
    def __array_interface__(self) -> Any:
        # NumPy arrays keep a reference to the owner of their memory.
        return self._memory.__array_interface__

    def __del__(self) -> None:
        if not _is_finalizing():
            self._on_release(self._memory)
