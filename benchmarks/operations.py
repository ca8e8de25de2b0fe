"""The speed of operations: compared with plain NumPy, the cost of arranging, and the memory of a shuffle.

    python benchmarks/operations.py [--only NAME ...] [--size small] [--json] [--check]
                                    [--peer tf|torch|grain|ray --python PATH]

Each figure is compared with a floor that is measured in the same run, in turns with it. With ``--peer``, elements and
groups are also compared with another library, which is installed for ``--python`` (daskdist need not be).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from measure import MIB, Figure, Memory, arguments, interleaved, measured, report
from peers import PEERS, Peer
from peers.serving import BATCH, BOUNDARIES, NUM_KEYS, WINDOW, Data
from spine import exhaust, write_rows

import daskdist
from daskdist import Dataset


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    rows, peer_rows
        Rows in memory, and the smaller number for other libraries, which take a hundred times as long.
    num_files, file_rows, group_rows
        The data to arrange; a row is 16 float32 numbers and a label.
    shuffled_files, shuffled_file_rows, buffer_size
        The data to shuffle when memory is measured; a row is 64 bytes.
    shuffled_group_rows
        Rows of a row group there, one run each.
    repeats, pairs
        The number of timings of each case, and of an arranged pipeline beside its sources.
    """

    rows: int = 2_000_000
    peer_rows: int = 50_000
    num_files: int = 8
    file_rows: int = 250_000
    group_rows: int = 62_500
    shuffled_files: int = 10
    shuffled_file_rows: int = 1_000_000
    buffer_size: int = 1_000_000
    shuffled_group_rows: tuple[int, ...] = (250_000, 62_500, 10_000)
    repeats: int = 5
    pairs: int = 25


SIZES: Final = {
    "full": Size(),
    "small": Size(
        20_000,
        2_000,
        num_files=4,
        file_rows=4_096,
        group_rows=1_024,
        shuffled_files=2,
        shuffled_file_rows=20_000,
        buffer_size=4_000,
        shuffled_group_rows=(2_500,),
        repeats=1,
        pairs=1,
    ),
}


# --- elements and groups ---


# M rows/s of a run with `--peer` on 2 cores, with 50,000 rows.
_KNOWN: Final[dict[str, dict[str, float]]] = {
    "map_range": {"tf": 0.030, "torch": 1.6, "grain": 0.12, "ray": 0.12},
    "map_rows": {"tf": 0.029, "torch": 0.11, "grain": 0.088, "ray": 0.057},
    "filter_range": {"tf": 0.031, "torch": 1.9, "grain": 0.13, "ray": 0.13},
    "filter_rows": {"tf": 0.026, "torch": 0.34, "grain": 0.094, "ray": 0.093},
    "padded_batch": {"tf": 0.031, "torch": 0.20, "grain": 0.17, "ray": 0.27},
    "ragged_batch": {"tf": 0.030},
    "bucket_by_sequence_length": {"tf": 0.015},
    "window": {"tf": 0.069},
    "group_by_window": {"tf": 0.028},
    "global_shuffle": {"tf": 0.23, "torch": 0.22, "grain": 0.053, "ray": 0.31},
}


@dataclass(frozen=True)
class Case:
    """One pipeline over arrays in memory, and the same by hand.

    Parameters
    ----------
    what
        The name that is printed.
    ours
        Returns the batches.
    by_hand
        Returns the same batches by careful NumPy code.
    floor
        A description of that code.
    target
        The least speed in M rows/s of input; None for information only.
    least_ratio
        The least speed relative to the floor, instead of `target`.
    share
        The share of the rows to use; less for slow cases.
    is_same_order
        Whether both give the same batches in the same order.
    """

    what: str
    ours: Callable[[Data], Iterable[Any]]
    by_hand: Callable[[Data], Iterable[Any]]
    floor: str
    target: float | None = None
    least_ratio: float | None = None
    share: float = 1
    is_same_order: bool = True


