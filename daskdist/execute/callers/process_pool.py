"""`ProcessPool`: local processes that make calls, one at a time each."""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final, NamedTuple

import cloudpickle
import dask

from daskdist.call_progress import CallProgress, under_way
from daskdist.config import all_settings, seconds
from daskdist.core.failing.packed_error import as_text
from daskdist.core.functions.by_value import modules_by_value
from daskdist.errors import ClusterError, WaitTimeoutError
from daskdist.execute.messages.failure import Failure, Packed
from daskdist.execute.messages.shared_memory import MemoryConnection, unnamed_memory
from daskdist.waiting import wait_intervals

_WHAT: Final = "a call in a local process"
# The most functions that a process keeps.
_MOST_FUNCTIONS: Final = 64
# The most attempts of a call, if its processes end.
_MOST_ATTEMPTS: Final = 3
# Seconds between two signs of life of a process.
_SIGN_EVERY_S: Final = 0.5
# The time to wait for a killed process to end.
_KILLED_WITHIN_S: Final = 60.0
_ENVIRONMENT: Final = {
    # Libraries use one thread in each process, as in Dask's workers.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # The C library keeps the memory of arrays, of which each call needs as many again; otherwise the system would clear
    # it for each call anew.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
}


class LocalFunction:
    """A pickled function, which is sent once to each process that needs it; there, it is unpickled as the function."""

    _numbers: Final = itertools.count()

    def __init__(self, function: Callable[..., Any]) -> None:
        with modules_by_value():
            self.pickled = cloudpickle.dumps(function)
        self.number = next(self._numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _function_of, (self.number,)


# In a local process: the functions that it was sent, pickled until one is needed.
_functions: Final[dict[int, Any]] = {}


def _function_of(number: int) -> Any:
    function = _functions[number]
    if isinstance(function, bytes):
        function = _functions[number] = cloudpickle.loads(function)
    return function


class _Request(NamedTuple):
    # The message to a process: the settings, functions that it lacks, by number, and the call: a function with its
    # arguments. None ends the process. It sends the name of its call while that makes progress, and then the answer.
    settings: dict[str, Any]
    functions: dict[int, bytes]
    call: Packed


def serve(connection: int, memory: int) -> None:
    """Make calls in this process until the connection is closed; it and the memory have these descriptors."""
    program = MemoryConnection(connection, io.FileIO(memory, "r+"))
    progress, sending = CallProgress(_WHAT), threading.Lock()
    under_way.call = progress
    threading.Thread(target=_send_signs, args=(program, progress, sending), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                # An interrupt at the terminal reaches this process, too, but the program decides what ends.
                program.poll(None)
            except KeyboardInterrupt:
                continue
            request = program.recv()
            if request is None:
                return
            answer = _answer(request)
            with sending:
                # A sign after it must not have the name of its call.
                progress.function = None
                program.send(answer)
            # Keep no arrays while waiting.
            del request, answer


def _send_signs(program: MemoryConnection, progress: CallProgress, sending: threading.Lock) -> None:
    last, parent = progress.look(), os.getppid()
    while True:
        time.sleep(min(_SIGN_EVERY_S, seconds("timeouts.data") / 10))
        if os.getppid() != parent:
            # The program was killed, and a call may hang.
            os.kill(os.getpid(), signal.SIGTERM)
        reached = progress.look()
        if reached != last:
            last = reached
            # After an answer it may wait until the next call.
            with sending, contextlib.suppress(OSError):
                program.send(str(progress))


def _answer(request: _Request) -> Packed | Failure:
    try:
        _forget(_functions)
        _functions.update(request.functions)
        dask.config.set({"daskdist": request.settings})
        function, args = request.call.value()
        return Packed.of(function(*args))
    except BaseException as error:
        try:
            return Failure.of(error)
        except BaseException:
            # The pickling of the error runs its code.
            return Failure.of(as_text(error))


def _forget(functions: dict[int, Any] | set[int]) -> None:
    # Called before each call in both processes, which so have the same numbers.
    if len(functions) > _MOST_FUNCTIONS:
        functions.clear()


class _Process:
    def __init__(self) -> None:
        # The number of messages from it, and the numbers of the functions that it has.
        self.num_messages, self._functions = 0, set[int]()
        memory, (near, far) = unnamed_memory(), socket.socketpair()
        self.connection = MemoryConnection(near.detach(), memory)
        descriptors = far.fileno(), memory.fileno()
        # `multiprocessing` would run the program's main module again.
        code = (
            f"import sys; sys.path[:], sys.argv = {sys.path!r}, {sys.argv!r}; "
            f"from daskdist.execute.callers import process_pool; process_pool.serve(*{descriptors!r})"
        )
        command, environment = [sys.executable, "-c", code], {**_ENVIRONMENT, **os.environ}
        with far:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=descriptors)

    def answer(self, call: Packed, functions: Sequence[LocalFunction]) -> Packed | Failure:
        """Send a call that needs functions, and return the answer."""
        _forget(self._functions)
        new = {function.number: function.pickled for function in functions if function.number not in self._functions}
        self._functions.update(new)
        self.connection.send(_Request(all_settings(), new, call))
        name = _WHAT
        waits = wait_intervals(lambda: name, "timeouts.data", progress=lambda: self.num_messages)
        while True:
            if self.connection.poll(next(waits)):
                message = self.connection.recv()
                self.num_messages += 1
                if not isinstance(message, str):
                    return message  # type: ignore[no-any-return]
                name = message

    def dismiss(self) -> None:
        """End the process, which makes no call, in a while."""
        with contextlib.suppress(OSError):
            # Forked processes may have the connection too, so that closing it is not enough.
            self.connection.send(None)

    def end(self, within_s: float) -> None:
        """Wait for the end of the process, and kill it if that takes longer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._process.kill()
        self._process.wait(_KILLED_WITHIN_S)
        self.connection.close()


class ProcessPool:
    """Local processes that make one call at a time each."""

    def __init__(self, num_processes: int) -> None:
        self._processes = [_Process() for _ in range(num_processes)]
        self._lock = threading.Lock()
        # Held to change the following.
        self._changed = threading.Condition(self._lock)
        self._free = list(self._processes)
        self._is_closed = False

    def call(
        self, function: Any, args: Sequence[Any], uses: Sequence[LocalFunction] = (), is_over: Callable[[], bool] = bool
    ) -> Any:
        """Call a function in one of the processes; wait for the result and return it.

        A call whose process is killed is made again.

        Parameters
        ----------
        function, args
            The function, one of a module if it is not a `LocalFunction`, and its arguments.
        uses
            The functions in the arguments.
        is_over
            Returns whether the call is no longer needed; it is called until the call is made, and at `release`.

        Raises
        ------
        ClusterError
            The processes ended in all attempts.
        CancelledError
            The call was not made, since it is no longer needed.
        WaitTimeoutError
            The call made no progress for ``daskdist.timeouts.data``; its process is killed.
        """
        call = Packed.of((function, tuple(args)))
        functions = [function, *uses] if isinstance(function, LocalFunction) else uses
        for _ in range(_MOST_ATTEMPTS):
            process, is_alive = self._taken(is_over), False
            try:
                answer = process.answer(call, functions)
                is_alive = True
            except WaitTimeoutError:
                raise
            except (EOFError, OSError):
                continue
            finally:
                self._give_back(process, is_alive=is_alive)
            if isinstance(answer, Failure):
                raise answer.error()
            return answer.value()
        raise ClusterError(
            f"local processes ended in {_MOST_ATTEMPTS} attempts of one call; they may have too little memory"
        )

    def _taken(self, is_over: Callable[[], bool]) -> _Process:
        waits = wait_intervals(
            "a local process that is free",
            "timeouts.data",
            progress=lambda: [process.num_messages for process in self._processes],
        )
        with self._lock:
            while True:
                if self._is_closed:
                    raise ClusterError("the local processes were ended while a pass needed them")
                if is_over():
                    # It may have been woken in place of another call.
                    self._changed.notify()
                    raise CancelledError
                if self._free:
                    return self._free.pop()
                self._changed.wait(next(waits))

    def release(self) -> None:
        """Make calls that wait check whether they are still needed, and free the memory of processes without a call."""
        with self._lock:
            self._changed.notify_all()
            for process in [] if self._is_closed else self._free:
                process.connection.free()

    def _give_back(self, process: _Process, *, is_alive: bool) -> None:
        with self._lock:
            if not is_alive:
                process.end(0)
            if self._is_closed:
                process.dismiss()
            elif not is_alive:
                self._processes[self._processes.index(process)] = process = _Process()
            self._free.append(process)
            self._changed.notify()

    def close(self) -> None:
        """End the processes after the calls that they have."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            for process in self._free:
                process.dismiss()
        for process in self._processes:
            process.end(seconds("timeouts.data"))


# (id of the process that started it, number of processes) -> pool; a forked process has a copy of this dict.
_pools: Final[dict[tuple[int, int], ProcessPool]] = {}
_opening: Final = threading.Lock()


def process_pool(num_processes: int) -> ProcessPool:
    """Return this program's pool of a number of processes, which is started at the first use and kept until the end."""
    key = (os.getpid(), num_processes)
    with _opening:
        if key not in _pools:
            _pools[key] = ProcessPool(num_processes)
        return _pools[key]


def close_pools() -> None:
    """End all processes that this one started; the next pass that needs some starts them again."""
    with _opening:
        for key in [key for key in _pools if key[0] == os.getpid()]:
            _pools.pop(key).close()


atexit.register(close_pools)
