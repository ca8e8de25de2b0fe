"""The data service on real clusters: modes, jobs, consumers and workers that are lost."""

import gc
import itertools
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter, namedtuple

import dask
import dask.array
import numpy as np
import pytest
from conftest import eventually, new_cluster
from programs import Program

import daskdist
from daskdist import Dataset, errors
from daskdist.data import service
from daskdist.data.service import CrossTrainerCache, ShardingPolicy, distribute
from daskdist.execute.callers.submit import workers_of
from daskdist.service.consumer.read_ahead_limit import LEAST_AHEAD
from daskdist.service.consumer.reading import Reading
from daskdist.testing import same_elements, same_multiset

pytestmark = pytest.mark.cluster


def job() -> str:
    """Return a name that no other job has."""
    return uuid.uuid4().hex


def numbers(elements) -> list[int]:
    """Return elements as Python's own numbers."""
    return [int(element) for element in elements]


# --- the examples of TensorFlow's page ---


def test_earlier_operations_run_on_workers_and_later_ones_here(client):
    here = os.getpid()
    dataset = daskdist.data.Dataset.range(5)
    dataset = dataset.map(lambda x: (x * x, os.getpid()))
    dataset = dataset.apply(distribute("parallel_epochs", client.scheduler.address.replace("tcp", "grpc")))
    dataset = dataset.map(lambda x, pid: (x + 1, pid, os.getpid()))
    actual = list(dataset)
    # Each of the two workers produces all elements.
    assert sorted(int(x) for x, *_ in actual) == sorted(2 * [1, 2, 5, 10, 17])
    assert len({int(pid) for _, pid, _ in actual}) == 2
    assert here not in {int(pid) for _, pid, _ in actual}
    assert {int(pid) for *_, pid in actual} == {here}


CONSUMER = """
import sys
from daskdist.data import Dataset
from daskdist.data.service import distribute
service, job = sys.argv[1:]
dataset = Dataset.range(5).apply(distribute("distributed_epoch", service, job_name=job))
for iteration in range(3):
    print(*map(int, dataset), flush=True)
"""


def test_two_processes_share_the_iterations_of_a_job(client):
    arguments = ["-c", CONSUMER, client.scheduler.address, job()]
    processes = [Program(*arguments, stdout=subprocess.PIPE) for _ in range(2)]
    report = [process.communicate(timeout=60)[0].split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for iteration in range(3):
        shares = [numbers(lines[iteration].split()) for lines in report]
        assert sorted(shares[0] + shares[1]) == [0, 1, 2, 3, 4]


def test_elements_of_a_class_that_only_the_program_has(client):
    pair = namedtuple("pair", "first, second")
    actual = list(Dataset.range(3).map(lambda x: pair(x, -x)).serve(client))
    assert {type(element) for element in actual} == {pair}
    assert sorted(numbers(element.second for element in actual)) == [-2, -1, 0]


def test_elements_that_do_not_pickle_are_an_error(client):
    with pytest.raises(errors.ArgumentError, match=r"elements cannot be sent to a consumer: .*lock"):
        list(Dataset.range(3).map(lambda x: np.array([threading.Lock()], object)).serve(client))


def test_a_finished_job_gives_no_elements(client, caplog):
    name = job()
    assert sorted(numbers(Dataset.range(5).serve(client, job_name=name))) == [0, 1, 2, 3, 4]
    assert not list(Dataset.range(5).serve(client, job_name=name))
    assert "was over before" in caplog.text


# --- modes ---


@pytest.mark.parametrize("mode", ["distributed_epoch", "one_epoch", ShardingPolicy.DYNAMIC, ShardingPolicy.DATA])
@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds,
        lambda ds: ds.take(0),
        lambda ds: ds.batch(7),
        lambda ds: ds.take(13).skip(2),
        lambda ds: ds.shuffle(50, seed=1).batch(8, drop_remainder=True),
        lambda ds: ds.filter(lambda x: x % 3 == 0).map(str),
        lambda ds: ds.repeat(2).enumerate(),
        lambda ds: daskdist.Dataset.zip((ds, ds.map(lambda x: -x))),
    ],
)
def test_one_epoch_is_the_dataset_itself(client, mode, build):
    dataset = build(Dataset.range(100))
    actual, expected = list(dataset.at_epoch(0).serve(client, mode)), list(dataset.at_epoch(0))
    same_multiset(actual, expected)
    if mode is ShardingPolicy.DATA:
        same_elements(actual, expected)


