"""Databases: rows by ranges of an index, types and nulls, and secrets that are not shown."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import dask
import numpy as np
import pytest
from conftest import eventually
from dask.base import tokenize

from daskdist import Options, Ragged, TensorSpec, errors, read_files, read_sql
from daskdist.core.dataset_base import node_of
from daskdist.data import experimental
from daskdist.formats.sql.login import Login
from daskdist.formats.sql.sql_format import Sql
from daskdist.testing import FormatLaws

TEXT = np.dtypes.StringDType()


def database(path, *statements, **tables):
    """Write a SQLite file of some tables, each given as a list of rows."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        for name, rows in tables.items():
            if rows:
                db.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        db.commit()
    return str(path)


def words(values):
    column = np.array(values, TEXT)
    return [column[k] for k in range(len(values))]


def given(ds, name):
    return [row[name].item() if hasattr(row[name], "item") else row[name] for row in ds]


def labels(ds):
    return [split.label for split in node_of(ds).splits()]


class TestSqlite(FormatLaws):
    def make_format(self):
        return Sql("t", rows_per_split=7)

    def write(self, directory):
        written = {}
        for number, num_rows in enumerate([40, 0, 3]):
            rows = [(k, k / 4, f"word {k} ü", f"2024-01-{k % 28 + 1:02}") for k in range(num_rows)]
            schema = "CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL, s TEXT, day DATE)"
            path = database(directory / f"{number}.sqlite", schema, t=rows)
            text, days = words([s for _, _, s, _ in rows]), np.array([d for *_, d in rows], "datetime64[D]")
            written[path] = [
                {"id": np.int64(k), "x": np.float64(x), "s": text[k], "day": days[k]} for k, x, _, _ in rows
            ]
        return written


class TestSqliteByText(FormatLaws):
    """A table that is cut by a text column with equal values and nulls; some columns are read into a nest."""

    def make_format(self):
        return Sql("t", "s", {"x": ["a", "b"], "s": "s"}, 4, missing={"s": "none"})

    def write(self, directory):
        written = {}
        for number, num_rows in enumerate([20, 0]):
            rows = [(k, f"{k % 6}" if k % 6 else None, k / 2) for k in range(num_rows)]
            path = database(directory / f"{number}.db", "CREATE TABLE t (a REAL NOT NULL, s TEXT, b REAL)", t=rows)
            rows.sort(key=lambda row: (row[1] is None, row[1] or "", row[0]))
            text = words([s or "none" for _, s, _ in rows])
            written[path] = [{"x": np.array([a, b]), "s": text[k]} for k, (a, _, b) in enumerate(rows)]
        return written


# --- ranges ---


def table(tmp_path, declared, values, name="t.db"):
    rows = [(k, value) for k, value in enumerate(values)]
    return database(tmp_path / name, f"CREATE TABLE t (n INTEGER NOT NULL, i {declared})", t=rows)


VALUES = {
    "integers": ("INTEGER", [5, -7, 3, 3, 3, 100, 0, 12]),
    "large integers": ("INTEGER", [2**63 - 1, -(2**63), 0, 2**62]),
    "floats": ("REAL", [0.5, -1e300, 1e300, 0.25, 3.0]),
    "text": ("TEXT", ["b", "a", "", "ü", "zz", "a", "%s", "x'y"]),
    "days": ("DATE", ["2024-02-29", "1999-01-01", "2024-03-01"]),
    "bytes": ("BLOB", [b"b", b"\x00", b"", b"\xff"]),
    "of several types": ("", [1, 2.5, 3, 10]),
    "one value": ("INTEGER", [4] * 5),
    "nulls": ("INTEGER", [3, None, 1, None, 2]),
    "nulls only": ("INTEGER", [None, None]),
    "nothing": ("INTEGER", []),
}


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 50])
def test_every_row_once_and_in_the_order_of_the_index(tmp_path, what, num_splits):
    declared, values = VALUES[what]
    ds = read_sql("t", table(tmp_path, declared, values), "i", ["n"], num_splits=num_splits)
    expected = sorted(range(len(values)), key=lambda k: (values[k] is None, values[k] if values[k] is not None else 0))
    assert given(ds, "n") == (sorted(expected, key=lambda k: (values[k].encode(), k)) if what == "text" else expected)
    present = len([value for value in values if value is not None])
    assert len(labels(ds)) <= min(num_splits, present) + (None in values)
    assert len(set(labels(ds))) == len(labels(ds))
    assert given(ds, "n") == given(ds, "n")


def test_numbers_are_cut_into_ranges_of_one_width(tmp_path):
    path = table(tmp_path, "INTEGER", [0, 1, 2, 90, 100, None])
    ds = read_sql("t", path, "i", num_splits=4, missing={"i": -1})
    where = f"{path} table 't', i"
    parts = ["below 25", "from 25 below 50", "from 50 below 75", "from 75", "null"]
    assert labels(ds) == [f"{where} {part}" for part in parts]
    assert [len(node_of(ds).format.read(split)) for split in node_of(ds).splits()] == [3, 0, 0, 2, 1]


