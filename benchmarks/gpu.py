"""Measure what one GPU is fed, shuffles and reduces, each beside what the machine can do in the same run.

    python benchmarks/gpu.py [--only NAME ...] [--size small] [--json] [--check]

It needs a GPU that CuPy sees, and nothing beside CuPy that daskdist does not need; with PyTorch installed its
``DataLoader`` is measured too. Each part runs in a process of its own, so that none begins with the memory pools and
threads of another. The data are chunks of float32 rows of 64 bytes, which are fed from memory, in the order they lie
in, to one replica. Floors are one pinned buffer copied to the device again and again, and for reductions one array
copied to another on the device, which moves each byte twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from measure import MIB, Figure, Memory, arguments, interleaved, report

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

_DEVICE: Final = "GPU:0"
_ROW: Final = 16
_ROW_BYTES: Final = 4 * _ROW
# The number of first steps that are not timed, in which memory is allocated and threads start.
_WARM_STEPS: Final = 8
# The number of passes over the rows that are fed and timed together.
_REPEATED: Final = 4
_SAMPLE_S: Final = 0.02
# The most seconds that one part may take.
_PART_S: Final = 900


@dataclass(frozen=True)
class Size:
    """Sizes of the data and numbers of repetitions.

    Parameters
    ----------
    chunk_bytes, num_chunks
        The chunks that are fed.
    num_steps, step_ms
        The steps during which data is copied, and the time that each takes on the device.
    shuffled_rows, batch_rows
        The rows that are shuffled on the device, and those of a batch.
    reduced_bytes
        The sizes of the arrays that are reduced.
    repeats
        The number of times that each thing is timed, all in turn.
    """

    chunk_bytes: int = 64 * MIB
    num_chunks: int = 48
    num_steps: int = 300
    step_ms: float = 5.0
    shuffled_rows: int = 2**25
    batch_rows: int = 2**20
    reduced_bytes: tuple[int, ...] = (256 * 10**6, 2 * 10**9)
    repeats: int = 5


SIZES: Final = {"full": Size(), "small": Size(2 * MIB, 8, 12, 1.0, 2**21, 2**16, (2**22,), 2)}


def wait() -> None:
    """Wait until the device has done everything."""
    cupy.cuda.Device(0).synchronize()


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of calls, up to the end of what they began on the device, after a first round."""

    def to_its_end(call: Callable[[], Any]) -> Callable[[], None]:
        def ended() -> None:
            call()
            wait()

        return ended

    ended = {name: to_its_end(call) for name, call in calls.items()}
    for call in ended.values():
        call()
    return {name: median(seconds) for name, seconds in interleaved(ended, repeats).items()}


def seconds_by_events(call: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds that the current stream takes for a call, by events before and after it."""
    before, after = cupy.cuda.Event(), cupy.cuda.Event()
    seconds = []
    for number in range(repeats + 1):
        before.record()
        call()
        after.record()
        after.synchronize()
        if number:
            seconds.append(cupy.cuda.get_elapsed_time(before, after) / 1e3)
    return median(seconds)


def rows(size: Size) -> np.ndarray[Any, Any]:
    """Return the rows of all chunks that are fed."""
    num_rows = size.chunk_bytes // _ROW_BYTES * size.num_chunks
    return np.random.default_rng(0).random((num_rows, _ROW), np.float32)


def fed(strategy: Any, dataset: Any, step: Callable[[Any], Any], *options: Any) -> dict[str, Any]:
    """Run a step on the replica for each batch of a pass, and return the pass's figures."""
    steps = iter(strategy.distribute_dataset(dataset, *options))
    for batch in steps:
        strategy.run(step, args=(batch,))
    wait()
    figures: dict[str, Any] = steps.stats()
    return figures


def in_words(stats: dict[str, Any]) -> str:
    """Return the figures of a pass as text."""
    figures = {**stats, **stats.get("device", {})}
    words = (f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float))
    return f"stats(): {', '.join(words)}"


