"""Passes over served datasets: each iteration has the orders and random numbers of the next pass."""

import subprocess
import uuid

import dask
import numpy as np
import pytest
from conftest import mirrored
from programs import Program

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.structure import Structure
from daskdist.data import service

pytestmark = pytest.mark.cluster

IN_ORDER = Options(deterministic=True)


def plain(elements):
    return [[np.asarray(leaf).tolist() for leaf in Structure.of(element)[0]] for element in elements]


def shuffled(seed=1):
    return Dataset.range(40).shuffle(40, seed=seed).with_options(IN_ORDER)


def jitter(x, rng):
    return x, rng.integers(2**40)


PIPELINES = {
    "shuffle": shuffled,
    "random numbers": lambda: Dataset.range(30).map(jitter, rng=3).with_options(IN_ORDER),
    "order of files": lambda: Dataset.range(30).global_shuffle(seed=2).batch(4).with_options(IN_ORDER),
    "repeated": lambda: Dataset.range(9).shuffle(9, seed=4).repeat(2).with_options(IN_ORDER),
    "nested": lambda: Dataset.range(3).flat_map(lambda x: Dataset.range(9).shuffle(9)).with_options(Options(seed=5)),
    "sampled": lambda: Dataset.sample_from_datasets([Dataset.range(9), Dataset.range(20, 29)], [0.5, 0.5], seed=1),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_served_passes_are_those_of_the_dataset(client, name):
    build = PIPELINES[name]
    local, ds = build(), build()
    passes = [plain(local) for _ in range(3)]
    assert passes[0] != passes[1]
    once = ds.serve(client)
    assert [plain(once), plain(ds.serve(client)), plain(once)] == passes
    # Passes here count like those on workers.
    assert plain(ds) == plain(local)
    assert plain(ds.at_epoch(1).serve(client)) == plain(ds.serve(client).at_epoch(1)) == passes[1]


@pytest.mark.parametrize("store", ["cache", "snapshot"])
@pytest.mark.parametrize("then", [lambda ds: ds.map(lambda x: x + 1), lambda ds: ds.shuffle(9, seed=2)])
def test_stored_elements_are_those_of_the_first_pass_also_when_served(client, tmp_path, store, then):
    arguments = () if store == "cache" else (str(tmp_path),)
    local = then(shuffled().cache())
    served = then(getattr(shuffled(), store)(*arguments)).serve(client)
    assert [plain(served) for _ in range(3)] == [plain(local) for _ in range(3)]
    assert plain(served.at_epoch(2)) == plain(local.at_epoch(2))


def test_operations_created_in_each_epoch_have_seeds_of_their_own(client):
    orders = [plain(Dataset.range(60).shuffle(60).with_options(IN_ORDER).serve(client)) for _ in range(2)]
    assert orders[0] != orders[1]


def test_an_option_sets_the_seed_of_operations_on_workers(client):
    orders = [
        plain(Dataset.range(60).shuffle(60).with_options(IN_ORDER).serve(client).with_options(Options(seed=3)))
        for _ in range(2)
    ]
    assert orders[0] == orders[1] == plain(Dataset.range(60).shuffle(60).with_options(Options(seed=3)))


def test_each_worker_has_another_order_also_with_a_seed_by_an_option(client):
    served = Dataset.range(50).shuffle(50).batch(50).with_options(Options(seed=1)).serve(client, "parallel_epochs")
    first, second = plain(served), plain(served)
    assert len({str(order) for order in (*first, *second)}) == 4


@pytest.mark.parametrize(
    "build",
    [
        lambda ds, other: Dataset.zip(ds, other),
        lambda ds, other: ds.repeat(2).concatenate(other),
        lambda ds, other: ds.batch(7).shuffle(9, seed=2),
        lambda ds, other: ds.map(lambda x, rng: x + rng.integers(9), rng=7),
        lambda ds, other: Dataset.zip(ds, ds),
        lambda ds, other: ds.cache().shuffle(9, seed=8),
    ],
)
def test_served_datasets_within_others(client, build):
    local = build(shuffled(), shuffled(2))
    passes = [plain(local) for _ in range(3)]
    within = build(shuffled().serve(client), shuffled(2))
    assert [plain(within) for _ in range(3)] == passes
    assert plain(within.at_epoch(2)) == passes[2]
    assert plain(build(shuffled().serve(client).map(lambda x: x).serve(client), shuffled(2)).at_epoch(2)) == passes[2]


def test_a_program_continues_at_a_later_pass(client):
    passes = [plain(shuffled().at_epoch(number)) for number in range(3)]
    name = uuid.uuid4().hex
    served = shuffled().serve(client, job_name=name)
    assert [plain(served), plain(served)] == passes[:2]
    # The iteration of the job has the same number.
    assert plain(shuffled().serve(client, job_name=name).at_epoch(2)) == passes[2]


def test_consumers_of_a_job_share_a_pass(client):
    # The numbers differ between passes, and consumers may get them in any order.
    name, ds = uuid.uuid4().hex, Dataset.range(40).map(lambda x, rng: rng.integers(2**40), rng=1)
    passes = [sorted(int(x) for x in ds.at_epoch(number)) for number in range(2)]
    assert passes[0] != passes[1]
    iterators = [iter(ds.serve(client, job_name=name, max_outstanding_requests=2)) for _ in range(2)]
    taken = [int(next(iterator)) for _ in range(4) for iterator in iterators]
    rest = [int(x) for iterator in iterators for x in iterator]
    assert sorted(taken + rest) == passes[0]


@pytest.mark.parametrize("mode", ["distributed_epoch", service.ShardingPolicy.DATA])
def test_datasets_read_by_id(client, mode):
    ds = shuffled(seed=9).at_epoch(2)
    address = client.scheduler.address
    dataset_id = service.register_dataset(address, ds, dataset_id=uuid.uuid4().hex)

    def by_id():
        return service.from_dataset_id(mode, address, dataset_id, ds.element_spec)

    passes = [plain(shuffled(seed=9).at_epoch(number)) for number in range(2, 6)]
    assert [plain(by_id()), plain(by_id()), plain(by_id().at_epoch(3))] == [passes[0], passes[1], passes[3]]


SERVING = """
import sys
from dask.distributed import Client
import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.cardinality import INFINITE, UNKNOWN
with Client(sys.argv[1], set_as_default=False) as client:
    ds = Dataset.range(12).shuffle(12, seed=1).with_options(Options(deterministic=True))
    for epoch in range(2):
        print(*map(int, ds.serve(client)))
"""


def test_each_program_begins_with_the_first_pass(client):
    expected = Dataset.range(12).shuffle(12, seed=1)
    passes = [" ".join(map(str, map(int, expected))) for _ in range(2)]
    for _ in range(2):
        program = Program("-c", SERVING, client.scheduler.address, stdout=subprocess.PIPE)
        assert program.communicate(timeout=60)[0].split("\n")[:2] == passes


def test_strategies_count_passes_of_served_datasets(client, on_cluster):
    passes = [[row for (row,) in plain(shuffled().at_epoch(number))] for number in range(4)]
    for strategy in (mirrored(1), on_cluster):

        def rows(ds, strategy=strategy):
            steps = strategy.distribute_dataset(ds)
            return [x for step in steps for part in strategy.local_results(step) for x in part.tolist()]

        ds = shuffled()
        for number in range(2):
            assert rows(ds.serve(client).batch(8)) == passes[number]
        assert rows(ds.serve(client).batch(8).at_epoch(3)) == passes[3]


# --- parts ---


@pytest.mark.parametrize(
    "parts_of",
    [
        lambda ds: ds.split([0.5, 0.3, 0.2], seed=1),
        lambda ds: ds.split(0.5, seed=1, stratify=lambda x: int(x) % 2),
        lambda ds: ds.map(lambda x: x).kfold(3, seed=1)[0],
        lambda ds: [ds.shard(3, index) for index in range(3)],
        lambda ds: [ds.take(90), ds.skip(90)],
        lambda ds: [part.map(lambda x, y: x) for part in Dataset.zip(ds, Dataset.range(200)).split(0.5)],
    ],
)
@pytest.mark.parametrize("mode", ["distributed_epoch", service.ShardingPolicy.DATA])
def test_parts_of_a_served_dataset(client, parts_of, mode):
    with dask.config.set({"daskdist.service.buffer-bytes": 200}):
        served = Dataset.range(200).map(lambda x, rng: x, rng=1).serve(client, mode)
        assert sorted(int(x) for part in parts_of(served) for x in part) == list(range(200))
        served = Dataset.range(200).serve(client, mode)
        assert sorted(int(x) for part in parts_of(served) for x in part) == list(range(200))


def test_pairs_with_a_served_dataset(client):
    pairs = Dataset.zip(Dataset.range(500).serve(client), Dataset.range(500)).batch(50)
    assert all((first == second).all() for first, second in pairs)


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (lambda ds: ds.serve(job_name="parts"), "consumers of the job 'parts' get"),
        (lambda ds: ds.serve(processing_mode="parallel_epochs"), "sharding policy OFF"),
        (lambda ds: ds.serve(processing_mode=service.ShardingPolicy.FILE).cache(), "sharding policy FILE"),
        (lambda ds: ds.repeat().serve(), "endless"),
    ],
)
def test_parts_of_elements_without_an_order_are_refused(client, serve, reason):
    with client.as_current():
        served = serve(Dataset.range(10)).map(lambda x: x)
        calls = [lambda: served.shard(2, 0)]
        if reason != "endless":
            calls += [lambda: served.split(0.5), lambda: served.kfold(2, stratify=lambda x: x % 2)]
        for call in calls:
            with pytest.raises(errors.ArgumentError, match=rf"elements after serve .*{reason}.* before serve"):
                call()
        # By key, a part depends on no order.
        served.split(0.5, by=lambda x: x)


