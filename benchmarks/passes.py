"""Passes over arrays of the program's memory, drawn on a cluster of two worker processes.

    python benchmarks/passes.py [--only NAME ...] [--size small] [--json] [--check]

A small array is read in many passes, one iteration after the other or by `repeat`, and a large one in one pass. Batches
are references; the time ends when all of them have been built on the workers. The floor is one Dask task for each
worker and pass, with the array on both workers already.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median
from typing import Any, Final

import dask
import numpy as np
from distributed import Client, LocalCluster, wait
from measure import Figure, arguments, interleaved, measured, report

import daskdist
from daskdist import Dataset


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    small_rows, large_rows
        Rows of 16 float32.
    num_passes
        Over the small ones.
    repeats
        The number of timings of each case.
    """

    small_rows: int = 12_800
    large_rows: int = 1_024_000
    num_passes: int = 60
    repeats: int = 5


SIZES: Final = {"full": Size(), "small": Size(1_280, 12_800, 3, 1)}

_BATCH_ROWS: Final = 128
_TARGET: Final = 4_000


def draw(client: Client, steps: Iterable[Any], num_batches: int) -> None:
    """Take batches, and wait until all of them are built."""
    found = list(islice(steps, num_batches))
    if len(found) != num_batches:
        raise RuntimeError(f"{len(found)} batches were drawn of {num_batches}")
    client.sync(_wait_for_all, client)


async def _wait_for_all(client: Client) -> None:
    # If a key is released meanwhile, its state ends; a new future for it would wait for ever.
    await asyncio.gather(*(state.wait() for state in list(client.futures.values())))


def by_hand(client: Client, workers: list[str], placed: Any, num_rows: int, num_passes: int, is_shuffled: bool) -> None:
    """Make the same batches by one task for each worker and pass."""
    found = []
    for number in range(num_passes):
        order = np.random.default_rng(number).permutation(num_rows).astype(np.int32) if is_shuffled else None
        for place, worker in enumerate(workers):
            own = None if order is None else order[_own_rows(num_rows, place, len(workers))]
            found.append(client.submit(cut, placed, own, place, len(workers), workers=[worker], pure=False))
    wait(found)


def _own_rows(num_rows: int, place: int, num_workers: int) -> Any:
    # A worker has a part of the rows of each batch.
    return np.arange(num_rows).reshape(-1, num_workers, _BATCH_ROWS // num_workers)[:, place].reshape(-1)


def cut(rows: Any, order: Any, place: int, num_workers: int) -> list[Any]:
    """Return a worker's parts of all batches."""
    own = rows[_own_rows(len(rows), place, num_workers) if order is None else order]
    return np.split(own, len(own) // (_BATCH_ROWS // num_workers))


def figures(size: Size, num_rows: int, num_passes: int, ways: dict[str, Callable[[Any], Any]]) -> Iterator[Figure]:
    """Measure each way to draw from an array, plain and shuffled."""
    rows = np.random.default_rng(0).random((num_rows, 16), np.float32)
    num_batches = num_passes * num_rows // _BATCH_ROWS
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        placed = client.scatter(rows, broadcast=True)
        calls: dict[str, Callable[[], None]] = {
            f"floor{shuffled}": lambda is_shuffled=bool(shuffled): by_hand(  # type: ignore[misc]
                client, list(strategy.workers), placed, num_rows, num_passes, is_shuffled
            )
            for shuffled in ("", ", shuffled")
        }
        for name, dataset in ways.items():
            distributed = strategy.distribute_dataset(dataset(Dataset.from_tensor_slices(rows)))
            calls[name] = lambda distributed=distributed: draw(  # type: ignore[misc]
                client, chain.from_iterable(iter(distributed) for _ in range(num_passes)), num_batches
            )
        for call in calls.values():
            call()
        seconds = interleaved(calls, size.repeats)
    rates = {name: num_batches / median(each) for name, each in seconds.items()}
    for name in ways:
        floor = rates["floor, shuffled" if "shuffle" in name else "floor"]
        yield Figure(f"{num_rows:_} rows, {name}", rates[name], "batches/s", floor, "of Dask by hand", _TARGET)


def small(size: Size) -> Iterator[Figure]:
    """Measure many passes over a small array."""
    ways: dict[str, Callable[[Any], Any]] = {
        "batch, iterated": lambda ds: ds.batch(_BATCH_ROWS),
        "shuffle, batch, iterated": lambda ds: ds.shuffle(size.small_rows).batch(_BATCH_ROWS),
        "repeat, batch": lambda ds: ds.repeat().batch(_BATCH_ROWS),
        "batch, repeat": lambda ds: ds.batch(_BATCH_ROWS).repeat(),
        "shuffle, repeat, batch": lambda ds: ds.shuffle(size.small_rows).repeat().batch(_BATCH_ROWS),
    }
    yield from figures(size, size.small_rows, size.num_passes, ways)


def large(size: Size) -> Iterator[Figure]:
    """Measure one pass over a large array, in which it is sent to the workers."""
    ways: dict[str, Callable[[Any], Any]] = {
        "batch": lambda ds: ds.batch(_BATCH_ROWS),
        "shuffle, batch": lambda ds: ds.shuffle(size.large_rows // 10).batch(_BATCH_ROWS),
    }
    yield from figures(size, size.large_rows, 1, ways)


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"small": small, "large": large}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