def pinned_copies(size: Size) -> Callable[[], None]:
    """Return a call that makes as many copies of one pinned buffer as there are chunks."""
    pinned = cupy.cuda.alloc_pinned_memory(size.chunk_bytes)
    target = cupy.empty(size.chunk_bytes, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)

    def copy() -> None:
        for _ in range(size.num_chunks):
            target.data.copy_from_host_async(pinned.ptr, size.chunk_bytes, stream)

    # Keep the buffer alive.
    copy.pinned = pinned  # type: ignore[attr-defined]
    return copy


def nothing(x: Any) -> None:
    """Do nothing."""


def loaded(array: np.ndarray[Any, Any], chunk_rows: int, num_workers: int) -> Callable[[], None] | None:
    """Return a pass of PyTorch's ``DataLoader`` with pinned memory over the same chunks; None without PyTorch."""
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

    # Worker processes are forked, so that they find the class and the array; they do not touch the GPU.
    workers = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(Chunks(), batch_size=None, pin_memory=True, persistent_workers=num_workers > 0, **workers)

    def load() -> None:
        for batch in loader:
            batch.to("cuda:0", non_blocking=True)

    return load


def feeding(size: Size) -> Iterator[Figure]:
    """Measure chunks fed to an empty step, packed in pinned memory and from page-locked arrays."""
    strategy = daskdist.MirroredStrategy([_DEVICE])
    array = rows(size)
    chunk_rows = size.chunk_bytes // _ROW_BYTES
    dataset = daskdist.Dataset.from_tensor_slices(array).batch(chunk_rows)
    # A pass over the rows takes some 60 ms: more of them show what a step takes, without the start.
    repeated = dataset.repeat(_REPEATED)
    locked = daskdist.InputOptions(pin_arrays=True)
    # An array of its own, as its pages stay locked.
    pinned = daskdist.Dataset.from_tensor_slices(array.copy()).batch(chunk_rows).repeat(_REPEATED)
    copies = pinned_copies(size)

    def naive() -> None:
        for batch in dataset:
            cupy.asarray(batch)

    def repeated_copies() -> None:
        for _ in range(_REPEATED):
            copies()

    calls = {
        "ours": lambda: fed(strategy, repeated, nothing),
        "page-locked": lambda: fed(strategy, pinned, nothing, locked),
        "pinned": repeated_copies,
        "naive": naive,
    }
    for num_workers in (0, 4):
        load = loaded(array, chunk_rows, num_workers)
        if load is not None:
            calls[f"DataLoader, pinned, {num_workers} workers"] = load
    seconds = timed(calls, size.repeats)
    passes = {name: _REPEATED if name in ("ours", "page-locked", "pinned") else 1 for name in calls}
    speeds = {name: passes[name] * array.nbytes / 1e9 / each for name, each in seconds.items()}
    ours, floor = speeds.pop("ours"), speeds.pop("pinned")
    what = f"fed to an empty step, chunks of {size.chunk_bytes // MIB} MiB"
    note = in_words(fed(strategy, repeated, nothing))
    yield Figure(what, ours, "GB/s", floor, "one pinned buffer", 0.9, "ratio", note=note)
    from_locked = f"{what}, of page-locked arrays"
    yield Figure(from_locked, speeds.pop("page-locked"), "GB/s", floor, "one pinned buffer", 0.9, "ratio")
    yield Figure(what, ours, "GB/s", speeds.pop("naive"), "cupy.asarray(batch)", 1.0, "ratio")
    for name, speed in speeds.items():
        yield Figure(what, ours, "GB/s", speed, name, 2.0, "ratio")


def small_chunks(size: Size) -> Iterator[Figure]:
    """Measure chunks of 128 rows, and of 4 MiB."""
    strategy = daskdist.MirroredStrategy([_DEVICE])
    array = rows(size)
    for name, chunk_rows, num_rows in (("128 rows", 128, 2**18), ("4 MiB", 2**16, 2**24)):
        dataset = daskdist.Dataset.from_tensor_slices(array[:num_rows]).batch(chunk_rows)

        def ours(dataset: daskdist.Dataset = dataset) -> None:
            for _ in strategy.distribute_dataset(dataset):
                pass

        def naive(dataset: daskdist.Dataset = dataset) -> None:
            for batch in dataset:
                cupy.asarray(batch)

        seconds = timed({"ours": ours, "naive": naive}, size.repeats)
        num_chunks = len(array[:num_rows]) / chunk_rows
        ours_per_s, naive_per_s = (num_chunks / seconds[call] for call in ("ours", "naive"))
        yield Figure(f"chunks of {name}", ours_per_s, "chunks/s", naive_per_s, "cupy.asarray(batch)", 1.0, "ratio")


