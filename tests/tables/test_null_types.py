"""Columns of nulls, which writers give no type, beside files in which the column has one."""

from __future__ import annotations

import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import Dataset, Ragged, TensorSpec, errors, read_arrow, read_csv, read_json, read_parquet


class Parquet:
    end, read = ".parquet", staticmethod(read_parquet)

    @staticmethod
    def write(path, table):
        pq.write_table(table, path)


class Arrow:
    end, read = ".arrow", staticmethod(read_arrow)

    @staticmethod
    def write(path, table):
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)


class ArrowStream(Arrow):
    end = ".arrows"

    @staticmethod
    def write(path, table):
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)


class Json:
    end, read = ".jsonl", staticmethod(read_json)

    @staticmethod
    def write(path, table):
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


FORMS = [Parquet, Arrow, ArrowStream, Json]
TEXT = np.dtypes.StringDType()
# What a column has in one part -> nulls without a type in another, a replacement, and what they become.
CASES = {
    "text": (pa.array(["x"]), pa.nulls(2), "", ["", ""]),
    "ints": (pa.array([2**60 + 1]), pa.nulls(1), -1, [-1]),
    "bools": (pa.array([True]), pa.nulls(1), False, [False]),
    "floats": (pa.array([1.5]), pa.nulls(1), None, [np.nan]),
    "lists": (pa.array([[1, 2]]), pa.nulls(2), [], [[], []]),
    "empty lists": (pa.array([["x"]]), pa.array([[], []], pa.list_(pa.null())), None, [[], []]),
    "nulls in lists": (pa.array([[1]]), pa.array([[None], []], pa.list_(pa.null())), 0, [[0], []]),
    "lists of lists": (pa.array([[["x"]]]), pa.array([[[]], []], pa.list_(pa.list_(pa.null()))), None, [[[]], []]),
    "structs": (pa.array([{"a": 1, "b": "x"}]), pa.nulls(1), {"a": 0, "b": "?"}, [{"a": 0, "b": "?"}]),
    "fields": (pa.array([{"a": 1, "b": "x"}]), pa.array([{"a": 2, "b": None}]), {"b": "?"}, [{"a": 2, "b": "?"}]),
    "lists in structs": (
        pa.array([{"a": ["x"]}]),
        pa.array([{"a": []}], pa.struct({"a": pa.list_(pa.null())})),
        None,
        [{"a": []}],
    ),
}
ONLY_IN_TABLES = {
    "times": (pa.array([5], pa.timestamp("s")), pa.nulls(1), None, [np.datetime64("NaT", "s")]),
    "dictionary": (pa.array(["x"]).dictionary_encode(), pa.nulls(1), "", [""]),
    "dictionary of nulls": (pa.array(["x"]).dictionary_encode(), pa.nulls(2).dictionary_encode(), "", ["", ""]),
    "fixed lists": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), pa.nulls(1), 0, [[0, 0]]),
    "bytes": (pa.array([b"x"]), pa.nulls(1), b"", [b""]),
    "views": (pa.array(["x"], pa.string_view()), pa.nulls(1), "", [""]),
    "no rows": (pa.array(["x"]), pa.nulls(0), None, []),
    "tensors": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4).reshape(1, 2, 2)),
        pa.nulls(1),
        0,
        [[[0, 0], [0, 0]]],
    ),
}


def plain(value):
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, Ragged)) else value


def cases():
    for form in FORMS:
        for name in [*CASES, *(() if form is Json else ONLY_IN_TABLES)]:
            # Parquet has no dictionaries of nulls.
            if (form, name) != (Parquet, "dictionary of nulls"):
                yield pytest.param(form, {**CASES, **ONLY_IN_TABLES}[name], id=f"{form.__name__}-{name}")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1, 0, 1)])
@pytest.mark.parametrize(("form", "case"), list(cases()))
def test_columns_of_nulls_have_the_type_of_other_files(tmp_path, form, case, order):
    values, nulls, replacement, expected = case
    parts = [pa.table({"n": pa.array(range(len(column))), "c": column}) for column in (values, nulls)]
    for number, part in enumerate(order):
        form.write(tmp_path / f"{number}{form.end}", parts[part])
    (tmp_path / "alone").mkdir()
    form.write(tmp_path / "alone" / f"0{form.end}", parts[0])
    options = {} if replacement is None else {"missing": {"c": replacement}}
    ds = form.read([tmp_path / f"{number}{form.end}" for number in range(len(order))], **options)
    alone = form.read(tmp_path / "alone", **options)
    assert ds.element_spec == alone.element_spec
    (there,) = (plain(row["c"]) for row in alone)
    wanted = [row for part in order for row in (expected if part else [there])]
    np.testing.assert_equal([plain(row["c"]) for row in ds], wanted)
    np.testing.assert_equal([plain(value) for value in ds.select("c")], wanted)


