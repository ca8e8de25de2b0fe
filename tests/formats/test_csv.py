"""Delimited text: boundaries of rows, types of columns, and errors that are reported or skipped."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import logging
import random
import re
from pathlib import Path

import dask
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
from compressed import compressed_files
from conftest import TESTS

import daskdist
from daskdist import Options, TensorSpec, errors, read_csv, read_files
from daskdist.core.dataset_base import node_of
from daskdist.formats.csv.csv_format import Csv, Schema
from daskdist.formats.csv.dialect import Dialect
from daskdist.formats.csv.fields import fields_in
from daskdist.formats.csv.number_text import may_hold_number_text, number_texts
from daskdist.formats.csv.quotes import BYTE_ORDER_MARK, Quotes
from daskdist.storage.byte_ranges import BrokenRecord
from daskdist.testing import FormatLaws

TEXT = np.dtypes.StringDType()
DATA = TESTS / "data"
BIRDS = DATA / "birdstrikes.csv"
WEATHER = DATA / "seattle-weather.csv"


def write(tmp_path, content, name="a.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows_of(ds):
    """Return the rows of a dataset of dicts of numbers and text, as tuples of Python values."""
    return [tuple(value if isinstance(value, (str, bytes)) else value.item() for value in row.values()) for row in ds]


# --- laws ---


def text_of(words):
    column = np.array(words, TEXT)
    return [column[k] for k in range(len(words))]


class TestCsv(FormatLaws):
    split_bytes = 100
    dialect = Dialect()
    schema = Schema(("n", "word", "when", "part"), ("int64", "str", "datetime64[s]", "float64"))
    words = ("a", "two\nlines", 'a "quote"', "", "ü", 'stray"', "x,y", "\r\n", "z" * 30)

    def make_format(self):
        # Python's writer does not quote empty text.
        return Csv(dialect=self.dialect, schema=self.schema, missing={"word": ""})

    def write(self, directory):
        written = {}
        for number, num_rows in enumerate([20, 0, 3]):
            path = directory / f"{number}.csv"
            n = np.arange(num_rows) + 10 * number
            when = np.datetime64("2024-02-29T12:00:00") + n
            part = np.where(n % 3 == 0, np.nan, n / 8)
            words = [self.words[k % len(self.words)] for k in n]
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if self.dialect.has_header:
                    writer.writerow(["n", "word", "when", "part"])
                for row in zip(n, words, when, part, strict=True):
                    writer.writerow(["" if value != value else value for value in row])
            written[str(path)] = [
                dict(zip(("n", "word", "when", "part"), row, strict=True))
                for row in zip(n, text_of(words), when, part, strict=True)
            ]
        return written


class TestCsvOfNames(TestCsv):
    dialect = Dialect(has_header=False, names=("n", "word", "when", "part"))


class TestCsvWithoutNewlines(TestCsv):
    dialect = Dialect(newlines_in_values=False)
    words = ("a", "", "x,y", 'a "quote"')


class TestCsvCompressed(TestCsv):
    split_bytes = 400

    def write(self, directory):
        return compressed_files(super().write(directory), "gz", gzip.compress)


# --- where rows begin ---

TOKENS = [b'"', b'"', b",", b"\n", b"\r\n", b"\r", b"a", b'""', b'\n"', b',"', b'",', BYTE_ORDER_MARK]


def rows_by_pyarrow(data):
    """Return the rows that pyarrow finds in some bytes; it reports each of them as having too few fields."""
    rows = []
    if data not in (b"", BYTE_ORDER_MARK):
        names = [str(k) for k in range(60)]
        pc.read_csv(
            pa.BufferReader(data),
            pc.ReadOptions(use_threads=False, column_names=names, block_size=len(data) + 1),
            pc.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda row: rows.append(row.text) or "skip"),
        )
    return rows


def test_rows_are_cut_as_they_are_parsed():
    num_broken = 0
    for seed in range(300):
        draws = random.Random(seed)
        data = b"".join(draws.choice(TOKENS) for _ in range(draws.randrange(1, 24)))
        framing = Quotes()
        try:
            framing.boundary(data, len(data), is_end=True)
        except BrokenRecord as error:
            num_broken += 1
            data = data[: error.offset]
        whole = rows_by_pyarrow(data)
        assert [data[a:b].decode() for a, b in zip(*framing.rows(data), strict=True)] == whole
        cuts = sorted({framing.boundary(data, at, is_end=True) for at in range(len(data) + 1)})
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        assert [row for part in parts for row in rows_by_pyarrow(part)] == whole, data
        for at in range(1, len(data)):
            actual = framing.boundary(data[: at + 3], at, is_end=False)
            # An error that is found before the end of the data is known is also found with all data.
            assert actual in (None, framing.boundary(data, at, is_end=True)), data
    assert 0 < num_broken < 300


def test_files_are_read_as_python_reads_them_whatever_the_splits(tmp_path):
    for seed in range(8):
        draws = random.Random(seed)
        rows = [
            ["".join(draws.choices(['"', ",", "\n", "a", "ü", "\r", " "], k=draws.randrange(5))) for _ in range(2)]
            for _ in range(40)
        ]
        rows = [[f"x{a}", b] for a, b in rows]
        made = io.StringIO(newline="")
        csv.writer(made).writerows([["a", "b"], *rows])
        path = write(tmp_path, made.getvalue())
        for split_bytes in (1, 13, 200, 10_000):
            with dask.config.set({"daskdist.split-bytes": split_bytes}):
                ds = read_csv(path, dtypes={"a": "str", "b": "str"}, missing={"b": ""})
                assert rows_of(ds) == [tuple(row) for row in rows]


def test_stray_quotes_are_text(tmp_path):
    content = 'size,note\n5\'10",tall\n"6\'",say "hi"\n"a"b,"c\nd"\n'
    path = write(tmp_path, content)
    expected = [tuple(row) for row in csv.reader(io.StringIO(content, newline=""))][1:]
    for split_bytes in (1, 20, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            assert rows_of(read_csv(path)) == expected
    assert rows_of(read_csv(write(tmp_path, 'a,b\n"x,y\n', "b.csv"), quote=None)) == [('"x', "y")]


@pytest.mark.parametrize("split_bytes", [1, 6, 1000])
def test_newlines_of_all_kinds_and_blank_lines(tmp_path, split_bytes):
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        for content in (
            "a,b\n1,2\n3,4\n",
            "a,b\n1,2\n3,4",
            "a,b\r\n1,2\r\n3,4\r\n",
            "a,b\r1,2\r3,4\r",
            "\n\r\na,b\n\n1,2\n\n\n3,4\n\n",
            "\ufeffa,b\n1,2\n3,4\n",
            '\ufeff"a",b\n1,2\n3,4\n',
        ):
            ds = read_csv(write(tmp_path, content))
            assert [list(row) for row in ds] == [["a", "b"]] * 2, content
            assert rows_of(ds) == [(1, 2), (3, 4)], content


def test_a_byte_order_mark_within_is_text(tmp_path):
    path = write(tmp_path, "a,b\n1,x\n\ufeff2,y\n\ufeff3,z\n")
    for split_bytes in (1, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            assert rows_of(read_csv(path)) == [("1", "x"), ("\ufeff2", "y"), ("\ufeff3", "z")]
    # Also after the header, which is no row.
    path = write(tmp_path, '\ufeffa,b\n\ufeff2,y\n"3",z\n')
    for split_bytes in (1, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            assert rows_of(read_csv(path)) == [("\ufeff2", "y"), ("3", "z")]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_comments_end_with_any_kind_of_newline(tmp_path, end):
    lines = ["# it's", '# "', "a,b", "1,2", "3,4"]
    paths = [write(tmp_path, end.join(lines[number:]), f"{number}.csv") for number in (0, 2)]
    for split_bytes in (1, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            assert rows_of(read_csv(paths[::-1], comment="#")) == [(1, 2), (3, 4)] * 2
            assert rows_of(read_csv(paths[:1], comment="#", header=["x", "y"])) == [("a", "b"), ("1", "2"), ("3", "4")]


@pytest.mark.parametrize("split_bytes", [4, 1000])
def test_a_quote_that_is_not_closed(tmp_path, split_bytes):
    path = write(tmp_path, 'a,b\n1,2\n3,"4\n5,6\n7,8\n')
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_csv(path, dtypes={"b": "int64"})
        with pytest.raises(
            errors.FileError, match=r"at byte 8: the row b'3,\"4.*not closed before the end.*give quote=None"
        ):
            list(ds)
        kept = iter(ds.ignore_errors())
        assert rows_of(kept) == [(1, 2)]
    assert kept.stats()["num_skipped"] == 1
    assert rows_of(read_csv(path, dtypes={"a": "str"}, quote=None))[1] == ("3", '"4')
    with pytest.raises(errors.FileError, match=r"the row b'\"a,b.*not closed"):
        read_csv(write(tmp_path, '"a,b\n1,2\n', "b.csv"))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_an_unclosed_quote_is_an_error_after_a_limit(tmp_path, monkeypatch, compress):
    monkeypatch.setattr("daskdist.formats.csv.quotes._LONGEST_BYTES", 100_000)
    path = write(tmp_path, compress(b'a,b\n1,"2\n' + b"3,4\n" * 200_000))
    with dask.config.set({"daskdist.split-bytes": 10_000}):
        ds = read_csv(path, dtypes={"b": "str"}, sample_bytes=10)
        with pytest.raises(errors.FileError, match=r"not closed (within 100000 bytes|before the end)"):
            next(iter(ds))


def test_ranges_are_read_alone_without_newlines_in_values(tmp_path):
    path = write(tmp_path, 'a,b\n1,"x,y"\n2,z\n')
    assert rows_of(read_csv(path, newlines_in_values=False)) == [(1, "x,y"), (2, "z")]
    path = write(tmp_path, 'a,b\n1,"x\ny"\n2,z\n', "b.csv")
    for split_bytes in (1, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            ds = read_csv(path, newlines_in_values=False)
            with pytest.raises(errors.FileError, match=r"newline in quotes.*give newlines_in_values=True"):
                list(ds)


# --- columns ---


def test_birds(tmp_path):
    ds = read_csv(BIRDS)
    spec = ds.element_spec
    assert spec["Flight Date"] == TensorSpec((), "datetime64[D]")
    assert spec["Cost Total $"] == TensorSpec((), "int64")
    # Some values of this column are missing, so it is float64.
    assert spec["Speed IAS in knots"] == TensorSpec((), "float64")
    assert spec["Effect Amount of damage"] == TensorSpec((), TEXT)
    table = pc.read_csv(BIRDS)
    for split_bytes in ("16 MiB", "3 kB"):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            (batch,) = read_csv(BIRDS).batch(10_000)
        assert len(batch["Airport Name"]) == 1000
        assert int(batch["Cost Total $"].sum()) == 1849879
        speeds = batch["Speed IAS in knots"]
        assert (int(np.isnan(speeds).sum()), float(np.nansum(speeds))) == (122, 134948.0)
        for name in table.column_names:
            expected = table[name].fill_null(-1) if pa.types.is_integer(table[name].type) else table[name]
            actual = (
                np.where(np.isnan(batch[name]), -1, batch[name]) if name in table.column_names[-1:] else batch[name]
            )
            assert actual.tolist() == expected.to_pylist(), name


def test_weather():
    ds = read_csv(WEATHER, {"x": ["pressure", "temperature", "wind"], "when": "date"})
    assert ds.element_spec == {"x": TensorSpec((3,), "float64"), "when": TensorSpec((), "datetime64[s]")}
    with dask.config.set({"daskdist.split-bytes": "5 kB"}):
        batches = list(ds.batch(512))
    assert [len(batch["when"]) for batch in batches] == [512, 512, 512, 464]
    x = np.concatenate([batch["x"] for batch in batches])
    assert round(float(x[:, 0].sum()), 1) == 2033909.0
    when = np.concatenate([batch["when"] for batch in batches])
    assert when[0] == np.datetime64("2010-01-01T01:00:00")
    assert when[-1] == np.datetime64("2010-03-25T08:00:00")


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (["1", "-2"], "int64", [1, -2]),
        (["1", ""], "float64", [1, np.nan]),
        (["1", "NA"], "float64", [1, np.nan]),
        (["1.5", "1e400", "-inf", "nan"], "float64", [1.5, np.inf, -np.inf, np.nan]),
        (["true", "False"], "bool", [True, False]),
        (["true", '""'], TEXT, ["true", ""]),
        (["true", "1"], TEXT, ["true", "1"]),
        (["0", "False"], TEXT, ["0", "False"]),
        (["", "NA"], "float64", [np.nan, np.nan]),
        (["x", '""', "NA"], TEXT, ["x", "", "NA"]),
        (['""', '""'], TEXT, ["", ""]),
        (["2024-02-29", ""], "datetime64[D]", ["2024-02-29", "NaT"]),
        (["2024-02-29 12:30:00"], "datetime64[s]", ["2024-02-29T12:30:00"]),
        (["2024-02-29T12:30:00.25"], "datetime64[ns]", ["2024-02-29T12:30:00.25"]),
        (["2024-02-29T12:30:00+01:00"], "datetime64[s]", ["2024-02-29T11:30:00"]),
        (["12:30:00", ""], "timedelta64[s]", [45_000, "NaT"]),
        (["00:30:00"], "timedelta64[s]", [1800]),
        (["0", "-0", "-7", "10"], "int64", [0, 0, -7, 10]),
        (["0.5", "-0.5", ".5", "0e5", "1e+05", "0"], "float64", [0.5, -0.5, 0.5, 0, 1e5, 0]),
        # As numbers, these would not keep their notation.
        (["5", "01234"], TEXT, ["5", "01234"]),
        (["+15551234567", "5"], TEXT, ["+15551234567", "5"]),
        (["0x1F", "2", '""'], TEXT, ["0x1F", "2", ""]),
        (["0X1f"], TEXT, ["0X1f"]),
        (["1.5", "-007.5"], TEXT, ["1.5", "-007.5"]),
        (["+0.5", "NA"], TEXT, ["+0.5", "NA"]),
        (['"00"', "1"], TEXT, ["00", "1"]),
        ([" 01", "1"], TEXT, [" 01", "1"]),
        # As floats, two of these would be equal.
        (["18446744073709551615", "18446744073709551614"], "uint64", [2**64 - 1, 2**64 - 2]),
        (["9223372036854775808", '""'], TEXT, ["9223372036854775808", ""]),
        (["18446744073709551616", "-1"], TEXT, ["18446744073709551616", "-1"]),
        (["9007199254740993", '""'], TEXT, ["9007199254740993", ""]),
        (["1.5", "-9007199254740993"], TEXT, ["1.5", "-9007199254740993"]),
        # These are kept.
        (["9007199254740992", ""], "float64", [2.0**53, np.nan]),
        (["12345678901234567000", "1.5"], "float64", [1.2345678901234567e19, 1.5]),
        (["9223372036854775808", "1.5"], "float64", [2.0**63, 1.5]),
        (["1e300", "1", "inf"], "float64", [1e300, 1, np.inf]),
    ],
)
def test_types_are_inferred(tmp_path, values, dtype, expected):
    path = write(tmp_path, "n,c\n" + "".join(f"0,{value}\n" for value in values))
    (column,) = read_csv(path, "c").batch(10)
    assert column.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(column, np.array(expected, dtype))


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("int8", ["1", "-128"], np.int8([1, -128])),
        (np.uint64, ["18446744073709551615"], np.array([2**64 - 1], np.uint64)),
        (np.float32, ["1", ""], np.float32([1, np.nan])),
        (bool, ["1", "0", "true"], np.array([True, False, True])),
        ("str", ["007", '""'], np.array(["007", ""], TEXT)),
        ("int64", ["007", "0x1F"], np.int64([7, 31])),
        ("float64", ["007", "+1.5"], np.float64([7, 1.5])),
        (str, ["1"], np.array(["1"], TEXT)),
        (TEXT, ["1"], np.array(["1"], TEXT)),
        ("bytes", ["7", '""'], np.array([b"7", b""], object)),
        ("datetime64[ms]", ["2024-02-29", ""], np.array(["2024-02-29", "NaT"], "datetime64[ms]")),
        ("datetime64[s]", ["2024-02-29T00:00:00Z"], np.array(["2024-02-29"], "datetime64[s]")),
        ("timedelta64[us]", ["00:00:01.5"], np.array([1_500_000], "timedelta64[us]")),
    ],
)
def test_types_are_given(tmp_path, dtype, values, expected):
    path = write(tmp_path, "n,c\n" + "".join(f"0,{value}\n" for value in values))
    ds = read_csv(path, "c", dtypes={"c": dtype})
    assert ds.element_spec == TensorSpec((), expected.dtype)
    (column,) = ds.batch(10)
    np.testing.assert_array_equal(column, expected)


def test_digits_are_bools_only_where_that_is_stated(tmp_path):
    write(tmp_path, "n,c,d\n0,true,1\n1,False,true\n", "a.csv")
    write(tmp_path, "n,c,d\n2,true,0\n3,1,0\n4,False,1\n", "b.csv")
    ds = read_csv(tmp_path, dtypes={"d": "bool"})
    with pytest.raises(
        errors.FileError, match=r"row 1, at byte 15, column 'c': '1' is not bool; give dtypes=\{'c': 'bo"
    ):
        list(ds)
    skipping = ds.with_options(Options(on_error="skip"))
    assert rows_of(skipping) == [(0, True, True), (1, False, True), (2, True, False), (4, False, True)]
    stated = read_csv(tmp_path, ["c", "d"], dtypes={"c": "bool", "d": "bool"})
    assert rows_of(stated)[2:] == [(True, False), (True, False), (False, True)]


def test_replacements_of_missing_values(tmp_path):
    path = write(tmp_path, "i,f,s,b\n1,2,x,true\n,,,\n-,-,-,-\n")
    missing = {"i": -1, "f": 0.5, "s": "?", "b": False}
    ds = read_csv(path, missing=missing, null_values=["", "-"])
    assert [leaf.dtype for leaf in ds.element_spec.values()] == ["int64", "float64", TEXT, "bool"]
    with pytest.raises(errors.ArgumentError, match=r"missing: 'none' cannot stand for a null"):
        list(read_csv(path, missing={**missing, "f": "none"}, null_values=["", "-"]))
    assert rows_of(ds) == [(1, 2.0, "x", True), (-1, 0.5, "?", False), (-1, 0.5, "?", False)]
    with dask.config.set({"daskdist.split-bytes": 4}):
        assert len(list(ds)) == 3
    # Columns that are not selected do not matter.
    assert [int(x) for x in read_csv(path, "i", missing=missing, null_values=["", "-"])] == [1, -1, -1]
    ds = read_csv(path, "i", missing={"i": float("nan")}, null_values=["", "-"])
    assert str([x.item() for x in ds]) == "[1.0, nan, nan]"


def test_missing_text_is_an_error_and_quoted_empty_text_is_not(tmp_path):
    path = write(tmp_path, 'n,s\n1,web\n"",""\n3,"NA"\n4,NA\n')
    assert rows_of(read_csv(path))[2:] == [(3, "NA"), (4, "NA")]
    assert [str(x) for x in read_csv(path, "s")] == ["web", "", "NA", "NA"]
    assert [str(x) for x in read_csv(path, "s", null_values=["NA"], missing={"s": "?"})] == ["web", "", "NA", "?"]
    path = write(tmp_path, 'n,s\n1,web\n2,\n3,""\n')
    for options in ({}, {"dtypes": {"s": "bytes"}}):
        empty = b"" if options else ""
        with pytest.raises(
            errors.FileError, match=rf"row 1, at byte 10, column 's': .*give missing=\{{'s': {empty!r}\}}"
        ):
            list(read_csv(path, **options))
        assert [row["s"] for row in read_csv(path, missing={"s": empty}, **options)][1:] == [empty, empty]
        skipped = read_csv(path, **options).with_options(Options(on_error="skip"))
        assert [int(row["n"]) for row in skipped] == [1, 3]
    # Columns that are not read may have any values, and without quotes there is no empty text.
    assert [int(n) for n in read_csv(path, "n")] == [1, 2, 3]
    assert [str(s) for s in read_csv(path, "s", quote=None, missing={"s": "?"})] == ["web", "?", '""']


def test_missing_text_far_into_a_file(tmp_path):
    path = write(tmp_path, "n,s\n" + "".join(f"{k},{'' if k == 900 else k}x\n" for k in range(900)) + '900,\n901,""\n')
    with dask.config.set({"daskdist.split-bytes": 100}):
        assert [str(row["s"]) for row in read_csv(path, missing={"s": "?"}).skip(899)] == ["899x", "?", ""]
        with pytest.raises(errors.FileError, match=r"column 's': its value is missing, which str cannot represent"):
            list(read_csv(path))


@pytest.mark.parametrize("end", [".csv", ".csv.gz"])
def test_long_fields_and_names(tmp_path, end):
    long = {"plain": "word " * 40_000, "quoted": 'a "b", c\n' * 20_000, "long": "ü" * 150_000}

    def check(content, expected, **options):
        path = tmp_path / f"a{end}"
        path.write_bytes(gzip.compress(content.encode()) if end.endswith("gz") else content.encode())
        assert rows_of(read_csv(path, **options)) == expected
        return read_csv(path, **options).element_spec

    for text in long.values():
        quoted = '"' + text.replace('"', '""') + '"'
        check(f"id,text\n1,{quoted}\n2,y\n", [(1, text), (2, "y")])
        check(f"1,{quoted}\n2,y\n", [(1, text), (2, "y")], header=False)
        assert list(check(f"{quoted},b\n1,2\n", [(1, 2)])) == [text, "b"]
    check(f"id\ttext\n1\t{long['plain']}\n", [(1, long["plain"])], delimiter="\t", quote=None)


def test_rows_of_another_width_than_the_header(tmp_path):
    trailing = write(tmp_path, "a,b\n1,2,\n3,4,\n")
    with pytest.raises(errors.FileError, match=r"no row has the 2 fields of its header: the first, '1,2,', has 3; if"):
        read_csv(trailing)
    assert [int(row["a"]) for row in read_csv(trailing, new_names=["a", "b", "c2"])] == [1, 3]
    title = write(tmp_path, "My report\na,b\n1,2\n")
    with pytest.raises(errors.FileError, match=r"new_names=\['My report', 'c1'\].* skip it by comment='My report'"):
        read_csv(title)
    assert rows_of(read_csv(title, comment="My report")) == [(1, 2)]
    semicolons = write(tmp_path, "a;b\n1,5;2\n")
    with pytest.raises(errors.FileError, match=r"no row has the 1 fields .*or give the right delimiter"):
        read_csv(semicolons)
    assert rows_of(read_csv(semicolons, delimiter=";")) == [("1,5", 2)]
    wide = write(tmp_path, "a\n" + "1," * 30 + "\n")
    with pytest.raises(errors.FileError, match=r"new_names=\['a', 'c1', \.\.\.\]"):
        read_csv(wide)


def test_types_are_those_of_the_first_rows_of_the_right_width(tmp_path):
    later = write(tmp_path, "a,b\n" + "1,2,3\n" * 10 + "7,8\n" * 10)
    ds = read_csv(later, sample_bytes=20)
    with pytest.raises(errors.FileError, match=r"its row 0, at byte 4, has 3 fields, not 2"):
        list(ds)
    assert rows_of(ds.with_options(Options(on_error="skip"))) == [(7, 8)] * 10
    names = write(tmp_path, "1,2,3\n4,5\n6,7\n")
    skipped = read_csv(names, header=["a", "b"]).with_options(Options(on_error="skip"))
    assert rows_of(skipped) == [(4, 5), (6, 7)]


def test_headers(tmp_path):
    path = write(tmp_path, "1,x\n2,y\n")
    assert list(read_csv(path, header=False).element_spec) == ["c0", "c1"]
    assert rows_of(read_csv(path, header=False)) == [(1, "x"), (2, "y")]
    assert list(read_csv(path, header=["n", "word"]).element_spec) == ["n", "word"]
    assert rows_of(read_csv(path)) == [(2, "y")]
    path = write(tmp_path, '"a\nb","c ""d"""\n1,2\n', "b.csv")
    assert list(read_csv(path).element_spec) == ["a\nb", 'c "d"']
    wide = [f"column {k}" for k in range(1000)]
    path = write(tmp_path, ",".join(wide) + "\n" + ",".join("1" * 1000) + "\n", "c.csv")
    assert list(read_csv(path).element_spec) == wide
    assert sum(rows_of(read_csv(path, sample_bytes=10))[0]) == 1000


