"""How fast files are read: each format against the bare loop of the library that decodes it.

    python benchmarks/readers.py [--only NAME ...] [--size small] [--json] [--check]

Ours is what a user has: batches of 1,024 rows of NumPy arrays. The bare loop only decodes. Both are timed in turns.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import dask
from formats import Case, cases
from measure import Figure, arguments, interleaved, measured, report

import daskdist
from daskdist.execute.callers import Now, using


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Parameters
    ----------
    part
        What share of the rows of each case.
    repeats
        How often each thing is timed.
    num_files
        Files that are listed.
    large_bytes
        The size of the one file whose first batch is waited for.
    """

    part: float = 1.0
    repeats: int = 5
    num_files: int = 10_000
    large_bytes: int = 5_000_000_000


SIZES = {"full": Size(), "small": Size(part=0.01, repeats=1, num_files=100, large_bytes=10_000_000)}


def _exhaust(case: Case, path: Path) -> None:
    for _ in case.ours(path).batch(case.batch_rows):
        pass


def _alone(case: Case, path: Path) -> None:
    # All in this thread, reading too.
    with using(Now):
        _exhaust(case, path)


def _in_threads(case: Case, path: Path) -> None:
    with dask.config.set({"daskdist.num-threads": 2}):
        _exhaust(case, path)


def reading(each: list[Case], size: Size) -> Iterable[Figure]:
    """Rows a second of each case of a format, by one thread and by two."""
    for case in each:
        num_rows = max(int(case.num_rows * size.part), 100)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "file"
            case.write(path, num_rows)
            calls: dict[str, Callable[[], Any]] = {
                "alone": partial(_alone, case, path),
                "bare": partial(case.bare, path),
                "threads": partial(_in_threads, case, path),
            }
            found = case.bare(path)
            if found != num_rows:
                raise SystemExit(f"{case.what}: the bare loop reads {found} rows of {num_rows}")
            seconds = {name: median(times) for name, times in interleaved(calls, size.repeats).items()}
        rate = {name: num_rows / each / 1e6 for name, each in seconds.items()}
        yield Figure(case.what, rate["alone"], "M rows/s", rate["bare"], "bare", case.least, on="ratio")
        least = 1.0 if case.releases_gil and case.least is not None else None
        yield Figure(f"{case.what}, 2 threads", rate["threads"], "M rows/s", rate["bare"], "bare", least, on="ratio")
        if case.rows_per_s is not None:
            best = max(rate["alone"], rate["threads"])
            yield Figure(f"{case.what}, best", best, "M rows/s", target=case.rows_per_s / 1e6)


def listing(size: Size) -> Iterable[Figure]:
    """Seconds till a pipeline over many files is planned, and till its first batch."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as directory:
        pq.write_table(pa.table({"x": np.arange(10)}), f"{directory}/0.parquet")
        content = Path(f"{directory}/0.parquet").read_bytes()
        for number in range(1, size.num_files):
            Path(f"{directory}/{number}.parquet").write_bytes(content)
        start = time.perf_counter()
        ds = daskdist.read_parquet(directory).shuffle(1000).batch(32)
        strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
        strategy.distribute_dataset(ds).explain()
        planned = time.perf_counter() - start
        yield Figure(f"list and plan {size.num_files:,} files", planned, "s", target=2, bound="most")


def _records(num_rows: int) -> bytes:
    rows = daskdist.Dataset.from_list([bytes([k % 256]) * 100 for k in range(num_rows)])
    with tempfile.TemporaryDirectory() as directory:
        (path,) = rows.to_tfrecord(directory)
        return Path(path).read_bytes()


def _samples(num_rows: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for k in range(num_rows):
            for ending, content in (("bin", bytes(20_000)), ("cls", b"3")):
                member = tarfile.TarInfo(f"{k:06d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    # Without the zeros that end it, so that more samples can follow.
    return made.getvalue()[: num_rows * (512 + 20_480 + 512 + 512)]


# Some rows of each kind of file, which are repeated; what comes before them, and after; and the reader.
_LARGE: dict[str, tuple[bytes, Callable[[], bytes], bytes, Callable[[str], daskdist.Dataset]]] = {
    "text": (b"", lambda: b"some line of text or other, as long as lines are\n" * 20_000, b"", daskdist.read_text),
    "csv": (b"a,b,c\n", lambda: b'1.5,17,"some, text"\n' * 50_000, b"", daskdist.read_csv),
    "jsonl": (b"", lambda: b'{"a": 1.5, "b": 17, "c": "some text"}\n' * 25_000, b"", daskdist.read_json),
    "tfrecord": (b"", lambda: _records(10_000), b"", daskdist.read_tfrecord),
    "tar": (b"", lambda: _samples(50), bytes(1024), daskdist.read_webdataset),
}


def first_batch(size: Size) -> Iterable[Figure]:
    """Seconds till the first batch of one large file."""
    for name, (head, make, tail, read) in _LARGE.items():
        block = make()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"large.{name}"
            with path.open("wb") as file:
                file.write(head)
                for _ in range(size.large_bytes // len(block)):
                    file.write(block)
                file.write(tail)
            start = time.perf_counter()
            next(iter(read(str(path)).batch(64)))
            seconds = time.perf_counter() - start
        gigabytes = size.large_bytes / 1e9
        yield Figure(f"first batch of {gigabytes:.2g} GB of {name}", seconds, "s", target=1, bound="most")


BENCHMARKS: dict[str, Callable[[Size], Iterable[Figure]]] = {
    **{name: partial(reading, each) for name, each in cases().items()},
    "listing": listing,
    "first_batch": first_batch,
}


def main() -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args()
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
