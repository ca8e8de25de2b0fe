"""What it takes that replicas do something together: all_reduce in a process and between two.

    python benchmarks/collectives.py [--only NAME ...] [--size small] [--json] [--check]

The floor of a large one is a transfer of as much from one worker to the other by Dask itself, in the same run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import dask
import numpy as np
from distributed import Client, LocalCluster
from distributed.worker import get_data_from_worker
from measure import Figure, arguments, measured, report

import daskdist


@dataclass(frozen=True)
class Size:
    """How much.

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
    """The median of the seconds that a call takes."""
    context = daskdist.get_replica_context()
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        context.all_reduce("SUM", value)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def many_large(num_bytes: int, num_calls: int) -> float:
    """As `many`, of arrays that are made there."""
    return many(np.ones(num_bytes // 4, np.float32), num_calls)


def embedded(size: Size) -> Iterator[Figure]:
    """Two replicas in this process."""
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    seconds = max(strategy.local_results(strategy.run(many, args=(np.float32(1), size.num_scalars))))
    yield Figure("embedded: a number", seconds * 1e6, "us", target=100, bound="most")


def transfers(client: Client, size: Size) -> float:
    """The median of the seconds that Dask takes to bring an array from one worker to another."""
    first, second = client.scheduler_info()["workers"]
    kept = client.submit(np.ones, size.large_bytes // 4, np.float32, workers=[second])
    kept.result()

    async def bring(key: str, worker: str, num: int, dask_worker: Any) -> float:
        seconds = []
        for _ in range(num):
            start = time.perf_counter()
            await get_data_from_worker(rpc=dask_worker.rpc, keys=[key], worker=worker, who=dask_worker.address)
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    (seconds,) = client.run(bring, kept.key, second, size.num_large, workers=[first]).values()
    return float(seconds)


def cluster(size: Size) -> Iterator[Figure]:
    """A replica on each of two worker processes."""
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
        floor = transfers(client, size)
        seconds = longest(many_large, size.large_bytes, size.num_large)
        megabytes = size.large_bytes / 1e6
        yield Figure(
            f"cluster: {megabytes:.0f} MB",
            megabytes / seconds,
            "MB/s",
            megabytes / floor,
            "of a transfer by Dask",
            0.5,
            on="ratio",
        )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"embedded": embedded, "cluster": cluster}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
