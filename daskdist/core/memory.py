"""Large arrays in memory that was used before.

The operating system hands memory out page by page, zeroed, on first touch, at a fifth of the speed at which a
gather fills it. Chunks come and go at that size all the time, so their memory is kept and used again.
"""

from __future__ import annotations

import weakref
from collections import deque
from math import prod
from typing import Any, Final

import numpy as np

# Below it the C library keeps memory itself.
_SMALLEST_BYTES: Final = 2**17
# The most that is kept for later; what is given back beyond it goes to the operating system.
_KEPT_BYTES: Final = 2**26


class Memory:
    """Memory that arrays lease. When the last array that looks at it is gone, it can be leased again.

    Notes
    -----
    Giving back runs wherever an array is let go of, in any thread; appending to a deque is atomic.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[np.ndarray[Any, Any]]] = {}
        # Finds out that a lease has ended; a weak reference is gone itself unless something holds it.
        self._leases: dict[int, weakref.ref[memoryview]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array whose values are not set."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST_BYTES or dtype.hasobject or not dtype.isbuiltin:
            return np.empty(shape, dtype)
        memory = self._take(_rounded(num_bytes))
        lease = memoryview(memory)  # type: ignore[arg-type]  # an array is a buffer
        self._watch(lease, memory)
        return np.frombuffer(lease, np.uint8, num_bytes).view(dtype).reshape(shape)

    def _take(self, size: int) -> np.ndarray[Any, Any]:
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            return np.empty(size, np.uint8)

    def _watch(self, lease: memoryview, memory: np.ndarray[Any, Any]) -> None:
        number = id(lease)

        def give_back(_: object) -> None:
            self._leases.pop(number, None)
            if self.kept_bytes + len(memory) <= _KEPT_BYTES:
                self._free.setdefault(len(memory), deque()).append(memory)

        self._leases[number] = weakref.ref(lease, give_back)

    @property
    def kept_bytes(self) -> int:
        """The size of what is free."""
        return sum(size * len(free) for size, free in list(self._free.items()))


def _rounded(num_bytes: int) -> int:
    # To an eighth of a power of two, so that sizes that differ a little share memory.
    step = 1 << max(num_bytes.bit_length() - 4, 0)
    return -(-num_bytes // step) * step


MEMORY: Final = Memory()
empty: Final = MEMORY.empty


def take(array: Any, rows: Any) -> Any:
    """Rows of an array, ``array[rows]``, in leased memory; the row numbers must be valid."""
    out = empty((len(rows), *array.shape[1:]), array.dtype)
    # "clip" only spares NumPy a buffer.
    return np.take(array, rows, axis=0, out=out, mode="clip")
