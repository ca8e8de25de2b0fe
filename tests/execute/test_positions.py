"""Positions: an iterator that continues from any of them gives exactly the remaining elements."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import cycle, islice

import dask
import numpy as np
import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import every_pair, mirrored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import pipelines

import daskdist
from daskdist import Dataset, Ragged, TensorSpec, errors, read_parquet, read_text
from daskdist.core.selection import resume_points
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.ops import shuffle
from daskdist.testing import same_elements

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

LARGE = {"daskdist.split-bytes": 2**24, "daskdist.window-bytes": 2**28}
SMALL = {"daskdist.split-bytes": 24, "daskdist.window-bytes": 100}


LARGE_TESTS = {
    "test_positions_are_small_and_plain",
    "test_from_positions_after_resume_points_the_rest",
    "test_positions_in_endless_repetitions_stay_small",
}


@pytest.fixture(autouse=True)
def frequent_points(request, monkeypatch):
    """Let operations record states often, and shuffles look at several, unless the test is about large datasets."""
    if request.function.__name__ not in LARGE_TESTS:
        monkeypatch.setattr(resume_points, "_FEW_ELEMENTS", 2)
        monkeypatch.setattr(shuffle, "_DRAWS", 1)
        monkeypatch.setattr(shuffle, "_GOING_BACK", 1)


def count(stop):
    yield from range(stop)


def generated(stop=9):
    return Dataset.from_generator(count, TensorSpec((), "int64"), args=(stop,))


def arrays():
    """Return elements of different lengths."""
    return Dataset.range(9).map(lambda x: np.full(x % 5, x))


def from_dask():
    import dask.array as da

    return Dataset.from_dask(da.arange(20, chunks=6))


# Every operation, each before or after an operation that holds elements back.
PIPELINES = {
    "range": lambda: Dataset.range(10),
    "counter": lambda: Dataset.counter(3).take(12).shuffle(4, seed=1),
    "random": lambda: Dataset.random(seed=3).take(9),
    "slices": lambda: Dataset.from_tensor_slices({"a": np.arange(9)}).batch(2),
    "ragged slices": lambda: Dataset.from_tensor_slices(Ragged(np.arange(10), [0, 2, 2, 5, 9, 10])).shuffle(3, seed=1),
    "list": lambda: Dataset.from_list([1, 2, 3]).shuffle(2, seed=1),
    "generator": lambda: generated(15).shuffle(5, seed=1).batch(2),
    "generator twice": lambda: generated(6).repeat(2).shuffle(5, seed=1),
    "from_dask": lambda: from_dask().shuffle(5, seed=1).batch(3),
    "batch": lambda: Dataset.range(23).batch(3),
    "map": lambda: Dataset.range(23).batch(2).shuffle(3, seed=1).map(lambda x: x * 2),
    "filter": lambda: Dataset.range(24).filter(lambda x: x % 3 > 0).shuffle(4, seed=3).batch(4),
    "shuffle": lambda: Dataset.range(23).shuffle(5, seed=1).batch(3),
    "repeat": lambda: Dataset.range(4).shuffle(4, seed=2).repeat(3).batch(2),
    "take, skip": lambda: Dataset.range(23).shuffle(5, seed=1).skip(3).take(9),
    "zip": lambda: Dataset.zip(Dataset.range(12).shuffle(4, seed=1), Dataset.range(30).batch(2)).batch(2),
    "enumerate": lambda: Dataset.range(12).shuffle(4, seed=1).enumerate(),
    "concatenate": lambda: Dataset.range(6).concatenate(Dataset.range(10, 15)).shuffle(3, seed=1),
    "choose": lambda: Dataset.choose_from_datasets(
        [Dataset.range(6), Dataset.range(10, 16).shuffle(3, seed=1)], Dataset.random(seed=1).map(lambda x: x % 2)
    ),
    "sample": lambda: Dataset.sample_from_datasets([Dataset.range(6), Dataset.range(10, 16)], seed=1),
    "flat_map": lambda: Dataset.range(6).flat_map(Dataset.range),
    "flat_map of streams": lambda: Dataset.range(5).flat_map(lambda x: generated(int(x))),
    "interleave": lambda: Dataset.range(6).interleave(Dataset.range, 3, 2),
    "interleave of streams": lambda: Dataset.range(5).interleave(lambda x: generated(int(x)), 3, 2).shuffle(3, seed=1),
    "shard": lambda: Dataset.range(17).shard(3, 1),
    "take_while": lambda: Dataset.range(17).take_while(lambda x: x < 8).shuffle(3, seed=1),
    "unique": lambda: Dataset.range(20).map(lambda x: x % 7).unique(),
    "scan": lambda: Dataset.range(13).scan(np.int64(0), lambda s, x: (s + x, s + x)).shuffle(3, seed=1),
    "rejection_resample": lambda: Dataset.range(26).rejection_resample(lambda x: x % 2, [0.9, 0.1], seed=1),
    "window": lambda: Dataset.range(17).window(3, 2).flat_map(lambda w: w.batch(3)),
    "sliding_window": lambda: Dataset.range(17).sliding_window(3, 2).shuffle(3, seed=1),
    "sliding_window of uneven blocks": lambda: Dataset.range(24).filter(lambda x: x % 3 > 0).sliding_window(9).batch(2),
    "window of datasets": lambda: Dataset.range(17).window(3, 2).flat_map(lambda w: w.map(lambda x: x).batch(3)),
    "group_by_window": lambda: Dataset.range(17).group_by_window(lambda x: x % 3, lambda k, w: w.batch(4), 2),
    "bucket_by_sequence_length": lambda: arrays().bucket_by_sequence_length(len, [2, 4], [2, 2, 2]),
    "batch_by_size": lambda: arrays().batch_by_size(9, len),
    "batch_by_size in rounds": lambda: arrays().batch_by_size(9, len, 5, round_size=2),
    "padded_batch": lambda: arrays().shuffle(3, seed=1).padded_batch(2),
    "ragged_batch": lambda: arrays().shuffle(3, seed=1).ragged_batch(2),
    "unbatch": lambda: Dataset.range(9).batch(2).map(lambda x: x).unbatch(),
    "unbatch of batches": lambda: Dataset.range(9).batch(2).unbatch().shuffle(3, seed=1),
    "rebatch": lambda: Dataset.range(19).batch(4).rebatch([2, 1, 0]),
    "ignore_errors": lambda: Dataset.range(12).map(lambda x: 1 // (int(x) % 4)).ignore_errors().batch(2),
    "split": lambda: Dataset.range(17).split(0.6)[0].shuffle(3, seed=1),
    "split of unknown number": lambda: Dataset.range(23).filter(lambda x: x % 3 > 0).split(0.6)[1].batch(2),
    "split by key": lambda: Dataset.range(17).split(0.6, by=lambda x: x // 2)[0].shuffle(3, seed=1),
    "split by label": lambda: Dataset.range(17).split(0.6, stratify=lambda x: x % 2)[0].shuffle(3, seed=1),
    "select": lambda: Dataset.range(9).map(lambda x: {"a": x, "b": -x}).shuffle(3, seed=1).rename({"b": "c"})["c"],
    "global_shuffle": lambda: Dataset.range(19).global_shuffle(seed=1).batch(2),
    "global_shuffle of mapped": lambda: Dataset.range(19).map(lambda x: x).global_shuffle(seed=1).batch(2),
    "cache": lambda: Dataset.range(9).shuffle(3, seed=1).cache().repeat(3).batch(2),
    "assert_cardinality": lambda: Dataset.range(9).assert_cardinality(9),
    "prefetch": lambda: Dataset.range(9).shuffle(3, seed=1).prefetch(2),
}


def begun(make, number, caller):
    """Return an iterator from which a number of elements was taken."""
    with using(caller):
        iterator = iter(make())
    for _ in range(number):
        next(iterator)
    return iterator


def check_every_position(make, caller):
    whole = list(begun(make, 0, caller))
    # Taking a state at each position, or only once, does not change the elements.
    asked, states = begun(make, 0, caller), []
    for expected in whole:
        states.append(json.dumps(asked.state_dict()))
        same_elements([next(asked)], [expected], f"the iterator that was asked at {len(states) - 1}")
    states.append(json.dumps(asked.state_dict()))
    assert list(asked) == []
    # The first state above was asked before anything else, too.
    once = {1, len(whole) // 2, len(whole)}
    for number, state in enumerate(states):
        again = begun(make, 0, caller)
        again.load_state_dict(json.loads(state))
        same_elements(list(again), whole[number:], f"continued from {number}")
        if number in once:
            iterator = begun(make, number, caller)
            again = begun(make, 0, caller)
            again.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
            same_elements(list(again), whole[number:], f"continued from {number}, asked once")
            same_elements(list(iterator), whole[number:], f"the iterator that was asked once, from {number}")
        if number in once:
            # An iterator that is at its end, or in the middle, continues from the position, too.
            asked.load_state_dict(json.loads(state))
            same_elements(list(islice(asked, 2)), whole[number : number + 2], f"in place from {number}")
            asked.load_state_dict(json.loads(state))
            same_elements(list(asked), whole[number:], f"in place from {number}, again")
    # Take another state when the iterator knows that it is at its end.
    again = begun(make, 0, caller)
    again.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    assert list(again) == []
    assert again.state_dict()["number"] == len(whole)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write the numbers 0 to 19 as text, as compressed text, as text with broken lines, and as a Parquet file."""
    directory = tmp_path_factory.mktemp("files")
    lines = [str(k).encode() for k in range(20)]
    (directory / "plain.txt").write_bytes(b"\n".join(lines))
    (directory / "compressed.txt.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    (directory / "broken.txt").write_bytes(b"\n".join(b"\xff" if k % 4 == 0 else line for k, line in enumerate(lines)))
    pq.write_table(pa.table({"n": np.arange(20)}), directory / "table.parquet", row_group_size=4)
    return directory


FILES = {
    "text": lambda files: read_text(files / "plain.txt").shuffle(4, seed=1).batch(3),
    "compressed text": lambda files: read_text(files / "compressed.txt.gz").shuffle(4, seed=1).batch(3),
    "broken text": lambda files: read_text(files / "broken.txt").ignore_errors().shuffle(4, seed=1).batch(3),
    "filtered": lambda files: read_parquet(files / "table.parquet", "n", [("n", ">", 6)]).shuffle(4, seed=1).batch(3),
    "several": lambda files: read_text([files / "plain.txt", files / "compressed.txt.gz"]).batch(7),
}


@pytest.mark.parametrize(("name", "sizes", "caller"), every_pair(list(FILES), [LARGE, SMALL], [Synchronous, Threads]))
def test_files_continue_from_every_position(files, name, sizes, caller):
    with dask.config.set(sizes):
        check_every_position(lambda: FILES[name](files), caller)


@pytest.mark.parametrize(
    ("name", "sizes", "caller"), every_pair(list(PIPELINES), [LARGE, SMALL], [Synchronous, Threads])
)
def test_pipelines_continue_from_every_position(name, sizes, caller):
    with dask.config.set(sizes):
        check_every_position(PIPELINES[name], caller)


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("name", ["shuffle", "filter", "concatenate", "interleave of streams", "unbatch of batches"])
def test_large_buffers_continue_from_every_position(name, caller, monkeypatch):
    # The order of the elements that come last is computed as that of many.
    monkeypatch.setattr(shuffle, "_MOST_DRAWN", 2)
    with dask.config.set(SMALL):
        check_every_position(PIPELINES[name], caller)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "budget_bytes", "caller"),
    every_pair(
        [name for name in PIPELINES if "generator" in name or "streams" in name], [1, 100], [Synchronous, Threads]
    ),
)
def test_streams_continue_from_every_position_with_any_budget(name, budget_bytes, caller):
    options = daskdist.Options(memory_budget_bytes=budget_bytes)
    check_every_position(lambda: PIPELINES[name]().with_options(options), caller)


