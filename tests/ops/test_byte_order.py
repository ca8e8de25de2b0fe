"""Arrays in another byte order: elements are in that of this machine, whatever their source and operations."""

from __future__ import annotations

import dask.array as da
import dask.dataframe as dd
import numpy as np
import optree
import pandas as pd
import pytest

from daskdist import Dataset, Options, Ragged, TensorSpec
from daskdist.testing import same_elements

DTYPES = [">i4", ">f8", ">u2", ">c16", ">f2", ">M8[s]"]
NUMBERS = np.arange(60).reshape(30, 2)
SWAPPED = NUMBERS.astype(">i4")


def rows(dtype):
    return NUMBERS.astype(dtype.replace(">", "")).astype(dtype)


OPERATIONS = {
    "batch": lambda ds: ds.batch(7),
    "map": lambda ds: ds.map(lambda x: x.astype(x.dtype.newbyteorder(">"))).batch(7),
    "map of each": lambda ds: ds.map(lambda x: x.astype(x.dtype.newbyteorder(">")), vectorized=False).batch(7),
    "map of many": lambda ds: ds.map(lambda x: x.astype(x.dtype.newbyteorder(">")), vectorized=True).batch(7),
    "flat_map": lambda ds: ds.batch(10).flat_map(Dataset.from_tensor_slices).batch(4),
    "interleave": lambda ds: Dataset.range(3).interleave(lambda number: ds.skip(number)).batch(4),
    "padded_batch": lambda ds: ds.padded_batch(4),
    "ragged_batch": lambda ds: ds.ragged_batch(4),
    "sliding_window": lambda ds: ds.sliding_window(3).batch(2),
    "unique": lambda ds: ds.repeat(2).unique(),
    "scan": lambda ds: ds.scan(0, lambda state, x: (state + 1, x)).batch(3),
    "processes": lambda ds: ds.map(lambda x: x[::-1], vectorized=False).batch(7).with_options(Options(num_processes=1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_same_elements_as_for_native_arrays(name, dtype):
    swapped, native = rows(dtype), rows(dtype.replace(">", "<"))
    assert not swapped.dtype.isnative
    ds, expected = (OPERATIONS[name](Dataset.from_tensor_slices(array)) for array in (swapped, native))
    assert ds.element_spec == expected.element_spec
    same_elements(list(ds), list(expected), name)


SOURCES = {
    "from_tensor_slices": lambda: Dataset.from_tensor_slices(SWAPPED),
    "from_tensors": lambda: Dataset.from_tensors(SWAPPED),
    "from_list": lambda: Dataset.from_list([SWAPPED[0], NUMBERS[1].astype("<i4")]),
    "from_generator": lambda: Dataset.from_generator(lambda: iter(SWAPPED), output_signature=TensorSpec((2,), ">i4")),
    "array of Dask": lambda: Dataset.from_dask(da.from_array(SWAPPED, chunks=(8, 2))),
    "frame of Dask": lambda: Dataset.from_dask(dd.from_pandas(pd.DataFrame({"a": SWAPPED[:, 0]}), npartitions=2)),
    "frame": lambda: Dataset.from_tensor_slices(pd.DataFrame(SWAPPED)),
    "columns of a frame": lambda: Dataset.from_tensor_slices(dict(pd.DataFrame({"a": SWAPPED[:, 0]}))),
    "masked array": lambda: Dataset.from_tensor_slices(np.ma.masked_array(SWAPPED)),
    "ragged": lambda: Dataset.from_tensor_slices(Ragged(SWAPPED, [0, 2, 30])),
    "bag": lambda: Dataset.from_dask(da.from_array(SWAPPED, chunks=(8, 2)).to_delayed().ravel().tolist()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_give_native_arrays(name):
    ds = SOURCES[name]()
    dtypes = [leaf.dtype for element in ds for leaf in optree.tree_leaves(element)]
    assert dtypes
    assert all(dtype.isnative for dtype in dtypes)
    specs = optree.tree_leaves(ds.element_spec)
    assert all(spec.dtype.isnative for spec in specs)


def test_equal_elements_in_two_byte_orders_are_equal():
    ds = Dataset.range(6).map(lambda number: SWAPPED[0] if number % 2 else SWAPPED[0].astype("<i4"), vectorized=False)
    same_elements(list(ds.unique()), [NUMBERS[0].astype(np.int32)], "the only element")
    assert next(iter(ds.batch(6))).shape == (6, 2)
