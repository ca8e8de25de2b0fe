"""Dask collections and xarray objects: their rows, and that each partition is computed once, when it is read."""

from __future__ import annotations

import datetime
from decimal import Decimal

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from daskdist import Dataset, TensorSpec
from daskdist.core.dataset_base import node_of
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.tables import object_columns
from daskdist.testing.equality import same_elements

xr = pytest.importorskip("xarray")

TEXT = np.dtypes.StringDType()


def counted(array, seen):
    """Return the array, with a record of each chunk that is computed."""

    def note(block, block_info=None):
        seen.append(block_info[0]["chunk-location"])
        return block

    return array.map_blocks(note, dtype=array.dtype, meta=array._meta)


def frame(npartitions=2, **columns):
    return dd.from_pandas(pd.DataFrame(columns), npartitions=npartitions, sort=False)


@pytest.fixture(autouse=True)
def objects_stay():
    with dask.config.set({"dataframe.convert-string": False}):
        yield


# --- xarray ---


def weather(seen=None):
    """Return two variables of one dimension with different chunks, and a coordinate of that dimension."""
    values = da.arange(24, chunks=24).reshape(6, 2, 2).rechunk((4, 1, 2))
    values = values if seen is None else counted(values, seen)
    labels = da.arange(6, chunks=3) % 2
    return xr.Dataset(
        {"image": (("time", "y", "x"), values), "label": ("time", labels)},
        coords={"time": pd.date_range("2024-01-01", periods=6), "y": [0.5, 1.5]},
    )


def test_a_data_array_along_its_first_dimension():
    array = weather().image
    ds = Dataset.from_dask(array)
    assert ds.element_spec == TensorSpec((2, 2), "int64")
    assert ds.cardinality() == 6
    assert [split.num_rows for split in node_of(ds).splits()] == [4, 2]
    same_elements(list(ds), list(np.arange(24).reshape(6, 2, 2)))


def test_a_data_array_along_another_dimension():
    array = weather().image.rename("image")
    ds = Dataset.from_dask(array, dim="y")
    same_elements(list(ds), list(np.moveaxis(np.arange(24).reshape(6, 2, 2), 1, 0)))
    with pytest.raises(ArgumentError, match=r"the array 'image' has no dimension 'z', only 'time', 'y', 'x'"):
        Dataset.from_dask(array, dim="z")
    with pytest.raises(ArgumentError, match="has no dimension to take elements from"):
        Dataset.from_dask(array.sum())


def test_a_dataset_gives_dicts_of_its_variables():
    ds = Dataset.from_dask(weather())
    assert ds.element_spec == {"image": TensorSpec((2, 2), "int64"), "label": TensorSpec((), "int64")}
    expected = np.arange(24).reshape(6, 2, 2)
    same_elements(list(ds), [{"image": expected[k], "label": np.int64(k % 2)} for k in range(6)])
    # Chunks end where chunks of either variable end.
    assert [split.num_rows for split in node_of(ds).splits()] == [3, 1, 2]
    same_elements(dask.compute(ds)[0], list(ds))
    (batch,) = ds.batch(6)
    assert batch["image"].shape == (6, 2, 2)


def test_variables_and_coordinates_in_a_structure():
    ds = Dataset.from_dask(weather(), columns=("image", {"when": "time", "y": "label"}))
    assert ds.element_spec[1]["when"].dtype.kind == "M"
    elements = list(ds)
    assert [row[1]["when"].astype("datetime64[D]").item().day for row in elements] == [1, 2, 3, 4, 5, 6]
    pair = Dataset.from_dask(weather(), columns=["label"])
    assert [int(row["label"]) for row in pair] == [0, 1] * 3
    side = Dataset.from_dask(weather(), columns={"x": ["label", "label"]})
    assert next(iter(side))["x"].shape == (2,)
    with pytest.raises(ArgumentError, match="no column 'rain'; there are 'image', 'label', 'time', 'y'"):
        Dataset.from_dask(weather(), columns=["rain"])


def test_a_variable_without_the_dimension():
    with pytest.raises(ArgumentError, match=r"'y' has no dimension 'time', only 'y'; leave it out.*expand_dims"):
        Dataset.from_dask(weather(), columns=["image", "y"])
    mixed = weather().assign(scale=((), da.ones(())))
    with pytest.raises(ArgumentError, match="the variable 'scale' has no dimension to take elements from"):
        Dataset.from_dask(mixed)
    assert len(list(Dataset.from_dask(mixed, columns=["image"]))) == 6
    assert len(list(Dataset.from_dask(mixed, columns=["image"], dim="x"))) == 2


