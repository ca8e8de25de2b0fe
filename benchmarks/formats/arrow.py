"""Arrow IPC against pyarrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

import daskdist

from . import Case

_BATCH = 62_500


def _numbers(num_rows: int) -> pa.Table:
    draws = np.random.default_rng(0)
    columns = {f"f{k}": draws.standard_normal(num_rows, np.float32) for k in range(16)}
    return pa.table({**columns, "label": draws.integers(10, size=num_rows)})


def _texts(num_rows: int) -> pa.Table:
    draws = np.random.default_rng(0)
    kinds = pa.array(np.array(["a", "bb", "ccc"])[draws.integers(3, size=num_rows)])
    return pa.table({"id": np.arange(num_rows), "name": [f"row {k}" for k in range(num_rows)], "kind": kinds})


def write(path: Path, table: pa.Table, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_BATCH)


def bare(path: Path) -> int:
    # Make arrays of 1,024 rows, since a file that is only mapped would not be read at all.
    num_rows, text = 0, np.dtypes.StringDType()
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file, options=options) as reader:
        for number in range(reader.num_record_batches):
            whole = reader.get_batch(number)
            for start in range(0, whole.num_rows, 1024):
                columns = [each.to_numpy(zero_copy_only=False) for each in whole.slice(start, 1024).columns]
                arrays = [each.astype(text) if each.dtype == object else each for each in columns]
                num_rows += len(arrays[0])
    return num_rows


CASES = [
    Case(
        "Arrow, 17 columns of numbers",
        lambda path, num_rows: write(path, _numbers(num_rows)),
        lambda path: daskdist.read_arrow(str(path)),
        bare,
        2_000_000,
        releases_gil=True,
    ),
    Case(
        "Arrow, 17 columns of numbers, lz4",
        lambda path, num_rows: write(path, _numbers(num_rows), "lz4"),
        lambda path: daskdist.read_arrow(str(path)),
        bare,
        2_000_000,
        releases_gil=True,
    ),
    Case(
        "Arrow, a number and two texts",
        lambda path, num_rows: write(path, _texts(num_rows)),
        lambda path: daskdist.read_arrow(str(path)),
        bare,
        1_000_000,
    ),
]