def test_elements_are_in_order_if_deterministic_is_true(client):
    dataset = Dataset.range(1000).batch(3).with_options(daskdist.Options(deterministic=True))
    same_elements(list(dataset.serve(client)), list(dataset))


def test_all_workers_produce_an_epoch_and_what_they_read_is_read_once(client, parquet_files):
    dataset = daskdist.read_parquet(parquet_files(40, 4, row_group=10)).map(lambda x: (x["id"], os.getpid()))
    actual = [(int(x), int(pid)) for x, pid in dataset.serve(client)]
    assert sorted(x for x, _ in actual) == list(range(160))
    assert len({pid for _, pid in actual}) == 2
    # A lease has whole row groups.
    assert all(len({pid for x, pid in actual if x // 10 == group}) == 1 for group in range(16))


def test_each_worker_shuffles_in_an_order_of_its_own(client):
    dataset = Dataset.range(50).shuffle(50).batch(50).map(lambda x: (x, os.getpid()))
    orders = {int(pid): numbers(order) for order, pid in dataset.serve(client, "parallel_epochs")}
    one, other = orders.values()
    assert sorted(one) == sorted(other) == list(range(50))
    assert one != other


def test_an_unseeded_shuffle_has_another_order_in_each_iteration(client):
    served = Dataset.range(50).shuffle(50).serve(client)
    first, second = numbers(served), numbers(served)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_files_are_shared_out(client, parquet_files):
    dataset = daskdist.read_parquet(parquet_files(40, 4)).batch(5).map(lambda x: (x["id"], os.getpid()))
    for mode in (ShardingPolicy.FILE, ShardingPolicy.FILE_OR_DATA):
        actual = [(numbers(ids), int(pid)) for ids, pid in dataset.serve(client, mode)]
        assert Counter(number for ids, _ in actual for number in ids) == Counter(range(160))
        assert len({pid for _, pid in actual}) == 2
    with pytest.raises(errors.ShardingError):
        list(Dataset.range(10).serve(client, ShardingPolicy.FILE))
    assert sorted(numbers(Dataset.range(10).serve(client, ShardingPolicy.FILE_OR_DATA))) == list(range(10))


def test_hints_are_filled_in(client):
    from daskdist.sharding import SHARD_HINT

    dataset = Dataset.range(10).shard(SHARD_HINT, SHARD_HINT).map(lambda x: (x, os.getpid()))
    actual = [(int(x), int(pid)) for x, pid in dataset.serve(client, ShardingPolicy.HINT)]
    assert sorted(x for x, _ in actual) == list(range(10))
    assert len({pid for _, pid in actual}) == 2


def test_an_error_comes_after_the_elements_before_it(client):
    def fail(x):
        if x == 37:
            raise KeyError("of the function's")
        return x

    iterator = iter(Dataset.range(100).map(fail).serve(client, ShardingPolicy.DATA))
    assert numbers(next(iterator) for _ in range(37)) == list(range(37))
    with pytest.raises(errors.UserFunctionError, match="of the function's"):
        next(iterator)
    with pytest.raises(errors.UserFunctionError, match="of the function's"):
        list(Dataset.range(100).map(fail).serve(client))


# --- consumers ---


def test_two_consumers_get_each_element_once(client):
    name = job()
    one, other = (iter(Dataset.range(1000).serve(client, job_name=name)) for _ in range(2))
    first = [int(next(one)), int(next(other))]
    # Elements that one consumer holds and has not used go to the other one.
    rest = numbers(other)
    assert sorted(first + rest + numbers(one)) == list(range(1000))


def test_elements_that_a_consumer_leaves_go_to_the_next(client):
    name = job()
    iterator = iter(Dataset.range(10_000).batch(10).serve(client, job_name=name))
    actual = []
    for _ in range(20):
        actual.append(next(iterator))
        # Simulate a step of training.
        time.sleep(0.02)
    iterator.close()
    actual += list(Dataset.range(10_000).batch(10).serve(client, job_name=name))
    numbers_found = np.concatenate(actual).tolist()
    assert len(numbers_found) == len(set(numbers_found))
    # The first consumer's pipeline had taken a few batches ahead, which are lost.
    assert 10_000 - len(numbers_found) <= 10 * 2 * LEAST_AHEAD


def test_consumers_forget_finished_parts_of_an_endless_task(client):
    before = [item for item in gc.get_objects() if isinstance(item, Reading)]
    name = job()
    iterators = [iter(Dataset.counter().serve(client, ShardingPolicy.DATA, job_name=name)) for _ in range(3)]
    actual = [int(next(iterator)) for _ in range(400) for iterator in iterators]
    assert len(set(actual)) == len(actual)
    readings = [value for value in gc.get_objects() if isinstance(value, Reading) and value not in before]
    assert len(readings) == 3
    eventually(lambda: not any(reading.done() for reading in readings))
    # The iterators continue, and no element comes twice.
    actual += [int(next(iterator)) for _ in range(20) for iterator in iterators]
    assert len(set(actual)) == len(actual)
    for iterator in iterators:
        iterator.close()


def test_rounds(client):
    dataset = Dataset.counter()
    name = job()
    consumers = [
        iter(dataset.serve(client, "parallel_epochs", name, consumer_index=index, num_consumers=2)) for index in (0, 1)
    ]
    actual = [numbers(next(consumer) for _ in range(6)) for consumer in consumers]
    assert actual == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3, 5, 5]]
    with pytest.raises(errors.ArgumentError, match="without end"):
        Dataset.range(4).serve(client, job_name=name, consumer_index=0, num_consumers=2)


@pytest.mark.cluster
def test_looks_take_no_elements_from_other_consumers(client, capsys):
    name = job()
    shared = Dataset.range(100).serve(client, job_name=name)
    batches = shared.map(lambda x: x + 1).batch(4)
    assert [batch.tolist() for batch in batches.head(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    batches.unbatch().show(3)
    assert "the first 3 elements" in capsys.readouterr().out
    assert shared.describe().num_elements == batches.unbatch().count() == 100
    # Members of a round would wait for each other.
    rounds = Dataset.range(100).repeat().serve(client, job_name=f"{name} rounds", consumer_index=0, num_consumers=2)
    assert numbers(rounds.head(2)) == [0, 1]
    assert sorted(numbers(shared)) == list(range(100))

    dataset_id = service.register_dataset(client, Dataset.range(5))
    of_id = service.from_dataset_id("distributed_epoch", client, dataset_id, job_name=f"{name} by id")
    with pytest.raises(errors.ArgumentError, match=r"take elements from the other consumers of the job .* by id'"):
        of_id.batch(2).head()


@pytest.mark.cluster
@pytest.mark.parametrize("source", ["elements", "dask"])
def test_each_worker_reads_data_that_others_hold(client, source):
    if source == "elements":
        dataset = Dataset.range(100).batch(5).unbatch().persist()
    else:
        dataset = Dataset.from_dask(dask.array.arange(100, chunks=10).persist(scheduler=client))
    expected = Counter(range(0, 200, 2))
    served = dataset.map(lambda x: x * 2)
    assert Counter(numbers(served.serve(client))) == expected
    assert Counter(numbers(served.serve(client, "parallel_epochs"))) == expected + expected


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_rounds_within_a_budget(client, mode):
    name, budget, num_consumers = job(), 64, 2
    lengths = np.random.default_rng(1).integers(0, 33, 4096)
    sequences = Dataset.from_tensor_slices(lengths).map(lambda n: np.arange(int(n))).repeat()
    apart = sequences.apply(
        distribute(mode, client, name, 0, num_consumers, tokens_per_consumer=budget),
    )
    consumers = [
        iter(apart),
        iter(sequences.serve(client, mode, name, consumer_index=1, num_consumers=2, tokens_per_consumer=budget)),
    ]
    rounds = [[next(consumer) for consumer in consumers] for _ in range(60)]
    for batches in rounds:
        assert all(0 < batch.size <= budget or batch.shape[1] == 0 for batch in batches)
        longest = [batch.shape[1] for batch in batches]
        # Elements are sorted by length, so the second batch has the next longer ones.
        assert longest[0] <= longest[1] <= longest[0] + 3
    # Batches use most of their budget.
    assert np.mean([batch.size for batches in rounds for batch in batches]) > 0.7 * budget
    for value in consumers:
        value.close()


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (lambda ds: ds.map(np.atleast_1d), {"num_consumers": None, "consumer_index": None}, "give num_consumers"),
        (lambda ds: ds.map(np.atleast_1d), {"tokens_per_consumer": 0}, "serve: tokens_per_consumer is 0"),
        (lambda ds: ds.map(np.atleast_1d), {"tokens_per_consumer": None, "length_fn": len}, "for tokens_per_consumer"),
        (lambda ds: ds.map(lambda x: {"x": x, "y": x}), {}, r"needs a length_fn .* \{'x': TensorSpec"),
        (lambda ds: ds, {}, "needs a length_fn"),
        (lambda ds: ds.take(5).map(np.atleast_1d), {}, "need a dataset without end"),
    ],
)
def test_invalid_budgets_are_refused(build, arguments, message):
    rounds = {"num_consumers": 2, "consumer_index": 0, "tokens_per_consumer": 8} | arguments
    with pytest.raises(errors.ArgumentError, match=message):
        build(Dataset.counter()).serve("tcp://127.0.0.1:1", job_name="job", **rounds)


def test_trainers_share_produced_elements(client):
    name = job()

    def trainer(number):
        cache = CrossTrainerCache(f"trainer {number}")
        return iter(Dataset.counter().serve(client, job_name=name, cross_trainer_cache=cache))

    one, other = trainer(1), trainer(2)
    assert numbers(next(one) for _ in range(10)) == list(range(10))
    assert numbers(next(other) for _ in range(10)) == list(range(10))


# --- mistakes ---


def test_another_dataset_under_the_same_name_is_refused(client):
    name = job()
    iterator = iter(Dataset.range(5).serve(client, job_name=name))
    next(iterator)
    with pytest.raises(errors.ArgumentError, match=r"has a dataset of fingerprint \w+; that of this one is \w+"):
        list(Dataset.range(6).serve(client, job_name=name))
    with pytest.raises(errors.ArgumentError, match="has mode DYNAMIC, this dataset OFF"):
        list(Dataset.range(5).serve(client, "parallel_epochs", name))


def test_a_wrong_address():
    with (
        dask.config.set({"daskdist.timeouts.connect": 0.5}),
        pytest.raises(errors.ClusterError, match=r"no scheduler answers at tcp://127.0.0.1:1 "),
    ):
        list(Dataset.range(5).serve("127.0.0.1:1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processing_mode": "sideways"}, "processing_mode is 'sideways'"),
        ({"processing_mode": 1}, "processing_mode is 1"),
        ({"job_name": ""}, "job_name is ''"),
        ({"compression": "LZW"}, "compression is 'LZW'"),
        ({"target_workers": "MINE"}, "target_workers is 'MINE'"),
        ({"consumer_index": 0}, "give both"),
        ({"consumer_index": 2, "num_consumers": 2, "job_name": "j"}, "consumer_index is 2 of 2"),
        ({"consumer_index": 0, "num_consumers": 2}, "must share a job_name"),
        ({"max_outstanding_requests": 0}, "max_outstanding_requests"),
        ({"cross_trainer_cache": CrossTrainerCache("a")}, "needs a job_name"),
        ({"service": "tcp://a://b:1"}, "service is 'tcp://a://b:1'"),
        ({"service": "host"}, "has no port"),
        ({"service": 3}, "service is of type int"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(errors.ArgumentError, match=message):
        Dataset.range(5).serve(**{"service": "tcp://127.0.0.1:1"} | arguments)


# --- losses ---


@pytest.fixture(scope="module")
def own_cluster():
    """Return a cluster whose worker processes may be killed and retired."""
    with new_cluster() as client:
        yield client


@pytest.fixture
def own_client(own_cluster):
    """Return a client of two worker processes that may be killed and retired."""
    own_cluster.cluster.scale(2)
    own_cluster.wait_for_workers(2, timeout=60)
    return own_cluster


KILLED = """
import os, sys
import daskdist
service, job, number = sys.argv[1:]
for index, x in enumerate(daskdist.Dataset.range(800).serve(service, job_name=job)):
    print(int(x), flush=True)
    if index == int(number):
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("on_loss", ["redeliver", "drop"])
def test_a_consumer_is_killed(client, on_loss):
    name = job()
    script = KILLED.replace("job_name=job", f"job_name=job, on_consumer_loss={on_loss!r}")
    process = Program("-c", script, client.scheduler.address, name, "100", stdout=subprocess.PIPE)
    report = numbers(process.communicate(timeout=60)[0].split())
    assert process.returncode == -signal.SIGKILL
    assert len(report) == 101
    actual = numbers(Dataset.range(800).serve(client, job_name=name, on_consumer_loss=on_loss))
    assert len(actual) == len(set(actual))
    if on_loss == "redeliver":
        # Elements that the lost consumer's pipeline had taken ahead are lost, so check only those before them.
        assert set(range(100)) <= set(report) | set(actual)
    else:
        assert not set(actual) & set(report)


def test_a_function_that_ends_each_worker_is_given_up(own_client, tmp_path):
    def end_at(x):
        # The program computes the first elements itself, to know their spec.
        if x == 9_000:
            (tmp_path / f"{os.getpid()}").touch()
            os._exit(1)
        return x

    elements = iter(Dataset.range(10_000).map(end_at).serve(own_client))
    with pytest.raises(errors.RepeatedLossError, match="workers were lost 4 times in a row"):
        list(elements)
    assert len(list(tmp_path.iterdir())) <= 8
    own_client.wait_for_workers(2, timeout=60)
    assert len(list(Dataset.range(100).serve(own_client))) == 100


@pytest.mark.parametrize("mode", ["distributed_epoch", "parallel_epochs"])
def test_a_worker_is_killed(own_client, mode):
    client = own_client
    dataset = Dataset.range(3000).map(lambda x: (x, os.getpid())).batch(10)
    iterator = iter(dataset.serve(client, mode))
    actual = [next(iterator) for _ in range(20)]
    os.kill(int(actual[0][1][0]), signal.SIGKILL)
    actual += list(iterator)
    counts = Counter(number for ids, _ in actual for number in ids.tolist())
    if mode == "distributed_epoch":
        assert counts == Counter(range(3000))
    else:
        assert set(counts) == set(range(3000))
        assert max(counts.values()) <= 3


@pytest.mark.parametrize(("num_consumers", "num_workers"), [(2, 3), (1, 2), (3, 3)])
def test_coordinated_reads_continue_without_a_killed_worker(own_cluster, num_consumers, num_workers):
    client = own_cluster
    client.cluster.scale(num_workers)
    client.wait_for_workers(num_workers, timeout=60)
    rows, batches, name = 10, 60, job()
    dataset = Dataset.range(100_000).map(lambda x: (time.sleep(0.0002), x)[1]).batch(rows).repeat()
    consumers = [
        iter(dataset.serve(client, job_name=name, num_consumers=num_consumers, consumer_index=number))
        for number in range(num_consumers)
    ]
    actual = [next(consumer) for _ in range(10) for consumer in consumers]
    # Whichever it is: one that serves the consumers, or one that computes for it.
    addresses = sorted(workers_of(client))
    kill_one_of(client, addresses[num_consumers % num_workers :])
    actual += [next(consumer) for _ in range(batches - 10) for consumer in consumers]
    for consumer in consumers:
        consumer.close()
    counts = Counter(number for batch in actual for number in batch.tolist())
    assert all(len(batch) == rows for batch in actual)
    assert sorted(counts) == list(range(rows * batches * num_consumers))
    assert set(counts.values()) == {1}


def kill_one_of(client, addresses):
    """Kill the process of the first of some workers; its nanny starts another."""
    (pid,) = client.run(os.getpid, workers=addresses[:1]).values()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: addresses[0] not in workers_of(client), 60)


@pytest.mark.parametrize("mode", [ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.DYNAMIC])
def test_a_worker_is_killed_another_comes_and_one_retires(own_client, parquet_files, mode):
    client, name = own_client, job()

    def workers():
        return [worker for job in service.status(client).jobs if job.name == name for worker in job.workers]

    # With so few requests, the workers are not at the end before the last of them is lost.
    dataset = daskdist.read_parquet(parquet_files(200, 8, row_group=20)).map(lambda row: row["id"]).batch(5)
    consumers = [iter(dataset.serve(client, mode, name, max_outstanding_requests=4)) for _ in range(2)]
    actual = [next(item) for _ in range(10) for item in consumers]
    kill_one_of(client, workers())
    actual += [next(value) for _ in range(10) for value in consumers]
    client.wait_for_workers(2, timeout=60)
    if mode is ShardingPolicy.DYNAMIC:
        # A new worker gets leases at once.
        actual += [next(consumer) for _ in range(20) for consumer in consumers]
        eventually(lambda: len(set(workers())) == 2)
    before = set(workers_of(client))
    client.cluster.scale(1)
    eventually(lambda: len(set(workers_of(client)) & before) == 1)
    for part in consumers:
        actual += list(part)
    assert Counter(np.concatenate(actual).tolist()) == Counter(range(1600))


def test_epochs_leave_nothing(client):
    def kept_by_worker(dask_worker):
        plugin = dask_worker.plugins["daskdist-service"]
        tasks = {name: part for name, part in vars(plugin.tasks).items() if hasattr(part, "__len__")}
        return {"links": len(plugin._links), **{name: len(part) for name, part in tasks.items()}}

    def kept_by_scheduler(dask_scheduler):
        dispatcher = dask_scheduler.plugins["daskdist-service"].dispatcher
        iterations = dispatcher.iterations()
        tasks = [len(iteration.tasks) + len(iteration.consumers) for iteration in iterations]
        num_iterations = len(iterations)
        return len(dispatcher.datasets), len(dispatcher._consumers), len(dispatcher._tasks), sum(tasks), num_iterations

    def kept():
        by_worker = [count for counts in client.run(kept_by_worker).values() for count in counts.values()]
        return np.array([*by_worker, *client.run_on_scheduler(kept_by_scheduler)])

    dataset = Dataset.range(40).batch(4).serve(client, job_name=job())
    list(dataset)
    before = kept()
    for _ in range(10):
        list(dataset)
    # Iterations that have just ended may still be kept for a moment, so counts may grow by a few, but not by one for
    # each epoch.
    eventually(lambda: (kept() - before < 5).all())


@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_leaves_nothing_on_the_workers(client, how):
    def producers(dask_worker):
        return set(dask_worker.plugins["daskdist-service"].tasks.producers)

    list(Dataset.range(3).serve(client))
    before = client.run(producers)
    iterator = iter(Dataset.counter().serve(client))
    next(iterator)
    assert client.run(producers) != before
    if how == "close":
        iterator.close()
    del iterator
    eventually(lambda: client.run(producers) == before)


# --- slow functions, and those that hang ---


def _sleeps(x):
    time.sleep(0.25)
    return x


def _generated():
    yield from map(_sleeps, range(24))


@pytest.mark.parametrize(
    ("dataset", "mode", "options"),
    [
        (lambda: Dataset.range(24).map(_sleeps).batch(12), "parallel_epochs", {}),
        (lambda: Dataset.range(24).map(_sleeps).batch(12), "distributed_epoch", {}),
        (lambda: Dataset.range(24).map(_sleeps).shuffle(24).batch(12), "distributed_epoch", {}),
        (
            lambda: Dataset.from_generator(_generated, output_signature=daskdist.TensorSpec((), "int64")).batch(12),
            "parallel_epochs",
            {},
        ),
        (lambda: Dataset.range(12).map(_sleeps).batch(12).repeat(), "parallel_epochs", {"consumer_index": 0}),
    ],
    ids=["copies", "leases", "tasks of all workers", "generator", "rounds"],
)
def test_slow_batches_may_take_longer_than_a_call(client, dataset, mode, options):
    if options:
        options |= {"num_consumers": 1, "job_name": uuid.uuid4().hex}
    # Each batch takes 3 s or more, and each call of the function 0.25 s. Workers have the default setting. On a busy
    # machine, a sign of progress from a worker may take more than a second.
    with dask.config.set({"daskdist.timeouts.data": 2}):
        batches = list(itertools.islice(dataset().serve(client, mode, **options), 2))
    assert list(map(len, batches)) == [12, 12]


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
@pytest.mark.parametrize("size", [1, 10])
def test_a_function_that_hangs_in_the_service_is_ended_and_named(client, mode, size):
    here = os.getpid()

    def hangs(x):
        # Not here, where it is called to find out the spec of its results.
        if x == 30 and os.getpid() != here:
            time.sleep(60)
        return x

    began_at = time.monotonic()
    with (
        dask.config.set({"daskdist.timeouts.data": 2}),
        pytest.raises(errors.WaitTimeoutError, match=r"waited \d+ s for map: .*hangs .*daskdist\.timeouts\.data"),
    ):
        list(Dataset.range(100).map(hangs).batch(size).serve(client, mode))
    assert time.monotonic() - began_at < 30