def test_names_that_are_wrong(tmp_path):
    path = write(tmp_path, "a,a\n1,2\n")
    with pytest.raises(errors.FileError, match=r"a\.csv: two columns are called 'a'.*: new_names=\['a', 'a_2'\]"):
        read_csv(path)
    assert list(read_csv(path, new_names=["a", "a_2"])) == [{"a": 1, "a_2": 2}]
    with pytest.raises(errors.ArgumentError, match=r"header: two columns are called 'b'"):
        read_csv(path, header=["b", "b"])
    with pytest.raises(
        errors.FileError, match=r"no row has the 3 fields of its names: the first, 'a,a', has 2; give 2 names"
    ):
        read_csv(path, header=["a", "b", "c"])
    with pytest.raises(errors.ArgumentError, match=r"new_names replaces the names in a header; give header="):
        read_csv(path, header=False, new_names=["a", "b"])
    with pytest.raises(errors.ArgumentError, match=r"new_names is 'ab'; give a list of names"):
        read_csv(path, new_names="ab")
    with pytest.raises(errors.ArgumentError, match=r"header is \[\]; give True, False, or a list of names"):
        read_csv(path, header=[])
    path = write(tmp_path, "a,b\n1,2\n", "b.csv")
    with pytest.raises(errors.ArgumentError, match=r"no column 'c'; there are 'a', 'b'"):
        read_csv(path, ["c"])
    with pytest.raises(errors.ArgumentError, match=r"dtypes: no column 'c'; there are 'a', 'b'"):
        read_csv(path, dtypes={"c": "int8"})
    with pytest.raises(errors.ArgumentError, match=r"missing: no column 'c'"):
        read_csv(path, missing={"c": 1})
    with pytest.raises(errors.ArgumentError, match=r"dtypes: 'a' cannot be 'complex64'; there are str, bytes, int8"):
        read_csv(path, dtypes={"a": "complex64"})
    with pytest.raises(errors.ArgumentError, match=r"delimiter is '::'; give one ASCII character"):
        read_csv(path, delimiter="::")
    with pytest.raises(errors.ArgumentError, match=r"delimiter and quote are both '\|'"):
        read_csv(path, delimiter="|", quote="|")
    with pytest.raises(errors.ArgumentError, match=r"null_values is 'NA'; give a list"):
        read_csv(path, null_values="NA")


