"""Columns of dataframes as arrays in memory."""

from __future__ import annotations

import array
import datetime
import decimal
from collections import deque

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from daskdist import Dataset, TensorSpec
from daskdist.core import to_numpy
from daskdist.core.to_numpy import is_rounded
from daskdist.errors import ArgumentError, UserFunctionError

TIMES = ["2020-01-02T03", "2021-01-02T03"]
UTC = np.array(TIMES, "M8[us]") - np.timedelta64(9, "h")
COLUMNS = {
    "text": (pd.Series(["a", ""]), ["a", ""]),
    "objects": (pd.Series(["a", "\u65e5"], dtype=object), ["a", "\u65e5"]),
    "categories": (pd.Series(["b", "a"], dtype="category"), ["b", "a"]),
    "bytes": (pd.Series([b"a\0", b""], dtype=object), [b"a\0", b""]),
    "zone": (
        pd.Series(pd.to_datetime(TIMES)).dt.tz_localize("Asia/Tokyo"),
        np.array(TIMES, "M8[us]") - np.timedelta64(9, "h"),
    ),
    "no time": (pd.Series(pd.to_datetime([TIMES[0], None])), np.array([TIMES[0], "NaT"], "M8[us]")),
    "dates": (pd.Series([datetime.date(2020, 1, 2), None]), np.array(["2020-01-02", "NaT"], "M8[D]")),
    "nullable": (pd.Series([1, 2], dtype="Int64"), [1, 2]),
    "Arrow": (pd.Series([1.5, None], dtype="float64[pyarrow]"), [1.5, np.nan]),
    "index": (pd.Index(["a", "b"]), ["a", "b"]),
    "sparse": (pd.Series(pd.arrays.SparseArray([0, 7])), [0, 7]),
    "lists": (pd.Series([[1], [2, 3]]), [[1], [2, 3]]),
    "an Arrow array": (pa.array(["a", "b"]), ["a", "b"]),
    "Arrow chunks": (pa.chunked_array([[1], [2]]), [1, 2]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_dataframes_are_slices(name):
    column, expected = COLUMNS[name]
    actual = list(Dataset.from_tensor_slices(({"c": column}, [0, 1])))
    assert [int(label) for _, label in actual] == [0, 1]
    for (row, _), value in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(row["c"], value)
    (whole,) = Dataset.from_tensors(column)
    assert len(whole) == 2


def test_the_columns_of_a_dataframe_as_a_dict():
    table = pd.DataFrame({"name": ["a", "b", "c"], "age": [1.5, np.nan, 2], "n": [1, 2, 3]})
    actual = Dataset.from_tensor_slices(dict(table))
    pd.testing.assert_frame_equal(actual.to_pandas()[list(table)], table)
    numbers = table[["age", "n"]]
    np.testing.assert_array_equal(list(Dataset.from_tensor_slices(numbers)), numbers.to_numpy())
    with pytest.raises(ArgumentError, match=r"not all numbers: give dict\(frame\)"):
        Dataset.from_tensor_slices(table)


@pytest.mark.parametrize(
    "column",
    [pd.Series(["a", None]), pd.Series(["a", None], dtype="category"), pa.array([True, None]), pa.array([1, None])],
)
def test_missing_values_of_columns_are_refused(column):
    with pytest.raises(ArgumentError, match=r"with 1 missing values: fill them.* \(leaf \['x'\]\)"):
        Dataset.from_tensor_slices({"x": column})
    with pytest.raises(ArgumentError, match=r"Series of object cannot become an array: .* its values one type"):
        Dataset.from_tensor_slices(pd.Series([1, "a"]))


@pytest.mark.parametrize(
    ("values", "large"), [([2**70, 1], 2**70), ([1, -(2**63) - 1], -(2**63) - 1), ([2**63, -1], 2**63)]
)
def test_integers_of_dataframes_that_fit_no_dtype_are_named(values, large):
    with pytest.raises(ArgumentError, match=f"the number {large} does not fit into int64"):
        Dataset.from_tensor_slices(pd.Series(values, dtype=object))


def test_functions_may_return_columns_of_dataframes():
    batches = Dataset.from_tensor_slices({"g": ["a", "b", "a"], "x": [1, 2, 3]}).batch(3)
    (groups,) = batches.map(lambda batch: pd.DataFrame(batch).g)
    assert groups.tolist() == ["a", "b", "a"]
    (actual,) = batches.map(lambda batch: dict(pd.DataFrame(batch).groupby("g", as_index=False).x.sum()))
    assert {"g": actual["g"].tolist(), "x": actual["x"].tolist()} == {"g": ["a", "b"], "x": [4, 2]}
    with pytest.raises(UserFunctionError, match=r"give dict\(frame\)"):
        list(batches.map(lambda batch: pd.DataFrame(batch)))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.Series([{"a": 1}]), "has several fields"),
        (pa.array([{"a": 1, "b": 2}]), "has several fields"),
        (pa.array([[1, None]]), "has no value for that, as floats have NaN and times NaT: fill them first, or"),
        (pd.Series([[{"a": 1, "b": 2}]]), "lists of structs, which cannot form an array"),
        (pd.Series(pd.interval_range(0, 2)), "has several fields"),
        (pd.Series(pd.period_range("2020", periods=2, freq="M")), r"convert periods to times with dt\.to_timestamp"),
    ],
)
def test_columns_that_are_no_array_are_refused(column, message):
    with pytest.raises(ArgumentError, match=message):
        Dataset.from_tensor_slices({"x": column})


