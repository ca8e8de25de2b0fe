"""Parquet: arrays of columns, selected rows, and splits."""

from __future__ import annotations

import base64
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from daskdist import Dataset, Options, errors, read_csv, read_parquet, read_text
from daskdist.core.cardinality import UNKNOWN as UNKNOWN_CARDINALITY
from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.formats.parquet import Parquet
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws

Pair = namedtuple("Pair", "x y")
TEXT = np.dtypes.StringDType()
DAY = datetime.date(2024, 2, 29)


@pytest.fixture
def path(tmp_path):
    """Write one file of columns of several types: 7 rows in groups of 3."""
    n = 7
    table = pa.table(
        {
            "i": np.arange(n, dtype=np.int16),
            "f": np.arange(n, dtype=np.float32) / 4,
            "d": np.arange(n, dtype=np.float64) / 8,
            "b": np.arange(n) % 2 == 0,
            "s": [f"row {k}" for k in range(n)],
        }
    )
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=3)
    return str(tmp_path / "table.parquet")


def rows_of(ds):
    """Return the rows of a dataset of single arrays or scalars, as one array."""
    return np.array([np.asarray(element) for element in ds])


def write(tmp_path: Path, array: pa.Array, name: str = "c") -> str:
    path = str(tmp_path / "one.parquet")
    pq.write_table(pa.table({name: array}), path)
    return path


# --- columns ---


