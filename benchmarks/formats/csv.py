"""CSV against pyarrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

import daskdist

from . import Case


def write_numbers(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0)
    columns = {f"f{k}": draws.standard_normal(num_rows).round(4) for k in range(16)}
    columns["label"] = draws.integers(10, size=num_rows)
    pc.write_csv(pa.table(columns), path)


def write_mixed(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0)
    columns = {
        "id": np.arange(num_rows),
        "when": np.datetime64("2024-01-01T00:00:00") + np.arange(num_rows),
        "city": draws.choice(["Oslo", "Lima", "Cairo", "Quito, Ecuador", 'the "Big Apple"'], num_rows),
        "name": [f"some name {k}" for k in draws.integers(num_rows, size=num_rows)],
        "price": draws.integers(100_000, size=num_rows) / 100,
        "is_open": draws.integers(2, size=num_rows).astype(bool),
    }
    # pyarrow writes all text in quotes.
    pc.write_csv(pa.table(columns), path)


def bare(path: Path) -> int:
    reading = pc.ReadOptions(use_threads=False)
    with pc.open_csv(path, reading, pc.ParseOptions(newlines_in_values=True)) as reader:
        return sum(batch.num_rows for batch in reader)


def bare_to_numpy(path: Path) -> int:
    """Read columns and convert them to NumPy; text becomes Python strings."""
    reading = pc.ReadOptions(use_threads=False)
    num_rows = 0
    with pc.open_csv(path, reading, pc.ParseOptions(newlines_in_values=True)) as reader:
        for batch in reader:
            for column in batch.columns:
                column.to_numpy(zero_copy_only=False)
            num_rows += batch.num_rows
    return num_rows


CASES = [
    Case(
        "CSV, 17 columns of numbers",
        write_numbers,
        lambda path: daskdist.read_csv(str(path)),
        bare,
        500_000,
        releases_gil=True,
    ),
    Case(
        "CSV, 6 columns of numbers, times and text in quotes",
        write_mixed,
        lambda path: daskdist.read_csv(str(path)),
        bare,
        1_500_000,
        releases_gil=True,
    ),
    # The plain loop above leaves text in Arrow; this one converts it to NumPy.
    Case(
        "CSV, the same, against a loop that makes NumPy arrays too",
        write_mixed,
        lambda path: daskdist.read_csv(str(path)),
        bare_to_numpy,
        1_500_000,
        releases_gil=True,
    ),
]
