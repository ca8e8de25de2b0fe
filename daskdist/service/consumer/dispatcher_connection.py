"""Connections to the dispatcher, and the event loop of this process that runs them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from typing import Any, TypeVar

from distributed.comm import Comm, connect
from distributed.protocol.pickle import dumps
from distributed.utils import LoopRunner

from daskdist.config import seconds
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.cluster_requests import security_hint
from daskdist.service.address import ServiceAddress
from daskdist.service.dispatcher.commands import Refusal
from daskdist.service.messages import DISPATCHER_OPERATION, PRESENT_OPERATION, receive, send
from daskdist.service.worker.worker_plugin import NAME

_T = TypeVar("_T")


async def connected(address: ServiceAddress) -> Comm:
    """Connect to the dispatcher, starting the service on the scheduler where it does not run yet.

    Raises
    ------
    ClusterError
        No scheduler answers, it needs other certificates, or it does not accept the service from a program.
    """
    # A plugin is sent pickled, which a scheduler may refuse.
    from daskdist.service.dispatcher.scheduler_plugin import ServiceOnScheduler

    within_s, args = seconds("timeouts.connect"), address.connection_args()
    try:
        comm = await connect(address.address, timeout=within_s, **args)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no scheduler answers at {address.address} within {within_s:g} s ({type(error).__name__}: {error}). Is it "
            f"running, and is this its address? `dask scheduler` prints it{security_hint(address.address)}"
        ) from error
    try:
        plugin = dumps(ServiceOnScheduler())
        await _answered(address, _enter_service(comm, plugin))
    except BaseException:
        comm.abort()
        raise
    return comm


async def _enter_service(comm: Comm, plugin: bytes) -> None:
    await comm.write(
        {"op": "register_scheduler_plugin", "plugin": plugin, "name": NAME, "idempotent": True, "reply": True}
    )
    answer = await comm.read()
    if isinstance(answer, dict) and answer.get("status") == "uncaught-error":
        await _check_preloaded(comm, answer)
    await comm.write({"op": DISPATCHER_OPERATION, "reply": False})


async def _answered(address: ServiceAddress, request: Awaitable[_T]) -> _T:
    most_s = seconds("timeouts.scheduler")
    try:
        return await asyncio.wait_for(request, most_s)
    except TimeoutError as error:
        raise ClusterError(
            f"the scheduler at {address.address}, which has the data service, has not answered within {most_s:g} s, "
            "which is daskdist.timeouts.scheduler"
        ) from error


async def _check_preloaded(comm: Comm, answer: dict[str, Any]) -> None:
    await comm.write({"op": PRESENT_OPERATION, "reply": True})
    if await comm.read() is not True:
        raise ClusterError(
            f"the scheduler has no data service and accepts none from a program ({answer.get('exception_text')}); "
            "start it with `dask scheduler --preload daskdist.preload`, in an environment that has daskdist"
        )


def ask(address: ServiceAddress, request: Any) -> Any:
    """Return the dispatcher's answer to a request.

    Raises
    ------
    ArgumentError
        The dispatcher refuses the request.
    ClusterError
        No dispatcher answers, or the connection was lost.
    """
    answer = asyncio.run_coroutine_threadsafe(_asked(address, request), event_loop()).result()
    if isinstance(answer, Refusal):
        raise ArgumentError(answer.message)
    return answer


async def _asked(address: ServiceAddress, request: Any) -> Any:
    comm = await connected(address)
    try:
        await send(comm, request)
        return await _answered(address, receive(comm))
    except OSError as error:
        raise ClusterError(f"lost the scheduler {address.address}, which has the data service: {error}") from error
    finally:
        comm.abort()


_runner: LoopRunner | None = None
_starting = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections of this process to services."""
    global _runner
    with _starting:
        if _runner is None:
            _runner = LoopRunner(asynchronous=False)
            _runner.start()
        loop: asyncio.AbstractEventLoop = _runner.loop.asyncio_loop
    return loop


def _forget_loop() -> None:
    # A forked process has no threads of its parent, so nothing would release the lock.
    global _runner, _starting
    _runner, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)
