"""The speed of batches: from memory, from Parquet files, and on a cluster; and the time of the import.

    python benchmarks/spine.py [--only NAME ...] [--size small] [--json] [--check]

Each figure is held against a floor or a peer measured in the same run, in turns with it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client, LocalCluster, wait
from measure import (
    MIB,
    Figure,
    Memory,
    TaskCounter,
    arguments,
    import_seconds,
    interleaved,
    measured,
    modules_after,
    report,
)

import daskdist
from daskdist.config import in_bytes


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    memory_rows, parquet_rows, group_rows
        The rows in memory, in the Parquet file, and in each of its row groups.
    num_files, file_rows, file_group_rows
        The data that the cluster reads; a row is 256 bytes.
    ways
        The ways to feed it: the policy, and whether the data is shuffled.
    repeats, import_repeats
        The number of timings of each case.
    """

    memory_rows: int = 5_000_000
    parquet_rows: int = 2_000_000
    group_rows: int = 62_500
    num_files: int = 8
    file_rows: int = 1_000_000
    file_group_rows: int = 62_500
    ways: tuple[tuple[str, bool], ...] = (("FILE", False), ("FILE", True), ("DATA", False), ("DATA", True))
    repeats: int = 5
    import_repeats: int = 15


SIZES: Final = {
    "full": Size(),
    "small": Size(
        20_000,
        10_000,
        2_500,
        num_files=2,
        file_rows=8_192,
        file_group_rows=2_048,
        ways=(("FILE", False), ("DATA", True)),
        repeats=1,
        import_repeats=1,
    ),
}

# Million rows a second of TensorFlow's batch(256), and of shuffle(10_000).batch(256), on 2 cores.
_TENSORFLOW_ROWS_S: Final = {"batch": 1.1, "shuffle": 0.7}


def in_memory(size: Size) -> Iterator[Figure]:
    """Measure rows of 16 float32 and an int64, sliced and shuffled."""
    num_rows, million = size.memory_rows, size.memory_rows / 1e6
    x = np.random.default_rng(0).random((num_rows, 16), np.float32)
    y = np.arange(num_rows)
    rows = daskdist.Dataset.from_tensor_slices((x, y))

    def slices(x: Any, y: Any) -> None:
        for start in range(0, num_rows, 256):
            _ = x[start : start + 256], y[start : start + 256]

    def gathered_slices() -> None:
        order = np.random.default_rng(0).permutation(num_rows)
        slices(x[order], y[order])

    seconds = interleaved(
        {
            "slices": lambda: slices(x, y),
            "batch": lambda: exhaust(rows.batch(256)),
            "gathered": gathered_slices,
            "shuffle": lambda: exhaust(rows.shuffle(10_000, seed=0).batch(256)),
        },
        size.repeats,
    )
    rate = {name: million / min(each) for name, each in seconds.items()}
    notes = {
        name: f"TensorFlow, known: {peer} M rows/s; {rate[name] / peer:.0f} times that"
        for name, peer in _TENSORFLOW_ROWS_S.items()
    }
    yield Figure(
        "in memory, batch(256)",
        rate["batch"],
        "M rows/s",
        rate["slices"],
        "NumPy slices",
        target=20,
        note=notes["batch"],
    )
    yield Figure(
        "in memory, shuffle(10_000).batch(256)",
        rate["shuffle"],
        "M rows/s",
        rate["gathered"],
        "NumPy permutation, slices",
        target=5,
        note=notes["shuffle"],
    )


def parquet(size: Size) -> Iterator[Figure]:
    """Measure shuffled batches of a Parquet file, as one stacked feature array and a label."""
    names = [f"f{number}" for number in range(16)]
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        path = str(Path(folder, "rows.parquet"))
        write_rows(path, names, size.parquet_rows, size.group_rows, np.arange(size.parquet_rows))
        dataset = daskdist.read_parquet(path, columns={"x": names, "y": "label"})
        dataset = dataset.shuffle(size.group_rows, seed=0).batch(1024)
        seconds = interleaved(
            {
                "floor": lambda: by_hand(path, names),
                "ours": lambda: exhaust(dataset),
            },
            size.repeats,
        )
    rate = {name: size.parquet_rows / 1e6 / min(each) for name, each in seconds.items()}
    yield Figure(
        f"Parquet, shuffle({size.group_rows:_}).batch(1024)",
        rate["ours"],
        "M rows/s",
        rate["floor"],
        "by hand, one thread",
        target=0.6,
        on="ratio",
    )


