"""Programs and workers that tests start, forked from a process that has done the imports, since these take a second.

A program is the main module of its process, and ends as any other Python program. Its workers are forked, too, if it is
started with `FORKED_WORKERS`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import dask
import distributed

_IMPORTS = """
    dask.__main__ distributed.cli.dask_scheduler distributed.cli.dask_worker distributed.http.worker.prometheus
    daskdist.cli.demo daskdist.devices.cupy daskdist.devices.nvidia daskdist.readers.parquet
    daskdist.strategy.multi_worker daskdist.testing validated_calls
    numpy pandas pyarrow.dataset pyarrow.parquet
"""
_REQUEST_BYTES = 1 << 20
# The environment of a program whose workers are forked instead of new processes, which do the imports again.
FORKED_WORKERS = {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver"}


class _Forks:
    """The process that forks programs, and the connection to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", f"import programs; programs.serve({theirs.fileno()})"]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=Path(__file__).parent
            )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], list(files))
            return json.loads(self._connection.recv(_REQUEST_BYTES))

    def close(self) -> None:
        self._connection.close()
        self._process.wait(10)


@functools.cache
def _forks() -> _Forks:
    return _Forks()


@functools.cache
def start_forkserver() -> None:
    """Start the process that forks workers, in place of `ForkServer.ensure_running` of `multiprocessing`."""
    _use_forkserver(lambda *files: _forks().ask({"forkserver": True}, files))


def _use_forkserver(start: Callable[[int, int], int]) -> None:
    # As `ensure_running`, which would start another Python.
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        ended, alive = os.pipe()
        pid = start(listener.fileno(), ended)
    os.close(ended)
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid


class Program:
    """A running program, with the methods of `subprocess.Popen` that tests use.

    Parameters
    ----------
    arguments
        Those after ``python``: a script, ``-c`` and a program, or ``-m`` and a module, and then its arguments.
    stdout, stderr
        A file, `subprocess.PIPE` or `subprocess.DEVNULL`; those of the tests by default.
    cwd
        The directory in which it runs.
    env
        Variables that are added to those of the tests. Those that Python reads when it starts have no effect, except
        PYTHONPATH.
    start_new_session
        Whether it runs in a session of its own, and so in a process group of its own.
    ends_at_once
        Whether it ends without the steps of an ordinary end, which take longer than its start, and with an exit code
        of 0.
    """

    def __init__(
        self,
        *arguments: object,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        ends_at_once: bool = False,
    ) -> None:
        self.args = list(map(str, arguments))
        self.returncode: int | None = None
        files, opened, readers = [os.open(os.devnull, os.O_RDONLY)], [], []
        for number, target in ((1, stdout), (2, stderr)):
            reader = None
            if target == subprocess.PIPE:
                read_end, write_end = os.pipe()
                reader = open(read_end)  # noqa: SIM115
                opened.append(write_end)
                files.append(write_end)
            elif target == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_WRONLY))
                files.append(opened[-1])
            else:
                files.append(number if target is None else target if isinstance(target, int) else target.fileno())
            readers.append(reader)
        self.stdout, self.stderr = readers
        environment = {**os.environ, **(env or {})}
        request = {
            "arguments": self.args,
            "cwd": str(cwd or os.getcwd()),
            "env": environment,
            "start_new_session": start_new_session,
            "ends_at_once": ends_at_once,
        }
        self.pid: int = _forks().ask(request, files)
        self._pidfd = os.pidfd_open(self.pid)
        for file in [files[0], *opened]:
            os.close(file)

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = _forks().ask({"ended": self.pid})
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code."""
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the program runs."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, and return all output that goes to pipes; a program that takes longer is killed."""
        texts = ["", ""]

        def read(number: int, file: IO[str]) -> None:
            with file:
                texts[number] = file.read()

        files = [(number, file) for number, file in enumerate([self.stdout, self.stderr]) if file is not None]
        threads = [threading.Thread(target=read, args=pair) for pair in files]
        for thread in threads:
            thread.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for thread in threads:
                thread.join()
        return texts[0], texts[1]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


def run(
    *arguments: object, timeout: float = 60, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return its exit code and output."""
    with Program(*arguments, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options) as program:
        out, err = program.communicate(timeout)
    done = subprocess.CompletedProcess(program.args, program.wait(), out, err)
    if check and done.returncode:
        raise AssertionError(f"{program.args} ended with {done.returncode}: {err}")
    return done


# --- in the process that forks ---


def serve(number: int) -> None:
    """Fork programs as requested over a socket; in each fork, run its program."""
    # An interrupt from a terminal is for the tests, which then end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _IMPORTS.split():
        # Machines with GPUs may lack some of these libraries.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Each worker tells the scheduler its versions, which are looked up once in a process.
    distributed.versions.get_versions()
    gc.freeze()
    arguments = _next_program(socket.socket(fileno=number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, *rest = arguments
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    if first == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), names)
    else:
        sys.argv, sys.path[0], names["__file__"] = arguments, os.path.dirname(first), first
        exec(compile(Path(first).read_text(), first, "exec", dont_inherit=True), names)


def _next_program(connection: socket.socket) -> list[str]:
    # Fork the requested programs; return the arguments of one in its process.
    while True:
        message, files, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
        if not message:
            # The tests are over. An ordinary end would take longer.
            os._exit(0)
        request = json.loads(message)
        if "ended" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        elif "forkserver" in request:
            answer = _fork_server(*files)
        elif not (answer := os.fork()):
            break
        for file in files:
            os.close(file)
        connection.send(json.dumps(answer).encode())
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if request["start_new_session"]:
        os.setsid()
    if request["ends_at_once"]:
        atexit.register(_end)
    os.chdir(request["cwd"])
    if (path := request["env"].get("PYTHONPATH")) != os.environ.get("PYTHONPATH"):
        sys.path[1:1] = path.split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    dask.config.refresh()
    if dask.config.get("distributed.worker.multiprocessing-method") == "forkserver":
        _use_forkserver(_fork_server)
    return list(request["arguments"])


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _fork_server(*files: int) -> int:
    # Fork a process that forks workers for as long as there are any, or their program is running.
    if pid := os.fork():
        return pid
    # The program has the other end of the pipe, and this process ends when that is closed.
    for file in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *files}:
        with contextlib.suppress(OSError):
            os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        multiprocessing.forkserver.main(*files, [])
    finally:
        os._exit(0)
