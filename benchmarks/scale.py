"""The cost of a large cluster for the driver: planning, tasks and time per step, without making the calls.

    python benchmarks/scale.py [--only NAME ...] [--size small] [--json] [--check]

A stub replaces the cluster: it counts calls and the bytes that they would send, and returns reports without reading
anything. One figure is of a real cluster of two processes.
"""

from __future__ import annotations

import collections
import gc
import os
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
from distributed import Client, LocalCluster
from measure import MIB, Figure, Memory, TaskCounter, arguments, measured, report

import daskdist
from daskdist.config import in_bytes
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.execute.caller import Report
from daskdist.execute.callers.choose import NeverRun
from daskdist.ops.read_files import ReadFiles
from daskdist.strategy.backend import CallRepetition, PresentWorkers, Recovery
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.strategy import Strategy


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    num_files, num_workers
        The data to plan for.
    few_files
        The number of files with which the first batch's graph is compared: enough for the first batch of each worker.
    workers
        The numbers of workers for timings of a step, in increasing order.
    num_steps
        The number of steps of each case.
    num_batches
        The number of batches for counting tasks.
    repeats
        The number of timings.
    """

    num_files: int = 1_000_000
    num_workers: int = 1_000
    few_files: int = 50_000
    workers: tuple[int, ...] = (10, 100, 1_000)
    num_steps: int = 256
    num_batches: int = 4_000
    repeats: int = 3


SIZES: Final = {
    "full": Size(),
    "small": Size(2_000, 20, 200, workers=(2, 10), num_steps=64, num_batches=800, repeats=1),
}

POLICIES: Final = ("FILE", "DATA")
_BATCH_BYTES: Final = 256 * 1024
_ROW_BYTES: Final = 256
_BATCH_ROWS: Final = _BATCH_BYTES // _ROW_BYTES


# --- the stub ---


class Counting(NeverRun):
    """A caller that makes no calls but counts them; its handles are numbers.

    Parameters
    ----------
    num_workers
        The number of workers of the simulated cluster, with the limits of `daskdist.execute.callers.submit.Submit`.
    weighs
        Whether functions and arguments of calls are pickled, to count the bytes that would be sent.
    """

    compacts = True
    divides = True
    reads_by_row = False
    home: Hashable | None = ("cluster", "counting")
    recovery = Recovery()
    repetition = CallRepetition()
    live_workers = PresentWorkers()

    def __init__(self, num_workers: int, *, weighs: bool = False) -> None:
        super().__init__()
        self.num_ahead = 4 * num_workers
        self.bundle_bytes = in_bytes("bundle-bytes")
        self.counts: collections.Counter[str] = collections.Counter()
        self.sent_bytes = 0
        self._weighs = weighs
        self._number = 0

    def call(self, function: Callable[..., Any], handles: Sequence[Any], *args: Any, name: str, **_: Any) -> int:
        return self._noted(name, function, handles, args)

    def source(self, function: Callable[..., Any], *args: Any, name: str, **_: Any) -> int:
        return self._noted(name, function, args)

    def _noted(self, name: str, *sent: Any) -> int:
        self._number += 1
        self.counts[name] += 1
        if self._weighs:
            self.sent_bytes += len(pickle.dumps(sent))
        return self._number

    def is_done(self, handle: int) -> bool:
        return True

    def raise_unobserved(self) -> None:
        """Raise nothing: no call is made."""

    def note_iterator(self, iterator: Any) -> None:
        """Do nothing: nobody asks for figures."""

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Do nothing: no call is under way."""

    def report(self, handle: int, *, wait: bool) -> Report:
        self.counts["report"] += 1
        return Report(SPLIT_ROWS, SPLIT_ROWS * _ROW_BYTES)


class StubStrategy(Strategy):
    """A strategy with replicas on workers that do not exist."""

    def __init__(self, num_workers: int, *, weighs: bool = False) -> None:
        self.counting = Counting(num_workers, weighs=weighs)
        replicas = tuple([Replica(f"tcp://stub:{k}", "CPU:0") for k in range(num_workers)])
        super().__init__(ReplicaGroup("stub", replicas), self.counting, StubInput(self.counting))