def test_text_is_cut_where_rows_are(tmp_path):
    path = table(tmp_path, "TEXT", list("aabbccdd"))
    ds = read_sql("t", path, "i", rows_per_split=3)
    assert [len(node_of(ds).format.read(split)) for split in node_of(ds).splits()] == [2, 4, 2]
    assert labels(ds)[1] == f"{path} table 't', i from b below d"


def test_splits_are_of_the_usual_size(tmp_path):
    path = database(
        tmp_path / "a.db", "CREATE TABLE t (id INTEGER PRIMARY KEY, s TEXT)", t=[(k, "x" * 84) for k in range(1000)]
    )
    with dask.config.set({"daskdist.split-bytes": "11 kB"}):
        ds = read_sql("t", path)
        assert len(labels(ds)) == 10
        assert [split.num_bytes for split in node_of(ds).splits()] == [10_800] * 10
    assert given(ds, "id") == list(range(1000))


def test_rows_without_a_key_come_in_the_order_they_were_put_in(tmp_path):
    path = table(tmp_path, "INTEGER", [5, 1, 4])
    ds = read_sql("t", path, rows_per_split=1)
    assert given(ds, "i") == [5, 1, 4]
    assert labels(ds)[0] == f"{path} table 't', rowid below 2"
    assert given(read_sql("t", path, "rowid", ["i"], limits=(2, 3)), "i") == [1, 4]


def test_a_key_of_two_columns_orders(tmp_path):
    rows = [("b", 2), ("a", 2), ("b", 1), ("a", 1), ("c", 0)]
    path = database(tmp_path / "a.db", "CREATE TABLE t (s TEXT, n INTEGER, PRIMARY KEY (s, n)) WITHOUT ROWID", t=rows)
    ds = read_sql("t", path, columns="n", num_splits=2)
    assert [int(n) for n in ds] == [1, 2, 1, 2, 0]
    assert [len(node_of(ds).format.read(split)) for split in node_of(ds).splits()] == [2, 3]


def test_limits_leave_rows_out(tmp_path):
    path = table(tmp_path, "INTEGER", [5, 1, 4, 2, 3, None])
    for num_splits in (1, 2, 7):
        ds = read_sql("t", path, "i", num_splits=num_splits, limits=(2, 4))
        assert given(ds, "i") == [2, 3, 4]
    assert labels(read_sql("t", path, "i", limits=(2, 4))) == [f"{path} table 't', i from 2 to 4"]
    assert given(read_sql("t", path, "i", limits=[np.int64(9), np.int64(12)]), "i") == []
    days = table(tmp_path, "DATE", ["2024-01-01", "2024-01-02", "2024-01-03"], "days.db")
    first, last = datetime.date(2024, 1, 2), datetime.date(2024, 1, 3)
    assert given(read_sql("t", days, "i", limits=("2024-01-02", "2024-01-03"), num_splits=2), "n") == [1, 2]
    assert given(read_sql("SELECT * FROM t", days, "i", limits=(str(first), str(last))), "n") == [1, 2]


def test_views_and_queries(tmp_path):
    path = table(tmp_path, "INTEGER", [3, 1, 2])
    database(path, "CREATE VIEW v AS SELECT i, n, i * 2 AS twice FROM t")
    assert labels(read_sql("v", path)) == [f"{path} table 'v'"]
    assert given(read_sql("v", path), "twice") == [2, 4, 6]
    assert given(read_sql("v", path, "n", num_splits=3), "twice") == [6, 2, 4]
    query = " -- the last first\n SELECT n, ':x %s' AS \"a:b\", i FROM t ORDER BY i DESC ;"
    ds = read_sql(query, path, columns=["i", "a:b"])
    assert given(ds, "i") == [3, 2, 1]
    assert str(next(iter(ds))["a:b"]) == ":x %s"
    assert labels(ds) == [f"{path} query {' '.join(query.split())[:60]!r}"]
    with_ = "WITH w AS (SELECT i + 1 AS j FROM t) SELECT * FROM w"
    assert given(read_sql(with_, path, "j", num_splits=2), "j") == [2, 3, 4]


# Queries of a table t with a column i, or of the rows of a series, and the values of i.
ENDS = [" -- all rows", "; -- all; rows", " /* all ; rows */ ;\n", ";;", " -- one\n-- two ' quote\n;", "/* ' */"]
QUERIES = [
    ("SELECT 1 AS i, '; -- no comment' AS s", "; -- no comment"),
    ("SELECT 1 AS i, 'it''s; /*' AS \"s\"", "it's; /*"),
    ("WITH w AS (SELECT 1 AS i -- one\n) SELECT i, ';' AS s FROM w", ";"),
    ("/* a ; */ -- b ;\n (SELECT 1 AS i, '*/' AS s)", "*/"),
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("query", "text"), QUERIES)
def test_queries_end_in_comments_and_semicolons(tmp_path, query, text, end):
    path = table(tmp_path, "INTEGER", [1])
    if query.endswith(")"):
        query = query.replace("(", "").replace(")", "")
    for index in (None, "i"):
        (row,) = read_sql(query + end, path, index)
        assert (int(row["i"]), str(row["s"])) == (1, text)


