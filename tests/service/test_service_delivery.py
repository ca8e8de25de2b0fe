"""Delivery by workers of the data service: the consumer, the amount, and the bytes of each message."""

import asyncio
import os
import queue
from types import SimpleNamespace

import cloudpickle
import dask
import numpy as np
import pytest
from distributed import Client
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol import to_serialize
from distributed.protocol.compression import compressions

from daskdist import Dataset, errors
from daskdist.data.experimental.service import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer
from daskdist.service.address import ServiceAddress
from daskdist.service.compression import compress, readable
from daskdist.service.consumer.read_ahead_limit import LEAST_AHEAD, LEAST_ON_THE_WAY, ReadAheadLimit
from daskdist.service.consumer.reading import Arrived, Reading
from daskdist.service.consumer.worker_connection import WorkerConnection
from daskdist.service.dispatcher.commands import IterationDraws, JobOptions, TaskSpec
from daskdist.service.sharding_policy import ShardingPolicy
from daskdist.service.worker.coordinated_reads import CoordinatedReads
from daskdist.service.worker.cross_trainer_cache import SharedCache
from daskdist.service.worker.delivery import Consumer, Forget, Send
from daskdist.service.worker.first_come import FirstCome
from daskdist.service.worker.pickled_dataset import PickledDataset
from daskdist.service.worker.producer import Producer
from daskdist.service.worker.producers import Producers
from daskdist.service.worker.task_messages import Ask, End, JoinTask, Passed, SentRows
from daskdist.service.worker.worker_plugin import ServiceOnWorker
from daskdist.testing import same_multiset

PART_BYTES = 16_384 * 8


def test_a_pipeline_takes_as_many_ahead_as_its_program_uses_in_a_moment():
    now = 0.0
    limit = ReadAheadLimit(clock=lambda: now)

    def used(num_elements, seconds):
        nonlocal now
        limit.waits()
        limit.took(num_elements, wait=True)
        now += seconds
        limit.waits()
        return limit.allowed(wait=True)

    assert limit.allowed(wait=True) == LEAST_AHEAD
    # The program uses 100,000 elements a second, then 10,000, and then three.
    assert used(200, 0.002) == 400
    assert used(200, 0.02) == 100
    assert used(3, 1.0) == LEAST_AHEAD
    limit.took(1, wait=True)
    assert limit.allowed(wait=False) == LEAST_AHEAD
    limit.took(LEAST_AHEAD, wait=False)
    assert limit.allowed(wait=False) == 0
    now += 1.0
    limit.waits()
    assert limit.allowed(wait=False) == LEAST_AHEAD
    assert ReadAheadLimit(1).allowed(wait=True) == 1


def test_a_program_that_waits_for_each_element_asks_for_few():
    now = 0.0
    limit = ReadAheadLimit(clock=lambda: now)
    asked = []
    for _ in range(12):
        limit.waits()
        asked.append(limit.on_the_way)
        # The element comes after some time, and is used at once.
        now += 0.05
        limit.took(1, wait=True)
        now += 2e-5
    assert set(asked) == {LEAST_ON_THE_WAY}
    for _ in range(12):
        limit.waits()
        now += 0.001
        limit.took(limit.on_the_way, wait=True)
    assert limit.on_the_way > 1000 * LEAST_ON_THE_WAY


def test_a_fast_program_far_from_its_workers_asks_for_more():
    now = 0.0
    limit = ReadAheadLimit(clock=lambda: now)
    for _ in range(12):
        limit.waits()
        now += 0.25
        limit.took(limit.on_the_way, wait=True)
        now += limit.on_the_way * 1e-5
    assert limit.on_the_way > 1000 * LEAST_ON_THE_WAY


@pytest.mark.parametrize("is_limit", [False, True])
def test_tasks_that_deliver_nothing_do_not_keep_others_from_being_asked_but_for_a_limit_of_the_user(is_limit):
    sent = []
    reading = Reading(
        {"name": "one", "window_bytes": 1000},
        Arrived(),
        lambda worker, about, over: sent.append((worker, about.message)),
        lambda number: None,
        8,
        in_turn=False,
        is_limit=is_limit,
    )
    stuck = tuple((f"stuck/{number}", 0, "slow") for number in range(9))
    reading.tasks(stuck, 1)
    reading.tasks((*stuck, ("task/0", 0, "fast")), 2)
    asked = [message.num_elements for worker, message in sent if worker == "fast" and isinstance(message, Ask)]
    assert asked == ([] if is_limit else [1])