def _slices(x: Any, size: int = BATCH) -> Iterator[Any]:
    for start in range(0, len(x), size):
        yield x[start : start + size]


def _numbers(data: Data) -> Any:
    return np.arange(len(data))


def _sequences(data: Data) -> Dataset:
    return Dataset.from_tensor_slices(daskdist.Ragged(data.values, data.row_splits))


def _padded(data: Data, start: int, stop: int) -> Any:
    splits = data.row_splits[start : stop + 1]
    lengths = np.diff(splits)
    is_value = np.arange(lengths.max()) < lengths[:, None]
    out = np.zeros(is_value.shape, data.values.dtype)
    out[is_value] = data.values[splits[0] : splits[-1]]
    return out


def _padded_by_hand(data: Data) -> Iterator[Any]:
    for start in range(0, len(data), BATCH):
        yield _padded(data, start, min(start + BATCH, len(data)))


def _ragged_by_hand(data: Data) -> Iterator[Any]:
    for start in range(0, len(data), BATCH):
        splits = data.row_splits[start : start + BATCH + 1]
        yield daskdist.Ragged(data.values[splits[0] : splits[-1]], splits - splits[0])


def _buckets_by_hand(data: Data) -> Iterator[Any]:
    # For each bucket, move its rows together, then pad them.
    lengths = np.diff(data.row_splits)
    bucket_of = np.searchsorted(BOUNDARIES, lengths, side="right")
    for bucket in range(len(BOUNDARIES) + 1):
        rows = np.flatnonzero(bucket_of == bucket)
        splits = np.concatenate([[0], np.cumsum(lengths[rows])])
        places = np.repeat(data.row_splits[rows] - splits[:-1], lengths[rows]) + np.arange(splits[-1])
        moved = Data(rows, data.values.take(places), splits)
        yield from _padded_by_hand(moved)


def _groups_by_hand(data: Data) -> Iterator[Any]:
    keys = _numbers(data) % NUM_KEYS
    for key in range(NUM_KEYS):
        yield from _slices(data.rows[keys == key])


def _permuted_by_hand(data: Data) -> Iterator[Any]:
    for rows in _slices(np.random.default_rng(0).permutation(len(data))):
        yield data.rows.take(rows, axis=0)


def _windows_by_hand(data: Data) -> Iterator[Any]:
    windows = np.lib.stride_tricks.sliding_window_view(data.rows, 25, axis=0)
    yield from _slices(np.ascontiguousarray(windows.transpose(0, 2, 1)))


def _windows_of_numbers(size: int, shift: int, share: float) -> Case:
    # Large batches: iterating over those of 256 takes longer than copying small windows.
    batch = 16 * BATCH

    def by_hand(data: Data) -> Iterator[Any]:
        windows = np.lib.stride_tricks.sliding_window_view(data.rows.reshape(-1), size)[::shift]
        yield from _slices(windows.copy(), batch)

    return Case(
        f"the 16 numbers of rows, sliding_window({size}, {shift}), batch({batch:_})",
        lambda data: Dataset.from_tensor_slices(data.rows.reshape(-1)).sliding_window(size, shift).batch(batch),
        by_hand,
        "NumPy sliding_window_view, copied, slices",
        least_ratio=0.5,
        share=share,
    )


def _split_by_hand(data: Data) -> Iterator[Any]:
    order = np.random.default_rng(0).permutation(len(data))
    for rows in _slices(np.sort(order[: int(0.8 * len(data) + 0.5)])):
        yield data.rows.take(rows, axis=0)


def _looks(row: Any, number: Any) -> Any:
    # A function that converts a value to a Python number may decide anything by it, so it is called for each row.
    return (row * 2, number + 1) if float(number) >= 0 else (row, number)


def _text(number: Any) -> str:
    return f"row {number}"


def _stacked_by_hand(data: Data, function: Callable[..., Any]) -> Iterator[Any]:
    numbers = _numbers(data)
    for start in range(0, len(data), BATCH):
        made = [function(data.rows[row], numbers[row]) for row in range(start, min(start + BATCH, len(data)))]
        yield np.stack([rows for rows, _ in made]), np.stack([number for _, number in made])


