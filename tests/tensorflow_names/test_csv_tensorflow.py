"""TensorFlow's CSV datasets; the expected values are those of TensorFlow 2.21."""

from __future__ import annotations

import gzip
from pathlib import Path

import dask
import numpy as np
import pytest

import daskdist
from daskdist import TensorSpec, errors

TEXT = np.dtypes.StringDType()


def write(tmp_path, content, name="a.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


csv_dataset = daskdist.data.experimental.CsvDataset
make_csv_dataset = daskdist.data.experimental.make_csv_dataset


@pytest.mark.parametrize(
    ("content", "defaults", "options", "expected"),
    [
        ("1,a\n2,b\n", [np.int32, str], {}, [(1, b"a"), (2, b"b")]),
        ("1,a\r\n2,b\r\n", ["int32", "string"], {}, [(1, b"a"), (2, b"b")]),
        (",a\n2,\n", [[7], ["z"]], {}, [(7, b"a"), (2, b"z")]),
        ('"",a\n"2",""\n', [[7], ["z"]], {}, [(7, b"a"), (2, b"z")]),
        ('1,"a\nb"\n2,"c""d"\n', [np.int32, bytes], {}, [(1, b"a\nb"), (2, b'c"d')]),
        ('1,"a\n2,b\n', [np.int32, bytes], {"use_quote_delim": False}, [(1, b'"a'), (2, b"b")]),
        ("x,y\n1,a\n", [np.int32, bytes], {"header": True}, [(1, b"a")]),
        ("NA,a\n2,NA\n,c\n", [[7], ["z"]], {"na_value": "NA"}, [(7, b"a"), (2, b"z"), (7, b"c")]),
        ("1,2,3\n4,5,6\n", [np.int32, np.int64], {"select_cols": [0, 2]}, [(1, 3), (4, 6)]),
        ("1,2,3\n4,5,6\n", [np.int32, np.int64], {"exclude_cols": [1]}, [(1, 3), (4, 6)]),
        ("1\t2\n3\t4\n", [np.int32, np.float64], {"field_delim": "\t"}, [(1, 2.0), (3, 4.0)]),
        (" 1 , a\n", [np.int32, bytes], {}, [(1, b" a")]),
        ("a\n\nb\n", [["x"]], {}, [(b"a",), (b"x",), (b"b",)]),
        ("\n", [[""]], {}, [(b"",)]),
        ("1,\n,2.5\n", [np.array([3]), np.float64(1.5)], {}, [(1, 1.5), (3, 2.5)]),
        ("1,2\n", [np.array([], np.int64), float], {}, [(1, 2.0)]),
        (b"\xff,1\n", [bytes, np.float64], {}, [(b"\xff", 1.0)]),
        ("", [bytes], {}, []),
        ("x\n", [bytes], {"header": True}, []),
        ("a,b\n", [1, 2], {"header": True, "select_cols": [0, 1]}, []),
        ("inf\nnan\n-Inf\n1e400\n", [np.float64], {}, [(float(x),) for x in ("inf", "nan", "-inf", "inf")]),
    ],
)
def test_csv_dataset(tmp_path, content, defaults, options, expected):
    path = write(tmp_path, content)
    for split_bytes in (1, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            actual = list(csv_dataset(path, defaults, **options))
        # Compare text, in which NaN equals NaN.
        assert str([tuple(x if isinstance(x, bytes) else x.item() for x in row) for row in actual]) == str(expected)


def test_csv_dataset_types_and_files(tmp_path):
    paths = [write(tmp_path, "1,2,x\n", "a.csv"), str(tmp_path / "b.csv.gz")]
    Path(paths[1]).write_bytes(gzip.compress(b"3,4,y\n"))
    ds = csv_dataset(paths[:1], [1, 2.0, "z"])
    assert ds.element_spec == (TensorSpec((), "int32"), TensorSpec(()), TensorSpec((), object))
    names = daskdist.Dataset.from_tensor_slices(np.array(paths[:1], TEXT))
    assert [int(row[0]) for row in csv_dataset(names, [1, 2.0, "z"])] == [1]
    assert [int(row[0]) for row in csv_dataset(paths[1], [1, 2.0, "z"], "GZIP")] == [3]


@pytest.mark.parametrize(
    ("content", "defaults", "options", "message"),
    [
        (",a\n", [np.int32, bytes], {}, "column 'c0': its value is missing.*give missing="),
        ("1,a\n2,\n", [np.int32, bytes], {}, "its row 1.*column 'c1': its value is missing, which bytes"),
        ("a\n\nb\n", [bytes], {}, "its row 1.*column 'c0': its value is missing"),
        ("1,2\n3\n", [1, 2], {}, "its row 1.*has 1 fields, not 2"),
        ("1.5\n", [1], {}, "'1.5' is not int32"),
        ("99999999999\n", [1], {}, "'99999999999' is not int32"),
        ("1,2,3\n", [1, 2], {}, "no row has the 2 fields of its names: the first, .1,2,3., has 3"),
        ("1,2\n", [1], {"select_cols": [5]}, "no column 'c5'; there are 'c0', 'c1'"),
        ("1,2\n", [1, 2], {"select_cols": [1, 0]}, "select_cols is .1, 0.; give increasing numbers"),
        ("1,2\n", [1], {"select_cols": [0, 1]}, "select_cols has 2 columns, but record_defaults 1"),
        ("1,2\n", [1], {"select_cols": [0], "exclude_cols": [1]}, "are both given"),
        ("1\n", [np.uint8], {}, r"record_defaults\[0\] is of uint8; there are float32"),
        ("1\n", [[1, 2]], {}, r"record_defaults\[0\] is \[1, 2\]; give one default"),
        ("1\n", [], {}, "give a list of a default or type for each column"),
        ("1\n", [1], {"field_delim": ";;"}, "give one ASCII character"),
    ],
)
def test_csv_dataset_refuses(tmp_path, content, defaults, options, message):
    path = write(tmp_path, content)
    with pytest.raises((errors.FileError, errors.ArgumentError), match=message):
        list(csv_dataset(path, defaults, **options))


TABLE = "a,b,c\n1,x,0.5\n2,y,\n3,z,4\n"


def plain(element):
    """Return a batch with lists in place of arrays."""
    if isinstance(element, tuple):
        return tuple(map(plain, element))
    return {name: value.tolist() for name, value in element.items()} if isinstance(element, dict) else element.tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [{"a": [1, 2], "b": [b"x", b"y"], "c": [0.5, 0.0]}, {"a": [3], "b": [b"z"], "c": [4.0]}]),
        (
            {"label_name": "c"},
            [({"a": [1, 2], "b": [b"x", b"y"]}, [0.5, 0.0]), ({"a": [3], "b": [b"z"]}, [4.0])],
        ),
        ({"select_columns": ["c", "a"]}, [{"a": [1, 2], "c": [0.5, 0.0]}, {"a": [3], "c": [4.0]}]),
        ({"select_columns": [2, 0], "label_name": "a"}, [({"c": [0.5, 0.0]}, [1, 2]), ({"c": [4.0]}, [3])]),
        ({"select_columns": [0], "column_names": ["p", "q", "r"]}, [{"p": [1, 2]}, {"p": [3]}]),
        (
            {"select_columns": [0], "column_names": ["p", "q", "r"], "header": False},
            [{"p": [b"a", b"1"]}, {"p": [b"2", b"3"]}],
        ),
        ({"select_columns": ["a", "c"], "column_defaults": [np.int64, 2.5]}, [{"a": [1, 2], "c": [0.5, 2.5]}, ...]),
        ({"select_columns": ["a"], "num_rows_for_inference": 0}, [{"a": [b"1", b"2"]}, {"a": [b"3"]}]),
        ({"select_columns": ["c"], "num_rows_for_inference": None}, [{"c": [0.5, 0.0]}, {"c": [4.0]}]),
        ({"select_columns": ["b"], "na_value": "x"}, [{"b": [b"", b"y"]}, {"b": [b"z"]}]),
        ({"select_columns": ["a"], "num_epochs": 2}, [{"a": [1, 2]}, {"a": [3, 1]}, {"a": [2, 3]}]),
    ],
)
def test_make_csv_dataset(tmp_path, options, expected):
    ds = make_csv_dataset(write(tmp_path, TABLE), 2, shuffle=False, **{"num_epochs": 1, **options})
    actual = list(map(plain, ds))
    assert len(actual) == len(expected)
    assert all(value in (..., given) for given, value in zip(actual, expected, strict=True)), actual


