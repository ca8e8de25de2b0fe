"""Sharding policies on every kind of pipeline: the choice, its explanation, and that no row is lost or doubled."""

from __future__ import annotations

import gzip
import itertools
import logging
from collections import Counter

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_files import ROWS, first, flat, policy, read, rows_of

import daskdist
from daskdist import SHARD_HINT, AutoShardPolicy, Dataset, Options, TensorSpec, read_parquet, read_text
from daskdist.core.dataset_base import node_of
from daskdist.errors import ArgumentError, ShardingError
from daskdist.passes.autoshard import autoshard, sharding_input
from daskdist.passes.fingerprint import fingerprint
from daskdist.passes.plan import plan
from daskdist.passes.remainders import level
from daskdist.testing import SimulatedWorkers, afresh


@pytest.fixture
def files(parquet_files):
    return parquet_files(ROWS, row_group=2)


def own_records(caplog):
    """Return what this package logged; Dask's servers in this process log too."""
    return [record for record in caplog.records if record.name.startswith("daskdist")]


def sharded(ds, name, num_workers):
    decision, nodes = autoshard(node_of(ds), AutoShardPolicy[name.upper()], num_workers, first)
    # Copies let all workers read the same pass, as in one iteration.
    return decision, [list(afresh(Dataset(node))) for node in nodes]


def generated(files):
    return Dataset.from_generator(lambda: iter(range(20)), TensorSpec((), "int64"))


def lines(files, compress=False):
    """Write the rows as text files, whose numbers of rows are unknown before they are read."""
    paths = []
    for path in files:
        paths.append(path.removesuffix("parquet") + ("gz" if compress else "txt"))
        with gzip.open(paths[-1], "wt") if compress else open(paths[-1], "w") as file:
            file.writelines(f"{int(row)}\n" for row in read(path))
    return paths


def numbers(files, compress=False):
    return read_text(lines(files, compress)).map(int)


def by_text(path):
    return read_text(str(path)).map(int)