@pytest.mark.parametrize(
    ("columns", "first", "spec"),
    [
        ("i", np.int16(1), TensorSpec((), "int16")),
        (["f", "i"], {"f": np.float32(0.25), "i": np.int16(1)}, {"f": TensorSpec(()), "i": TensorSpec((), "int16")}),
        (("i", "b"), (np.int16(1), np.False_), (TensorSpec((), "int16"), TensorSpec((), "bool"))),
        ({"x": ["f", "f"]}, {"x": np.float32([0.25, 0.25])}, {"x": TensorSpec((2,))}),
        ({"x": ["f"]}, {"x": np.float32([0.25])}, {"x": TensorSpec((1,))}),
        (
            {"x": ["f", "d"], "y": "i"},
            {"x": np.array([0.25, 0.125]), "y": np.int16(1)},
            {"x": TensorSpec((2,), "float64"), "y": TensorSpec((), "int16")},
        ),
        ((["i", "b"], "s"), (np.int16([1, 0]), "row 1"), (TensorSpec((2,), "int16"), TensorSpec((), TEXT))),
        (Pair(["i", "f"], "i"), Pair(np.float32([1, 0.25]), np.int16(1)), None),
        ({"a": {"b": "i"}, "c": ("f",)}, {"a": {"b": np.int16(1)}, "c": (np.float32(0.25),)}, None),
        (["s", "s"], {"s": "row 1"}, {"s": TensorSpec((), TEXT)}),
    ],
)
def test_columns_make_elements(path, columns, first, spec):
    ds = read_parquet(path, columns)
    element = list(ds)[1]
    leaves, structure = Structure.of(first)
    assert type(element) is type(first)
    assert element_spec_of(ds).structure == structure
    for actual, expected, said in zip(structure.leaves_of(element), leaves, element_spec_of(ds).leaves, strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert type(actual) is type(expected)
        # The spec says the shape and the dtype of the values.
        assert said.shape == np.shape(actual)
        assert isinstance(actual, str) or said.dtype == actual.dtype
    assert spec is None or ds.element_spec == spec
    batch = next(iter(ds.batch(7)))
    assert element_spec_of(ds.batch(7, drop_remainder=True)) == ElementSpec.of(batch)


def test_all_columns_in_the_order_of_the_file(path):
    ds = read_parquet(path)
    assert list(ds.element_spec) == ["i", "f", "d", "b", "s"]
    assert list(next(iter(ds))) == ["i", "f", "d", "b", "s"]
    dtypes = [leaf.dtype for leaf in ds.element_spec.values()]
    assert dtypes == [np.int16, np.float32, np.float64, np.bool_, TEXT]


@pytest.mark.parametrize(
    "asked", [["i", "f"], ["f", "i"], {"x": "i", "y": "f"}, {"y": "f", "x": "i"}, {1: "i"}], ids=str
)
def test_columns_come_in_the_given_order_whatever_was_read_before(path, asked):
    for other in (None, ["f", "i"], ["i", "f"], {"y": "f", "x": "i"}, {"x": "i", "y": "f"}, {True: "i"}):
        next(iter(read_parquet(path, columns=other)))
    wanted = list(asked)
    for ds in (read_parquet(path, columns=asked), read_parquet(path, columns=asked).batch(7)):
        assert list(next(iter(ds))) == wanted
        assert list(map(type, next(iter(ds)))) == list(map(type, wanted))
    names = pq.read_schema(path).names
    assert list(next(iter(read_parquet(path)))) == names


def test_numbers_are_read_without_pandas(path):
    """Importing pandas takes longer than reading many a file, on each worker."""
    code = f"""
import sys
from daskdist import read_parquet
print(list(read_parquet({path!r}, columns="i")) == list(range(7)), "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_columns_side_by_side_in_the_given_order(path):
    batch = next(iter(read_parquet(path, {"x": ["d", "i", "b"]}).batch(7)))["x"]
    assert batch.dtype == np.float64
    np.testing.assert_array_equal(batch[:, 0], np.arange(7) / 8)
    np.testing.assert_array_equal(batch[:, 1], np.arange(7))
    np.testing.assert_array_equal(batch[:, 2], np.arange(7) % 2 == 0)


# --- types ---


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, 2, 255], pa.uint8()), np.uint8([1, 2, 255])),
        (pa.array([-(2**63), 2**63 - 1], pa.int64()), np.array([-(2**63), 2**63 - 1])),
        (pa.array([2**64 - 1], pa.uint64()), np.array([2**64 - 1], np.uint64)),
        (pa.array(np.float16([0.5, 1.5])), np.float16([0.5, 1.5])),
        (pa.array([0.1, None], pa.float32()), np.float32([0.1, np.nan])),
        (pa.array([None, None], pa.float64()), np.array([np.nan, np.nan])),
        (pa.array([True, False, True]), np.array([True, False, True])),
        (pa.array(["", "ä", "longer than fifteen bytes"]), np.array(["", "ä", "longer than fifteen bytes"], TEXT)),
        (pa.array(["a", "b"], pa.large_string()), np.array(["a", "b"], TEXT)),
        (pa.array(["a", "b", "a"]).dictionary_encode(), np.array(["a", "b", "a"], TEXT)),
        (pa.array([7, 8, 7], pa.int32()).dictionary_encode(), np.int32([7, 8, 7])),
        (pa.array([1.5, None, 1.5]).dictionary_encode(), np.array([1.5, np.nan, 1.5])),
        (pa.array([DAY, None], pa.date32()), np.array(["2024-02-29", "NaT"], "datetime64[D]")),
        (pa.array([DAY, None], pa.date64()), np.array(["2024-02-29", "NaT"], "datetime64[D]")),
        (pa.array([1, None], pa.timestamp("ms")), np.array([1, "NaT"], "datetime64[ms]")),
        (pa.array([1, 2], pa.timestamp("us")), np.array([1, 2], "datetime64[us]")),
        (pa.array([1, 2], pa.timestamp("ns", "UTC")), np.array([1, 2], "datetime64[ns]")),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), np.array([[1, 2], [3, 4]])),
        (pa.array([[1.0, None]], pa.list_(pa.float32(), 2)), np.float32([[1, np.nan]])),
        (pa.array([["a", "b"]], pa.list_(pa.string(), 2)), np.array([["a", "b"]], TEXT)),
        (
            pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int32(), 3), 2)),
            np.int32([[[1, 2, 3], [4, 5, 6]]] * 2),
        ),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_types(tmp_path, array, expected):
    ds = read_parquet(write(tmp_path, array), "c")
    actual = next(iter(ds.batch(10)))
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    assert ds.element_spec == TensorSpec(expected.shape[1:], expected.dtype)


def test_text_goes_through_a_map_and_stacks_again(path):
    ds = read_parquet(path, ("i", "s")).map(lambda i, s: (i, s))
    assert ds.element_spec[1] == TensorSpec((), TEXT)
    _, text = next(iter(ds.batch(7)))
    np.testing.assert_array_equal(text, np.array([f"row {k}" for k in range(7)], TEXT))
    assert text.dtype == TEXT


def test_text_of_different_lengths_goes_through_a_map(tmp_path):
    path = write(tmp_path, pa.array(["a", "bcd", ""]))
    (text,) = read_parquet(path, "c").map(lambda s: s).batch(3)
    np.testing.assert_array_equal(text, np.array(["a", "bcd", ""], TEXT))


def test_structures_are_those_of_other_sources(path):
    ds = read_parquet(path, {"x": ["i", "f"], "y": "i"})
    other = Dataset.from_tensor_slices({"x": np.zeros((3, 2), np.float32), "y": np.zeros(3, np.int16)})
    assert element_spec_of(ds) == element_spec_of(other)
    assert element_spec_of(ds.map(lambda row: row)) == element_spec_of(ds)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None, 3]),
        pa.array([True, None]),
        pa.array(["a", None]),
        pa.array(["a", None]).dictionary_encode(),
        pa.array([[1, None]], pa.list_(pa.int64(), 2)),
        pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2)),
    ],
    ids=lambda array: str(array.type),
)
def test_a_null_without_a_replacement(tmp_path, array):
    path = write(tmp_path, array)
    with pytest.raises(errors.FileError, match=r"'c'.*null") as caught:
        list(read_parquet(path, "c"))
    assert f"{path} row group 0" in str(caught.value)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[{"a": 1}]]),
        pa.array([{"a": {"b": [{"c": 1}]}}]),
        pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    ],
    ids=lambda array: str(array.type),
)
def test_types_that_no_array_holds(tmp_path, array):
    path = str(tmp_path / "one.parquet")
    pq.write_table(pa.table({"fine": [1.0] * len(array), "c": array}), path)
    with pytest.raises(errors.FileError, match=r"'c'.*leave it out") as caught:
        read_parquet(path)
    assert path in str(caught.value)
    assert len(list(read_parquet(path, ["fine"]))) == len(array)


# --- rows and splits ---


@pytest.mark.parametrize(
    ("rows", "row_group"),
    [([5], None), ([5, 3, 4], 2), ([0, 4, 0, 3], 2), ([0], None), ([0, 0], None), ([1] * 9, None), ([10, 1], 3)],
)
def test_every_row_once_and_in_order(parquet_files, rows, row_group):
    ds = read_parquet(parquet_files(rows, row_group=row_group))
    actual = list(ds)
    assert [int(row["id"]) for row in actual] == list(range(sum(rows)))
    assert [float(row["x"]) for row in actual] == [k / 2 for k in range(sum(rows))]
    assert ds.cardinality() == sum(rows)
    batches = list(ds.batch(4))
    assert [len(batch["id"]) for batch in batches] == [4] * (sum(rows) // 4) + [sum(rows) % 4] * (sum(rows) % 4 > 0)
    assert ds.batch(4).cardinality() == len(batches)


def test_splits_cover_a_file_once(parquet_files):
    (path,) = parquet_files(11, row_group=4)
    reader = Parquet()
    splits = reader.list_splits(path, 3, FirstFile(path, reader.spec(path)))
    assert [split.num_rows for split in splits] == [4, 4, 3]
    assert {split.file for split in splits} == {3}
    blocks = [reader.read(split) for split in splits]
    assert [len(block) for block in blocks] == [4, 4, 3]
    np.testing.assert_array_equal(np.concatenate([block.leaves[0] for block in blocks]), np.arange(11))
    # The size that a split states before it is read is right.
    assert [block.nbytes for block in blocks] == [split.num_bytes for split in splits]
    again = [reader.read(split) for split in splits]
    assert all(np.array_equal(a.leaves[1], b.leaves[1]) for a, b in zip(blocks, again, strict=True))


def test_a_group_of_no_rows(tmp_path):
    path = str(tmp_path / "gaps.parquet")
    table = pa.table({"id": np.arange(4)})
    with pq.ParquetWriter(path, table.schema) as writer:
        for part in (table[:0], table[:1], table[:0], table[1:], table[:0]):
            writer.write_table(part)
    assert pq.read_metadata(path).num_row_groups >= 4
    ds = read_parquet(path, "id")
    assert [int(x) for x in ds] == [0, 1, 2, 3]
    assert [int(x) for x in ds.map(lambda x: x + 1)] == [1, 2, 3, 4]
    assert [batch.tolist() for batch in ds.filter(lambda x: x != 1).batch(2)] == [[0, 2], [3]]


def test_nothing_is_read_before_it_is_wanted(parquet_files):
    paths = parquet_files(4, files=3)
    ds = read_parquet(paths, "id").map(lambda x: x + 1).shuffle(100, seed=0).batch(2)
    for path in paths[1:]:
        Path(path).write_text("no longer a table")
    assert ds.element_spec == TensorSpec((None,), "int64")
    with pytest.raises(errors.FileError):
        list(ds)


# --- filters ---


@pytest.fixture
def sorted_path(tmp_path):
    """Write rows 0 to 99 in groups of 10, with one of 4 words in turn, and a number that some rows lack."""
    n = np.arange(100)
    words = np.array(["a", "b", "c", "d"])[n % 4]
    sparse = pa.array([None if k % 5 == 0 else k for k in range(100)], pa.float64())
    pq.write_table(pa.table({"n": n, "word": words, "f": sparse}), tmp_path / "s.parquet", row_group_size=10)
    return str(tmp_path / "s.parquet")


@pytest.mark.parametrize(
    ("filters", "keeps", "num_groups"),
    [
        ([("n", ">=", 95)], lambda n, word: n >= 95, 1),
        ([("n", ">", 19), ("n", "<", 41)], lambda n, word: 19 < n < 41, 3),
        ([("n", "==", 7)], lambda n, word: n == 7, 1),
        ([("n", "in", {3, 55})], lambda n, word: n in (3, 55), 2),
        ([("word", "==", "b"), ("n", "<=", 12)], lambda n, word: word == "b" and n <= 12, 2),
        ([[("n", "<", 5)], [("n", ">", 97)]], lambda n, word: n < 5 or n > 97, 2),
        ([("n", ">", 1000)], lambda n, word: False, 0),
        ([("word", "not in", {"a", "b", "c"})], lambda n, word: word == "d", 10),
        ([("f", ">", 90)], lambda n, word: n > 90 and n % 5 != 0, 1),
    ],
)
def test_filters_keep_rows_and_leave_groups_unread(sorted_path, filters, keeps, num_groups):
    words = "abcd"
    expected = [k for k in range(100) if keeps(k, words[k % 4])]
    ds = read_parquet(sorted_path, "n", filters)
    assert [int(x) for x in ds] == expected
    assert [int(x) for batch in ds.batch(7) for x in batch] == expected
    assert len(node_of(ds).splits()) == num_groups
    # Columns of a filter need not be selected, and may be.
    assert [str(row["word"]) for row in read_parquet(sorted_path, ["n", "word"], filters)] == [
        words[k % 4] for k in expected
    ]
    assert ds.cardinality() == (UNKNOWN_CARDINALITY if num_groups else 0)


@pytest.mark.parametrize(
    ("array", "condition", "expected"),
    [
        # Arrow compares these as floats, for some of which 0.1 is not the nearest number.
        (pa.array([Decimal("0.10"), Decimal("0.20")]), ("==", 0.1), [0]),
        (pa.array([Decimal("0.10"), Decimal("0.20")]), ("in", [0.2, 0.5]), [1]),
        (pa.array([Decimal("-0.10"), Decimal("0.30")]), (">=", 0.3), [1]),
        (pa.array([Decimal("0.10"), Decimal("0.30")]), ("<=", 0.1), [0]),
        # Values of a list are compared as float32.
        (pa.array([0.1, 0.2], pa.float32()), ("in", [0.1]), [0]),
        (pa.array([0.1, 0.2], pa.float32()), ("==", 0.1), []),
        (pa.array([0.1, 0.2], pa.float32()), (">", 0.2), [1]),
        (pa.array([0.1, 0.2]), ("<", np.float32(0.1)), [0]),
        # Statistics do not tell that there is a NaN.
        (pa.array([np.nan, 1, 2, 3]), ("in", [np.nan, 9]), [0]),
    ],
)
def test_statistics_leave_no_row_out_that_arrow_keeps(tmp_path, array, condition, expected):
    filters = [("c", *condition)]
    table = pa.table({"c": array, "n": range(len(array))})
    assert table.filter(pq.filters_to_expression(filters))["n"].to_pylist() == expected
    for row_group_size in (1, 2, 4):
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=row_group_size)
        assert [int(n) for n in read_parquet(tmp_path / "a.parquet", "n", filters)] == expected


def test_statistics_of_a_field_are_not_those_of_a_column_of_its_path(tmp_path):
    table = pa.table({"a.b": [1, 2], "a": [{"b": 7}, {"b": 8}]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [int(n) for n in read_parquet(tmp_path / "a.parquet", "a.b", [("a.b", "<", 5)])] == [1, 2]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([("nothing", ">", 1)], r"filters: no column 'nothing'; there are 'n', 'word', 'f'"),
        ([("n", ">")], r"filters: \('n', '>'\) is not a condition; give tuples \(column, operator, value\)"),
        ([("n", "~", 1)], r'filters: .*"~" is not a valid operator'),
        ("n > 3", r"filters: 'n' is not a condition"),
        ([("n", ">", "x")], r"filters"),
    ],
)
def test_filters_that_make_no_sense(sorted_path, filters, message):
    with pytest.raises(errors.ArgumentError, match=message):
        read_parquet(sorted_path, "n", filters)


# --- directories that say what is in them ---


@pytest.fixture
def hive(tmp_path):
    """Write three files in directories that are named by day and kind."""
    for number, (day, kind) in enumerate([(1, "a b"), (2, "c"), (10, "c")]):
        folder = tmp_path / "hive" / f"day={day}" / f"kind={kind.replace(' ', '%20')}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"n": [10 * number, 10 * number + 1]}), folder / "part.parquet")
    return str(tmp_path / "hive")


def test_directories_make_columns(hive):
    ds = read_parquet(hive)
    assert ds.element_spec == {
        "n": TensorSpec((), "int64"),
        "day": TensorSpec((), "int64"),
        "kind": TensorSpec((), TEXT),
    }
    rows = [(int(row["n"]), int(row["day"]), str(row["kind"])) for row in ds]
    # Paths are sorted as text.
    assert rows == [(0, 1, "a b"), (1, 1, "a b"), (20, 10, "c"), (21, 10, "c"), (10, 2, "c"), (11, 2, "c")]
    batch = next(iter(read_parquet(hive, {"x": ["n", "day"], "kind": "kind"}).batch(3)))
    np.testing.assert_array_equal(batch["x"], [[0, 1], [1, 1], [20, 10]])
    assert list(batch["kind"]) == ["a b", "a b", "c"]
    assert list(next(iter(read_parquet(hive, partitioned=False)))) == ["n"]


@pytest.mark.parametrize(
    ("filters", "expected", "num_splits"),
    [
        ([("day", ">=", 2)], [20, 21, 10, 11], 2),
        ([("kind", "==", "a b")], [0, 1], 1),
        ([("day", "==", 10), ("n", ">", 20)], [21], 1),
        ([[("day", "==", 1)], [("n", "==", 11)]], [0, 1, 11], 2),
        ([("day", "==", 3)], [], 0),
    ],
)
def test_filters_by_directories_leave_files_unread(hive, filters, expected, num_splits):
    ds = read_parquet(hive, "n", filters)
    assert [int(x) for x in ds] == expected
    assert len(node_of(ds).splits()) == num_splits


@pytest.mark.parametrize("reader", [read_parquet, read_csv])
def test_a_null_in_the_name_of_a_directory(tmp_path, reader):
    for number, day in enumerate(["__HIVE_DEFAULT_PARTITION__", "3"]):
        for column in ("day", "kind"):
            folder = tmp_path / column / f"{column}={day if column == 'day' else day.replace('3', 'a')}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table({"n": [number]}), folder / "a.parquet")
            (folder / "a.csv").write_text(f"n\n{number}\n")
    # The directory of numbers comes first.
    assert list(reader(tmp_path / "day", "n")) == [1, 0]
    for column in ("day", "kind"):
        with pytest.raises(errors.FileError, match=rf"column '{column}' of type .* has 1 null, the first in row 0"):
            list(reader(tmp_path / column))
    assert [int(day) for day in reader(tmp_path / "day", "day", missing={"day": -1})] == [3, -1]
    assert [str(day) for day in reader(tmp_path / "day", "day", missing={"day": np.nan})] == ["3.0", "nan"]
    assert [str(kind) for kind in reader(tmp_path / "kind", "kind", missing={"kind": "?"})] == ["?", "a"]
    with pytest.raises(errors.ArgumentError, match=r"missing: 'x' cannot stand for a null of .*column 'day'"):
        reader(tmp_path / "day", missing={"day": "x"})
    for operator, value in ((">", 1), ("!=", 5), ("in", [3])):
        ds = read_parquet(tmp_path / "day", ["n", "day"], [("day", operator, value)])
        assert [int(row["n"]) for row in ds] == [1]


def test_a_column_of_a_file_wins_over_its_directory(tmp_path):
    (tmp_path / "n=5").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "n=5" / "a.parquet")
    assert [int(row["n"]) for row in read_parquet(tmp_path)] == [1, 2]


# --- what is missing ---


def test_replacements_of_nulls(tmp_path):
    table = pa.table(
        {"n": pa.array([1, None, 3]), "s": ["a", None, "c"], "l": [[1], None, [2, 3]], "f": [1.5, None, 2]}
    )
    path = str(tmp_path / "nulls.parquet")
    pq.write_table(table, path)
    message = r"column 'n' of type int64 has 1 null, the first in row 1.*missing=\{'n': numpy\.nan\}"
    with pytest.raises(errors.FileError, match=message):
        list(read_parquet(path, "n"))
    assert [int(x) for x in read_parquet(path, "n", missing={"n": -1})] == [1, -1, 3]
    floats = read_parquet(path, "n", missing={"n": np.nan})
    assert floats.element_spec == TensorSpec((), "float64")
    np.testing.assert_array_equal(rows_of(floats), [1, np.nan, 3])
    assert list(read_parquet(path, "s", missing={"s": "?"})) == ["a", "?", "c"]
    assert [x.tolist() for x in read_parquet(path, "l", missing={"l": []})] == [[1], [], [2, 3]]
    np.testing.assert_array_equal(rows_of(read_parquet(path, "f", missing={"f": -1.0})), [1.5, -1, 2])
    with pytest.raises(errors.ArgumentError, match="missing: no column 'm'; there are 'n', 's', 'l', 'f'"):
        read_parquet(path, missing={"m": 0})
    for column, value in [("n", "x"), ("n", None), ("n", [1]), ("s", 5), ("l", [1]), ("l", "x"), ("f", "x")]:
        with pytest.raises(errors.ArgumentError, match=r"missing: .*stand for a"):
            read_parquet(path, missing={column: value})


# --- files that are not as they should be ---


@pytest.fixture
def as_somebody():
    """Run a test as a user who may not read everything, if the tests are run by root."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


def test_a_file_that_may_not_be_read(as_somebody):
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/a.parquet"
        pq.write_table(pa.table({"id": [1, 2]}), path)
        ds = read_parquet(path)
        Path(path).chmod(0)
        with pytest.raises(errors.FileError, match=r"a\.parquet: access denied"):
            list(ds)
        with pytest.raises(errors.FileError, match=r"a\.parquet: access denied"):
            list(read_text(path))


def test_listing_continues_after_it_failed(parquet_files):
    paths = parquet_files(2, files=3)
    ds = read_parquet(paths, "id")
    content = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(b"")
    with pytest.raises(errors.FileError, match="part-1"):
        len(ds)
    Path(paths[1]).write_bytes(content)
    assert [int(x) for x in ds] == list(range(6))


def test_files_are_listed_as_far_as_they_are_looked_at(parquet_files):
    paths = parquet_files([1] * 100)
    ds = read_parquet(paths, "id")
    Path(paths[90]).write_bytes(b"")
    assert [int(x) for x in ds.take(3)] == [0, 1, 2]
    with pytest.raises(errors.FileError, match="part-90"):
        list(ds)


# --- laws ---


class TestParquet(FormatLaws):
    def make_format(self):
        return Parquet({"x": ["f", "g"], "y": "n", "when": "t"})

    def make_reader_of_written(self):
        # Written columns have the names of the leaves.
        return Parquet()

    def write(self, directory):
        written = {}
        for number, (num_rows, group) in enumerate([(5, 2), (0, 1), (3, 8)]):
            path = directory / f"{number}.parquet"
            n = np.arange(num_rows) + 10 * number
            f, g, t = n.astype("float32"), n.astype("float32") / 2, n.astype("datetime64[ms]")
            pq.write_table(pa.table({"f": f, "n": n, "g": g, "t": t}), path, row_group_size=group)
            written[str(path)] = [{"x": np.stack([f[k], g[k]]), "y": n[k], "when": t[k]} for k in range(num_rows)]
        return written


class TestParquetWhole(FormatLaws):
    def make_format(self):
        return Parquet()

    def write(self, directory):
        written = {}
        for number, words in enumerate([["a", "", "ü"], [], ["b"]]):
            path = directory / f"{number}.parquet"
            lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * len(words))), 2)
            columns = {"s": pa.array(words, pa.string()), "l": lists, "flag": pa.array([True] * len(words), pa.bool_())}
            pq.write_table(pa.table(columns), path, row_group_size=1)
            text = np.array(words, np.dtypes.StringDType())
            written[str(path)] = [
                {"s": np.asarray(text[k : k + 1])[0], "l": np.array([2.0 * k, 2.0 * k + 1]), "flag": np.bool_(True)}
                for k in range(len(words))
            ]
        return written