def test_nothing_of_xarray_runs_before_it_is_read_and_each_chunk_once():
    seen = []
    ds = Dataset.from_dask(weather(seen)).batch(2)
    ds.element_spec, ds.cardinality(), ds.explain(), repr(ds)
    assert seen == []
    assert len(dask.compute(ds)[0]) == 3
    assert sorted(seen) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_xarray_of_unknown_lengths():
    rows = da.arange(10, chunks=4)
    some = rows[rows % 3 == 0]
    ds = Dataset.from_dask(xr.Dataset({"a": (("t", "x"), some[:, None] * np.arange(2))}))
    assert ds.cardinality() == -2
    assert [row["a"].tolist() for row in ds] == [[0, 0], [0, 3], [0, 6], [0, 9]]
    assert [int(x) for x in Dataset.from_dask(xr.DataArray(some, dims="t"))] == [0, 3, 6, 9]


def test_chunks_of_other_lengths_than_stated_are_an_error():
    wrong = da.arange(4, chunks=2).map_blocks(lambda block: block[:1], dtype=int)
    with pytest.raises(ArgumentError, match=r"partition 0 of the Dask collection .*they need equal lengths"):
        list(Dataset.from_dask(xr.Dataset({"a": ("t", wrong), "b": ("t", da.arange(4))})))
    both = {"a": ("t", wrong), "b": ("t", wrong)}
    for collection in (wrong, xr.Dataset(both), da.arange(4, chunks=2).map_blocks(np.repeat, 2, dtype=int)):
        with pytest.raises(ArgumentError, match=r"partition 0 of .* has . rows?, but the array says 2"):
            list(Dataset.from_dask(collection).repeat(2))
    unknown = da.arange(4, chunks=2).map_blocks(np.repeat, 2, dtype=int, chunks=((np.nan, np.nan),))
    assert list(Dataset.from_dask(unknown)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_unsupported_xarray_objects():
    in_memory = xr.DataArray(np.arange(4), dims="t")
    with pytest.raises(
        ArgumentError, match=r"the DataArray has no Dask array; cut it into chunks.*chunk\(\{dim: n\}\)"
    ):
        Dataset.from_dask(in_memory)
    assert [int(x) for x in Dataset.from_dask(in_memory.chunk(t=3))] == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match="the Dataset has no Dask array"):
        Dataset.from_dask(xr.Dataset({"a": in_memory}))
    with pytest.raises(ArgumentError, match="columns= is for dataframes and xarray's Datasets"):
        Dataset.from_dask(in_memory.chunk(), columns=["a"])
    with pytest.raises(ArgumentError, match=r"missing= is for dataframes; use fillna\(\)"):
        Dataset.from_dask(in_memory.chunk(), missing={"a": 0})
    with pytest.raises(ArgumentError, match="can be DataArrays and Datasets, not Variable"):
        Dataset.from_dask(in_memory.chunk().variable)
    with pytest.raises(ArgumentError, match="dim= is for xarray"):
        Dataset.from_dask(da.arange(3), dim="t")


def test_an_xarray_of_no_rows():
    empty = xr.Dataset({"a": (("t", "x"), da.zeros((0, 3), chunks=2))})
    assert list(Dataset.from_dask(empty)) == []
    assert Dataset.from_dask(empty).element_spec == {"a": TensorSpec((3,), "float64")}


# --- dataframes ---