def test_names_as_strange_as_they_come(tmp_path):
    path = tmp_path / "a b?%41#.db"
    database(path, 'CREATE TABLE "my.table %s" ("group" INTEGER, "a""b" TEXT, "Ü %(x)s" REAL)')
    database(path, """INSERT INTO "my.table %s" VALUES (1, 'x', 2.0)""")
    ds = read_sql("my.table %s", path, "group", {"x": ["Ü %(x)s", "group"], "y": 'a"b'})
    (row,) = ds
    assert row["x"].tolist() == [2.0, 1.0]
    assert str(row["y"]) == "x"
    assert sorted(os.listdir(tmp_path)) == [path.name]


def test_a_url_or_a_path(tmp_path, monkeypatch):
    path = table(tmp_path, "INTEGER", [1])
    monkeypatch.chdir(tmp_path)
    for connection in (path, Path(path), "t.db", f"sqlite:///{path}", "sqlite:///t.db", "sqlite+pysqlite:///t.db"):
        ds = read_sql("t", connection)
        assert node_of(ds).paths == (path,)
        assert given(ds, "i") == [1]
    ds = read_sql("main.t", "sqlite:///t.db?timeout=3")
    assert node_of(ds).paths == (f"sqlite:///{path}?timeout=3",)
    assert given(ds, "i") == [1]
    ds = read_sql("t", path, engine_options={"connect_args": {"timeout": 3}})
    monkeypatch.chdir("/")
    assert given(ds, "i") == [1]
    assert node_of(ds).state() == [None]
    status = os.stat(path)
    assert node_of(read_sql("t", path)).state() == [(status.st_size, status.st_mtime_ns, status.st_ctime_ns)]


def test_a_file_of_one_table_is_recognised_by_its_first_bytes(tmp_path):
    path = table(tmp_path, "INTEGER", [4, 5])
    os.rename(path, tmp_path / "rows")
    assert given(read_files(tmp_path / "rows"), "i") == [4, 5]
    for number in range(2):
        table(tmp_path, "INTEGER", [number], f"{number}.sqlite")
    assert given(read_files(tmp_path, Sql("t", columns=["i"])), "i") == [0, 1]
    database(tmp_path / "rows", "CREATE TABLE u (a)")
    with pytest.raises(errors.FileError, match=r"rows: has the tables 't', 'u'; say which with Sql\(table\)"):
        read_files(tmp_path / "rows")


def test_reading_never_writes_to_the_database(tmp_path):
    path = table(tmp_path, "INTEGER", [1, 2])
    before = Path(path).read_bytes()
    with pytest.raises(errors.FileError, match=r"syntax error|readonly|read-only"):
        list(read_sql("WITH w AS (SELECT 1) DELETE FROM t RETURNING *", path))
    assert Path(path).read_bytes() == before
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        assert given(read_sql("t", path), "i") == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["t.db"]


# --- types and nulls ---


@pytest.mark.parametrize(
    ("declared", "values", "expected"),
    [
        ("INTEGER", [1, 2**62], np.array([1, 2**62])),
        ("SMALLINT", [1, 2**62], np.array([1, 2**62])),
        ("REAL", [1, None], np.array([1.0, np.nan])),
        ("FLOAT", [0.1, 2], np.array([0.1, 2.0])),
        ("NUMERIC(9, 2)", [0.1, 7, None], np.array([0.1, 7.0, np.nan])),
        ("BOOLEAN", [1, 0], np.array([True, False])),
        ("VARCHAR(3)", ["a", "längere"], np.array(["a", "längere"], TEXT)),
        ("JSON", ['{"a": 1}', "[]"], np.array(['{"a": 1}', "[]"], TEXT)),
        ("DATE", ["2024-02-29", None], np.array(["2024-02-29", "NaT"], "datetime64[D]")),
        (
            "DATETIME",
            ["2024-02-29 01:02:03.456789", "1900-01-01", None],
            np.array(["2024-02-29T01:02:03.456789", "1900-01-01", "NaT"], "datetime64[us]"),
        ),
        ("TIME", ["01:02:03.5", None], np.array([3_723_500_000, "NaT"], "timedelta64[us]")),
        ("TIME", [None], np.array(["NaT"], "timedelta64[us]")),
        ("", [3, 4], np.array([3, 4])),
        ("", [3, 4.5, None], np.array([3.0, 4.5, np.nan])),
        ("", ["a", "b"], np.array(["a", "b"], TEXT)),
        ("", [None, None], np.array([np.nan, np.nan])),
    ],
)
def test_types_of_sqlite(tmp_path, declared, values, expected):
    ds = read_sql("t", table(tmp_path, declared, values), columns="i")
    (actual,) = ds.batch(10)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    assert ds.element_spec == TensorSpec((), expected.dtype)


def test_bytes(tmp_path):
    ds = read_sql("t", table(tmp_path, "BLOB", [b"a\x00", b""]), columns="i")
    assert [bytes(value) for value in ds] == [b"a\x00", b""]
    assert ds.element_spec == TensorSpec((), object)