def _text_by_hand(data: Data) -> Iterator[Any]:
    numbers = _numbers(data)
    for part in _slices(numbers):
        yield np.array([_text(number) for number in part], np.dtypes.StringDType())


CASES: Final[dict[str, Case]] = {
    "map_range": Case(
        "range, map(x * 2 + 1), batch(256)",
        lambda data: Dataset.range(len(data)).map(lambda x: x * 2 + 1).batch(BATCH),
        lambda data: (x * 2 + 1 for x in _slices(_numbers(data))),
        "NumPy slices, computed",
        target=2,
    ),
    "map_rows": Case(
        "rows of 16, map(x * 2 + 1), batch(256)",
        lambda data: Dataset.from_tensor_slices(data.rows).map(lambda x: x * 2 + 1).batch(BATCH),
        lambda data: (x * 2 + 1 for x in _slices(data.rows)),
        "NumPy slices, computed",
        target=2,
    ),
    "map_row_by_row": Case(
        "rows of 16 and a number, map by a function that looks at values, batch(256)",
        lambda data: Dataset.from_tensor_slices((data.rows, _numbers(data))).map(_looks).batch(BATCH),
        lambda data: _stacked_by_hand(data, _looks),
        "Python loop, np.stack of each 256",
        least_ratio=0.7,
        share=0.1,
    ),
    "map_to_text": Case(
        "numbers, map to text, batch(256)",
        lambda data: Dataset.range(len(data)).map(_text).batch(BATCH),
        _text_by_hand,
        "Python loop, np.array of each 256",
        least_ratio=0.7,
        share=0.1,
    ),
    "filter_range": Case(
        "range, filter(x % 3 != 0), batch(256)",
        lambda data: Dataset.range(len(data)).filter(lambda x: x % 3 != 0).batch(BATCH),
        lambda data: _slices((x := _numbers(data))[x % 3 != 0]),
        "NumPy mask, slices",
        target=5,
    ),
    "filter_rows": Case(
        "rows of 16, filter(x[0] > 0.5), batch(256)",
        lambda data: Dataset.from_tensor_slices(data.rows).filter(lambda x: x[0] > 0.5).batch(BATCH),
        lambda data: _slices(data.rows[data.rows[:, 0] > 0.5]),
        "NumPy mask, slices",
        target=5,
    ),
    "padded_batch": Case(
        "rows of 0 to 63 int32, padded_batch(256)",
        lambda data: _sequences(data).padded_batch(BATCH),
        _padded_by_hand,
        "NumPy mask a batch",
        target=1,
        share=0.5,
    ),
    "ragged_batch": Case(
        "rows of 0 to 63 int32, ragged_batch(256)",
        lambda data: _sequences(data).ragged_batch(BATCH),
        _ragged_by_hand,
        "slices of values and splits",
        share=0.5,
    ),
    "bucket_by_sequence_length": Case(
        "rows of 0 to 63 int32, bucket_by_sequence_length, 4 buckets of 256",
        lambda data: _sequences(data).bucket_by_sequence_length(len, BOUNDARIES, [BATCH] * (len(BOUNDARIES) + 1)),
        _buckets_by_hand,
        "NumPy, bucket after bucket",
        share=0.1,
        is_same_order=False,
    ),
    "batch_by_size": Case(
        "numbers that are lengths, batch_by_size(16,384), sorted 2,048 at a time",
        lambda data: Dataset.from_tensor_slices(_numbers(data) % 64).batch_by_size(16_384, lambda x: x, 8 * BATCH),
        lambda data: _slices(np.sort(_numbers(data) % 64)),
        "NumPy sort and slices",
        target=1,
        is_same_order=False,
    ),
    "window": Case(
        "rows of 16, window(16), flat_map to batches of 16",
        lambda data: Dataset.from_tensor_slices(data.rows).window(WINDOW).flat_map(lambda each: each.batch(WINDOW)),
        lambda data: _slices(data.rows, WINDOW),
        "NumPy slices",
        share=0.02,
    ),
    "sliding_window": Case(
        "rows of 16, sliding_window(25), batch(256)",
        lambda data: Dataset.from_tensor_slices(data.rows).sliding_window(25).batch(BATCH),
        _windows_by_hand,
        "NumPy sliding_window_view, copied, slices",
        least_ratio=0.5,
        share=0.1,
    ),
    **{
        f"sliding_window_{size}_{shift}": _windows_of_numbers(size, shift, shift * share)
        for size, share in ((2, 0.04), (25, 0.04), (200, 0.01))
        for shift in (1, 5, 25)
    },
    "group_by_window": Case(
        "numbered rows of 16, group_by_window, 4 keys, to batches of 256",
        lambda data: (
            Dataset.from_tensor_slices(data.rows)
            .enumerate()
            .group_by_window(lambda number, row: number % NUM_KEYS, lambda key, each: each.batch(BATCH), BATCH)
        ),
        _groups_by_hand,
        "NumPy mask a key",
        share=0.1,
        is_same_order=False,
    ),
    "split": Case(
        "rows of 16, split(0.8), batch(256) of the first part",
        lambda data: Dataset.from_tensor_slices(data.rows).split(0.8)[0].batch(BATCH),
        _split_by_hand,
        "NumPy permutation, sort, gather",
        least_ratio=0.5,
        is_same_order=False,
    ),
    "global_shuffle": Case(
        "rows of 16, global_shuffle, batch(256)",
        lambda data: Dataset.from_tensor_slices(data.rows).global_shuffle(seed=0).batch(BATCH),
        _permuted_by_hand,
        "NumPy permutation, gather",
        is_same_order=False,
    ),
}


