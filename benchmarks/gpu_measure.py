"""All measurements on a GPU by one command: tests, figures, races, a sanitizer; a failure does not stop the others.

    python benchmarks/gpu_measure.py [--out FOLDER] [--only NAME ...] [--quick]

Each part runs in a process of its own with a time limit, and writes what it prints to a file in the folder. At the end
there is a line for each. It needs CuPy, pytest and a GPU; with PyTorch installed its loader, its streams and its
captures take part; ``compute-sanitizer`` comes with the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
BENCHMARKS: Final = ("feeding", "small-chunks", "during-steps", "shuffling", "reducing")


@dataclass(frozen=True)
class Part:
    """A command, and the seconds that it may take."""

    command: tuple[str, ...]
    most_s: float


def parts(*, is_quick: bool) -> dict[str, Part]:
    """Return the parts by name, the most important ones first."""
    python, size = sys.executable, "small" if is_quick else "full"
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-q", "-rs", "--durations=10")
    races = (python, str(HERE / "gpu_races.py"))
    found = {
        "tests": Part((*pytest, "tests/test_gpu.py"), 900),
        "captures": Part((*pytest, "tests/test_gpu.py", "-k", "capture"), 300),
    }
    for name in BENCHMARKS:
        found[name] = Part((python, str(HERE / "gpu.py"), "--only", name, "--size", size), 900)
    found["races"] = Part((*races, "--seconds", "2" if is_quick else "120"), 300)
    sanitizer = sanitizer_path()
    for tool in ("memcheck", "initcheck", "synccheck"):
        options = ("--track-stream-ordered-races", "all") if tool == "memcheck" else ()
        checked = (*races, "--seconds", "2" if is_quick else "20", "--async-allocator")
        found[tool] = Part((sanitizer, "--tool", tool, *options, "--error-exitcode", "3", *checked), 600)
    return found


def sanitizer_path() -> str:
    """Return the path of compute-sanitizer, or its name if it is not found."""
    toolkit = Path(os.environ.get("CUDA_PATH", os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    return shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{toolkit}/bin") or "compute-sanitizer"


def run(name: str, part: Part, folder: Path) -> str:
    """Run a part, and return how it ended."""
    if shutil.which(part.command[0]) is None:
        return f"not run: {part.command[0]} is not installed"
    start = time.perf_counter()
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (folder / f"{name}.txt").open("w") as file:
        try:
            done = subprocess.run(
                part.command, cwd=HERE.parent, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=part.most_s
            )
        except subprocess.TimeoutExpired:
            return f"STOPPED after {part.most_s:g} s"
    took = f"{time.perf_counter() - start:.0f} s"
    return f"passed in {took}" if done.returncode == 0 else f"ENDED WITH {done.returncode} after {took}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"))
    parser.add_argument("--only", action="append", choices=list(parts(is_quick=True)))
    parser.add_argument("--quick", action="store_true", help="use small sizes and few seconds")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    ends = {}
    for name, part in parts(is_quick=options.quick).items():
        if options.only is None or name in options.only:
            ends[name] = run(name, part, options.out)
            print(f"{name}: {ends[name]}; see {options.out / name}.txt", flush=True)
    return int(not all(end.startswith("passed") for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
