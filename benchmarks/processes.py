"""Functions that mostly run Python code, in two additional local processes: images, and text.

::

    python benchmarks/processes.py --torch-python /path/to/python-with-torch-and-pillow

The figures are to be read beside those of two bare processes of `multiprocessing` in the same run, which do nothing but
the user's function: two cores may do less than twice the work of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import psutil
from measure import Figure, arguments, measured, report
from PIL import Image

import daskdist
from daskdist import Options
from daskdist.execute.callers.process_pool import close_pools

_PROCESSES: Final = Options(num_processes=2)
_WORD: Final = re.compile(r"\w+")
_NUMBERS: Final = {f"w{number}": number for number in range(5000)}
# The number of tasks in which bare processes do their work.
_TASKS: Final = 40
_BATCH_LINES: Final = 256


@dataclass(frozen=True)
class Size:
    """The amount of data to measure with.

    Parameters
    ----------
    num_images, text_bytes
        The number of images, of 64 by 64 pixels in five folders, and the size of the text.
    repeats
        How often each is measured.
    torch_python
        An interpreter with PyTorch and Pillow; None for no comparison.
    """

    num_images: int
    text_bytes: int
    repeats: int
    torch_python: str | None = None


SIZES: Final = {"small": Size(80, 20_000, 1), "full": Size(5000, 20_000_000, 5)}


@dataclass(frozen=True)
class Pass:
    """The seconds of a pass.

    Parameters
    ----------
    wall, first
        The time that it took, and that before its first batch.
    program, processes
        The processor time of this process, and of its processes.
    """

    wall: float
    first: float
    program: float
    processes: float


class Passes:
    """Passes that are made in turn, so that noise affects all of them.

    Parameters
    ----------
    calls
        By name, what makes a pass and returns the seconds before its first batch.
    repeats
        The number of passes of each; one more is not counted, since it may start processes.
    """

    def __init__(self, calls: dict[str, Callable[[], float]], repeats: int) -> None:
        self._passes: dict[str, list[Pass]] = {name: [] for name in calls}
        for number in range(repeats + 1):
            for name, call in calls.items():
                one = _timed(call)
                if number:
                    self._passes[name].append(one)

    def seconds(self, name: str) -> float:
        """Return the median duration."""
        return median(one.wall for one in self._passes[name])

    def note(self, names: Sequence[str], unit: str, number: float) -> str:
        """Describe passes: their processor time for each of a number of units, and the time before the first batch."""
        texts = []
        for name in names:
            program, processes, first = (
                median(getattr(one, kind) for one in self._passes[name]) for kind in ("program", "processes", "first")
            )
            what = f"{name}: {1e6 * program / number:.0f} + {1e6 * processes / number:.0f} us"
            texts.append(f"{what}, first after {first:.2f} s" if first else what)
        return f"processor time a {unit}, program + processes; " + "; ".join(texts)


def _timed(call: Callable[[], float]) -> Pass:
    # Processes that wait for their turn take no processor time.
    processes_before, program_before, start = _processes_s(), time.process_time(), time.perf_counter()
    first = call()
    wall, program = time.perf_counter() - start, time.process_time() - program_before
    return Pass(wall, first, program, _processes_s() - processes_before)


def _processes_s() -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def iterated(ds: Any) -> float:
    """Iterate over a dataset, and return the seconds before its first element."""
    start = time.perf_counter()
    batches = iter(ds)
    next(batches)
    first = time.perf_counter() - start
    for _ in batches:
        pass
    return first


def flipped(image: Any, label: Any, rng: np.random.Generator) -> Any:
    """Return an image and its class, the image flipped half of the time."""
    return image[:, ::-1] if rng.random() < 0.5 else image, label


def bare_images(files: Sequence[str], *, sends: bool) -> Any:
    """Decode and flip images; return them or their number."""
    rng = np.random.default_rng(0)
    made = [flipped(np.asarray(Image.open(file).convert("RGB")), 0, rng)[0] for file in files]
    return np.stack(made) if sends else len(made)


def tokens(line: Any) -> Any:
    """Return the numbers of the words of a line."""
    return np.array([_NUMBERS.get(word, 0) for word in _WORD.findall(str(line).lower())], np.int32)


def bare_text(path: str, span: tuple[int, int], *, sends: bool) -> Any:
    """Tokenise the lines of a part of a file; return batches of values and lengths, or the number of values."""
    with open(path, "rb") as file:
        file.seek(span[0])
        lines = file.read(span[1] - span[0]).decode().split("\n")[:-1]
    if not sends:
        return sum(len(tokens(line)) for line in lines)
    batches = []
    for start in range(0, len(lines), _BATCH_LINES):
        rows = [tokens(line) for line in lines[start : start + _BATCH_LINES]]
        batches.append((np.concatenate(rows), [len(row) for row in rows]))
    return batches


def _all_of(pool: Any, function: Callable[..., Any], tasks: Sequence[Any]) -> float:
    for _ in pool.imap(function, tasks):
        pass
    return 0.0


def _write_images(folder: str, number: int) -> list[str]:
    rng, files = np.random.default_rng(0), []
    for image in range(number):
        directory = Path(folder, f"class{image % 5}")
        directory.mkdir(exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        files.append(str(directory / f"{image:05}.jpg"))
        coarse.resize((64, 64), Image.Resampling.BILINEAR).save(files[-1], quality=85)
    return files


def images(size: Size) -> Iterator[Figure]:
    """Measure JPEG images that are decoded, flipped at random and shuffled, in batches of 64."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="daskdist-benchmark-"))
        files = _write_images(folder, size.num_images)
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(2))
        tasks = [files[k : k + 64] for k in range(0, len(files), 64)]
        ds = daskdist.read_images(folder).shuffle(5000, seed=0).map(flipped, rng=1).batch(64)
        calls = {
            "processes": partial(iterated, ds.with_options(_PROCESSES)),
            "default": partial(iterated, ds),
            "bare": partial(_all_of, pool, partial(bare_images, sends=False), tasks),
            "bare, sending images": partial(_all_of, pool, partial(bare_images, sends=True), tasks),
        }
        if size.torch_python is not None:
            calls["PyTorch, 2 workers"] = stack.enter_context(_torch(size.torch_python, folder))
        passes = Passes(calls, size.repeats)
        note = passes.note(list(calls), "image", size.num_images)
        for peer in [name for name in calls if name != "processes"]:
            rates = size.num_images / passes.seconds("processes"), size.num_images / passes.seconds(peer)
            target = 1.0 if peer == "PyTorch, 2 workers" else None
            what = "JPEG of 64 x 64, flipped at random, two processes"
            yield Figure(what, rates[0], "images/s", rates[1], peer, target, on="ratio", note=note)
            note = ""