def by_hand(path: str, names: list[str]) -> None:
    """Make batches as a careful program would: row groups in turn, stacked, permuted and sliced in one thread."""
    rng = np.random.default_rng(0)
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            read = file.read_row_group(group, columns=[*names, "label"], use_threads=False)
            columns = np.stack([read.column(name).to_numpy() for name in names])
            # Transpose in a separate pass, which is faster than stacking along the last axis.
            x, y = np.ascontiguousarray(columns.T), read.column("label").to_numpy()
            order = rng.permutation(len(y))
            x, y = x.take(order, axis=0), y.take(order)
            for start in range(0, len(y), 1024):
                _ = {"x": x[start : start + 1024], "y": y[start : start + 1024]}


def write_rows(path: str, names: list[str], num_rows: int, group_rows: int, labels: Any) -> None:
    """Write a Parquet file of float32 columns and a label, with plain encoding."""
    rng = np.random.default_rng(0)
    columns = {name: rng.random(num_rows, np.float32) for name in names}
    rows = pa.table({**columns, "label": labels})
    pq.write_table(rows, path, row_group_size=group_rows, compression="none", use_dictionary=False)


def exhaust(elements: Any) -> None:
    """Iterate over all elements without using their values."""
    for _ in elements:
        pass


# --- cluster ---

_BATCH_ROWS: Final = 1024
_ROW_BYTES: Final = 256
# A call of `run` gets several steps, so that feeding is measured and not the steps; and the most steps in flight.
_STEPS_A_RUN: Final = 16
_STEPS_IN_FLIGHT: Final = 128
# The kinds of tasks that are steps of the program and not part of feeding it.
_CONSUMING: Final = ("run-", "layout")


