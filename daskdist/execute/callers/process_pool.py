"""`ProcessPool`: local processes that make calls, whose arrays come back by shared memory."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

import dask

from daskdist.config import all_settings, seconds
from daskdist.errors import ClusterError, WaitTimeoutError
from daskdist.execute.callers.kept_rows import function_of
from daskdist.execute.messages.failure import Failure, pickle_with_buffers
from daskdist.waiting import stretches

# Arrays of fewer bytes in all travel with the message.
_SMALL_BYTES: Final = 2**16
# Arrays in a file begin at multiples of this.
_ALIGNMENT: Final = 64
# On Linux, files in this directory are in memory.
_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "daskdist-processes-"
# The most names of data that the processes which used it are remembered for.
_MOST_NAMES: Final = 64
# The calls that a process has at a time: the one that it makes, and the next.
_CALLS_OF_PROCESS: Final = 2
# The most attempts of a call, if its processes end.
_MOST_ATTEMPTS: Final = 3
# The time to wait for a killed process to end.
_KILLED_WITHIN_S: Final = 60.0
# Libraries use one thread in each process, as in Dask's workers.
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class PackedArrays:
    """A pickled value whose arrays are in a file of shared memory.

    Parameters
    ----------
    pickled
        The pickle without its buffers.
    buffers
        The buffers, if they are small or the file has no room; None if they are in the file.
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
        """Pickle a value; its arrays go to a new file in a folder if they are large and it has room."""
        pickled, buffers = pickle_with_buffers(value)
        views = [buffer.raw() for buffer in buffers]
        if sum(view.nbytes for view in views) < _SMALL_BYTES:
            return cls(pickled, list(map(bytearray, views)))
        path = f"{folder}/{uuid.uuid4().hex}"
        spans = []
        try:
            with open(path, "wb") as file:
                for view in views:
                    start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                    file.seek(start)
                    file.write(view)
                    spans.append((start, start + view.nbytes, not view.readonly))
        except OSError:
            # There is no room left, such as in the 64 MB of shared memory of most containers.
            with contextlib.suppress(OSError):
                os.unlink(path)
            return cls(pickled, list(map(bytearray, views)))
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


def serve(connections: Sequence[Connection]) -> None:
    """Make calls, in a process of their own, until all connections are closed.

    Parameters
    ----------
    connections
        Each brings one call at a time: the settings, a function or the file of a pickled one, its arguments, and the
        folder for results.
    """
    connections = list(connections)
    applied = b""
    while connections:
        try:
            # An interrupt from the terminal reaches this process too; the program decides what ends.
            ready: Any = wait(connections)
        except KeyboardInterrupt:
            continue
        for connection in ready:
            try:
                settings = connection.recv_bytes()
                call = connection.recv_bytes() if settings else b""
            except (EOFError, OSError):
                call = b""
            if not call:
                connections.remove(connection)
                continue
            try:
                if settings != applied:
                    dask.config.set({"daskdist": pickle.loads(settings)})
                    applied = settings
                function, arguments, folder = pickle.loads(call)
                if isinstance(function, str):
                    function = function_of(function)
                reply: Any = PackedArrays.of(function(*arguments.value()), folder)
            except BaseException as error:
                reply = Failure.of(error)
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(reply, protocol=5))


@dataclass(eq=False)
class _Waiting:
    # A call that waits for a process; ``taken`` is the process and its connection, once it has one.
    data: str
    taken: tuple[_Process, Connection] | None = None