COLUMNS = {
    "Int64": (pd.array([1, 2], "Int64"), np.array([1, 2])),
    "Int8": (pd.array([1, 2], "Int8"), np.int8([1, 2])),
    "Float32": (pd.array([1.5, None], "Float32"), np.float32([1.5, np.nan])),
    "boolean": (pd.array([True, False], "boolean"), np.array([True, False])),
    "str": (pd.array(["a", "ü"], "str"), np.array(["a", "ü"], TEXT)),
    "string[pyarrow]": (pd.array(["a", "ü"], "string[pyarrow]"), np.array(["a", "ü"], TEXT)),
    "string[python]": (pd.array(["a", "ü"], "string[python]"), np.array(["a", "ü"], TEXT)),
    "int64[pyarrow]": (pd.array([1, 2], "int64[pyarrow]"), np.array([1, 2])),
    "decimal": (
        pd.array([Decimal("0.1"), None], pd.ArrowDtype(pa.decimal128(9, 2))),
        np.array([0.1, np.nan]),
    ),
    "date32": (
        pd.array([datetime.date(2024, 2, 29), None], pd.ArrowDtype(pa.date32())),
        np.array(["2024-02-29", "NaT"], "datetime64[D]"),
    ),
    "binary": (pd.array([b"a", b""], pd.ArrowDtype(pa.binary())), np.array([b"a", b""], object)),
    "list of two": (pd.array([[1, 2], [3, 4]], pd.ArrowDtype(pa.list_(pa.int32(), 2))), np.int32([[1, 2], [3, 4]])),
    "category": (pd.Categorical(["b", "a"]), np.array(["b", "a"], TEXT)),
    "category of numbers": (pd.Categorical([1.5, None]), np.array([1.5, np.nan])),
    "datetime64[ns]": (
        np.array(["2024-01-01", "NaT"], "datetime64[ns]"),
        np.array(["2024-01-01", "NaT"], "datetime64[ns]"),
    ),
    "datetime64[s], zone": (
        pd.DatetimeIndex(["2024-01-01 05:00"] * 2, tz="Asia/Karachi").as_unit("s"),
        np.array(["2024-01-01", "2024-01-01"], "datetime64[s]"),
    ),
    "timedelta64[ms]": (np.array([1, "NaT"], "timedelta64[ms]"), np.array([1, "NaT"], "timedelta64[ms]")),
    "float16": (np.float16([1, np.nan]), np.float16([1, np.nan])),
    "bool": (np.array([True, False]), np.array([True, False])),
}


@pytest.mark.parametrize("what", COLUMNS)
@pytest.mark.parametrize("npartitions", [1, 2])
def test_columns(what, npartitions):
    values, expected = COLUMNS[what]
    ds = Dataset.from_dask(frame(npartitions, c=values), columns="c")
    assert ds.element_spec == TensorSpec(expected.shape[1:], expected.dtype)
    (actual,) = ds.batch(9)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("values", "missing", "filled"),
    [
        (pd.array([1, None], "Int64"), -1, [1, -1]),
        (pd.array([True, None], "boolean"), False, [True, False]),
        (pd.array(["a", None], "str"), "none", ["a", "none"]),
        (pd.Categorical(["a", None]), "none", ["a", "none"]),
        (pd.array([b"a", None], pd.ArrowDtype(pa.binary())), b"", [b"a", b""]),
    ],
    ids=["Int64", "boolean", "str", "category", "binary"],
)
def test_nulls_need_a_replacement(values, missing, filled):
    collection = frame(2, a=[1, 2], c=values)
    with pytest.raises(ArgumentError, match=r"from_dask: partition 1 of .*column 'c'.* null.*missing=\{'c': "):
        list(Dataset.from_dask(collection))
    ds = Dataset.from_dask(collection, columns="c", missing={"c": missing})
    actual = [x.item() if hasattr(x, "item") else x for x in ds]
    assert actual == filled
    assert [ds.element_spec.is_compatible_with(x) for x in ds] == [True, True]


def test_nan_is_replaced_like_a_null():
    collection = frame(1, x=[1.5, np.nan], n=pd.array([1, None], "Int64"))
    ds = Dataset.from_dask(collection, missing={"x": -1.0, "n": np.nan})
    first, second = ds
    assert (float(first["x"]), float(first["n"]), float(second["x"])) == (1.5, 1.0, -1.0)
    assert np.isnan(second["n"])
    assert ds.element_spec["n"].dtype == np.float64
    with pytest.raises(ArgumentError, match="missing: no column 'y'; there are 'x', 'n'"):
        Dataset.from_dask(collection, missing={"y": 0})
    with pytest.raises(ArgumentError, match="missing= is for dataframes; this has no columns"):
        Dataset.from_dask(da.arange(3), missing={"y": 0})


