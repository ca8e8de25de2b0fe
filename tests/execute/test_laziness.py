"""Building a pipeline, and looking at it, computes nothing."""

from __future__ import annotations

import glob
import os

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask.base import tokenize

import daskdist
from daskdist import Dataset
from daskdist.errors import DaskdistError
from daskdist.testing import never_run

# Name of the last operation -> a function that builds the pipeline.
BUILDERS = {
    "range": lambda ds: Dataset.range(10),
    "from_tensors": lambda ds: Dataset.from_tensors((1, [2.0])),
    "from_tensor_slices": lambda ds: Dataset.from_tensor_slices({"a": np.arange(3)}),
    "from_dask": lambda ds: Dataset.from_dask(da.ones((6, 2), chunks=3).map_blocks(_fail, dtype=float)),
    "read_parquet": lambda ds: ds,
    "map": lambda ds: ds.map(lambda d: d["a"] * 2),
    "map of batches": lambda ds: ds.batch(2).map(lambda d: d["a"] * 2),
    "filter": lambda ds: ds.filter(lambda d: d["a"] > 2),
    "batch": lambda ds: ds.batch(2),
    "batch of batches": lambda ds: ds.batch(2, drop_remainder=True).batch(2),
    "shuffle": lambda ds: ds.shuffle(4),
    "repeat": lambda ds: ds.repeat(2),
    "repeat for ever": lambda ds: ds.repeat(),
    "take": lambda ds: ds.take(2),
    "skip": lambda ds: ds.skip(2),
    "prefetch": lambda ds: ds.prefetch(2),
    "with_options": lambda ds: ds.with_options(daskdist.Options(auto_shard_policy="data")),
    "all of them": lambda ds: ds.map(lambda d: d["a"]).shuffle(9).batch(2).map(np.negative).prefetch(1).take(2),
}


def _fail(*args):
    raise AssertionError("a partition was computed")


@pytest.fixture
def files(tmp_path):
    for number in range(2):
        pq.write_table(pa.table({"a": np.arange(4) + number * 4}), tmp_path / f"{number}.parquet", row_group_size=2)
    return str(tmp_path / "*.parquet")


@pytest.mark.parametrize("name", BUILDERS)
def test_building_and_printing_a_dataset_computes_nothing(name, files):
    with never_run():
        ds = BUILDERS[name](daskdist.read_parquet(files))
        assert ds.element_spec is not None
        assert name.split()[0] in repr(ds) or name.startswith(("from_tensors", "all"))
        assert "pipeline:" in ds.explain()
        assert isinstance(ds.cardinality(), int)
        assert len(ds) == ds.cardinality() if ds.cardinality() >= 0 else bool(ds)
        assert isinstance(ds.options(), daskdist.Options)
        assert tokenize(ds) == tokenize(ds)


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "repeat for ever"])
def test_building_a_graph_computes_nothing(name, files):
    with never_run():
        ds = BUILDERS[name](daskdist.read_parquet(files))
        assert len(ds.__dask_graph__()) >= len(ds.__dask_keys__()) > 0
        if name in ("batch", "map of batches"):
            ds.to_dask_array()


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", BUILDERS)
def test_distributing(name, num_replicas, files):
    with never_run():
        strategy = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(num_replicas)])
        ds = BUILDERS[name](daskdist.read_parquet(files))
        dist = strategy.distribute_dataset(ds.batch(4, drop_remainder=True))
        assert dist.element_spec is not None
        assert str(num_replicas) in repr(dist)
        assert "sharding" in dist.explain()
        assert isinstance(dist.cardinality(), int)


def test_iterators_compute_nothing_before_next(files):
    with never_run():
        ds = daskdist.read_parquet(files).batch(2)
        iter(ds)
        ds.as_numpy_iterator()
        it = iter(daskdist.MirroredStrategy(["CPU:0", "CPU:1"]).distribute_dataset(ds))
        assert it.element_spec is not None
        it.close()


def test_functions_see_only_made_up_elements(files):
    seen = []
    ds = daskdist.read_parquet(files).map(lambda d: seen.append(d["a"]) or d["a"])
    repr(ds.batch(2)), ds.explain(), ds.element_spec
    # The function sees none of the values 4, 5 and 6, which are in the files.
    assert all(value in (0, 1, 2, 3, 7) for value in seen)
    assert len(seen) <= 6, "the function should be called with sample elements once for each pipeline"


def test_splits_are_not_listed_before_they_are_wanted(files, monkeypatch):
    from daskdist.formats.parquet import Parquet

    def list_splits(self, path, file, like):
        raise AssertionError("row groups were listed")

    monkeypatch.setattr(Parquet, "list_splits", list_splits)
    ds = daskdist.read_parquet(files).map(lambda d: d["a"]).shuffle(3).batch(2)
    assert ds.element_spec.shape == (None,)
    assert "read_parquet" in ds.explain()


def test_never_run_refuses_operations_that_compute(files):
    ds = daskdist.read_parquet(files)
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    with never_run():
        for run in (
            lambda: next(iter(ds)),
            lambda: list(ds.batch(2).prefetch(1)),
            lambda: ds.batch(2).compute(),
            lambda: ds.batch(2).persist(),
            lambda: ds.batch(2).map(lambda d: d["a"]).to_dask_array().sum().compute(),
            lambda: next(iter(strategy.distribute_dataset(ds.batch(2)))),
        ):
            with pytest.raises(DaskdistError, match="may be"):
                run()
    assert len(list(ds)) == 8


def test_no_file_stays_open(files):
    import psutil

    ds = daskdist.read_parquet(files)
    repr(ds), len(ds)
    list(ds.batch(3))
    it = iter(ds)
    next(it)
    it.close()
    # This counts the whole process, in which other tests' files may be closed at any time.
    assert not {file.path for file in psutil.Process().open_files()} & set(map(os.path.realpath, glob.glob(files)))
