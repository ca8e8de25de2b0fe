"""Blocks that follow each other in memory are gathered as views."""

from __future__ import annotations

import pickle

import dask
import numpy as np
import pytest
from conftest import mirrored

from daskdist import Dataset
from daskdist.core.block import Block
from daskdist.core.selection.intervals import RowIntervals
from daskdist.core.structure import LONE
from daskdist.execute.stream.gather import Picks, gather

NUM_ROWS = 2**14
WIDE = np.random.default_rng(0).random((NUM_ROWS, 32), np.float32)
NUMBERS = np.arange(NUM_ROWS)


@pytest.fixture(autouse=True)
def small_splits():
    with dask.config.set({"daskdist.split-bytes": "200 KiB"}):
        yield


def rows(first=0, stop=NUM_ROWS):
    return Dataset.from_tensor_slices({"wide": WIDE[first:stop], "number": NUMBERS[first:stop]})


def numbers_of(dataset, num_replicas):
    """Return the rows' numbers of the batches of each replica, after a look at the other column."""
    actual = [[] for _ in range(num_replicas)]
    for step in mirrored(num_replicas).distribute_dataset(dataset):
        wide, number = (leaf.values if num_replicas > 1 else [leaf] for leaf in (step["wide"], step["number"]))
        for replica in range(num_replicas):
            assert np.array_equal(wide[replica], WIDE[number[replica]])
            actual[replica].append(number[replica].tolist())
    return actual


def expected_of(numbers, batch_rows, num_replicas):
    # Each batch is shared out over the replicas.
    part = batch_rows // num_replicas
    firsts = range(0, len(numbers) - batch_rows + 1, batch_rows)
    return [[numbers[first + k * part : first + (k + 1) * part] for first in firsts] for k in range(num_replicas)]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("batch_rows", [3000, 4096, 7000])
def test_batches_of_several_blocks_are_views(num_replicas, batch_rows):
    dataset = rows().batch(batch_rows, drop_remainder=True)
    for step in mirrored(num_replicas).distribute_dataset(dataset):
        for leaf, column in ((step["wide"], WIDE), (step["number"], NUMBERS)):
            for values in leaf.values if num_replicas > 1 else [leaf]:
                assert np.shares_memory(values, column) == bool(len(values))
                assert not len(values) or not values.flags.writeable


ORDERS = {
    "all": (lambda: rows(), lambda: NUMBERS),
    "the end first": (
        lambda: rows(5000, NUM_ROWS).concatenate(rows(0, 5000)),
        lambda: np.concatenate([NUMBERS[5000:], NUMBERS[:5000]]),
    ),
    "with a gap": (
        lambda: rows(0, 3000).concatenate(rows(3001, NUM_ROWS)),
        lambda: np.concatenate([NUMBERS[:3000], NUMBERS[3001:]]),
    ),
    "twice": (lambda: rows().repeat(2), lambda: np.concatenate([NUMBERS, NUMBERS])),
    "some": (lambda: rows().skip(77).take(12_345), lambda: NUMBERS[77 : 77 + 12_345]),
    "overlapping": (
        lambda: rows(0, 9000).concatenate(rows(8000, NUM_ROWS)),
        lambda: np.concatenate([NUMBERS[:9000], NUMBERS[8000:]]),
    ),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_rows", [700, 4096])
def test_batches_have_their_rows_in_any_order(num_replicas, order, batch_rows):
    make, numbers = ORDERS[order]
    dataset = make().batch(batch_rows, drop_remainder=True)
    expected = expected_of(numbers().tolist(), batch_rows, num_replicas)
    assert numbers_of(dataset, num_replicas) == expected


def test_columns_of_other_orders_are_not_confused():
    # The columns' blocks are parts of one array each, but begin at other rows of it.
    both = Dataset.zip((rows(0, 8000), rows(100, 8100))).map(lambda a, b: {"wide": a["wide"], "number": b["number"]})
    for step in mirrored(1).distribute_dataset(both.batch(3000)):
        assert np.array_equal(step["wide"], WIDE[step["number"] - 100])


def test_index_arrays_of_32_bits_count_more_bytes():
    # The system provides the memory of zeros only when it is read.
    zeros = np.zeros((2**16 + 2, 2**15), np.uint8)
    half = len(zeros) // 2
    rows = RowIntervals(np.array([0, 1]), np.array([0, 0]), np.array([0, half, 2 * half]))
    sent = pickle.loads(pickle.dumps(Picks(rows, None, None, None)))
    actual = gather([Block(LONE, [zeros[:half]]), Block(LONE, [zeros[half:]])], sent)
    (leaf,) = actual.leaves
    assert leaf.shape == zeros.shape
    assert leaf.ctypes.data == zeros.ctypes.data


@pytest.mark.parametrize(("num_left", "is_view"), [(1000, False), (NUM_ROWS // 2, True)])
def test_few_rows_are_copied_as_a_view_would_keep_their_blocks(num_left, is_view):
    half = NUM_ROWS // 2
    blocks = [Block(LONE, [WIDE[:half]]), Block(LONE, [WIDE[half:]])]
    first = half - num_left // 2
    rest = np.array([0, half - first, num_left])
    rows = RowIntervals(np.array([0, 1]), np.array([first, 0]), rest)
    actual = gather(blocks, Picks(rows, None, None, None)).leaves[0]
    assert np.array_equal(actual, WIDE[first : first + num_left])
    assert np.shares_memory(actual, WIDE) == is_view
