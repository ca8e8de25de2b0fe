"""Filters whose values are of other types than the columns of the file."""

from __future__ import annotations

import datetime
import operator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import Options, errors, read_parquet

OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
NUMBERS = [
    *(0.5, -0.5, 3.0, 2**53 + 1, 2**63, -1, 2**64 - 1, 2**64, 1e30, -1e30, 255, 256),
    *(float("inf"), float("-inf"), float("nan"), np.float32(1.5), np.uint64(2**64 - 1), np.int8(-3), Decimal("2.5")),
]
TIMES = [datetime.datetime(2020, 1, 1), datetime.datetime(2020, 6, 1), datetime.datetime(2020, 6, 1, 1), None]
MOMENTS = [
    np.datetime64("2020-06-01"),
    np.datetime64("2020"),
    np.datetime64("2020-06", "M"),
    np.datetime64("2020-06-01T01", "h"),
    np.datetime64("2020-06-01T00:00:00.000000001", "ns"),
    np.datetime64("NaT"),
]


def check(path: Path, values, kind, others, key=lambda value: value):
    """Check that each condition keeps the rows for which Python's or NumPy's comparison holds."""
    table = pa.table({"n": pa.array(values, kind), "i": np.arange(len(values))})
    pq.write_table(table, path, row_group_size=2)
    for name, holds in OPERATORS.items():
        for other in others:
            expected = [i for i, value in enumerate(values) if value is not None and holds(key(value), other)]
            actual = [int(i) for i in read_parquet(path, "i", filters=[("n", name, other)])]
            assert actual == expected, (name, other)
    among = {i for i, value in enumerate(values) if value is not None and any(key(value) == other for other in others)}
    assert {int(i) for i in read_parquet(path, "i", filters=[("n", "in", others)])} == among
    left = {int(i) for i in read_parquet(path, "i", filters=[("n", "not in", others)])}
    assert left == set(range(len(values))) - among


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 3, None, 2**53, 2**53 + 1, 2**63, 2**64 - 1], pa.uint64()),
        ([-(2**63), -1, 0, 2, 3, None, 2**53, 2**53 + 1, 2**63 - 1], pa.int64()),
        ([20_000_000, 20_000_001, 2, None], pa.int32()),
        ([0, 1, 3, 255], pa.uint8()),
    ],
    ids=str,
)
def test_any_number_on_columns_of_integers(tmp_path, values, kind):
    check(tmp_path / "a.parquet", values, kind, NUMBERS)


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us"), pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ms", "UTC"), pa.date32()], ids=str
)
def test_times_of_numpy_on_columns_of_times(tmp_path, kind):
    def key(value):
        return np.datetime64(value.replace(tzinfo=None) if isinstance(value, datetime.datetime) else value)

    values = [value and value.date() for value in TIMES] if pa.types.is_date(kind) else TIMES
    check(tmp_path / "a.parquet", values, kind, MOMENTS, key)


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("s"), pa.date32()], ids=str)
def test_times_of_python_on_columns_of_times(tmp_path, kind):
    def key(value):
        return value if isinstance(value, datetime.datetime) else datetime.datetime.combine(value, datetime.time())

    values = [value and value.date() for value in TIMES] if pa.types.is_date(kind) else TIMES
    moments = [
        datetime.datetime(2020, 6, 1, 12),
        datetime.datetime(2020, 6, 1, 0, 0, 0, 5),
        TIMES[1],
        pd.Timestamp(TIMES[0]),
    ]
    check(tmp_path / "a.parquet", values, kind, moments, key)
    assert len(list(read_parquet(tmp_path, "i", filters=[("n", "in", [datetime.date(2020, 6, 1)])]))) > 0


def test_a_time_of_numpy_leaves_groups_without_such_rows_unread(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"t": pa.array(TIMES[:3], pa.timestamp("us")), "i": range(3)}), path, row_group_size=1)
    # Damaged groups that the statistics rule out are not read.
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    content[start : start + 20] = bytes(20)
    path.write_bytes(content)
    assert [int(i) for i in read_parquet(path, "i", filters=[("t", ">=", np.datetime64("2020-06-01"))])] == [1, 2]


