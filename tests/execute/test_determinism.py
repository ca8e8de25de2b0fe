"""Only the dataset, the seed and the number of pipelines determine each replica's elements and their order."""

from __future__ import annotations

import threading
import time

import dask
import numpy as np
import optree
import pytest
from conftest import mirrored
from distributed import Client, Event, Nanny, Scheduler, SpecCluster, get_worker

import daskdist
from daskdist import Dataset, Options, read_parquet
from daskdist.testing import afresh

NUM_FILES = 4
FILE_ROWS = 120


@pytest.fixture(autouse=True)
def _sizes():
    # Make many small bundles, which fill the window.
    with dask.config.set({"daskdist.bundle-bytes": 2_000, "daskdist.window-bytes": 40_000}):
        yield


@pytest.fixture
def paths(parquet_files):
    return parquet_files(FILE_ROWS, files=NUM_FILES, row_group=40)


def ids(paths):
    return read_parquet(paths, "id")


def keep_some(x):
    return (x * 7919) % 5 > 1


def triple(x):
    return {"x": x * 3, "half": x / 2}


def of_length(x):
    return np.full(x % 4, x)


PIPELINES = {
    "rows": lambda paths: ids(paths).batch(16),
    "shuffled": lambda paths: ids(paths).shuffle(100, seed=1).batch(16),
    "mapped": lambda paths: read_parquet(paths).map(lambda row: triple(row["id"])).shuffle(64, seed=2).batch(12),
    "mapped-batches": lambda paths: ids(paths).shuffle(50, seed=3).batch(10).map(lambda x: x + 0.5),
    "filtered": lambda paths: ids(paths).filter(keep_some).shuffle(70, seed=4).batch(16),
    "repeated": lambda paths: ids(paths[:2]).shuffle(90, seed=5).repeat(3).batch(25, drop_remainder=True),
    "permuted": lambda paths: ids(paths).global_shuffle(seed=6).batch(16),
    "interleaved": lambda paths: (
        Dataset.from_tensor_slices(np.array(paths))
        .interleave(lambda path: read_parquet(str(path), "id"), cycle_length=3, block_length=2)
        .batch(16)
    ),
    "zipped": lambda paths: Dataset.zip((ids(paths).shuffle(30, seed=7), Dataset.random(seed=8))).batch(16),
    "sampled": lambda paths: Dataset.sample_from_datasets(
        [ids(paths[:2]), ids(paths[2:])], weights=[0.3, 0.7], seed=9
    ).batch(16),
    "bucketed": lambda paths: (
        ids(paths).map(of_length).bucket_by_sequence_length(len, bucket_boundaries=[1, 3], bucket_batch_sizes=[8, 8, 8])
    ),
}


def sequence(strategy, ds, policy="data"):
    """Return the bytes of each step of the first pass, for each replica."""
    steps = list(strategy.distribute_dataset(afresh(ds).with_options(Options(auto_shard_policy=policy))))
    assert len(steps) > 5
    by_replica = strategy.local_results(steps)
    return [[list(map(bits, optree.tree_leaves(step))) for step in value] for value in by_replica]


def bits(leaf):
    return leaf.dtype.str, leaf.shape, leaf.tobytes()


def on(num_threads):
    return dask.config.set({"daskdist.num-threads": num_threads})


@pytest.mark.parametrize("name", PIPELINES)
def test_the_number_of_threads_is_of_no_matter(paths, name):
    ds = PIPELINES[name](paths)
    with on(1):
        expected = sequence(mirrored(2), ds)
    for num_threads in (2, 4):
        with on(num_threads):
            assert sequence(mirrored(2), ds) == expected


@pytest.mark.parametrize("name", ["shuffled", "filtered", "bucketed"])
def test_sizes_of_windows_and_bundles_are_of_no_matter(paths, name):
    ds = PIPELINES[name](paths)
    expected = sequence(mirrored(2), ds)
    for sizes in ({"window-bytes": 1}, {"bundle-bytes": 1}, {"window-bytes": "1 GiB", "bundle-bytes": "1 GiB"}):
        with dask.config.set({f"daskdist.{key}": value for key, value in sizes.items()}):
            assert sequence(mirrored(2), ds) == expected


