"""Options: their effects, how they merge, and warnings about conflicts."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import dask
import numpy as np
import pytest

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.ops.with_options import options_set
from daskdist.testing import afresh


def with_options(ds, **fields):
    return ds.with_options(Options(**fields))


def test_later_options_override_earlier_ones_field_by_field():
    ds = with_options(Dataset.range(3), deterministic=False, num_threads=2)
    ds = with_options(ds.map(lambda x: x), num_threads=3, seed=5)
    assert dict(options_set(ds.options())) == {"deterministic": False, "num_threads": 3, "seed": 5}


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: Dataset.zip(a, b),
        lambda a, b: a.concatenate(b),
        lambda a, b: Dataset.sample_from_datasets([a, b]),
        lambda a, b: Dataset.choose_from_datasets([a, b], Dataset.range(1)),
    ],
)
def test_conflicting_options_of_several_datasets_warn_and_the_last_wins(combine, caplog):
    a = with_options(Dataset.range(3), num_threads=2, deterministic=True)
    b = with_options(Dataset.range(3), num_threads=4, deterministic=True)
    with caplog.at_level(logging.WARNING, "daskdist"):
        ds = combine(a, b)
    assert ds.options().num_threads == 4
    (message,) = caplog.messages
    assert "num_threads is 2 in one dataset and 4 in a later one, which wins" in message


def test_equal_options_of_several_datasets_do_not_warn(caplog):
    a, b = with_options(Dataset.range(3), num_threads=2), with_options(Dataset.range(3), num_threads=2)
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert Dataset.zip(a, b, Dataset.range(2)).options().num_threads == 2
    assert not caplog.messages


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("auto_shard_policy", "nearby", "'nearby' is not a sharding policy"),
        ("deterministic", 1, "deterministic is 1; give True or False"),
        ("memory_budget_bytes", "much", "memory_budget_bytes is 'much'"),
        ("memory_budget_bytes", 0, "memory_budget_bytes is 0; give 1 or more"),
        ("num_threads", 0, "num_threads is 0; give 1 or more"),
        ("num_threads", 1.5, "num_threads is 1.5; give a whole number"),
        ("on_error", "ignore", "on_error is 'ignore'; give 'raise' or 'skip'"),
        ("seed", "x", "seed is 'x'; give a whole number"),
    ],
)
def test_bad_values(field, value, message):
    with pytest.raises(errors.ArgumentError, match=message):
        Options(**{field: value})
    options = Options()
    with pytest.raises(errors.ArgumentError, match=message):
        setattr(options, field, value)


def test_only_fields_that_are_set_are_shown():
    options = Options(num_processes="auto", auto_shard_policy="data")
    assert repr(options) == "Options(auto_shard_policy='DATA', num_processes='auto')"
    assert Options(auto_shard_policy="DATA", num_processes="auto") == options
    assert repr(Options()) == "Options()"


def test_the_error_about_an_unknown_field_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no 'speed'; there are auto_shard_policy, balance, deterministic"):
        Options().speed = 3
    with pytest.raises(TypeError, match=r"^Options has no 'num_workers'; use options\.num_processes$"):
        Options(num_workers=3)
    with pytest.raises(TypeError, match=r"^Options has no 'speed'; there are .*num_processes"):
        Options(speed=3)
    assert copy.deepcopy(Options(seed=3)) == pickle.loads(pickle.dumps(Options(seed=3))) == Options(seed=3)
    with pytest.raises(errors.ArgumentError, match="expected Options, got dict"):
        Dataset.range(3).with_options({"num_threads": 2})


def test_tensorflows_names():
    options = daskdist.data.Options()
    options.experimental_distribute.auto_shard_policy = daskdist.data.AutoShardPolicy.DATA
    options.threading.private_threadpool_size = 3
    options.autotune.ram_budget = "1 MiB"
    options.deterministic = False
    assert (options.auto_shard_policy, options.num_threads, options.memory_budget_bytes) == (2, 3, 2**20)


def test_sizes_can_be_words():
    assert Options(memory_budget_bytes="64 MiB").memory_budget_bytes == 64 * 2**20


def test_the_number_of_threads():
    seen = set()

    def note(x):
        seen.add(threading.current_thread().name)
        return x

    with dask.config.set({"daskdist.split-bytes": 80}):
        ds = with_options(Dataset.range(400).map(note, vectorized=False), num_threads=1)
        seen.clear()
        assert [int(x) for x in ds] == list(range(400))
    assert len(seen) == 1
    assert seen != {threading.current_thread().name}


def test_the_memory_budget_bounds_what_is_read_ahead():
    def read_ahead(**fields):
        read = []

        def note(x):
            read.append(x)
            return x

        with dask.config.set({"daskdist.split-bytes": 800}):
            ds = with_options(Dataset.range(100_000).map(note, vectorized=False), num_threads=2, **fields)
            read.clear()
            iterator = iter(ds)
            next(iterator)
            iterator.close()
        return len(read)

    assert read_ahead(memory_budget_bytes=1_000) <= 500


def test_blocks_are_given_as_they_are_ready_if_deterministic_is_false():
    first_may_continue = threading.Event()

    def slow_at_first(x):
        if x == 0:
            assert first_may_continue.wait(30)
        return x

    with dask.config.set({"daskdist.split-bytes": 80, "daskdist.num-threads": 4}):
        ds = with_options(
            Dataset.from_tensor_slices(np.arange(40)).map(slow_at_first, vectorized=False),
            deterministic=False,
            num_threads=4,
        )
        # The spec calls the function on made-up elements, none of which is 0.
        iterator = iter(ds)
        early = [int(next(iterator)) for _ in range(10)]
        first_may_continue.set()
        rest = [int(x) for x in iterator]
    assert 0 not in early
    assert sorted(early + rest) == list(range(40))


def test_elements_are_in_order_by_default():
    ds = Dataset.range(1000).map(lambda x: x, num_parallel_calls=4, vectorized=False)
    assert [int(x) for x in ds] == list(range(1000))


@pytest.mark.parametrize("vectorized", [None, False])
def test_elements_that_fail_are_left_out(caplog, vectorized):
    def half(x):
        if int(x) % 4 == 1:
            raise ValueError(f"no {x}")
        return x / 2

    ds = with_options(Dataset.range(10).map(half, vectorized=vectorized), on_error="skip")
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert [float(x) for x in ds.batch(3).unbatch()] == [0, 1, 1.5, 2, 3, 3.5, 4]
    assert "row 5 of range" in caplog.text
    assert "ValueError: no 5" in caplog.text
    assert caplog.messages[-1] == "left out 3 elements in all"


def test_ignored_errors_are_of_what_is_upstream_only():
    def fails(x):
        raise ValueError("downstream")

    ds = Dataset.range(4).map(lambda x: 6 // int(x)).ignore_errors()
    assert [int(x) for x in ds] == [6, 3, 2]
    with pytest.raises(errors.UserFunctionError, match="downstream"):
        list(ds.map(fails))


def test_num_skipped_counts_the_skipped_elements():
    iterator = iter(Dataset.range(8).map(lambda x: 6 // (int(x) % 4)).ignore_errors())
    assert len(list(iterator)) == 6
    assert iterator.stats()["num_skipped"] == 2


def test_a_file_that_cannot_be_read_is_left_out(parquet_files, caplog):
    paths = parquet_files(rows=5, files=3)
    damaged = Path(paths[1])
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:20] + bytes(60) + whole[80:])
    ds = daskdist.read_parquet(paths)
    with pytest.raises(errors.FileError):
        list(ds)
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert [int(d["id"]) for d in ds.ignore_errors()] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert "part-1.parquet" in caplog.text


def test_batches_that_do_not_stack_are_left_out():
    ds = Dataset.range(6).map(lambda x: np.zeros(x if x in (3, 5) else 2)).batch(2).ignore_errors()
    assert [x.shape for x in ds] == [(2, 2)]


def test_errors_of_every_operation_are_ignored():
    def picky(x):
        if int(x) == 3:
            raise ValueError("3")
        return x

    base = Dataset.range(6)
    assert [int(x) for x in base.take_while(lambda x: picky(x) < 9).ignore_errors()] == [0, 1, 2, 4, 5]
    assert [int(x) for x in base.filter(lambda x: picky(x) < 5).ignore_errors()] == [0, 1, 2, 4]
    assert [int(x) for x in base.scan(np.int64(0), lambda s, x: (s + picky(x), s)).ignore_errors()] == [0, 0, 1, 3, 7]
    assert [int(x) for x in base.flat_map(lambda x: Dataset.from_tensors(picky(x))).ignore_errors()] == [0, 1, 2, 4, 5]
    grouped = base.group_by_window(lambda x: picky(x) % 2, lambda key, ds: ds.batch(9), 9).ignore_errors()
    assert [x.tolist() for x in grouped] == [[0, 2, 4], [1, 5]]


@pytest.mark.parametrize("is_option", [False, True])
@pytest.mark.parametrize("name", ["flat_map", "interleave"])
def test_errors_in_datasets_of_elements_leave_out_the_rows_and_datasets_that_fail(tmp_path, caplog, name, is_option):
    contents = {"a": "x,y\n1,2\n3,4,5\n6,7\n", "c": "x,y\n8,9\n10,11\n"}
    for stem, text in contents.items():
        Path(tmp_path, f"{stem}.csv").write_text(text)
    names = Dataset.from_tensor_slices([str(tmp_path / f"{stem}.csv") for stem in "abc"])
    ds = getattr(names, name)(lambda path: daskdist.read_csv(str(path), "x"))
    # In the second turn, there is no file for `interleave`.
    first = {"flat_map": r"its row 1.* has 3 fields", "interleave": "no such file"}[name]
    with pytest.raises(errors.DaskdistError, match=first):
        list(ds)
    ds = ds.with_options(Options(on_error="skip")) if is_option else ds.ignore_errors()
    expected = [1, 6, 8, 10]
    iterator = iter(ds)
    assert [int(x) for x in iterator] == expected
    assert iterator.stats()["num_skipped"] == 2
    assert "left out row 1 of" in caplog.text
    assert "no such file" in caplog.text
    for number in range(len(expected)):
        iterator = iter(ds)
        for _ in range(number):
            next(iterator)
        resumed = iter(ds)
        resumed.load_state_dict(iterator.state_dict())
        assert [int(x) for x in resumed] == expected[number:]


@pytest.mark.cluster
def test_errors_in_datasets_of_elements_are_left_out_on_a_cluster(on_cluster, tmp_path):
    for stem, text in {"a": "x\n1\n3,4\n6\n", "c": "x\n8\n"}.items():
        Path(tmp_path, f"{stem}.csv").write_text(text)
    names = Dataset.from_tensor_slices([str(tmp_path / f"{stem}.csv") for stem in "abc"])
    ds = names.flat_map(lambda path: daskdist.read_csv(str(path), "x")).ignore_errors().batch(2)
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds)]
    assert sorted(int(x) for step in steps for part in step for x in part) == [1, 6, 8]


@pytest.mark.cluster
def test_ignored_errors_are_logged_on_a_cluster(on_cluster, caplog):
    ds = Dataset.range(20).map(lambda x: 60 // (int(x) % 5)).ignore_errors().batch(8)
    with caplog.at_level(logging.WARNING, "daskdist"):
        steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds)]
    assert [int(x) for step in steps for part in step for x in part] == [60, 30, 20, 15] * 4
    assert sum("ZeroDivisionError" in message for message in caplog.messages) == 4


def test_a_seed_for_the_whole_pipeline():
    def order(**fields):
        ds = Dataset.range(50).shuffle(50).batch(5).shuffle(10)
        return [x.tolist() for x in with_options(ds, **fields)]

    assert order(seed=1) == order(seed=1)
    assert order(seed=1) != order(seed=2)
    assert order() != order()


def test_the_seed_of_an_operation_overrides_that_of_the_options():
    own = Dataset.range(50).shuffle(50, seed=4)
    assert [int(x) for x in with_options(afresh(own), seed=1)] == [int(x) for x in own]


def test_a_seed_for_the_whole_program():
    with dask.config.set({"daskdist.seed": 3}):
        first = [int(x) for x in Dataset.range(50).shuffle(50)]
        assert [int(x) for x in Dataset.range(50).shuffle(50)] == first
    assert [int(x) for x in Dataset.range(50).shuffle(50, seed=3)] == first


def test_two_operations_with_one_seed_do_not_draw_alike():
    ds = with_options(Dataset.range(50).shuffle(50), seed=1)
    twice = with_options(Dataset.range(50).shuffle(50).shuffle(50), seed=1)
    assert [int(x) for x in ds] != [int(x) for x in twice]
    with using(Synchronous):
        assert sorted(int(x) for x in twice) == list(range(50))


def test_settings_stay_though_one_was_set_before_they_were_known():
    script = (
        "import dask, daskdist\n"
        "with dask.config.set({'daskdist.split-bytes': 80}):\n"
        "    print(len(list(daskdist.Dataset.range(30))))\n"
        "print(len(list(daskdist.Dataset.range(30))))\n"
        "from daskdist.config import setting\n"
        "print(setting('split-bytes'), setting('timeouts.connect'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["30", "30", "16", "MiB", "8"]
