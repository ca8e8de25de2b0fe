"""The speed of reading files: each format against the plain loop of the library that decodes it.

    python benchmarks/readers.py [--only NAME ...] [--size small] [--json] [--check]

Our loop is that of a user: batches of 1,024 rows of NumPy arrays. The bare loop only decodes. Both are timed in turns.
``--only tables`` reads numbers, dates and text by two threads, beside polars with two threads where that is installed;
``--only wide`` a CSV file of very many columns beside pandas.
"""

from __future__ import annotations

import io
import os
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
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    part
        The share of the rows to use in each case.
    repeats
        The number of timings of each case.
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
    # Everything runs in this thread, reading too.
    with using(Synchronous):
        _exhaust(case, path)


def _in_threads(case: Case, path: Path) -> None:
    with dask.config.set({"daskdist.num-threads": 2}):
        _exhaust(case, path)


def reading(each: list[Case], size: Size) -> Iterable[Figure]:
    """Measure rows a second of each case of a format, by one thread and by two."""
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
    """Measure the seconds until a pipeline over many files is planned, and until its first batch."""
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
    # Leave out the zeros at the end of an archive, so that more samples can follow.
    return made.getvalue()[: num_rows * (512 + 20_480 + 512 + 512)]


# Kind of file -> what it begins with, a function that makes some rows (which are repeated), its end, and its reader.
_LARGE: dict[str, tuple[bytes, Callable[[], bytes], bytes, Callable[[str], daskdist.Dataset]]] = {
    "text": (b"", lambda: b"some line of text or other, as long as lines are\n" * 20_000, b"", daskdist.read_text),
    "csv": (b"a,b,c\n", lambda: b'1.5,17,"some, text"\n' * 50_000, b"", daskdist.read_csv),
    "jsonl": (b"", lambda: b'{"a": 1.5, "b": 17, "c": "some text"}\n' * 25_000, b"", daskdist.read_json),
    "tfrecord": (b"", lambda: _records(10_000), b"", daskdist.read_tfrecord),
    "tar": (b"", lambda: _samples(50), bytes(1024), daskdist.read_webdataset),
}


def first_batch(size: Size) -> Iterable[Figure]:
    """Measure the seconds until the first batch of one large file."""
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


