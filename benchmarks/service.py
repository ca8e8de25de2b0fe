"""The data service: elements a second that consumers get from two worker processes, and the cost.

    python benchmarks/service.py [--only NAME ...] [--size small] [--json] [--check] [--peer tf --python PATH]

The floor is a bare comm of Dask: the same two worker processes send arrays to this one, as fast as it receives them.
With ``--peer``, other figures are measured: the same pipelines in the tf.data service, in another environment, in turns
with ours, with two workers, one and two consumers, and a worker that is killed in the middle.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from statistics import median
from typing import Any, Final

import dask
import numpy as np
import psutil
from distributed import Client, LocalCluster
from distributed.comm import Comm, connect, listen
from distributed.protocol import to_serialize
from measure import MIB, Figure, arguments, interleaved, measured, report
from peers import SERVICES, Peer
from peers.serving import COSTLY_PRODUCTS, COSTLY_SIZE, SERVICE_BATCH, ServiceSize

import daskdist

# The number of arrays in a message of the floor, about as many as the service sends together.
_BATCHES_A_MESSAGE: Final = 16


@dataclass(frozen=True)
class Size:
    """Sizes of the benchmarks.

    Parameters
    ----------
    pipelines
        The elements of each pipeline.
    peer
        The amounts for the peer, which yields a thousand small rows per second.
    num_epochs
        Epochs over which memory is watched.
    repeats
        The number of timings of each case.
    """

    pipelines: ServiceSize
    peer: ServiceSize
    num_epochs: int = 200
    repeats: int = 3


SIZES: Final = {
    "full": Size(ServiceSize(4_000, 400_000, 2_000), ServiceSize(2_000, 4_000, 2_000)),
    "small": Size(ServiceSize(40, 20_000, 20), ServiceSize(40, 100, 20), 4, 1),
}


_MANY: Final = np.arange(SERVICE_BATCH, dtype=np.float32)
_FEW: Final = np.arange(16, dtype=np.float32)


def many_floats(x: Any) -> Any:
    """Return 256 KiB, of which a number is the first."""
    return _MANY + np.float32(x)


def few_floats(x: Any) -> Any:
    """Return 16 numbers, of which one is the first."""
    return _FEW + np.float32(x)


def expensive(x: Any) -> Any:
    """Return a number after products of matrices that take some milliseconds."""
    matrix = np.full((COSTLY_SIZE, COSTLY_SIZE), 1 / COSTLY_SIZE, np.float32)
    for _ in range(COSTLY_PRODUCTS):
        matrix = matrix @ matrix
    return x + np.int64(matrix[0, 0] * 0.5)


def batches(size: ServiceSize) -> daskdist.Dataset:
    """Return a pipeline of arrays of 256 KiB."""
    return daskdist.Dataset.range(size.num_batches).map(many_floats)


def rows(size: ServiceSize) -> daskdist.Dataset:
    """Return a pipeline of small rows."""
    return daskdist.Dataset.range(size.num_rows).map(few_floats)


def costly(size: ServiceSize) -> daskdist.Dataset:
    """Return a pipeline of numbers that take some milliseconds each."""
    return daskdist.Dataset.range(size.num_costly).map(expensive)


PIPELINES: Final = {"batches": batches, "rows": rows, "costly": costly}


def served(name: str, size: ServiceSize, service: Any, job_name: str | None = None) -> daskdist.Dataset:
    """Return a pipeline as consumers read it: each element once; small rows in batches."""
    dataset = PIPELINES[name](size).serve(service, "distributed_epoch", job_name)
    return dataset.batch(1024) if name == "rows" else dataset


_open: Final = ExitStack()


@cache
def two_workers() -> Client:
    """Return a client of two worker processes, the same for all; the scheduler is in this process."""
    _open.enter_context(dask.config.set({"distributed.worker.profile.enabled": False}))
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0")
    return _open.enter_context(Client(_open.enter_context(cluster)))


@cache
def two_consumers() -> ProcessPoolExecutor:
    """Return processes that have imported what consumers need."""
    pool = _open.enter_context(ProcessPoolExecutor(2, multiprocessing.get_context("spawn")))
    small, address = ServiceSize(64, 64, 64), two_workers().scheduler.address
    jobs = [pool.submit(consume, "batches", small, address, uuid.uuid4().hex) for _ in range(4)]
    for job in jobs:
        job.result()
    return pool


def read(dataset: daskdist.Dataset) -> int:
    """Read all elements; return their bytes."""
    return sum(element.nbytes for element in dataset)


# --- the floor ---


async def push(address: str, num_messages: int, message: Any) -> None:
    """Send a message repeatedly, and wait until all copies have arrived."""
    comm = await connect(address)
    for _ in range(num_messages):
        await comm.write({"f": [to_serialize(array) for array in message]})
        await comm.stream.write(b"")
    await comm.read()
    await comm.close()


def push_from_worker(address: str, num_messages: int) -> None:
    """Send messages of the floor, in a task."""
    message = [np.zeros(SERVICE_BATCH, np.float32) for _ in range(_BATCHES_A_MESSAGE)]
    asyncio.run(push(address, num_messages, message))


class Receiver:
    """A receiver of messages over plain comms, in its own event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = client.loop.asyncio_loop
        self._num_messages = 0
        self._listener = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> Any:
        return await listen("tcp://127.0.0.1", self._take)

    async def _take(self, comm: Comm) -> None:
        for _ in range(self._num_messages):
            await comm.read()
        await comm.write("all")
        await comm.close()

    def pull(self, num_batches: int) -> None:
        """Let each of the two workers send half of a number of arrays."""
        client = self._client
        self._num_messages = max(num_batches // _BATCHES_A_MESSAGE // 2, 1)
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        address = self._listener.contact_address
        futures = [
            client.submit(push_from_worker, address, self._num_messages, workers=[each], pure=False) for each in workers
        ]
        client.gather(futures)


# --- one consumer ---


def batches_of_256_kib(size: Size) -> Iterator[Figure]:
    """Measure one consumer, compared with the floor."""
    num_batches = size.pipelines.num_batches
    client = two_workers()
    receiver = Receiver(client)
    dataset = served("batches", size.pipelines, client)
    mib = read(dataset) / MIB
    if mib != num_batches * SERVICE_BATCH * 4 / MIB:
        raise RuntimeError(f"{num_batches} elements came as {mib} MiB, and the floor sends 256 KiB each")
    receiver.pull(_BATCHES_A_MESSAGE)
    seconds = interleaved({"ours": lambda: read(dataset), "floor": lambda: receiver.pull(num_batches)}, size.repeats)
    ours, floor = (mib / min(seconds[name]) for name in ("ours", "floor"))
    yield Figure("256 KiB batches, one consumer", ours, "MiB/s", floor, "a bare comm", 0.6, on="ratio")


def small_rows(size: Size) -> Iterator[Figure]:
    """Measure one consumer, compared with the same pipeline in this process."""
    client = two_workers()
    num_rows = size.pipelines.num_rows
    dataset = served("rows", size.pipelines, client)
    here = rows(size.pipelines).batch(1024)
    read(dataset)
    seconds = interleaved({"ours": lambda: read(dataset), "floor": lambda: read(here)}, size.repeats)
    ours, floor = (num_rows / min(seconds[name]) / 1e6 for name in ("ours", "floor"))
    yield Figure("16 floats a row, one consumer", ours, "M rows/s", floor, "embedded")


def first_elements(size: Size) -> Iterator[Figure]:
    """Measure the seconds to the first element, of the first dataset of a new cluster, and of later ones."""
    client = two_workers()
    seconds = []
    for number in range(1 + size.repeats):
        dataset = daskdist.Dataset.range(1_000 + number).map(few_floats).serve(client)
        start = time.perf_counter()
        iterator = iter(dataset)
        next(iterator)
        seconds.append(time.perf_counter() - start)
        iterator.close()
    yield Figure("first element, on a cluster without the service", seconds[0], "s", target=1, bound="most")
    yield Figure("first element, later", median(seconds[1:]), "s", target=1, bound="most")


# --- several consumers ---


def consume(name: str, size: ServiceSize, service: str, job_name: str) -> list[int]:
    """Read the elements of a job in a separate process; return their numbers."""
    numbers: list[int] = []
    for element in served(name, size, service, job_name):
        numbers += element[:, 0].tolist() if name == "rows" else [np.ravel(element)[0]]
    return list(map(int, numbers))


def read_by(pool: ProcessPoolExecutor, num_consumers: int, name: str, size: Size, client: Client) -> Counter[int]:
    """Let consumers share a job; return how often each number came."""
    job, address = uuid.uuid4().hex, client.scheduler.address
    futures = [pool.submit(consume, name, size.pipelines, address, job) for _ in range(num_consumers)]
    return Counter(number for future in futures for number in future.result())


def one_and_two_consumers(size: Size) -> Iterator[Figure]:
    """Measure the CPU seconds of all processes if two consumers share a job, compared with one."""
    client, pool = two_workers(), two_consumers()
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    cpu: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(size.repeats):
        for num_consumers, seconds in cpu.items():
            before = cpu_seconds(processes)
            counts = read_by(pool, num_consumers, "batches", size, client)
            seconds.append(cpu_seconds(processes) - before)
            check_each_once(counts, size.pipelines.num_batches)
    ours, theirs = min(cpu[2]), min(cpu[1])
    yield Figure("CPU of two consumers of a job", ours, "s", theirs, "one", 1.15, on="ratio", bound="most")


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds that processes have used until now."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def check_each_once(counts: Counter[int], num_elements: int) -> None:
    """Refuse figures of a job that lost or doubled elements."""
    if counts != Counter(range(num_elements)):
        raise RuntimeError(f"of {num_elements} elements {len(counts)} came, {sum(counts.values())} times in all")


# --- faults ---


def killed_worker(size: Size) -> Iterator[Figure]:
    """Count the elements that are lost and doubled if a worker is killed in the middle."""
    lost, doubled, seconds = kill_ours(size)
    yield Figure("a worker killed: elements lost", lost, "elements", target=0, bound="most")
    yield Figure("a worker killed: elements doubled", doubled, "elements", target=0, bound="most")
    yield Figure("a worker killed: the whole job", seconds, "s")


def kill_ours(size: Size) -> tuple[int, int, float]:
    """Kill a worker after a quarter of the costly elements; return those lost, those doubled, and seconds."""
    client = two_workers()
    dataset = served("costly", size.pipelines, client)
    pids = list(client.run(os.getpid).values())
    numbers, start = [], time.perf_counter()
    for number in dataset:
        numbers.append(int(number))
        if len(numbers) == size.pipelines.num_costly // 4:
            os.kill(pids[0], signal.SIGKILL)
    return *lost_and_doubled(numbers, size.pipelines.num_costly), time.perf_counter() - start


def lost_and_doubled(numbers: Iterable[int], num_elements: int) -> tuple[int, int]:
    """Return how many elements did not come, and how many came again."""
    counts = Counter(numbers)
    return num_elements - len(counts), sum(counts.values()) - len(counts)


def epochs(size: Size) -> Iterator[Figure]:
    """Measure how the memory of workers, and of the scheduler's and consumer's process, grows over many epochs."""
    client = two_workers()
    processes = [psutil.Process(), *map(psutil.Process, client.run(os.getpid).values())]
    dataset = daskdist.Dataset.range(2_000).batch(20).serve(client, job_name=uuid.uuid4().hex)
    used: list[int] = []
    for _ in range(size.num_epochs):
        read(dataset)
        used.append(sum(process.memory_info().rss for process in processes))
    growth = 100 * (used[-1] / used[len(used) // 2] - 1)
    yield Figure(f"memory in the second half of {size.num_epochs} epochs: growth", growth, "%", target=5, bound="most")


# --- against tf.data service ---


def against(size: Size, names: Iterable[str], key: str, python: str) -> Iterator[Figure]:
    """Measure the same pipelines in both libraries, in turns."""
    with Peer(SERVICES[key], python, json.dumps(asdict(size.peer))) as peer:
        for name in names:
            yield from _PEER_CASES[name](size, peer)


def speed_against(name: str, target: float | None, size: Size, peer: Peer) -> Iterator[Figure]:
    """Measure one and two consumers."""
    num_ours, num_theirs = (getattr(each, f"num_{name}") for each in (size.pipelines, size.peer))
    unit, scale = ("M rows/s", 1e6) if name == "rows" else ("elements/s", 1)
    client, pool = two_workers(), two_consumers()
    read_by(pool, 1, name, size, client)
    for num_consumers in (1, 2):
        request = json.dumps({"pipeline": name, "num_consumers": num_consumers, "kill_after": None})
        seconds = interleaved(
            {
                "ours": lambda: read_by(pool, num_consumers, name, size, client),  # noqa: B023 - called at once
                "theirs": lambda: peer.ask(request),  # noqa: B023 - called at once
            },
            size.repeats,
        )
        ours, theirs = num_ours / min(seconds["ours"]) / scale, num_theirs / min(seconds["theirs"]) / scale
        what = f"{name}, {num_consumers} consumers"
        yield Figure(what, ours, unit, theirs, f"{peer.name} {peer.version}", target, on="ratio")


def kills_against(size: Size, peer: Peer) -> Iterator[Figure]:
    """Measure a job in which a worker is killed in the middle."""
    num_elements = size.pipelines.num_costly
    request = {"pipeline": "costly", "num_consumers": 1, "kill_after": num_elements // 4}
    answer = peer.ask(json.dumps(request))
    theirs = lost_and_doubled(answer["parts"][0]["numbers"], num_elements)
    for what, mine, other in zip(("lost", "doubled"), kill_ours(size), theirs, strict=False):
        yield Figure(f"a worker killed: elements {what}", mine, "elements", other, peer.name, target=0, bound="most")


_PEER_CASES: Final[dict[str, Callable[[Size, Peer], Iterator[Figure]]]] = {
    "batches": partial(speed_against, "batches", 2),
    "rows": partial(speed_against, "rows", 50),
    "costly": partial(speed_against, "costly", None),
    "killed": kills_against,
}

BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    # This needs a fresh cluster.
    "first": first_elements,
    "batches": batches_of_256_kib,
    "rows": small_rows,
    "consumers": one_and_two_consumers,
    "epochs": epochs,
    "killed": killed_worker,
}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, BENCHMARKS | _PEER_CASES, SIZES)
    parser.add_argument("--peer", choices=list(SERVICES), help="hold the pipelines against this service")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has it; this one by default")
    options = parser.parse_args(argv)
    size, names = SIZES[options.size], options.only or list(BENCHMARKS | _PEER_CASES)
    with _open:
        if options.peer:
            figures = list(against(size, [name for name in names if name in _PEER_CASES], options.peer, options.python))
        else:
            figures = measured(BENCHMARKS, [name for name in names if name in BENCHMARKS], size)
    return report(figures, size, options)


if __name__ == "__main__":
    sys.exit(main())