@dataclass(frozen=True)
class Overlapping(Parquet):
    """A wrong format, which reads the first row group twice."""

    def list_splits(self, path, file, first):
        splits = super().list_splits(path, file, first)
        return [*splits[:1], *splits]


class _OfOverlapping(TestParquet):
    __test__ = False

    def make_format(self):
        return Overlapping({"x": ["f", "g"], "y": "n", "when": "t"})


def test_a_wrong_format_breaks_laws(tmp_path):
    with pytest.raises(AssertionError, match="splits in order"):
        _OfOverlapping().test_splits_cover_the_file_once(tmp_path)


def test_filters_of_columns_beside_such_as_python_has_no_values_for(tmp_path):
    path = tmp_path / "a.parquet"
    far = pa.array([10**8 + k for k in range(6)], pa.int32()).cast(pa.date32())
    short = pa.array([10**18 + k for k in range(6)], pa.timestamp("ns"))
    pq.write_table(pa.table({"n": range(6), "far": far, "short": short}), path, row_group_size=2)
    assert [int(n) for n in read_parquet(path, "n", [("n", ">=", 3)])] == [3, 4, 5]
    assert [int(n) for n in read_parquet(path, "n", [("far", ">=", far[4])])] == [4, 5]


def test_a_file_that_was_changed_since_it_was_listed(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(6)}), path, row_group_size=2)
    form = Parquet()
    splits = form.list_splits(str(path), 0, FirstFile(str(path), form.spec(str(path))))
    pq.write_table(pa.table({"n": range(100, 107)}), path, row_group_size=2)
    with pytest.raises(errors.FileError, match=r"row group 1: the file was changed since it was listed"):
        form.read(splits[1])


