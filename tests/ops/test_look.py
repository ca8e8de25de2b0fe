"""`head`, `count`, `describe`, and how wide datasets print."""

from __future__ import annotations

import datetime

import dask
import numpy as np
import pandas as pd
import pytest

from daskdist import Dataset, MirroredStrategy, Options, Ragged, errors, read_csv
from daskdist.tables.describe import ColumnStatistics
from daskdist.testing import never_run


def numbers(number=100):
    return Dataset.from_tensor_slices({"x": np.arange(number) / 4, "y": np.arange(number)})


def frame_of(values):
    return pd.Series(values).describe().to_dict()


def check_described(found, values):
    series = pd.Series(values)
    for name, value in frame_of(values).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12)
    assert found["nulls"] == series.isna().sum()
    assert found["distinct"] == series.nunique()


def test_head():
    ds = numbers()
    assert [int(row["y"]) for row in ds.head()] == [0, 1, 2, 3, 4]
    assert len(ds.head(0)) == 0
    assert len(numbers(2).head(5)) == 2
    assert repr(ds.head(2)).splitlines()[1].split() == ["0", "0.0", "0"]
    assert repr(Dataset.range(2).head()).splitlines()[0].split() == ["element", "value"]
    assert ds.head(2)._repr_html_() is not None
    with pytest.raises(errors.ArgumentError, match="head: n is -1"):
        ds.head(-1)


def test_head_count_and_describe_do_not_count_as_passes():
    ds = Dataset.range(20).shuffle(20, seed=1)
    first = [int(x) for x in Dataset.range(20).shuffle(20, seed=1)]
    assert [int(x) for x in ds.head(3)] == first[:3]
    assert ds.filter(lambda x: x >= 0).count() == 20
    assert ds.describe()["value"]["count"] == 20
    assert [int(x) for x in ds] == first


def test_describe_is_that_of_pandas():
    x = np.random.default_rng(0).normal(size=1000)
    x[::7] = np.nan
    y = np.arange(1000) % 13
    ds = Dataset.from_tensor_slices({"x": x, "y": y})
    for build in (ds, ds.batch(64), ds.filter(lambda row: row["y"] >= 0)):
        described = build.describe()
        assert described.num_elements == (16 if build.cardinality() == 16 else 1000)
        check_described(described["x"], x)
        check_described(described["y"], y)


def test_describe_of_parts():
    values = np.random.default_rng(1).integers(0, 50, 3000) * 0.5
    with dask.config.set({"daskdist.bundle-bytes": 2000, "daskdist.split-bytes": 800}):
        check_described(Dataset.from_tensor_slices(values).describe()["value"], values)


@pytest.mark.parametrize("other", [1.0, -np.inf, np.inf])
def test_describe_of_infinities_in_parts(other):
    values = np.array([-np.inf] * 10 + [other] * 10)
    with dask.config.set({"daskdist.bundle-bytes": 80, "daskdist.split-bytes": 80}):
        described = Dataset.from_tensor_slices(values).describe()["value"]
    np.testing.assert_equal(described["mean"], np.nan if other > 1 else -np.inf)
    assert (described["min"], described["max"]) == (-np.inf, other)


def test_describe_names_columns_by_their_keys():
    names = ["it's", "a[0]", "new\nline"]
    assert list(Dataset.from_tensor_slices({name: [1, 2] for name in names}).describe().to_dict()) == names


def test_describe_of_other_kinds():
    days = np.array(["2020-01-02", "NaT", "2020-01-01"], "datetime64[D]")
    rows = {
        "text": np.array(["b", "a", "b"]),
        "bytes": np.array([b"x", b"", b"x"], object),
        "day": days,
        "flag": np.array([True, False, True]),
        "image": np.arange(12.0).reshape(3, 2, 2),
        "words": Ragged([1, 2, 3], [0, 0, 1, 3]),
        "complex": np.array([1j, 1, 1]),
    }
    actual = Dataset.from_tensor_slices(rows).describe().to_dict()
    assert [actual["text"][name] for name in ("count", "min", "max", "distinct")] == [3, "a", "b", 2]
    assert np.isnan(actual["text"]["mean"])
    assert [actual["bytes"][name] for name in ("min", "max", "distinct")] == [b"", b"x", 2]
    assert [actual["day"][name] for name in ("count", "nulls", "distinct")] == [2, 1, 2]
    assert actual["day"]["max"] == np.datetime64(datetime.date(2020, 1, 2))
    assert actual["flag"]["mean"] == pytest.approx(2 / 3)
    assert (actual["image"]["count"], actual["image"]["mean"]) == (12, 5.5)
    assert (actual["words"]["count"], actual["words"]["max"]) == (3, 3)
    assert (actual["complex"]["distinct"], actual["complex"]["min"]) == (2, None)
    assert "datetime" not in repr(Dataset.from_tensor_slices(rows).describe())
    uneven = Dataset.range(4).map(lambda k: {"n": np.full(int(k), k), "t": [str(k)] * int(k)}).describe()
    assert (uneven["n"]["count"], uneven["n"]["max"], uneven["t"]["distinct"]) == (6, 3, 3)


def test_statistics_of_describe_normalise_columns():
    ds = numbers()
    of = ds.describe().to_dict()["x"]
    scaled = ds.map(lambda row: (row["x"] - of["mean"]) / of["std"]).describe()["value"]
    assert scaled["mean"] == pytest.approx(0)
    assert scaled["std"] == pytest.approx(1)


