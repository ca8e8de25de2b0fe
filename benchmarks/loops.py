"""What a batch costs in a loop on the replicas: sums of 128x16 float32 numbers, embedded and on two processes.

    python benchmarks/loops.py [--only NAME ...] [--size small] [--json] [--check]

Held against each other are the loop of one replica in this process, which has it for itself, and of the two on two
workers the one that takes longest. Two replicas in this process, which share one interpreter, are told of beside that.
By the clock, two processes need two cores of their own; the time that the thread of the loop has of a processor does
not depend on that.
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
from measure import Figure, arguments, measured, report

import daskdist


@dataclass(frozen=True)
class Size:
    """How much.

    Parameters
    ----------
    num_rows
        In memory, of 64 bytes; repeated without end.
    num_steps
        Of the loop.
    repeats
        How often each loop is timed.
    """

    num_rows: int = 2**16
    num_steps: int = 5_000
    repeats: int = 7


SIZES: Final = {"full": Size(), "small": Size(2**10, 200, 1)}

# Of each replica.
_BATCH_ROWS: Final = 128


def loop(batches: Iterator[Any], num_steps: int) -> tuple[float, float, float]:
    """The loop, and the seconds it takes from its second batch on: by the clock, and of a processor."""
    total = float(next(batches).sum())
    start, start_of_thread = time.perf_counter(), time.thread_time()
    for _, x in zip(range(num_steps), batches, strict=False):
        total += x.sum()
    return total, time.perf_counter() - start, time.thread_time() - start_of_thread


def distributed(strategy: Any, size: Size) -> Any:
    """Batches without end, from memory."""
    rows = np.random.default_rng(0).random((size.num_rows, 16), np.float32)
    batch_rows = _BATCH_ROWS * strategy.num_replicas_in_sync
    return strategy.distribute_dataset(daskdist.Dataset.from_tensor_slices(rows).repeat().batch(batch_rows))


def seconds(strategy: Any, dataset: Any, num_steps: int) -> tuple[float, float]:
    """What the replica takes that takes longest, by the clock and of a processor."""
    _, by_clock, of_processor = strategy.run(loop, args=(dataset, num_steps))
    clock, processor = (max(map(float, strategy.local_results(each))) for each in (by_clock, of_processor))
    return clock, processor


def num_transitions(dask_scheduler: Any) -> int:
    """Changes of state of any task so far."""
    return int(dask_scheduler.transition_counter)


def loops(size: Size) -> Iterator[Figure]:
    """One replica in this process, two in it, and two on two worker processes of one thread."""
    here, pair = daskdist.MirroredStrategy(["CPU:0"]), daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as there,
    ):
        datasets = {strategy: distributed(strategy, size) for strategy in (here, pair, there)}
        for strategy, dataset in datasets.items():
            seconds(strategy, dataset, size.num_steps)
        found: dict[Any, list[tuple[float, float]]] = {strategy: [] for strategy in datasets}
        for _ in range(size.repeats):
            for strategy, dataset in datasets.items():
                found[strategy].append(seconds(strategy, dataset, size.num_steps))
        counts = []
        for num_steps in (size.num_steps // 100, size.num_steps):
            before = client.run_on_scheduler(num_transitions)
            seconds(there, datasets[there], num_steps)
            counts.append(client.run_on_scheduler(num_transitions) - before)
    for which, what, target in ((0, "by the clock", 0.8), (1, "of a processor", None)):
        embedded, of_pair, cluster = (
            size.num_steps / median(each[which] for each in found[one]) for one in (here, pair, there)
        )
        yield Figure(f"embedded: batches of one replica, {what}", embedded, "batches/s")
        yield Figure(f"embedded: batches of each of two, {what}", of_pair, "batches/s", embedded, "one", on="ratio")
        name = f"cluster: batches of a replica, {what}"
        yield Figure(name, cluster, "batches/s", embedded, "embedded", target, on="ratio")
    yield Figure(
        f"cluster: transitions for {size.num_steps:_} batches",
        counts[1],
        "transitions",
        counts[0],
        f"for {size.num_steps // 100}",
        1.2,
        on="ratio",
        bound="most",
    )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"loops": loops}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
