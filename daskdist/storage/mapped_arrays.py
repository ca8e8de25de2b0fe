"""Arrays in files that are mapped to memory, of which only some are at a time."""

from __future__ import annotations

import weakref
from collections import deque
from math import prod
from typing import Any, Final

import numpy as np

# For each array that is mapped, its file stays open, and many systems let a process open 1,024 files.
_MOST_MAPPED: Final = 128

# An item for each mapped array. Only atomic methods are used, as arrays are deleted in any thread at any time.
_mapped: Final[deque[None]] = deque()


def mapped_array(path: str, dtype: Any, offset: int, shape: tuple[int, ...], order: Any = "C") -> Any:
    """Return a read-only array in a local file: mapped to memory, or read if many are mapped already.

    Raises
    ------
    ValueError
        The file is too short.
    """
    if len(_mapped) >= _MOST_MAPPED:
        array = np.fromfile(path, dtype, prod(shape), offset=offset).reshape(shape, order=order)
        array.flags.writeable = False
        return array
    mapped = np.memmap(path, dtype, "r", offset, shape, order)
    _mapped.append(None)
    weakref.finalize(mapped.base, _mapped.pop).atexit = False
    return np.asarray(mapped)
