"""`ProcessPool`: local processes that make calls, whose arrays come back by shared memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

import cloudpickle
import dask
import numpy as np

from daskdist.config import all_settings, seconds
from daskdist.errors import ClusterError, WaitTimeoutError
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.shared_memory import MEMORY, Forks, Lease, PackedArrays, Segments, mapped
from daskdist.waiting import wait_intervals
from daskdist.watched_calls import watched

_PREFIX: Final = "daskdist-processes-"
# The most functions of which the size of the last result is remembered.
_MOST_SIZES: Final = 64
# The calls that a process has at a time: the one that it makes, and the next.
_CALLS_OF_PROCESS: Final = 2
# The most attempts of a call, if its processes end.
_MOST_ATTEMPTS: Final = 3
# Seconds between two signs of life of a process.
_SIGN_EVERY_S: Final = 0.5
# The time to wait for a killed process to end.
_KILLED_WITHIN_S: Final = 60.0
# Libraries use one thread in each process, as in Dask's workers.
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# The C library keeps the memory of arrays, of which each call needs as many again; otherwise the system would clear it
# for each call anew.
_KEPT_MEMORY: Final = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}


@lru_cache(maxsize=64)
def function_of(path: str) -> Callable[..., Any]:
    """Return the pickled function of a file, which is read once."""
    with open(path, "rb") as file:
        return cloudpickle.loads(file.read())  # type: ignore[no-any-return]


def _answer(
    function: str | Callable[..., Any], arguments: PackedArrays, folder: str, offered: str
) -> tuple[PackedArrays | Failure, bool]:
    """Make a call; return its result, and whether the memory of its arguments may still be in use."""
    memory = lent = None
    num_forks = Forks.number
    reply: PackedArrays | Failure
    try:
        if isinstance(function, str):
            function = function_of(function)
        if arguments.path:
            memory = np.asarray(Lease(mapped(arguments.path)))
            lent = weakref.ref(memory)
        segment = mapped(offered) if offered else None
        result = watched("a call in a local process", function, *arguments.value(memory))
        reply = PackedArrays.of(result, folder, lambda num_bytes: segment)
        del result
    except BaseException as error:
        reply = Failure.of(error)
    del memory
    # Threads and objects of this process may still use the arguments, and a forked process has copies of all
    # references.
    return reply, lent is not None and (lent() is not None or Forks.number > num_forks)


def serve(connections: Sequence[Connection]) -> None:
    """Make calls in this process until all connections are closed.

    Parameters
    ----------
    connections
        Each brings one call at a time: the settings, a function or the file of a pickled one, its arguments, the folder
        for results, and the file of a segment for the result, or nothing.
    """
    connections = list(connections)
    applied, folder, program, is_dismissed = b"", "", os.getppid(), False
    signs = _SignsOfLife()
    while connections:
        try:
            # An interrupt at the terminal reaches this process, too, but the program decides what ends.
            ready: Any = wait(connections)
        except KeyboardInterrupt:
            continue
        for connection in ready:
            try:
                settings = connection.recv_bytes()
                call = connection.recv_bytes() if settings else b""
                is_dismissed = is_dismissed or not call
            except (EOFError, OSError):
                call = b""
            if not call:
                connections.remove(connection)
                continue
            try:
                if settings != applied:
                    dask.config.set({"daskdist": pickle.loads(settings)})
                    applied = settings
                function, arguments, folder, offered = pickle.loads(call)
                with signs.sent_to(connection):
                    reply: Any = _answer(function, arguments, folder, offered)
            except BaseException as error:
                reply = Failure.of(error), True
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(reply, protocol=5))
    if folder and not is_dismissed:
        _remove_if_killed(program, folder)


class _SignsOfLife:
    # Empty messages to the program while a call is made: the process itself ends calls that hang, as long as it lives.
    def __init__(self) -> None:
        self._sending = threading.Lock()
        self._connection: Connection | None = None
        threading.Thread(target=self._send, name="daskdist signs of life", daemon=True).start()

    @contextlib.contextmanager
    def sent_to(self, connection: Connection) -> Iterator[None]:
        self._connection = connection
        try:
            yield
        finally:
            with self._sending:
                self._connection = None

    def _send(self) -> None:
        while True:
            time.sleep(min(_SIGN_EVERY_S, seconds("timeouts.data") / 4))
            with self._sending, contextlib.suppress(OSError):
                if self._connection is not None:
                    self._connection.send_bytes(b"")


def _remove_if_killed(program: int, folder: str) -> None:
    # The connections of a program that was killed are closed shortly before its processes get another parent.
    until = time.monotonic() + _KILLED_WITHIN_S
    while os.getppid() == program:
        if time.monotonic() > until:
            return
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class _Waiting:
    # A call that waits for a process. ``taken`` is its process and connection, once it has one; ``changed`` is set to
    # make this call check again.
    changed: threading.Event
    taken: tuple[_Process, Connection] | None = None


class _Process:
    # A process with a connection for the call that it makes, and one for the next call, which is sent meanwhile.
    def __init__(self) -> None:
        pairs = [Pipe() for _ in range(_CALLS_OF_PROCESS)]
        # `multiprocessing` would run the program's main module again.
        code = (
            f"import sys; sys.path[:], sys.argv = {sys.path!r}, {sys.argv!r}; "
            "from multiprocessing.connection import Connection; from daskdist.execute.callers import process_pool; "
            f"process_pool.serve([Connection(number) for number in {[end.fileno() for _, end in pairs]!r}])"
        )
        self.free = [local_end for local_end, _ in pairs]
        # The number of messages from the process.
        self.num_signs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env={**_ONE_THREAD, **_KEPT_MEMORY, **os.environ},
            pass_fds=[remote_end.fileno() for _, remote_end in pairs],
        )
        for _, remote_end in pairs:
            remote_end.close()

    def answer(self, connection: Connection) -> bytes:
        """Wait for the answer of a call, which may wait for another one in the process, and return it."""
        waits = wait_intervals(
            "a sign of life of a local process", "timeouts.data", _SIGN_EVERY_S, progress=lambda: self.num_signs
        )
        while True:
            if connection.poll(next(waits)):
                self.num_signs += 1
                # An empty message is a sign of life.
                if answer := connection.recv_bytes():
                    return answer

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
    """Local processes that make one call at a time each."""

    def __init__(self, num_processes: int) -> None:
        remove_abandoned_folders()
        # The directory of the files of shared memory.
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=MEMORY if MEMORY.is_dir() else None)
        self._segments = Segments(self.folder)
        # The bytes of the last result of a function, and of any.
        self._result_bytes: dict[Any, int] = {}
        self._last_bytes = 0
        self._processes = [_Process() for _ in range(num_processes)]
        self._lock = threading.Lock()
        self._is_closed = False
        # The calls that wait for a process, oldest first.
        self._waiting: list[_Waiting] = []

    def add(self, function: bytes) -> str:
        """Return a file with a pickled function, which the processes read once; a read may list many files."""
        path = Path(self.folder, f"{uuid.uuid4().hex}.function")
        path.write_bytes(function)
        return str(path)

    def call(
        self,
        function: str | Callable[..., Any],
        arguments: Sequence[Any],
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
        is_over
            Returns whether the call is no longer needed; it is called until the call is made, and at `wake`.

        Raises
        ------
        ClusterError
            The processes ended in all attempts.
        CancelledError
            The call was not made, since it is no longer needed.
        """
        settings = pickle.dumps(all_settings())
        for _ in range(_MOST_ATTEMPTS):
            packed, sent = self._segments.pack(tuple(arguments))
            expected = self._result_bytes.get(function, self._last_bytes)
            offered = self._segments.taken(expected) if expected else None
            lent = [segment for segment in (sent, offered) if segment is not None]
            call = pickle.dumps((function, packed, self.folder, offered.path if offered else ""), protocol=5)
            try:
                process, connection = self._taken(is_over)
            except BaseException:
                self._segments.end(*lent)
                raise
            try:
                connection.send_bytes(settings)
                connection.send_bytes(call)
                answer = process.answer(connection)
            except WaitTimeoutError:
                connection.close()
                self._replace(process)
                self._segments.end(*lent, is_used=True)
                raise
            except (EOFError, OSError):
                connection.close()
                self._replace(process)
                # Processes that it forked may continue.
                self._segments.end(*lent, is_used=True)
                continue
            self._give_back(process, connection)
            reply, is_sent_kept = pickle.loads(answer)
            if sent is not None:
                self._segments.end(sent, is_used=is_sent_kept)
            if isinstance(reply, Failure):
                if offered is not None:
                    self._segments.end(offered)
                raise reply.error()
            if len(self._result_bytes) >= _MOST_SIZES:
                self._result_bytes.clear()
            self._result_bytes[function] = self._last_bytes = reply.num_bytes
            return self._segments.value(reply, offered)
        raise ClusterError(
            f"local processes ended in {_MOST_ATTEMPTS} attempts of one call; they may have too little memory"
        )

    def _taken(self, is_over: Callable[[], bool]) -> tuple[_Process, Connection]:
        waiting = _Waiting(threading.Event())
        with self._lock:
            self._waiting.append(waiting)
            self._assign()
        waits = wait_intervals(
            "a local process that is free",
            "timeouts.data",
            progress=lambda: [process.num_signs for process in self._processes],
        )
        try:
            while True:
                with self._lock:
                    if waiting.taken is not None:
                        return waiting.taken
                    if self._is_closed:
                        raise ClusterError("the local processes were ended while a pass needed them")
                    if is_over():
                        raise CancelledError
                waiting.changed.wait(next(waits))
                waiting.changed.clear()
        except BaseException:
            self._withdraw(waiting)
            raise

    def _withdraw(self, waiting: _Waiting) -> None:
        # A process that was chosen meanwhile is free again.
        with self._lock:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        if waiting.taken is not None:
            self._give_back(*waiting.taken)

    def _assign(self) -> None:
        # Give the oldest calls to the processes that have the fewest; called with the lock held.
        while self._waiting:
            process = max(self._processes, key=lambda process: len(process.free))
            if not process.free:
                return
            waiting = self._waiting.pop(0)
            waiting.taken = process, process.free.pop()
            waiting.changed.set()

    def wake(self) -> None:
        """Make calls that wait for a process check whether they are still needed."""
        with self._lock:
            for waiting in self._waiting:
                waiting.changed.set()

    def _give_back(self, process: _Process, connection: Connection) -> None:
        with self._lock:
            if self._is_closed:
                _dismiss(connection)
            process.free.append(connection)
            self._assign()

    def _replace(self, process: _Process) -> None:
        with self._lock:
            if process not in self._processes or self._is_closed:
                return
            self._processes[self._processes.index(process)] = _Process()
            self._assign()
        process.end(0)

    def close(self) -> None:
        """End the processes after the calls that they have, and remove their files."""
        with self._lock:
            self._is_closed = True
            for waiting in self._waiting:
                waiting.changed.set()
            for process in self._processes:
                for connection in process.free:
                    _dismiss(connection)
        for process in self._processes:
            process.end(seconds("timeouts.data"))
        self._segments.close()
        shutil.rmtree(self.folder, ignore_errors=True)


# (id of the process that started it, number of processes) -> pool; a forked process has a copy of this dict.
_pools: Final[dict[tuple[int, int], ProcessPool]] = {}
_opening: Final = threading.Lock()


def process_pool(num_processes: int) -> ProcessPool:
    """Return this program's pool of a number of processes, which is started at the first use and kept until the end."""
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
    if not MEMORY.is_dir():
        return
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)