class MapStyle:
    """A dataset of PyTorch's kind: pairs of an array and a number."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index >= 4:
            raise IndexError(index)
        return np.arange(3) + index, index


@pytest.mark.parametrize(
    "rows",
    [
        pd.DataFrame({"a": pd.Series([1, None], dtype="Int64")}),
        pd.DataFrame({"a": pd.Series([1, None], dtype="int64[pyarrow]")}),
        pa.table({"a": [1, None]}),
        [pd.Series([1, None], dtype="Int64")],
        [[pa.array([1, None])]],
    ],
    ids=["frame", "frame of Arrow's types", "table", "list of columns", "lists"],
)
def test_missing_integers_within_tables_and_lists_are_refused(rows):
    with pytest.raises(ArgumentError, match="with 1 missing values"):
        Dataset.from_tensor_slices(rows)


def test_tables_of_numbers_and_lists_of_columns_are_arrays():
    table = pa.table({"a": [1, 2], "b": [0.5, None]})
    for rows in (table, pd.DataFrame({"a": [1, 2], "b": [0.5, None]}), [pd.Series([1, 0.5]), pa.array([2, np.nan])]):
        np.testing.assert_array_equal(list(Dataset.from_tensor_slices(rows)), [[1, 0.5], [2, np.nan]])
    assert [row.tolist() for row in Dataset.from_tensor_slices([range(2), range(2, 4)])] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "times",
    [
        [np.datetime64("9999-01-01"), np.datetime64("2020-01-01", "ns")],
        [[np.datetime64("2020-01-01", "ns")], [np.datetime64("1000-01-01")]],
        [np.array(["9999-01-01"], "M8[D]"), np.array(["2020-01-01"], "M8[ns]")],
        [np.timedelta64(200_000, "D"), np.timedelta64(5, "ns")],
    ],
    ids=["dates", "lists", "arrays", "durations"],
)
def test_times_that_do_not_fit_the_unit_of_others_are_refused(times):
    with pytest.raises(ArgumentError, match="times of several units"):
        Dataset.from_tensor_slices(times)
    with pytest.raises(UserFunctionError, match="times of several units"):
        list(Dataset.range(1).map(lambda _: {"x": times}))


@pytest.mark.parametrize(
    "rows",
    [
        pd.DataFrame({"a": np.array(["9999-01-01"], "M8[s]"), "b": np.array(["2020-01-01"], "M8[ns]")}),
        pa.table(
            {"a": pa.array([datetime.datetime(9999, 1, 1)], pa.timestamp("s")), "b": pa.array([1], pa.timestamp("ns"))}
        ),
    ],
    ids=["frame", "table"],
)
def test_times_of_tables_that_do_not_fit_the_unit_of_others_are_refused(rows):
    with pytest.raises(ArgumentError, match="the times of 'a' do not fit in one array"):
        Dataset.from_tensor_slices(rows)


def test_times_of_several_units_that_fit_are_an_array():
    times = [np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00:00:00.000000001"), np.datetime64("NaT")]
    np.testing.assert_array_equal(list(Dataset.from_tensor_slices(times)), np.array(times))


def test_map_style_datasets_say_what_to_write():
    data = MapStyle()
    with pytest.raises(ArgumentError, match=r"a MapStyle .*Dataset.range\(len\(data\)\).map\(data.__getitem__\)"):
        Dataset.from_tensor_slices(data)
    rows = list(Dataset.range(len(data)).map(data.__getitem__))
    assert [(row.tolist(), int(number)) for row, number in rows] == [([k, k + 1, k + 2], k) for k in range(4)]


NUMBER = 2**53 + 1


@pytest.mark.parametrize(
    "rows",
    [
        [NUMBER, 0.5],
        [[NUMBER, 1], [0.5, 1]],
        [(0.5, NUMBER)],
        [np.int64(NUMBER), np.float32(0.5)],
        [np.array([NUMBER]), np.array([0.5])],
        [2**64 - 1, -1],
        [NUMBER, 1j],
        pd.DataFrame({"id": [NUMBER], "x": [0.5]}),
        pa.table({"id": [NUMBER], "x": [0.5]}),
        pa.record_batch({"id": [-1], "x": pa.array([2**63 + 1], pa.uint64())}),
        [pd.Series([NUMBER]), pd.Series([0.5])],
        [[pa.array([NUMBER])], [pa.array([0.5])]],
        [range(NUMBER, NUMBER + 1), [0.5]],
        [deque([NUMBER]), array.array("d", [0.5])],
        [memoryview(np.array([NUMBER])), [0.5]],
    ],
    ids=[
        *["numbers", "lists", "tuples", "scalars", "arrays", "unsigned and negative", "complex", "frame", "table"],
        *["record batch", "columns", "lists of columns", "ranges", "queues", "memory"],
    ],
)
def test_integers_are_not_rounded(rows):
    with pytest.raises(ArgumentError, match=r"integers .*would be rounded"):
        Dataset.from_tensor_slices(rows)


@pytest.mark.parametrize("rows", [["a", 1], [["a", "b"], ["c", b"d"]], [("a", 0.5)], ["a", True]], ids=repr)
def test_numbers_and_bytes_do_not_become_text(rows):
    with pytest.raises(ArgumentError, match=r"a list of text and of .*give one type"):
        Dataset.from_tensor_slices(rows)
    assert list(Dataset.from_tensor_slices([np.array("a"), np.str_("b"), "c"])) == ["a", "b", "c"]


def test_integers_that_floats_have_may_be_beside_floats():
    for rows in ([2**53, 2**60, 0.5], pd.DataFrame({"id": [2**53], "x": [0.5]}).to_numpy()[0].tolist()):
        assert list(Dataset.from_tensor_slices(rows)) == rows
    with pytest.raises(ArgumentError, match="would be rounded"):
        Dataset.from_list([NUMBER, 0.5])


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_rounded_integers_are_found_without_a_look_at_each(dtype, monkeypatch):
    limits = np.iinfo(dtype)
    numbers = [limits.min, limits.max, limits.max - 1023, 2**53 - 1, 2**53, 2**53 + 1, 2**60, 2**62 + 512, 2**62 + 513]
    rounded = [number for number in numbers if int(float(number)) != number]
    monkeypatch.setattr(to_numpy, "_is_rounded_number", None)
    assert [number for number in numbers if is_rounded(np.array([0, number], dtype), np.dtype(float))] == rounded
    # NumPy's floats are no integers.
    assert list(Dataset.from_tensor_slices([np.float64(0.5), np.float32(0.25)])) == [0.5, 0.25]


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices_are_arrays():
    matrix = np.asmatrix(np.arange(4).reshape(2, 2))
    expected = np.asarray(matrix)
    for ds in (Dataset.from_tensor_slices(matrix), Dataset.range(2).map(lambda x: matrix[int(x)]).unbatch()):
        assert [row.tolist() for row in ds.map(lambda row: row * row)] == (expected * expected).tolist()
    (batch,) = Dataset.from_list([matrix, matrix]).batch(2)
    assert type(batch) is np.ndarray
    assert batch.tolist() == [expected.tolist()] * 2


def test_words_of_char_arrays_keep_their_spaces():
    words = np.char.array(["a ", "b"])
    assert list(Dataset.from_tensor_slices(words)) == ["a ", "b"]


@pytest.mark.parametrize(
    "values",
    [
        [float("nan"), None],
        [[1, 2], [3, None]],
        [True, None],
        [b"a", None],
        [np.datetime64("2020-01-01"), None],
        [-(2**70)],
        [[1.0, 2**64]],
        [decimal.Decimal(1)],
    ],
)
def test_values_that_no_array_has_are_refused_wherever_they_are_given(values):
    refused = r"missing values \(None\)|does not fit into 64 bits|values of Decimal|would be rounded"
    for make in (Dataset.from_tensor_slices, Dataset.from_tensors):
        for nest in (values, {"x": values, "y": [1, 2]}, (values,)):
            with pytest.raises(ArgumentError, match=refused):
                make(nest)
    if isinstance(values, list):
        with pytest.raises(ArgumentError, match=refused):
            Dataset.from_list([{"x": values}, {"x": values}])
        with pytest.raises(UserFunctionError, match=refused):
            list(Dataset.range(2).map(lambda x: {"x": values}))
        generated = Dataset.from_generator(lambda: [values], output_signature=TensorSpec((None,), object))
        with pytest.raises(UserFunctionError, match=refused):
            list(generated)


def test_lists_of_bytes_and_of_arrays_of_objects_are_accepted():
    expected = [b"a", b"b\0"]
    assert list(Dataset.from_tensor_slices(expected)) == expected
    nested = Dataset.from_tensor_slices([np.array([value], object) for value in expected])
    assert [element.tolist() for element in nested] == [[value] for value in expected]