def test_every_method_is_in_a_tested_pipeline():
    covered = " ".join(PIPELINES)
    made = {"map", "filter", "flat_map", "interleave", "enumerate", "scan", "take", "skip", "take_while", "shard"}
    made |= {"repeat", "concatenate", "unique", "shuffle", "global_shuffle", "rejection_resample", "prefetch", "cache"}
    made |= {"ignore_errors", "batch", "padded_batch", "ragged_batch", "unbatch", "rebatch", "window"}
    made |= {
        "group_by_window",
        "bucket_by_sequence_length",
        "batch_by_size",
        "zip",
        "choose",
        "sample",
        "assert_cardinality",
    }
    assert not {name for name in made if name not in covered}


@given(pipelines(), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_generated_pipelines_continue_from_any_position(pipeline, data):
    outcome = pipeline.reference()
    if outcome.met_unmade:
        return
    with pipeline.settings():
        number = data.draw(st.integers(0, len(outcome.elements)))
        state = begun(pipeline.dataset, number, Synchronous).state_dict()
        again = begun(pipeline.dataset, 0, Synchronous)
        again.load_state_dict(json.loads(json.dumps(state)))
        same_elements(list(again), outcome.elements[number:], f"continued from {number}")


KEPT = {
    "cache": lambda ds, path: ds.cache(),
    "cache in a file": lambda ds, path: ds.cache(path),
    "snapshot": lambda ds, path: ds.snapshot(path),
    "compressed snapshot": lambda ds, path: ds.snapshot(path, compression="lz4"),
}


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("is_complete", [False, True], ids=["filling", "complete"])
@pytest.mark.parametrize("name", KEPT)
def test_caches_become_complete_or_are_removed(name, is_complete, caller, tmp_path):
    def make(path="kept"):
        return KEPT[name](Dataset.range(12).shuffle(5, seed=1).batch(2), tmp_path / path).map(lambda x: x + 0)

    with using(caller), dask.config.set(SMALL):
        ds = make()
        if is_complete:
            list(ds)
        iterator = iter(ds)
        begun = [next(iterator).tolist() for _ in range(3)]
        state = json.dumps(iterator.state_dict())
        rest = [x.tolist() for x in iterator]
        over = json.dumps(iterator.state_dict())
        assert sorted(np.ravel(begun + rest)) == list(range(12))
        # The cache is complete now.
        for value, expected in ((state, rest), (over, [])):
            for other in (ds, make()):
                again = iter(other)
                again.load_state_dict(json.loads(value))
                assert [x.tolist() for x in again] == expected
                assert list(again) == []
        assert [x.tolist() for x in ds] == begun + rest
        # Resumed passes must not leave parts.
        num_files = sum(len(files) for _, _, files in os.walk(tmp_path))
        shutil.rmtree(tmp_path / "kept", ignore_errors=True)
        again = iter(make())
        if is_complete and name != "cache":
            with pytest.raises(errors.FileError, match="no longer there"):
                again.load_state_dict(json.loads(state))
            return
        assert num_files == (0 if name == "cache" else 2), "there should be one part and a manifest"
        again.load_state_dict(json.loads(state))
        assert [x.tolist() for x in again] == rest
        # A resumed pass stores nothing; the next whole pass has the same order.
        other = make()
        again = iter(other)
        again.load_state_dict(json.loads(state))
        assert [x.tolist() for x in again] == rest
        assert [x.tolist() for x in other] == begun + rest


def test_a_position_does_not_continue_in_a_new_snapshot(tmp_path):
    def make():
        return Dataset.range(12).shuffle(12).snapshot(tmp_path / "kept")

    ds = make()
    list(ds)
    iterator = iter(ds)
    next(iterator)
    state = iterator.state_dict()
    shutil.rmtree(tmp_path / "kept")
    list(ds)
    with pytest.raises(errors.FileError, match="has been replaced"):
        iter(ds).load_state_dict(state)


def test_a_continued_iterator_can_be_continued_again():
    make = PIPELINES["interleave of streams"]
    whole = list(make())
    first = begun(make, 3, Synchronous)
    second = begun(make, 0, Synchronous)
    second.load_state_dict(first.state_dict())
    list(islice(second, 4))
    third = begun(make, 0, Threads)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    same_elements(list(third), whole[7:], "continued twice, in threads at last")


@pytest.mark.parametrize("unit", ["Y", "D", "s", "us", "ns"])
@pytest.mark.parametrize("dtype", ["datetime64", "timedelta64"])
def test_unique_remembers_times_before_the_position(dtype, unit):
    times = np.arange(12).astype(f"{dtype}[{unit}]")[np.arange(400) * 7 % 12]
    ds = Dataset.from_tensor_slices(times).unique()
    elements, again = iter(ds), iter(ds)
    with dask.config.set({"daskdist.split-bytes": 80}):
        first = [next(elements) for _ in range(6)]
        again.load_state_dict(elements.state_dict())
        same_elements([*first, *again], list(ds), "the rest")


def test_random_orders_continue_without_a_seed():
    def make():
        return Dataset.range(50).shuffle(50).repeat(2).global_shuffle()

    iterator = begun(make, 30, Synchronous)
    state = iterator.state_dict()
    again = begun(make, 0, Synchronous)
    again.load_state_dict(state)
    same_elements(list(again), list(iterator), "with the seeds drawn at first")


def destroy_rows(path):
    """Overwrite the rows of a Parquet file, and keep its metadata, which is at its end."""
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[4:footer] = bytes(footer - 4)
    path.write_bytes(content)


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("shuffle_size", [None, 4, 25])
def test_rows_before_a_position_are_not_read(tmp_path, shuffle_size, caller):
    num_files, file_rows, place = 40, 10, 60
    paths = [tmp_path / f"{number:02}.parquet" for number in range(num_files)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"a": np.arange(file_rows) + file_rows * number}), path)

    def make():
        rows = daskdist.read_parquet(list(map(str, paths))).map(lambda row: row["a"])
        return (rows.shuffle(shuffle_size, seed=3) if shuffle_size else rows).batch(5)

    whole = list(make())
    state = begun(make, place, caller).state_dict()
    needed = {int(row) // file_rows for batch in whole[place:] for row in batch}
    not_needed = [path for number, path in enumerate(paths) if number not in needed]
    assert len(not_needed) >= 10
    # A shuffle buffer has rows of files before the one that is read next.
    assert shuffle_size is None or min(needed) < place * 5 // file_rows
    for path in not_needed:
        destroy_rows(path)
    with pytest.raises(errors.FileError):
        list(make())
    again = begun(make, 0, caller)
    # The files were changed, so the position is refused. Use the fingerprint of the new files to load it nevertheless.
    with pytest.raises(errors.ArgumentError, match="another pipeline"):
        again.load_state_dict(state)
    state["fingerprint"] = again.state_dict()["fingerprint"]
    again.load_state_dict(state)
    same_elements(list(again), whole[place:], "without the rows before the position")


def test_a_position_needs_the_splits_that_it_was_taken_with():
    def make():
        return Dataset.range(100).filter(lambda x: x % 3 != 0)

    with dask.config.set({"daskdist.split-bytes": 80}):
        iterator = begun(make, 30, Synchronous)
        state, rest = json.dumps(iterator.state_dict()), list(iterator)
    with dask.config.set({"daskdist.split-bytes": 240}):
        # There, calls of another split were counted; elements by their numbers are the same.
        with pytest.raises(errors.ArgumentError, match="which was 80 and is 240 here; set it to 80"):
            begun(make, 0, Synchronous).load_state_dict(json.loads(state))
        again = begun(lambda: Dataset.range(100), 0, Synchronous)
        with dask.config.set({"daskdist.split-bytes": 80}):
            again.load_state_dict(begun(lambda: Dataset.range(100), 30, Synchronous).state_dict())
        same_elements(list(again), range(30, 100), "by number")
    with dask.config.set({"daskdist.split-bytes": 80}):
        again = begun(make, 0, Synchronous)
        again.load_state_dict(json.loads(state))
        same_elements(list(again), rest, "the same splits")


def scattered(number):
    return number * 2654435761 % 2**32 % 1009


def lengths_of(stop):
    return Dataset.range(stop).map(lambda x: np.zeros(scattered(x) % 50, np.int8))


def read_everything(shuffle_size):
    rows = Dataset.range(1_500_000, output_type=np.int32).map(lambda x: x + 1)
    return (rows.shuffle(shuffle_size, seed=1) if shuffle_size else rows).batch(1000)


SIZES = {
    "batches": (lambda: read_everything(0), 1_000),
    "shuffle": (lambda: read_everything(1_000_000), 1_000),
    "filter": (lambda: Dataset.range(1_500_000).filter(lambda x: x % 3 > 0).batch(1000), 2_000),
    "shuffle of filtered": (
        lambda: Dataset.range(1_500_000).filter(lambda x: x % 3 > 0).shuffle(600_000, seed=1).batch(1000),
        2_000,
    ),
    "repeat": (lambda: Dataset.range(1000).filter(lambda x: x % 3 > 0).repeat(900).batch(1000), 10_000),
    "interleave": (
        lambda: Dataset.range(800).interleave(lambda x: Dataset.range(200 + x % 7), 8, 3).batch(500),
        1_000,
    ),
    "sample_from_datasets": (
        lambda: Dataset.sample_from_datasets(
            [Dataset.range(200_000), Dataset.range(200_000).filter(lambda x: x % 3 > 0)], [0.3, 0.7], seed=1
        ).batch(500),
        1_000,
    ),
    "generator": (lambda: generated(100_000).shuffle(10_000, seed=1).batch(100), 1_000),
    "group_by_window": (
        lambda: Dataset.range(40_000).group_by_window(lambda x: x % 3, lambda k, w: w.batch(100), 100),
        1_000,
    ),
    "group_by_window of scattered keys": (
        lambda: Dataset.range(40_000).group_by_window(lambda x: scattered(x) % 7, lambda k, w: w.batch(100), 100),
        5_000,
    ),
    "bucket_by_sequence_length": (
        lambda: lengths_of(40_000).bucket_by_sequence_length(len, [10, 20, 30], [100] * 4),
        5_000,
    ),
    "batch_by_size": (lambda: Dataset.range(40_000).batch_by_size(2_500, lambda x: scattered(x) % 50), 5_000),
    "batch_by_size of buffers": (
        lambda: Dataset.range(40_000).batch_by_size(2_500, lambda x: scattered(x) % 50, 500),
        5_000,
    ),
    "rejection_resample": (
        lambda: (
            Dataset.range(70_000).rejection_resample(lambda x: scattered(x) % 3, [0.5, 0.3, 0.2], seed=1).batch(100)
        ),
        5_000,
    ),
    "choose_from_datasets": (
        lambda: Dataset.choose_from_datasets(
            [Dataset.range(40_000), Dataset.range(40_000).map(lambda x: -x)],
            Dataset.range(40_000).map(lambda x: scattered(x) % 2),
        ).batch(100),
        5_000,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_positions_are_small_and_plain(name, tmp_path):
    make, most_bytes = SIZES[name]
    iterator = begun(make, 300, Synchronous)
    state = iterator.state_dict()
    assert len(state["position"]) < most_bytes
    assert {type(value) for value in state.values()} == {int, str}
    assert json.loads(json.dumps(state)) == state
    # The values are of no other types, so the state in JSON is as small.
    assert len(json.dumps(state)) < most_bytes + 1_000
    again = begun(make, 0, Synchronous)
    checkpoint = daskdist.Checkpoint(iterator=iterator)
    checkpoint.save(tmp_path / "state")
    daskdist.Checkpoint(iterator=again).restore(tmp_path / "state")
    same_elements(list(islice(again, 3)), list(islice(iterator, 3)), "after a checkpoint")


LARGE_STATES = [name for name, (_, most_bytes) in SIZES.items() if most_bytes == 5_000]


@pytest.mark.parametrize("name", LARGE_STATES)
def test_from_positions_after_resume_points_the_rest(name):
    make, _ = SIZES[name]
    whole = list(make())
    callers = cycle([Synchronous, Threads] if LARGE_STATES.index(name) % 2 else [Threads, Synchronous])
    for number, caller in zip((10, len(whole) // 3, len(whole) - 3), callers, strict=False):
        state = begun(make, number, caller).state_dict()
        again = begun(make, 0, Synchronous)
        again.load_state_dict(state)
        ahead = list(islice(again, 5))
        same_elements(ahead, whole[number : number + 5], f"from {number}")
        # A position may be taken after continuing from one.
        third = begun(make, 0, Synchronous)
        third.load_state_dict(again.state_dict())
        same_elements(list(third), whole[number + len(ahead) :], f"from {number} again")


ENDLESS = {
    "filter": lambda: Dataset.range(60).filter(lambda x: x % 3 > 0).shuffle(20, seed=1).repeat().batch(10),
    "shuffle of repeated": lambda: Dataset.range(60).map(lambda x: x).repeat().shuffle(90, seed=1).batch(1000),
    "cache": lambda: Dataset.range(60).shuffle(9, seed=1).cache().repeat().batch(10),
    "inner filter": lambda: Dataset.range(6).interleave(lambda x: generated(int(x)), 2, 1).repeat().batch(10),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_positions_in_endless_repetitions_stay_small(name):
    make = ENDLESS[name]
    iterator, sizes = begun(make, 0, Synchronous), []
    for _ in range(4):
        list(islice(iterator, 75))
        sizes.append(len(iterator.state_dict()["position"]))
    assert max(sizes) < 2_000
    again = begun(make, 0, Synchronous)
    again.load_state_dict(iterator.state_dict())
    same_elements(list(islice(again, 50)), list(islice(iterator, 50)), "after many repetitions")


def test_a_position_after_a_failed_element_skips_it():
    def make():
        return Dataset.range(30).filter(lambda x: 1 // (int(x) % 7 - 3) < 5).shuffle(4, seed=1).batch(3)

    def events(iterator, number):
        """Return the next elements and errors."""
        actual = []
        while len(actual) < number:
            try:
                actual.append(next(iterator).tolist())
            except StopIteration:
                break
            except errors.UserFunctionError as error:
                actual.append(str(error))
        return actual

    whole = events(begun(make, 0, Synchronous), 99)
    assert sum(isinstance(event, str) for event in whole) == 4
    for number in range(len(whole) + 1):
        iterator, again = begun(make, 0, Synchronous), begun(make, 0, Threads)
        events(iterator, number)
        again.load_state_dict(iterator.state_dict())
        assert events(again, 99) == whole[number:], f"continued from {number}"


def test_a_position_is_continued_by_another_process(tmp_path):
    program = (
        "import json, sys\n"
        "from daskdist import Dataset\n"
        "iterator = iter(Dataset.range(40).shuffle(9).batch(4).repeat(2))\n"
        "if sys.argv[1] == 'begin':\n"
        "    first = [next(iterator) for _ in range(7)]\n"
        "    json.dump(iterator.state_dict(), open(sys.argv[2], 'w'))\n"
        "else:\n"
        "    iterator.load_state_dict(json.load(open(sys.argv[2])))\n"
        "print([batch.tolist() for batch in iterator])\n"
    )
    path = str(tmp_path / "state")
    actual = [programs.run("-c", program, "begin", path, check=True).stdout]
    # The other is a new process: the hashes of text differ.
    arguments = [sys.executable, "-c", program, "continue", path]
    actual.append(subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert actual[0] == actual[1]
    assert actual[0].count("[") > 10


def test_of_another_pipeline_is_an_error():
    state = iter(Dataset.range(9).batch(2)).state_dict()
    with pytest.raises(errors.ArgumentError, match="another pipeline, of fingerprint"):
        iter(Dataset.range(9).batch(3)).load_state_dict(state)


@pytest.mark.parametrize("place", [lambda ds: ds, mirrored(1).distribute_dataset])
def test_of_operations_in_another_order_is_an_error(place):
    shuffled = Dataset.range(9).shuffle(4)
    small, large = (place(shuffled.map(function)) for function in (lambda x: x + 1, lambda x: np.zeros(999) + x))
    state = {**iter(small).state_dict(), "order": iter(large).state_dict()["order"]}
    with pytest.raises(errors.ArgumentError, match=r"in the order range, shuffle, map; here .* order range-map, shuf"):
        iter(small).load_state_dict(state)


def test_of_another_version_is_an_error():
    state = iter(Dataset.range(9)).state_dict()
    with pytest.raises(errors.ArgumentError, match="of version 0, not 10"):
        iter(Dataset.range(9)).load_state_dict({**state, "version": 0})


@pytest.mark.parametrize("state", [b"abc", None, {"position": 3}, [1]])
def test_values_that_are_not_positions_are_refused(state):
    with pytest.raises(
        errors.ArgumentError, match=r"expected a dict returned by state_dict\(\) of an iterator, got \w+ "
    ):
        iter(Dataset.range(3)).load_state_dict(state)
