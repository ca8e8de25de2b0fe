"""Faults of worker processes: they are killed, stopped for a while, or slowed."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Any, Final, Literal

from daskdist.errors import ArgumentError
from daskdist.execute.callers.cluster_requests import run_on_workers

# Shell commands for a process, after a delay. A slowed process runs for a tenth of the time.
_COMMANDS: Final = {
    "pause": "kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}",
    "slow": "for i in $(seq {tenths}); do kill -STOP {pid}; sleep .09; kill -CONT {pid} || exit; sleep .01; done",
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

    def inflict(self, client: Any, address: str) -> None:
        """Inflict the fault on the process of a worker."""
        # A worker that is killed does not answer.
        run_on_workers(client, self.suffer, workers=[address], on_error="ignore")

    def suffer(self) -> None:
        """Inflict the fault on this process: kill it now, or stop it in a moment."""
        seconds, pid = self.seconds, os.getpid()
        if self.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        command = _COMMANDS[self.kind].format(pid=pid, seconds=seconds, tenths=round(10 * seconds))
        # The shell is no part of this process, and so continues while that is stopped.
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {_MOMENT_S}; {command}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