def test_thousands_of_columns_take_no_longer_each(tmp_path):
    path, num_columns = tmp_path / "a.parquet", 2000
    pq.write_table(pa.table({f"c{k}": [k, k] for k in range(num_columns)}), path)
    form = Parquet()
    split = form.list_splits(str(path), 0, FirstFile(str(path), form.spec(str(path))))[0]
    started = time.thread_time()
    assert form.read(split).item(1)[0] == 0
    # Listing the names of all columns once for each column would take a second.
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("shape", ["plain", "lists", "structs"])
def test_text_that_is_not_utf8_is_an_error_of_its_row_alone(tmp_path, shape):
    values = pa.array([b"a", b"\xff", b"c" * 70, b"d\xc3", b""], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 5, values.buffers())
    made = {
        "plain": lambda: text,
        "lists": lambda: pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4, 5], pa.int32()), text),
        "structs": lambda: pa.StructArray.from_arrays([text], ["t"]),
    }[shape]()
    pq.write_table(pa.table({"s": made, "n": range(5)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"s": made.slice(2, 1), "n": [5]}), tmp_path / "b.parquet")
    ds = read_parquet(tmp_path)
    with pytest.raises(errors.FileError, match=r"a\.parquet row group 0: column 's': its row 1, .* is not UTF-8"):
        list(ds)
    iterator = iter(ds.with_options(Options(on_error="skip")))
    assert [int(row["n"]) for row in iterator] == [0, 2, 4, 5]
    assert iterator.stats()["skipped_by_file"] == {str(tmp_path / "a.parquet"): 2}
    assert [int(n) for n in read_parquet(tmp_path, "n")] == [0, 1, 2, 3, 4, 5]