class _Process:
    # A process with a connection for the call that it makes, and one for the next, which is on the way meanwhile.
    def __init__(self) -> None:
        pairs = [Pipe() for _ in range(_CALLS_OF_PROCESS)]
        # `multiprocessing` would run the program's main module again.
        code = (
            f"import sys; sys.path[:], sys.argv = {sys.path!r}, {sys.argv!r}; "
            "from multiprocessing.connection import Connection; from daskdist.execute.callers import process_pool; "
            f"process_pool.serve([Connection(number) for number in {[there.fileno() for _, there in pairs]!r}])"
        )
        self.free = [here for here, _ in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env={**_ONE_THREAD, **os.environ},
            pass_fds=[there.fileno() for _, there in pairs],
        )
        for _, there in pairs:
            there.close()

    def end(self, within_s: float) -> None:
        """Wait for the end of the process, and kill it if that takes longer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._process.kill()
        self._process.wait(_KILLED_WITHIN_S)


def _dismiss(connection: Connection) -> None:
    with connection, contextlib.suppress(OSError):
        # Forked processes may have the connection too, so that closing it is not enough.
        connection.send_bytes(b"")


class ProcessPool:
    """Local processes that make one call at a time each.

    Parameters
    ----------
    num_processes
        The number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        remove_abandoned_folders()
        # The directory of the files of shared memory.
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY if _MEMORY.is_dir() else None)
        self._processes = [_Process() for _ in range(num_processes)]
        self._changed = threading.Condition()
        self._is_closed = False
        # The processes that have some data, by its name; the calls that wait for a process, oldest first.
        self._users: dict[str, list[_Process]] = {}
        self._waiting: list[_Waiting] = []
        self._num_begun = 0

    def add(self, function: bytes) -> str:
        """Return a file with a pickled function, which the processes read once; a read may list many files."""
        path = Path(self.folder, f"{uuid.uuid4().hex}.function")
        path.write_bytes(function)
        return str(path)

    def call(
        self,
        function: str | Callable[..., Any],
        arguments: Sequence[Any],
        data: str = "",
        is_over: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Call a function in one of the processes; wait for the result and return it.

        A call whose process is killed is made again.

        Parameters
        ----------
        function
            The file of a pickled function, or a function of a module.
        arguments
            Its arguments.
        data
            A name of data that processes keep: the call is made by one that has used it, unless another is idle.
        is_over
            Returns whether the call is no longer needed; it is looked at until the call is made, and at `wake`.

        Raises
        ------
        ClusterError
            The processes end again and again.
        CancelledError
            The call was not made, since it is no longer needed.
        """
        settings = pickle.dumps(all_settings())
        for _ in range(_MOST_ATTEMPTS):
            packed = PackedArrays.of(tuple(arguments), self.folder)
            call = pickle.dumps((function, packed, self.folder), protocol=5)
            process, connection = self._taken(data, is_over)
            try:
                connection.send_bytes(settings)
                connection.send_bytes(call)
                for within_s in stretches("a call in a local process", "timeouts.data"):
                    if connection.poll(within_s):
                        break
                answer = connection.recv_bytes()
            except WaitTimeoutError:
                connection.close()
                self._replace(process)
                raise
            except (EOFError, OSError):
                connection.close()
                self._replace(process)
                continue
            self._give_back(process, connection)
            reply = pickle.loads(answer)
            if isinstance(reply, Failure):
                raise reply.error()
            return reply.value()
        raise ClusterError(
            f"local processes ended in {_MOST_ATTEMPTS} attempts of one call; they may have too little memory"
        )

    def _taken(self, data: str, is_over: Callable[[], bool]) -> tuple[_Process, Connection]:
        waiting = _Waiting(data)
        with self._changed:
            self._waiting.append(waiting)
            self._assign()
            num_begun, waits = self._num_begun, self._stretches()
            while waiting.taken is None and not self._is_closed:
                if is_over():
                    self._waiting.remove(waiting)
                    raise CancelledError
                if num_begun != self._num_begun:
                    num_begun, waits = self._num_begun, self._stretches()
                self._changed.wait(next(waits))
            if waiting.taken is not None:
                return waiting.taken
        raise ClusterError("the local processes were ended while a pass needed them")

    def _stretches(self) -> Iterator[float]:
        return stretches("a local process that is free", "timeouts.data")

    def _assign(self) -> None:
        # Give calls to processes; called with the lock held. Calls that no process has the data of come first, such as
        # reads that others wait for. An idle process makes calls of others, and reads or computes the data for that.
        for is_for in (self._is_for_any, self._is_for_user, self._is_for_idle):
            for waiting in list(self._waiting):
                fitting = [process for process in self._processes if process.free and is_for(waiting.data, process)]
                if fitting:
                    process = max(fitting, key=lambda process: len(process.free))
                    self._waiting.remove(waiting)
                    waiting.taken = process, process.free.pop()
                    self._num_begun += 1
                    if waiting.data:
                        users = self._users.pop(waiting.data, [])
                        self._users[waiting.data] = users if process in users else [*users, process]
        for oldest in list(self._users)[:-_MOST_NAMES]:
            del self._users[oldest]
        self._changed.notify_all()

    def _is_for_any(self, data: str, process: _Process) -> bool:
        return data not in self._users

    def _is_for_user(self, data: str, process: _Process) -> bool:
        return process in self._users.get(data, ())

    def _is_for_idle(self, data: str, process: _Process) -> bool:
        return len(process.free) == _CALLS_OF_PROCESS

    def wake(self) -> None:
        """Let calls that wait for a process look whether they are still needed."""
        with self._changed:
            self._changed.notify_all()

    def _give_back(self, process: _Process, connection: Connection) -> None:
        with self._changed:
            if self._is_closed:
                _dismiss(connection)
            process.free.append(connection)
            self._assign()

    def _replace(self, process: _Process) -> None:
        with self._changed:
            if process not in self._processes or self._is_closed:
                return
            self._processes[self._processes.index(process)] = _Process()
            left = {data: [user for user in users if user is not process] for data, users in self._users.items()}
            self._users = {data: users for data, users in left.items() if users}
            self._assign()
        process.end(0)

    def close(self) -> None:
        """End the processes, once they have made the calls that they have, and remove their files."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for process in self._processes:
                for connection in process.free:
                    _dismiss(connection)
        for process in self._processes:
            process.end(seconds("timeouts.data"))
        shutil.rmtree(self.folder, ignore_errors=True)


# (id of the process that started it, number of processes) -> pool; a forked process has a copy of this dict.
_pools: Final[dict[tuple[int, int], ProcessPool]] = {}
_opening: Final = threading.Lock()


def process_pool(num_processes: int) -> ProcessPool:
    """Return this program's pool of so many processes, which is started at first and kept until the program ends."""
    key = (os.getpid(), num_processes)
    with _opening:
        if key not in _pools:
            if not _pools:
                atexit.register(close_pools)
            _pools[key] = ProcessPool(num_processes)
        return _pools[key]


def close_pools() -> None:
    """End all processes that this one started; the next pass that needs some starts them again."""
    with _opening:
        for key in [key for key in _pools if key[0] == os.getpid()]:
            _pools.pop(key).close()


def remove_abandoned_folders() -> None:
    """Remove the files of programs that were killed."""
    if not _MEMORY.is_dir():
        return
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)