def during_steps(size: Size) -> Iterator[Figure]:
    """Measure the share of the copies that is hidden by steps of known duration."""
    strategy = daskdist.MirroredStrategy([_DEVICE])
    array = rows(size)
    chunk_rows = size.chunk_bytes // _ROW_BYTES
    dataset = daskdist.Dataset.from_tensor_slices(array).batch(chunk_rows).repeat()
    copy_s = timed({"pinned": pinned_copies(size)}, size.repeats)["pinned"] / size.num_chunks
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ns) {'
        " long long begin, now;"
        ' asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));'
        ' do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns); }',
        "spin",
    )

    def step(x: Any) -> None:
        spin((1,), (1,), (np.int64(size.step_ms * 1e6),))

    def seconds_a_step(next_batch: Callable[[], Any]) -> float:
        start = 0.0
        for number in range(_WARM_STEPS + size.num_steps):
            if number == _WARM_STEPS:
                wait()
                start = time.perf_counter()
            strategy.run(step, args=(next_batch(),))
        wait()
        return (time.perf_counter() - start) / size.num_steps

    resident = cupy.asarray(array[:chunk_rows])
    alone = seconds_a_step(lambda: resident)
    steps = iter(strategy.distribute_dataset(dataset))
    ours = seconds_a_step(lambda: next(steps))
    note = in_words(steps.stats())
    steps.close()
    what = f"a step of {size.step_ms:g} ms and the next chunk of {size.chunk_bytes // MIB} MiB"
    yield Figure(what, ours * 1e3, "ms", alone * 1e3, "the step alone", note=note)
    hidden = 1 - max(ours - alone, 0) / copy_s
    yield Figure(f"share of copies hidden by steps of {size.step_ms:g} ms", hidden, "", target=0.95)


def shuffling(size: Size) -> Iterator[Figure]:
    """Measure rows of 64 bytes that are on the device, shuffled and batched there."""
    strategy = daskdist.MirroredStrategy([_DEVICE])
    array = np.random.default_rng(0).random((size.shuffled_rows, _ROW), np.float32)
    kept = daskdist.Dataset.from_tensor_slices(array).cache()
    dataset = kept.shuffle(size.shuffled_rows, seed=1).batch(size.batch_rows)
    there = dataset.with_options(daskdist.Options(shuffle_on_device=True))
    # The first pass copies the rows to the device; what is timed below finds them there.
    start = time.perf_counter()
    cold_stats = fed(strategy, there, nothing)
    cold_s = time.perf_counter() - start
    resident = cupy.asarray(array)
    order = cupy.random.permutation(size.shuffled_rows)

    def gathered() -> None:
        for first in range(0, size.shuffled_rows, size.batch_rows):
            resident.take(order[first : first + size.batch_rows], axis=0)

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
    note = in_words(fed(strategy, there, nothing))
    yield Figure(what, per_s["there"], "M rows/s", per_s["gathered"], "gathered only", 500.0, note=note)
    yield Figure(what, per_s["there"], "M rows/s", per_s["host"], "shuffled on the host", 1.0, "ratio")
    yield Figure(what, per_s["there"], "M rows/s", per_s["drawn"], "NumPy's draw of an order")
    cold, note = size.shuffled_rows / cold_s / 1e6, in_words(cold_stats)
    yield Figure(f"{what}, first epoch", cold, "M rows/s", per_s["host"], "shuffled on the host", note=note)


