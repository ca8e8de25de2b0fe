"""A check that memory stays constant: an endless dataset at full speed for minutes, in this process and on two workers.

    python benchmarks/soak.py [--minutes 5] [--only NAME ...] [--size small] [--json] [--check]

The resident memory of each worker and of the driver, which also runs the scheduler, is recorded all the time. The
memory at the end is compared with that half-way. ``passes`` makes many passes over a small dataset instead.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

import dask
import numpy as np
import psutil
from dask.utils import key_split
from distributed import Client, LocalCluster
from measure import MIB, Figure, arguments, measured, report

import daskdist


@dataclass(frozen=True)
class Size:
    """The durations.

    Parameters
    ----------
    seconds
        The duration of each run.
    most_steps
        The largest number of steps.
    num_rows
        The rows of the dataset, of 256 bytes each; repeated endlessly. With few rows, thousands of passes are read
        ahead.
    num_passes
        The number of passes over a small dataset.
    """

    seconds: float = 300
    most_steps: int = 1_000_000
    num_rows: int = 200_000
    num_passes: int = 200


SIZES: Final = {"full": Size(), "small": Size(0.5, num_passes=4)}

_BATCH_ROWS: Final = 256
# A call of `run` gets several steps, so that feeding is the limit.
_STEPS_A_RUN: Final = 32
# The number of times at which memory is recorded, and of those that are printed.
_NUM_SAMPLES: Final = 100
_NUM_PRINTED: Final = 5
# Dask's logs of its own work grow up to a limit: make it small, so that they reach it soon.
_SHORT_LOGS: Final = {
    "distributed.admin.low-level-log-length": 100,
    "distributed.worker.profile.enabled": False,
}


def fill_cache() -> None:
    """Fill Dask's cache of the names of the last 100,000 tasks, which would otherwise grow for the whole soak."""
    for number in range(key_split.cache_info().maxsize):
        key_split(f"{uuid.uuid4().hex}-{number}")