def test_a_pipeline_built_again_gives_the_same_pass(paths):
    assert sequence(mirrored(3), PIPELINES["shuffled"](paths)) == sequence(mirrored(3), PIPELINES["shuffled"](paths))


def test_another_seed_is_another_order(paths):
    first, second = (ids(paths).shuffle(100, seed=seed).batch(16) for seed in (1, 2))
    assert sequence(mirrored(2), first) != sequence(mirrored(2), second)


@pytest.mark.parametrize("first", [0, 2])
def test_completion_order_does_not_matter_in_this_process(paths, first):
    # Each of the first four splits is in a thread; the others wait until split number `first` is done.
    is_done = threading.Event()

    def late(x):
        if x[0] == first * 40:
            is_done.set()
        elif x[0] < 160 and threading.current_thread().name.startswith("daskdist"):
            assert is_done.wait(10)
        return x

    def ds_of(function):
        return ids(paths).map(function, vectorized=True).shuffle(30, seed=1).batch(16)

    with on(4):
        actual = sequence(mirrored(2), ds_of(late))
    assert is_done.is_set()
    assert actual == sequence(mirrored(2), ds_of(lambda x: x))


# --- on a cluster ---


@pytest.mark.cluster
@pytest.mark.parametrize("name", PIPELINES)
def test_a_cluster_gives_what_one_process_gives(on_cluster, paths, name):
    ds = PIPELINES[name](paths)
    assert sequence(on_cluster, ds) == sequence(mirrored(2), ds)


@pytest.mark.cluster
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_workers_is_of_no_matter_under_data(start_cluster, paths, num_workers):
    # The number of replicas is always three; splits are assigned to other workers.
    threads = 3 // num_workers
    with daskdist.MultiWorkerMirroredStrategy(
        start_cluster(num_workers, threads), num_replicas_per_worker=threads
    ) as strategy:
        assert sequence(strategy, PIPELINES["shuffled"](paths)) == sequence(mirrored(3), PIPELINES["shuffled"](paths))


def slow_on(number, ds_of):
    """Return a pipeline with a function that is slow on one of the workers."""

    def slow(x):
        if get_worker().name == number:
            time.sleep(0.02)
        return x

    return ds_of(slow)


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["data", "file", "off"])
def test_a_slow_worker_is_of_no_matter(on_cluster, paths, policy):
    def ds_of(function):
        return ids(paths).map(function, vectorized=True).shuffle(100, seed=1).batch(32)

    expected = sequence(on_cluster, ds_of(lambda x: x), policy)
    if policy == "data":
        assert expected == sequence(mirrored(2), ds_of(lambda x: x))
    for number in range(2):
        assert sequence(on_cluster, slow_on(number, ds_of), policy) == expected


@pytest.mark.cluster
@pytest.mark.parametrize("build", ["shuffle", "filter"])
def test_the_order_in_which_splits_finish_is_of_no_matter(on_cluster, paths, build):
    # The first split waits until a later one is done, on any worker.
    name = f"a later split is done, {build}"

    def late(x):
        if x[0] == 0:
            assert Event(name).wait(20)
        elif x[0] == 80:
            Event(name).set()
        return x

    def ds_of(function):
        ds = ids(paths).map(function, vectorized=True)
        ds = ds.filter(keep_some) if build == "filter" else ds
        return ds.shuffle(40, seed=1).batch(16)

    actual = sequence(on_cluster, ds_of(late))
    assert Event(name, client=on_cluster.client).is_set()
    assert actual == sequence(mirrored(2), ds_of(lambda x: x))


@pytest.fixture
def odd_cluster():
    """Return a client of two workers that have other names and were started in another order."""
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}}
    options = {"nthreads": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    workers = {name: {"cls": Nanny, "options": {**options, "name": name}} for name in ("zeta", 0)}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(2)
        yield client


@pytest.mark.cluster
def test_names_of_workers_are_of_no_matter(odd_cluster, on_cluster, paths):
    with daskdist.MultiWorkerMirroredStrategy(odd_cluster) as strategy:
        for policy in ("data", "file"):
            ds = PIPELINES["shuffled"](paths)
            assert sequence(strategy, ds, policy) == sequence(on_cluster, ds, policy)
