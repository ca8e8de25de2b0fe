"""`to_pandas`, `to_dask_dataframe` and `to_delayed`: elements for pandas and Dask, in their order."""

from __future__ import annotations

import sys

import dask
import numpy as np
import pandas as pd
import pytest

from daskdist import Dataset, errors


def frame(number=20):
    return pd.DataFrame(
        {
            "day": pd.date_range("2020-01-01", periods=number).astype("datetime64[ns]"),
            "flag": np.arange(number) % 3 == 0,
            "name": [f"row {k}" for k in range(number)],
            "x": np.where(np.arange(number) % 4 == 0, np.nan, np.arange(number) / 2),
        }
    )


def dataset(number=20):
    data = frame(number)
    return Dataset.from_tensor_slices(
        {name: data[name].tolist() if name == "name" else data[name].to_numpy() for name in data}
    )


def check_rows(ds, **arguments):
    with dask.config.set({"daskdist.split-bytes": 60}):
        actual = ds.to_pandas(**arguments)
    pd.testing.assert_frame_equal(actual[list(frame())], frame())


def test_frames_have_the_rows_of_the_dataset():
    check_rows(dataset())
    check_rows(dataset().prefetch(2), unbatch=False)
    check_rows(dataset().batch(3), unbatch=True)
    check_rows(dataset().batch(3).map(lambda batch: batch), unbatch=True)
    check_rows(dataset().batch(3).unbatch())


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds.batch(3),
        lambda ds: ds.batch(4, drop_remainder=True).prefetch(1),
        lambda ds: ds.batch(3).map(lambda batch: batch["x"] * 2),
        lambda ds: ds.batch(2, drop_remainder=True).batch(2),
    ],
)
def test_batches_are_refused_unless_unbatch_is_given(build):
    with pytest.raises(errors.ArgumentError, match="unbatch=True"):
        build(dataset()).to_pandas()
    assert len(build(dataset()).to_pandas(unbatch=False)) == len(list(build(dataset())))


def test_results_of_maps_over_batches_may_be_rows():
    means = Dataset.from_tensor_slices(np.ones((9, 5))).batch(3).map(lambda batch: batch.mean(axis=0)).to_pandas()
    assert [mean.tolist() for mean in means["value"]] == [[1.0] * 5] * 3
    assert Dataset.range(9).batch(3).map(lambda batch: batch.sum()).to_pandas()["value"].tolist() == [3, 12, 21]


def test_predictions_are_in_the_order_of_the_rows():
    predicted = Dataset.range(10).batch(4).map(lambda x: {"x": x, "y": x * 2}).to_pandas(unbatch=True)
    assert predicted["y"].tolist() == [2 * k for k in range(10)]


def test_columns():
    assert Dataset.range(3).to_pandas()["value"].tolist() == [0, 1, 2]
    assert list(Dataset.range(3).map(lambda x: (x, x)).to_pandas()) == ["0", "1"]
    images = Dataset.from_tensor_slices(np.zeros((3, 2))).to_pandas()
    assert [image.tolist() for image in images["value"]] == [[0, 0]] * 3
    empty = dataset().filter(lambda row: row["x"] > 100).to_pandas()
    assert len(empty) == 0
    assert list(empty) == list(dataset().columns)


def test_elements_that_cannot_become_a_frame():
    with pytest.raises(errors.UnknownLengthError, match="to_pandas: the dataset is endless"):
        Dataset.counter().to_pandas()
    with pytest.raises(errors.ArgumentError):
        Dataset.range(3).window(2).to_pandas()


def test_to_delayed():
    ds = Dataset.range(10).shuffle(10, seed=1).batch(3)
    parts = ds.to_delayed()
    assert len(parts) == 4
    first = list(Dataset.range(10).shuffle(10, seed=1).batch(3))
    assert [part.tolist() for part in dask.compute(*parts)] == [batch.tolist() for batch in first]
    total = sum(part.sum() for part in parts)
    assert total.compute() == 45
    some = Dataset.range(10).filter(lambda x: x % 3 == 0)
    assert list(dask.compute(*some.assert_cardinality(4).to_delayed())) == [0, 3, 6, 9]
    with pytest.raises(errors.UnknownLengthError, match="to_delayed: the number of elements is unknown"):
        some.to_delayed()
    with pytest.raises(errors.UnknownLengthError, match="endless"):
        Dataset.counter().to_delayed()


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (lambda ds: ds, {}),
        (lambda ds: ds.batch(3), {"unbatch": True}),
        (lambda ds: ds.batch(3).map(lambda batch: batch), {"unbatch": True}),
        (lambda ds: ds.take(7), {"unbatch": False}),
        (lambda ds: ds.map(lambda row: {"x": row["x"], "list": [1] * len(row["name"])}), {}),
        (lambda ds: ds.filter(lambda row: row["x"] > 3).assert_cardinality(10), {}),
        (lambda ds: ds.take(0), {}),
    ],
)
def test_dask_dataframes_have_the_rows_of_pandas(build, arguments):
    ds = build(dataset())
    with dask.config.set({"daskdist.split-bytes": 60, "daskdist.bundle-bytes": 100}):
        actual = ds.to_dask_dataframe(**arguments)
        expected = ds.to_pandas(**arguments)
        assert list(actual.columns) == list(expected.columns)
        if len(expected) > 3:
            assert actual.npartitions > 1
        computed = actual.compute().reset_index(drop=True)
    pd.testing.assert_frame_equal(computed, expected)
    assert list(actual.dtypes) == list(expected.dtypes) == list(computed.dtypes)


def test_batches_are_partitions():
    actual = Dataset.range(10).batch(4).map(lambda x: {"x": x}).to_dask_dataframe(unbatch=True)
    assert [len(part) for part in dask.compute(*actual.to_delayed())] == [4, 4, 2]
    assert actual.x.mean().compute() == 4.5


@pytest.mark.cluster
def test_dask_dataframes_are_computed_on_workers(client):
    actual = Dataset.range(10).batch(4).map(lambda x: {"x": x}).to_dask_dataframe(unbatch=True)
    assert client.compute(actual.x.sum()).result(timeout=60) == 45


def test_datasets_that_make_no_dask_dataframe_are_refused():
    with pytest.raises(errors.ArgumentError, match="to_dask_dataframe: elements look like batches"):
        Dataset.range(9).batch(3).to_dask_dataframe()
    with pytest.raises(errors.UnknownLengthError, match="to_dask_dataframe: the number of elements is unknown"):
        Dataset.range(9).filter(lambda x: x > 3).to_dask_dataframe()
    with pytest.raises(errors.UnknownLengthError, match="to_dask_dataframe: the dataset is endless"):
        Dataset.counter().to_dask_dataframe()


@pytest.mark.parametrize("name", ["to_pandas", "to_dask_dataframe"])
def test_a_missing_pandas_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(errors.MissingPackageError, match="needs pandas: pip install"):
        getattr(Dataset.range(3), name)()
