"""Schedulers and workers that tests start from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from programs import Program


class Started:
    """Processes that a test starts and ends, each with a file for its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes] | Program] = []

    def dask(self, *arguments: str, cwd: Path | None = None, is_new: bool = False, **environment: str) -> Path:
        """Start ``dask`` with arguments, in a folder and with variables; return the file of its messages.

        A new process has imported nothing before it reads the variables; others are forked, and end without freeing
        their memory.
        """
        log = self.folder / f"{len(self.processes)}-{arguments[0]}.log"
        with open(log, "wb") as messages:
            command, options = ["-m", "dask", *arguments], {"stdout": messages, "stderr": messages, "cwd": cwd}
            if is_new:
                process = subprocess.Popen([sys.executable, *command], env=os.environ | environment, **options)
            else:
                process = Program(*command, env=environment, ends_at_once=True, **options)
            self.processes.append(process)
        return log

    def wait_for(self, path: Path, text: str) -> str:
        """Wait for text in a file, and return it."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            actual = path.read_text() if path.exists() else ""
            if text in actual:
                return actual
            ended = [process.args for process in self.processes if process.poll() is not None]
            assert not ended, f"ended: {ended}: {actual}"
            time.sleep(0.05)
        raise AssertionError(f"no {text!r} in {path.name} within 30 s: {actual}")

    def end(self) -> None:
        # End the scheduler last: a worker that ends tells it so, and waits if it is gone.
        schedulers = [process for process in self.processes if "scheduler" in process.args]
        workers = [process for process in self.processes if process not in schedulers]
        for processes in (workers, schedulers):
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
