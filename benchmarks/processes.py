"""Functions that mostly run Python code, in two additional local processes: images, and text.

::

    python benchmarks/processes.py --torch-python /path/to/python-with-torch-and-pillow
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from measure import Figure, arguments, interleaved, measured, report
from spine import exhaust

import daskdist
from daskdist import Options
from daskdist.execute.callers.process_pool import close_pools

_PROCESSES: Final = Options(num_processes=2)
_WORD: Final = re.compile(r"\w+")
_NUMBERS: Final = {f"w{number}": number for number in range(5000)}


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


def flipped(image: Any, label: Any, rng: np.random.Generator) -> Any:
    """Return an image and its class, the image flipped half of the time."""
    return image[:, ::-1] if rng.random() < 0.5 else image, label


def tokens(line: Any) -> Any:
    """Return the numbers of the words of a line."""
    return np.array([_NUMBERS.get(word, 0) for word in _WORD.findall(str(line).lower())], np.int32)


def images(size: Size) -> Iterator[Figure]:
    """Measure JPEG images that are decoded, flipped at random and shuffled, in batches of 64."""
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        rng = np.random.default_rng(0)
        for number in range(size.num_images):
            directory = Path(folder, f"class{number % 5}")
            directory.mkdir(exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            coarse.resize((64, 64), Image.Resampling.BILINEAR).save(directory / f"{number:05}.jpg", quality=85)
        ds = daskdist.read_images(folder).shuffle(5000, seed=0).map(flipped, rng=1).batch(64)
        calls = {"default": partial(exhaust, ds), "processes": partial(exhaust, ds.with_options(_PROCESSES))}
        # The first passes are not counted, since they start processes.
        for call in calls.values():
            call()
        rates = {name: size.num_images / median(s) for name, s in interleaved(calls, size.repeats).items()}
        what = "JPEG of 64 x 64, flipped at random, two processes"
        yield Figure(what, rates["processes"], "images/s", rates["default"], "default")
        if size.torch_python is not None:
            script = Path(__file__).with_name("peers") / "torch_images.py"
            command = [size.torch_python, str(script), folder, str(size.repeats)]
            # The process must not find the packages of this environment.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=600)
            rate = median(json.loads(done.stdout))
            yield Figure(what, rates["processes"], "images/s", rate, "PyTorch, 2 workers", 1.0, on="ratio")


def text(size: Size) -> Iterator[Figure]:
    """Measure lines of text that become numbers of words, beside a plain loop in this process."""
    with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
        path, words, rng = f"{folder}/lines.txt", list(_NUMBERS), random.Random(0)
        with open(path, "w") as file:
            while file.tell() < size.text_bytes:
                file.write(" ".join(rng.choices(words, k=20)) + "\n")

        def plain() -> int:
            with open(path) as lines:
                return sum(len(tokens(line[:-1])) for line in lines)

        ds = daskdist.read_text(path).map(tokens).ragged_batch(256)
        calls: dict[str, Callable[[], Any]] = {
            "plain": plain,
            "default": partial(exhaust, ds),
            "processes": partial(exhaust, ds.with_options(_PROCESSES)),
        }
        for call in calls.values():
            call()
        seconds = {name: median(times) for name, times in interleaved(calls, size.repeats).items()}
        megabytes = size.text_bytes / 1e6
        for name, target in (("processes", 1.5), ("default", None)):
            what = f"tokenised text, {'two processes' if name == 'processes' else name}"
            floor = megabytes / seconds["plain"]
            yield Figure(what, megabytes / seconds[name], "MB/s", floor, "plain loop", target, on="ratio")


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