def test_types_of_object_columns_are_known_after_reading():
    collection = frame(
        2, t=["a", "b"], li=[[1], [2, 3]], by=[b"x", b""], de=[Decimal("0.5"), None], st=[{"p": 1}, {"p": 2}]
    )
    ds = Dataset.from_dask(collection.astype(dict.fromkeys(collection.columns, object)))
    rows = list(ds)
    assert [str(row["t"]) for row in rows] == ["a", "b"]
    assert [row["li"].tolist() for row in rows] == [[1], [2, 3]]
    assert [bytes(row["by"]) for row in rows] == [b"x", b""]
    assert rows[0]["de"] == 0.5
    assert [int(row["st"]["p"]) for row in rows] == [1, 2]
    (batch,) = Dataset.from_dask(collection, columns=["li"]).ragged_batch(2)
    assert [value.tolist() for value in batch["li"]] == [[1], [2, 3]]


def test_objects_that_make_no_array():
    collection = frame(1, c=pd.Series([1, "a"], dtype=object))
    with pytest.raises(
        ArgumentError, match=r"partition 0 of .*: column 'c' of object cannot become an array.*leave it out"
    ):
        list(Dataset.from_dask(collection))
    spans = frame(1, a=[1.0, 2.0], c=pd.arrays.SparseArray([0, 1]))
    with pytest.raises(ArgumentError, match=r"column 'c'"):
        list(Dataset.from_dask(spans.assign(c=pd.Series([1j, "x"], dtype=object)), columns=["c"]))


def test_categories_that_are_not_known_yet():
    collection = frame(2, c=["a", "b"]).astype({"c": "category"})
    assert not collection.c.cat.known
    assert [str(row["c"]) for row in Dataset.from_dask(collection)] == ["a", "b"]


def test_columns_with_names_that_are_not_text():
    collection = dd.from_pandas(pd.DataFrame({0: [1, 2], ("a", 1): [3.0, 4.0]}), npartitions=1)
    ds = Dataset.from_dask(collection, columns=(["0", "('a', 1)"], "0"))
    assert [row[0].tolist() for row in ds] == [[1.0, 3.0], [2.0, 4.0]]
    twice = dd.from_pandas(pd.DataFrame({1: [1], "1": [2]}), npartitions=1)
    with pytest.raises(ArgumentError, match="two columns are called '1'; rename one"):
        Dataset.from_dask(twice)


def test_a_series_gives_its_values():
    ds = Dataset.from_dask(frame(2, x=pd.array([1, None, 3], "Int64")).x, missing={"x": 0})
    assert ds.element_spec == TensorSpec((), "int64")
    assert [int(x) for x in ds] == [1, 0, 3]
    assert [x.dtype for x in Dataset.from_dask(frame(1, x=np.float32([1, 2])).x)] == [np.float32] * 2


def test_a_scalar_is_no_collection_of_elements():
    with pytest.raises(ArgumentError, match=r"int64, which has no items; give a collection of elements|not Scalar"):
        list(Dataset.from_dask(frame(1, x=[1, 2]).x.sum()))


def test_partitions_without_rows():
    collection = frame(4, x=range(8), s=list("abcdefgh"), o=pd.Series([[k] for k in range(8)], dtype=object))
    some = collection[collection.x > 5]
    assert [(int(row["x"]), str(row["s"]), row["o"].tolist()) for row in Dataset.from_dask(some)] == [
        (6, "g", [6]),
        (7, "h", [7]),
    ]
    assert [batch["x"].tolist() for batch in Dataset.from_dask(some[["x", "s"]]).batch(9)] == [[6, 7]]
    assert list(Dataset.from_dask(collection[collection.x > 50])) == []
    assert list(Dataset.from_dask(dask.bag.from_sequence([]))) == []
    assert list(Dataset.from_dask(da.zeros((0, 2)))) == []


# --- when, where, and how often ---


def test_delayed_values_with_a_common_input_compute_it_once():
    made = []

    def make(k):
        made.append(k)
        return np.arange(k, k + 2)

    whole = dask.delayed(lambda: made.append("all"))()
    parts = [dask.delayed(lambda _, k=k: make(k))(whole) for k in range(50)]
    ds = Dataset.from_dask(parts).batch(10)
    assert made == []
    (actual,) = dask.compute(ds, scheduler="sync")
    assert len(actual) == 10
    assert made.count("all") == 1
    assert len(made) == 51


