"""What one GPU is fed, shuffles and reduces, each beside what the machine can do, measured in the same run.

    python benchmarks/gpu.py [--only NAME ...] [--size small] [--json] [--check]

It needs a GPU that CuPy sees, and nothing beside CuPy that daskdist does not need; with PyTorch installed its
``DataLoader`` is measured too. Fed are chunks of float32 rows of 64 bytes from memory, in the order they lie in, to one
replica. Floors are one pinned buffer copied to the device again and again, and for reductions one array copied to
another on the device, which moves each byte twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
from measure import MIB, Figure, arguments, interleaved, measured, report

import daskdist

try:
    import cupy

    if not cupy.cuda.runtime.getDeviceCount():
        raise RuntimeError("there is none")
except Exception as error:
    sys.exit(
        f"benchmarks/gpu.py needs CuPy and a GPU that it sees ({type(error).__name__}: {error}); for CuPy: "
        "pip install 'daskdist[cuda13]'"
    )

_ROW: Final = 16
_ROW_BYTES: Final = 4 * _ROW


@dataclass(frozen=True)
class Size:
    """How much.

    Parameters
    ----------
    chunk_bytes, num_chunks
        Of what is fed.
    shuffled_rows, batch_rows
        Of what is shuffled on the device.
    reduced_bytes
        Of the array that is reduced.
    repeats
        How often each thing is timed, all in turn.
    """

    chunk_bytes: int = 64 * MIB
    num_chunks: int = 48
    shuffled_rows: int = 2**25
    batch_rows: int = 2**20
    reduced_bytes: int = 256 * 10**6
    repeats: int = 5


SIZES: Final = {"full": Size(), "small": Size(2 * MIB, 8, 2**21, 2**16, 2**22, 2)}


def wait() -> None:
    """Until the device has done everything."""
    cupy.cuda.Device(0).synchronize()


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of calls, to the end of what they began on the device; a first round is not counted."""

    def to_its_end(call: Callable[[], Any]) -> Callable[[], None]:
        def ended() -> None:
            call()
            wait()

        return ended

    ended = {name: to_its_end(call) for name, call in calls.items()}
    for call in ended.values():
        call()
    return {name: median(seconds) for name, seconds in interleaved(ended, repeats).items()}


def rows(size: Size) -> np.ndarray[Any, Any]:
    """What is fed: all chunks."""
    num_rows = size.chunk_bytes // _ROW_BYTES * size.num_chunks
    return np.random.default_rng(0).random((num_rows, _ROW), np.float32)


def fed(strategy: Any, dataset: Any, step: Callable[[Any], Any]) -> None:
    """A pass over a dataset on the replica."""
    for batch in strategy.distribute_dataset(dataset):
        strategy.run(step, args=(batch,))


def pinned_copies(size: Size) -> Callable[[], None]:
    """As many copies of one pinned buffer as there are chunks."""
    pinned = cupy.cuda.alloc_pinned_memory(size.chunk_bytes)
    target = cupy.empty(size.chunk_bytes, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)

    def copy() -> None:
        for _ in range(size.num_chunks):
            target.data.copy_from_host_async(pinned.ptr, size.chunk_bytes, stream)

    # It keeps the buffer.
    copy.pinned = pinned  # type: ignore[attr-defined]
    return copy


def nothing(x: Any) -> None:
    """An empty step."""