# Name -> the dataset, AUTO's policies for 2 and 3 workers, and a part of the explanation.
SHAPES = {
    "read": (read_parquet, "FILE", "5 files for"),
    "read-ids": (lambda f: read_parquet(f, "id"), "FILE", "5 files for"),
    "text": (numbers, "FILE", "5 files for"),
    "gzip": (lambda f: numbers(f, True), "FILE", "5 files for"),
    "map-filter": (
        lambda f: read_parquet(f, "id").map(lambda x: x * 3).filter(lambda x: x % 2 == 0),
        "FILE",
        "5 files",
    ),
    "shuffle": (lambda f: read_parquet(f, "id").shuffle(7), "FILE", "5 files"),
    "repeat": (lambda f: read_parquet(f, "id").repeat(2), "FILE", "5 files"),
    "batch": (lambda f: read_parquet(f, "id").batch(4), "FILE", "5 files"),
    "padded": (lambda f: read_parquet(f, "id").padded_batch(4), "FILE", "5 files"),
    "unbatch": (lambda f: read_parquet(f, "id").batch(4).unbatch(), "FILE", "5 files"),
    "cache": (lambda f: read_parquet(f, "id").shuffle(9).cache(), "FILE", "5 files"),
    "ignore_errors": (lambda f: read_parquet(f, "id").ignore_errors(), "FILE", "5 files"),
    "bucket": (
        lambda f: read_parquet(f, "id").bucket_by_sequence_length(lambda x: int(x) % 3, [1, 2], [2, 2, 2]),
        "FILE",
        "5 files",
    ),
    "batch_by_size": (lambda f: read_parquet(f, "id").batch_by_size(6, lambda x: 2), "FILE", "5 files"),
    "split": (lambda f: read_parquet(f, "id").split(0.6)[0], "DATA", "split goes by the numbers of all rows"),
    "split-by": (lambda f: read_parquet(f, "id").split(0.6, by=lambda x: x)[0], "FILE", "5 files"),
    "select": (lambda f: read_parquet(f).shuffle(5)["id"], "FILE", "5 files"),
    # A function reads the files.
    "flat_map": (lambda f: Dataset.from_tensor_slices(f).flat_map(read), "FILE", "5 files that flat_map reads"),
    "flat_map-text": (
        lambda f: Dataset.from_tensor_slices(lines(f)).flat_map(by_text),
        "FILE",
        "5 files that flat_map reads",
    ),
    "interleave": (
        lambda f: Dataset.list_files(f, shuffle=False).interleave(read, 2),
        "FILE",
        "5 files that interleave reads",
    ),
    "list_files": (lambda f: Dataset.list_files(f).interleave(read, 3, 2), "FILE", "files that interleave reads"),
    "list_files-seed": (lambda f: Dataset.list_files(f, seed=3).flat_map(read), "FILE", "files that flat_map reads"),
    "parallel": (
        lambda f: Dataset.list_files(f).interleave(read, 2, num_parallel_calls=2).shuffle(5).batch(3),
        "FILE",
        "files that interleave reads",
    ),
    "names-shuffled-repeated-taken": (
        lambda f: Dataset.from_tensor_slices(f).shuffle(5, seed=1).repeat(2).take(7).flat_map(read),
        "FILE",
        "7 files that flat_map reads",
    ),
    "names-filtered": (
        lambda f: Dataset.from_list(f).filter(lambda path: "part-3" not in str(path)).flat_map(read),
        "FILE",
        "files that flat_map reads",
    ),
    "names-numbered": (
        lambda f: Dataset.from_list(f).enumerate().flat_map(lambda number, path: read(path)),
        "FILE",
        "5 files that flat_map reads",
    ),
    "names-cached": (
        lambda f: Dataset.list_files(f).cache().interleave(read, 2).repeat(2),
        "FILE",
        "files that interleave reads",
    ),
    "names-in-folders": (
        lambda f: Dataset.range(5).flat_map(lambda k: Dataset.list_files(f[int(k)]).flat_map(read)),
        "FILE",
        "5 files that flat_map reads",
    ),
    "map-to-datasets": (
        lambda f: Dataset.from_list(f).map(read).flat_map(lambda made: made),
        "FILE",
        "5 files that flat_map reads",
    ),
    "names-few": (lambda f: Dataset.from_list(f[:1]).flat_map(read), "DATA", "flat_map reads 1 file for"),
    "names-generated": (
        lambda f: Dataset.from_generator(lambda: iter(range(5)), TensorSpec((), "int64")).flat_map(
            lambda k: read(f[int(k)])
        ),
        "DATA",
        "names come from from_generator",
    ),
    "names-after-take": (
        lambda f: Dataset.from_list(f).flat_map(read).take(9),
        "DATA",
        "take would have another result",
    ),
    "not-files": (
        lambda f: Dataset.from_tensor_slices(f).flat_map(lambda path: Dataset.range(2)),
        "DATA",
        "from_tensor_slices reads no files",
    ),
    # There are several sources.
    "concatenate": (
        lambda f: read_parquet(f, "id").concatenate(read_parquet(f[1:4], "id")),
        "FILE",
        "5 files, 3 files for",
    ),
    "concatenate-range": (
        lambda f: read_parquet(f, "id").concatenate(Dataset.range(4)),
        "DATA",
        "range reads no files",
    ),
    "zip": (lambda f: Dataset.zip(read_parquet(f, "id"), read_parquet(f, "id")), "FILE", "5 files for"),
    "zip-mapped-batched": (
        lambda f: Dataset.zip(read_parquet(f, "id").map(lambda x: x + 1).batch(3), read_parquet(f, "id").batch(3)),
        "FILE",
        "5 files for",
    ),
    "zip-concatenated": (
        lambda f: Dataset.zip(*[read_parquet(f, "id").concatenate(read_parquet(f[:3], "id")) for _ in range(2)]),
        "FILE",
        "5 files, 3 files",
    ),
    "zip-zipped": (
        lambda f: Dataset.zip(
            Dataset.zip(read_parquet(f, "id"), read_parquet(f, "id")).map(lambda a, b: a + b), read_parquet(f, "id")
        ),
        "FILE",
        "5 files",
    ),
    "zip-other-files": (
        lambda f: Dataset.zip(read_parquet(f, "id"), read_parquet(f[:4], "id")),
        "DATA",
        "one reads 5 files and the other 4",
    ),
    "zip-other-rows": (
        lambda f: Dataset.zip(read_parquet(f, "id"), read_parquet([*f[1:], f[0]], "id")),
        "DATA",
        "part-0.parquet has 5 rows and",
    ),
    "zip-text": (lambda f: Dataset.zip(numbers(f), numbers(f)), "DATA", "only known when it is read"),
    "zip-filtered": (
        lambda f: Dataset.zip(read_parquet(f, "id").filter(lambda x: x > 3), read_parquet(f, "id")),
        "DATA",
        "the origin of an element is unknown after filter",
    ),
    "zip-other-batches": (
        lambda f: Dataset.zip(read_parquet(f, "id").batch(4), read_parquet(f, "id").batch(4, drop_remainder=True)),
        "DATA",
        "batch does not correspond to batch",
    ),
    "zip-range": (
        lambda f: Dataset.zip(read_parquet(f, "id"), Dataset.range(11)),
        "DATA",
        "range reads no files",
    ),
    # These operations give other results for each worker's files.
    "take": (lambda f: read_parquet(f, "id").take(7), "DATA", "take would have another result"),
    "split-take": (lambda f: read_parquet(f, "id").split(0.8)[0].take(7), "DATA", "take, split would have another"),
    "skip": (lambda f: read_parquet(f, "id").skip(7), "DATA", "skip would have another result"),
    "enumerate": (lambda f: read_parquet(f, "id").enumerate(), "DATA", "enumerate would have another result"),
    "unique": (lambda f: read_parquet(f, "id").map(lambda x: x % 4).unique(), "DATA", "unique would have another"),
    "take_while": (
        lambda f: read_parquet(f, "id").take_while(lambda x: x < 8),
        "DATA",
        "take_while would have another",
    ),
    "scan": (
        lambda f: read_parquet(f, "id").scan(np.int64(0), lambda carried, x: (carried + x, carried + x)),
        "DATA",
        "scan would have another result",
    ),
    "shard": (lambda f: read_parquet(f, "id").shard(3, 1), "DATA", "shard would have another result"),
    "window": (
        lambda f: read_parquet(f, "id").window(3, shift=1).flat_map(lambda window: window.batch(3)),
        "DATA",
        "window would have another result",
    ),
    "group_by_window": (
        lambda f: read_parquet(f, "id").group_by_window(
            lambda x: int(x) % 2, lambda key, window: window.take(2).batch(2), window_size=3
        ),
        "DATA",
        "group_by_window would have another result",
    ),
    # These pipelines read no files.
    "range": (lambda f: Dataset.range(20), "DATA", "range reads no files"),
    "from_generator": (generated, "DATA", "from_generator reads no files"),
    "from_dask": (lambda f: Dataset.from_dask(da.arange(20, chunks=6)), "DATA", "from_dask reads no files"),
}


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_policy_keeps_the_rows(files, shape, num_workers):
    build, chosen, words = SHAPES[shape]
    ds = build(files)
    if shape == "read":
        ds = ds.map(lambda row: row["id"])
    expected = rows_of(ds)
    decision, shares = sharded(ds, "auto", num_workers)
    assert (decision.policy.name, words in decision.reason) == (chosen, True), str(decision)
    assert rows_of(itertools.chain(*shares)) == expected
    if chosen == "FILE":
        assert sharded(ds, "file", num_workers)[0] == decision
        assert len(shares) == num_workers
        assert all(shares)
    else:
        with pytest.raises(ShardingError) as caught:
            sharded(ds, "file", num_workers)
        assert words in str(caught.value)
        assert "Use AutoShardPolicy.DATA" in str(caught.value)
    # With DATA, one pipeline serves all replicas; with OFF and HINT, each worker has the whole dataset.
    for name, number in {"data": 1, "off": num_workers, "hint": num_workers}.items():
        decision, nodes = autoshard(node_of(ds), AutoShardPolicy[name.upper()], num_workers, first)
        # Fingerprints ignore that workers with the whole dataset draw differently without a seed.
        assert [fingerprint(node) for node in nodes] == [fingerprint(node_of(ds))] * number
        assert decision.policy is (AutoShardPolicy.DATA if name == "data" else AutoShardPolicy.OFF)