def test_a_row_group_is_left_out_where_arrow_does_not_tell_which_text_is_none(tmp_path):
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"]).buffers())
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), text)
    pq.write_table(pa.table({"s": column}), tmp_path / "a.parquet")
    ds = read_parquet([tmp_path / "a.parquet"], "s")
    with pytest.raises(errors.FileError, match=r"a\.parquet row group 0: .*UTF8"):
        list(ds)
    assert list(ds.with_options(Options(on_error="skip"))) == []


def test_rows_with_a_null_are_left_out_one_by_one(tmp_path):
    pq.write_table(pa.table({"n": [0, None, 2, None]}), tmp_path / "a.parquet")
    ds = read_parquet(tmp_path, "n").with_options(Options(on_error="skip"))
    assert [int(n) for n in ds] == [0, 2]


@pytest.mark.parametrize(
    ("values", "missing", "expected"),
    [
        ([[1], [2, None, 4]], -1, [[1], [2, -1, 4]]),
        ([[1], [2, None, 4]], float("nan"), [[1], [2, float("nan"), 4]]),
        ([[1.5], [None]], None, [[1.5], [float("nan")]]),
        ([["a"], ["b", None]], "", [["a"], ["b", ""]]),
        ([[True], [None]], False, [[True], [False]]),
        ([[1], None], [], [[1], []]),
    ],
)
def test_nulls_within_lists(tmp_path, values, missing, expected):
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    actual = read_parquet(tmp_path, "x", missing=None if missing is None else {"x": missing})
    np.testing.assert_equal([value.tolist() for value in actual], expected)
    assert all(actual.element_spec.is_compatible_with(result) for result in actual)


