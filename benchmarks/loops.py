"""The cost of a batch in a loop on the replicas: sums of 128x16 float32 numbers, embedded and on two processes.

    python benchmarks/loops.py [--only NAME ...] [--size small] [--json] [--check]

The slower of two replicas on two workers is compared with embedded loops that run in those two processes at the same
time, without a cluster: in each process there are two replicas, one of which ends at once, so that the other one has
the process for itself. Both cases use the machine's memory and cores in the same way. Further lines show such a replica
alone on the machine, two replicas that run in one process, and a single replica, for which no batch is split. The CPU
time of a loop's thread does not depend on the number of processors, but on what else uses the same memory and core.
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
    """The amounts of work.

    Parameters
    ----------
    num_rows
        The rows in memory, of 64 bytes each; repeated endlessly.
    num_steps
        The number of steps of the loop.
    repeats
        The number of timings of each loop.
    """

    num_rows: int = 2**16
    num_steps: int = 5_000
    repeats: int = 7


SIZES: Final = {"full": Size(), "small": Size(2**10, 200, 1)}

# The rows per replica in a batch.
_BATCH_ROWS: Final = 128


def loop(batches: Iterator[Any], num_steps: int) -> tuple[float, float, float]:
    """Run the loop; return its result, and the wall and CPU seconds from the second batch on."""
    total = float(next(batches).sum())
    start, start_of_thread = time.perf_counter(), time.thread_time()
    for _, x in zip(range(num_steps), batches, strict=False):
        total += x.sum()
    return total, time.perf_counter() - start, time.thread_time() - start_of_thread


def distributed(strategy: Any, size: Size) -> Any:
    """Return endless batches from memory."""
    rows = np.random.default_rng(0).random((size.num_rows, 16), np.float32)
    batch_rows = _BATCH_ROWS * strategy.num_replicas_in_sync
    return strategy.distribute_dataset(daskdist.Dataset.from_tensor_slices(rows).repeat().batch(batch_rows))


def seconds(strategy: Any, dataset: Any, num_steps: Any) -> tuple[float, float]:
    """Return the wall and CPU time of the slowest replica."""
    _, by_clock, of_processor = strategy.run(loop, args=(dataset, num_steps))
    clock, processor = (max(map(float, strategy.local_results(each))) for each in (by_clock, of_processor))
    return clock, processor


def num_transitions(dask_scheduler: Any) -> int:
    """Return the number of state changes of tasks so far."""
    return int(dask_scheduler.transition_counter)


def embedded_there(size: Size) -> tuple[float, float]:
    """Measure a replica in this process while the other replica is idle."""
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    return seconds(strategy, distributed(strategy, size), daskdist.PerReplica([size.num_steps, 0]))


def loops(size: Size) -> Iterator[Figure]:
    """Measure two replicas in this process, two on worker processes of one thread, and a single one."""
    here, single = daskdist.MirroredStrategy(["CPU:0", "CPU:1"]), daskdist.MirroredStrategy(["CPU:0"])
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as there,
    ):
        datasets = {strategy: distributed(strategy, size) for strategy in (here, there, single)}

        def of(strategy: Any) -> Callable[[], tuple[float, float]]:
            return lambda: seconds(strategy, datasets[strategy], size.num_steps)

        def on_both() -> tuple[float, float]:
            workers = client.scheduler_info()["workers"]
            asked = [client.submit(embedded_there, size, workers=[each], pure=False) for each in workers]
            clock, processor = map(max, zip(*client.gather(asked), strict=True))
            return clock, processor

        timed = {
            "embedded in two processes": on_both,
            "embedded in one": lambda: embedded_there(size),
            "two at once in one process": of(here),
            "the only one": of(single),
            "cluster": of(there),
        }
        for each in timed.values():
            each()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
        for _ in range(size.repeats):
            for name, each in timed.items():
                found[name].append(each())
        counts = []
        for num_steps in (size.num_steps // 100, size.num_steps):
            before = client.run_on_scheduler(num_transitions)
            seconds(there, datasets[there], num_steps)
            counts.append(client.run_on_scheduler(num_transitions) - before)
    for which, what, target in ((0, "by the clock", 0.8), (1, "of a processor", None)):
        rates = {name: size.num_steps / median(each[which] for each in found[name]) for name in found}
        floor = rates.pop("embedded in two processes")
        yield Figure(f"embedded in two processes, {what}", floor, "batches/s")
        for name, rate in rates.items():
            bound = target if name == "cluster" else None
            yield Figure(f"{name}, {what}", rate, "batches/s", floor, "embedded", bound, "ratio")
    yield Figure(
        f"cluster: transitions for {size.num_steps:_} batches",
        counts[1],
        "transitions",
        target=20,
        bound="most",
        note=f"{counts[0]} for {size.num_steps // 100}",
    )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"loops": loops}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