@dataclass
class Record:
    """The resident memory of processes over time.

    Parameters
    ----------
    pids
        name -> process.
    """

    pids: dict[str, int]
    num_steps: int = 0
    rows: list[tuple[float, int, list[int]]] = field(default_factory=list)

    @contextmanager
    def taken(self, every_s: float) -> Iterator[None]:
        """Record inside a ``with`` block."""
        processes = [psutil.Process(pid) for pid in self.pids.values()]
        done, start = threading.Event(), time.perf_counter()

        def record() -> None:
            while not done.wait(every_s):
                sizes = [process.memory_info().rss for process in processes]
                self.rows.append((time.perf_counter() - start, self.num_steps, sizes))

        thread = threading.Thread(target=record, name="soak")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def growth(self, place: int) -> float:
        """Return the relative growth of a process from half-way to the end."""
        sizes = [row[2][place] for row in self.rows]
        tenth = max(len(sizes) // 10, 1)
        half = len(sizes) // 2
        return median(sizes[-tenth:]) / median(sizes[half : half + tenth]) - 1

    def figures(self, where: str, **at_the_end: int) -> Iterator[Figure]:
        """Return the results."""
        seconds, num_steps, _ = self.rows[-1]
        yield Figure(f"{where}: steps", num_steps / seconds, "steps/s", note=f"{num_steps:_} steps in {seconds:.0f} s")
        printed = self.rows[:: max(len(self.rows) // _NUM_PRINTED, 1)][:_NUM_PRINTED] + self.rows[-1:]
        for place, name in enumerate(self.pids):
            over_time = ", ".join(f"{sizes[place] / MIB:.0f} at {at:.0f} s" for at, _, sizes in printed)
            yield Figure(
                f"{where}: growth of the {name} in the second half",
                100 * self.growth(place),
                "%",
                target=5,
                bound="most",
                note=f"MiB: {over_time}",
            )
        for what, number in at_the_end.items():
            yield Figure(f"{where}: {what.replace('_', ' ')} at the end", number, "", target=2_000, bound="most")


def endless(size: Size) -> daskdist.Dataset:
    """Return endless shuffled batches of 64 KiB, which are made where they are used."""
    rows = daskdist.Dataset.range(size.num_rows).shuffle(10_000, seed=0).repeat()

    def wide(y: Any) -> dict[str, Any]:
        return {"x": y[:, None] + np.arange(31.0), "y": y}

    return rows.batch(_BATCH_ROWS).map(wide)


def soak(strategy: Any, dataset: daskdist.Dataset, size: Size, record: Record) -> None:
    """Iterate at full speed, with a call of `run` and a sum over replicas now and then."""
    end = time.perf_counter() + size.seconds
    steps: list[Any] = []
    total: Any = 0
    with record.taken(size.seconds / _NUM_SAMPLES):
        for step in strategy.distribute_dataset(dataset):
            record.num_steps += 1
            steps.append(step)
            if len(steps) == _STEPS_A_RUN:
                total = total + strategy.reduce("SUM", strategy.run(count_rows, args=(steps,)), axis=None)
                steps = []
                if time.perf_counter() > end or record.num_steps >= size.most_steps:
                    break
    expected = record.num_steps * _BATCH_ROWS
    if int(total) != expected:
        raise RuntimeError(f"{int(total)} rows came in {record.num_steps} steps, not {expected}")


def count_rows(steps: list[Any]) -> int:
    """Count the rows, as the whole step."""
    return sum(len(step["y"]) for step in steps)


def embedded(size: Size) -> Iterator[Figure]:
    """Measure two replicas in this process."""
    record = Record({"driver": os.getpid()})
    soak(daskdist.MirroredStrategy(["CPU:0", "CPU:1"]), endless(size), size, record)
    yield from record.figures("embedded")


def cluster(size: Size) -> Iterator[Figure]:
    """Provide a strategy with a replica on each of two worker processes; the scheduler is in the driver's process."""
    with (
        dask.config.set(_SHORT_LOGS),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        client.wait_for_workers(2)
        fill_cache()
        client.run(fill_cache)
        pids = {f"worker {number}": pid for number, pid in enumerate(client.run(os.getpid).values())}
        record = Record({"driver": os.getpid(), **pids})
        soak(strategy, endless(size), size, record)
        gc.collect()
        num_tasks, num_futures = len(local.scheduler.tasks), len(client.futures)
    yield from record.figures("cluster", tasks_of_the_scheduler=num_tasks, futures_of_the_client=num_futures)


def passes(size: Size) -> Iterator[Figure]:
    """Measure many passes over a small dataset by two workers; the scheduler is in the driver's process."""
    with (
        dask.config.set(_SHORT_LOGS),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        fill_cache()
        client.run(fill_cache)
        pids = {f"worker {number}": pid for number, pid in enumerate(client.run(os.getpid).values())}
        processes = {name: psutil.Process(pid) for name, pid in {"driver": os.getpid(), **pids}.items()}
        rows = daskdist.Dataset.range(2_000).map(np.square).shuffle(200, seed=0).batch(50)
        steps = strategy.distribute_dataset(rows)
        sizes: list[list[float]] = []
        for _ in range(size.num_passes):
            for step in steps:
                float(strategy.reduce("SUM", strategy.run(np.sum, args=(step,)), axis=None))
            gc.collect()
            sizes.append([process.memory_info().rss / MIB for process in processes.values()])
    half = sizes[len(sizes) // 2 :]
    for name, own in zip(processes, zip(*half, strict=True), strict=True):
        slope = float(np.polyfit(range(len(own)), own, 1)[0])
        note = f"MiB: {own[0]:.1f} half-way, {own[-1]:.1f} at the end of {size.num_passes} passes"
        yield Figure(
            f"passes: growth of the {name} in the second half", slope, "MiB/pass", target=0.01, bound="most", note=note
        )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    "embedded": embedded,
    "cluster": cluster,
    "passes": passes,
}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, BENCHMARKS, SIZES)
    parser.add_argument("--minutes", type=float, help="of each run; 5 if not given, seconds where --size is small")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    if options.minutes is not None:
        size = replace(size, seconds=60 * options.minutes)
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