@contextlib.contextmanager
def _torch(python: str, folder: str) -> Iterator[Callable[[], float]]:
    # The process must not find the packages of this environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, str(Path(__file__).with_name("peers") / "torch_images.py"), folder]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def call() -> float:
            process.stdin.write("pass\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return float(process.stdout.readline())  # type: ignore[union-attr]

        yield call


def text(size: Size) -> Iterator[Figure]:
    """Measure lines of text that become numbers of words, beside a plain loop in this process."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="daskdist-benchmark-"))
        path, words, rng = f"{folder}/lines.txt", list(_NUMBERS), random.Random(0)
        with open(path, "w") as file:
            while file.tell() < size.text_bytes:
                file.write(" ".join(rng.choices(words, k=20)) + "\n")
        data = Path(path).read_bytes()
        cuts = [0, *(data.index(b"\n", len(data) * k // _TASKS) + 1 for k in range(1, _TASKS)), len(data)]
        spans = list(pairwise(cuts))
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(2))

        def plain() -> float:
            with open(path) as lines:
                for line in lines:
                    tokens(line[:-1])
            return 0.0

        ds = daskdist.read_text(path).map(tokens).ragged_batch(_BATCH_LINES)
        calls = {
            "plain": plain,
            "processes": partial(iterated, ds.with_options(_PROCESSES)),
            "default": partial(iterated, ds),
            "bare": partial(_all_of, pool, partial(bare_text, path, sends=False), spans),
            "bare, sending batches": partial(_all_of, pool, partial(bare_text, path, sends=True), spans),
        }
        passes = Passes(calls, size.repeats)
        megabytes = size.text_bytes / 1e6
        note = passes.note(list(calls), "kB", size.text_bytes / 1e3)
        for name in [name for name in calls if name != "plain"]:
            what, target = f"tokenised text: {name}", 1.5 if name == "processes" else None
            rates = megabytes / passes.seconds(name), megabytes / passes.seconds("plain")
            yield Figure(what, rates[0], "MB/s", rates[1], "plain loop", target, on="ratio", note=note)
            note = ""


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {"images": images, "text": text}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, BENCHMARKS, SIZES)
    parser.add_argument("--torch-python", help="an interpreter with PyTorch and Pillow, to compare with its DataLoader")
    options = parser.parse_args(argv)
    size = Size(**{**SIZES[options.size].__dict__, "torch_python": options.torch_python})
    try:
        return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)
    finally:
        close_pools()


if __name__ == "__main__":
    sys.exit(main())
