"""Timestamps of the type INT96, which Spark and Impala write: microseconds, all of them, or an error."""

from __future__ import annotations

import datetime

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import TensorSpec, errors, read_parquet

EXACT = np.dtype("datetime64[us]")
# The first and the last of SQL's times, one of nanoseconds' range each, one before 1970 and a null.
TIMES = [
    datetime.datetime(1, 1, 1),
    datetime.datetime(9999, 12, 31, 23, 59, 59, 999999),
    datetime.datetime(1677, 9, 21),
    datetime.datetime(2262, 4, 12),
    datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
    None,
    datetime.datetime(2024, 2, 29, 12, 0, 0, 1),
]
EXPECTED = np.array(TIMES, EXACT)


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True, **options)
    assert "INT96" in {pq.read_metadata(path).schema.column(k).physical_type for k in range(len(columns))}
    return str(path)


@pytest.mark.parametrize("row_group_size", [2, 100])
@pytest.mark.parametrize("store_schema", [True, False])
def test_all_times_are_read(tmp_path, store_schema, row_group_size):
    for number, kind in enumerate([pa.timestamp("us"), pa.timestamp("ms"), pa.timestamp("us", "Europe/Berlin")]):
        # Milliseconds do not hold all of them.
        times = [time and time.replace(microsecond=0) for time in TIMES] if kind.unit == "ms" else TIMES
        columns = {"t": pa.array(times, kind), "n": pa.array(range(len(times)))}
        path = write(tmp_path / f"{number}.parquet", columns, store_schema=store_schema, row_group_size=row_group_size)
        ds = read_parquet(path)
        assert ds.element_spec["t"] == TensorSpec((), EXACT)
        np.testing.assert_array_equal([row["t"] for row in ds], np.array(times, EXACT))
        assert [int(n) for n in read_parquet(path, "n")] == list(range(len(times)))


def test_files_of_any_range_have_one_dtype(tmp_path):
    write(tmp_path / "0.parquet", {"t": pa.array(TIMES[-1:], pa.timestamp("ns"))})
    write(tmp_path / "1.parquet", {"t": pa.array(TIMES, pa.timestamp("us"))})
    pq.write_table(pa.table({"t": pa.array(TIMES[:1], pa.timestamp("us"))}), tmp_path / "2.parquet")
    np.testing.assert_array_equal(list(read_parquet(tmp_path, "t")), [EXPECTED[-1], *EXPECTED, EXPECTED[0]])


def test_times_within_structs_and_lists(tmp_path):
    kind = pa.timestamp("us")
    columns = {
        "s": pa.array([{"t": time, "n": 1} for time in TIMES], pa.struct({"t": kind, "n": pa.int8()})),
        "l": pa.array([[time, None, time] for time in TIMES], pa.list_(kind)),
        "a.b": pa.array(TIMES, kind),
    }
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True)
    rows = list(read_parquet(path))
    np.testing.assert_array_equal([row["s"]["t"] for row in rows], EXPECTED)
    np.testing.assert_array_equal([row["l"][2] for row in rows], EXPECTED)
    np.testing.assert_array_equal([row["a.b"] for row in rows], EXPECTED)


@pytest.mark.parametrize("place", ["t", "a.b", "s", "l"])
@pytest.mark.parametrize("nanosecond", [1, 999, -1])
def test_nanoseconds_are_an_error(tmp_path, place, nanosecond):
    times = pa.array([0, None, 10**18 + nanosecond], pa.timestamp("ns"))
    nested = {"s": pa.StructArray.from_arrays([times], ["x"]), "l": pa.ListArray.from_arrays([0, 1, 1, 3], times)}
    path = str(tmp_path / "a.parquet")
    table = pa.table({place: nested.get(place, times), "n": [1, 2, 3]})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    message = rf"a\.parquet row group 0: column '{place}' has the time 2001-09-09.* INT96"
    with pytest.raises(errors.FileError, match=message):
        list(read_parquet(path))
    assert [int(n) for n in read_parquet(path, "n")] == [1, 2, 3]
    # As an ordinary timestamp it is read.
    pq.write_table(table, path)
    assert len(list(read_parquet(path))) == 3


def test_files_elsewhere(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe("/int96/a.parquet", (tmp_path / write(tmp_path / "a.parquet", {"t": pa.array(TIMES)})).read_bytes())
    fs.pipe(
        "/int96/b.parquet",
        (tmp_path / write(tmp_path / "b.parquet", {"t": pa.array([1], pa.timestamp("ns"))})).read_bytes(),
    )
    try:
        np.testing.assert_array_equal(list(read_parquet("memory://int96/a.parquet", "t")), EXPECTED)
        with pytest.raises(errors.FileError, match="INT96"):
            list(read_parquet("memory://int96/b.parquet"))
    finally:
        fs.rm("/int96", recursive=True)


def test_filters(tmp_path):
    path = write(tmp_path / "a.parquet", {"t": pa.array(TIMES, pa.timestamp("us")), "n": pa.array(range(len(TIMES)))})
    late = read_parquet(path, "n", [("t", ">", datetime.datetime(2200, 1, 1))])
    assert [int(n) for n in late] == [1, 3]


def test_other_timestamps_keep_their_unit_and_range(tmp_path):
    for unit, times in (("ns", TIMES[-1:]), ("us", TIMES), ("ms", TIMES[:1]), ("s", TIMES[:1])):
        for version in ("1.0", "2.6"):
            if (unit, version) == ("ns", "1.0"):
                continue
            pq.write_table(
                pa.table({"t": pa.array(times, pa.timestamp(unit))}), tmp_path / "a.parquet", version=version
            )
            ds = read_parquet(tmp_path / "a.parquet", "t")
            np.testing.assert_array_equal(list(ds), np.array(times, EXACT))
