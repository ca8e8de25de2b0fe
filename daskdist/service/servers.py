"""Dask schedulers and workers in the process of a program, each in a separate thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from distributed import Scheduler, Worker
from distributed.comm import connect
from distributed.utils import LoopRunner, silence_logging_cmgr

from daskdist.config import seconds
from daskdist.errors import ClusterError
from daskdist.execute.callers.cluster_requests import security_hint
from daskdist.service.address import ServiceAddress
from daskdist.service.dispatcher.scheduler_plugin import ServiceOnScheduler

logger: Final = logging.getLogger("daskdist")

# Runs a server until the event is set, and calls the function with the server once it has started.
Serve = Callable[[asyncio.Event, Callable[[Any], None]], Awaitable[None]]

_START_AGAIN_S: Final = 0.5
_ANSWER_WITHIN_S: Final = 0.5


class _QuietServers:
    """Keeps Dask's servers from printing their ordinary log lines in a program, as long as it runs any of them here."""

    def __init__(self) -> None:
        self._num_servers = 0
        self._lock = threading.Lock()
        self._silence: Any = None

    def begin(self) -> None:
        """Count a server that starts."""
        with self._lock:
            if not self._num_servers:
                self._silence = silence_logging_cmgr(logging.WARNING)
                self._silence.__enter__()
            self._num_servers += 1

    def end(self) -> None:
        """Count a server that has ended; after the last one, Dask logs as before."""
        with self._lock:
            self._num_servers -= 1
            if not self._num_servers:
                self._silence.__exit__(None, None, None)


_quiet: Final = _QuietServers()


class ServerThread:
    """A server in an event loop in a separate thread, of which Dask logs warnings and errors only."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._runner: LoopRunner | None = None
        self._stop: asyncio.Event | None = None
        self._has_ended = threading.Event()
        self.server: Any = None

    def start(self) -> None:
        """Start the server and wait until it has started; do nothing if it is running.

        Raises
        ------
        ClusterError
            The server cannot be started.
        """
        if self._runner is not None:
            return
        _quiet.begin()
        self._runner = LoopRunner(asynchronous=False)
        self._runner.start()
        self._has_ended.clear()
        try:
            self._runner.run_sync(self._begin)
        except (OSError, RuntimeError, ValueError) as error:
            self.stop()
            why = error if isinstance(error, ClusterError) else error.__cause__
            cause = why or error or "it took longer than daskdist.timeouts.scheduler"
            raise ClusterError(f"the server cannot be started: {cause}") from error

    async def _begin(self) -> None:
        started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(self._stop, started))
        await asyncio.wait_for(started, seconds("timeouts.connect") + seconds("timeouts.scheduler"))

    async def _run(self, stop: asyncio.Event, started: asyncio.Future[Any]) -> None:
        def has_started(server: Any) -> None:
            self.server = server
            if not started.done():
                started.set_result(None)

        try:
            await self._serve(stop, has_started)
        except Exception as error:
            if started.done():
                logger.error("a server of the data service has ended: %s", error)
            else:
                started.set_exception(error)
        finally:
            self._has_ended.set()

    def join(self) -> None:
        """Wait until the server has ended."""
        self._has_ended.wait()

    def stop(self) -> None:
        """Stop the server, and wait until it has ended."""
        runner, self._runner = self._runner, None
        if runner is not None:
            try:
                runner.run_sync(self._end)
                runner.stop()
            finally:
                _quiet.end()

    async def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()
            ended = asyncio.wait([self._task], timeout=seconds("timeouts.scheduler"))
            if not (await ended)[0]:
                logger.warning("a server of the data service has not ended within daskdist.timeouts.scheduler")


@dataclass(frozen=True)
class ServeScheduler:
    """A function object that runs a scheduler with the data service.

    Parameters
    ----------
    host, port, protocol
        The address to listen on: all interfaces if ``host`` is None, any free port if ``port`` is 0.
    work_dir, gc_timeout_s
        As in `ServiceOnScheduler`.
    worker_ttl_s
        The time without a message after which a worker is considered lost; if None, that of Dask's configuration.
    """

    host: str | None
    port: int
    protocol: str
    work_dir: str | None
    gc_timeout_s: float | None
    worker_ttl_s: float | None

    async def __call__(self, stop: asyncio.Event, has_started: Callable[[Any], None]) -> None:
        ttl = {} if self.worker_ttl_s is None else {"worker_ttl": self.worker_ttl_s}
        scheduler = Scheduler(
            host=self.host,
            port=self.port,
            protocol=self.protocol,
            dashboard_address=f"{self.host or ''}:0",
            plugins=(ServiceOnScheduler(self.work_dir, self.gc_timeout_s),),
            **ttl,
        )
        async with scheduler:
            has_started(scheduler)
            await _first(stop.wait(), scheduler.finished())


@dataclass(frozen=True)
class ServeWorker:
    """A function object that runs a worker, and a new one each time that a lost scheduler is back.

    Parameters
    ----------
    address
        The address of the scheduler.
    host, port
        The address to listen on; chosen by Dask if None and 0.
    reconnect_timeout_s
        The time for which it tries to reach a lost scheduler.
    """

    address: ServiceAddress
    host: str | None
    port: int
    reconnect_timeout_s: float

    async def __call__(self, stop: asyncio.Event, has_started: Callable[[Any], None]) -> None:
        timeout_s = seconds("timeouts.connect")
        while True:
            worker = await self._started(stop, timeout_s)
            if worker is None:
                return
            has_started(worker)
            await _first(stop.wait(), worker.finished())
            if stop.is_set():
                await worker.close(nanny=False)
                return
            logger.warning("lost the scheduler %s; the worker waits for it", self.address.address)
            timeout_s = self.reconnect_timeout_s

    async def _started(self, stop: asyncio.Event, timeout_s: float) -> Worker | None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        # A Dask worker that cannot reach its scheduler gives up without closing its socket.
        while not await self._answers() and not stop.is_set():
            if loop.time() >= give_up_at:
                hint = security_hint(self.address.address)
                raise ClusterError(f"no scheduler answers at {self.address.address} within {timeout_s:g} s{hint}")
            await _first(stop.wait(), asyncio.sleep(_START_AGAIN_S))
        if stop.is_set():
            return None
        worker = Worker(
            self.address.address,
            host=self.host,
            port=self.port,
            security=self.address.usable_security(),
            dashboard_address=f"{self.host or ''}:0",
        )
        await worker
        return worker

    async def _answers(self) -> bool:
        args = self.address.connection_args()
        try:
            comm = await connect(self.address.address, timeout=_ANSWER_WITHIN_S, **args)
        except (OSError, ValueError):
            return False
        comm.abort()
        return True


async def _first(*waiting: Awaitable[Any]) -> None:
    """Wait until one of the awaitables is done, and cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