@pytest.mark.parametrize("form", FORMS)
def test_nulls_without_a_replacement_are_an_error_of_that_type(tmp_path, form):
    form.write(tmp_path / f"0{form.end}", pa.table({"c": ["x"]}))
    form.write(tmp_path / f"1{form.end}", pa.table({"c": pa.nulls(1)}))
    with pytest.raises(errors.FileError, match=r"column 'c' of type string has 1 null.*missing=\{'c': ''\}"):
        list(form.read(tmp_path))


@pytest.mark.parametrize("form", [Parquet, Arrow, Json])
def test_columns_that_have_no_type_in_any_file(tmp_path, form):
    for number in range(3):
        form.write(tmp_path / f"{number}{form.end}", pa.table({"c": pa.nulls(1)}))
    assert form.read(tmp_path).element_spec == {"c": TensorSpec((), "float64")}
    assert np.isnan([row["c"] for row in form.read(tmp_path)]).all()
    for value, spec in (("?", TensorSpec((), TEXT)), (b"?", TensorSpec((), object)), (0, TensorSpec((), "float64"))):
        ds = form.read(tmp_path, missing={"c": value})
        assert ds.element_spec == {"c": spec}
        assert [row["c"] for row in ds] == [value] * 3


@pytest.mark.parametrize("form", FORMS)
def test_other_differences_are_still_errors(tmp_path, form):
    form.write(tmp_path / f"0{form.end}", pa.table({"c": ["x"], "n": pa.nulls(1)}))
    form.write(tmp_path / f"1{form.end}", pa.table({"c": [1], "n": [1]}))
    with pytest.raises(errors.FileError, match=f"1{form.end}"):
        list(form.read(tmp_path, missing={"n": 0}))


def test_filters_of_columns_of_nulls(tmp_path):
    for number, column in enumerate([pa.array(["x", "y"]), pa.nulls(2), pa.array(["y", "x"])]):
        pq.write_table(pa.table({"c": column, "n": [2 * number, 2 * number + 1]}), tmp_path / f"{number}.parquet")
    for paths in ("012", "120"):
        files = [tmp_path / f"{number}.parquet" for number in paths]
        assert sorted(int(n) for n in read_parquet(files, "n", [("c", "==", "x")])) == [0, 5]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_on_a_cluster(tmp_path, on_cluster, order):
    for number, part in enumerate(order):
        pq.write_table(pa.table({"c": (pa.array(["x"]), pa.nulls(2))[part]}), tmp_path / f"{number}.parquet")
    ds = read_parquet(tmp_path, "c", missing={"c": "?"})
    assert sorted(ds) == ["?", "?", "x"]


def test_dataframes_whose_partitions_have_no_values():
    parts = [pd.DataFrame({"c": pd.Series(values, dtype=object)}) for values in (["x"], [None, None], [])]
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        frame = dd.from_map(lambda number: parts[number], order, meta=parts[0].iloc[:0])
        rows = [row["c"] for row in Dataset.from_dask(frame, missing={"c": "?"})]
        assert rows == [value for number in order for value in (["x"], ["?", "?"], [])[number]]


def test_columns_of_csv_without_values_have_the_type_of_their_replacement(tmp_path):
    for number, rows in enumerate(("1,,2\n3,,4\n", "5,word,6\n")):
        (tmp_path / f"{number}.csv").write_text("a,b,c\n" + rows)
    rows = list(read_csv(tmp_path, missing={"b": "?"}))
    assert [row["b"] for row in rows] == ["?", "?", "word"]
    assert read_csv(tmp_path / "0.csv", missing={"b": 7}).element_spec["b"] == TensorSpec((), "float64")
    assert [row["b"] for row in read_csv(tmp_path / "0.csv", missing={"b": 7})] == [7, 7]
