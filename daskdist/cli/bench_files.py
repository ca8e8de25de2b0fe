"""``daskdist bench``: measure how fast files are read in this process or on a cluster, stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from daskdist.cli.reports import dataset_of, of_files, short_errors, strategy_on, write
from daskdist.config import in_bytes
from daskdist.core.cardinality import counted
from daskdist.core.dataset_base import node_of, primitive_of
from daskdist.core.structure import Structure
from daskdist.dataset import Dataset
from daskdist.display.plan import size, table
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.stream.local_iterator import iterate, rows_of
from daskdist.execute.stream.side_outputs import PortionSize, side_outputs_of
from daskdist.strategy.replica.contract import internals_of
from daskdist.strategy.strategy import Strategy
from daskdist.tables.describe import count_rows

# Steps that are sent before the sizes of the first of them are read.
_STEPS_AHEAD: Final = 64


@dataclass(frozen=True)
class StageSpeed:
    """The speed of a stage together with the earlier stages.

    Parameters
    ----------
    stage
        The name of the stage.
    rows, num_bytes
        The rows that were read, and the bytes of their arrays.
    seconds
        The duration.
    is_all
        Whether all rows were read.
    """

    stage: str
    rows: int
    num_bytes: int
    seconds: float
    is_all: bool


@click.command("bench", short_help="Measure how fast files are read, stage by stage.")
@of_files
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(1), default=1024, show_default=True, help="Rows in a batch."
)
@click.option(
    "--shuffle",
    metavar="N",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Rows in the shuffle buffer.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="The longest time to measure a stage.",
)
@click.option("--workers", metavar="N", type=click.IntRange(1), help="Measure on a cluster of N new worker processes.")
@click.option("--scheduler", metavar="ADDRESS", help="Measure on the cluster of this scheduler.")
def bench_files(
    files: tuple[str, ...],
    format_name: str | None,
    as_json: bool,
    batch_size: int,
    shuffle: int,
    seconds: float,
    workers: int | None,
    scheduler: str | None,
) -> None:
    """Measure the rows per second when FILES are read, read and batched, and read, shuffled and batched.

    Each stage begins at the first file. From the second stage on, files may be in the system's file cache. Without a
    cluster, this process reads; on a cluster, workers read, and replicas on them take the batches in steps.
    """
    if workers is not None and scheduler is not None:
        raise click.UsageError("give --workers for a new cluster, or --scheduler for one that runs, not both")
    is_here = workers is None and scheduler is None
    opened = contextlib.nullcontext() if is_here else strategy_on(scheduler, workers)
    with short_errors(), opened as strategy:
        dataset = dataset_of(files, format_name)
        # Read the indexes of the files before the measurement.
        dataset.cardinality()
        stages = {
            "read": dataset,
            "read, batch": dataset.batch(batch_size),
            "read, shuffle, batch": dataset.shuffle(shuffle, seed=0).batch(batch_size),
        }
        # This process and the workers import what they need.
        batches = stages["read, batch"]
        first = _batches(batches) if strategy is None else _steps(strategy, batches)
        next(first, None)
        first.close()
        speeds = []
        for stage, staged in stages.items():
            if strategy is None:
                parts = _batches(staged) if "batch" in stage else _blocks(staged)
            else:
                parts = _steps(strategy, staged) if "batch" in stage else _portions(strategy, staged)
            speeds.append(_measure(stage, parts, seconds))
        num_workers = None if strategy is None else len(strategy.workers)
    report = {
        "workers": num_workers,
        "stages": [asdict(speed) | {"rows_per_s": speed.rows / speed.seconds} for speed in speeds],
        "batch_size": batch_size,
        "shuffle": shuffle,
    }
    where = [] if num_workers is None else [f"on {counted(num_workers, 'worker')}"]
    write(report, "\n".join([*where, _text(speeds)]), as_json=as_json)


def _measure(stage: str, parts: Generator[tuple[int, int], None, None], most_s: float) -> StageSpeed:
    num_rows = num_bytes = 0
    is_all = True
    begun_at = time.perf_counter()
    try:
        for length, nbytes in parts:
            num_rows += length
            num_bytes += nbytes
            if time.perf_counter() - begun_at > most_s:
                is_all = False
                break
        seconds = time.perf_counter() - begun_at
    finally:
        parts.close()
    return StageSpeed(stage, num_rows, num_bytes, max(seconds, 1e-9), is_all)


def _blocks(dataset: Dataset) -> Generator[tuple[int, int], None, None]:
    for rows in rows_of(primitive_of(dataset), local_caller(node_of(dataset))):
        yield len(rows), rows.nbytes


def _batches(dataset: Dataset) -> Generator[tuple[int, int], None, None]:
    elements = iterate(local_caller(node_of(dataset)), primitive_of(dataset), 0)
    try:
        yield from map(size_of, elements)
    finally:
        elements.close()


def size_of(batch: Any) -> tuple[int, int]:
    """Return the rows and the bytes of a batch."""
    leaves, _ = Structure.of(batch)
    return len(leaves[0]) if leaves else 0, sum(leaf.nbytes for leaf in leaves)


def _portions(strategy: Strategy, dataset: Dataset) -> Generator[tuple[int, int], None, None]:
    portions = PortionSize(in_bytes("bundle-bytes"))
    caller = internals_of(strategy).input.reader(dataset)
    for part in side_outputs_of(primitive_of(dataset), count_rows, portions, caller, strategy.workers, name="bench"):
        yield part.num_elements, part.num_bytes


def _steps(strategy: Strategy, dataset: Dataset) -> Generator[tuple[int, int], None, None]:
    steps: deque[Any] = deque()
    iterator = iter(strategy.distribute_dataset(dataset))
    try:
        for batch in iterator:
            steps.append(strategy.run(size_of, args=(batch,)))
            if len(steps) > _STEPS_AHEAD:
                yield _size(strategy, steps.popleft())
        while steps:
            yield _size(strategy, steps.popleft())
    finally:
        iterator.close()


def _size(strategy: Strategy, step: Any) -> tuple[int, int]:
    rows, num_bytes = (sum(map(int, strategy.local_results(leaf))) for leaf in step)
    return rows, num_bytes


def _text(speeds: Sequence[StageSpeed]) -> str:
    rows: list[tuple[str, ...]] = [("stage", "rows/s", "bytes/s", "rows", "seconds")]
    for speed in speeds:
        rate, bytes_rate = speed.rows / speed.seconds, speed.num_bytes / speed.seconds
        part = f"{speed.rows:,}" if speed.is_all else f"the first {speed.rows:,}"
        rows.append((speed.stage, f"{rate:,.0f}", size(bytes_rate), part, f"{speed.seconds:.2f}"))
    return table(rows)
