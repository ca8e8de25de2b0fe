"""Stored elements of pipelines: caches in memory and on disk, snapshots, saved datasets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dask
import numpy as np
import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import eventually

import daskdist
from daskdist import Dataset, Ragged, TensorSpec, errors
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.formats.saved.saved_format import Saved
from daskdist.testing import FormatLaws, same_elements


class Counted:
    """A function that counts its calls, in this process."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2


def files_in(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


class TestSaved(FormatLaws):
    def make_format(self):
        return Saved()

    def write(self, directory):
        written = {}
        for number, num_rows in enumerate([5, 0, 120]):
            path = str(directory / str(number))
            lengths = [place * num_rows * 4 for place in range(num_rows)]
            rows = [{"x": np.arange(n) + number, "y": (np.float32(n), b"\x00a\x00")} for n in lengths]
            ds = Dataset.from_generator(
                lambda rows=rows: rows,
                {"x": TensorSpec((None,), "int64"), "y": (TensorSpec((), "float32"), TensorSpec((), object))},
            )
            ds.save(path)
            written[path] = [{"x": row["x"], "y": (row["y"][0], np.array(row["y"][1], object))} for row in rows]
        return written


@pytest.mark.parametrize("caller", [Synchronous, Threads])
def test_cached_elements_are_computed_once(caller):
    function = Counted()
    ds = Dataset.range(20).map(function, vectorized=False).cache()
    function.calls = 0
    with using(caller):
        passes = [list(ds.batch(3)) for _ in range(3)]
    assert function.calls == 20
    same_elements(passes[1], passes[0], "second pass")
    same_elements(passes[2], passes[0], "third pass")


def test_a_pass_that_ends_early_is_not_cached():
    function = Counted()
    ds = Dataset.range(20).map(function, vectorized=False).cache()
    assert [int(x) for x in ds.take(3)] == [0, 2, 4]
    function.calls = 0
    assert len(list(ds)) == 20
    assert function.calls == 20


def test_a_cache_keeps_the_order():
    ds = Dataset.range(30).shuffle(30).cache()
    first = [int(x) for x in ds]
    assert [int(x) for x in ds] == first
    assert [int(x) for x in ds.repeat(2)] == first * 2
    assert sorted(first) == list(range(30))
    assert [int(x) for x in ds.shuffle(30)] != first


def test_elements_come_from_a_cache_though_its_window_is_full():
    with dask.config.set({"daskdist.window-bytes": 200, "daskdist.split-bytes": 80}):
        ds = Dataset.range(200).cache()
        assert [list(map(int, ds)) for _ in range(2)] == [list(range(200))] * 2


def test_derived_datasets_share_a_cache():
    function = Counted()
    cached = Dataset.range(10).map(function, vectorized=False).cache()
    function.calls = 0
    assert len(list(cached.batch(2))) == 5
    assert len(list(cached.filter(lambda x: x > 3))) == 8
    assert function.calls == 10


def test_cached_in_a_graph():
    ds = Dataset.range(6).cache().batch(2)
    same_elements(dask.compute(ds, scheduler="sync")[0], list(ds), "as a graph")


@pytest.mark.cluster
def test_cached_on_a_cluster(on_cluster):
    ds = Dataset.range(40).shuffle(40).cache().batch(10)
    distributed = on_cluster.distribute_dataset(ds)
    passes = [[on_cluster.local_results(step) for step in distributed] for _ in range(2)]
    rows = [[int(x) for step in steps for part in step for x in part] for steps in passes]
    assert rows[0] == rows[1]
    assert sorted(rows[0]) == list(range(40))


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("method", ["cache", "snapshot"])
def test_written_by_one_pass_and_read_by_the_next(tmp_path, method, caller):
    function = Counted()

    def make():
        mapped = Dataset.range(20).shuffle(7, seed=1).map(function, vectorized=False)
        return getattr(mapped, method)(tmp_path)

    ds = make()
    with using(caller):
        first = list(ds)
        function.calls = 0
        same_elements(list(ds), first, "second pass")
        again = make()
        function.calls = 0
        same_elements(list(again.batch(4)), list(make().batch(4)), "of datasets made again")
    assert function.calls < 20  # The function is called only to learn the spec.
    assert len(os.listdir(tmp_path)) == 1


def test_a_pass_that_ends_early_leaves_no_file(tmp_path):
    iterator = iter(Dataset.range(2000).batch(3).snapshot(tmp_path))
    next(iterator)
    assert files_in(tmp_path)
    iterator.close()
    del iterator
    # A part that is being written is finished before its file is removed.
    eventually(lambda: files_in(tmp_path) == [])


def test_a_changed_pipeline_does_not_read_files_of_another(tmp_path):
    assert [int(x) for x in Dataset.range(5).cache(tmp_path)] == [0, 1, 2, 3, 4]
    assert [int(x) for x in Dataset.range(9).cache(tmp_path)] == list(range(9))
    assert [int(x) for x in Dataset.range(5).map(lambda x: x + 1).cache(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(os.listdir(tmp_path)) == 3


def test_changed_data_does_not_read_old_files(tmp_path):
    path, kept = tmp_path / "a.parquet", tmp_path / "kept"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    assert [int(d["a"]) for d in daskdist.read_parquet(path).snapshot(kept)] == [1, 2]
    pq.write_table(pa.table({"a": [1, 2, 3]}), path)
    assert [int(d["a"]) for d in daskdist.read_parquet(path).snapshot(kept)] == [1, 2, 3]


def test_a_snapshot_is_read_by_another_process(tmp_path):
    program = (
        "import sys\n"
        "from daskdist import Dataset\n"
        "def double(x):\n"
        "    sys.stderr.write('called ')\n"
        "    return x * 2\n"
        "ds = Dataset.range(9).shuffle(9).map(double, vectorized=False).snapshot(sys.argv[1])\n"
        "sys.stderr.write('| ')\n"
        "print([int(x) for x in ds])\n"
    )
    # The second is a new process: the hashes of text differ.
    arguments, options = ["-c", program, str(tmp_path)], {"check": True, "timeout": 60}
    runs = [
        programs.run(*arguments, **options),
        subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options),
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr.partition("|")[2].count("called") == 9
    assert runs[1].stderr.partition("|")[2].count("called") == 0


def test_snapshots_in_a_graph(tmp_path):
    ds = Dataset.range(6).snapshot(tmp_path).batch(2)
    expected = list(Dataset.range(6).batch(2))
    for _ in range(2):
        same_elements(dask.compute(ds, scheduler="sync")[0], expected, "as a graph")


@pytest.mark.cluster
def test_written_by_the_workers_of_a_cluster(tmp_path, on_cluster):
    def make():
        return Dataset.range(40).map(lambda x: (x, os.getpid()), vectorized=False).snapshot(tmp_path).batch(10)

    rows = []
    for _ in range(2):
        steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(make())]
        rows.append(
            [(int(x), int(pid)) for step in steps for xs, pids in step for x, pid in zip(xs, pids, strict=True)]
        )
    assert rows[0] == rows[1]
    assert [x for x, _ in rows[0]] == list(range(40))
    assert os.getpid() not in {pid for _, pid in rows[0]}


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_saved_and_loaded(tmp_path, compression):
    ds = Dataset.range(12).map(lambda x: {"a": np.full(x % 4, x), "b": (x / 2, "w" * int(x))})
    ds.save(tmp_path, compression)
    loaded = Dataset.load(tmp_path)
    same_elements(list(loaded), list(ds), "loaded")
    assert len(loaded) == 12
    assert loaded.element_spec["b"] == ds.element_spec["b"]
    same_elements(list(loaded.padded_batch(5)), list(ds.padded_batch(5)), "loaded, in batches")


def test_saved_batches_stay_batches(tmp_path):
    Dataset.range(7).batch(3).save(tmp_path / "stacked")
    assert [x.tolist() for x in Dataset.load(tmp_path / "stacked")] == [[0, 1, 2], [3, 4, 5], [6]]
    Dataset.range(5).map(lambda x: np.full(x, x)).ragged_batch(2).save(tmp_path / "ragged")
    actual = list(Dataset.load(tmp_path / "ragged"))
    assert [type(x) for x in actual] == [Ragged] * 3
    assert [x.tolist() for x in actual] == [[[], [1]], [[2, 2], [3, 3, 3]], [[4, 4, 4, 4]]]


def test_saving_again_replaces_the_old_dataset_only_on_success(tmp_path):
    Dataset.range(5).save(tmp_path)
    old = files_in(tmp_path)

    def fails(x):
        if x == 900:
            raise ValueError("no")
        return x

    with pytest.raises(errors.UserFunctionError, match="ValueError: no"):
        Dataset.range(1000).map(fails, vectorized=False).save(tmp_path)
    assert [int(x) for x in Dataset.load(tmp_path)] == [0, 1, 2, 3, 4]
    Dataset.range(3).save(tmp_path)
    assert [int(x) for x in Dataset.load(tmp_path)] == [0, 1, 2]
    assert len(files_in(tmp_path)) == len(old)


def test_loaded_in_shards_and_shuffled(tmp_path):
    with dask.config.set({"daskdist.split-bytes": 800}):
        Dataset.range(1000).save(tmp_path)
    loaded = Dataset.load(tmp_path)
    assert sorted(int(x) for x in loaded.global_shuffle(seed=1)) == list(range(1000))
    assert [int(x) for x in loaded.shard(4, 1)] == list(range(1, 1000, 4))


def test_loading_checks_the_spec(tmp_path):
    Dataset.range(3).save(tmp_path)
    assert len(Dataset.load(tmp_path, TensorSpec((), "int64"))) == 3
    with pytest.raises(errors.ArgumentError, match=r"element_spec is .*float32.*the saved elements are .*int64"):
        Dataset.load(tmp_path, TensorSpec((), "float32"))


def test_datasets_that_cannot_be_loaded(tmp_path):
    with pytest.raises(errors.FileError, match="nothing-there"):
        Dataset.load(tmp_path / "nothing-there")
    Dataset.range(3).save(tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    with pytest.raises(errors.FileError, match="manifest"):
        Dataset.load(tmp_path / "damaged")


def test_elements_that_cannot_be_written(tmp_path):
    endless = Dataset.counter()
    for write in (lambda: endless.save(tmp_path), lambda: endless.snapshot(tmp_path), lambda: endless.cache(tmp_path)):
        with pytest.raises(errors.UnknownLengthError, match="endless"):
            write()
    with pytest.raises(errors.ArgumentError, match="gzip"):
        Dataset.range(3).save(tmp_path, compression="gzip")
    with pytest.raises(errors.ArgumentError, match="dataset"):
        Dataset.range(3).window(2).snapshot(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FileError, match="file"):
        Dataset.range(3).save(tmp_path / "file")


@pytest.mark.parametrize("write", ["save", "snapshot", "cache"])
def test_elements_that_cannot_be_written_are_never_skipped(tmp_path, write):
    (tmp_path / "file").write_text("")
    skipping = daskdist.Options(on_error="skip")

    def written(ds, path):
        made = getattr(ds.with_options(skipping), write)(str(path))
        return made if made is None else list(made)

    with pytest.raises(errors.FileError, match=r"file/a.*cannot be written"):
        written(Dataset.range(3), tmp_path / "file" / "a")
    nothing = np.array([b"", None], object)
    with pytest.raises(errors.ArgumentError, match="NoneType, but only bytes can be saved"):
        written(Dataset.range(3).map(lambda x: nothing, vectorized=False), tmp_path / "a")


def test_elements_left_out_are_not_saved(tmp_path):
    odd = Dataset.range(12).map(lambda x: np.zeros(2 if x == 3 else 3), vectorized=False)
    odd.batch(2).with_options(daskdist.Options(on_error="skip")).save(tmp_path)
    assert [x.shape for x in Dataset.load(tmp_path)] == [(2, 3)] * 5


def test_saved_datasets_are_read_like_files(tmp_path):
    Dataset.range(3).batch(2).save(tmp_path / "a")
    for given in (None, "saved"):
        assert [batch.tolist() for batch in daskdist.read_files(tmp_path / "a", given)] == [[0, 1], [2]]
    # Files of other programs may have the same name.
    (tmp_path / "manifest.json").write_text('{"version": 1}')
    assert [dict(row) for row in daskdist.read_files(tmp_path / "manifest.json")] == [{"version": 1}]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_text("one\n")
    (tmp_path / "b" / "manifest.json").write_text('{"version": 1}')
    assert list(daskdist.read_files(tmp_path / "b")) == ["one"]
