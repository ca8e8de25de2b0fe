"""Parquet against pyarrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import daskdist

from . import Case

_GROUP = 62_500


def write(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0)
    columns = {f"f{k}": draws.standard_normal(num_rows, np.float32) for k in range(16)}
    columns["label"] = draws.integers(10, size=num_rows)
    pq.write_table(pa.table(columns), path, row_group_size=_GROUP)


def bare(path: Path) -> int:
    with pq.ParquetFile(path) as file:
        return sum(batch.num_rows for batch in file.iter_batches(_GROUP, use_threads=False))


CASES = [
    Case(
        "Parquet, 17 columns of numbers",
        write,
        lambda path: daskdist.read_parquet(str(path)),
        bare,
        2_000_000,
        releases_gil=True,
    )
]
