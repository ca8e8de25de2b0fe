"""The time to train the demo's network on digits, by a loop on the replicas and by the demo's loop on the driver.

    python benchmarks/digits.py [--only NAME ...] [--size small] [--json] [--check]

Both loops read the same files, once a pass, and make the same 12 steps a pass, of 128 rows over two replicas. The loop
on the driver waits for each step, since the driver holds the weights.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import dask
from distributed import Client, LocalCluster
from measure import Figure, arguments, interleaved, measured, report

import daskdist
from daskdist.cli import digits


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    num_epochs
        Passes over the digits.
    repeats
        The number of timings of each loop.
    """

    num_epochs: int = 12
    repeats: int = 7


SIZES: Final = {"full": Size(), "small": Size(2, 1)}

_BATCH_ROWS: Final = 128
_SEED: Final = 0


def compared(name: str, strategy: Any, size: Size, target: float | None) -> Iterator[Figure]:
    """Measure the steps a second of both loops, and the difference between their losses at the end."""
    found: dict[str, list[digits.TrainingStep]] = {}

    def train(loop: str, batches: Any) -> None:
        found[loop], _ = digits.LOOPS[loop](strategy, batches, size.num_epochs, _SEED)

    with tempfile.TemporaryDirectory() as directory:
        paths = digits.write_files(digits.load()[0], Path(directory))
        # Each loop makes its own passes; the first timing is not counted.
        datasets = {
            loop: strategy.distribute_dataset(digits.read_batches(paths, _BATCH_ROWS, _SEED, "auto"))
            for loop in digits.LOOPS
        }
        for loop, batches in datasets.items():
            train(loop, batches)
        losses = {loop: digits.means_of_epochs(steps)[-1] for loop, steps in found.items()}
        calls = {loop: partial(train, loop, batches) for loop, batches in datasets.items()}
        seconds = interleaved(calls, size.repeats)
    rates = {loop: len(found[loop]) / median(each) for loop, each in seconds.items()}
    yield Figure(
        f"{name}: a loop on the replicas",
        rates["replicas"],
        "steps/s",
        rates["driver"],
        "on the driver",
        target,
        on="ratio",
    )
    yield Figure(
        f"{name}: difference of the final losses",
        abs(losses["replicas"] - losses["driver"]),
        "nats",
        target=1e-6,
        bound="most",
    )


def embedded(size: Size) -> Iterator[Figure]:
    """Two replicas in this process, where a step costs next to nothing on the driver too."""
    yield from compared("embedded", daskdist.MirroredStrategy(["CPU:0", "CPU:1"]), size, None)


def cluster(size: Size) -> Iterator[Figure]:
    """Provide a strategy with a replica on each of two worker processes."""
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        yield from compared("cluster", strategy, size, 5)


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"embedded": embedded, "cluster": cluster}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