# --- other properties of a dataset ---


@pytest.mark.parametrize("build", [lambda ds: ds.shuffle(10), lambda ds: ds.unique(), lambda ds: ds.window(3)])
def test_positions_of_served_datasets_are_refused_with_a_reason(client, build):
    ds = build(Dataset.range(50).serve(client))
    iterator = iter(ds)
    next(iterator), next(iterator)
    again = iter(ds)
    again.load_state_dict(iterator.state_dict())
    with pytest.raises(errors.ArgumentError, match="from the service cannot be resumed"):
        next(again)


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds.bucket_by_sequence_length(len, [4], [4, 4]),
        lambda ds: ds.group_by_window(len, lambda key, rows: rows.padded_batch(4), window_size=4),
        lambda ds: ds.flat_map(lambda row: Dataset.from_tensors(row).repeat(2)),
        lambda ds: ds.interleave(lambda row: Dataset.from_tensors(row), cycle_length=2),
    ],
)
def test_groups_of_an_endless_dataset_are_endless(client, build):
    rows = Dataset.range(64).map(lambda x: np.arange(int(x) % 8 + 1))
    assert build(rows.repeat()).cardinality() == INFINITE
    assert build(rows).cardinality() == UNKNOWN
    served = build(rows.repeat()).serve(client, "parallel_epochs", uuid.uuid4().hex, consumer_index=0, num_consumers=1)
    assert len(next(iter(served)))