def test_delimiters_and_names_of_files(tmp_path):
    for content, name, options in [
        ("a\tb\n1\tx,y\n", "a.tsv", {}),
        ("a\tb\n1\tx,y\n", "a.txt", {"delimiter": "\t"}),
        ("a;b\n1;x,y\n", "b.csv", {"delimiter": ";"}),
        ("a|b\n1|'x,y'\n", "c.csv", {"delimiter": "|", "quote": "'"}),
    ]:
        assert rows_of(read_csv(write(tmp_path, content, name), **options)) == [(1, "x,y")]
    (tmp_path / "b.tsv.bz2").write_bytes(bz2.compress(b"a\tb\n2\tz\n"))
    assert rows_of(read_csv(str(tmp_path / "*.tsv*"))) == [(1, "x,y"), (2, "z")]
    assert rows_of(read_files(tmp_path / "a.tsv")) == [(1, "x,y")]
    assert rows_of(read_files([tmp_path / "a.tsv", tmp_path / "b.tsv.bz2"])) == [(1, "x,y"), (2, "z")]


def test_encodings(tmp_path):
    path = write(tmp_path, "größe,b\nä,1\nö,2\n".encode("latin-1"))
    with dask.config.set({"daskdist.split-bytes": 5}):
        assert rows_of(read_csv(path, encoding="latin-1")) == [("ä", 1), ("ö", 2)]
    path = write(tmp_path, "a,b\nä,1\nö,2\n".encode("latin-1"), "b.csv")
    with pytest.raises(errors.FileError, match=r"column 'a' is not utf-8, in row 0; give its encoding, or dtypes="):
        read_csv(path)
    assert rows_of(read_csv(path, dtypes={"a": "bytes"}))[0] == (b"\xe4", 1)
    assert [int(x) for x in read_csv(path, "b")] == [1, 2]
    path = write(tmp_path, b"a,b\nx,1\n" + b"\x81,2\n", "c.csv")
    with pytest.raises(errors.FileError, match=r"its row 1 is not cp1252: .*give the right encoding"):
        list(read_csv(path, encoding="cp1252"))
    assert rows_of(read_csv(path, encoding="cp1252").ignore_errors()) == [("x", 1)]
    for encoding in ("utf-16", "iso2022_jp"):
        with pytest.raises(errors.ArgumentError, match="is not a unique single byte"):
            read_csv(path, encoding=encoding)
    with pytest.raises(errors.ArgumentError, match=r"encoding is 'utf-9', which Python does not know"):
        read_csv(path, encoding="utf-9")
    path = write(tmp_path, "a,b\n" + "日本,1\n".encode().decode(), "d.csv")
    Path(path).write_bytes("a,b\n日本,1\n".encode("shift-jis"))
    assert rows_of(read_csv(path, encoding="shift-jis")) == [("日本", 1)]