def test_nulls_within_lists_without_a_replacement(tmp_path):
    pq.write_table(pa.table({"x": [[1], [2, None, 4]], "y": [[1], None]}), tmp_path / "a.parquet")
    with pytest.raises(errors.FileError, match=r"column 'x': the list in its row 1 has a null, and int64 .*missing="):
        list(read_parquet(tmp_path, "x"))
    with pytest.raises(errors.FileError, match=r"column 'y' of type .* has 1 null, .* row 1, .*missing=\{'y': \[\]\}"):
        list(read_parquet(tmp_path, "y"))
    assert [y.tolist() for y in read_parquet(tmp_path, "y", missing={"y": -1})] == [[1], []]
    with pytest.raises(errors.ArgumentError, match=r"missing: 'a' cannot stand for a null of .*column 'x'"):
        read_parquet(tmp_path, "x", missing={"x": "a"})


class Keys(pe.KmsClient):
    """A service of keys that wraps a key by encoding it."""

    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key, master_key):
        return base64.b64encode(key)


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("filters", [None, [("s", "==", "a")]])
def test_an_encrypted_file_is_an_error_even_with_skip(tmp_path, plaintext_footer, filters):
    table = pa.table({"x": range(10), "s": ["a"] * 10})
    pq.write_table(table, tmp_path / "a.parquet")
    encryption = pe.EncryptionConfiguration("f", column_keys={"c": ["x", "s"]}, plaintext_footer=plaintext_footer)
    properties = pe.CryptoFactory(Keys).file_encryption_properties(pe.KmsConnectionConfig(), encryption)
    pq.write_table(table, tmp_path / "b.parquet", encryption_properties=properties)
    with pytest.raises(errors.FileError, match=r"b\.parquet: .*is (an )?encrypted") as caught:
        list(read_parquet(tmp_path, filters=filters).with_options(Options(on_error="skip")))
    assert type(caught.value) is errors.FileError
