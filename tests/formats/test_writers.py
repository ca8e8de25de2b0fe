"""Datasets written to files: contents, when files get their final names, and which processes write them."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import time
from collections import OrderedDict, namedtuple
from pathlib import Path

import dask
import fsspec
import numpy as np
import programs
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from conftest import TESTS
from dask.utils import parse_bytes

import daskdist
from daskdist import Dataset, Options, Ragged, TensorSpec, errors, read_parquet
from daskdist.core.block import Block, Bundle
from daskdist.core.dataset_base import element_spec_of
from daskdist.core.spec import RaggedTensorSpec
from daskdist.core.structure import Structure
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.submit import Submit
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.formats.parquet import Parquet
from daskdist.formats.write import ZarrWriter
from daskdist.storage.filesystem import Storage
from daskdist.storage.write_manifest import is_manifest_name
from daskdist.tables.to_arrow import table_of
from daskdist.testing import same_elements

Pair = namedtuple("Pair", "left right")
TEXT = np.dtypes.StringDType()
WRITERS = ["to_parquet", "to_tfrecord", "to_npy", "to_webdataset"]


@pytest.fixture
def split_small():
    """Make splits of ten numbers, so that there are many calls."""
    with dask.config.set({"daskdist.split-bytes": 80}):
        yield


def names_in(directory):
    """Return all names below a directory, also hidden ones, without the manifests of finished writes."""
    names = (str(path.relative_to(directory)) for path in Path(directory).rglob("*"))
    return sorted(name for name in names if not is_manifest_name(Path(name).name))


def numbers_in(paths):
    return [int(x) for x in read_parquet(paths, columns="value")]


def samples(num_rows):
    """Return elements that every writer accepts."""
    return Dataset.range(num_rows).map(lambda x: {"cls": x})


def fails_at(row):
    def function(x):
        if x == row:
            raise ValueError("no such number")
        return x

    return function


def unknown(function, num_rows):
    """Return mapped numbers from 50 on; the function fails for others, so its spec is not known in advance."""
    return Dataset.range(50, 50 + num_rows).map(lambda x: function(x) if x >= 50 else 1 // 0, vectorized=False)


# --- contents of files ---

ROUND = {
    "scalars of a dict": {"i": np.arange(5, dtype=np.int16), "f": np.arange(5) / 4, "b": np.arange(5) % 2 == 0},
    "narrow and wide numbers": {
        "half": np.arange(5, dtype=np.float16) / 2,
        "byte": np.arange(5, dtype=np.uint8),
        "long": np.array([0, 1, 2**63, 2**64 - 1, 5], np.uint64),
        "nan": np.array([1, np.nan, np.inf, -0.0, 2], np.float32),
    },
    "text and bytes": {
        "text": np.array(["", "word", "naïve", "a\0b", "x" * 100], TEXT),
        "bytes": np.array([b"", b"\0", b"a\0", b"\xff\xfe", b"x" * 100], object),
    },
    "dates and durations": {
        "day": np.array(["2024-02-29", "NaT", "1969-01-01", "2000-01-01", "2300-12-31"], "M8[D]"),
        "ms": np.arange(5).astype("M8[ms]"),
        "us": np.arange(5).astype("M8[us]"),
        "ns": np.array([0, 1, "NaT", 3, 4], "M8[ns]"),
        "s": np.array([0, 1, "NaT", 3, 4], "m8[s]"),
        "took": np.arange(5).astype("m8[ns]"),
    },
    "arrays": {
        "row": np.arange(15, dtype=np.float32).reshape(5, 3),
        "cube": np.arange(60, dtype=np.uint8).reshape(5, 2, 3, 2),
        "flags": np.arange(10).reshape(5, 2) % 3 == 0,
        "words": np.array([["a", "b"]] * 5, TEXT),
        "blobs": np.array([[b"a", b"\0"]] * 5, object),
        "days": np.arange(10).reshape(5, 2).astype("M8[D]"),
        "halves": np.arange(10, dtype=np.float16).reshape(5, 2),
    },
    "a dict in a dict": {"deep": {"er": {"x": np.arange(5), "y": np.arange(10).reshape(5, 2)}}, "top": np.ones(5)},
    "names in another order": {"z": np.arange(5), "a": np.arange(5) / 2, "m": {"b": np.arange(5), "a": np.ones(5)}},
}


@pytest.mark.parametrize("what", ROUND)
def test_parquet_gives_the_elements_back(tmp_path, what):
    ds = Dataset.from_tensor_slices(ROUND[what])
    again = read_parquet(ds.to_parquet(tmp_path, rows_per_file=2))
    assert again.element_spec == ds.element_spec
    same_elements(list(again), list(ds), what)


def test_columns_are_in_the_order_given(tmp_path):
    (path,) = Dataset.from_tensor_slices(ROUND["names in another order"]).to_parquet(tmp_path)
    schema = pq.read_schema(path)
    assert schema.names == ["z", "a", "m"]
    assert [value.name for value in schema.field("m").type] == ["b", "a"]


@pytest.mark.parametrize(
    ("elements", "names", "columns"),
    [
        (np.arange(4), ["value"], "value"),
        ((np.arange(4), np.ones(4)), ["0", "1"], ("0", "1")),
        (Pair(np.arange(4), np.ones(4)), ["left", "right"], Pair("left", "right")),
        (OrderedDict(b=np.arange(4), a=np.ones(4)), ["b", "a"], OrderedDict(b="b", a="a")),
        ({1: np.arange(4), 0: np.ones(4)}, ["1", "0"], {1: "1", 0: "0"}),
    ],
)
def test_nests_that_are_no_dict_of_names_come_back_by_columns(tmp_path, elements, names, columns):
    ds = Dataset.from_tensor_slices(elements)
    paths = ds.to_parquet(tmp_path)
    assert pq.read_schema(paths[0]).names == names
    same_elements(list(read_parquet(paths, columns=columns)), list(ds), "by columns")


def test_a_tuple_within_is_a_struct_of_numbers(tmp_path):
    paths = Dataset.from_tensor_slices({"a": (np.arange(3), np.ones(3))}).to_parquet(tmp_path)
    assert [list(map(int, value["a"].values())) for value in read_parquet(paths)] == [[0, 1], [1, 1], [2, 1]]


def test_arrays_whose_length_differs_are_lists(tmp_path):
    ds = Dataset.range(6).map(lambda x: {"x": np.full(x % 4, x), "y": np.full((x % 3, 2), x / 2)})
    assert ds.element_spec["x"].shape == (None,)
    paths = ds.to_parquet(tmp_path, rows_per_file=4)
    same_elements(list(read_parquet(paths)), list(ds), "lists")
    kinds = pq.read_schema(paths[0]).types
    assert pa.types.is_large_list(kinds[0])
    assert pa.types.is_fixed_size_list(kinds[1].value_type)


def test_files_have_one_schema_whatever_is_in_them(tmp_path):
    # In the first file all arrays have the same length; in the second all are empty.
    rows = [[1, 2], [3, 4], [], [], [5], [6, 7, 8]]
    spec = {"x": TensorSpec((None,), "int64"), "w": TensorSpec((), TEXT)}
    ds = Dataset.from_generator(lambda: ({"x": np.array(x, np.int64), "w": str(x)} for x in rows), spec)
    paths = ds.to_parquet(tmp_path, rows_per_file=2)
    assert len({str(pq.read_schema(path)) for path in paths}) == 1
    assert [value["x"].tolist() for value in read_parquet(paths)] == rows


def test_ragged_batches_are_lists_of_lists(tmp_path):
    ds = Dataset.range(7).map(lambda x: np.full((x % 3, 2), x)).ragged_batch(3)
    again = list(read_parquet(ds.to_parquet(tmp_path, unbatch=False), columns="value"))
    assert [type(x) for x in again] == [Ragged] * 3
    assert [x.tolist() for x in again] == [x.tolist() for x in ds]


def test_batches_are_lists_too(tmp_path):
    ds = Dataset.range(7).batch(3)
    same_elements(
        list(read_parquet(ds.to_parquet(tmp_path / "a", unbatch=False), columns="value")), list(ds), "batches"
    )
    whole = Dataset.range(6).batch(2, drop_remainder=True).batch(3)
    paths = whole.to_parquet(tmp_path / "b", unbatch=False)
    same_elements(list(read_parquet(paths, columns="value")), list(whole), "of batches")


@pytest.mark.parametrize("method", [*WRITERS, "to_zarr"])
def test_batches_are_written_as_rows_where_that_is_asked_for(tmp_path, method):
    rows = Dataset.range(10).map(lambda x: {"cls": x})
    size = {"chunk_rows": 4} if method == "to_zarr" else {"rows_per_file": 4}
    getattr(rows, method)(tmp_path / "rows", **size)
    batches = rows.batch(3).map(lambda batch: {"cls": batch["cls"] * 1})
    getattr(batches, method)(tmp_path / "batches", unbatch=True, **size)
    actual, expected = (
        {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
        for root in (tmp_path / "batches", tmp_path / "rows")
    )
    assert actual == expected


@pytest.mark.parametrize("method", [*WRITERS, "to_zarr"])
@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds.batch(3),
        lambda ds: ds.batch(2, drop_remainder=True).prefetch(1),
        lambda ds: ds.batch(3).map(lambda batch: {"cls": batch["cls"] * 2}),
    ],
)
def test_batches_are_refused_unless_unbatch_is_given(tmp_path, method, build):
    ds = build(Dataset.range(10).map(lambda x: {"cls": x}))
    with pytest.raises(errors.ArgumentError, match=f"{method}: elements look like batches; give unbatch=True"):
        getattr(ds, method)(tmp_path / "new")
    with pytest.raises(errors.ArgumentError, match=f"{method}: unbatch is 'yes'; give True or False"):
        getattr(ds, method)(tmp_path / "new", unbatch="yes")
    assert not (tmp_path / "new").exists()


def test_seconds_come_back_in_milliseconds(tmp_path):
    (path,) = Dataset.from_tensor_slices(np.arange(3).astype("M8[s]")).to_parquet(tmp_path)
    actual = list(read_parquet(path, columns="value"))
    assert actual == [np.datetime64(k * 1000, "ms") for k in range(3)]
    assert actual[0].dtype == "M8[ms]"


def test_dates_beyond_those_of_columns_are_not_written(tmp_path):
    # Arrow stores days as 32 bits, and would drop the upper bits of larger numbers.
    ds = Dataset.from_tensor_slices({"day": np.array(["NaT", "2024-02-29", 2**40], "M8[D]")})
    with pytest.raises(errors.ArgumentError, match=r"leaf \['day'\].*dates from .* are not all in the range"):
        ds.to_parquet(tmp_path / "a")
    known = np.array(["NaT", -(2**31), 2**31 - 1], "M8[D]")
    Dataset.from_tensor_slices({"day": known}).to_parquet(tmp_path / "b")
    np.testing.assert_array_equal(np.array(list(read_parquet(tmp_path / "b", "day"))), known)


def test_words_of_numpy_are_text_and_bytes(tmp_path):
    words, raw = np.array(["a", "longer"]), np.array([b"a", b"longer"])
    structure = Structure.of({"s": 0, "u": 0})[1]
    block = Block(structure, [raw, words])
    bundle = Bundle(structure, [(np.bytes_(b"a\0"), np.str_("a")), (np.bytes_(b"b"), np.str_("longer"))])
    assert table_of(block).to_pylist() == [{"s": b"a", "u": "a"}, {"s": b"longer", "u": "longer"}]
    assert table_of(bundle).to_pylist() == [{"s": b"a\0", "u": "a"}, {"s": b"b", "u": "longer"}]


def test_numbers_of_either_byte_order(tmp_path):
    ds = Dataset.from_tensor_slices({"x": np.arange(3, dtype=">i4"), "t": np.arange(3).astype(">M8[ms]")})
    assert [(int(e["x"]), e["t"]) for e in read_parquet(ds.to_parquet(tmp_path))] == [
        (k, np.datetime64(k, "ms")) for k in range(3)
    ]


def test_a_spec_that_only_the_data_tells(tmp_path):
    ds = unknown(lambda x: {"n": np.frombuffer(b"abc"[: x - 49], np.uint8)}, 3)
    actual = list(read_parquet(ds.to_parquet(tmp_path)))
    assert [result["n"].tolist() for result in actual] == [[97], [97, 98], [97, 98, 99]]


def test_row_groups_are_of_the_size_of_splits(tmp_path):
    ds = Dataset.from_tensor_slices({"x": np.arange(100_000), "y": np.arange(100_000) / 2})
    with dask.config.set({"daskdist.split-bytes": "400 kB"}):
        (path,) = ds.to_parquet(tmp_path, rows_per_file=100_000)
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)] == [25_000] * 4
    assert len(read_parquet(path)) == 100_000


@pytest.mark.parametrize("compression", [None, "snappy", "zstd", "lz4", "gzip", "brotli"])
def test_compressed(tmp_path, compression):
    (path,) = samples(50).to_parquet(tmp_path, compression=compression)
    assert pq.read_metadata(path).row_group(0).column(0).compression == (compression or "uncompressed").upper()
    same_elements(list(read_parquet(path)), list(samples(50)), "compressed")


# --- refused arguments ---


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        (
            {"z": np.ones(3, np.complex64)},
            r"to_parquet: leaf \['z'\] is TensorSpec.*cannot hold complex numbers; .*x\.real",
        ),
        (np.ones(3, np.longdouble), r"the element is TensorSpec.*numbers of up to 64 bits"),
        (np.arange(3).astype("M8[h]"), r"count time in D, s, ms, us, ns; .* such as x.astype\('M8\[s\]"),
        (np.arange(3).astype("m8[D]"), r"count time in s, ms, us, ns; .*'m8\[s\]"),
        (np.arange(3).astype("M8[25s]"), "count time in"),
        (np.array(["a", None], np.dtypes.StringDType(na_object=None)), "cannot hold text with a missing value"),
        (np.zeros((3, 2, 0)), "empty arrays cannot become a column; leave it out"),
        ({"a": {}, "b": np.ones(3)}, "an empty dict cannot become a column"),
        ({1: np.ones(3), "1": np.ones(3)}, "two columns would be called '1'"),
    ],
)
def test_leaves_that_make_no_column(tmp_path, elements, message):
    with pytest.raises(errors.ArgumentError, match=message):
        Dataset.from_tensor_slices(elements).to_parquet(tmp_path / "new")
    assert names_in(tmp_path) == []


def test_pictures_of_differing_sizes_make_no_column(tmp_path):
    spec = TensorSpec((None, None, 3), "uint8")
    ds = Dataset.from_generator(lambda: [np.zeros((2, 3, 3), "uint8"), np.zeros((4, 1, 3), "uint8")], spec)
    with pytest.raises(errors.ArgumentError, match=r"only the length of its first axis may vary; .*x\.reshape\(-1\)"):
        ds.to_parquet(tmp_path)
    flat = ds.map(lambda x: {"x": x.reshape(-1), "shape": np.array(x.shape)})
    actual = [value["x"].reshape(value["shape"]) for value in read_parquet(flat.to_parquet(tmp_path))]
    same_elements(actual, list(ds), "put together again")


def test_windows_make_no_column(tmp_path):
    with pytest.raises(errors.ArgumentError, match=r"columns hold arrays; .*flat_map\(lambda window"):
        Dataset.range(6).window(2).to_parquet(tmp_path)


def test_objects_that_are_not_bytes(tmp_path):
    spec = TensorSpec((), object)
    ds = Dataset.from_generator(lambda: iter([np.array(b"a", object), np.array(None, object)]), spec)
    with pytest.raises(errors.ArgumentError, match="an array of objects holds NoneType, and only bytes are written"):
        ds.to_parquet(tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (np.float64(2), r"the element of .* is float64\[\], but TensorSpec\(shape=\(\), dtype=int64"),
        (np.array([1, 2]), r"is int64\[2\], but TensorSpec\(shape=\(\), .*convert all of them to one kind with map"),
    ],
)
def test_elements_that_differ_in_kind(tmp_path, second, message):
    ds = unknown(lambda x: second if x == 59 else x, 10)
    with pytest.raises(errors.ArgumentError, match=message):
        ds.to_parquet(tmp_path)
    assert names_in(tmp_path) == []


def test_rows_that_are_not_of_the_spec():
    spec = element_spec_of(Dataset.from_tensor_slices({"x": np.zeros((2, 3))}))
    other = Block(Structure.of({"y": 0})[1], [np.zeros((2, 3))])
    with pytest.raises(errors.ArgumentError, match=r"elements are \{'y': value\}, but \{'x': value\} is expected"):
        table_of(other, spec)
    for leaf in (np.zeros((2, 4)), np.zeros(2), Ragged(np.zeros(5), [0, 3, 5]), np.zeros((2, 3), np.int8)):
        with pytest.raises(errors.ArgumentError, match=r"leaf \['x'\] of .* is .*, but TensorSpec\(shape=\(3,\)"):
            table_of(Block(spec.structure, [leaf]), spec)
    whole = table_of(Block(spec.structure, [Ragged(np.zeros(6), [0, 3, 6])]), spec)
    assert whole.schema.field("x").type == pa.list_(pa.float64(), 3)


def test_options_are_checked(tmp_path):
    ds = samples(3)
    for call, message in [
        (lambda: ds.to_parquet(tmp_path, compression="rar"), "to_parquet: compression is 'rar'; give one of None"),
        (lambda: ds.to_parquet(tmp_path, rows_per_file=0), "to_parquet: rows_per_file is 0; give 1 or more"),
        (lambda: ds.to_npy(tmp_path, rows_per_file=1.5), "to_npy: rows_per_file is 1.5; give a whole number"),
        (lambda: ds.to_tfrecord(tmp_path, overwrite="yes"), "to_tfrecord: overwrite is 'yes'; give True or False"),
        (lambda: ds.to_tfrecord(tmp_path, compression="infer"), "to_tfrecord: compression is 'infer', but there is no"),
        (lambda: ds.to_tfrecord(tmp_path, compression="rar"), "to_tfrecord: compression is 'rar'"),
        (lambda: ds.to_zarr(tmp_path / "z", chunk_rows=0), "to_zarr: chunk_rows is 0; give 1 or more"),
        (lambda: ds.to_zarr(tmp_path / "z", overwrite=1), "to_zarr: overwrite is 1; give True or False"),
        (lambda: ds.batch(2).to_npy(tmp_path), "to_npy: "),
        (lambda: ds.batch(2).to_zarr(tmp_path / "z"), "to_zarr: "),
        (lambda: Dataset.range(3).to_webdataset(tmp_path), "to_webdataset: "),
        (lambda: Dataset.range(3).to_tfrecord(tmp_path), "to_tfrecord: "),
    ]:
        with pytest.raises(errors.ArgumentError, match=message):
            call()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("method", [*WRITERS, "to_zarr"])
def test_endless_datasets_are_refused(tmp_path, method):
    with pytest.raises(errors.UnknownLengthError, match=f"{method}: the dataset is endless; use take"):
        getattr(Dataset.counter().map(lambda x: {"cls": x}), method)(tmp_path / "new")


# --- which files ---


@pytest.mark.parametrize("method", WRITERS)
def test_a_file_for_so_many_rows(tmp_path, method):
    paths = getattr(samples(10), method)(tmp_path, rows_per_file=4)
    assert [Path(path).name.partition(".")[0] for path in paths] == ["part-00000", "part-00001", "part-00002"]
    assert names_in(tmp_path) == [Path(path).name for path in paths]
    read = {
        "to_parquet": read_parquet,
        "to_tfrecord": lambda paths: daskdist.read_tfrecord(paths, {"cls": daskdist.FixedLenFeature((), "int64")}),
        "to_npy": daskdist.read_npy,
        "to_webdataset": daskdist.read_webdataset,
    }[method]
    counts = [[int(value["cls"]) for value in read([path])] for path in paths]
    assert counts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("caller", [Synchronous, Threads])
def test_a_file_for_so_many_bytes(tmp_path, caller):
    ds = Dataset.range(200).map(lambda x: np.full(1000, x))
    with dask.config.set({"daskdist.bundle-bytes": "200 kB", "daskdist.split-bytes": "100 kB"}), using(caller):
        paths = ds.to_parquet(tmp_path)
    sizes = [pq.read_metadata(path).num_rows * 8000 for path in paths]
    assert all(100_000 <= size <= 400_000 for size in sizes[:-1]), sizes
    same_elements(list(read_parquet(paths, columns="value")), list(ds), "in order")


def test_a_small_dataset_is_one_file(tmp_path):
    ds = Dataset.range(20_000).map(lambda x: x * 2)
    assert len(ds.to_parquet(tmp_path / "whole")) == 1
    # The size of elements is unknown before they are computed.
    filtered = Dataset.range(20_000).filter(lambda x: x % 2 == 0).shuffle(100)
    assert len(filtered.to_parquet(tmp_path / "filtered")) == 1


def test_a_block_that_is_too_large_is_several_files(tmp_path):
    paths = Dataset.from_tensor_slices(np.arange(100_000)).to_parquet(tmp_path / "one", rows_per_file=100_000)
    with dask.config.set({"daskdist.bundle-bytes": "80 kB"}):
        several = read_parquet(paths, columns="value").to_parquet(tmp_path / "several")
    assert len(several) == 10
    assert numbers_in(several) == list(range(100_000))


@pytest.mark.parametrize("caller", [Synchronous, Threads])
def test_shuffled_elements_are_written_in_their_order(tmp_path, caller):
    ds = Dataset.range(500).shuffle(100, seed=3, reshuffle_each_iteration=False).map(lambda x: {"x": x})
    with using(caller):
        paths = ds.to_parquet(tmp_path, rows_per_file=37)
    same_elements(list(read_parquet(paths)), list(ds), "shuffled")


def test_more_than_a_hundred_thousand_rows_of_a_generator(tmp_path):
    ds = Dataset.from_generator(lambda: iter(range(3000)), TensorSpec((), "int64"))
    assert numbers_in(ds.to_parquet(tmp_path, rows_per_file=1000)) == list(range(3000))


def test_elements_left_out_are_left_out_of_files(tmp_path):
    ds = Dataset.range(10).map(fails_at(4), vectorized=False).with_options(Options(on_error="skip"))
    assert numbers_in(ds.to_parquet(tmp_path)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "elements",
    [
        {"x": TensorSpec((None, 2), "float32"), "y": TensorSpec((3,), "int8"), "s": TensorSpec((), TEXT)},
        RaggedTensorSpec((None, None, 2), "int64"),
        TensorSpec((), "M8[ms]"),
        (TensorSpec((), object), TensorSpec((2, 2), "bool")),
    ],
)
def test_without_elements_there_is_a_file_with_the_columns(tmp_path, elements):
    ds = Dataset.from_generator(lambda: iter(()), elements)
    (path,) = ds.to_parquet(tmp_path)
    columns = {Path(path).name: None}
    columns = "value" if isinstance(elements, TensorSpec) else ("0", "1") if isinstance(elements, tuple) else None
    again = read_parquet(path, columns=columns)
    assert len(again) == 0
    assert again.element_spec == ds.element_spec
    assert names_in(tmp_path) == ["part-00000.parquet"]


@pytest.mark.parametrize("method", ["to_tfrecord", "to_npy", "to_webdataset"])
def test_without_elements_there_is_a_file(tmp_path, method):
    (path,) = getattr(samples(0), method)(tmp_path)
    assert names_in(tmp_path) == [Path(path).name]


def test_paths_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert samples(2).to_parquet("relative") == [str(tmp_path / "relative" / "part-00000.parquet")]
    assert samples(2).to_parquet(f"file://{tmp_path}/url/") == [str(tmp_path / "url" / "part-00000.parquet")]
    odd = tmp_path / "a[1] b*" / "deep"
    (path,) = samples(2).to_parquet(odd)
    assert names_in(odd) == ["part-00000.parquet"]
    assert pq.read_metadata(path).num_rows == 2


@pytest.mark.parametrize("method", [*WRITERS, "to_zarr"])
def test_in_memory(method):
    directory = f"memory://written/{method}"
    options = {"chunk_rows": 2} if method == "to_zarr" else {"rows_per_file": 2}
    for _ in range(2):
        paths = getattr(samples(5), method)(directory, overwrite=True, **options)
    fs = fsspec.filesystem("memory")
    try:
        assert all(path.startswith("memory://") for path in paths)
        if method == "to_zarr":
            assert [int(entry["cls"]) for entry in daskdist.read_zarr(paths)] == [0, 1, 2, 3, 4]
            assert [Path(part).name for part in fs.ls("/written", detail=False)] == ["to_zarr"]
        else:
            assert [item.rpartition("/")[2] for item in fs.ls(f"/written/{method}", detail=False)] == [
                f"_daskdist_{method.removeprefix('to_')}.json",
                *(path.rpartition("/")[2] for path in paths),
            ]
            assert len(paths) == 3
        if method == "to_parquet":
            assert [int(value["cls"]) for value in read_parquet(directory)] == [0, 1, 2, 3, 4]
    finally:
        fs.rm("/written", recursive=True)


# --- existing files ---


@pytest.mark.parametrize("method", WRITERS)
def test_existing_files_stay_unless_overwritten(tmp_path, method):
    write = getattr(samples(10), method)
    old = write(tmp_path, rows_per_file=2)
    content = [Path(path).read_bytes() for path in old]
    (tmp_path / "notes.txt").write_text("not of any format")
    with pytest.raises(errors.ArgumentError, match=rf"{method}: .* has 'part-00000.*' already \(5 .*overwrite="):
        write(tmp_path)
    assert [Path(path).read_bytes() for path in old] == content
    new = write(tmp_path, rows_per_file=5, overwrite=True)
    assert names_in(tmp_path) == sorted(["notes.txt", *(Path(path).name for path in new)])
    assert len(new) == 2


def test_old_files_stay_where_the_new_ones_fail(tmp_path, split_small):
    old = Dataset.range(10).to_parquet(tmp_path, rows_per_file=2)
    with pytest.raises(errors.UserFunctionError, match="no such number"):
        Dataset.range(1000).map(fails_at(900), vectorized=False).to_parquet(tmp_path, rows_per_file=10, overwrite=True)
    assert names_in(tmp_path) == [Path(path).name for path in old]
    assert numbers_in(old) == list(range(10))


def test_a_dataset_can_replace_the_files_it_is_of(tmp_path):
    paths = Dataset.range(10).to_parquet(tmp_path, rows_per_file=2)
    doubled = read_parquet(paths, columns="value").map(lambda x: x * 2)
    assert numbers_in(doubled.to_parquet(tmp_path, overwrite=True)) == list(range(0, 20, 2))


def test_names_of_files_that_count_as_the_format(tmp_path):
    (tmp_path / "other.pq").write_bytes(b"")
    with pytest.raises(errors.ArgumentError, match=r"has 'other\.pq' already"):
        samples(3).to_parquet(tmp_path)
    samples(3).to_npy(tmp_path)
    samples(3).to_tfrecord(tmp_path, compression="gzip")
    with pytest.raises(errors.ArgumentError, match=r"has 'part-00000\.tfrecord\.gz' already"):
        samples(3).to_tfrecord(tmp_path)


def test_files_below_are_not_replaced(tmp_path):
    samples(3).to_parquet(tmp_path / "day=1")
    with pytest.raises(errors.ArgumentError, match=r"has 'day=1/part-00000.parquet' in a directory below it"):
        samples(3).to_parquet(tmp_path, overwrite=True)
    assert names_in(tmp_path) == ["day=1", "day=1/part-00000.parquet"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ArgumentError, match=r"to_parquet: .*file is a file; give a directory"):
        samples(3).to_parquet(tmp_path / "file")
    with pytest.raises(errors.FileError, match=r"file.*cannot be written"):
        samples(3).to_parquet(tmp_path / "file" / "below")


# --- what goes wrong ---


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("method", [*WRITERS, "to_zarr"])
def test_nothing_is_left_where_a_function_fails(tmp_path, method, caller, split_small):
    ds = Dataset.range(1000).map(fails_at(900), vectorized=False).map(lambda x: {"cls": x})
    options = {"chunk_rows": 10} if method == "to_zarr" else {"rows_per_file": 10}
    with using(caller), pytest.raises(errors.UserFunctionError, match="no such number"):
        getattr(ds, method)(tmp_path / "new", **options)
    assert names_in(tmp_path) == []


def run(program, *args, **options):
    return programs.Program(
        "-c", textwrap.dedent(program), *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("method", ["to_parquet", "to_zarr"])
def test_a_killed_write_leaves_no_visible_file(tmp_path, method):
    program = """
        import sys, time
        import dask
        from daskdist import Dataset
        dask.config.set({"daskdist.split-bytes": 80})
        def slow(x):
            if str(x) == "800":
                print("half way", flush=True)
                time.sleep(60)
            return x
        options = {"chunk_rows": 10} if sys.argv[2] == "to_zarr" else {"rows_per_file": 10}
        getattr(Dataset.range(1000).map(slow, vectorized=False), sys.argv[2])(sys.argv[1], **options)
    """
    target = tmp_path / "target"
    with run(program, target, method) as process:
        assert process.stdout.readline() == "half way\n", process.stderr.read()
        # Other calls are still writing.
        deadline = time.monotonic() + 10
        while len(names_in(tmp_path)) < 30 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    left = names_in(tmp_path)
    assert len(left) >= 30
    hidden = [name for name in left if any(part.startswith(".") for part in name.split("/"))]
    assert [name for name in left if name not in hidden] == (["target"] if method == "to_parquet" else [])
    if method == "to_parquet":
        with pytest.raises(errors.FileError, match="no file matches"):
            read_parquet(target)
        # The next write removes leftovers.
        paths = Dataset.range(10).to_parquet(target)
        assert names_in(target) == ["part-00000.parquet"]
        assert numbers_in(paths) == list(range(10))
    else:
        Dataset.range(10).to_zarr(target)
        assert [int(x) for x in daskdist.read_zarr(target)] == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize(
    "writer",
    ["to_npy:", "to_npy:objects", "to_zarr:", "to_zarr:objects", "save:", "convert:", "convert:objects"],
)
def test_a_write_is_complete_or_absent_whenever_it_is_killed(writer, tmp_path):
    # A single program forks and kills all processes, so that imports are done once.
    done = programs.run(TESTS / "kill_writes.py", tmp_path, writer, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    # Each line says how many changes to the file system a write makes; it was killed before each of them.
    counts = [int(line.split()[-2]) for line in done.stdout.splitlines()]
    assert len(counts) == 2
    assert all(count > 5 for count in counts)


def read_by_others(directory):
    return pyarrow.dataset.dataset(directory).to_table()["value"].to_pylist()


def test_a_manifest_says_which_files_are_the_dataset(tmp_path):
    place, manifest = tmp_path / "data", tmp_path / "data" / "_daskdist_parquet.json"
    paths = Dataset.range(6).to_parquet(place, rows_per_file=2)
    content = json.loads(manifest.read_text())
    assert content["files"] == {Path(path).name: os.path.getsize(path) for path in paths}
    assert read_by_others(place) == [0, 1, 2, 3, 4, 5]
    # Files beside them that the manifest does not list are read as usual.
    pq.write_table(pa.table({"value": [6]}), place / "z.parquet")
    for path in (place, f"{place}/*.parquet", f"{tmp_path}/**/*.parquet", tmp_path):
        assert numbers_in(path) == [0, 1, 2, 3, 4, 5, 6]
    os.remove(paths[1])
    for path in (place, f"{place}/*.parquet", f"{tmp_path}/**", tmp_path):
        with pytest.raises(errors.FileError, match=r"part-00001.parquet: missing, .* restore it, or, .*delete"):
            read_parquet(path)
    assert numbers_in([paths[0], f"{place}/*2.parquet"]) == [0, 1, 4, 5]
    Path(paths[1]).write_bytes(b"PAR1")
    with pytest.raises(errors.FileError, match=r"part-00001.parquet: has 4 bytes, but"):
        read_parquet(place)
    manifest.write_text(json.dumps(content | {"files": {}, "ignored": ["part-00002.parquet"]}))
    for path in (place, f"{place}/*.parquet"):
        with pytest.raises(errors.FileError, match="data: the write to this directory has not finished"):
            read_parquet(path)
    manifest.write_text(json.dumps(content | {"files": {}, "ignored": ["../x"]}))
    with pytest.raises(errors.FileError, match=r"parquet.json: the manifest is damaged: '../x' is not a file name"):
        read_parquet(place)
    manifest.write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(errors.FileError, match=r"_daskdist_parquet.json: version 2 is unknown, only version 1"):
        read_parquet(place)
    manifest.unlink()
    os.remove(paths[1])
    assert numbers_in(place) == [0, 1, 4, 5, 6]


def test_each_format_of_a_directory_has_a_manifest(tmp_path):
    samples(2).to_parquet(tmp_path)
    samples(3).to_npy(tmp_path)
    os.remove(tmp_path / "part-00000.npz")
    assert len(read_parquet(tmp_path)) == 2
    with pytest.raises(errors.FileError, match=r"part-00000.npz: missing"):
        daskdist.read_npy(tmp_path)


def test_an_overwritten_dataset_has_other_names_until_the_next_time(tmp_path):
    for number, more in enumerate(["", "-1", "", "-1"]):
        paths = Dataset.range(number, number + 4).to_parquet(tmp_path, rows_per_file=2, overwrite=True)
        assert [Path(path).name for path in paths] == [f"part-0000{place}{more}.parquet" for place in range(2)]
        assert names_in(tmp_path) == [Path(path).name for path in paths]
        assert read_by_others(tmp_path) == numbers_in(tmp_path) == list(range(number, number + 4))


def test_a_disk_that_is_full(tmp_path):
    # A limit on the size of files fails in a write as a full disk does.
    program = """
        import resource, sys
        import numpy as np
        from daskdist import Dataset, errors
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        ds = Dataset.range(100).map(lambda x: {"npy": np.random.default_rng(int(x)).random(1000)}, vectorized=False)
        for method in sys.argv[2:]:
            try:
                getattr(ds, method)(f"{sys.argv[1]}/{method}")
            except errors.FileError as error:
                print(error)
    """
    with run(program, tmp_path, *WRITERS, "to_zarr") as process:
        report, trouble = process.communicate(timeout=60)
    report = report.splitlines()
    assert len(report) == 5, trouble
    for line in report:
        assert str(tmp_path) in line
        assert "cannot be written" in line
        assert "File too large" in line
    assert names_in(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(errors.FileError, match="cannot be written"):
        samples(3).to_parquet(tmp_path)


def test_an_unknown_file_system():
    with pytest.raises(errors.FileError, match=r"nothing://.* cannot be opened"):
        samples(3).to_parquet("nothing://x")


def test_a_name_that_is_taken_meanwhile(tmp_path, split_small):
    def takes(x):
        if x == 15:
            (tmp_path / "part-00002-1.parquet").mkdir(exist_ok=True)
        return x

    old = Dataset.range(5).to_parquet(tmp_path)
    ds = Dataset.range(30).map(takes, vectorized=False)
    with pytest.raises(errors.FileError, match=r"part-00002-1\.parquet: another program created it during this write"):
        ds.to_parquet(tmp_path, rows_per_file=10, overwrite=True)
    # The old files are restored.
    assert names_in(tmp_path) == ["part-00000.parquet", "part-00002-1.parquet"]
    assert numbers_in(old) == [0, 1, 2, 3, 4]


# --- Zarr ---


def test_a_store_of_chunks(tmp_path):
    ds = Dataset.from_tensor_slices({"x": np.arange(30).reshape(10, 3), "y": np.arange(10) / 2})
    assert ds.to_zarr(tmp_path / "a.zarr", chunk_rows=4) == [str(tmp_path / "a.zarr")]
    assert os.listdir(tmp_path) == ["a.zarr"]
    same_elements(list(daskdist.read_zarr(tmp_path / "a.zarr")), list(ds), "read again")
    assert names_in(tmp_path / "a.zarr" / "x" / "c")[:2] == ["0", "0/0"]
    assert len(os.listdir(tmp_path / "a.zarr" / "x" / "c")) == 3


def test_two_conversions_to_a_store_at_once_lose_no_rows(tmp_path):
    leaves, structure = Structure.of(np.arange(1, 5))
    rows, spec = Block(structure, leaves), element_spec_of(Dataset.range(8))
    writer = ZarrWriter("convert", str(tmp_path / "a.zarr"), 4, Storage(), overwrite=False, key="0" * 32)

    def killed(write):
        raise KeyboardInterrupt

    def calls(write):
        second = write(1, rows)
        # Another process finds no first chunk, and begins again.
        with pytest.raises(KeyboardInterrupt):
            writer.write(spec, killed)
        return [write(0, rows), second]

    with pytest.raises(errors.FileError, match="another process writes the same rows"):
        writer.write(spec, calls)
    assert writer.write(spec, lambda write: [*write.finished, write(0, rows)]) == [str(tmp_path / "a.zarr")]
    assert [int(x) for x in daskdist.read_zarr(tmp_path / "a.zarr")] == [1, 2, 3, 4] * 2


def test_a_store_is_replaced_only_if_it_is_one(tmp_path):
    Dataset.range(10).to_zarr(tmp_path / "a.zarr", chunk_rows=4)
    with pytest.raises(errors.ArgumentError, match=r"to_zarr: .*a\.zarr exists already; .*overwrite=True"):
        Dataset.range(3).to_zarr(tmp_path / "a.zarr")
    with pytest.raises(errors.UserFunctionError):
        Dataset.range(10).map(fails_at(9), vectorized=False).to_zarr(tmp_path / "a.zarr", overwrite=True)
    assert len(daskdist.read_zarr(tmp_path / "a.zarr")) == 10
    Dataset.range(3).to_zarr(tmp_path / "a.zarr", overwrite=True)
    assert [int(x) for x in daskdist.read_zarr(tmp_path / "a.zarr")] == [0, 1, 2]
    (tmp_path / "precious").mkdir()
    with pytest.raises(errors.ArgumentError, match="is not a Zarr store, and overwrite=True replaces only those"):
        Dataset.range(3).to_zarr(tmp_path / "precious", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.zarr", "precious"]


def test_default_chunk_sizes(tmp_path):
    with dask.config.set({"daskdist.bundle-bytes": 80}):
        Dataset.range(30).to_zarr(tmp_path / "a.zarr")
    assert len(os.listdir(tmp_path / "a.zarr" / "c")) == 3
    Dataset.range(30).to_zarr(tmp_path / "b.zarr")
    assert len(os.listdir(tmp_path / "b.zarr" / "c")) == 1
    Dataset.range(0).to_zarr(tmp_path / "c.zarr")
    assert len(daskdist.read_zarr(tmp_path / "c.zarr")) == 0


# --- on a cluster ---


class Watched(Submit):
    """Calls on a cluster that count how many bytes of results they return to the program."""

    def __init__(self, client, workers):
        super().__init__(client, workers)
        self.num_bytes = []

    def results(self, handles):
        from distributed.protocol import serialize_bytes

        actual = super().results(handles)
        self.num_bytes.append(len(serialize_bytes(actual)))
        return actual


@pytest.mark.cluster
@pytest.mark.parametrize("method", [*WRITERS, "to_zarr"])
def test_the_workers_write(tmp_path, on_cluster, method, split_small):
    ds = Dataset.range(40).map(lambda x: {"cls": x + 1_000_000 * np.int64(os.getpid())}, vectorized=False)
    options = {"chunk_rows": 10} if method == "to_zarr" else {"rows_per_file": 10}
    paths = getattr(ds, method)(tmp_path / "new", strategy=on_cluster, **options)
    read = {
        "to_parquet": read_parquet,
        "to_tfrecord": lambda paths: daskdist.read_tfrecord(paths, {"cls": daskdist.FixedLenFeature((), "int64")}),
        "to_npy": daskdist.read_npy,
        "to_webdataset": daskdist.read_webdataset,
        "to_zarr": daskdist.read_zarr,
    }[method]
    actual = [divmod(int(value["cls"]), 1_000_000) for value in read(paths)]
    assert [x for _, x in actual] == list(range(40))
    assert os.getpid() not in {pid for pid, _ in actual}
    assert names_in(tmp_path / "new")[0] == ("cls" if method == "to_zarr" else Path(paths[0]).name)


@pytest.mark.cluster
def test_elements_are_not_sent_to_the_program(tmp_path, on_cluster):
    mapped = Dataset.range(64).map(lambda x: np.random.default_rng(int(x)).random(20_000), vectorized=False)
    ds = mapped.shuffle(16, seed=1, reshuffle_each_iteration=False)
    caller = Watched(on_cluster.client, on_cluster.workers)
    with dask.config.set({"daskdist.bundle-bytes": "2 MB"}), using(lambda: caller):
        paths = ds.to_parquet(tmp_path, compression=None)
    assert sum(os.path.getsize(path) for path in paths) > parse_bytes("10 MB")
    assert len(caller.num_bytes) == len(paths) > 3
    assert sum(caller.num_bytes) < 100_000
    same_elements(list(read_parquet(paths, columns="value")), list(ds), "on a cluster")


@pytest.mark.cluster
def test_saved_by_the_workers(tmp_path, on_cluster, split_small):
    ds = Dataset.range(40).map(lambda x: (x, os.getpid()), vectorized=False)
    ds.save(tmp_path, strategy=on_cluster)
    actual = [(int(x), int(pid)) for x, pid in Dataset.load(tmp_path)]
    assert [x for x, _ in actual] == list(range(40))
    assert os.getpid() not in {pid for _, pid in actual}


@pytest.mark.cluster
def test_nothing_is_left_where_a_worker_fails(tmp_path, on_cluster, split_small):
    ds = Dataset.range(1000).map(fails_at(900), vectorized=False)
    with pytest.raises(errors.UserFunctionError, match="no such number"):
        ds.to_parquet(tmp_path / "new", rows_per_file=10, strategy=on_cluster)
    assert names_in(tmp_path) == []


@pytest.mark.cluster
def test_a_directory_that_is_not_shared(on_cluster):
    # This process does not see files in the memory of a worker.
    with pytest.raises(errors.FileError, match="this process does not see the files that the workers wrote; give a d"):
        samples(10).to_parquet("memory://not-shared", strategy=on_cluster)


def test_a_strategy_in_this_process(tmp_path):
    paths = samples(10).to_parquet(tmp_path, strategy=daskdist.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert [int(value["cls"]) for value in read_parquet(paths)] == list(range(10))


def test_written_files_do_not_name_this_project(tmp_path):
    (path,) = samples(3).to_parquet(tmp_path)
    assert set(pq.read_metadata(path).metadata) == {b"ARROW:schema"}
    assert Parquet().element_spec is None