def test_elements_of_a_lost_consumer_go_to_one_that_was_told_the_end_and_asks_for_none():
    task = FirstCome()
    for name in ("reads", "is lost"):
        task.joined(Consumer(name, 0, 1000))
    task.asked("is lost", (), 4)
    assert task.produced(0, 4, 32) == [Send("is lost", 0, 4)]
    assert task.finished() == [End("reads")]
    actions = task.lost("is lost")
    assert [action for action in actions if isinstance(action, Send)] == [Send("reads", 0, 4)]
    assert End("reads") in task.asked("reads", [(0, 4)], 0)


def test_messages_arrive_though_the_answer_to_the_first_connection_of_a_worker_is_lost():
    received, reached = [], []

    async def exchange():
        worker = ServiceOnWorker()
        worker._links = {}
        worker.tasks = SimpleNamespace(message=lambda consumer, message: reached.append(message))
        is_lost = [True]

        async def handler(comm):
            request = await comm.read()
            del request["op"], request["reply"]
            if is_lost.pop(0) if is_lost else False:
                # As if the connection breaks while the worker answers.
                await worker._serve(Broken(comm), **request)
            else:
                await worker._serve(comm, **request)

        async with listen("tcp://127.0.0.1:0", handler) as listener:
            address = ServiceAddress(listener.contact_address)
            connection = WorkerConnection(
                listener.contact_address, "one", address, None, lambda _, message: received.append(message), print
            )
            # Some messages have come from a process that had the address before.
            connection._other_end, connection._link.state.num_arrived = "before", 7
            connection.append("joins")
            while not reached:
                await asyncio.sleep(0.01)
            for number in range(10):
                worker._send("one", number)
            while len(received) < 10:
                await asyncio.sleep(0.01)
            connection.task.cancel()

    asyncio.run(asyncio.wait_for(exchange(), 20))
    assert (reached, received) == (["joins"], [*range(10)])