def test_statistics_of_much_data_are_approximate():
    values = np.random.default_rng(0).permutation(200_000)
    parts = [ColumnStatistics.of(part) for part in np.array_split(values, 37)]
    actual = parts[0]
    for part in parts[1:]:
        actual = actual.with_other(part)
    assert (actual.count, actual.least, actual.greatest) == (200_000, 0, 199_999)
    assert actual.mean == pytest.approx(values.mean())
    assert actual.std == pytest.approx(values.std(ddof=1))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert abs(actual.quantile(share) - share * 199_999) < 200
    assert abs(actual.num_distinct / 200_000 - 1) < 0.06


@pytest.mark.parametrize(("number", "shown"), [(4095, "4,095"), (4096, "~4,096"), (9000, "~")])
def test_estimated_numbers_are_marked(number, shown):
    described = Dataset.from_tensor_slices({"x": np.arange(number)}).describe()
    last = repr(described).splitlines()[-1].split()[-1]
    assert last == shown if number < 9000 else last.startswith(shown)
    assert type(described["x"]["distinct"]) is int


def test_no_elements():
    described = numbers().filter(lambda row: row["y"] < 0).describe()
    assert described.num_elements == 0
    assert repr(described).splitlines()[0] == "0 elements"
    for nothing in (numbers().take(0), numbers().filter(lambda row: row["y"] < 0), numbers().batch(3).take(0)):
        described = nothing.describe()
        assert list(described.to_dict()) == ["x", "y"]
        assert (described["y"]["count"], described["y"]["nulls"], described["y"]["max"]) == (0, 0, None)
        assert all(np.isnan(described["x"][name]) for name in ("mean", "std", "25%"))
    words = Dataset.from_tensor_slices({"t": ["a", "b"], "r": Ragged([1, 2], [0, 0, 2])}).take(0).describe()
    assert (words["t"]["count"], words["r"]["count"], words["t"]["min"]) == (0, 0, None)
    assert Dataset.range(4).window(2).take(0).describe().to_dict() == {}
    assert repr(Dataset.range(0).map(lambda k: {str(k): k}).describe()) == "0 elements"
    with pytest.raises(KeyError, match="no column 'z'; there are 'x', 'y'"):
        described["z"]
    assert repr(numbers().take(0).head()) == repr(Dataset.range(0).head()) == "no elements"
    nothing = Dataset.from_tensor_slices(np.full(3, np.nan)).describe()["value"]
    assert (nothing["count"], nothing["nulls"], nothing["min"]) == (0, 3, None)


def test_count_reads_as_little_as_possible(tmp_path):
    def fails(*element):
        raise RuntimeError

    some = Dataset.range(10).filter(lambda x: x % 3 == 0)
    assert some.map(fails, vectorized=False).shuffle(5).batch(3).count() == 2
    assert some.batch(3, drop_remainder=True).map(fails).count() == 1
    assert some.batch(2).batch(2, drop_remainder=True).prefetch(1).count() == 1
    with never_run():
        assert Dataset.range(10).map(fails).batch(3).count() == 4
    pd.DataFrame({"a": range(50), "b": ["x"] * 50}).to_csv(tmp_path / "data.csv", index=False)
    assert read_csv(tmp_path / "data.csv").map(fails).count() == 50
    with pytest.raises(errors.UnknownLengthError, match="endless"):
        Dataset.counter().count()
    with pytest.raises(errors.UnknownLengthError, match="endless"):
        Dataset.counter().describe()


def test_count_skips_failing_elements_if_errors_are_ignored():
    ds = Dataset.range(8).filter(lambda x: x >= 0).map(lambda x: 1 // (int(x) % 4))
    assert ds.ignore_errors().count() == 6
    assert ds.with_options(Options(on_error="skip")).count() == 6
    assert ds.count() == 8


def test_wide_data_prints_as_a_table():
    wide = Dataset.from_tensor_slices({f"c{k}": np.zeros((3, k)) for k in range(50)})
    text = repr(wide)
    assert "  column    dtype  shape\n  c0      float64   (0,)\n" in text
    assert "and 10 more columns" in text
    assert "column" not in repr(numbers())


@pytest.mark.cluster
def test_on_workers(client):
    x = np.random.default_rng(0).normal(size=1000)
    ds = Dataset.from_tensor_slices(x).map(lambda v: {"x": v, "worker": worker_of()}, vectorized=False)
    with client.as_current():
        described = ds.describe()
        assert ds.filter(lambda row: row["x"] > 0).count() == (x > 0).sum()
    check_described(described["x"], x)
    assert described["worker"]["min"] != "here"
    here = ds.describe(strategy=MirroredStrategy(["CPU:0"]))
    assert here["worker"]["max"] == "here"


def worker_of():
    from distributed import get_worker

    try:
        return get_worker().address
    except ValueError:
        return "here"


def test_times_are_shown_without_zeros_at_the_end():
    days = np.array(["2024-02-29T12:30", "2024-03-01T00:00:00.5"], "datetime64[us]")
    ds = Dataset.from_tensor_slices({"day": days, "s": ["a", "b"]})
    _, first, second, _ = repr(ds.head(2)).splitlines()
    assert first.split() == ["0", "2024-02-29T12:30:00", "a"]
    assert second.split() == ["1", "2024-03-01T00:00:00.5", "b"]
    day, text = (line.split() for line in repr(ds.describe()).splitlines()[2:])
    assert day == ["day", "2", "0", "-", "-", "2024-02-29T12:30:00", "-", "-", "-", "2024-03-01T00:00:00.5", "2"]
    assert text == ["s", "2", "0", "-", "-", "a", "-", "-", "-", "b", "2"]