def test_durations_and_times_of_day(tmp_path):
    days = [datetime.timedelta(days=1), datetime.timedelta(seconds=1), None]
    others = [np.timedelta64(1, "D"), np.timedelta64(1500, "ms"), np.timedelta64(999_999_999, "ns")]
    check(tmp_path / "a.parquet", days, pa.duration("ms"), others, lambda value: np.timedelta64(value, "us"))
    times = [datetime.time(1), datetime.time(0, 0, 1), None]
    check(
        tmp_path / "a.parquet", times, pa.time32("s"), others, lambda t: np.timedelta64(t.hour * 3600 + t.second, "s")
    )


@pytest.mark.parametrize(
    "condition",
    [
        ("s", ">", 1),
        ("n", "==", "2"),
        ("n", "in", ["a"]),
        ("n", "in", 5),
        ("n", "in", "12"),
        ("s", "not in", "ab"),
        ("n", "in", iter([1])),
        ("n", "==", True),
        ("t", ">", "2020-06-01"),
        ("z", ">", datetime.datetime(2020, 2, 1)),
        ("f", ">", 2**70),
    ],
)
def test_values_that_do_not_fit_are_an_error_before_anything_is_read(tmp_path, condition):
    times = pa.array(TIMES[:2])
    columns = {"n": [1, 2], "s": ["a", "b"], "f": [0.5, 1], "t": times, "z": times.cast(pa.timestamp("us", "UTC"))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(errors.ArgumentError, match=r"filters: .*give "):
        read_parquet(tmp_path / "a.parquet", "n", filters=[condition])


def test_values_that_do_not_fit_columns_of_directories(tmp_path):
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"x": [day]}), tmp_path / f"day={day}" / "a.parquet")
    for skip in (Options(), Options(on_error="skip")):
        with pytest.raises(errors.ArgumentError, match=r"'day' is int64.*give a list of numbers"):
            list(read_parquet(tmp_path, filters=[("day", "in", ["2"])]).with_options(skip))
    assert [int(row["x"]) for row in read_parquet(tmp_path, filters=[("day", ">", 1.5)])] == [2]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_text_that_repeats_in_every_encoding(tmp_path, encoding):
    columns = {"s": [f"word {k % 3}" for k in range(3000)], "empty": [""] * 3000, "n": range(3000)}
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(columns), path, use_dictionary=["n"], column_encoding={"s": encoding, "empty": encoding}, version="2.6"
    )
    assert [row["s"] for row in read_parquet(path)] == columns["s"]
    assert list(read_parquet(path, "empty")) == columns["empty"]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16()], ids=str)
def test_both_zeros_of_floats_are_equal(tmp_path, kind):
    values = [np.float16(value) for value in (0.0, -0.0, 1.5, -2.0)]
    for others in ([0], [0.0, 1.5], [-0.0], np.array([0, 2])):
        check(tmp_path / "a.parquet", values, kind, list(others), float)


def test_integers_on_columns_of_decimals(tmp_path):
    values = [Decimal("1.10"), Decimal("2.00"), Decimal("-7.00"), None]
    check(tmp_path / "a.parquet", values, pa.decimal128(5, 2), [2, -7, 10**30, Decimal("1.1")])


@pytest.mark.parametrize("kind", [pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("ns", "+05:30")], ids=str)
def test_times_of_other_zones_and_units(tmp_path, kind):
    values = [value and value.replace(tzinfo=datetime.UTC) for value in TIMES]
    moments = [
        datetime.datetime(2020, 6, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        datetime.datetime(2020, 6, 1, 0, 0, 0, 500, datetime.UTC),
        pd.Timestamp("2020-06-01T00:00:00.000000001Z"),
        pd.Timestamp("2020-06-01T10:00", tz="Asia/Tokyo"),
    ]
    check(tmp_path / "a.parquet", values, kind, moments)


def test_columns_of_extension_types(tmp_path):
    bools = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 2, None], pa.int8()))
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, b"b" * 16, None], pa.binary(16)))
    table = pa.table({"id": ids, "n": [1, 2, 3], "flag": bools})
    pq.write_table(table, tmp_path / "b.parquet")
    rows = read_parquet(
        tmp_path / "b.parquet", ["id", "flag"], filters=[("id", "in", [b"a" * 16]), ("flag", "==", False)]
    )
    assert list(rows) == [{"id": b"a" * 16, "flag": False}]
