"""Helpers for tests of copies to devices: steps, and the copying threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
from strict_device import TAKEN

from daskdist import MirroredStrategy


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("daskdist-feed")]


def join(threads):
    """Wait for threads to end; fail if one does not."""
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def device_gather_of(num_replicas=1):
    return MirroredStrategy([f"STRICT:{number}" for number in range(num_replicas)])


def arrays(*shapes, num_steps=8, dtype=np.float64):
    """Return steps for one replica, each with other values."""
    return [
        [[np.arange(np.prod(shape), dtype=dtype).reshape(shape) + 1000 * step for shape in shapes]]
        for step in range(num_steps)
    ]


def taken_bytes(index=0):
    gc.collect()
    return TAKEN.get(index, 0)