def loaded(array: np.ndarray[Any, Any], chunk_rows: int) -> Callable[[], None] | None:
    """A pass of PyTorch's ``DataLoader`` with pinned memory over the same chunks; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    from torch.utils.data import DataLoader, Dataset

    whole = torch.from_numpy(array)

    class Chunks(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(whole) // chunk_rows

        def __getitem__(self, number: int) -> Any:
            return whole[number * chunk_rows : (number + 1) * chunk_rows]

    def load() -> None:
        for batch in DataLoader(Chunks(), batch_size=None, pin_memory=True):
            batch.to("cuda:0", non_blocking=True)

    return load


def feeding(size: Size) -> Iterator[Figure]:
    """Chunks fed to an empty step."""
    strategy = daskdist.MirroredStrategy(["GPU:0"])
    array = rows(size)
    chunk_rows = size.chunk_bytes // _ROW_BYTES
    dataset = daskdist.Dataset.from_tensor_slices(array).batch(chunk_rows)

    def naive() -> None:
        for batch in dataset:
            cupy.asarray(batch)

    load = loaded(array, chunk_rows)
    calls = {"ours": lambda: fed(strategy, dataset, nothing), "pinned": pinned_copies(size), "naive": naive}
    if load is not None:
        calls["torch"] = load
    seconds = timed(calls, size.repeats)
    speed = {name: array.nbytes / 1e9 / each for name, each in seconds.items()}
    what = f"fed to an empty step, chunks of {size.chunk_bytes // MIB} MiB"
    yield Figure(what, speed["ours"], "GB/s", speed["pinned"], "one pinned buffer", 0.9, "ratio")
    yield Figure(what, speed["ours"], "GB/s", speed["naive"], "cupy.asarray(batch)", 1.0, "ratio")
    if load is not None:
        yield Figure(what, speed["ours"], "GB/s", speed["torch"], "DataLoader, pinned", 1.0, "ratio")


def small_chunks(size: Size) -> Iterator[Figure]:
    """Chunks of 128 rows."""
    strategy = daskdist.MirroredStrategy(["GPU:0"])
    array = rows(size)[: 2**18]
    dataset = daskdist.Dataset.from_tensor_slices(array).batch(128)

    def ours() -> None:
        for _ in strategy.distribute_dataset(dataset):
            pass

    def naive() -> None:
        for batch in dataset:
            cupy.asarray(batch)

    seconds = timed({"ours": ours, "naive": naive}, size.repeats)
    num_chunks = len(array) / 128
    per_s = {name: num_chunks / each for name, each in seconds.items()}
    yield Figure("chunks of 128 rows", per_s["ours"], "chunks/s", per_s["naive"], "cupy.asarray(batch)", 1.0, "ratio")


def behind_steps(size: Size) -> Iterator[Figure]:
    """Chunks fed to a step that takes as long as the copy of one: what the step takes more."""
    strategy = daskdist.MirroredStrategy(["GPU:0"])
    array = rows(size)
    chunk_rows = size.chunk_bytes // _ROW_BYTES
    dataset = daskdist.Dataset.from_tensor_slices(array).batch(chunk_rows)
    copying = timed({"pinned": pinned_copies(size)}, size.repeats)["pinned"] / size.num_chunks
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ns) {'
        " long long begin, now;"
        ' asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));'
        ' do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns); }',
        "spin",
    )

    def step(x: Any) -> None:
        spin((1,), (1,), (np.int64(copying * 1e9),))

    resident = cupy.asarray(array[:chunk_rows])

    def alone() -> None:
        for _ in range(size.num_chunks):
            strategy.run(step, args=(resident,))

    seconds = timed({"ours": lambda: fed(strategy, dataset, step), "alone": alone}, size.repeats)
    per_step = {name: each / size.num_chunks * 1e3 for name, each in seconds.items()}
    yield Figure(
        "a step as long as the copy of its chunk",
        per_step["ours"],
        "ms",
        per_step["alone"],
        "the step alone",
        1.05,
        "ratio",
        "most",
    )


def shuffling(size: Size) -> Iterator[Figure]:
    """Rows of 64 bytes that are on the device, shuffled and batched there."""
    strategy = daskdist.MirroredStrategy(["GPU:0"])
    array = np.random.default_rng(0).random((size.shuffled_rows, _ROW), np.float32)
    kept = daskdist.Dataset.from_tensor_slices(array).cache()
    dataset = kept.shuffle(size.shuffled_rows, seed=1).batch(size.batch_rows)
    there = dataset.with_options(daskdist.Options(shuffle_on_device=True))
    resident = cupy.asarray(array)
    order = cupy.random.permutation(size.shuffled_rows)

    def gathered() -> None:
        for start in range(0, size.shuffled_rows, size.batch_rows):
            resident.take(order[start : start + size.batch_rows], axis=0)

    seconds = timed(
        {
            "there": lambda: fed(strategy, there, nothing),
            "host": lambda: fed(strategy, dataset, nothing),
            "gathered": gathered,
            "drawn": lambda: np.random.default_rng(0).permutation(size.shuffled_rows),
        },
        size.repeats,
    )
    per_s = {name: size.shuffled_rows / each / 1e6 for name, each in seconds.items()}
    what = "rows of 64 bytes, shuffled and batched on the device"
    yield Figure(what, per_s["there"], "M rows/s", per_s["gathered"], "gathered only", 500.0)
    yield Figure(what, per_s["there"], "M rows/s", per_s["host"], "shuffled on the host", 1.0, "ratio")
    yield Figure(what, per_s["there"], "M rows/s", per_s["drawn"], "NumPy's draw of an order")


def reducing(size: Size) -> Iterator[Figure]:
    """A chunk reduced on the device."""
    strategy = daskdist.MirroredStrategy(["GPU:0"])
    array = cupy.random.random((size.reduced_bytes // _ROW_BYTES, _ROW), cupy.float32)
    other = cupy.empty_like(array)
    value = daskdist.PerReplica([array])
    times = 20

    def ours() -> None:
        for _ in range(times):
            strategy.reduce("SUM", value, axis=(0, 1))

    def by_rows() -> None:
        for _ in range(times):
            strategy.reduce("SUM", value, axis=0)

    def copied() -> None:
        for _ in range(times):
            other[...] = array

    seconds = timed({"all": ours, "rows": by_rows, "copied": copied}, size.repeats)
    speed = {name: times * array.nbytes / 1e9 / each for name, each in seconds.items()}
    peer = 2 * speed["copied"], "memory, by copying"
    what = f"reduce(SUM) of {array.nbytes // 10**6} MB float32"
    yield Figure(f"{what}, to a number", speed["all"], "GB/s", *peer, 0.6, "ratio")
    yield Figure(f"{what}, along the rows", speed["rows"], "GB/s", *peer, 0.6, "ratio")


BENCHMARKS: Final[dict[str, Callable[[Size], Iterable[Figure]]]] = {
    "feeding": feeding,
    "small-chunks": small_chunks,
    "behind-steps": behind_steps,
    "shuffling": shuffling,
    "reducing": reducing,
}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    found = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"on {found}, CuPy {cupy.__version__}", file=sys.stderr)
    start = time.perf_counter()
    figures = measured(BENCHMARKS, options.only or BENCHMARKS, size)
    print(f"took {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return report(figures, size, options)


if __name__ == "__main__":
    sys.exit(main())