def rows_of(kind, path):
    def note(part):
        with open(path, "a") as file:
            file.write("x")
        return part

    if kind == "array":
        return da.arange(8, chunks=2).map_blocks(note, dtype=int, meta=np.empty(0, int))
    if kind == "xarray":
        return xr.DataArray(rows_of("array", path), dims="t")
    if kind == "bag":
        return dask.bag.from_sequence(range(8), npartitions=4).map_partitions(note)
    return frame(4, a=range(8)).map_partitions(note, meta=pd.DataFrame({"a": [1]}))["a"]


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["array", "xarray", "bag", "series"])
def test_persisted_data_is_used_where_it_is(client, on_cluster, tmp_path, kind):
    path = tmp_path / "computed"
    collection = rows_of(kind, path)
    ds = Dataset.from_dask(collection)
    assert ds.batch(3).explain()
    assert not path.exists()
    persisted = client.persist(collection)
    for future in client.futures_of(persisted):
        future.result()
    number = len(path.read_text())
    ds = Dataset.from_dask(persisted)
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds.batch(4))]
    assert sorted(int(x) for step in steps for part in step for x in part) == list(range(8))
    assert [int(x) for x in ds] == list(range(8))
    assert [value.tolist() for value in client.compute(ds.batch(4), sync=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(path.read_text()) == number


@pytest.mark.cluster
def test_variables_on_a_cluster(on_cluster):
    ds = Dataset.from_dask(weather()).batch(4)
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds)]
    actual = np.concatenate([part["image"] for step in steps for part in step])
    assert sorted(actual[:, 0, 0].tolist()) == [0, 4, 8, 12, 16, 20]


# --- masked arrays, for elements have no mask ---

MASKED = np.ma.masked_array(np.arange(6), mask=[False, True, False, False, True, False])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.from_tensor_slices({"x": MASKED}),
        lambda: Dataset.from_tensors(MASKED),
        lambda: Dataset.from_list([{"x": [MASKED[:3], MASKED[3:]]}]),
        lambda: Dataset.from_list([np.ma.masked, 1.0]),
        lambda: Dataset.range(1).map(lambda x: MASKED),
        lambda: Dataset.range(6).map(lambda x: np.ma.masked_equal(x, 1)),
        lambda: Dataset.from_dask(dask.bag.from_sequence([MASKED[:1], MASKED[1:2]], npartitions=1)),
        lambda: Dataset.from_dask([dask.delayed(lambda: MASKED)()]),
        # Dask does not know that these are masked.
        lambda: Dataset.from_dask(
            da.arange(6, chunks=3).map_blocks(np.ma.masked_equal, 4, dtype=int, meta=np.empty(0))
        ),
    ],
)
def test_masked_values_are_no_elements(make):
    with pytest.raises((ArgumentError, UserFunctionError), match=r"masked values.*fill_value="):
        list(make())


def test_a_masked_dask_array_is_refused_before_anything_runs():
    ran = []
    x = da.ma.masked_where(da.arange(6, chunks=3) == 1, da.arange(6, chunks=3)).map_blocks(lambda b: ran.append(1) or b)
    ran.clear()
    with pytest.raises(ArgumentError, match=r"dask\.array\.ma\.filled\(array, fill_value=\.\.\.\)"):
        Dataset.from_dask(x)
    assert not ran
    assert [int(v) for v in Dataset.from_dask(da.ma.filled(x, fill_value=-1))] == [0, -1, 2, 3, 4, 5]


def test_masked_arrays_of_which_nothing_is_masked_are_their_data():
    whole = np.ma.masked_array(np.arange(3))
    for ds in (
        Dataset.from_tensor_slices(whole),
        Dataset.from_tensor_slices(np.ma.masked_array(np.arange(3), mask=[False] * 3)),
        Dataset.from_tensor_slices(MASKED.filled(fill_value=7)[[0, 2, 3]]).map(lambda x: x - (x > 0)),
        Dataset.from_list([[whole]]).unbatch().unbatch(),
    ):
        actual = list(ds)
        assert [int(x) for x in actual] == [0, 1, 2]
        assert not any(isinstance(x, np.ma.MaskedArray) for x in actual)


@pytest.mark.parametrize("dtype", ["Int64", "UInt8", "int64[pyarrow]"])
def test_whole_numbers_that_are_missing_are_not_made_floats(dtype):
    with pytest.raises(ArgumentError, match=r"with 1 missing values.*fillna\(\.\.\.\)"):
        Dataset.from_tensor_slices({"x": pd.Series([1, None], dtype=dtype)})
    actual = Dataset.from_tensor_slices(pd.Series([1, 2], dtype=dtype))
    assert actual.element_spec.dtype.kind in "iu"
    assert [int(x) for x in actual] == [1, 2]


