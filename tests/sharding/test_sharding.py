"""Sharding: the rows of each replica, that none is lost or doubled, and logs and explanations."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest
from conftest import every_pair, mirrored
from distributed import get_worker

import daskdist
from daskdist import AutoShardPolicy, Dataset, Options, read_parquet
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.dataset_base import computed_rows, node_of
from daskdist.passes.autoshard import autoshard

POLICIES = ["auto", "file", "data", "off"]


def policy(name: str) -> Options:
    return Options(auto_shard_policy=name)


def steps_of(strategy, ds) -> list[list[list[int]]]:
    """Return the row numbers of each replica, for each step."""
    actual = []
    for batch in strategy.distribute_dataset(ds):
        pieces = [piece["id"] if isinstance(piece, dict) else piece for piece in strategy.local_results(batch)]
        assert all(piece.ndim == 1 for piece in pieces)
        assert {piece.dtype for piece in pieces} == {np.dtype("int64")}
        actual.append([piece.tolist() for piece in pieces])
    return actual


def sizes(steps) -> list[list[int]]:
    return [[len(piece) for piece in step] for step in steps]


def by_replica(steps) -> list[list[int]]:
    return [[row for piece in pieces for row in piece] for pieces in zip(*steps, strict=True)]


def rows_of(steps) -> Counter:
    return Counter(row for step in steps for piece in step for row in piece)


# --- the split rule ---

TABLE = [
    (10, 8, 2, [[4, 4], [1, 1]]),
    (10, 8, 3, [[3, 3, 2], [1, 1, 0]]),
    (10, 8, 4, [[2, 2, 2, 2], [1, 1, 0, 0]]),
    (4, 4, 3, [[2, 2, 0]]),
    (10, 8, 1, [[8], [2]]),
    (1, 4, 3, [[1, 0, 0]]),
    (5, 5, 5, [[1, 1, 1, 1, 1]]),
    (6, 4, 5, [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]),
    (13, 10, 4, [[3, 3, 3, 1], [1, 1, 1, 0]]),
    (0, 4, 2, []),
]


@pytest.mark.parametrize(("num_rows", "batch", "num_replicas", "expected"), TABLE)
@pytest.mark.parametrize("kind", ["range", "file", "mapped"])
def test_pieces_follow_the_rule(parquet_files, kind, num_rows, batch, num_replicas, expected):
    if kind == "file":
        ds = read_parquet(parquet_files(num_rows, row_group=3), "id").batch(batch)
    else:
        ds = Dataset.range(num_rows).batch(batch)
        ds = ds.map(lambda x: x + 0) if kind == "mapped" else ds
    steps = steps_of(mirrored(num_replicas), ds)
    assert sizes(steps) == expected
    assert [row for step in steps for piece in step for row in piece] == list(range(num_rows))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("num_workers", "num_threads", "expected"), [(2, 1, TABLE[0]), (3, 1, TABLE[1]), (2, 2, TABLE[2]), (3, 1, TABLE[3])]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_pieces_on_a_cluster_follow_the_rule(start_cluster, num_workers, num_threads, expected, mapped):
    num_rows, batch, num_replicas, sizes_expected = expected
    client = start_cluster(num_workers, num_threads)
    ds = Dataset.range(num_rows).batch(batch)
    ds = ds.map(lambda x: x + 0) if mapped else ds
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=num_threads) as strategy:
        assert strategy.num_replicas_in_sync == num_replicas
        steps = steps_of(strategy, ds)
    assert sizes(steps) == sizes_expected
    assert [row for step in steps for piece in step for row in piece] == list(range(num_rows))


def test_a_replica_with_nothing_gets_no_rows_of_the_right_kind(parquet_files):
    paths = parquet_files(5)
    ds = read_parquet(paths, {"id": "id", "pair": ["x", "x"]}).map(
        lambda row: {**row, "text": np.array(["a", "b", "c"]), "when": np.datetime64("2024-01-01", "s")}
    )
    step = next(iter(mirrored(4).distribute_dataset(ds.batch(5))))
    for name, full in next(iter(ds.batch(5))).items():
        pieces = step[name].values
        assert [len(piece) for piece in pieces] == [2, 2, 1, 0]
        assert {piece.shape[1:] for piece in pieces} == {full.shape[1:]}
        assert {piece.dtype for piece in pieces} == {full.dtype}


@pytest.mark.cluster
def test_a_replica_with_nothing_on_a_cluster(on_cluster):
    ds = Dataset.from_tensor_slices({"x": np.ones((3, 2, 5), np.float32), "y": np.ones(3, np.int8)})
    *_, last = on_cluster.distribute_dataset(ds.batch(2))
    empty = on_cluster.local_results(last)[1]
    assert (empty["x"].shape, empty["x"].dtype) == ((0, 2, 5), np.float32)
    assert (empty["y"].shape, empty["y"].dtype) == ((0,), np.int8)
    means = on_cluster.run(lambda row: row["x"].sum(axis=(0, 1)), args=(last,))
    assert [value.tolist() for value in on_cluster.local_results(means)] == [[2] * 5, [0] * 5]


def test_batches_made_by_a_function_are_split_as_they_come():
    ds = Dataset.range(8).batch(4).map(lambda x: np.concatenate([x, x[:1]]))
    assert steps_of(mirrored(2), ds) == [[[0, 1, 2], [3, 0]], [[4, 5, 6], [7, 4]]]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_step_in_which_no_replica_has_a_row_is_none(num_replicas):
    ds = Dataset.range(12).batch(4).map(lambda x: x[(x < 4) | (x >= 8)])
    assert [row for step in steps_of(mirrored(num_replicas), ds) for piece in step for row in piece] == [
        *range(4),
        *range(8, 12),
    ]
    assert len(steps_of(mirrored(num_replicas), ds)) == 2


def test_elements_that_have_rows_without_batch_are_split():
    ds = Dataset.from_tensors(np.arange(5))
    assert steps_of(mirrored(2), ds) == [[[0, 1, 2], [3, 4]]]


# --- policies over real workers ---


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("num_workers", "name", "rows", "batch"),
    [
        (num_workers, name, rows, batch)
        for num_workers, name, (rows, batch) in every_pair(
            [1, 2, 3], list(POLICIES), [([7, 3, 6, 5], 4), ([2, 9, 1], 8), ([4, 4, 4], 4)]
        )
    ],
)
def test_each_row_is_delivered_as_often_as_the_policy_says(
    start_cluster, parquet_files, num_workers, name, rows, batch
):
    paths = parquet_files(rows, row_group=4)
    ds = read_parquet(paths, "id").batch(batch).with_options(policy(name))
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(num_workers, 1)) as strategy:
        dist = strategy.distribute_dataset(ds)
        steps = steps_of(strategy, ds)
        times = num_workers if name == "off" else 1
        assert rows_of(steps) == Counter(dict.fromkeys(range(sum(rows)), times))
        assert all(any(step) for step in steps)
        assert dist.cardinality() in (len(steps), UNKNOWN)
        assert all(len(step) == num_workers for step in steps)


@pytest.mark.cluster
# AUTO chooses FILE for all of these.
@pytest.mark.parametrize("name", ["file", "data", "off"])
@pytest.mark.parametrize(
    "pipeline",
    [
        lambda ds: ds.shuffle(9, seed=3).batch(4),
        lambda ds: ds.filter(lambda x: x % 3 != 0).batch(4),
        lambda ds: ds.map(lambda x: x * 2).shuffle(100, seed=1).batch(5).prefetch(2),
        lambda ds: ds.batch(4).map(lambda x: x[x % 2 == 0]),
        lambda ds: ds.repeat(2).batch(6),
        lambda ds: ds.batch(5).shuffle(3, seed=0),
    ],
    ids=["shuffle", "filter", "map-shuffle-batch", "batch-map", "repeat", "batch-shuffle"],
)
def test_pipelines_keep_their_rows(on_cluster, parquet_files, name, pipeline):
    ds = pipeline(read_parquet(parquet_files([7, 3, 6, 5], row_group=4), "id")).with_options(policy(name))
    expected = Counter(int(row) for batch in ds for row in batch)
    steps = steps_of(on_cluster, ds)
    times = 2 if name == "off" else 1
    assert rows_of(steps) == Counter({row: times * count for row, count in expected.items()})
    assert all(any(step) for step in steps)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # With FILE, each worker makes batches of 4 of its own rows, cuts each in two, and uses one piece in each step.
        ("file", [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]),
        ("off", [list(range(12))] * 2),
        ("data", [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
    ],
)
def test_which_rows_land_on_which_replica(on_cluster, parquet_files, name, expected):
    ds = read_parquet(parquet_files(3, files=4), "id").batch(4).with_options(policy(name))
    steps = steps_of(on_cluster, ds)
    assert by_replica(steps) == expected
    if name != "data":
        assert all(len(piece) <= 2 for step in steps for piece in step)


@pytest.mark.cluster
def test_file_i_goes_to_worker_i_mod_n(start_cluster, parquet_files):
    paths = parquet_files([2, 5, 1, 3, 4, 2, 6])
    starts = np.cumsum([0, 2, 5, 1, 3, 4, 2, 6]).tolist()
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(3, 1)) as strategy:
        # A worker's batch with all its rows is cut in three; its only replica gets one piece in each step.
        ds = read_parquet(paths, "id").batch(23).with_options(policy("file"))
        steps = steps_of(strategy, ds)
    for worker, rows in enumerate(by_replica(steps)):
        assert rows == [row for file in range(worker, 7, 3) for row in range(starts[file], starts[file + 1])]


@pytest.mark.cluster
def test_fewer_files_than_workers_are_sharded_by_row_group(start_cluster, parquet_files):
    paths = parquet_files([9, 4], row_group=3)  # The row groups have rows 0-2, 3-5, 6-8, 9-11, 12.
    ds = read_parquet(paths, "id").batch(6).with_options(policy("file"))
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(3, 1)) as strategy:
        dist = strategy.distribute_dataset(ds)
        assert dist.sharding.by_split
        assert "splits within files" in dist.explain()
        assert [set(rows) for rows in by_replica(steps_of(strategy, ds))] == [
            {0, 1, 2, 9, 10, 11},
            {3, 4, 5, 12},
            {6, 7, 8},
        ]


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "times"), [("data", 1), ("file", 1), ("off", 2)])
def test_each_row_is_read_once(on_cluster, parquet_files, tmp_path, name, times):
    log = tmp_path / "reads"
    log.mkdir()

    def note(x):
        try:
            worker = get_worker().address
        except ValueError:
            return x  # The function is also called with sample elements when the pipeline is built.
        with open(log / str(int(x)), "a") as file:
            file.write(f"{worker}\n")
        return x

    ds = read_parquet(parquet_files([5, 8, 2], row_group=4), "id").map(note)
    ds = ds.shuffle(7, seed=0).batch(4).with_options(policy(name))
    assert sum(rows_of(steps_of(on_cluster, ds)).values()) == 15 * times
    reads = {int(file.name): len(file.read_text().splitlines()) for file in log.iterdir()}
    assert reads == dict.fromkeys(range(15), times)


@pytest.mark.cluster
def test_the_order_of_data_sharding_does_not_depend_on_workers(start_cluster, parquet_files):
    ds = read_parquet(parquet_files([7, 9, 5], row_group=4), "id").shuffle(10, seed=5, reshuffle_each_iteration=False)
    ds = ds.batch(6).with_options(policy("data"))
    expected = [batch.tolist() for batch in ds]
    for num_workers in (1, 2, 3):
        with daskdist.MultiWorkerMirroredStrategy(start_cluster(num_workers, 1)) as strategy:
            assert [[row for piece in step for row in piece] for step in steps_of(strategy, ds)] == expected


# --- AUTO and its messages ---


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("pipeline", "chosen", "level", "reason"),
    [
        (lambda paths: read_parquet(paths, "id").batch(4), "FILE", "INFO", "4 files for 2 workers"),
        (lambda paths: read_parquet(paths, "id").shuffle(5).batch(4), "FILE", "INFO", "4 files"),
        (lambda paths: Dataset.range(9).batch(4), "DATA", "WARNING", "range reads no files"),
        (lambda paths: read_parquet(paths, "id").take(9).batch(4), "DATA", "WARNING", "take"),
        (lambda paths: read_parquet(paths, "id").skip(1).batch(4).take(2), "DATA", "WARNING", "take, skip"),
        (lambda paths: read_parquet(paths[:1], "id").batch(4), "DATA", "WARNING", "1 file with 1 split"),
    ],
)
def test_auto_logs_its_choice_and_the_reason_once(on_cluster, parquet_files, caplog, pipeline, chosen, level, reason):
    ds = pipeline(parquet_files(5, files=4))
    with caplog.at_level(logging.DEBUG, "daskdist"):
        dist = on_cluster.distribute_dataset(ds)
    (record,) = [record for record in caplog.records if record.name.startswith("daskdist")]
    assert (record.levelname, f"sharding by {chosen}") == (level, record.getMessage().partition(":")[0])
    assert reason in record.getMessage()
    assert dist.sharding.policy is AutoShardPolicy[chosen]
    assert reason in dist.explain()
    assert f"sharding: {chosen} (" in dist.explain()
    # Distributing with the explicit policy logs one record; iterating logs none.
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "daskdist"):
        assert rows_of(steps_of(on_cluster, ds.with_options(policy(chosen)))) == Counter(
            int(row) for batch in ds for row in batch
        )
    assert len([record for record in caplog.records if record.name.startswith("daskdist")]) == 1


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_one_worker_logs_no_choice(parquet_files, caplog, num_replicas):
    with caplog.at_level(logging.DEBUG, "daskdist"):
        mirrored(num_replicas).distribute_dataset(read_parquet(parquet_files(5), "id").take(3).batch(4))
    # Dask may log something about other tests' clusters.
    assert not [record for record in caplog.records if record.name.startswith("daskdist")]


def table_of(explained: str) -> list[list[str]]:
    lines = explained.splitlines()
    start = next(k for k, line in enumerate(lines) if line.split()[:1] == ["worker"])
    stop = next(k for k, line in enumerate(lines) if line.startswith("pipeline"))
    return [line.split()[2:] for line in lines[start + 1 : stop]]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        # replicas, files, splits, rows, bytes: 12 a row
        ("file", [6, 3, 8, 4], [["1", "2", "4", "14", "168", "B"], ["1", "2", "2", "7", "84", "B"]]),
        ("off", [6, 3], [["1", "2", "3", "9", "108", "B"]] * 2),
        ("data", [6, 3, 8, 4], [["1", "3", "3", "11", "132", "B"], ["1", "3", "3", "10", "120", "B"]]),
        ("file", [9], [["1", "1", "2", "5", "60", "B"], ["1", "1", "1", "4", "48", "B"]]),
    ],
)
def test_explain_counts_files_rows_and_bytes(on_cluster, parquet_files, name, rows, expected):
    ds = read_parquet(parquet_files(rows, row_group=4)).batch(4).with_options(policy(name))
    explained = on_cluster.distribute_dataset(ds).explain()
    assert table_of(explained) == expected
    assert "2 replicas on 2 workers" in explained
    for worker in on_cluster.workers:
        assert worker in explained
    for operation in ("read_parquet", "batch(batch_size=4)"):
        assert operation in explained


@pytest.mark.cluster
def test_explain_counts_files_without_rows(on_cluster, parquet_files):
    ds = read_parquet(parquet_files([6, 3, 0, 4])).batch(4).with_options(policy("file"))
    table = table_of(on_cluster.distribute_dataset(ds).explain())
    assert [(row[1], row[3]) for row in table] == [("2", "6"), ("2", "7")]


def test_explain_without_a_cluster(parquet_files):
    explained = mirrored(2).distribute_dataset(read_parquet(parquet_files(5, files=2)).batch(4)).explain()
    assert explained.startswith("2 replicas")
    assert "this process" in explained


# --- the number of steps, and specs ---


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["file", "data", "off"])
@pytest.mark.parametrize("options_last", [True, False])
@pytest.mark.parametrize("drop_remainder", [True, False])
def test_cardinality_is_the_number_of_steps(on_cluster, parquet_files, name, options_last, drop_remainder):
    ds = read_parquet(parquet_files([7, 3, 6, 5]), "id")
    if not options_last:
        ds = ds.with_options(policy(name))
    ds = ds.batch(4, drop_remainder=drop_remainder)
    if options_last:
        ds = ds.with_options(policy(name)).prefetch(2)
    assert on_cluster.distribute_dataset(ds).cardinality() == len(steps_of(on_cluster, ds))


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["file", "data", "off"])
def test_cardinality_that_is_not_a_number(on_cluster, parquet_files, name):
    ds = read_parquet(parquet_files([7, 3]), "id").with_options(policy(name))
    assert on_cluster.distribute_dataset(ds.repeat().batch(4)).cardinality() == INFINITE
    assert on_cluster.distribute_dataset(ds.filter(lambda x: x > 2).batch(4)).cardinality() == UNKNOWN


def test_drop_remainder_drops_rows_of_the_dataset_and_no_more():
    assert sizes(steps_of(mirrored(3), Dataset.range(10).batch(4, drop_remainder=True))) == [[2, 2, 0], [2, 2, 0]]


def test_whole_datasets_of_workers_are_shuffled_differently_unless_a_seed_is_given():
    def orders(ds):
        decision, nodes = autoshard(node_of(ds), AutoShardPolicy.OFF, 3)
        assert decision.policy is AutoShardPolicy.OFF
        # All nodes are in their first pass.
        actual = [tuple(int(x) for rows in computed_rows(Dataset(node)) for x in rows.elements()) for node in nodes]
        assert [sorted(order) for order in actual] == [list(range(50))] * 3
        return set(actual)

    assert len(orders(Dataset.range(50).shuffle(50))) == 3
    assert len(orders(Dataset.range(50).global_shuffle())) == 3
    assert len(orders(Dataset.range(1).flat_map(lambda x: Dataset.range(50).shuffle(50)))) == 3
    assert len(orders(Dataset.range(50).shuffle(50, seed=1))) == 1
    assert len(orders(Dataset.range(50))) == 1