def tables(size: Size) -> Iterable[Figure]:
    """Measure rows a second of files of numbers, dates and text, up to the last batch of NumPy arrays.

    For Parquet the ratio is 0.2 to 0.3 to polars, whose results are its own columns, and 0.9 if these are converted to
    NumPy arrays with Python strings. A million rows take 209 ms of CPU time (polars: 54 ms): some 92 ms for pyarrow's
    decoding, 84 ms to make NumPy text (64 ns for a text of 24 bytes, 20 ns for a repeated one of 5), 10 ms to check for
    UTF-8, and the rest for batches, opening files and so on; dates and times are not copied. To be faster, we would
    need another decoder, and other arrays of text than ``StringDType``. A second thread gains little, since NumPy makes
    text in one thread at a time (of the longer texts: 45 ms with one thread, 39 ms with two).
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    num_rows = max(int(1_000_000 * size.part), 1000)
    draws = np.random.default_rng(0)
    seconds = np.datetime64("2020-01-01T00:00:00") + draws.integers(0, 10**8, num_rows)
    columns = {
        "id": np.arange(num_rows),
        "x": draws.standard_normal(num_rows).round(6),
        "day": seconds.astype("datetime64[D]"),
        "at": seconds,
        "kind": draws.choice(["alpha", "beta", "gamma"], num_rows),
        "text": [f"text number {k} of all" for k in draws.integers(0, 10**6, num_rows)],
    }
    table = pa.table(columns)
    with tempfile.TemporaryDirectory() as directory, dask.config.set({"daskdist.num-threads": 2}):
        paths = {name: f"{directory}/a.{name}" for name in ("parquet", "csv", "jsonl")}
        pa.parquet.write_table(table, paths["parquet"], row_group_size=62_500)
        pa.csv.write_csv(table, paths["csv"])
        rows = zip(*[np.asarray(column).astype(str).tolist() for column in columns.values()], strict=True)
        with open(paths["jsonl"], "w") as file:
            for number, x, *words in rows:
                texts = ", ".join(f'"{name}": "{word}"' for name, word in zip(list(columns)[2:], words, strict=True))
                file.write(f'{{"id": {number}, "x": {x}, {texts}}}\n')
        times = dict.fromkeys(("day", "at"), "datetime64[s]")
        readers = {
            "parquet": lambda: daskdist.read_parquet(paths["parquet"]),
            "csv": lambda: daskdist.read_csv(paths["csv"], newlines_in_values=False),
            "jsonl": lambda: daskdist.read_json(paths["jsonl"], dtypes=times),
        }
        peers = _polars(paths)
        for name, read in readers.items():
            calls: dict[str, Callable[[], Any]] = {"ours": partial(_iterate, read), **peers.get(name, {})}
            rate = {which: num_rows / min(each) / 1e6 for which, each in interleaved(calls, size.repeats).items()}
            what = f"{name} of numbers, dates and text, 2 threads"
            yield Figure(what, rate["ours"], "M rows/s", rate.get("polars"), "polars" if "polars" in rate else "")
            if "polars, to NumPy" in rate:
                yield Figure(what, rate["ours"], "M rows/s", rate["polars, to NumPy"], "polars, to NumPy")


def _iterate(read: Callable[[], daskdist.Dataset]) -> None:
    for _ in read().batch(8192):
        pass


def _polars(paths: dict[str, str]) -> dict[str, dict[str, Callable[[], Any]]]:
    # Polars reads this when it is imported.
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    try:
        import polars as pl
    except ImportError:
        return {}

    def json_lines() -> Any:
        return pl.read_ndjson(paths["jsonl"]).with_columns(pl.col("day").str.to_date(), pl.col("at").str.to_datetime())

    return {
        "parquet": {
            "polars": lambda: pl.read_parquet(paths["parquet"]),
            # This converts text to Python strings.
            "polars, to NumPy": lambda: [column.to_numpy() for column in pl.read_parquet(paths["parquet"])],
        },
        "csv": {"polars": lambda: pl.read_csv(paths["csv"], try_parse_dates=True)},
        "jsonl": {"polars": json_lines},
    }


def wide(size: Size) -> Iterable[Figure]:
    """Measure the seconds for a CSV file of 16,000 columns, from its name to the last batch."""
    import numpy as np
    import pandas as pd

    num_columns = max(int(16_000 * size.part), 100)
    values = np.random.default_rng(0).standard_normal((200, num_columns)).round(4)
    names = [f"c{k}" for k in range(num_columns)]
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/wide.csv"
        pd.DataFrame(values, columns=names).to_csv(path, index=False)
        calls: dict[str, Callable[[], Any]] = {
            "a dict": partial(_iterate, lambda: daskdist.read_csv(path)),
            "one array": partial(_iterate, lambda: daskdist.read_csv(path, {"x": names})),
            "pandas": partial(pd.read_csv, path),
        }
        seconds = {name: min(times) for name, times in interleaved(calls, size.repeats).items()}
    for name in ("a dict", "one array"):
        what = f"CSV of {num_columns:,} columns, as {name}"
        yield Figure(what, seconds[name], "s", seconds["pandas"], "pandas", 2.5, on="ratio", bound="most")


BENCHMARKS: dict[str, Callable[[Size], Iterable[Figure]]] = {
    **{name: partial(reading, each) for name, each in cases().items()},
    "listing": listing,
    "first_batch": first_batch,
    "tables": tables,
    "wide": wide,
}


def main() -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args()
    size = SIZES[options.size]
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