def elements(size: Size, names: Iterable[str]) -> Iterator[Figure]:
    """Measure pipelines over arrays in memory."""
    data = Data.made(size.rows)
    for name in names:
        case = CASES[name]
        part = data.first(max(int(case.share * len(data)), 1))
        if case.is_same_order:
            _check_same(case, part)
        seconds = interleaved(
            {"floor": lambda: exhaust(case.by_hand(part)), "ours": lambda: exhaust(case.ours(part))},  # noqa: B023
            size.repeats,
        )
        rate = {which: len(part) / 1e6 / min(each) for which, each in seconds.items()}
        known = ", ".join(f"{PEERS[key][0]} {peer:.2g}" for key, peer in _KNOWN.get(name, {}).items())
        yield Figure(
            case.what,
            rate["ours"],
            "M rows/s",
            rate["floor"],
            case.floor,
            target=case.target if case.least_ratio is None else case.least_ratio,
            on="ours" if case.least_ratio is None else "ratio",
            note=f"known, M rows/s: {known}" if known else "",
        )


def _check_same(case: Case, data: Data) -> None:
    for ours, floor in itertools.islice(zip(case.ours(data), case.by_hand(data), strict=True), 3):
        if not _is_equal(ours, floor):
            raise RuntimeError(f"{case.what}: gives {ours!r}, and by hand it is {floor!r}")


def _is_equal(ours: Any, other: Any) -> bool:
    if isinstance(ours, tuple):
        return all(map(_is_equal, ours, other))
    if isinstance(ours, daskdist.Ragged):
        return _is_equal(ours.values, other.values) and _is_equal(ours.row_splits, other.row_splits)
    return bool(ours.dtype == other.dtype and np.array_equal(ours, other))


def against(size: Size, names: Iterable[str], key: str, python: str) -> Iterator[Figure]:
    """Measure the same pipelines in turns with those of another library, over fewer rows."""
    data = Data.made(size.peer_rows)
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        data.save(folder)
        with Peer(PEERS[key], python, folder) as peer:
            for name in names:
                if name in peer.cases:
                    yield _against(CASES[name], data, peer, name, size.repeats)


