"""Functions that are called row by row, by the default number of threads compared with one."""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from measure import Figure
from spine import exhaust

import daskdist
from daskdist import Dataset, Options

_NUM_FILES: Final = 16
_LEAST: Final = 0.95


def _images(kind: str, side: int) -> list[bytes]:
    from PIL import Image

    made = []
    for seed in range(20):
        coarse = np.random.default_rng(seed).integers(0, 255, (side // 8, side // 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse.repeat(8, 0).repeat(8, 1)).save(file, kind)
        made.append(file.getvalue())
    return made


def _decoded(content: Any) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content if isinstance(content, bytes) else content.item())))


def _parsed(line: Any) -> Any:
    return json.loads(str(line))["number"] * 2


def _shortened(line: Any) -> str:
    return str(line).upper()[:20]


def _asked(line: Any) -> str:
    # Wait, as a call of a remote service does.
    time.sleep(5e-4)
    return str(line)


def _scaled(row: Any) -> Any:
    # A function that converts a value to a Python number may decide anything by it, so it is called for each row.
    return row * 2 + row.mean() if float(row[0]) > 0 else row


def _records(kind: str, side: int) -> Callable[[str, int], Dataset]:
    def made(folder: str, num_rows: int) -> Dataset:
        images = _images(kind, side)
        for number in range(_NUM_FILES):
            rows = [images[row % len(images)] for row in range(num_rows // _NUM_FILES)]
            Dataset.from_list(rows).to_tfrecord(f"{folder}/{number}")
        return daskdist.read_tfrecord(f"{folder}/*/*").map(_decoded)

    return made


def _lines(function: Callable[[Any], Any]) -> Callable[[str, int], Dataset]:
    def made(folder: str, num_rows: int) -> Dataset:
        lines = [json.dumps({"number": row, "text": f"words and more {row}"}) for row in range(num_rows // _NUM_FILES)]
        for number in range(_NUM_FILES):
            Path(folder, f"{number}.txt").write_text("\n".join(lines))
        return daskdist.read_text(f"{folder}/*.txt").map(function)

    return made


def _arrays(folder: str, num_rows: int) -> Dataset:
    for number in range(_NUM_FILES):
        rows = np.random.default_rng(number).standard_normal((num_rows // _NUM_FILES, 16))
        np.save(f"{folder}/{number}.npy", rows.astype(np.float32))
    return daskdist.read_npy(f"{folder}/*.npy").map(_scaled)


# Name -> a function that creates the dataset, and the number of rows.
_CASES: Final[dict[str, tuple[Callable[[str, int], Dataset], int]]] = {
    "JPEG images of 32 x 32, decoded by Pillow": (_records("JPEG", 32), 8_000),
    "JPEG images of 128 x 128, decoded by Pillow": (_records("JPEG", 128), 4_000),
    "PNG images of 32 x 32, decoded by Pillow": (_records("PNG", 32), 16_000),
    "lines of JSON, parsed": (_lines(_parsed), 200_000),
    "lines of text, shortened": (_lines(_shortened), 400_000),
    "rows of 16 float32, NumPy": (_arrays, 100_000),
    "lines of text, with a wait of 0.5 ms": (_lines(_asked), 1_600),
}


def by_default(part: float, repeats: int) -> Iterator[Figure]:
    """Measure rows a second with the default number of threads and with one thread, in pairs.

    Python runs in one thread at a time, so a second one is useful only if a function waits or decodes larger images.
    Without a limit on the threads that work at the same time, small images would be decoded at 0.6 to 0.75 of the
    speed, with twice the CPU time: the decoder lets other threads run several times in each image, and then has to
    wait for its turn.
    """
    for what, (make, most_rows) in _CASES.items():
        num_rows = max(int(most_rows * part), _NUM_FILES * 8)
        with tempfile.TemporaryDirectory(prefix="daskdist-benchmark-") as folder:
            rows = make(folder, num_rows).batch(64)
            pipelines = {"default": rows, "one": rows.with_options(Options(num_threads=1))}
            seconds: dict[str, list[float]] = {name: [] for name in pipelines}
            cpu_s: dict[str, list[float]] = {name: [] for name in pipelines}
            # The first round is not counted, since it opens files and learns how many threads are best.
            for number in range(2 * repeats + 1):
                for name in ("default", "one") if number % 2 else ("one", "default"):
                    start, cpu_start = time.perf_counter(), time.process_time()
                    exhaust(pipelines[name])
                    if number:
                        seconds[name].append(time.perf_counter() - start)
                        cpu_s[name].append(time.process_time() - cpu_start)
        ratio = median(one / default for default, one in zip(seconds["default"], seconds["one"], strict=True))
        rate = num_rows / 1e3 / median(seconds["one"])
        cpu_ratio = median(cpu_s["default"]) / median(cpu_s["one"])
        note = f"median of {2 * repeats} pairs; processor time {cpu_ratio:.2f} of that of one thread"
        peer = "one thread"
        yield Figure(f"{what}, row by row", rate * ratio, "k rows/s", rate, peer, _LEAST, on="ratio", note=note)