def test_nulls_need_a_replacement(tmp_path):
    path = table(tmp_path, "INTEGER", [7, None])
    with pytest.raises(errors.FileError, match=r"table 't', rowid.*column 'i' of type int64 has 1 null.*missing="):
        list(read_sql("t", path))
    assert given(read_sql("t", path, missing={"i": -1}), "i") == [7, -1]
    ds = read_sql("t", path, missing={"i": np.nan})
    assert ds.element_spec["i"].dtype == np.float64
    assert np.isnan(given(ds, "i")[1])
    with pytest.raises(errors.ArgumentError, match="missing: no column 'j'"):
        read_sql("t", path, missing={"j": 0})


@pytest.mark.parametrize("rows_per_split", [None, 100])
@pytest.mark.parametrize("what", ["t", "SELECT * FROM t"])
def test_rows_with_a_null_are_left_out_one_by_one(tmp_path, rows_per_split, what):
    path = table(tmp_path, "INTEGER", [None if k in (3, 995) else k for k in range(1000)])
    ds = read_sql(what, path, index="n", rows_per_split=rows_per_split).with_options(Options(on_error="skip"))
    iterator = iter(ds)
    assert given(iterator, "i") == [k for k in range(1000) if k not in (3, 995)]
    assert iterator.stats()["skipped_by_file"] == {path: 2}


def test_dtypes_are_as_given(tmp_path):
    path = table(tmp_path, "TEXT", ["2024-01-01", "2024-01-02"])
    ds = read_sql("SELECT n, i AS day, n AS x FROM t", path, dtypes={"day": "datetime64[D]", "x": "float32", "n": str})
    assert [(str(row["n"]), row["day"], row["x"].dtype) for row in ds] == [
        ("0", np.datetime64("2024-01-01"), np.float32),
        ("1", np.datetime64("2024-01-02"), np.float32),
    ]
    assert ds.element_spec["day"].dtype == "datetime64[D]"
    with pytest.raises(errors.FileError, match=r"'i' has '2024-01-01' in row 0, and expected int64.*dtypes=\{'i'"):
        list(read_sql("t", path, dtypes={"i": "int64"}))
    with pytest.raises(errors.ArgumentError, match="dtypes: no column 'k'; there are 'n', 'i'"):
        read_sql("t", path, dtypes={"k": "int64"})
    with pytest.raises(errors.ArgumentError, match="dtypes: 'int65' for 'i' is not a dtype"):
        read_sql("t", path, dtypes={"i": "int65"})


@pytest.mark.parametrize(
    ("declared", "values", "said"),
    [
        ("INTEGER", [1, 2, "three"], r"column 'i' has 'three' in row 2, and expected int64"),
        ("INTEGER", [1, 2.5], r"column 'i' has 2.5 in row 1, and expected int64"),
        ("DATE", ["2024-01-01", "yesterday"], r"column 'i' has 'yesterday' in row 1, and expected date32"),
        (
            "DATETIME",
            [1_700_000_000],
            r"column 'i' has 1700000000 in row 0, and expected timestamp.*is not a timestamp",
        ),
        ("TIME", ["25:00"], r"column 'i' has '25:00' in row 0, and expected duration"),
        ("", [1] * 1000 + ["x"], r"column 'i' has 'x' in row 1000, and expected int64"),
        ("", [None] * 1000 + ["x"], r"has 'x' in row 1000, and the first rows have nothing but nulls.*dtypes="),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path, declared, values, said):
    path = table(tmp_path, declared, values)
    with pytest.raises(errors.FileError, match=said) as caught:
        list(read_sql("t", path))
    assert f"{path} table 't', rowid of any value" in str(caught.value)


def test_first_rows_of_several_types(tmp_path):
    path = table(tmp_path, "", [1, "a"])
    with pytest.raises(errors.FileError, match=r"'i' holds int and str, which have no common dtype.*leave it"):
        read_sql("t", path)
    assert given(read_sql("t", path, columns=["n"]), "n") == [0, 1]


# --- what is asked for and is not there ---


def test_missing_tables_and_columns(tmp_path):
    path = table(tmp_path, "INTEGER", [1])
    with pytest.raises(errors.FileError, match=r"t\.db: no table 'tt'; there are the tables 't'.*begins with SELECT"):
        read_sql("tt", path)
    with pytest.raises(errors.FileError, match="no such column: nope"):
        read_sql("SELECT nope FROM t", path)
    with pytest.raises(errors.ArgumentError, match="no column 'j'; there are 'n', 'i'"):
        read_sql("t", path, columns=["j"])
    with pytest.raises(errors.ArgumentError, match="no index column 'j'; there are 'n', 'i'"):
        read_sql("t", path, "j")
    with pytest.raises(errors.FileError, match=r"none\.db: not found"):
        read_sql("t", tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(errors.FileError, match=r"none\.db: not found"):
        read_sql("t", "sqlite:///none.db?timeout=3")
    (tmp_path / "no.db").write_text("no database at all, but text that is long enough" * 9)
    with pytest.raises(errors.FileError, match=r"no\.db: cannot be read: file is not a database"):
        read_sql("t", tmp_path / "no.db")
    database(path, "CREATE VIEW v AS SELECT * FROM t")
    for option in ({"num_splits": 2}, {"rows_per_split": 2}, {"limits": (1, 2)}):
        with pytest.raises(errors.ArgumentError, match=f"{next(iter(option))} needs an index column.*give index="):
            read_sql("v", path, **option)
    with pytest.raises(errors.ArgumentError, match="table 'v' has no rowid"):
        read_sql("v", path, "rowid")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_splits": 0}, "num_splits is 0; give 1 or more"),
        ({"rows_per_split": 1.5}, "rows_per_split is 1.5; give a whole number"),
        ({"num_splits": 2, "rows_per_split": 2}, "are both given; give one"),
        ({"limits": 3}, r"limits is 3; give the smallest and the largest: \(low, high\)"),
        ({"limits": (None, 3)}, "neither value may be None"),
    ],
)
def test_invalid_options_are_refused(tmp_path, options, said):
    with pytest.raises(errors.ArgumentError, match=said):
        read_sql("t", table(tmp_path, "INTEGER", [1]), "i", **options)


