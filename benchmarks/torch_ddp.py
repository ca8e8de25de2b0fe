"""Training steps per second of DistributedDataParallel on gloo with two processes, fed by daskdist and by a DataLoader.

    python benchmarks/torch_ddp.py [--only NAME ...] [--size small] [--json] [--check]

Both train with `trained` on the same Parquet files of 16 float32 features and a label, with one thread of PyTorch in
each process. The whole second pass is timed, from a barrier to a barrier, and it reads no files: the peer has the table
in memory, a copy in each process, and daskdist keeps the rows of the first pass with ``cache``. Both use an order of
all rows, which is another one in each pass. In a further line, daskdist reads the files in the timed pass. The peer has
a ``Dataset`` of NumPy rows, which the default ``collate_fn`` joins faster than tensors, a ``DistributedSampler`` and a
``DataLoader``, without worker processes or with one, whichever is faster. Its fast path, ``__getitems__`` that returns
whole batches, is compared without a target. The speed of the model without any input, the upper limit, is shown too.

A batch has 4,096 rows for each process. With 1,024 rows, gloo's messages of a step take as long as the input of either
library, and the ratio is 2 to 5.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import dask
import numpy as np
import pyarrow.parquet as pq
from distributed import Client, LocalCluster
from measure import Figure, arguments, measured, report
from spine import write_rows

import daskdist

try:
    import torch
except ImportError as error:
    sys.exit(f"benchmarks/torch_ddp.py needs PyTorch: pip install 'daskdist[torch]' ({error})")

import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, DistributedSampler

_NAMES: Final = [f"f{number}" for number in range(16)]
_NUM_PROCESSES: Final = 2


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    num_files, file_rows, group_rows
        The data for the small model; a row is 68 bytes.
    large_file_rows
        The rows of each file for the large model, which has the same number of files.
    batch_rows
        The batch size of a process.
    buffer_size
        The buffer size if files are read in each pass.
    width
        The width of the two hidden layers of the large model.
    repeats
        The number of trainings of each case, in turn.
    """

    num_files: int = 8
    file_rows: int = 2**17
    group_rows: int = 2**14
    large_file_rows: int = 2**13
    batch_rows: int = 2**12
    buffer_size: int = 100_000
    width: int = 1024
    repeats: int = 3


SIZES: Final = {"full": Size(), "small": Size(2, 2**12, 2**10, 2**11, 2**8, 2**10, 32, 1)}


# --- training ---