# Combinations that are also tried on real workers.
CLUSTERED = [
    *[("auto", shape) for shape in ("text", "list_files", "names-shuffled-repeated-taken", "names-few", "zip")],
    *[("auto", shape) for shape in ("concatenate", "zip-other-files", "cache", "bucket", "from_dask", "take")],
    *[("auto", shape) for shape in ("group_by_window", "batch_by_size", "from_generator")],
    *[("off", shape) for shape in ("flat_map", "zip")],
]


def steps_of(strategy, ds):
    return [list(strategy.local_results(step)) for step in strategy.distribute_dataset(ds)]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "shape", "num_workers"), [(*case, 2 + number % 2) for number, case in enumerate(CLUSTERED)]
)
def test_rows_over_replicas_are_the_rows(start_cluster, files, name, shape, num_workers):
    ds = SHAPES[shape][0](files)
    if shape not in ("group_by_window", "bucket", "batch_by_size"):
        ds = ds.batch(8)
    ds = ds.with_options(policy(name))
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(num_workers, 1)) as strategy:
        actual = rows_of(itertools.chain(*steps_of(strategy, ds)))
    times = num_workers if name == "off" else 1
    assert actual == Counter({row: times * count for row, count in rows_of(afresh(ds)).items()})


@pytest.mark.cluster
def test_names_are_divided_again_in_each_pass(on_cluster, files):
    ds = Dataset.list_files(files).flat_map(read).batch(64).with_options(policy("file"))
    dist = on_cluster.distribute_dataset(ds)
    passes = []
    for _ in range(4):
        steps = [on_cluster.local_results(step) for step in dist]
        assert rows_of(itertools.chain(*steps)) == rows_of(read_parquet(files, "id"))
        passes.append([np.concatenate([step[k] for step in steps]).tolist() for k in range(2)])
    assert any(value != passes[0] for value in passes)