@pytest.mark.parametrize(
    ("package", "url", "message"),
    [
        ("sqlalchemy", "postgresql+psycopg://h/d", r"pip install 'daskdist\[sql\]'"),
        ("psycopg", "postgresql+psycopg://h/d", r"the driver of 'postgresql\+psycopg' is not installed"),
    ],
)
def test_missing_packages_are_named(monkeypatch, package, url, message):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(errors.MissingPackageError, match=message):
        read_sql("t", url)


def test_invalid_connections_are_refused(tmp_path):
    import sqlalchemy

    engine = sqlalchemy.create_engine("postgresql+psycopg://me:opensesame@h/d")
    with pytest.raises(errors.ArgumentError, match=r"of type Engine, which cannot be sent.*URL as text") as caught:
        read_sql("t", engine)
    assert "opensesame" not in str(caught.value)
    with pytest.raises(errors.ArgumentError, match="in memory is visible only to its connection"):
        read_sql("t", "sqlite://")
    with pytest.raises(errors.ArgumentError, match="in memory is visible only to its connection"):
        read_sql("t", ":memory:")
    with pytest.raises(errors.ArgumentError, match="knows no database 'nosuch'"):
        read_sql("t", "nosuch://h/d")
    with pytest.raises(errors.ArgumentError, match=r"the driver of 'postgresql\+nodriver' is not|no database 'postgre"):
        read_sql("t", "postgresql+nodriver://h/d")
    with pytest.raises(errors.ArgumentError, match="is no SQLAlchemy URL") as caught:
        read_sql("t", "postgresql://me:open@sesame@h:port/d")
    assert "sesame" not in str(caught.value)
    with pytest.raises(errors.ArgumentError, match=r"engine_options: .*strange"):
        read_sql("t", table(tmp_path, "INTEGER", [1]), engine_options={"strange": 1})
    with pytest.raises(errors.ArgumentError, match="give the name of a table, or a query"):
        read_sql("", "sqlite:///a.db")
    with pytest.raises(errors.FileError, match="can only read local files"):
        Sql("t").spec("memory://a.db")


def test_a_table_that_changed_since(tmp_path):
    path = table(tmp_path, "INTEGER", [1, 2])
    ds = read_sql("t", path)
    database(path, "DROP TABLE t", "CREATE TABLE t (n TEXT, i TEXT)")
    with pytest.raises(errors.FileError, match=r"its elements are .* those of"):
        list(ds)
    ds = read_sql("t", path)
    database(path, "DROP TABLE t")
    with pytest.raises(errors.FileError, match="no table 't'; there are no tables"):
        list(ds)
    database(path, "CREATE TABLE t (n TEXT, i TEXT)")
    database(path, "INSERT INTO t VALUES ('a', 'b')")
    ds = read_sql("t", path)
    splits = list(node_of(ds).splits())
    database(path, "DROP TABLE t")
    with pytest.raises(errors.FileError, match=r"table 't', rowid of any value: cannot be read: no such table"):
        node_of(ds).format.read(splits[0])


# --- secrets ---


def test_secrets_are_not_shown():
    url = "postgresql+psycopg://me:open%40sesame@host/db?sslpassword=hushhush&sslmode=require"
    login = Login(url, {"connect_args": {"password": "whisper", "application_name": "a"}})
    assert login.shown == "postgresql+psycopg://me:***@host/db?sslmode=require&sslpassword=***"
    form = Sql("t", login=login)
    for secret in ("open", "sesame", "hushhush", "whisper"):
        assert secret not in repr(form)
        assert secret not in repr(login)
        assert secret not in login.without_secrets("said: open@sesame hushhush whisper")
    other = Login(url.replace("sesame", "door"), {"connect_args": {"password": "shout", "application_name": "a"}})
    assert tokenize(login, ensure_deterministic=True) == tokenize(other, ensure_deterministic=True)
    assert tokenize(login) != tokenize(Login(url, {"connect_args": {"application_name": "b"}}))
    assert pickle.loads(pickle.dumps(form)).login.url == url


def test_an_unreachable_server_is_an_error_without_passwords():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(errors.FileError, match=rf"//\*\*\*@127.0.0.1:{port}/db: cannot be read: .*refused") as caught:
        read_sql("t", f"postgresql+psycopg://me:opensesame@127.0.0.1:{port}/db")
    assert "opensesame" not in f"{caught.value} {caught.value.__cause__}"