def test_make_csv_dataset_infers_the_narrowest_type(tmp_path):
    path = write(
        tmp_path,
        "a,b,c,d,e,f,g,h\n1,99999999999,1.5,1e300,nan,True,,x\n1,1,2,3,4,5,,\n99999999999,1,-inf,1,1,1,,\n+1,1,1,1,1,1,,\n",
    )
    spec = make_csv_dataset(path, 2, shuffle=False, num_epochs=1, num_rows_for_inference=3).element_spec
    kinds = [leaf.dtype.name for leaf in spec.values()]
    assert kinds == ["int64", "int64", "float32", "float64", "object", "object", "object", "object"]
    assert {leaf.shape for leaf in spec.values()} == {(None,)}


def test_make_csv_dataset_continues_and_shuffles(tmp_path):
    path = write(tmp_path, TABLE)
    ds = make_csv_dataset(path, 2, shuffle=False)
    assert ds.element_spec["a"] == TensorSpec((2,), "int32")
    assert [plain(batch)["a"] for batch in ds.take(3)] == [[1, 2], [3, 1], [2, 3]]
    ds = make_csv_dataset(path, 3, shuffle_seed=1, num_epochs=4)
    batches = [plain(batch)["a"] for batch in ds]
    assert all(sorted(batch) == [1, 2, 3] for batch in batches)
    assert len(set(map(tuple, batches))) > 1
    other = write(tmp_path, "a,b,c\n10,x,1\n30,y,2\n", "b.csv")
    for reads, expected in [(None, [1, 2, 3, 10, 30]), (2, [1, 10, 2, 30, 3])]:
        ds = make_csv_dataset([path, other], 9, shuffle=False, num_epochs=1, num_parallel_reads=reads)
        assert [plain(batch)["a"] for batch in ds] == [expected]


def test_make_csv_dataset_leaves_out_errors(tmp_path):
    path = write(tmp_path, "a,b\n1,2\n3,x\n4\n5,6\n")
    ds = make_csv_dataset(
        path, 9, shuffle=False, num_epochs=1, ignore_errors=True, num_rows_for_inference=1, prefetch_buffer_size=0
    )
    assert [plain(batch) for batch in ds] == [{"a": [1, 5], "b": [2, 6]}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_name": "d"}, "label_name is 'd'; give one of 'a', 'b', 'c'"),
        ({"label_name": "a", "select_columns": ["c"]}, "label_name is 'a'"),
        ({"select_columns": ["d"]}, "select_columns: no column 'd'; there are 'a'"),
        ({"select_columns": [3]}, "select_columns: no column 3; there are 3"),
        ({"select_columns": ["a", 0]}, "select_columns has 'a' twice"),
        ({"header": False}, "neither a header nor column_names"),
        ({"column_defaults": [1]}, "column_defaults has 1 values for 3 columns"),
        ({"column_names": ["a", "a", "b"]}, "two columns are called 'a'"),
    ],
)
def test_make_csv_dataset_refuses(tmp_path, options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        make_csv_dataset(write(tmp_path, TABLE), 2, **options)