# --- files that a function reads ---


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_names_are_dealt_in_the_order_of_the_shuffled_list(files, num_workers, seed):
    names = Dataset.from_tensor_slices(files).shuffle(5, seed=seed, reshuffle_each_iteration=False)
    order = [files.index(str(name)) for name in names]
    _, shares = sharded(names.flat_map(read), "auto", num_workers)
    owners = np.repeat(np.arange(5), ROWS)
    for worker, share in enumerate(shares):
        assert list(dict.fromkeys(owners[share].tolist())) == order[worker::num_workers]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_names_keep_their_order_where_elements_need_not(files, num_workers):
    # The workers count names to divide them, so all have to see the names in the same order.
    ds = Dataset.from_list(files * 3).map(lambda name: str(name)).flat_map(read)
    ds = ds.with_options(Options(deterministic=False))
    _, nodes = autoshard(node_of(ds), AutoShardPolicy.FILE, num_workers, first)
    for node in nodes:
        shard = plan(node)
        while not getattr(shard, "is_counted", False):
            shard = shard.inputs[0] if hasattr(shard, "inputs") else shard.source
        (source,) = shard.inputs
        assert source.in_order
    assert rows_of(itertools.chain(*[Dataset(node) for node in nodes])) == rows_of(ds)


def test_a_function_is_tried_on_the_first_name_only(files):
    seen = []

    def reader(path):
        seen.append(str(path))
        return read(path)

    autoshard(node_of(Dataset.from_list(files).flat_map(reader)), AutoShardPolicy.AUTO, 2, first)
    assert set(seen) <= {files[0], ""}


def test_a_generator_is_not_run_to_see_its_files(files):
    runs = []

    def names():
        runs.append(1)
        yield from files

    ds = Dataset.from_generator(names, TensorSpec((), np.dtypes.StringDType())).flat_map(read)
    decision, _ = autoshard(node_of(ds), AutoShardPolicy.AUTO, 2, first)
    assert decision.policy is AutoShardPolicy.DATA
    assert not runs


def test_endless_names_of_files_are_sharded(files):
    ds = Dataset.from_list(files[:1]).repeat().flat_map(read)
    decision, nodes = autoshard(node_of(ds), AutoShardPolicy.FILE, 3, first)
    assert "files that flat_map reads for 3 workers" in decision.reason
    assert [list(map(int, Dataset(node).take(7))) for node in nodes] == [[0, 1, 2, 3, 4, 0, 1]] * 3


