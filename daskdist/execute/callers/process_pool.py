"""`ProcessPool`: local processes that make calls, whose arrays come back by shared memory."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cloudpickle
import dask

from daskdist.config import all_settings
from daskdist.errors import ClusterError, WaitTimeoutError
from daskdist.waiting import stretches

# Arrays of fewer bytes in all travel with the message.
_SMALL_BYTES: Final = 2**16
# Arrays in a file begin at multiples of this.
_ALIGNMENT: Final = 64
# Where files are memory, on Linux.
_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "daskdist-processes-"
_MOST_FUNCTIONS: Final = 64
# Attempts of a call whose processes end.
_MOST_ATTEMPTS: Final = 3
# Functions that this process loaded, by the file of their pickle.
_loaded: Final[OrderedDict[str, Any]] = OrderedDict()


@dataclass(frozen=True)
class PackedArrays:
    """A pickled value whose arrays are in a file of shared memory.

    Parameters
    ----------
    pickled
        The pickle without its buffers.
    buffers
        The buffers, if they are small; None if they are in the file.
    path
        The file, which its reader removes.
    spans
        The beginning, the end and the writability of each buffer in the file.
    """

    pickled: bytes
    buffers: list[bytearray] | None
    path: str = ""
    spans: tuple[tuple[int, int, bool], ...] = ()

    @classmethod
    def of(cls, value: Any, folder: str) -> PackedArrays:
        """Pickle a value; its arrays go to a new file in a folder if they are large."""
        buffers: list[pickle.PickleBuffer] = []
        try:
            pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        except (pickle.PicklingError, AttributeError, TypeError):
            buffers.clear()
            pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        if sum(view.nbytes for view in views) < _SMALL_BYTES:
            return cls(pickled, list(map(bytearray, views)))
        path = f"{folder}/{uuid.uuid4().hex}"
        spans = []
        with open(path, "wb") as file:
            for view in views:
                start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(start)
                file.write(view)
                spans.append((start, start + view.nbytes, not view.readonly))
        return cls(pickled, None, path, tuple(spans))

    def value(self) -> Any:
        """Return the value; the memory of its arrays is freed with the last of them."""
        if self.buffers is not None:
            return pickle.loads(self.pickled, buffers=self.buffers)
        with open(self.path, "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        # Where files in use cannot be removed, the folder is removed at the end.
        with contextlib.suppress(PermissionError):
            os.unlink(self.path)
        views = [memory[start:stop] for start, stop, _ in self.spans]
        writable = [is_writable for *_, is_writable in self.spans]
        return pickle.loads(
            self.pickled, buffers=[view if w else view.toreadonly() for view, w in zip(views, writable, strict=True)]
        )


def call_there(function: str, arguments: PackedArrays, folder: str, settings: dict[str, Any]) -> PackedArrays:
    """Call a function, given the file of its pickle, in a worker process and pack its result."""
    loaded = _loaded.get(function)
    if loaded is None:
        loaded = _loaded[function] = cloudpickle.loads(Path(function).read_bytes())
        while len(_loaded) > _MOST_FUNCTIONS:
            _loaded.popitem(last=False)
    with dask.config.set({"daskdist": settings}):
        return PackedArrays.of(loaded(*arguments.value()), folder)


class ProcessPool:
    """Local processes that make one call at a time each.

    Parameters
    ----------
    num_processes
        The number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        remove_abandoned_folders()
        self._num_processes = num_processes
        # The directory of the files of shared memory.
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY if _MEMORY.is_dir() else None)
        self._restarting = threading.Lock()
        self._executor = self._started()
        self._is_late = False

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._num_processes, multiprocessing.get_context("spawn"))

    def add(self, function: bytes) -> str:
        """Return a file with a pickled function, which the processes read once; a read may list many files."""
        path = Path(self.folder, f"{uuid.uuid4().hex}.function")
        path.write_bytes(function)
        return str(path)

    def call(self, function: str, arguments: Sequence[Any]) -> Any:
        """Call the function of a file in one of the processes; wait for the result and return it.

        A call whose process is killed is made again.

        Raises
        ------
        ClusterError
            The processes end again and again.
        """
        settings = all_settings()
        num_attempts = 0
        while True:
            executor = self._executor
            packed = PackedArrays.of(tuple(arguments), self.folder)
            try:
                future = executor.submit(call_there, function, packed, self.folder, settings)
                for within_s in stretches("a call in a local process", "timeouts.data"):
                    if futures_wait([future], within_s).done:
                        break
                return future.result().value()
            except WaitTimeoutError:
                # Closing is not to wait for it either.
                self._is_late = True
                raise
            except BrokenExecutor as error:
                num_attempts += 1
                if num_attempts == _MOST_ATTEMPTS:
                    raise ClusterError(
                        f"local processes ended in {num_attempts} attempts of one call; they may have too little memory"
                    ) from error
                with self._restarting:
                    if self._executor is executor:
                        self._executor = self._started()

    def close(self) -> None:
        """End the processes and remove their files."""
        self._executor.shutdown(wait=not self._is_late, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: Final[dict[int, ProcessPool]] = {}
_opening: Final = threading.Lock()


def process_pool(num_processes: int) -> ProcessPool:
    """Return this program's pool of so many processes, which is started at first and kept until the program ends."""
    with _opening:
        pool = _pools.get(num_processes)
        if pool is None:
            if not _pools:
                atexit.register(close_pools)
            pool = _pools[num_processes] = ProcessPool(num_processes)
        return pool


def close_pools() -> None:
    """End all processes; the next pass that needs some starts them again."""
    with _opening:
        while _pools:
            _pools.popitem()[1].close()


def remove_abandoned_folders() -> None:
    """Remove the files of programs that were killed."""
    if not _MEMORY.is_dir():
        return
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)
