"""Small files of the newest versions of other libraries, which `tests/data/SOURCES.md` lists."""

from __future__ import annotations

import zipfile

import dask
import numpy as np
import pytest
from conftest import TESTS

from daskdist import Ragged, read_files
from daskdist.core.dataset_base import node_of

WRITERS = TESTS / "data" / "writers.zip"
WORDS = ["a", "ü" * 9, ""]
NUMBERS = {"n": [1, -2, 3]}
POLARS = {**NUMBERS, "x": [0.5, np.nan, 2.0], "s": WORDS, "word": ["u", "v", "u"], "l": [[1, 2], [], [3]]}
DUCKDB = {
    "n": [1, -2],
    "s": WORDS[:2],
    "at": np.array(["2024-02-29T12:00", "0001-01-01"], "datetime64[us]"),
    "d": [1.25, -3.1],
    "l": [[1, 2], []],
    "st": {"a": [1, 2]},
    "id": [bytes.fromhex("11111111222233334444555555555555"), bytes([0] * 15 + [1])],
}
DATAFUSION = {**NUMBERS, "x": [0.5, np.nan, 2.0], "s": WORDS, "l": [[1, 2], [], [3]], "d": [1.25] * 3}
ARRAYS = {**NUMBERS, "s": WORDS, "z": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]}
FILES = {
    "polars.arrow": POLARS,
    "polars-zstd.arrow": POLARS,
    "polars-oldest.arrow": POLARS,
    "polars.arrows": POLARS,
    "polars-batches.arrow": {"n": [1, -2, 3, 1, -2, 3]},
    "polars-empty.arrow": {"n": [], "s": []},
    "polars.parquet": {
        **NUMBERS,
        "s": WORDS,
        "at": np.array(["2024-02-29T12:00", "NaT", "0001-01-01"], "datetime64[us]"),
        "d": [1.25, -3.1, 0.01],
        "st": {"a": [1, 2, 3]},
        "h": [1.5, 2, 3],
    },
    "duckdb.parquet": DUCKDB,
    "duckdb-v2.parquet": DUCKDB,
    "fastparquet.parquet": {
        **NUMBERS,
        "x": [0.5, np.nan, 2.0],
        "s": WORDS,
        "at": np.array(["2024-02-29T12:00", "NaT", "2001-01-01"], "datetime64[us]"),
        "cat": ["u", "v", "u"],
    },
    "datafusion.arrow": DATAFUSION,
    "datafusion.parquet": DATAFUSION,
    "deltalake.parquet": {**NUMBERS, "s": WORDS},
    "h5py-earliest.h5": ARRAYS,
    "h5py-latest.h5": ARRAYS,
    "zarr-3.zarr.zip": ARRAYS,
    "zarr-2.zarr.zip": NUMBERS,
    "numpy.npz": {**NUMBERS, "s": [b"a", b"bc", b""]},
    "webdataset.tar.gz": {
        "__key__": ["dir/000", "dir/001"],
        "cls": [7, 8],
        "json": {"a": [0, 1]},
        "npy": [[0, 1], [1, 2]],
        "txt": ["", "ü"],
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writers")
    with zipfile.ZipFile(WRITERS) as archive:
        archive.extractall(folder)
    return folder


def test_all_are_read(made):
    assert {path.name for path in made.iterdir()} == set(FILES)


def same(values, expected):
    if isinstance(expected, dict):
        assert set(values[0]) == set(expected)
        for name, column in expected.items():
            same([value[name] for value in values], column)
        return
    assert len(values) == len(expected)
    for value, other in zip(values, expected, strict=True):
        value = value.tolist() if isinstance(value, (Ragged, np.ndarray)) else value
        np.testing.assert_equal(value, other)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("split_bytes", [1, "128 MB"])
def test_rows_are_those_that_were_written(made, name, split_bytes):
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_files(made / name)
        rows = list(ds)
    if rows:
        same(rows, FILES[name])
    else:
        assert set(ds.element_spec) == set(FILES[name])


def test_batches_of_a_file_are_cut(made):
    with dask.config.set({"daskdist.split-bytes": 1}):
        numbers = [split.num_rows for split in node_of(read_files(made / "polars-batches.arrow")).splits()]
    assert numbers == [1] * 6