class Broken:
    """A connection over which nothing can be written."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    async def write(self, *args, **options):
        raise CommClosedError("broken")


@pytest.mark.parametrize("make", [FirstCome, lambda: CoordinatedReads(2)])
def test_nothing_is_produced_once_all_consumers_have_left(make):
    task = make()
    # The task produces for the first consumer before it joins.
    assert task.is_wanted
    for index, name in enumerate(["one", "other"]):
        task.joined(Consumer(name, 4, 1000, index=index))
    task.lost("one")
    assert task.is_wanted
    task.lost("other")
    assert not task.is_wanted
    task.joined(Consumer("another", 4, 1000, index=1))
    assert task.is_wanted


def test_consumers_of_an_earlier_attempt_are_produced_for_until_they_are_lost():
    task = FirstCome(expected=["one", "other"])
    task.lost("one")
    assert task.is_wanted
    task.lost("other")
    assert not task.is_wanted


def test_a_trainer_that_is_slower_than_the_window_passes_over_what_has_gone():
    window = SharedCache(100)
    window.joined(Consumer("fast", 4, 1000, trainer="a"))
    window.joined(Consumer("slow", 4, 1000, trainer="b"))
    assert window.produced(0, 4, 40) == [Send("fast", 0, 4), Send("slow", 0, 4)]
    assert not window.is_wanted
    assert window.asked("fast", [(0, 4)], 4) == []
    assert window.is_wanted
    for first in (4, 8, 12):
        actions = window.produced(first, first + 4, 40)
        assert actions[0] == Send("fast", first, first + 4)
        # The window advances by whole parts.
        assert actions[1:] == ([Forget(first - 8, first - 4)] if first > 4 else [])
        window.asked("fast", [(first, first + 4)], 4)
    assert window.asked("slow", [(0, 4)], 4) == [Passed("slow", 4), Send("slow", 8, 12)]


def test_elements_of_a_lost_consumer_go_to_another_of_the_same_trainer():
    window = SharedCache(100)
    window.joined(Consumer("one", 2, 1000, trainer="a"))
    window.joined(Consumer("two", 2, 1000, trainer="a"))
    assert window.produced(0, 4, 40) == [Send("one", 0, 2), Send("two", 2, 4)]
    window.asked("two", [(2, 4)], 2)
    assert window.lost("one") == [Send("two", 0, 2)]


def test_a_returning_consumer_of_rounds_gets_the_elements_it_lacks():
    rounds = CoordinatedReads(2)
    rounds.joined(Consumer("one", 8, 1000, index=0))
    assert [action.first for action in rounds.produced(0, 8, 80)] == [0, 2, 4, 6]
    rounds.lost("one")
    again = Consumer("one", 8, 1000, index=0)
    again.held.add(4, 5)
    assert rounds.joined(again, [(0, 1)]) == [Forget(0, 1), Send("one", 2, 3), Send("one", 6, 7)]
    with pytest.raises(errors.ArgumentError, match="taken by the consumer one"):
        rounds.joined(Consumer("other", 8, 1000, index=0))


class Loop:
    """The event loop of a worker, of which a test makes the calls."""

    def __init__(self, dataset, **options):
        self.calls = queue.Queue()
        self.sent = []
        spec = TaskSpec("job/0/0", 0, "dataset", IterationDraws(), JobOptions(ShardingPolicy.OFF, **options), 0, 1)
        self.producer = Producer(
            spec,
            PickledDataset(cloudpickle.dumps(dataset._node)),
            lambda: None,
            lambda *call: self.calls.put(call),
            lambda name, message: self.sent.append(message),
            lambda *event: None,
        )

    def run(self, num_calls, consumer):
        """Make calls for a consumer that acknowledges all it is sent at once; return the most bytes kept and sent."""
        most_kept = most_sent = 0
        for _ in range(num_calls):
            function, *args = self.calls.get(timeout=30)
            function(*args)
            while self.sent:
                rows = [about.message for about in self.sent if isinstance(about.message, SentRows)]
                most_kept = max(most_kept, self.producer.kept_bytes)
                most_sent = max(most_sent, sum(part.nbytes for _, part in rows))
                self.sent.clear()
                for first, part in rows:
                    self.producer.message(consumer, Ask([(first, first + len(part))], 0))
        return most_kept, most_sent


@pytest.mark.parametrize("cache_bytes", [None, 8 * PART_BYTES])
def test_bytes_are_bounded_also_where_the_dataset_is_much_larger(cache_bytes):
    dataset = Dataset.range(2**20).map(lambda x: x + 1)
    buffer_bytes = 4 * PART_BYTES
    sizes = {"service.buffer-bytes": buffer_bytes, "split-bytes": PART_BYTES, "bundle-bytes": PART_BYTES}
    with dask.config.set({f"daskdist.{name}": size for name, size in sizes.items()}):
        read_through(Loop(dataset, cache_bytes=cache_bytes), buffer_bytes, cache_bytes)


def read_through(loop, buffer_bytes, cache_bytes):
    loop.producer.message(
        "one", JoinTask({"name": "one", "num_asked": 2**62, "window_bytes": PART_BYTES, "trainer": "a"}, [], [])
    )
    loop.producer.start()
    num_bytes = 8 * 2**20
    assert num_bytes > 5 * (buffer_bytes + (cache_bytes or 0))
    most_kept, most_sent, num_produced = 0, 0, 0
    while num_produced < 2**20:
        kept, sent = loop.run(1, "one")
        most_kept, most_sent = max(most_kept, kept), max(most_sent, sent)
        num_produced = loop.producer.num_produced
    # The limit is checked after a part was added, so it may be exceeded by a part.
    assert most_kept <= buffer_bytes + (cache_bytes or 0) + 2 * PART_BYTES
    assert most_sent <= 2 * PART_BYTES
    if cache_bytes is not None:
        # Elements in the cache do not stop the production of further ones.
        assert most_kept > cache_bytes // 2
    loop.producer.stop()


async def exchanged(host, names):
    """Send zeros to a listener; return what a reader asks for by default, and the bytes that went over the wire."""
    arrived = asyncio.get_running_loop().create_future()

    async def take(comm):
        arrived.set_result(await comm.read())
        await comm.close()

    listener = await listen(f"tcp://{host}", take)
    comm = await connect(listener.contact_address)
    try:
        automatic = readable("AUTO", comm)
        compress(comm, names)
        num_bytes = await comm.write({"x": to_serialize(memoryview(bytes(10**6)))})
        assert bytes((await arrived)["x"]) == bytes(10**6)
    finally:
        await comm.close()
        listener.stop()
    return automatic, num_bytes


def test_elements_are_compressed_on_their_way_to_another_host():
    # 127.0.0.2 counts as another host.
    installed = tuple(name for name in ("lz4", "zstd", "snappy") if name in compressions)
    assert asyncio.run(exchanged("127.0.0.1", ()))[0] == ()
    automatic, plain_bytes = asyncio.run(exchanged("127.0.0.2", ()))
    assert automatic == installed
    assert plain_bytes > 10**6
    for name in (*installed, "zlib"):
        _, num_bytes = asyncio.run(exchanged("127.0.0.2", ("not installed", name)))
        assert num_bytes < 10**5


def test_compression_that_is_not_installed_is_refused(client):
    missing = [name for name in ("lz4", "zstd", "snappy") if name not in compressions]
    if not missing:
        pytest.skip("all are installed")
    with pytest.raises(errors.MissingPackageError, match="pip install"):
        list(Dataset.range(3).serve(client, compression=missing[0]))


def test_a_dataset_is_unpickled_once_for_the_leases_that_a_worker_has():
    given = []

    def make(spec, dataset):
        given.append(dataset)
        return Producer(spec, dataset, lambda: None, lambda *args: None, lambda *args: None, lambda *args: None)

    producers = Producers(make)
    pickled = cloudpickle.dumps(Dataset.range(3)._node)
    for number in range(3):
        options = JobOptions(ShardingPolicy.DYNAMIC)
        spec = TaskSpec(f"job/0/{number}", 0, "dataset", IterationDraws(), options, number, 3, (number, 4))
        producers.start(spec, None if number else pickled)
    node = given[0].node()
    assert all(value.node() is node for value in given)
    for number in range(3):
        assert given[0].node() is node
        producers.stop(f"job/0/{number}")
    # After all leases have ended, the dataset is not kept.
    assert given[0].node() is not node


# --- on a cluster ---


def compressions_in_use(dask_worker):
    """Return how the connections of consumers to a worker are compressed."""
    links = dask_worker.plugins["daskdist-service"]._links.values()
    return [link.batches.comm.handshake_options["compression"] for _, link in links]


@pytest.mark.cluster
@pytest.mark.parametrize(("host", "compression"), [("127.0.0.2", "AUTO"), ("127.0.0.2", None), ("127.0.0.1", "AUTO")])
def test_served_elements_are_compressed_from_another_host(host, compression):
    # A worker with another address than the consumer counts as being on another host.
    installed = [name for name in ("lz4", "zstd", "snappy") if name in compressions]
    dispatcher = DispatchServer(DispatcherConfig(host="127.0.0.1"))
    worker = WorkerServer(WorkerConfig(dispatcher.address, worker_address=host))
    try:
        with Client(dispatcher.address, set_as_default=False) as client:
            dataset = Dataset.range(64).map(lambda x: np.full(2**14, x))
            iterator = iter(dataset.serve(client, compression=compression, max_outstanding_requests=8))
            actual = [next(iterator)]
            (in_use,) = client.run(compressions_in_use).values()
            is_compressed = compression == "AUTO" and host != "127.0.0.1"
            assert in_use == [installed[0] if is_compressed and installed else None]
            same_multiset([*actual, *iterator], list(dataset))
    finally:
        worker.stop()
        dispatcher.stop()


def abort_connections(dask_worker):
    for _, link in dask_worker.plugins["daskdist-service"]._links.values():
        # It may be between two connections.
        if link.batches is not None:
            link.batches.comm.abort()


@pytest.mark.cluster
def test_cut_connections_lose_and_double_nothing(client):
    iterators = [iter(Dataset.range(3000).serve(client, job_name=f"cut {os.getpid()}")) for _ in range(2)]
    numbers = [int(next(iterator)) for iterator in iterators]
    for _ in range(3):
        client.run(abort_connections)
        numbers += [int(next(iterator)) for iterator in iterators for _ in range(100)]
    for iterator in iterators:
        numbers += map(int, iterator)
    assert sorted(numbers) == list(range(3000))


@pytest.mark.cluster
@pytest.mark.parametrize("on_loss", ["drop", "redeliver"])
def test_unused_elements_of_a_closed_consumer_are_not_dropped(client, on_loss):
    name = f"closed {on_loss} {os.getpid()}"
    options = {"job_name": name, "on_consumer_loss": on_loss}
    iterator = iter(Dataset.range(4000).batch(10).serve(client, **options))
    numbers = [next(iterator) for _ in range(3)]
    other = iter(Dataset.range(4000).batch(10).serve(client, **options))
    numbers.append(next(other))
    iterator.close()
    numbers = np.concatenate([*numbers, *other])
    assert len(set(numbers.tolist())) == len(numbers)
    # Only the few batches that the closed consumer's pipeline had taken ahead are missing.
    assert 4000 - len(numbers) <= 10 * 2 * LEAST_AHEAD


@pytest.mark.cluster
def test_an_iterator_is_not_for_a_forked_process(client):
    iterator = iter(Dataset.range(1000).serve(client))
    next(iterator)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            list(iterator)
        except errors.ClusterError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        assert b"that this one was forked from" in report.read()
    os.waitpid(child, 0)
    assert len(list(iterator)) == 999


@pytest.mark.cluster
def test_rounds_of_bucketed_sequences_have_one_length(client):
    def sequences():
        lengths = Dataset.counter().map(lambda x: np.ones(1 + x % 8, np.int32))
        batches = lengths.bucket_by_sequence_length(len, [4, 8], [4, 4, 4])
        # Two batches of one bucket follow each other, one for each consumer.
        return batches.group_by_window(lambda batch: batch.shape[1] // 4, lambda key, window: window, 2).repeat()

    name = f"rounds {os.getpid()}"
    consumers = [
        iter(sequences().serve(client, "parallel_epochs", name, consumer_index=index, num_consumers=2))
        for index in range(2)
    ]
    lengths = [[batch.shape[1] for batch in (next(one), next(other))] for one, other in [consumers] * 20]
    assert len({one for one, _ in lengths}) > 1
    for one, other in lengths:
        assert (one < 4) == (other < 4)