def _against(case: Case, data: Data, peer: Peer, name: str, repeats: int) -> Figure:
    ours, theirs = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        num_batches = sum(1 for _ in case.ours(data))
        ours.append(time.perf_counter() - start)
        seconds, num_theirs = peer.run(name)
        theirs.append(seconds)
    # Libraries differ in whether they return incomplete buckets and windows at the end.
    if case.is_same_order and num_batches != num_theirs:
        raise RuntimeError(f"{case.what}: gives {num_batches} batches, and in {peer.name} {num_theirs}")
    million = len(data) / 1e6
    what = f"{case.what}; {len(data):_} rows"
    return Figure(what, million / min(ours), "M rows/s", million / min(theirs), f"{peer.name} {peer.version}")


# --- saved ---


def saved(size: Size) -> Iterator[Figure]:
    """Measure rows that are written and read again while the operating system has the files in memory."""
    x = Data.made(size.rows).rows
    rows = Dataset.from_tensor_slices(x)
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        directory, path = str(Path(folder, "saved")), str(Path(folder, "saved.npy"))
        seconds = interleaved(
            {
                "np.save": lambda: np.save(path, x),
                "save": lambda: rows.save(directory),
                "np.load": lambda: _summed(_slices(np.load(path, mmap_mode="r"))),
                "load": lambda: _summed(Dataset.load(directory).batch(BATCH)),
            },
            size.repeats,
        )
    rate = {name: x.nbytes / 1e6 / min(each) for name, each in seconds.items()}
    yield Figure("save rows of 16 float32", rate["save"], "MB/s", rate["np.save"], "np.save")
    yield Figure(
        "load, batch(256), each summed", rate["load"], "MB/s", rate["np.load"], "np.load, mapped, slices, each summed"
    )


def _summed(batches: Iterable[Any]) -> float:
    return sum(float(batch.sum()) for batch in batches)


# --- arranging ---

_AT_MOST: Final = 1.05
_FEATURES: Final = [f"f{number}" for number in range(16)]
_COLUMNS: Final = {"x": _FEATURES, "y": "label"}
_ARRANGED_BATCH: Final = 1024


