"""``daskdist bench``: measure how fast files are read on this machine, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass

import click

from daskdist.cli.reports import dataset_of, of_files, short_errors, write
from daskdist.core.dataset_base import node_of, primitive_of
from daskdist.core.structure import Structure
from daskdist.dataset import Dataset
from daskdist.display.plan import size, table
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.stream.local_iterator import iterate, rows_of


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
def bench_files(
    files: tuple[str, ...], format_name: str | None, as_json: bool, batch_size: int, shuffle: int, seconds: float
) -> None:
    """Measure the rows per second when FILES are read, read and batched, and read, shuffled and batched.

    Each stage begins at the first file. From the second stage on, files may be in the system's file cache.
    """
    with short_errors():
        dataset = dataset_of(files, format_name)
        # Read the indexes of the files before the measurement.
        dataset.cardinality()
        stages = {
            "read": dataset,
            "read, batch": dataset.batch(batch_size),
            "read, shuffle, batch": dataset.shuffle(shuffle, seed=0).batch(batch_size),
        }
        speeds = [_measure(stage, staged, seconds, is_batched="batch" in stage) for stage, staged in stages.items()]
    report = {
        "stages": [asdict(speed) | {"rows_per_s": speed.rows / speed.seconds} for speed in speeds],
        "batch_size": batch_size,
        "shuffle": shuffle,
    }
    write(report, _text(speeds), as_json=as_json)


def _measure(stage: str, dataset: Dataset, most_s: float, *, is_batched: bool) -> StageSpeed:
    num_rows = num_bytes = 0
    is_all = True
    begun_at = time.perf_counter()
    parts = _batches(dataset) if is_batched else _blocks(dataset)
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
        for batch in elements:
            leaves, _ = Structure.of(batch)
            yield len(leaves[0]) if leaves else 0, sum(leaf.nbytes for leaf in leaves)
    finally:
        elements.close()


def _text(speeds: Sequence[StageSpeed]) -> str:
    rows: list[tuple[str, ...]] = [("stage", "rows/s", "bytes/s", "rows", "seconds")]
    for speed in speeds:
        rate, bytes_rate = speed.rows / speed.seconds, speed.num_bytes / speed.seconds
        part = f"{speed.rows:,}" if speed.is_all else f"the first {speed.rows:,}"
        rows.append((speed.stage, f"{rate:,.0f}", size(bytes_rate), part, f"{speed.seconds:.2f}"))
    return table(rows)