def test_a_server_that_does_not_answer():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        start = time.perf_counter()
        with (
            dask.config.set({"daskdist.timeouts.connect": 2}),
            pytest.raises(errors.FileError, match="timeout"),
        ):
            read_sql("t", f"postgresql+psycopg://me:pw@127.0.0.1:{silent.getsockname()[1]}/slow")
        assert time.perf_counter() - start < 25


# --- PostgreSQL ---


def _binary(name):
    actual = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return actual or (str(places[-1]) if places else None)


class Server:
    """A PostgreSQL server for these tests, with its data and its socket in a directory."""

    def __init__(self, directory, user):
        self.directory, self.user, self.process = directory, user, None
        (directory / "password").write_text("open sesame")
        for path in (directory, directory / "password"):
            if user:
                shutil.chown(path, user)
        self._run("initdb", "-U", "me", "--pwfile", directory / "password", "-A", "scram-sha-256", "-N", "-E", "UTF8")
        self.start()

    def _command(self, name, *args):
        return [_binary(name), "-D", self.directory / "data", *map(str, args)]

    def _run(self, name, *args):
        done = subprocess.run(self._command(name, *args), user=self.user, capture_output=True, cwd="/", timeout=60)
        if done.returncode:
            pytest.skip(f"PostgreSQL: {name} says {done.stderr.decode()[:300]}")

    def start(self):
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.directory}", "-F"]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command("postgres", *options), user=self.user, stdout=log, stderr=log, cwd="/"
            )
        for _ in range(200):
            if self.process.poll() is not None:
                pytest.skip(f"PostgreSQL does not start: {(self.directory / 'log').read_text()[-300:]}")
            if (self.directory / ".s.PGSQL.5432.lock").exists():
                try:
                    return self.run("SELECT 1")
                except self.driver.OperationalError:
                    pass
            time.sleep(0.05)
        pytest.skip("PostgreSQL does not answer")
        return None

    def stop(self):
        # On SIGINT, the server ends its sessions and then itself.
        self.process.send_signal(2)
        self.process.wait(30)

    @property
    def driver(self):
        return pytest.importorskip("psycopg")

    @property
    def url(self):
        return f"postgresql+psycopg://me:open%20sesame@/postgres?host={self.directory}"

    def run(self, *statements):
        with self.driver.connect(host=str(self.directory), user="me", password="open sesame", dbname="postgres") as db:
            for statement in statements:
                actual = db.execute(statement)
            return actual.fetchall() if actual.description else None


@pytest.fixture(scope="module")
def server():
    for name in ("initdb", "postgres"):
        if _binary(name) is None:
            pytest.skip(f"PostgreSQL is not installed: no {name}")
    # The server does not run as root, so it needs a directory that other users can read.
    with tempfile.TemporaryDirectory(prefix="daskdist-") as directory:
        made = Server(Path(directory), "postgres" if os.getuid() == 0 else None)
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture
def rows(server):
    """Create a table of 1,000 rows."""
    server.run(
        "DROP TABLE IF EXISTS rows",
        "CREATE TABLE rows (id int PRIMARY KEY, at timestamptz NOT NULL, word text, x real, day date)",
        "INSERT INTO rows SELECT k, '2024-01-01T00:00Z'::timestamptz + k * interval '1 hour', 'w' || k % 50, k / 4.0,"
        " CASE WHEN k % 10 > 0 THEN date '2024-01-01' + k END FROM generate_series(0, 999) k",
    )
    return server


@pytest.mark.parametrize("index", ["id", "at", "word", "x", "day", None])
@pytest.mark.parametrize("num_splits", [1, 7])
def test_postgresql_every_row_once(rows, index, num_splits):
    ds = read_sql("rows", rows.url, index, num_splits=num_splits)
    nulls = " NULLS LAST" if index == "day" else ""
    expected = [id for (id,) in rows.run(f"SELECT id FROM rows ORDER BY {index or 'id'}{nulls}, id")]
    assert given(ds, "id") == expected
    assert len(labels(ds)) == num_splits + (index == "day")
    first = next(iter(read_sql("public.rows", rows.url)))
    assert (first["id"].dtype, first["x"].dtype, first["at"]) == (np.int32, np.float32, np.datetime64("2024-01-01"))


def test_postgresql_times_are_limits_in_any_zone(rows):
    zone = datetime.timezone(datetime.timedelta(hours=5))
    limits = datetime.datetime(2024, 1, 1, 7, tzinfo=zone), datetime.datetime(2024, 1, 1, 9, tzinfo=zone)
    assert given(read_sql("rows", rows.url, "at", limits=limits, num_splits=2), "id") == [2, 3, 4]
    days = datetime.date(2024, 1, 2), datetime.date(2024, 1, 4)
    assert given(read_sql("rows", rows.url, "day", limits=days), "id") == [1, 2, 3]
    with pytest.raises(errors.FileError, match=r"rows.*|operator does not exist"):
        list(read_sql("rows", rows.url, "id", limits=("a", "b")))