class StubInput(InputBackend):
    """Datasets that are read by the stub."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def reader(self, dataset: daskdist.Dataset) -> Counting:
        return self.counting


SPLIT_ROWS: Final = 16 * MIB // _ROW_BYTES
LONE: Final = Structure.of(0)[1]


@dataclass(frozen=True)
class StubFormat:
    """A format of files that do not exist: each is a split of 16 MiB, with rows of zeros."""

    name: str = field(default="stub", init=False)
    is_splittable = False
    suffixes = (".stub",)

    def guess(self, path: str, head: bytes) -> bool:
        return path.endswith(self.suffixes)

    def spec(self, path: str) -> ElementSpec:
        return ElementSpec(LONE, (TensorSpec((_ROW_BYTES // 8,), np.dtype(np.int64)),))

    def list_splits(self, path: str, file: int, first: Any) -> Sequence[Split]:
        return [Split(path, None, SPLIT_ROWS, SPLIT_ROWS * _ROW_BYTES, file, path)]

    def read(self, split: Split) -> Block:
        return Block(LONE, [np.zeros((SPLIT_ROWS, _ROW_BYTES // 8), np.int64)], split.label)


def files(number: int) -> tuple[str, ...]:
    """Return the paths of a number of files, of common lengths."""
    return tuple([f"/data/a-dataset/day=2024-01-01/part-{number:07d}.stub" for number in range(number)])


def dataset_of(paths: tuple[str, ...], policy: str, batch_rows: int) -> daskdist.Dataset:
    options = daskdist.Options()
    options.auto_shard_policy = policy
    return daskdist.Dataset(ReadFiles(paths, StubFormat())).batch(batch_rows).with_options(options)


# --- measurements ---


def planning(size: Size) -> Iterator[Figure]:
    """Measure planning, from the paths of many files to the first step of many workers."""
    paths = files(size.num_files)
    what = f"{size.num_files:_} files over {size.num_workers:_} workers"
    for policy in POLICIES:
        seconds = []
        memory = Memory([os.getpid()])
        with memory.sampled():
            for _ in range(size.repeats):
                gc.collect()
                start = time.perf_counter()
                strategy = StubStrategy(size.num_workers)
                dataset = dataset_of(paths, policy, size.num_workers * _BATCH_ROWS)
                iterator = iter(strategy.distribute_dataset(dataset))
                next(iterator)
                seconds.append(time.perf_counter() - start)
                del iterator, dataset, strategy
        yield Figure(f"{policy}: plan {what}, to the first step", median(seconds), "s", target=5, bound="most")
        yield Figure(f"{policy}: memory of it", memory.above_idle_bytes / 1e9, "GB", target=1, bound="most")


def first_graph(size: Size) -> Iterator[Figure]:
    """The calls before the first step, with few files and with many."""
    for policy in POLICIES:
        found = {}
        for num_files in (size.few_files, size.num_files):
            strategy = StubStrategy(size.num_workers, weighs=True)
            dataset = dataset_of(files(num_files), policy, size.num_workers * _BATCH_ROWS)
            next(iter(strategy.distribute_dataset(dataset)))
            found[num_files] = strategy.counting.counts.total(), strategy.counting.sent_bytes
        what = f"{policy}: {{}} for the first step, {size.num_files:_} files"
        peer_name = f"{size.few_files:_} files"
        for place, (unit, about) in enumerate((("calls", "calls"), ("bytes", "bytes sent"))):
            ours, peer = found[size.num_files][place], found[size.few_files][place]
            yield Figure(what.format(about), ours, unit, peer, peer_name, target=1.01, on="ratio", bound="most")


def stepping(size: Size) -> Iterator[Figure]:
    """Measure the driver's time for a step of 256 KiB a replica, over a whole pass from the paths to the end."""
    for policy in POLICIES:
        for num_workers in size.workers:
            paths = files(size.num_steps * num_workers * _BATCH_ROWS // SPLIT_ROWS)
            seconds, num_steps = [], 0
            for _ in range(size.repeats):
                gc.collect()
                start = time.process_time()
                strategy = StubStrategy(num_workers)
                dataset = dataset_of(paths, policy, num_workers * _BATCH_ROWS)
                num_steps = sum(1 for _ in strategy.distribute_dataset(dataset))
                seconds.append(time.process_time() - start)
            yield Figure(
                f"{policy}, {num_workers:_} workers: the driver's time a step and worker",
                median(seconds) / num_steps / num_workers * 1e6,
                "µs",
                target=50,
                bound="most",
                note=f"{num_steps} steps",
            )


def tasks(size: Size) -> Iterator[Figure]:
    """Count the calls that feed a thousand batches of 256 KiB, for each worker."""
    for policy in POLICIES:
        for num_workers in (2, 10):
            strategy = StubStrategy(num_workers)
            paths = files(-(-size.num_batches * _BATCH_ROWS // SPLIT_ROWS))
            iterator = iter(strategy.distribute_dataset(dataset_of(paths, policy, _BATCH_ROWS)))
            num_steps = sum(1 for _ in iterator)
            yield _task_figure(f"{policy}, {num_workers} workers", strategy.counting.counts, num_steps, num_workers)


def cluster(size: Size) -> Iterator[Figure]:
    """Count the same calls on a real cluster of two processes."""
    for policy in POLICIES:
        yield _on_cluster(size, policy)


def _on_cluster(size: Size, policy: str) -> Figure:
    counter = TaskCounter()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        client.wait_for_workers(2)
        local.scheduler.add_plugin(counter)
        paths = files(-(-size.num_batches * _BATCH_ROWS // SPLIT_ROWS))
        num_steps = 0
        for step in strategy.distribute_dataset(dataset_of(paths, policy, _BATCH_ROWS)):
            num_steps += 1
            if num_steps % 64 == 0:
                step.values[0].result()
    return _task_figure(f"{policy}, 2 workers, a real cluster", counter.counts, num_steps, 2)


def _task_figure(where: str, counts: collections.Counter[str], num_steps: int, num_workers: int) -> Figure:
    counts = collections.Counter({kind: number for kind, number in counts.items() if kind != "pick"})
    return Figure(
        f"{where}: tasks for 1,000 batches, a worker",
        counts.total() * 1_000 / num_steps / num_workers,
        "tasks",
        target=125,
        bound="most",
        note=f"{num_steps} batches; " + ", ".join(f"{kind} {number}" for kind, number in counts.most_common()),
    )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    "planning": planning,
    "first-graph": first_graph,
    "stepping": stepping,
    "tasks": tasks,
    "cluster": cluster,
}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