def arranging(size: Size) -> Iterator[Figure]:
    """Measure the cost that `zip`, `interleave`, `repeat` and `shard` add to reading and batching."""
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        first = Path(folder, "0.parquet")
        write_rows(str(first), _FEATURES, size.file_rows, size.group_rows, np.arange(size.file_rows))
        for number in range(1, size.num_files):
            Path(folder, f"{number}.parquet").write_bytes(first.read_bytes())
        paths = sorted(map(str, Path(folder).glob("*.parquet")))
        half = len(paths) // 2
        names = Dataset.from_tensor_slices(np.array(paths, np.dtypes.StringDType()))
        sources = Sources(
            "Parquet",
            daskdist.read_parquet(paths, _COLUMNS),
            (daskdist.read_parquet(paths[:half], _COLUMNS), daskdist.read_parquet(paths[half : 2 * half], _COLUMNS)),
            lambda block_length: names.interleave(
                lambda path: daskdist.read_parquet(str(path), _COLUMNS), 4, block_length, num_parallel_calls=-1
            ),
            _AT_MOST,
        )
        yield from arranged(sources, size)
    x = Data.made(size.rows).rows
    pieces = [Dataset.from_tensor_slices(piece) for piece in np.array_split(x, size.num_files)]
    sources = Sources(
        "in memory",
        Dataset.from_tensor_slices(x),
        (Dataset.from_tensor_slices(x[: len(x) // 2]), Dataset.from_tensor_slices(x[len(x) // 2 :])),
        lambda block_length: Dataset.range(len(pieces)).interleave(lambda number: pieces[int(number)], 4, block_length),
        None,
    )
    yield from arranged(sources, size)


@dataclass(frozen=True)
class Sources:
    """The datasets that are arranged.

    Parameters
    ----------
    where
        The place of its rows.
    whole
        All rows.
    halves
        The same rows in two datasets.
    interleaved
        Returns the same rows in turns from four pieces, with a number of rows in each turn.
    target
        The largest allowed ratio of the time to that of the sources.
    """

    where: str
    whole: Dataset
    halves: tuple[Dataset, Dataset]
    interleaved: Callable[[int], Dataset]
    target: float | None


def arranged(sources: Sources, size: Size) -> Iterator[Figure]:
    """Measure each arrangement relative to its plain sources, which are read and batched as often."""
    whole, (first, second), batch = sources.whole, sources.halves, _ARRANGED_BATCH
    once = [whole.batch(batch)]
    twice = [whole.batch(batch), whole.batch(batch)]
    # Two shards read all rows twice, and each returns half of them, as many batches as these of twice the size.
    coarse = [whole.batch(2 * batch), whole.batch(2 * batch)]
    shards = [whole.shard(2, 0).batch(batch), whole.shard(2, 1).batch(batch)]
    pairs = {
        "zip": ([first.batch(batch), second.batch(batch)], [Dataset.zip(first, second).batch(batch)]),
        "interleave(cycle 4, block 1)": (once, [sources.interleaved(1).batch(batch)]),
        "interleave(cycle 4, block 16)": (once, [sources.interleaved(16).batch(batch)]),
        "repeat(2)": (twice, [whole.repeat(2).batch(batch)]),
        "shard(2, 0) and shard(2, 1)": (coarse, shards),
    }
    for name, (plain, arranged) in pairs.items():
        ratio, note = beside(plain, arranged, size.pairs)
        yield Figure(
            f"{sources.where}: {name}, batch({batch})",
            ratio,
            "times its sources",
            target=sources.target,
            bound="most",
            note=note,
        )


def beside(plain: list[Dataset], arranged: list[Dataset], repeats: int) -> tuple[float, str]:
    """Return the time of pipelines relative to plain ones, which run before and after them, so that drift affects both.

    Batches of plain sources are views, but rows that change their order have to be copied. The note also has the ratio
    to plain sources whose batches are copied once, in order.

    Returns
    -------
    ratio, note
        The median of the ratios, and text about its uncertainty.
    """
    cpu: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[Any], None], datasets: list[Dataset]) -> Callable[[], None]:
        def call() -> None:
            start = time.process_time()
            for dataset in datasets:
                run(dataset)
            cpu.setdefault(name, []).append(time.process_time() - start)

        return call

    calls = {
        "before": timed("before", exhaust, plain),
        "arranged": timed("arranged", exhaust, arranged),
        "after": timed("after", exhaust, plain),
        "copied": timed("copied", copy_each, plain),
    }
    # The first round opens files and inspects functions, so it is not counted.
    interleaved(calls, 1)
    cpu.clear()
    seconds = {name: np.array(each) for name, each in interleaved(calls, repeats).items()}
    around = (seconds["before"] + seconds["after"]) / 2
    ratios = seconds["arranged"] / around
    low, high = np.quantile(ratios, [0.25, 0.75])
    itself = np.quantile(seconds["after"] / seconds["before"], [0.25, 0.75])
    cpu_ratio = 2 * median(cpu["arranged"]) / (median(cpu["before"]) + median(cpu["after"]))
    copied = np.median(seconds["arranged"] / seconds["copied"])
    cpu_copied = median(cpu["arranged"]) / median(cpu["copied"])
    note = (
        f"{1000 * np.median(seconds['arranged']):.0f} ms over {1000 * np.median(around):.0f} ms; "
        f"quartiles of {repeats} {low:.2f} to {high:.2f}, of the sources over themselves {itself[0]:.2f} to "
        f"{itself[1]:.2f}; in processor time {cpu_ratio:.2f}; over sources whose batches are copied {copied:.2f}, "
        f"in processor time {cpu_copied:.2f}"
    )
    return float(np.median(ratios)), note


def copy_each(batches: Iterable[Any]) -> None:
    """Copy every batch, as code that stacks rows one by one has to."""
    for batch in batches:
        for leaf in batch.values() if isinstance(batch, dict) else (batch,):
            leaf.copy()


# --- memory ---

_ROW_BYTES: Final = 64


def memory(size: Size) -> Iterator[Figure]:
    """Return the largest growth of a process that streams shuffled batches without keeping any."""
    names = _FEATURES[: _ROW_BYTES // 4 - 1]
    buffer_bytes = size.buffer_size * _ROW_BYTES
    for group_rows in size.shuffled_group_rows:
        with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
            first = Path(folder, "0.parquet")
            labels = np.zeros(size.shuffled_file_rows, np.float32)
            write_rows(str(first), names, size.shuffled_file_rows, group_rows, labels)
            for number in range(1, size.shuffled_files):
                Path(folder, f"{number}.parquet").write_bytes(first.read_bytes())
            held_bytes = in_fresh_process(held, folder, names, size.buffer_size)
            held_plain_bytes = in_fresh_process(held, folder, names, None)
            peak_bytes, num_rows, seconds = in_fresh_process(streamed, folder, names, size.buffer_size)
            plain_bytes, *_ = in_fresh_process(streamed, folder, names, None)
        expected = size.shuffled_files * size.shuffled_file_rows
        if num_rows != expected:
            raise RuntimeError(f"shuffle gave {num_rows} rows of {expected}")
        yield Figure(
            f"memory of shuffle({size.buffer_size:_}), {expected:_} rows of 64 bytes in row groups of {group_rows:_}",
            (held_bytes - held_plain_bytes) / MIB,
            "MiB",
            buffer_bytes / MIB,
            "the buffer's rows",
            target=3,
            on="ratio",
            bound="most",
            note="the most that arrays and objects take at a time, above what they take without shuffle, which is "
            f"{held_plain_bytes / MIB:,.0f} MiB. Resident, with imports on use and what the allocator keeps: "
            f"{peak_bytes / MIB:,.0f} MiB, without shuffle {plain_bytes / MIB:,.0f} MiB; "
            f"{num_rows / seconds / 1e6:.1f} M rows/s",
        )


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as fresh:
        return fresh.submit(function, *args).result()


def held(folder: str, names: list[str], buffer_size: int | None) -> int:
    """Return the largest number of allocated bytes, NumPy's included, in a pass whose batches are dropped."""
    dataset = daskdist.read_parquet(folder, {"x": names, "y": "label"})
    dataset = (dataset if buffer_size is None else dataset.shuffle(buffer_size, seed=0)).batch(1024)
    next(iter(dataset))
    tracemalloc.start()
    for _ in dataset:
        pass
    return tracemalloc.get_traced_memory()[1]


def streamed(folder: str, names: list[str], buffer_size: int | None) -> tuple[int, int, float]:
    """Return the largest growth in bytes, the number of rows, and the seconds of a pass that drops its batches."""
    dataset = daskdist.read_parquet(folder, {"x": names, "y": "label"})
    dataset = (dataset if buffer_size is None else dataset.shuffle(buffer_size, seed=0)).batch(1024)
    sampled = Memory([os.getpid()])
    start = time.perf_counter()
    with sampled.sampled():
        num_rows = sum(len(batch["y"]) for batch in dataset)
    return sampled.above_idle_bytes, num_rows, time.perf_counter() - start


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    **{name: lambda size, name=name: elements(size, [name]) for name in CASES},  # type: ignore[misc]
    "saved": saved,
    "arranging": arranging,
    "memory": memory,
}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, BENCHMARKS, SIZES)
    parser.add_argument("--peer", choices=list(PEERS), help="hold elements and groups against this library too")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has it; this one by default")
    options = parser.parse_args(argv)
    size, names = SIZES[options.size], options.only or list(BENCHMARKS)
    figures = measured(BENCHMARKS, names, size)
    if options.peer:
        print(f"measuring: against {options.peer}", file=sys.stderr)
        figures += against(size, [name for name in names if name in CASES], options.peer, options.python)
    return report(figures, size, options)


if __name__ == "__main__":
    sys.exit(main())
