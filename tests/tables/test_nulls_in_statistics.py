"""Nulls of files: errors of a pass, with a remedy that works, and counted by `describe`."""

from __future__ import annotations

import ast
import json
import re
import sqlite3

import dask
import distributed
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskdist
from daskdist import Options, errors

NUM_ROWS = 60
TABLE = pa.table(
    {
        "id": list(range(NUM_ROWS)),
        "word": [None if k % 5 == 3 else f"w{k % 7}" for k in range(NUM_ROWS)],
        "size": pa.array([None if k % 4 == 1 else k for k in range(NUM_ROWS)], pa.int64()),
        "flag": [None if k % 6 == 2 else k % 2 == 0 for k in range(NUM_ROWS)],
    }
)


def _csv(path):
    rows = [["" if value is None else str(value).lower() for value in row.values()] for row in TABLE.to_pylist()]
    path.write_text("\n".join([",".join(TABLE.column_names), *map(",".join, rows)]) + "\n")
    return lambda **options: daskdist.read_csv(path, dtypes={"size": "int64", "flag": "bool"}, **options)


def _json(path):
    path.write_text("\n".join(map(json.dumps, TABLE.to_pylist())))
    return lambda **options: daskdist.read_json(path, **options)


def _parquet(path):
    pq.write_table(TABLE, path, row_group_size=7)
    return lambda **options: daskdist.read_parquet(path, **options)


def _arrow(path):
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 7)
    return lambda **options: daskdist.read_arrow(path, **options)


def _sql(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, word TEXT, size INTEGER, flag BOOLEAN)")
        rows = [tuple(row.values()) for row in TABLE.to_pylist()]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
    connection.close()
    return lambda **options: daskdist.read_sql("t", str(path), **options)


@pytest.fixture(params=[_csv, _json, _parquet, _arrow, _sql], ids=lambda make: make.__name__[1:])
def read(request, tmp_path):
    ends = {_csv: "csv", _json: "jsonl", _parquet: "parquet", _arrow: "arrow", _sql: "sqlite"}
    with dask.config.set({"daskdist.split-bytes": 100}):
        yield request.param(tmp_path / f"a.{ends[request.param]}")


def test_nulls_are_counted(read):
    description = read().describe().to_dict()
    assert {name: values["nulls"] for name, values in description.items()} == {
        name: TABLE[name].null_count for name in TABLE.column_names
    }
    assert {name: values["count"] for name, values in description.items()} == {
        name: NUM_ROWS - TABLE[name].null_count for name in TABLE.column_names
    }
    sizes = TABLE["size"].drop_null().to_numpy()
    assert [description["size"][name] for name in ("mean", "min", "max", "distinct")] == [
        sizes.mean(), sizes.min(), sizes.max(), len(sizes)
    ]  # fmt: skip
    assert [description["word"][name] for name in ("min", "max", "distinct")] == ["w0", "w6", 7]
    some = read(missing={"size": -1}).shuffle(20).skip(2).select(["size"]).describe().to_dict()
    assert (some["size"]["nulls"], some["size"]["min"]) == (0, -1)


def test_nulls_are_counted_on_workers(tmp_path):
    ds = _parquet(tmp_path / "a.parquet")()
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        assert ds.describe()["word"]["nulls"] == TABLE["word"].null_count


def test_nulls_of_nested_columns_are_counted(tmp_path):
    rows = range(50)
    table = pa.table(
        {
            "lists": [None if k % 4 == 0 else [k, None] for k in rows],
            "pairs": pa.array([None if k % 5 == 0 else [k, k] for k in rows], pa.list_(pa.int64(), 2)),
            "struct": [{"a": None if k % 2 else f"{k}"} if k % 3 else None for k in rows],
            "blob": pa.array([None] * 49 + [b"x"]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    description = daskdist.read_parquet(tmp_path / "a.parquet").describe().to_dict()
    nulls = {name: (values["count"], values["nulls"]) for name, values in description.items()}
    num_texts = sum(1 for k in rows if k % 3 and not k % 2)
    expected = {"lists": (37, 37), "pairs": (80, 0), "['struct']['a']": (num_texts, 50 - num_texts), "blob": (1, 49)}
    assert nulls == expected


def test_the_error_of_a_pass_has_the_row_and_a_remedy_that_works(read):
    with pytest.raises(errors.FileError, match=r"\brow \d+\b") as raised:
        list(read(columns=["id", "word"]))
    (missing,) = re.findall(r"missing=(\{'word': .*?\})", str(raised.value))
    rows = list(read(columns=["id", "word"], missing=ast.literal_eval(missing)))
    assert [str(row["word"]) for row in rows] == [word or "" for word in TABLE["word"].to_pylist()]
    with pytest.raises(errors.FileError) as raised:
        list(read(columns=["id", "flag"]))
    (missing,) = re.findall(r"missing=(\{'flag': .*?\})", str(raised.value))
    rows = list(read(columns=["id", "flag"], missing=ast.literal_eval(missing)))
    assert [bool(row["flag"]) for row in rows] == [bool(flag) for flag in TABLE["flag"].to_pylist()]


def test_statistics_are_of_the_elements_of_a_pass_that_leaves_nulls_out(tmp_path):
    ds = _csv(tmp_path / "a.csv")(columns=["word"]).with_options(Options(on_error="skip"))
    assert ds.describe()["word"]["nulls"] == 0
    assert ds.describe().num_elements == len(list(ds)) == NUM_ROWS - TABLE["word"].null_count


def test_functions_see_no_nulls(tmp_path):
    ds = _parquet(tmp_path / "a.parquet")(columns="word").map(np.strings.str_len)
    with pytest.raises(errors.FileError, match="null"):
        ds.describe()
