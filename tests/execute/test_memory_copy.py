"""Copies of memory by several threads, and the pinned memory that they write to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest

from daskdist.devices import device
from daskdist.execute.transfer.layout import MIB, PinnedRing
from daskdist.tables.memory_copy import copy_memory


@pytest.mark.parametrize("num_bytes", [0, 5, 2**20 - 1, 2**20, 3 * 2**20 + 7])
@pytest.mark.parametrize("number", [1, 4])
def test_memory_is_copied(num_bytes, number):
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 2, np.uint8)[1:-1]
    target = np.zeros(num_bytes + 2, np.uint8)
    with dask.config.set({"daskdist.num-threads": number}):
        copy_memory(source, target[1:-1])
    assert np.array_equal(target[1:-1], source)
    assert (target[0], target[-1]) == (0, 0)


def test_threads_take_slots_from_one_ring(strict):
    ring = PinnedRing(device("STRICT:0"), 2)
    first, second = ring.take(100), ring.take(3 * MIB)
    assert (len(first.memory), len(second.memory)) == (MIB, 3 * MIB)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(ring.take, 2 * MIB)
        assert not third.done()
        ring.give_back(first)
        # The slot was too small.
        assert third.result(10) is first
    assert len(first.memory) == 2 * MIB
