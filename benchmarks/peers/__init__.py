"""Other libraries, each in its own environment, since they conflict with each other; timed in turns with daskdist."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final

# Key of a library -> its name, and the script that runs it.
PEERS: Final = {
    "tf": ("tf.data", "tensorflow_data.py"),
    "torch": ("PyTorch DataLoader", "torch_loader.py"),
    "grain": ("Grain", "grain_dataset.py"),
    "ray": ("Ray Data", "ray_dataset.py"),
}
# The libraries with a data service.
SERVICES: Final = {"tf": ("tf.data service", "tensorflow_service.py")}


class Peer:
    """A library, in a process that waits for cases to run.

    Parameters
    ----------
    peer
        One of the values of `PEERS` or `SERVICES`.
    python
        An interpreter for which the library is installed.
    data
        The argument of the script; for `PEERS` it is the folder with the arrays, as `serving.Data` stores them.
    """

    def __init__(self, peer: tuple[str, str], python: str, data: str) -> None:
        self.name, script = peer
        # The process must not find the packages of this environment.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), data],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        answer = self._answer()
        self.version = answer["version"]
        self.cases: list[str] = answer["cases"]

    def run(self, case: str) -> tuple[float, int]:
        """Run a case and return its seconds and its number of batches."""
        answer = self.ask(case)
        return answer["seconds"], answer["batches"]

    def ask(self, request: str) -> Any:
        """Return the answer to a line."""
        print(request, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")[-2000:]
        raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{said}")

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._errors.close()
