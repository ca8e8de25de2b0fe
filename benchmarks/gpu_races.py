"""Look for races on a GPU: batches are used late, in streams of other owners, while graphs are captured.

    python benchmarks/gpu_races.py [--seconds 120] [--device GPU:0] [--async-allocator]

Each round makes passes over known rows, copied from ordinary and from page-locked memory, and gathered on the device.
Every batch is used in one of several streams, including PyTorch's if it is installed. Other work delays these streams,
so that memory that is written or read too early changes a sum. Meanwhile another thread captures graphs in the
strictest mode, which forbids allocations of other threads in their default mode: sums are computed in the relaxed one,
steps are taken in the default one. The exit code is 1 at the first wrong sum. Under ``compute-sanitizer``, give few
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import daskdist
from daskdist.devices import device, on_host
from daskdist.devices.cuda_streams import beside_captures

_ROWS: Final = 2**16
# Numbers of rows of 64 bytes in a batch.
_BATCHES: Final = (96, 4096, 30_000)
_NUM_STREAMS: Final = 3
# The number of sums that are checked together.
_NUM_LATE: Final = 16
# A kernel that runs for this number of cycles of the GPU's clock, some 50 microseconds.
_TURNS: Final = 100_000
_SPIN: Final = """
extern "C" __global__ void spin(long long turns) {
    long long start = clock64();
    while (clock64() - start < turns) {}
}
"""


class WrongSumError(Exception):
    """A batch had other values than its rows."""


@dataclass(frozen=True)
class Consumer:
    """A stream that uses batches.

    Parameters
    ----------
    current
        Returns a context in which the stream is current.
    beside_captures
        Returns a context in which work does not disturb captures of other threads.
    hold_up
        Keeps it busy for a moment.
    total
        Returns the sum of a batch, on the device.
    on_host
        Returns a sum as a number.
    """

    current: Callable[[], Any]
    beside_captures: Callable[[], Any]
    hold_up: Callable[[], None]
    total: Callable[[Any], Any]
    on_host: Callable[[Any], Any]


@contextlib.contextmanager
def captures(name: str) -> Iterator[list[int]]:
    """Capture graphs in another thread meanwhile, and launch them; yield the number of captures."""
    counts, errors = [0], []
    is_over = threading.Event()

    def capture() -> None:
        import cupy

        with cupy.cuda.Device(int(name.rpartition(":")[2])):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                array = cupy.empty(1000, np.float32)
                cupy.copyto(array, cupy.asarray(np.ones(1000, np.float32)))
                cupy.multiply(array, 1, out=array)
                while not is_over.wait(0.001):
                    stream.begin_capture(0)
                    cupy.multiply(array, 1, out=array)
                    stream.end_capture().launch(stream)
                    stream.synchronize()
                    counts[0] += 1

    def run() -> None:
        try:
            capture()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="captures")
    if name.startswith("GPU"):
        thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join(60)
    if errors:
        raise errors[0]


def consumers_of(name: str) -> list[Consumer]:
    """Return streams of several owners."""
    here = device(name)
    spin: Callable[[], None] = lambda: None  # noqa: E731 - replaced below
    beside: Callable[[], Any] = contextlib.nullcontext
    if name.startswith("GPU"):
        import cupy

        beside = beside_captures

        kernel = cupy.RawKernel(_SPIN, "spin")
        spin = lambda: kernel((1,), (1,), (np.int64(random.randrange(_TURNS)),))  # noqa: E731

    def total(batch: Any) -> Any:
        return here.namespace.sum(batch, dtype=here.namespace.int64)

    streams = [here.stream() for _ in range(_NUM_STREAMS)]
    consumers = [Consumer(functools.partial(here.using, stream), beside, spin, total, on_host) for stream in streams]
    with contextlib.suppress(ImportError):
        import torch

        if name.startswith("GPU") and torch.cuda.is_available():
            theirs = torch.cuda.Stream(name.lower().replace("gpu", "cuda"))
            consumers.append(
                Consumer(
                    lambda: torch.cuda.stream(theirs),
                    beside,
                    lambda: torch.cuda._sleep(random.randrange(_TURNS)),
                    lambda batch: daskdist.to_torch(batch).sum(dtype=torch.int64),
                    lambda total: total.item(),
                )
            )
    return consumers


def look(name: str, seconds: float) -> tuple[int, int]:
    """Compare sums until the time is over; return the number of batches and of captures.

    Raises
    ------
    WrongSumError
        A batch had other values than its rows.
    """
    strategy = daskdist.MirroredStrategy([name])
    rows = np.random.default_rng(0).integers(0, 2**20, (_ROWS, 16), np.int32)
    consumers, num_batches = consumers_of(name), 0
    kinds = itertools.cycle(itertools.product(_BATCHES, ("copied", "pinned", "gathered")))
    end = time.monotonic() + seconds
    with captures(name) as num_captures:
        while time.monotonic() < end:
            size, kind = next(kinds)
            dataset = daskdist.Dataset.from_tensor_slices(rows)
            if kind == "gathered":
                dataset = dataset.shuffle(_ROWS // 4, seed=1, reshuffle_each_iteration=False)
            dataset = dataset.batch(size)
            expected = [int(batch.sum(dtype=np.int64)) for batch in dataset]
            dataset = dataset.with_options(daskdist.Options(shuffle_on_device=kind == "gathered"))
            steps = iter(strategy.distribute_dataset(dataset, daskdist.InputOptions(pin_arrays=kind == "pinned")))
            late: list[tuple[int, Any, Consumer]] = []
            for place, number in enumerate(expected):
                consumer = random.choice(consumers)
                with consumer.current():
                    batch = next(steps)
                    with consumer.beside_captures():
                        consumer.hold_up()
                        late.append((number, consumer.total(batch), consumer))
                    # Release the batch before its sum is computed, so that its memory may be used again too early.
                    del batch
                num_batches += 1
                if len(late) == _NUM_LATE or place == len(expected) - 1:
                    check(late, f"{kind}, batches of {size}")
                if time.monotonic() > end:
                    break
            check(late, f"{kind}, batches of {size}")
            steps.close()
    return num_batches, num_captures[0]


def check(late: list[tuple[int, Any, Consumer]], what: str) -> None:
    """Compare sums with those of the rows, and forget them."""
    for expected, total, consumer in late:
        with consumer.current(), consumer.beside_captures():
            found = int(consumer.on_host(total))
        if found != expected:
            raise WrongSumError(f"{what}: a batch adds up to {found}, its rows to {expected}")
    late.clear()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--device", default="GPU:0")
    parser.add_argument("--async-allocator", action="store_true", help="use CUDA's stream-ordered allocator")
    parser.add_argument("--register", help="a module that registers the kind of the device")
    options = parser.parse_args(argv)
    if options.register:
        importlib.import_module(options.register).register()
    if options.async_allocator:
        import cupy

        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    try:
        num_batches, num_captures = look(options.device, options.seconds)
    except WrongSumError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{num_batches} batches have the sums of their rows; {num_captures} captures beside them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