@pytest.mark.parametrize("end", ["", "\n", "\r"])
def test_a_row_alone_needs_no_newline(tmp_path, end):
    path = write(tmp_path, f'a,"b"{end}')
    assert rows_of(read_csv(path)) == []
    assert list(read_csv(path).element_spec) == ["a", "b"]
    assert rows_of(read_csv(path, header=False)) == [("a", "b")]
    assert rows_of(read_csv(path, header=["x", "y"])) == [("a", "b")]
    assert rows_of(read_csv(write(tmp_path, f"a,b\n1,x{end}", "b.csv"))) == [(1, "x")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"header": None}, "header is None; give True, False, or a list"),
        ({"header": 0}, "header is 0; give True"),
        ({"header": "ab"}, "header is 'ab'; give True"),
        ({"sample_bytes": 0}, "sample_bytes is 0; give a number of bytes, 1 or more"),
        ({"dtypes": "int64"}, "dtypes is 'int64'; give a dict by column"),
        ({"encoding": None}, "encoding is None, which Python does not know for text"),
        ({"encoding": "undefined"}, "encoding is 'undefined', which Python does not know"),
        ({"encoding": "punycode"}, "encoding is 'punycode', in which a newline"),
        ({"delimiter": 5}, "delimiter is 5; give one ASCII character"),
        ({"null_values": [5]}, r"null_values is \[5\]; give a list of text"),
        ({"missing": 5}, "missing is 5; give a dict by column"),
        ({"columns": [["a", "b"]]}, r"columns: \['a', 'b'\] is not a name"),
    ],
)
def test_invalid_options_are_refused(tmp_path, options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        read_csv(write(tmp_path, "a,b\n1,2\n"), **options)


def test_an_empty_path_is_refused():
    with pytest.raises(errors.ArgumentError, match="the list of files has ''; give paths"):
        read_csv("")


# --- several files ---


def test_columns_are_found_by_name(tmp_path):
    first = write(tmp_path, "a,b\n1,x\n", "0.csv")
    write(tmp_path, "b,a\ny,2\n", "1.csv")
    assert rows_of(read_csv(tmp_path)) == [(1, "x"), (2, "y")]
    other = write(tmp_path, "b,a,c\nz,3,4\n", "2.csv")
    with pytest.raises(errors.FileError, match=r"2\.csv: of the columns of .*0\.csv, the first file, it has 'c' besid"):
        list(read_csv(tmp_path))
    assert rows_of(read_csv(tmp_path, ["a", "b"])) == [(1, "x"), (2, "y"), (3, "z")]
    write(tmp_path, "b\nz\n", "3.csv")
    with pytest.raises(errors.FileError, match=r"3\.csv: of the columns .* it lacks 'a'; leave the file out, or name"):
        list(read_csv(tmp_path, ["a", "b"]))
    assert list(read_csv(tmp_path, "b")) == ["x", "y", "z", "z"]
    # Another schema is no damage, so such a file is not left out.
    iterator = iter(read_csv([first, other]).ignore_errors())
    assert rows_of(itertools.islice(iterator, 1)) == [(1, "x")]
    with pytest.raises(errors.FileError, match=r"2\.csv: of the columns of .* it has 'c' besides"):
        next(iterator)


def test_empty_files(tmp_path):
    empty = write(tmp_path, "", "0.csv")
    bare = write(tmp_path, "a,b\n", "1.csv")
    full = write(tmp_path, "a,b\n1,x\n", "2.csv")
    blank = write(tmp_path, "\n\r\n", "3.csv")
    # The first file that has rows determines the columns.
    assert rows_of(read_csv(tmp_path)) == [(1, "x")]
    assert rows_of(read_csv([full, bare, blank, empty])) == [(1, "x")]
    assert list(read_csv(bare)) == []
    assert read_csv([empty, bare]).element_spec == {"a": TensorSpec((), TEXT), "b": TensorSpec((), TEXT)}
    with pytest.raises(errors.FileError, match=r"0\.csv: empty, so its columns are unknown; give header="):
        read_csv([empty, blank])
    assert list(read_csv(empty, header=["a"], dtypes={"a": "int8"})) == []


def test_partitions(tmp_path):
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        write(tmp_path, f"a\n{day * 10}\n", f"day={day}/a.csv")
    assert rows_of(read_csv(tmp_path)) == [(10, 1), (20, 2)]
    assert [int(x) for x in read_csv(tmp_path, "day")] == [1, 2]
    assert rows_of(read_csv(tmp_path, partitioned=False)) == [(10,), (20,)]


def test_partitions_written_with_zeros_are_text(tmp_path):
    for month in ("01", "12"):
        (tmp_path / f"month={month}").mkdir()
        write(tmp_path, "a\n1\n", f"month={month}/a.csv")
    assert [str(x) for x in read_csv(tmp_path, "month")] == ["01", "12"]


def test_types_of_the_sample_hold_for_all(tmp_path):
    path = write(tmp_path, "n,c\n" + "1,2\n" * 100 + "1,2.5\n")
    with dask.config.set({"daskdist.split-bytes": 100}):
        ds = read_csv(path, sample_bytes=50)
        with pytest.raises(
            errors.FileError,
            match=r"a\.csv bytes 400 to 410: its row 1, at byte 404, column 'c': '2.5' is not int64; "
            r"give dtypes=\{'c': 'float64'\}",
        ):
            list(ds)
        assert len(list(read_csv(path, sample_bytes=50, dtypes={"c": "float64"}))) == 101
    for value, advice in [("x", "'str'"), ("", "missing={'c': 0} as its replacement, or dtypes={'c': 'float64'}")]:
        path = write(tmp_path, "n,c\n" + "1,2\n" * 100 + f"1,{value}\n")
        with pytest.raises(errors.FileError, match=r"its row 100, at byte 404, column 'c'") as caught:
            list(read_csv(path, sample_bytes=50))
        assert advice in str(caught.value)
    path = write(tmp_path, "n,c\n" + "1,2024-02-29\n" * 10 + "1,2024-02-29 12:00:00\n")
    with pytest.raises(errors.FileError, match=r"is not datetime64\[D\]; give dtypes=\{'c': 'datetime64\[s\]'\}"):
        list(read_csv(path, sample_bytes=50))
    path = write(tmp_path, b"n,c\n" + b"1,a\n" * 100 + b"1,\xff\n")
    with pytest.raises(errors.FileError, match=r"column 'c': b'\\xff' is not UTF-8; give the right encoding, or dty"):
        list(read_csv(path, sample_bytes=50))
    path = write(tmp_path, "n,c\n" + "1,true\n" * 100 + "1,\n")
    with pytest.raises(
        errors.FileError, match=r"bool cannot represent; give missing=\{'c': False\} as its replacement$"
    ):
        list(read_csv(path, sample_bytes=50))


@pytest.mark.parametrize("split_bytes", [60, 10_000])
@pytest.mark.parametrize("value", ["01234", "-01", "0x1F", '"007"', "+5", "9007199254740993"])
def test_text_of_digits_after_the_sample_is_no_number(tmp_path, split_bytes, value):
    # Only in column c is the value odd; s is text, and n has plain numbers.
    path = write(tmp_path, "s,n,c\n" + "0a,1,2.5\n" * 100 + f"01,2,{value}\n" + "0b,3,0.5\n" * 10)
    text = value.strip('"')
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_csv(path, sample_bytes=50)
        message = (
            f"column 'c': '{re.escape(text)}' is not float64; give dtypes={{'c': 'str'}} to keep it as it is written"
        )
        with pytest.raises(errors.FileError, match=message):
            list(ds)
        rows = list(iterator := iter(ds.ignore_errors()))
        assert [int(row["n"]) for row in rows] == [1] * 100 + [3] * 10
        assert iterator.stats()["skipped_by_file"] == {path: 1}
        # Columns that are not read or have a given type do not matter.
        assert len(list(read_csv(path, ["s", "n"], sample_bytes=50))) == 111
        assert read_csv(path, "c", sample_bytes=50, dtypes={"c": "str"}).skip(100).take(1).get_single_element() == text
        if value not in ("-01", "0x1F"):
            actual = read_csv(path, "c", sample_bytes=50, dtypes={"c": "float64"}).skip(100).take(1)
            assert actual.get_single_element() == float(text)
        known = read_csv(path, "c", sample_bytes=50, null_values=["", text]).skip(100).take(1).get_single_element()
        assert np.isnan(known)


@pytest.mark.parametrize("seed", range(20))
def test_text_of_digits_is_found_as_one_by_one(seed):
    rng = random.Random(seed)
    pieces = ["0", "1", "9", "-", "+", "x", "X", ".", "a", " ", "5", "00", "e5"]
    fields = ["".join(rng.choices(pieces, k=rng.randrange(5))) for _ in range(200)]
    expected = [re.match(r"[ \t]*(\+|-?0[0-9xX])", field) is not None for field in fields]
    assert number_texts(pa.array([field.encode() for field in fields], pa.binary())).tolist() == expected
    assert number_texts(pa.array([field.encode() for field in fields], pa.binary())[50:]).tolist() == expected[50:]
    for field, is_text in zip(fields, expected, strict=True):
        for delimiter in ",;|\t":
            rows = [f"5{delimiter}{field}{delimiter}7\n", f"{field}{delimiter}7\n", f'7{delimiter}"{field}"\n']
            # The quick check may also find rows without such text, but must not overlook any.
            assert all(may_hold_number_text(row.encode(), delimiter, '"') for row in rows) or not is_text
    assert not may_hold_number_text(b"1,0,0.5,-0.5,10,100,2024-02-01,-7,1e-05\n" * 10_000, ",", '"')
    assert may_hold_number_text(b"1,0,0.5,-0.5,10,100,2024-02-01\n" * 10_000 + b"3,-01\n", ",", '"')


@pytest.mark.parametrize("quote", ['"', ""])
def test_fields_of_a_row_are_as_in_pyarrow(quote):
    rng = random.Random(5)
    for _ in range(300):
        pieces = ["a", "ü", ",", '"', '""', '"x, y"', " ", "b c", *(['"p\nq"'] if quote else [])]
        fields = ["".join(rng.choices(pieces, k=rng.randrange(4))) for _ in range(rng.randrange(1, 6))]
        row = ",".join(["z", *fields]).encode()
        framing = Quotes(quote=quote.encode())
        # Skip data that is not one row: newlines outside of quotes, or quotes that are not closed.
        if len(framing.rows(row)[0]) != 1 or len(framing.quote_positions(row)) % 2:
            continue
        options = pc.ParseOptions(quote_char=quote or False, newlines_in_values=bool(quote))
        expected = pc.read_csv(pa.BufferReader(row + b"\n"), parse_options=options).column_names
        assert fields_in(row, ",", quote) == expected, row


def test_a_wide_file(tmp_path):
    num_columns = 2000
    values = np.arange(40 * num_columns).reshape(40, num_columns) / 4
    values[3, 5] = np.nan
    rows = [",".join("" if np.isnan(value) else repr(value) for value in row) for row in values.tolist()]
    header = ",".join(f"c{k}" for k in range(num_columns))
    path = write(tmp_path, "\n".join([header, *rows, ""]))
    with dask.config.set({"daskdist.split-bytes": "128 KiB"}):
        ds = read_csv(path, {"x": [f"c{k}" for k in range(num_columns)], "y": "c5"})
        # Splits of wide files are as large as others, since each column takes a fixed time in each split.
        assert len(node_of(ds).splits()) == -(-Path(path).stat().st_size // 2**17)
        (batch,) = ds.batch(40)
    np.testing.assert_array_equal(batch["x"], values)
    np.testing.assert_array_equal(batch["y"], values[:, 5])


def test_rows_of_too_many_or_too_few_fields(tmp_path):
    path = write(tmp_path, 'a,b\n1,2\n\n3,4,5\n6\n"7\n7",8\n')
    with pytest.raises(
        errors.FileError, match=r"its row 1, at byte 9, has 3 fields, not 2: '3,4,5'; fix it, or .*on_error=\"skip\""
    ):
        list(read_csv(path))
    assert read_csv(path).element_spec == {"a": TensorSpec((), TEXT), "b": TensorSpec((), "int64")}


# --- what cannot be read is left out ---


@pytest.mark.parametrize("split_bytes", [1, 50, 10_000])
def test_rows_are_left_out_one_by_one(tmp_path, split_bytes, caplog):
    good = [f"{k},{k / 2},word {k}" for k in range(100)]
    content = [line.encode() for line in good]
    for place, line in [
        (90, b"x,1,a"),
        (70, b"1,2"),
        (50, b"1,y,z"),
        (30, b"1,2,\xff"),
        (20, b"1,2,3,4"),
        (10, b",1,missing"),
        (10, b'"1\n2",1,b'),
    ]:
        content.insert(place, line)
    path = write(tmp_path, b"i,f,s\n" + b"\n".join(content))
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_csv(path, dtypes={"i": "int64", "f": "float64", "s": "str"})
        iterator = iter(ds.with_options(daskdist.Options(on_error="skip")))
        with caplog.at_level(logging.WARNING, "daskdist"):
            kept = rows_of(iterator)
    assert kept == [(k, k / 2, f"word {k}") for k in range(100)]
    assert iterator.stats()["skipped_by_file"] == {path: 7}
    assert any("a.csv" in message for message in caplog.messages)


def test_a_column_with_only_errors_is_skipped_quickly(tmp_path):
    path = write(tmp_path, "a,b\n" + "".join(f"{k},x{k}\n" for k in range(3000)) + "1,2\n")
    kept = iter(read_csv(path, dtypes={"b": "int64"}).ignore_errors(log_warning=False))
    assert rows_of(kept) == [(1, 2)]
    assert kept.stats()["num_skipped"] == 3000


def test_notes_name_the_skipped_rows(tmp_path):
    path = write(tmp_path, "a,b\n1,2\n3\nx,4\n,5\n")
    ds = read_csv(path, dtypes={"a": "int64"})
    form, (split,) = node_of(ds).format, node_of(ds).splits()
    _, damaged = form.read_valid_rows(split)
    assert [(place, where, reason) for place, where, reason, _ in sorted(damaged)] == [
        (1, f"row 1 of {split.label}", "1 fields, not 2: '3'"),
        (2, f"row 2 of {split.label}", "column 'a': 'x' is not int64"),
        (3, f"row 3 of {split.label}", "column 'a': its value is missing, which int64 cannot represent"),
    ]


def test_on_a_cluster(tmp_path, on_cluster):
    for number in range(4):
        write(tmp_path, "a,b\n" + "".join(f'{k},"x\n{k}"\n' for k in range(50)), f"{number}.csv")
    with dask.config.set({"daskdist.split-bytes": 100}):
        ds = read_csv(tmp_path, "a").batch(10)
        steps = [on_cluster.local_results(batch) for batch in on_cluster.distribute_dataset(ds)]
    assert sorted(int(x) for step in steps for part in step for x in np.asarray(part)) == sorted([*range(50)] * 4)


@pytest.mark.parametrize("seed", range(4))
def test_newlines_in_quotes_are_found_as_one_by_one(seed):
    # The loop looks at one byte at a time: a quote at the beginning of a field opens, the next one closes, and a quote
    # right after that opens again.
    draws = np.random.default_rng(seed)
    quotes = Quotes()
    for length in draws.integers(1, 300, size=300):
        data = bytes(draws.choice(list(b'ab,,"""\n\r'), length).astype(np.uint8))
        is_open = has_closed = actual = False
        for byte, before in zip(data, b"\n" + data[:-1], strict=True):
            is_quote = byte == ord('"')
            was_open = is_open
            is_open = was_open != is_quote if was_open else is_quote and (before in b",\n\r" or has_closed)
            has_closed = was_open and is_quote
            actual |= is_open and byte in b"\n\r"
        assert quotes.has_quoted_newline(data) == (actual or is_open), data


COMMENTS = '# made by X, "v2"\r\n#\n\n# of 3 columns, and it\'s long\n'


@pytest.mark.parametrize("split_bytes", [7, 2**20])
@pytest.mark.parametrize("header", [True, False, ["x", "y"]])
def test_lines_of_comment_before_the_first_row_are_left_out(tmp_path, header, split_bytes):
    rows = "1,#a\n2,b\n3,c\n"
    for name in ("a.csv", "b.csv.gz"):
        content = (COMMENTS + ("n,s\n" if header is True else "") + rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "c.csv").write_text("n,s\n4,d\n" if header is True else "4,d\n")
    names = {True: ["n", "s"], False: ["c0", "c1"]}.get(header, header) if isinstance(header, bool) else header
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = daskdist.read_csv(tmp_path, header=header, comment="#")
        actual = [tuple(row[name] for name in names) for row in ds]
    once = [(1, "#a"), (2, "b"), (3, "c")]
    assert actual == [*once, *once, (4, "d")]


def test_a_comment_is_not_taken_for_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("# made by X\n# in May\na,b\n1,2\n")
    with pytest.raises(errors.FileError, match=r"a\.csv: its first line begins with '# made by X'.*comment='#'"):
        daskdist.read_csv(tmp_path / "a.csv")
    # A first line with as many fields as the rows is a header, even if it begins with "#".
    (tmp_path / "b.csv").write_text("#chrom,start\nx,2\n")
    assert [dict(row) for row in daskdist.read_csv(tmp_path / "b.csv")] == [{"#chrom": "x", "start": 2}]
    with pytest.raises(errors.ArgumentError, match="comment is ''; give the beginning of comment lines"):
        daskdist.read_csv(tmp_path / "b.csv", comment="")