def trained(batches_of: Callable[[int], Iterable[Any]], width: int) -> tuple[int, float]:
    """Train two passes in a process group; return the rows of this process in the second pass, and its seconds."""
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(16, 1)]
    if width:
        hidden = [torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
        layers = [*hidden, torch.nn.Linear(width, 1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_rows, start = 0, 0.0
    for number in range(2):
        torch.distributed.barrier()
        num_rows, start = 0, time.perf_counter()
        for x, y in batches_of(number):
            num_rows += len(x)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x)[:, 0], y).backward()
            optimizer.step()
        torch.distributed.barrier()
    return num_rows, time.perf_counter() - start


# --- fed by daskdist ---


def on_replica(steps: Any, width: int) -> tuple[int, float]:
    """Run `trained` with a replica's part of a distributed dataset."""
    with daskdist.torch_process_group():
        return trained(lambda _: map(daskdist.to_torch, steps), width)


def without_input(batch_rows: int, num_steps: int, width: int) -> tuple[int, float]:
    """Run `trained` with the same batch in each step."""
    batch = torch.rand(batch_rows, 16), torch.rand(batch_rows)
    with daskdist.torch_process_group():
        return trained(lambda _: itertools.repeat(batch, num_steps), width)


def in_memory(files: str, size: Size) -> daskdist.Dataset:
    """Return batches like those of a DistributedSampler: one order of all rows, which each process has in memory."""
    dataset = daskdist.read_parquet(files, columns=(_NAMES, "label")).cache().global_shuffle()
    # Set explicitly, to avoid a warning.
    dataset = dataset.with_options(daskdist.Options(auto_shard_policy="DATA"))
    return dataset.batch(_NUM_PROCESSES * size.batch_rows)


def read_again(files: str, size: Size) -> daskdist.Dataset:
    """Return batches for more rows than fit into memory: each process reads its own files in every pass."""
    dataset = daskdist.read_parquet(files, columns=(_NAMES, "label")).shuffle(size.buffer_size)
    return dataset.batch(_NUM_PROCESSES * size.batch_rows)


# --- fed by a DataLoader ---


class Rows(Dataset):
    """A table in memory that returns one row at a time."""

    def __init__(self, files: str) -> None:
        table = pq.read_table(str(Path(files).parent))
        self.x = np.ascontiguousarray(np.stack([table.column(name).to_numpy() for name in _NAMES]).T)
        self.y = table.column("label").to_numpy()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        return self.x[number], self.y[number]


class Batches(Rows):
    """A table in memory that returns whole batches."""

    def __getitems__(self, numbers: list[int]) -> Any:
        return torch.from_numpy(self.x[numbers]), torch.from_numpy(self.y[numbers])


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged, as the ``collate_fn`` of whole batches."""
    return batch


# name -> the dataset, and the number of its worker processes.
_LOADERS: Final = {"no workers": (Rows, 0), "one worker": (Rows, 1), "whole batches": (Batches, 0)}


def in_process(
    rank: int, folder: str, files: str, names: Iterable[str], batch_rows: int, width: int, answers: Any
) -> None:
    """Run a process of the peer."""
    # By default, Gloo listens on the address of the machine's name.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = Path(folder, "rendezvous").as_uri()
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=_NUM_PROCESSES)
    found = {}
    for name in names:
        kind, num_workers = _LOADERS[name]
        rows = kind(files)
        sampler = DistributedSampler(rows, shuffle=True)
        loader = DataLoader(
            rows,
            batch_rows,
            sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=as_it_is if kind is Batches else None,
        )
        found[name] = trained(partial(in_pass, loader, sampler), width)
        del loader
    if rank == 0:
        answers.put(found)
    # Models are in reference cycles; freeing one at the interpreter's exit, with its process group, would abort.
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_pass(loader: DataLoader, sampler: DistributedSampler, number: int) -> DataLoader:
    """Return the batches of a pass."""
    sampler.set_epoch(number)
    return loader


def by_loaders(files: str, names: Iterable[str], size: Size, width: int) -> dict[str, tuple[int, float]]:
    """Run `trained` in the first process of the peer, with one loader after the other."""
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        given = (folder, files, tuple(names), size.batch_rows, width, answers)
        torch.multiprocessing.spawn(in_process, given, _NUM_PROCESSES)
    return answers.get()


# --- measured ---


@contextmanager
def parquet_files(size: Size, file_rows: int) -> Iterator[str]:
    """Provide a pattern of files that exist until the block ends."""
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        for number in range(size.num_files):
            labels = np.random.default_rng(number).random(file_rows, np.float32)
            write_rows(str(Path(folder, f"{number}.parquet")), _NAMES, file_rows, size.group_rows, labels)
        yield str(Path(folder, "*.parquet"))


@contextmanager
def two_workers() -> Iterator[daskdist.Strategy]:
    """Provide a strategy of replicas in two processes."""
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(
            n_workers=_NUM_PROCESSES, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        yield strategy


def rates(calls: Iterable[Callable[[], dict[str, tuple[int, float]]]], num_rows: int, repeats: int) -> dict[str, float]:
    """Measure the rows per second of both processes together for each way of training, in turn."""
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, (found, each) in itertools.chain.from_iterable(call().items() for call in calls):
            if found * _NUM_PROCESSES != num_rows:
                raise RuntimeError(f"{name}: trained with {found} rows a process, not {num_rows // _NUM_PROCESSES}")
            seconds.setdefault(name, []).append(each)
    return {name: num_rows / median(each) for name, each in seconds.items()}


def run(name: str, strategy: daskdist.Strategy, fn: Callable[..., Any], *args: Any) -> dict[str, tuple[int, float]]:
    """Return a result of the first replica, by its name."""
    num_rows, seconds = (strategy.local_results(each)[0] for each in strategy.run(fn, args=args))
    return {name: (int(num_rows), float(seconds))}


def of_a_step(name: str, found: dict[str, float]) -> str:
    """Describe the share of the time that the model takes."""
    return f"{found[name] / found['without input']:.0%} of the time is the model's"


def small(size: Size) -> Iterator[Figure]:
    """Measure a linear model."""
    num_rows = size.num_files * size.file_rows
    with parquet_files(size, size.file_rows) as files, two_workers() as strategy:
        memory, again = (strategy.distribute_dataset(each(files, size)) for each in (in_memory, read_again))
        num_steps = num_rows // _NUM_PROCESSES // size.batch_rows
        found = rates(
            [
                partial(run, "without input", strategy, without_input, size.batch_rows, num_steps, 0),
                partial(run, "in memory", strategy, on_replica, memory, 0),
                partial(run, "read again", strategy, on_replica, again, 0),
                partial(by_loaders, files, _LOADERS, size, 0),
            ],
            num_rows,
            size.repeats,
        )
    peer = max(("no workers", "one worker"), key=lambda name: found[name])
    million = {name: each / 1e6 for name, each in found.items()}
    yield Figure("linear model: without any input", million["without input"], "M rows/s")
    yield Figure(
        "linear model: rows in memory",
        million["in memory"],
        "M rows/s",
        million[peer],
        f"DataLoader, {peer}",
        3,
        on="ratio",
        note=f"{of_a_step('in memory', found)}; with the DataLoader {of_a_step(peer, found)}",
    )
    yield Figure(
        f"linear model: files read again, shuffle({size.buffer_size:_})",
        million["read again"],
        "M rows/s",
        million[peer],
        "the same, in memory",
        3,
        on="ratio",
        note=of_a_step("read again", found),
    )
    yield Figure(
        "linear model: rows in memory",
        million["in memory"],
        "M rows/s",
        million["whole batches"],
        "DataLoader, __getitems__",
        note=f"with the DataLoader {of_a_step('whole batches', found)}",
    )


def large(size: Size) -> Iterator[Figure]:
    """Measure a model with two wide hidden layers, which take nearly all of the time."""
    num_rows = size.num_files * size.large_file_rows
    with parquet_files(size, size.large_file_rows) as files, two_workers() as strategy:
        memory = strategy.distribute_dataset(in_memory(files, size))
        num_steps = num_rows // _NUM_PROCESSES // size.batch_rows
        found = rates(
            [
                partial(run, "without input", strategy, without_input, size.batch_rows, num_steps, size.width),
                partial(run, "in memory", strategy, on_replica, memory, size.width),
                partial(by_loaders, files, ["no workers"], size, size.width),
            ],
            num_rows,
            size.repeats,
        )
    yield Figure(
        f"model {size.width:,} wide: rows in memory",
        found["in memory"] / 1e3,
        "k rows/s",
        found["no workers"] / 1e3,
        "DataLoader, no workers",
        # The target is equality; passes of the same kind differ by 5 %.
        0.95,
        on="ratio",
        note=f"{of_a_step('in memory', found)}; with the DataLoader {of_a_step('no workers', found)}",
    )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"small": small, "large": large}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
