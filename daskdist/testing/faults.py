"""Faults of worker processes: they are killed, stopped for a while, or slowed."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.cluster_requests import ask_scheduler, run_on_workers

# Shell commands for a process, after a delay. A slowed process runs for a tenth of the time. Each prints the state of
# the process, T, when it is stopped: it stops once it is scheduled, which takes a while on a busy machine.
_SEEN: Final = "(cat /proc/{pid}/stat || ps -o stat= -p {pid}) 2>/dev/null | sed 's/.*) //' | grep '^[Tt]'"
_STOP: Final = f"kill -STOP {{pid}} || exit; for j in $(seq 500); do {_SEEN} && break; sleep .01; done"
_COMMANDS: Final = {
    "pause": f"{_STOP}; sleep {{seconds}}; kill -CONT {{pid}}",
    "slow": f"for i in $(seq {{tenths}}); do {_STOP}; sleep .09; kill -CONT {{pid}} || exit; sleep .01; done",
}
# The delay, in which the request to the worker is answered.
_MOMENT_S: Final = 0.05


@dataclass(frozen=True)
class Fault:
    """A fault that a worker process has at a step.

    Parameters
    ----------
    kind
        ``"kill"``, ``"pause"``, which stops the process, or ``"slow"``, which leaves it a tenth of the time.
    step
        The step before which it comes, counted from 0.
    worker
        The worker, by its place in ``strategy.workers``.
    seconds
        The time that a pause or slowness takes.

    Raises
    ------
    ArgumentError
        There is no such kind, or a number is negative.

    >>> Fault("pause", step=3, seconds=2)
    Fault(kind='pause', step=3, worker=0, seconds=2)
    """

    kind: Literal["kill", "pause", "slow"]
    step: int
    worker: int = 0
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.kind not in ("kill", *_COMMANDS):
            raise ArgumentError(f"Fault: kind is {self.kind!r}; give one of 'kill', {', '.join(map(repr, _COMMANDS))}")
        if min(self.step, self.worker, self.seconds) < 0:
            raise ArgumentError(f"{self}: step, worker and seconds are at least 0")
        if os.name != "posix":
            raise ArgumentError("Fault: processes can be stopped on POSIX systems only")

    def __str__(self) -> str:
        lasting = "" if self.kind == "kill" else f" for {self.seconds:g} s"
        return f"{self.kind} worker {self.worker} at step {self.step}{lasting}"

    def inflict(self, client: Any, address: str, record: str) -> None:
        """Inflict the fault on the process of a worker. See `suffer`."""
        # A worker that is killed does not answer.
        run_on_workers(client, self.suffer, record, workers=[address], on_error="ignore")

    def suffer(self, record: str) -> None:
        """Inflict the fault on this process: kill it now, or stop it in a moment.

        Parameters
        ----------
        record
            A file to which a line is added each time that the process is seen stopped, in the directory of temporary
            files if it has no other.
        """
        seconds, pid = self.seconds, os.getpid()
        if self.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        command = _COMMANDS[self.kind].format(pid=pid, seconds=seconds, tenths=round(10 * seconds))
        # The shell is no part of this process, and so continues while that is stopped.
        with _file(record).open("a") as file:
            subprocess.Popen(
                ["/bin/sh", "-c", f"sleep {_MOMENT_S}; {command}"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


def worker_process(client: Any, address: str) -> tuple[int, float] | None:
    """Return the number of a worker's process and when it was started; None if no worker answers at the address."""
    try:
        # Dask tries for 30 seconds to reach a worker that is gone.
        if address not in ask_scheduler(client, client.scheduler.identity, n_workers=-1)["workers"]:
            return None
        processes = run_on_workers(client, _process, workers=[address], on_error="ignore")
    except (ClusterError, OSError, ValueError):
        return None
    process: tuple[int, float] | None = processes.get(address)
    return process


def num_stops(client: Any, record: str) -> int:
    """Return how often a process has been seen stopped by a fault with a record; the record is removed."""
    return max(run_on_workers(client, _num_lines, record, workers=None, on_error="ignore").values(), default=0)


def _process() -> tuple[int, float]:
    return os.getpid(), psutil.Process().create_time()


def _file(record: str) -> Path:
    return Path(tempfile.gettempdir(), record)


def _num_lines(record: str) -> int:
    try:
        text = _file(record).read_text()
        _file(record).unlink()
    except FileNotFoundError:
        return 0
    return text.count("\n")
