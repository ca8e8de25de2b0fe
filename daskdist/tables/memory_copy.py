"""Copies within the host's memory, large ones by several threads."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from daskdist.config import num_threads
from daskdist.storage.libraries import pa

# Fewer bytes are copied before threads have started.
_LEAST_BYTES: Final = 2**20
_MOST_THREADS: Final = 16


def copy_memory(source: Any, target: Any) -> None:
    """Copy an array of bytes to another of the same size, both contiguous, without the GIL.

    One thread copies about 10 GB/s, which is a fifth of what a device can copy from memory.
    """
    number = min(num_threads(), _MOST_THREADS)
    if source.nbytes < _LEAST_BYTES or number < 2:
        np.copyto(target, source)
        return
    # Python's threads would wait for the GIL after each part.
    writer = pa.FixedSizeBufferWriter(pa.py_buffer(target))
    writer.set_memcopy_threads(number)
    writer.set_memcopy_threshold(_LEAST_BYTES)
    writer.write(source)