@pytest.mark.parametrize("values", [["a", "b", ""], [b"a", b"b", b""]])
def test_texts_of_object_columns_are_batched(values):
    with dask.config.set({"dataframe.convert-string": False}):
        frame = dd.from_pandas(pd.DataFrame({"a": pd.Series(values, dtype=object)}), npartitions=1)
    # The dtype is known only when the column is computed.
    for batch in ("batch", "ragged_batch", "padded_batch"):
        batches = getattr(Dataset.from_dask(frame), batch)(2)
        assert [rows["a"].tolist() for rows in batches] == [values[:2], values[2:]], batch


NOON = datetime.datetime(2024, 2, 29, 12)
CHANGED = {
    "dates and times": [datetime.date(2024, 2, 29), NOON],
    "nanoseconds": [pd.Timestamp("2024-02-29"), pd.Timestamp("2024-02-29 00:00:00.000000001")],
    "spans of nanoseconds": [datetime.timedelta(1), pd.Timedelta(1, "ns")],
    "zones and none": [NOON, NOON.replace(tzinfo=datetime.UTC)],
    "a zone of a time of day": [datetime.time(12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))],
    "bytes and text": [b"a", "b"],
    "float16 and integers": [2049, np.float16(1.5)],
    "masked": [np.ma.array([1, 2], mask=[False, True])],
    "lists": [[datetime.date(2024, 2, 29)], [NOON]],
    "dicts": [{"a": datetime.date(2024, 2, 29)}, {"a": NOON}],
}


@pytest.mark.parametrize("what", CHANGED)
def test_objects_are_not_changed_to_the_type_of_others(what):
    values = CHANGED[what]
    column = pd.Series([None] * len(values), dtype=object)
    column[:] = values
    with pytest.raises(ArgumentError, match=r"(?s)column 'c' of object cannot become an array: .* would become"):
        list(Dataset.from_dask(frame(1, c=column)))
    with pytest.raises(ArgumentError, match=r"(?s)cannot become an array: .* would become"):
        Dataset.from_tensor_slices(column)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([NOON, None], np.array([NOON, None], "M8[us]")),
        ([pd.Timestamp(NOON), NOON], np.array([NOON, NOON], "M8[us]")),
        ([np.int8(1), 300], np.array([1, 300])),
        ([np.float32(0.5), 0.1, None, pd.NA], np.array([0.5, 0.1, np.nan, np.nan])),
        ([datetime.timedelta(1), pd.NaT], np.array([86_400_000_000, "NaT"], "m8[us]")),
    ],
    ids=["times", "two kinds of times", "integers", "floats", "spans"],
)
def test_objects_of_several_types_that_keep_their_values(values, expected):
    (actual,) = Dataset.from_dask(frame(1, c=pd.Series(values, dtype=object)), columns="c").batch(9)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "values",
    [
        [NOON, pd.Timestamp(NOON)],
        [NOON.replace(tzinfo=datetime.UTC)] * 2,
        [datetime.timedelta(1)],
        [[1, None], [float("nan")], [2]],
        [[["a"], None], [["b", "c"]]],
        [[NOON], [pd.Timestamp(NOON)]],
    ],
    ids=["times", "zones", "spans", "lists", "lists of lists", "lists of times"],
)
def test_values_whose_types_show_that_they_stay_the_same_are_not_compared(values, monkeypatch):
    monkeypatch.setattr(object_columns, "_is_same", None)
    column = pd.Series(values, dtype=object)
    object_columns.check_unchanged(column, pa.array(column), "c")


def test_arrays_in_object_columns_keep_their_values():
    rows = [np.array([1.5, np.nan]), [0.25], np.array([])]
    column = pd.Series([None] * 3, dtype=object)
    column[:] = rows
    actual = list(Dataset.from_dask(frame(1, c=column), columns="c"))
    for row, expected in zip(actual, rows, strict=True):
        np.testing.assert_array_equal(row, np.asarray(expected, np.float64))


def test_intervals_are_dicts_of_their_ends():
    rows = list(Dataset.from_dask(frame(2, c=pd.interval_range(0, 3))))
    assert [(int(row["c"]["left"]), int(row["c"]["right"])) for row in rows] == [(0, 1), (1, 2), (2, 3)]