def reducing(size: Size) -> Iterator[Figure]:
    """Measure arrays reduced on the device, by events in the stream and by wall clock."""
    strategy = daskdist.MirroredStrategy([_DEVICE])
    for num_bytes in size.reduced_bytes:
        array = cupy.random.random((num_bytes // _ROW_BYTES, _ROW), cupy.float32)
        other = cupy.empty_like(array)
        value = daskdist.PerReplica([array])
        # About the same bytes for each size, so that starting a call weighs little.
        times = max(1, 20 * size.reduced_bytes[0] // num_bytes)
        calls: dict[str, Callable[[], Any]] = {
            "to a number": lambda value=value: strategy.reduce("SUM", value, axis=(0, 1)),
            "along the rows": lambda value=value: strategy.reduce("SUM", value, axis=0),
            "copied": lambda array=array, other=other: cupy.copyto(other, array),
        }

        def repeated(call: Callable[[], Any], times: int = times) -> Callable[[], None]:
            def repeat() -> None:
                for _ in range(times):
                    call()

            return repeat

        by_clock = timed({name: repeated(call) for name, call in calls.items()}, size.repeats)
        by_events = {name: seconds_by_events(repeated(call), size.repeats) for name, call in calls.items()}
        for clock, seconds in {"wall clock": by_clock, "events": by_events}.items():
            speeds = {name: times * array.nbytes / 1e9 / each for name, each in seconds.items()}
            copied = 2 * speeds.pop("copied")
            for name, speed in speeds.items():
                what = f"reduce(SUM) of {array.nbytes // 10**6} MB float32 {name}, by {clock}"
                yield Figure(what, speed, "GB/s", copied, "memory, by copying", 0.6, "ratio")


@contextmanager
def peaks() -> Iterator[list[Figure]]:
    """Sample the memory of the device and of this process; its figures are there when the block is over."""
    figures: list[Figure] = []
    free, total = cupy.cuda.runtime.memGetInfo()
    least_free, done = free, threading.Event()

    def sample() -> None:
        nonlocal least_free
        cupy.cuda.Device(0).use()
        while not done.wait(_SAMPLE_S):
            least_free = min(least_free, cupy.cuda.runtime.memGetInfo()[0])

    thread = threading.Thread(target=sample, name="device-memory")
    thread.start()
    memory = Memory([os.getpid()])
    try:
        with memory.sampled():
            yield figures
    finally:
        done.set()
        thread.join()
    used = (free - least_free) / MIB
    figures.append(Figure("most device memory in use, above the start", used, "MiB", total / MIB, "in all"))
    figures.append(Figure("most host memory in use, above the start", memory.above_idle_bytes / MIB, "MiB"))


BENCHMARKS: Final[dict[str, Callable[[Size], Iterable[Figure]]]] = {
    "feeding": feeding,
    "small-chunks": small_chunks,
    "during-steps": during_steps,
    "shuffling": shuffling,
    "reducing": reducing,
}


def part(name: str, size: Size) -> list[Figure]:
    """Return the figures of one part, measured in this process."""
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"measuring: {name}, on {device} with CuPy {cupy.__version__}", file=sys.stderr)
    with peaks() as memory:
        figures = list(BENCHMARKS[name](size))
    return [*figures, *(replace(figure, what=f"{name}: {figure.what}") for figure in memory)]


def part_in_process(name: str, options: argparse.Namespace) -> list[Figure]:
    """Return the figures of one part, measured in a new process."""
    command = [sys.executable, str(Path(__file__)), "--only", name, "--size", options.size, "--json"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=_PART_S)
    if done.returncode:
        sys.exit(f"the part {name} ended with {done.returncode}")
    return [Figure.of_dict(figure) for figure in json.loads(done.stdout)["figures"]]


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__, BENCHMARKS, SIZES).parse_args(argv)
    size = SIZES[options.size]
    names = options.only or list(BENCHMARKS)
    start = time.perf_counter()
    alone = len(names) == 1
    figures = [figure for name in names for figure in (part(name, size) if alone else part_in_process(name, options))]
    print(f"took {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return report(figures, size, options)


if __name__ == "__main__":
    sys.exit(main())