TYPES = {
    "smallint": ("7", np.int16(7)),
    "int": ("7", np.int32(7)),
    "bigint": ("9223372036854775807", np.int64(2**63 - 1)),
    "real": ("0.1", np.float32(0.1)),
    "double precision": ("'NaN'", np.float64(np.nan)),
    "numeric(12, 3)": ("123456789.125", np.float64(123456789.125)),
    "numeric": ("'NaN'", np.float64(np.nan)),
    "boolean": ("true", np.bool_(True)),
    "text": ("'ü%'", "ü%"),
    "char(3)": ("'a'", "a  "),
    "uuid": ("'6f1d2c1e-0000-4000-8000-000000000001'", "6f1d2c1e-0000-4000-8000-000000000001"),
    "jsonb": ("""'{"a": [1, null]}'""", '{"a": [1, null]}'),
    "json": ("""'[1]'""", "[1]"),
    "xml": ("'<a/>'", "<a/>"),
    "mood": ("'glad'", "glad"),
    "positive": ("3", np.int32(3)),
    "date": ("'2024-02-29'", np.datetime64("2024-02-29")),
    "timestamp": ("'2024-02-29 01:02:03.000004'", np.datetime64("2024-02-29T01:02:03.000004")),
    "timestamptz": ("'2024-02-29 01:00+01'", np.datetime64("2024-02-29T00:00:00.000000")),
    "time": ("'01:00:00.5'", np.timedelta64(3_600_500_000, "us")),
    "interval": ("'1 day 1 second'", np.timedelta64(86_401_000_000, "us")),
    "int[]": ("'{1,2}'", np.int32([1, 2])),
    "numeric[]": ("'{1.5}'", np.array([1.5])),
}


@pytest.mark.parametrize("end", [*ENDS, "; /* a /* nested; */ comment */"])
@pytest.mark.parametrize(("query", "text"), [*QUERIES, ("SELECT 1 AS i, $a$it's; --$a$ AS s", "it's; --")])
def test_queries_of_postgresql_end_in_comments_and_semicolons(server, query, text, end):
    for index in (None, "i"):
        (row,) = read_sql(query + end, server.url, index)
        assert (int(row["i"]), str(row["s"])) == (1, text)


@pytest.fixture(scope="module")
def types(server):
    server.run("CREATE TYPE mood AS ENUM ('sad', 'glad')", "CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    names = [f"c{k}" for k in range(len(TYPES))]
    columns = ", ".join(f"{name} {kind}" for name, kind in zip(names, TYPES, strict=True))
    server.run(f"CREATE TABLE types (b bytea, {columns})")
    server.run("INSERT INTO types VALUES ('\\x0001', " + ", ".join(value for value, _ in TYPES.values()) + ")")
    return server


@pytest.mark.parametrize("what", ["types", "SELECT * FROM types"])
def test_postgresql_types(types, what):
    ds = read_sql(what, types.url)
    (row,) = ds
    assert bytes(row["b"]) == b"\x00\x01"
    for k, (kind, (_, expected)) in enumerate(TYPES.items()):
        actual, spec = row[f"c{k}"], ds.element_spec[f"c{k}"]
        if isinstance(expected, str):
            assert (str(actual), spec.dtype) == (expected, TEXT), kind
        else:
            np.testing.assert_array_equal(actual, expected, kind)
            assert actual.dtype == expected.dtype == spec.dtype, kind
    assert isinstance(next(iter(ds.ragged_batch(1)))["c21"], Ragged)


def test_postgresql_types_are_known_without_rows(server):
    ds = read_sql("SELECT 1::smallint AS a, 'x'::text AS b, now() AS c WHERE false", server.url)
    assert [ds.element_spec[name].dtype for name in "abc"] == [np.int16, TEXT, np.dtype("datetime64[us]")]
    assert list(ds) == []
    with pytest.raises(errors.FileError, match=r"two columns called 'n'; rename one with AS"):
        read_sql("SELECT 1 AS n, 2 AS n", server.url)
    with pytest.raises(errors.FileError, match=r"column 'p' holds .*leave it out"):
        read_sql("SELECT int4range(1, 5) AS p", server.url)


def test_postgresql_order_is_that_of_the_data(server):
    # PostgreSQL moves rows that are changed, and without ORDER BY their order then changes.
    server.run("CREATE TABLE moved AS SELECT k % 3 AS a, k AS b FROM generate_series(0, 99) k")
    ds = read_sql("moved", server.url)
    by_a = read_sql("moved", server.url, "a")
    before = given(ds, "b"), given(by_a, "b")
    server.run("UPDATE moved SET b = b WHERE b < 50")
    assert [b for (b,) in server.run("SELECT b FROM moved")] != list(range(100))
    assert (given(ds, "b"), given(by_a, "b")) == before
    assert before[1] == sorted(range(100), key=lambda b: (b % 3, b))


def test_postgresql_rows_come_by_a_cursor_and_no_connection_stays(rows):
    # Earlier tests may have left iterators.
    gc.collect()
    ds = read_sql("SELECT k, (SELECT count(*) FROM pg_cursors) AS c FROM generate_series(1, 20000) k", rows.url)
    assert {int(row["c"]) for row in ds} == {1}
    assert len(list(read_sql("rows", rows.url, num_splits=5))) == 1000
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    eventually(lambda: rows.run(sessions) == [(1,)], within_s=2.5)


def test_postgresql_passwords_are_not_shown(rows):
    ds = read_sql("rows", rows.url, num_splits=3).batch(2)
    shown = f"{ds!r} {node_of(ds)} {node_of(ds).source!r} {ds.explain()}"
    assert "sesame" not in shown
    assert "://***@/postgres" in f"{node_of(ds).source}"
    assert all("sesame" not in split.label + split.path for split in node_of(ds).source.splits())
    with pytest.raises(errors.FileError, match="password authentication failed") as caught:
        read_sql("rows", rows.url.replace("open%20sesame", "shut%20sesame"))
    assert "sesame" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_postgresql_a_statement_that_fails_in_the_middle(rows):
    query = "SELECT k, 1 / (15000 - k) AS x FROM generate_series(1, 20000) k"
    ds = read_sql(query, rows.url)
    with pytest.raises(errors.FileError, match=r"query 'SELECT k, 1 / .*cannot be read: division by zero"):
        list(ds)


def test_postgresql_a_session_that_ends_in_the_middle(rows):
    end = "CASE WHEN k = 15000 THEN pg_terminate_backend(pg_backend_pid()) END"
    ds = read_sql(f"SELECT k, {end} AS x FROM generate_series(1, 20000) k", rows.url, dtypes={"x": "float64"})
    with pytest.raises(errors.FileError, match=r"query 'SELECT k, CASE.*cannot be read: .*terminat"):
        list(ds)


def test_postgresql_a_server_that_stops(rows):
    ds = read_sql("rows", rows.url, num_splits=3)
    splits = list(node_of(ds).splits())
    assert len(node_of(ds).format.read(splits[0])) == 333
    rows.stop()
    try:
        with pytest.raises(errors.FileError, match=r"table 'rows', id from 333 below 666: cannot be read"):
            node_of(ds).format.read(splits[1])
    finally:
        rows.start()
    assert len(node_of(ds).format.read(splits[1])) == 333


@pytest.mark.cluster
def test_postgresql_on_a_cluster(rows, on_cluster):
    ds = read_sql("rows", rows.url, columns="id", num_splits=6).batch(100)
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds)]
    assert sorted(int(x) for step in steps for part in step for x in part) == list(range(1000))


