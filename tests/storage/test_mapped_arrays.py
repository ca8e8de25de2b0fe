"""Arrays in files that are mapped to memory: few files stay open, however many arrays are kept."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

import daskdist
from daskdist.storage.mapped_arrays import mapped_array

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")

NUM_FILES = 400
MOST_OPEN = 200


def num_open():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays")
    for number in range(NUM_FILES):
        np.save(folder / f"{number:04}.npy", np.full((5, 40), number))
    return str(folder)


@pytest.mark.parametrize(("dtype", "order", "offset"), [("<i4", "C", 0), (">f8", "F", 16), ("u1", "C", 3)])
def test_arrays_are_the_same_mapped_or_read(tmp_path, dtype, order, offset):
    path = str(tmp_path / "data")
    array = np.arange(60).astype(dtype).reshape(3, 4, 5)
    with open(path, "wb") as file:
        file.write(bytes(offset) + array.tobytes(order))
    gc.collect()
    num_before = num_open()
    for _ in range(2):
        with pytest.raises(ValueError, match="size"):
            mapped_array(path, np.dtype(dtype), offset, (3, 5, 5), order)
        arrays = [mapped_array(path, np.dtype(dtype), offset, array.shape, order) for _ in range(NUM_FILES)]
        assert 100 < num_open() - num_before < MOST_OPEN
        with pytest.raises(ValueError, match="size"):
            mapped_array(path, np.dtype(dtype), offset, (3, 5, 5), order)
        for mapped in arrays:
            assert mapped.dtype == array.dtype
            assert not mapped.flags.writeable
            np.testing.assert_array_equal(mapped, array)
        del arrays, mapped


def test_a_shuffle_may_keep_arrays_of_many_files(folder):
    num_before = num_open()
    ds = daskdist.read_npy(f"{folder}/*.npy")
    rows = list(ds)
    assert num_open() - num_before < MOST_OPEN
    assert [int(row[0]) for row in rows] == [number for number in range(NUM_FILES) for _ in range(5)]
    del rows
    iterator = iter(ds.shuffle(5 * NUM_FILES, seed=0).batch(10))
    first = next(iterator)
    assert num_open() - num_before < MOST_OPEN
    rows = [int(row[0]) for batch in (first, *iterator) for row in batch]
    assert sorted(rows) == [number for number in range(NUM_FILES) for _ in range(5)]