def cluster(size: Size) -> Iterator[Figure]:
    """Measure two worker processes that are fed with batches of 256 KiB, with each policy, shuffled and not."""
    names = [f"f{number}" for number in range(_ROW_BYTES // 4 - 1)]
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        first = Path(folder, "0.parquet")
        labels = np.zeros(size.file_rows, np.float32)
        write_rows(str(first), names, size.file_rows, size.file_group_rows, labels)
        for number in range(1, size.num_files):
            Path(folder, f"{number}.parquet").write_bytes(first.read_bytes())
        paths = sorted(map(str, Path(folder).glob("*.parquet")))
        for policy, is_shuffled in size.ways:
            yield from fed(paths, names, size, policy, is_shuffled, _STEPS_A_RUN)
        # With one step in each call, every step is a Dask task, which is slow, so read only some of the files.
        yield from fed(paths[:2], names, size, "DATA", True, 1)


def fed(
    paths: list[str], names: list[str], size: Size, policy: str, is_shuffled: bool, steps_a_run: int
) -> Iterator[Figure]:
    """Measure one way of feeding on a fresh cluster, since memory is compared with that of fresh workers."""
    dataset = daskdist.read_parquet(paths, columns={"x": names, "y": "label"})
    dataset = dataset.shuffle(size.file_group_rows, seed=0) if is_shuffled else dataset
    options = daskdist.Options()
    options.auto_shard_policy = daskdist.AutoShardPolicy[policy]
    dataset = dataset.batch(_BATCH_ROWS).with_options(options)
    counter = TaskCounter()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
        dask.config.set({"daskdist.max-steps-in-flight": _STEPS_IN_FLIGHT // steps_a_run}),
    ):
        client.wait_for_workers(2)
        local.scheduler.add_plugin(counter)
        memory = Memory(client.run(os.getpid).values())
        with memory.sampled():
            num_rows, num_batches, first_seconds, seconds = consume(strategy, dataset, steps_a_run)
        counts = dict(counter.counts.most_common())
        start = time.perf_counter()
        plain_dask(client, paths, names)
        plain_seconds = time.perf_counter() - start
    expected = len(paths) * size.file_rows
    if num_rows != expected:
        raise RuntimeError(f"{policy}: {num_rows} rows were delivered of {expected}")
    num_feeding = sum(number for kind, number in counts.items() if not kind.startswith(_CONSUMING))
    where = f"cluster, {policy}{', shuffled' if is_shuffled else ''}{', a step a run' if steps_a_run == 1 else ''}"
    split_bytes = size.file_group_rows * _ROW_BYTES
    yield Figure(
        f"{where}: tasks to feed a batch of 256 KiB",
        num_feeding / num_batches,
        "tasks",
        target=1 / 8,
        bound="most",
        note=f"{num_batches} batches; tasks: " + ", ".join(f"{kind} {number}" for kind, number in counts.items()),
    )
    yield Figure(
        f"{where}: peak memory of a worker above idle",
        memory.above_idle_bytes / MIB,
        "MiB",
        target=(in_bytes("window-bytes") + split_bytes + 200e6) / MIB,
        bound="most",
        note=f"window {in_bytes('window-bytes') / MIB:.0f} MiB, split {split_bytes / MIB:.0f} MiB, 200 MB more",
    )
    yield Figure(
        f"{where}: batches",
        num_batches / seconds,
        "batches/s",
        num_batches / plain_seconds,
        "read by a Dask task a split",
        note=f"after the first call, which took {first_seconds:.1f} s: fresh workers import what they need",
    )


def consume(strategy: Any, dataset: Any, steps_a_run: int) -> tuple[int, int, float, float]:
    """Feed every batch to a function on every replica.

    Returns
    -------
    num_rows, num_batches, first_seconds, seconds
        Return the number of rows, and the times up to the end of the first call and from then to the end.
    """
    start = time.perf_counter()
    first = start
    counts: list[Any] = []
    steps: list[Any] = []
    for step in strategy.distribute_dataset(dataset):
        steps.append(step)
        if len(steps) == steps_a_run:
            counts.append(strategy.run(count_rows, args=(steps,)))
            steps = []
            first = time.perf_counter() if len(counts) == 1 else first
    if steps:
        counts.append(strategy.run(count_rows, args=(steps,)))
    num_rows = sum(sum(replicas) for replicas in zip(*strategy.local_results(counts), strict=True))
    return num_rows, -(-num_rows // _BATCH_ROWS), first - start, time.perf_counter() - first


def count_rows(steps: list[Any]) -> int:
    """Count the rows, as the whole step."""
    return sum(len(step["y"]) for step in steps)


def plain_dask(client: Client, paths: list[str], names: list[str]) -> None:
    """Read and stack the same files by one task for each row group, without shuffling or sending anything."""
    splits = [(path, group) for path in paths for group in range(pq.ParquetFile(path).num_row_groups)]
    wait(client.map(read_and_drop, splits, names=names, pure=False))


def read_and_drop(split: tuple[str, int], names: list[str]) -> int:
    """Read and stack one row group, of which only the number of rows is kept."""
    path, group = split
    with pq.ParquetFile(path) as file:
        read = file.read_row_group(group, use_threads=False)
    x = np.ascontiguousarray(np.stack([read.column(name).to_numpy() for name in names]).T)
    return len(x)


# --- import ---

_UNWANTED: Final = ("cupy", "distributed", "pandas", "pyarrow")


def imports(size: Size) -> Iterator[Figure]:
    """Measure the import in fresh interpreters."""
    statements = {
        "floor": "import dask, numpy, optree",
        "import daskdist": "import daskdist",
        "import daskdist; daskdist.Dataset": "import daskdist; daskdist.Dataset",
    }
    seconds = import_seconds(statements, size.import_repeats)
    for what in ("import daskdist", "import daskdist; daskdist.Dataset"):
        yield Figure(
            what,
            1000 * seconds[what],
            "ms",
            1000 * seconds["floor"],
            statements["floor"],
            # Only `import daskdist` has a target.
            target=1.3 if what == "import daskdist" else None,
            on="ratio",
            bound="most",
        )
        loaded = modules_after(what, _UNWANTED)
        yield Figure(
            f"{what}: of {', '.join(_UNWANTED)} it loads",
            len(loaded),
            "modules",
            target=0,
            bound="most",
            note=", ".join(loaded),
        )


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    "memory": in_memory,
    "parquet": parquet,
    "cluster": cluster,
    "import": imports,
}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