@pytest.mark.cluster
def test_sqlite_on_a_cluster(tmp_path, on_cluster):
    path = table(tmp_path, "INTEGER", list(range(50)))
    ds = read_sql("t", path, columns="i", rows_per_split=10).batch(10)
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds)]
    assert sorted(int(x) for step in steps for part in step for x in part) == list(range(50))


# --- TensorFlow's spelling ---


@pytest.fixture
def tensorflow_table(tmp_path):
    rows = [(1, 1.5, "a", b"\x00\x01"), (None, None, None, None), (300, 2.0, "17", b"z"), (-1, 0, "", b"")]
    return database(tmp_path / "tf.db", "CREATE TABLE t (i INTEGER, r REAL, s TEXT, b BLOB)", t=rows)


def test_sql_dataset_as_tensorflow_has_it(tensorflow_table):
    # The expected values are TensorFlow 2.21's for the same table.
    ds = experimental.SqlDataset(
        "sqlite", tensorflow_table, "SELECT i,r,s,b FROM t", ("int64", "float64", bytes, bytes)
    )
    assert [(int(i), float(r), bytes(s), bytes(b)) for i, r, s, b in ds] == [
        (1, 1.5, b"a", b"\x00\x01"),
        (0, 0.0, b"", b""),
        (300, 2.0, b"17", b"z"),
        (-1, 0.0, b"", b""),
    ]
    as_text = experimental.SqlDataset("sqlite", tensorflow_table, "SELECT i FROM t", (str,))
    assert [str(i) for (i,) in as_text] == ["1", "", "300", "-1"]
    flags = experimental.SqlDataset("sqlite", tensorflow_table, "SELECT i FROM t", (bool,))
    assert [bool(i) for (i,) in flags] == [True, False, True, True]
    small = experimental.SqlDataset("sqlite", tensorflow_table, "SELECT i FROM t WHERE i < 9 ORDER BY i", ("int8",))
    assert small.element_spec == (TensorSpec((), "int8"),)
    assert [int(i) for (i,) in small] == [-1, 1]


def test_sql_dataset_wraps_no_value(tensorflow_table):
    ds = experimental.SqlDataset("sqlite", tensorflow_table, "SELECT i FROM t", ("int8",))
    with pytest.raises(errors.FileError, match="column 'i' has 300 in row 2, and expected int8"):
        list(ds)
    with pytest.raises(errors.ArgumentError, match=r"2 columns, and output_types has 1"):
        experimental.SqlDataset("sqlite", tensorflow_table, "SELECT i, r FROM t", ("int8",))
    with pytest.raises(errors.ArgumentError, match=r"driver_name is 'postgres'; give 'sqlite'.*read_sql"):
        experimental.SqlDataset("postgres", tensorflow_table, "SELECT i FROM t", ("int8",))


def test_decimals_are_the_nearest_floats(rows):
    ds = read_sql("SELECT 0.1::numeric(40, 30) AS d, NULL::numeric AS n", rows.url, missing={"n": -1.0})
    (row,) = ds
    assert row["d"] == float(Decimal("0.1"))
    assert row["n"] == -1.0