def test_readers_are_served_with_tensorflow_names(client, tmp_path):
    files = [str(tmp_path / f"{number}.txt") for number in range(4)]
    for number, file in enumerate(files):
        (tmp_path / file).write_text("".join(f"{number}{row}\n" for row in range(5)))
    rows = sorted(f"{number}{row}".encode() for number in range(4) for row in range(5))
    names = daskdist.data.Dataset.from_tensor_slices(files)
    address = client.scheduler.address
    for ds in (daskdist.data.TextLineDataset(files), names.interleave(daskdist.data.TextLineDataset)):
        served = ds.apply(service.distribute(service.ShardingPolicy.FILE, address))
        assert isinstance(served, daskdist.data.Dataset)
        assert sorted(row.encode() if isinstance(row, str) else bytes(row) for row in served) == rows


SERVERS = """
from daskdist.data import Dataset
from daskdist.data.experimental import service
dispatcher = service.DispatchServer(service.DispatcherConfig(host="127.0.0.1"))
worker = service.WorkerServer(service.WorkerConfig(dispatcher.address, worker_address="127.0.0.1"))
print(sorted(map(int, Dataset.range(3).apply(service.distribute("distributed_epoch", dispatcher.target)))))
"""


def test_servers_in_a_program_print_nothing():
    program = Program("-c", SERVERS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, printed = program.communicate(timeout=60)
    assert output == "[0, 1, 2]\n"
    assert "INFO" not in printed
