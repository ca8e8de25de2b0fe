"""Memory of large arrays, given out again once nobody has them any more.

What the system takes back it clears before it gives it out anew, and a virtual machine may have to ask its host for it:
fresh memory is written at a fraction of the speed of memory that is in use. The C library keeps what is small.
"""

from __future__ import annotations

import weakref
from collections import deque
from math import prod
from typing import Any, Final

import numpy as np

# What is larger goes back to the system as soon as it is freed.
_LEAST_BYTES: Final = 2**25
# What is kept for arrays to come, at most: so many, none of them larger.
_MOST_KEPT: Final = 4
_MOST_BYTES: Final = 2**28

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Recycled:
    """Makes arrays whose values are not set, as `numpy.empty` does, in memory of arrays that are gone.

    An array is gone when nothing refers to it, nor to any view of it. What is kept goes when this does, or is closed.
    """

    def __init__(self) -> None:
        # Of its methods those that are used here are atomic: arrays go in any thread at any time.
        self._kept: deque[Memory] = deque(maxlen=_MOST_KEPT)

    def close(self) -> None:
        """Keep nothing any more, whatever is gone from now on."""
        self._kept = deque(maxlen=0)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        num_bytes = prod(shape) * dtype.itemsize
        if not _LEAST_BYTES < num_bytes <= _MOST_BYTES:
            return np.empty(shape, dtype)
        return np.asarray(_Lease(self._taken(num_bytes), shape, dtype, self._kept))

    def _taken(self, num_bytes: int) -> Memory:
        for _ in range(len(self._kept)):
            try:
                memory = self._kept.popleft()
            except IndexError:
                break
            if num_bytes <= memory.nbytes <= num_bytes * 5 // 4:
                return memory
            self._kept.append(memory)
        return np.empty(num_bytes, np.uint8)


class _Lease:
    # What an array in such memory refers to, and with it every view: NumPy holds on to it for them.
    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any], kept: deque[Memory]) -> None:
        # Whoever keeps one chunk does not keep what others were in.
        self._memory, self._kept = memory, weakref.ref(kept)
        address = memory.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (address, False)}

    def __del__(self) -> None:
        kept = self._kept()
        if kept is not None:
            kept.append(self._memory)
