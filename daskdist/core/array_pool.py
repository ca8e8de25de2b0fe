"""A pool that reuses the memory of large arrays; all begin at addresses that other libraries can share.

The system clears memory before it allocates it again, and a virtual machine may have to request it from its host:
fresh memory is written at a fraction of the speed of memory in use. The C library itself reuses small allocations.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np

# Smaller arrays are not pooled: the C library keeps enough memory of their sizes.
_LEAST_BYTES: Final = 2**22
# The most bytes to keep of one array, and of all together unless a process has little memory.
_MOST_BYTES: Final = 2**28
_MOST_KEPT_BYTES: Final = 2**29
# JAX shares arrays whose address is a multiple of this, and processors are fastest with them. NumPy's large arrays
# begin 16 bytes after such an address. Smaller arrays than the limit gain too little for the microsecond it takes.
_ALIGNED_BYTES: Final = 64
_LEAST_ALIGNED_BYTES: Final = 2**12
# The seconds without a request after which memory returns to the system.
_IDLE_S: Final = 10.0

# The kinds of dtypes whose memory can be chosen: not text, bytes, objects or times.
NUMBERS: Final = "biufc"

Memory = np.ndarray[Any, np.dtype[np.uint8]]
_BYTES: Final = np.dtype(np.uint8)
Free = TypeVar("Free")


class ArrayPool:
    """A pool that creates uninitialized arrays, like `numpy.empty`, in the memory of deleted ones.

    An array is deleted when nothing refers to it or to a view of it.

    Parameters
    ----------
    idle_s
        The seconds without a request for a large array after which the pool is emptied.

    Attributes
    ----------
    most_kept_bytes
        The most bytes to keep of all arrays together.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self.most_kept_bytes = _MOST_KEPT_BYTES
        self._asked = 0.0
        self._watch: Thread | None = None
        # Only atomic methods of the deque are used, as arrays are freed in any thread at any time.
        self._kept: deque[Memory] = deque(maxlen=0)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        num_bytes = prod(shape) * dtype.itemsize
        if dtype.kind not in NUMBERS or num_bytes < _LEAST_ALIGNED_BYTES:
            return np.empty(shape, dtype)
        if not _LEAST_BYTES <= num_bytes <= _MOST_BYTES or not self._keeps():
            return _aligned(shape, dtype, num_bytes)
        return np.asarray(_Lease(self._taken(num_bytes), shape, dtype, self))

    def give_back(self, memory: Memory) -> None:
        """Keep unused memory, if the pool is active."""
        kept = self._kept
        kept.append(memory)
        try:
            while sum([array.nbytes for array in list(kept)]) > self.most_kept_bytes:
                kept.popleft()
        except IndexError:
            # Other threads have taken all of it in the meantime.
            pass

    def forget(self) -> None:
        """Release all memory until the next request."""
        self._kept = deque(maxlen=0)

    def _taken(self, num_bytes: int) -> Memory:
        memory = take_fitting(self._kept, lambda memory: num_bytes <= memory.nbytes <= num_bytes * 5 // 4)
        return _aligned((num_bytes,), _BYTES, num_bytes) if memory is None else memory

    def _keeps(self) -> bool:
        # Return whether a thread is running that frees kept memory; none can be started at the end of the program.
        self._asked = time.monotonic()
        if self._watch is None or not self._watch.is_alive():
            watch = Thread(target=self._let_go, name="daskdist-memory", daemon=True)
            try:
                watch.start()
            except RuntimeError:
                return False
            self._watch, self._kept = watch, deque()
        return True

    def _let_go(self) -> None:
        while (rest := self._asked + self._idle_s - time.monotonic()) > 0:
            time.sleep(rest)
        self.forget()


def take_fitting(free: deque[Free], is_fitting: Callable[[Free], bool]) -> Free | None:
    """Take the fitting object that was freed last, and may still be in the processor's cache; None without one.

    Other threads may take objects and add some meanwhile.
    """
    for _ in range(len(free)):
        try:
            item = free.pop()
        except IndexError:
            break
        if is_fitting(item):
            return item
        free.appendleft(item)
    return None


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any], num_bytes: int) -> Any:
    memory = np.empty(num_bytes + _ALIGNED_BYTES, _BYTES)
    return np.ndarray(shape, dtype, memory, -memory.__array_interface__["data"][0] % _ALIGNED_BYTES)


class _Lease:
    # The base of an array in pooled memory and of its views, which NumPy keeps alive for them.
    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any], owner: ArrayPool) -> None:
        self._memory, self._owner = memory, weakref.ref(owner)
        address = memory.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (address, False)}

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.give_back(self._memory)


# One pool for the process, so that memory of one pass is reused by the next.
_of_this_process: Final = ArrayPool()
if hasattr(os, "register_at_fork"):
    # A forked child has no thread to free memory.
    os.register_at_fork(after_in_child=_of_this_process.forget)


def pooled_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialized array, in reused memory if there is some."""
    return _of_this_process(shape, dtype)


def limit_pool(num_bytes: int) -> None:
    """Keep no more than some bytes of unused memory in this process."""
    _of_this_process.most_kept_bytes = min(_MOST_KEPT_BYTES, num_bytes)
