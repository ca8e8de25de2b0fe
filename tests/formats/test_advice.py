"""The advice in errors of CSV, JSON and SQL: following it reads the rows."""

from __future__ import annotations

import ast
import re
import sqlite3
from contextlib import closing

import dask
import pytest

import daskdist
from daskdist import Options, errors

MANY = "1\n" * 50

# The content of a file, options, a pattern of the advice with a group for each alternative of an option and its value,
# and the number of rows that are read with it.
CSV = {
    "text among numbers": (f"a\n{MANY}x\n", {}, r"give (dtypes=\{'a': 'str'\})", 51),
    "a float among integers": (f"a\n{MANY}1.5\n", {}, r"give (dtypes=\{'a': 'float64'\})", 51),
    "digits": (f"a\n{MANY}007\n", {}, r"give (dtypes=\{'a': 'str'\}) to keep .*, or (\{'a': 'int64'\}) for", 51),
    "a large integer": (f"a\n{MANY}{2**63}\n", {}, r"give (dtypes=\{'a': '\w+'\})", 51),
    "bools": ("a\n" + "true\n" * 51 + "1\n", {}, r"give (dtypes=\{'a': 'bool'\}) .*, or (\{'a': 'str'\})", 52),
    "a missing integer": (
        "b,a\n" + "1,1\n" * 50 + "1,\n", {}, r"give (missing=\{'a': 0\}) as .*, or (dtypes=\{'a': 'float64'\})", 51,
    ),
    "a missing bool": ("b,a\n" + "1,true\n" * 50 + "1,\n", {}, r"give (missing=\{'a': False\}) as", 51),
    "missing text": ("b,a\n" + "1,x\n" * 50 + "1,\n", {}, r"give (missing=\{'a': ''\}) as", 51),
    "missing bytes": ("b,a\n1,x\n1,\n", {"dtypes": {"a": "bytes"}}, r"give (missing=\{'a': b''\}) as", 2),
    "bytes": (b"a\n" + b"x\n" * 50 + b"\xff\n", {}, r"(dtypes=\{'a': \"bytes\"\})", 51),
    "bytes in the first row": (b"a\n\xff\n", {}, r"(dtypes=\{'a': \"bytes\"\})", 1),
    "an open quote": (
        'a,b\n1,"x\n2,y"\n', {"newlines_in_values": False}, r"give (newlines_in_values=True), or (quote=None)", None,
    ),
    "a comment": ("# made today\na,b\n1,2\n", {}, r"give (comment='#')", 1),
    "two names": ("a,b,a,a\n1,2,3,4\n", {}, r"(new_names=\['a', 'b', 'a_2', 'a_3'\])", 1),
    "two names of which one is taken": ("a,a_2,a\n1,2,3\n", {}, r"(new_names=\['a', 'a_2', 'a_3'\])", 1),
    "delimiters at the end": ("a,b\n1,2,\n", {}, r"give (new_names=\['a', 'b', 'c2'\])", 1),
    "a title": ("Report\na,b\n1,2\n", {}, r"skip it by (comment='Report')", 1),
}  # fmt: skip


def followed(read, options, pattern):
    """Return the numbers of rows that are read with each alternative of the advice in the error of a reader."""
    with pytest.raises(errors.FileError) as raised:
        list(read(**options))
    advice = re.search(pattern, str(raised.value))
    assert advice is not None, str(raised.value)
    name, counts = "", []
    for alternative in advice.groups():
        # A second value of an option may come without its name.
        name, value = alternative.split("=", 1) if "=" in alternative else (name, alternative)
        counts.append(len(list(read(**{**options, name: ast.literal_eval(value)}))))
    return counts


@pytest.mark.parametrize("name", CSV)
def test_csv(tmp_path, name):
    content, options, pattern, num_rows = CSV[name]
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)

    def read(**options):
        return daskdist.read_csv(path, **{"sample_bytes": 20, **options})

    counts = followed(read, options, pattern)
    if num_rows is not None:
        assert set(counts) == {num_rows}


def test_rows_that_are_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n3\n4,5\n")
    with pytest.raises(errors.FileError, match=r'leave such rows out with Options\(on_error="skip"\)'):
        list(daskdist.read_csv(path))
    assert len(list(daskdist.read_csv(path).with_options(Options(on_error="skip")))) == 2


def test_columns_that_all_files_have(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("a,c\n3,4\n")
    with pytest.raises(errors.FileError, match=r"name the columns that all files have with columns=\[\.\.\.\]"):
        list(daskdist.read_csv(tmp_path))
    assert [int(row["a"]) for row in daskdist.read_csv(tmp_path, columns=["a"])] == [1, 3]


def test_files_without_rows(tmp_path):
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(errors.FileError, match=r"give header=\[\.\.\.\] and dtypes=\{\.\.\.\}"):
        daskdist.read_csv(tmp_path / "a.csv")
    assert list(daskdist.read_csv(tmp_path / "a.csv", header=["a"], dtypes={"a": "int64"})) == []


JSON = {
    "a missing text": ('{"a": "x"}\n{"b": 1}\n', {"columns": ["a"]}, r"(missing=\{'a': ''\})", 2),
    "a missing bool": ('{"a": true}\n{"a": null}\n', {}, r"(missing=\{'a': False\})", 2),
    "text that is not UTF-8": (b'{"a": 1}\n{"a": 2, "b": "\xff"}\n', {}, None, None),
}


@pytest.mark.parametrize("name", JSON)
def test_json(tmp_path, name):
    content, options, pattern, num_rows = JSON[name]
    path = tmp_path / "a.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if pattern is None:
        with pytest.raises(errors.FileError, match=r"its line 1, b'.*xff.*: it is not JSON: 'utf-8' codec"):
            list(daskdist.read_json(path))
        return
    assert followed(lambda **options: daskdist.read_json(path, **options), options, pattern) == [num_rows]


def test_json_columns_of_several_types(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1, "b": 2}\n{"a": "x", "b": 3}\n')
    with pytest.raises(errors.FileError, match=r"or select other columns with columns=\[\.\.\.\]"):
        list(daskdist.read_json(path))
    assert [int(row["b"]) for row in daskdist.read_json(path, columns=["b"])] == [2, 3]


@pytest.mark.parametrize("split_bytes", [100_000, 10_000_000])
def test_long_text_in_first_records(tmp_path, split_bytes):
    text = "word " * 60_000
    (tmp_path / "a.json").write_text(f'{{"a": "{text}", "{text}": 1}}\n{{"a": "y", "{text}": 2}}\n')
    (tmp_path / "a.txt").write_text(f"{text}\ny\n")
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        assert [str(row["a"]) for row in daskdist.read_json(tmp_path / "a.json", sample_bytes=10)] == [text, "y"]
        assert [str(line) for line in daskdist.read_text(tmp_path / "a.txt")] == [text, "y"]


def test_sql(tmp_path):
    path = str(tmp_path / "a.db")
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (i INTEGER, s TEXT, v)")
        db.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, "a", 1), (None, None, "x")])
        db.commit()
    read = daskdist.read_sql
    assert followed(lambda **options: read("t", path, **options), {"columns": ["s"]}, r"(missing=\{'s': ''\})") == [2]
    with pytest.raises(errors.FileError, match=r"column 'v' holds int and str.* as in SELECT CAST"):
        list(read("t", path, columns=["v"]))
    cast = read("SELECT i, CAST(v AS TEXT) AS v FROM t", path, columns=["v"])
    assert [str(row["v"]) for row in cast] == ["1", "x"]