def test_what_fails_upstream_of_a_reader_fails_when_it_is_iterated_over(files):
    ds = Dataset.from_list(files).map(lambda name: 1 // 0).flat_map(read)
    decision, (node,) = autoshard(node_of(ds), AutoShardPolicy.AUTO, 2, first)
    assert decision.policy is AutoShardPolicy.DATA
    with pytest.raises(daskdist.errors.UserFunctionError, match="division"):
        list(Dataset(node))


# --- HINT ---


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("index", [SHARD_HINT, 0, 99])
def test_a_hint_is_replaced_by_the_shard_of_the_worker(num_workers, index):
    ds = Dataset.range(11).shard(SHARD_HINT, index).batch(2)
    decision, shares = sharded(ds, "hint", num_workers)
    assert decision.policy is AutoShardPolicy.HINT
    assert "a place" in decision.reason
    assert [[x for batch in share for x in batch.tolist()] for share in shares] == [
        list(range(worker, 11, num_workers)) for worker in range(num_workers)
    ]


def test_every_hint_is_filled_in(files):
    names = Dataset.from_list(files).shard(SHARD_HINT, SHARD_HINT)
    ds = names.flat_map(read).concatenate(Dataset.range(100, 104).shard(SHARD_HINT, SHARD_HINT)).take(100)
    decision, shares = sharded(ds, "hint", 2)
    assert "2 shards at 2 places" in decision.reason
    assert rows_of(itertools.chain(*shares)) == Counter([*range(20), *range(100, 104)])


def test_one_worker_fills_a_hint_with_one_shard():
    decision, (share,) = sharded(Dataset.range(5).shard(SHARD_HINT, SHARD_HINT), "hint", 1)
    assert decision.policy is AutoShardPolicy.OFF
    assert rows_of(share) == Counter(range(5))
    ds = Dataset.range(5).shard(SHARD_HINT, SHARD_HINT).batch(4).with_options(policy("hint"))
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    assert rows_of(itertools.chain(*steps_of(strategy, ds))) == Counter(range(5))


@pytest.mark.parametrize("name", ["auto", "file", "data", "off"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_hint_under_another_policy_is_an_error(name, num_workers):
    ds = Dataset.range(5).shard(SHARD_HINT, SHARD_HINT)
    with pytest.raises(ShardingError, match=f"its policy is {name.upper()}. Use Options"):
        sharded(ds, name, num_workers)


def test_an_unfilled_hint_is_an_error():
    ds = Dataset.range(5).shard(SHARD_HINT, SHARD_HINT)
    assert ds.cardinality() == daskdist.data.UNKNOWN_CARDINALITY
    assert ds.element_spec == TensorSpec((), "int64")
    with pytest.raises(ShardingError, match=r"AutoShardPolicy\.HINT replaces when the dataset is distributed"):
        next(iter(ds))


def test_the_constant_is_where_tensorflow_has_it():
    assert daskdist.data.experimental.SHARD_HINT == SHARD_HINT == -1
    assert AutoShardPolicy.HINT == 3
    with pytest.raises(ArgumentError, match="num_shards"):
        Dataset.range(5).shard(-2, -2)


@pytest.mark.cluster
def test_no_hint_is_a_warning(on_cluster, caplog):
    ds = Dataset.range(4).batch(2).with_options(policy("hint"))
    with caplog.at_level(logging.DEBUG, "daskdist"):
        steps = steps_of(on_cluster, ds)
    (record,) = own_records(caplog)
    assert record.levelname == "WARNING"
    assert "Put dataset.shard(daskdist.SHARD_HINT, daskdist.SHARD_HINT)" in record.getMessage()
    assert rows_of(itertools.chain(*steps)) == Counter([*range(4)] * 2)


@pytest.mark.cluster
def test_hints_on_a_cluster(on_cluster):
    # The spec is learned from a first element, before the worker's number replaces the hint.
    ds = Dataset.range(9).shard(SHARD_HINT, SHARD_HINT).map(lambda x: [x, x][int(x > 100)] + 1).batch(4)
    dist = on_cluster.distribute_dataset(ds.with_options(policy("hint")))
    pieces = [[piece.tolist() for piece in on_cluster.local_results(step)] for step in dist]
    assert pieces == [[[1, 3], [2, 4]], [[5, 7], [6, 8]], [[9], []]]
    assert "sharding: HINT" in dist.explain()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_caches_on_disk_are_separate_for_each_shard(tmp_path, num_workers):
    ds = Dataset.range(10).shard(SHARD_HINT, SHARD_HINT).snapshot(str(tmp_path))
    for _ in range(2):
        _, shares = sharded(ds, "hint", num_workers)
        assert rows_of(itertools.chain(*shares)) == Counter(range(10))


def test_one_directory_is_not_for_shards_of_files(files, tmp_path):
    for ds in (read_parquet(files, "id").snapshot(str(tmp_path)), read_parquet(files, "id").cache(str(tmp_path))):
        decision, _ = autoshard(node_of(ds), AutoShardPolicy.AUTO, 2)
        assert decision.policy is AutoShardPolicy.DATA
        with pytest.raises(ShardingError, match="snapshot would have another result"):
            autoshard(node_of(ds), AutoShardPolicy.FILE, 2)


# --- messages ---


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("shape", "level", "words"),
    [
        ("interleave", "INFO", "sharding by FILE: 5 files that interleave reads for 2 workers"),
        ("range", "WARNING", "sharding by DATA: range reads no files"),
        ("split", "WARNING", "sharding by DATA: split goes by the numbers of all rows"),
        ("take", "WARNING", "To shard by file, apply take to the names of the files"),
        ("zip-other-files", "WARNING", "Write both as files with the same numbers of rows"),
        ("zip-range", "WARNING", "Write its elements to files too"),
        ("names-few", "WARNING", "Pass the files to the reader itself"),
    ],
)
def test_auto_logs_its_advice_once(on_cluster, files, caplog, shape, level, words):
    ds = SHAPES[shape][0](files).batch(4)
    with caplog.at_level(logging.DEBUG, "daskdist"):
        dist = on_cluster.distribute_dataset(ds)
        explained = dist.explain()
    (record,) = own_records(caplog)
    assert record.levelname == level
    assert words in record.getMessage()
    assert words.removeprefix("sharding by FILE: ").removeprefix("sharding by DATA: ") in explained
    if level == "WARNING":
        assert "se AutoShardPolicy.DATA to confirm that this is intended" in record.getMessage()
        # A program that confirms the choice is not warned again.
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "daskdist"):
            on_cluster.distribute_dataset(ds.with_options(policy("data")))
        assert [record.levelname for record in own_records(caplog)] == ["INFO"]


def test_one_worker_logs_nothing(files, caplog):
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    with caplog.at_level(logging.DEBUG, "daskdist"):
        for shape in ("take", "zip-range", "names-few"):
            strategy.distribute_dataset(SHAPES[shape][0](files).batch(4))
    assert not own_records(caplog)


@pytest.mark.cluster
def test_explain_counts_the_files_a_function_reads(on_cluster, files):
    ds = Dataset.from_list(files).flat_map(read).batch(4).with_options(policy("file"))
    explained = on_cluster.distribute_dataset(ds).explain()
    rows = [line.split()[2:] for line in explained.splitlines() if "tcp://" in line]
    assert rows == [["1", "3", "3", "?", "?"], ["1", "2", "2", "?", "?"]]
    assert "shard(num_shards=2, index=0)" in explained


# --- rows dropped in groups, and cuts of a pass ---


def ids(rows):
    return lambda files: read_parquet(files(rows), "id")


def by_lines(files):
    return numbers(files([3, 3]))


def rows_given(strategy, ds):
    return rows_of(itertools.chain(*steps_of(strategy, ds)))


# Name -> the dataset, AUTO's policy for 2 workers, and a part of its explanation.
GROUPS = {
    "nothing dropped": (ids([4, 4, 4, 4]), lambda ds: ds.batch(4, drop_remainder=True), "FILE", "for 2 workers"),
    "as many dropped of the whole": (ids([5, 4]), lambda ds: ds.batch(4, drop_remainder=True), "FILE", "for 2 workers"),
    "below 1 %": (
        ids([398, 406]),
        lambda ds: ds.batch(4, drop_remainder=True).batch(3).unbatch(),
        "FILE",
        "drops 4 of 804 rows",
    ),
    "at 1 %": (
        ids([198, 206]),
        lambda ds: ds.batch(4, drop_remainder=True),
        "FILE",
        "drops 4 of 404 rows, each worker's last partial batch; without sharding it drops 0",
    ),
    "above 1 %": (ids([130, 134]), lambda ds: ds.batch(4, drop_remainder=True), "DATA", "drops 4 of 264 rows"),
    "all": (ids([3, 3]), lambda ds: ds.batch(4, drop_remainder=True), "DATA", "drops 6 of 6 rows"),
    "lines": (by_lines, lambda ds: ds.batch(4, drop_remainder=True), "DATA", "depends on the data"),
    "padded": (ids([3, 3]), lambda ds: ds.padded_batch(4, drop_remainder=True), "DATA", "padded_batch with drop_rem"),
    "ragged": (ids([3, 3]), lambda ds: ds.ragged_batch(4, drop_remainder=True), "DATA", "ragged_batch with drop_rem"),
    "rebatched": (ids([3, 5]), lambda ds: ds.batch(3).rebatch(4, drop_remainder=True), "DATA", "drops 4 of 8 rows"),
    "twice": (ids([4, 8]), lambda ds: ds.batch(4).batch(3, drop_remainder=True), "DATA", "drops 12 of 12 rows"),
    "by buckets": (
        ids([3, 3]),
        lambda ds: ds.bucket_by_sequence_length(lambda x: 1, [2], [4, 4], drop_remainder=True),
        "DATA",
        "depends on the data",
    ),
    "filtered before": (
        ids([30, 30]),
        lambda ds: ds.filter(lambda x: x >= 0).batch(4, drop_remainder=True),
        "DATA",
        "depends on the data",
    ),
    "repeated": (ids([3, 3]), lambda ds: ds.repeat(4).batch(4, drop_remainder=True), "FILE", "for 2 workers"),
    "filter": (ids([3, 3]), lambda ds: ds.batch(2).filter(lambda b: b.sum() % 2 == 0), "DATA", "drop whole"),
    "filter of batches' batches": (
        ids([4, 4]),
        lambda ds: ds.batch(2).batch(2).unbatch().filter(lambda b: b.sum() > 4),
        "DATA",
        "drop whole",
    ),
    "rows made of batches": (
        ids([3, 3]),
        lambda ds: ds.batch(2).flat_map(lambda b: Dataset.from_tensor_slices(b).take(1)).batch(2),
        "DATA",
        "flat_map would drop whole",
    ),
    "rows made of rows": (
        ids([3, 3]),
        lambda ds: ds.flat_map(lambda x: Dataset.range(2).map(lambda y: x * 2 + y)).batch(2),
        "FILE",
        "for 2 workers",
    ),
    "filter of rows": (
        ids([3, 3]),
        lambda ds: ds.filter(lambda x: x > 1).batch(2).unbatch().filter(lambda x: x < 5).batch(2),
        "FILE",
        "for 2 workers",
    ),
    "errors of batches": (
        ids([3, 3]),
        lambda ds: ds.batch(2).map(lambda b: b if b.sum() % 2 else 1 // 0).ignore_errors(),
        "DATA",
        "ignore_errors would drop whole",
    ),
    "errors of rows": (
        ids([3, 3]),
        lambda ds: ds.map(lambda x: x if x > 2 else 1 // 0).batch(2).ignore_errors(),
        "FILE",
        "for 2 workers",
    ),
    "errors skipped": (
        ids([3, 3]),
        lambda ds: ds.batch(2).map(lambda b: b if b.sum() % 2 else 1 // 0).with_options(Options(on_error="skip")),
        "DATA",
        "map under on_error='skip' would drop whole",
    ),
    "uneven": (
        ids([9, 3]),
        lambda ds: ds.batch(2).with_options(Options(drop_uneven=True)),
        "DATA",
        "drop_uneven drops",
    ),
    "even": (ids([8, 8]), lambda ds: ds.batch(2).with_options(Options(drop_uneven=True)), "FILE", "for 2 workers"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_auto_drops_hardly_more_rows_than_the_whole_dataset_does(parquet_files, caplog, name):
    source, build, chosen, words = GROUPS[name]
    ds = build(source(parquet_files))
    strategy = SimulatedWorkers([1, 1])
    with caplog.at_level(logging.INFO, "daskdist"):
        dist = strategy.distribute_dataset(ds)
    (record,) = [value for value in own_records(caplog) if value.getMessage().startswith("sharding")]
    assert (dist.sharding.policy.name, words in record.getMessage(), words in dist.explain()) == (chosen, True, True)
    assert record.levelname == ("INFO" if chosen == "FILE" else "WARNING")
    actual, expected = rows_given(strategy, ds), rows_of(ds)
    assert actual.total() >= 0.99 * expected.total() - (name == "uneven")
    if chosen == "DATA" and name != "uneven":
        assert actual == expected


@pytest.mark.parametrize(
    ("name", "words", "num_lost"),
    [
        ("above 1 %", "drops 4 of 264 rows, each worker's last partial batch; without sharding it drops 0", 4),
        ("all", "drops 6 of 6 rows, each worker's last partial batch; without sharding it drops 2", 4),
        ("lines", "drops each worker's last partial batch, and how much that is depends on the data", 4),
        ("rebatched", "drops 4 of 8 rows", 4),
        ("filter", "filter would drop whole batches, which differ on each worker's files", None),
    ],
)
def test_file_policy_names_the_lost_rows(parquet_files, caplog, name, words, num_lost):
    source, build, _, _ = GROUPS[name]
    ds = build(source(parquet_files)).with_options(policy("file"))
    strategy = SimulatedWorkers([1, 1])
    with caplog.at_level(logging.INFO, "daskdist"):
        dist = strategy.distribute_dataset(ds)
    (record,) = own_records(caplog)
    assert (record.levelname, words in record.getMessage(), words in dist.explain()) == ("WARNING", True, True)
    assert dist.sharding.policy is AutoShardPolicy.FILE
    if num_lost is not None:
        assert rows_of(ds).total() - rows_given(strategy, ds).total() == num_lost


SIZE = st.integers(1, 4)
# Operations on batches. Batches of batches stack if the inner batches are complete.
GROUPINGS = {
    "batch": lambda ds, a, b, drops: ds.batch(a, drop_remainder=True),
    "batch of batches": lambda ds, a, b, drops: ds.batch(a, drop_remainder=True).batch(b, drop_remainder=drops),
    "ragged": lambda ds, a, b, drops: ds.ragged_batch(a, drop_remainder=True),
    "rebatch": lambda ds, a, b, drops: ds.batch(a, drop_remainder=drops).rebatch(b, drop_remainder=True),
    "unbatch": lambda ds, a, b, drops: ds.batch(a, drop_remainder=True).unbatch(),
    "repeat": lambda ds, a, b, drops: ds.repeat(a).shuffle(5).batch(b, drop_remainder=True),
}


@given(rows=st.lists(st.integers(0, 9), min_size=2, max_size=3), name=st.sampled_from(list(GROUPINGS)), a=SIZE, b=SIZE)
@settings(max_examples=40, deadline=None)
def test_the_announced_rows_are_dropped(tmp_path_factory, rows, name, a, b):
    folder = tmp_path_factory.getbasetemp() / "remainders"
    folder.mkdir(exist_ok=True)
    paths = []
    for number, num_rows in enumerate(rows):
        paths.append(str(folder / f"{number}-{num_rows}.npy"))
        np.save(paths[-1], np.arange(num_rows) + 100 * number)
    ds = GROUPINGS[name](daskdist.read_npy(paths), a, b, True)
    actual = sharding_input(node_of(ds), 2).remainder(False)
    _, shares = sharded(ds, "file", 2)
    kept = rows_of(ds).total(), rows_of(itertools.chain(*shares)).total()
    assert (actual.num_kept, actual.num_kept_by_file, actual.unit) == (*kept, "rows")
    assert actual.num_rows >= max(kept)


@pytest.mark.parametrize("cut", [lambda ds: ds.skip(2), lambda ds: ds.take(3)])
def test_auto_logs_when_a_cut_changes_its_choice(parquet_files, caplog, cut):
    ds = read_parquet(parquet_files(6, files=4), "id").batch(4)
    strategy = SimulatedWorkers([1, 1])
    assert strategy.distribute_dataset(ds).sharding.policy is AutoShardPolicy.FILE
    caplog.clear()
    with caplog.at_level(logging.INFO, "daskdist"):
        dist = strategy.distribute_dataset(cut(ds))
    (record,) = own_records(caplog)
    assert record.levelname == "WARNING"
    for said in (record.getMessage(), dist.explain()):
        for words in ("sharding", "would be FILE", "does not resume such a pass", "state_dict() and load_state_dict()"):
            assert words in said
    # There is no such advice if it would change nothing.
    for other in (cut(ds.map(lambda x: x).unique()), cut(Dataset.range(9).batch(2))):
        assert "resume" not in strategy.distribute_dataset(other).explain()
    # The advice helps: with DATA, the elements after a cut are those of the whole pass.
    ds = ds.with_options(policy("data"))
    assert [flat(batch) for step in steps_of(strategy, ds.skip(2)) for batch in step] == [
        flat(batch) for step in steps_of(strategy, ds)[2:] for batch in step
    ]


def test_a_decision_is_logged_once_for_a_pipeline(parquet_files, caplog):
    ds = read_parquet(parquet_files(6, files=4), "id").take(9)
    strategy = SimulatedWorkers([1, 1])
    with caplog.at_level(logging.INFO, "daskdist"):
        for _ in range(3):
            for _ in strategy.distribute_dataset(ds.batch(4)):
                pass
        assert len(own_records(caplog)) == 1
        assert "would have another result" in strategy.distribute_dataset(ds.batch(4)).explain()
        strategy.distribute_dataset(ds.batch(2))
        SimulatedWorkers([1, 1]).distribute_dataset(ds.batch(4))
    assert len(own_records(caplog)) == 3


def test_the_counted_levels_of_batches_are_those_of_elements():
    ds = Dataset.range(12)
    for build, expected in [
        (lambda ds: ds, 0),
        (lambda ds: ds.batch(2), 1),
        (lambda ds: ds.padded_batch(2).ragged_batch(2), 2),
        (lambda ds: ds.batch(2).unbatch(), 0),
        (lambda ds: ds.batch(2).rebatch(3), 1),
        (lambda ds: ds.batch(2).map(lambda x: x + 1).shuffle(3).repeat(2), 1),
        (lambda ds: ds.bucket_by_sequence_length(lambda x: 1, [2], [2, 2]), 1),
        (lambda ds: ds.batch_by_size(6, lambda x: 2), 1),
        (lambda ds: ds.concatenate(ds).batch(2), 1),
    ]:
        made = build(ds)
        assert level(node_of(made)) == expected == np.ndim(next(iter(made)))
