"""The time of collectives: all_reduce within a process and between two.

    python benchmarks/collectives.py [--only NAME ...] [--size small] [--json] [--check]

The floor for a large array is Dask's transfer of as many bytes in the same run: from each of the two workers to the
other at the same time, as an all_reduce sends them, and from one to the other. If both processes share two processors
with both ends of the connection, the first takes twice as long as the second. The floor for a number in one process is
two threads that wait for each other and do nothing else.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import dask
import numpy as np
from distributed import Client, LocalCluster, wait
from distributed.worker import get_data_from_worker
from measure import Figure, arguments, measured, report

import daskdist


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    num_scalars
        Calls with a number.
    num_large
        Calls with an array.
    large_bytes
        Its size.
    """

    num_scalars: int = 1_000
    num_large: int = 7
    large_bytes: int = 64_000_000


SIZES: Final = {"full": Size(), "small": Size(20, 2, 1_000_000)}


def many(value: Any, num_calls: int) -> float:
    """Return the median seconds of a call."""
    context = daskdist.get_replica_context()
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        context.all_reduce("SUM", value)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def many_large(num_bytes: int, num_calls: int) -> float:
    """Run `many` with arrays that are created on the replicas."""
    return many(np.ones(num_bytes // 4, np.float32), num_calls)


def meetings(num_calls: int) -> float:
    """Return the median seconds that two threads take to meet: the first waits until the second releases it."""
    lock, waiting, seconds = threading.Lock(), dict[int, Any](), list[float]()

    def meet() -> None:
        for turn in range(num_calls):
            start = time.perf_counter()
            with lock:
                gate = waiting.pop(turn, None)
                if gate is None:
                    own = waiting[turn] = threading.Lock()
                    own.acquire()
            if gate is None:
                own.acquire()
            else:
                gate.release()
            seconds.append(time.perf_counter() - start)

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return median(seconds)


def embedded(size: Size) -> Iterator[Figure]:
    """Measure two replicas in this process."""
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    floor, found = [], []
    for _ in range(5):
        floor.append(meetings(size.num_scalars) * 1e6)
        replicas = strategy.run(many, args=(np.float32(1), size.num_scalars))
        found.append(max(strategy.local_results(replicas)) * 1e6)
    yield Figure("embedded: a number", median(found), "us", median(floor), "two threads", target=100, bound="most")


def transfers(client: Client, size: Size) -> tuple[float, float]:
    """Return the median seconds of Dask's transfers: between two workers in both directions, and in one."""
    first, second = client.scheduler_info()["workers"]
    kept = [
        client.submit(np.ones, size.large_bytes // 4, np.float32, workers=[worker], pure=False)
        for worker in (first, second)
    ]
    wait(kept)
    there = {first: (kept[1].key, second), second: (kept[0].key, first)}

    async def bring(num: int, dask_worker: Any) -> list[float]:
        key, worker = there[dask_worker.address]
        seconds = []
        for _ in range(num):
            start = time.perf_counter()
            await get_data_from_worker(rpc=dask_worker.rpc, keys=[key], worker=worker, who=dask_worker.address)
            seconds.append(time.perf_counter() - start)
        return seconds

    at_once = client.run(bring, size.num_large).values()
    (one,) = client.run(bring, size.num_large, workers=[first]).values()
    return median(map(max, zip(*at_once, strict=True))), median(one)


def cluster(size: Size) -> Iterator[Figure]:
    """Provide a strategy with a replica on each of two worker processes."""
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):

        def longest(fn: Callable[..., Any], *args: Any) -> float:
            return float(max(strategy.local_results(strategy.run(fn, args=args))))

        longest(many, 1.0, 10)
        yield Figure("cluster: a number", longest(many, 1.0, size.num_scalars) * 1e3, "ms", target=5, bound="most")
        megabytes = size.large_bytes / 1e6
        both_ways, one_way = transfers(client, size)
        speed = megabytes / longest(many_large, size.large_bytes, size.num_large)
        what = f"cluster: {megabytes:.0f} MB"
        yield Figure(what, speed, "MB/s", megabytes / both_ways, "Dask, both ways", 0.5, on="ratio")
        yield Figure(what, speed, "MB/s", megabytes / one_way, "Dask, one way")


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"embedded": embedded, "cluster": cluster}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
