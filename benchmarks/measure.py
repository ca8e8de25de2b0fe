"""Tools of all benchmarks: interleaved timing, results compared with targets, tasks and memory of a cluster."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal

import dask
import numpy as np
import psutil
from distributed.diagnostics.plugin import SchedulerPlugin

import daskdist

MIB: Final = 2**20
_SAMPLE_S: Final = 0.05


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Parameters
    ----------
    what
        The name of the measurement.
    ours
        The result of daskdist, in ``unit``.
    unit
        The unit of ``ours`` and ``peer``.
    peer
        The result of the lower bound or the peer; None without one.
    peer_name
        The name of the lower bound or the peer.
    target
        The limit; None for information only.
    on
        The quantity that the target limits.
    bound
        ``"least"`` or ``"most"``: the kind of the limit.
    note
        A remark below the line.
    """

    what: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str = ""
    target: float | None = None
    on: Literal["ours", "ratio"] = "ours"
    bound: Literal["least", "most"] = "least"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """``ours`` over ``peer``."""
        return self.ours / self.peer if self.peer else None

    @property
    def holds(self) -> bool | None:
        """Return whether the target is met; None without a target."""
        value = self.ours if self.on == "ours" else self.ratio
        if self.target is None or value is None:
            return None
        return value >= self.target if self.bound == "least" else value <= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return the figure for machines."""
        return {**self.__dict__, "ratio": self.ratio, "holds": self.holds}

    @classmethod
    def of_dict(cls, figure: dict[str, Any]) -> Figure:
        """Return the figure that `as_dict` gave."""
        return cls(**{name: value for name, value in figure.items() if name not in ("ratio", "holds")})

    def cells(self) -> list[str]:
        """Return the cells of a row of the table."""
        peer = "" if self.peer is None else f"{_number(self.peer)} {self.peer_name}"
        target = ""
        if self.target is not None:
            sign = "≥" if self.bound == "least" else "≤"
            target = f"{sign} {_number(self.target)}" + (" of peer" if self.on == "ratio" else f" {self.unit}")
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        holds = {None: "", True: "yes", False: "NO"}[self.holds]
        return [self.what, f"{_number(self.ours)} {self.unit}", peer, ratio, target, holds]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(figures: Iterable[Figure]) -> str:
    """Return figures as text, one line each, with their notes."""
    figures = list(figures)
    rows = [["what", "ours", "floor or peer", "ratio", "target", "holds"], *[each.cells() for each in figures]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for place, figure in reversed(list(enumerate(figures, 1))):
        if figure.note:
            lines.insert(place + 1, f"    {figure.note}")
    return "\n".join(line.rstrip() for line in lines)


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of calls that are made in turn, ``repeats`` times, so that noise affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def import_seconds(statements: dict[str, str], repeats: int) -> dict[str, float]:
    """Return the median seconds of each statement in a fresh interpreter, without the interpreter's start."""
    code = "import time\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    # The first round is not counted, since it may write bytecode.
    for number in range(repeats + 1):
        for name, statement in statements.items():
            found = float(_fresh(code.format(statement)))
            if number:
                seconds[name].append(found)
    return {name: median(each) for name, each in seconds.items()}


def modules_after(statement: str, names: Sequence[str]) -> list[str]:
    """Return which of some modules a statement imports in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {list(names)!r} if name in sys.modules])"
    return _fresh(code).split()


def _fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def arguments(description: str | None, benchmarks: Iterable[str], sizes: Iterable[str]) -> argparse.ArgumentParser:
    """Parse the command line, which is the same for all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(benchmarks), help="run this one (may be repeated)")
    parser.add_argument("--size", choices=list(sizes), default="full")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def measured(benchmarks: dict[str, Callable[[Any], Iterable[Figure]]], names: Iterable[str], size: Any) -> list[Figure]:
    """Run some benchmarks and return their figures."""
    figures: list[Figure] = []
    for name in names:
        print(f"measuring: {name}", file=sys.stderr)
        figures += benchmarks[name](size)
    return figures


def report(figures: Sequence[Figure], size: Any, options: argparse.Namespace) -> int:
    """Print figures as the command line requests, and return the exit code."""
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "dask": dask.__version__,
            "daskdist": daskdist.__version__,
        }
        found = {"machine": machine, "size": asdict(size), "figures": [each.as_dict() for each in figures]}
        print(json.dumps(found, indent=2))
    else:
        print(table(figures))
    return int(options.check and any(figure.holds is False for figure in figures))


class TaskCounter(SchedulerPlugin):
    """A counter of the tasks that workers finish, by kind; a task that is computed twice counts twice."""

    name = "daskdist-benchmark-task-counter"

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "processing" and finish in ("memory", "erred"):
            self.counts[kind_of(key)] += 1


def kind_of(key: Any) -> str:
    """Return the kind of a task: its key without the parts that make it unique."""
    parts = str(key[0] if isinstance(key, tuple) else key).split("-")
    return "-".join(parts[:-2]) if len(parts) > 2 else parts[0]


class Memory:
    """The resident memory of processes while sampled.

    Parameters
    ----------
    pids
        The processes.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self.idle_bytes = self._now()
        self._peak_bytes = list(self.idle_bytes)

    def _now(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    @property
    def above_idle_bytes(self) -> int:
        """Return the largest growth of the memory of a process since the beginning."""
        return max(peak - idle for peak, idle in zip(self._peak_bytes, self.idle_bytes, strict=True))

    @contextlib.contextmanager
    def sampled(self) -> Iterator[Memory]:
        """Sample inside a ``with`` block."""
        done = threading.Event()

        def sample() -> None:
            while True:
                self._peak_bytes = list(map(max, self._peak_bytes, self._now()))
                if done.wait(_SAMPLE_S):
                    return

        thread = threading.Thread(target=sample, name="memory")
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()
