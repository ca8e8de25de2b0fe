"""The end of a program with work under way on a cluster whose scheduler is in its own process.

Python shuts all thread pools down before it calls what ``atexit`` has. A scheduler in this process needs such a pool
for each graph that it is sent, and logs an error for each that arrives too late. Then Dask closes the cluster, and
warns of each result that somebody still has and of each task that a worker is in the middle of. So all that strategies
have under way is let go of before that: when the main thread is over and thread pools are still there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import signal
import threading
import time
import uuid
import weakref
from collections.abc import Collection
from typing import Any, Final

from distributed import Client, Future, Scheduler, Worker
from distributed.core import Status
from distributed.preloading import PreloadManager

from daskdist.execute.submit import is_key_of_ours
from daskdist.strategy.steps.cluster_backend import ClusterBackend
from daskdist.strategy.steps.stream_set import StreamSet

logger: Final = logging.getLogger("daskdist")

# A program does not wait longer for tasks that workers are in the middle of.
_MOST_S: Final = 3.0
# Nor does the end of a strategy.
_AT_CLOSE_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.005


class _Open:
    """The connection of a strategy to a scheduler in this process, and the futures that it has there."""

    def __init__(self, steps: ClusterBackend) -> None:
        client = steps.client
        self.client = weakref.ref(client)
        self.steps = weakref.ref(steps)
        self.futures = weakref.ref(steps.futures)
        # A client that is closed does not know it any more.
        self.address = client.scheduler.address
        self.security = client.security


_open: Final[list[_Open]] = []
# Those whose failures that nobody has looked at are logged in the end.
_watched: Final[weakref.WeakSet[StreamSet]] = weakref.WeakSet()


class _BeforeClose:
    """Lets go of the futures of strategies when the program closes their client: Dask calls it before that closes."""

    def __init__(self, client: Client) -> None:
        self.name = "daskdist"
        self._client = weakref.ref(client)

    async def start(self) -> None:
        """Do nothing: the client has started."""

    async def teardown(self) -> None:
        """Let go of futures, as long as the client can tell the scheduler."""
        client = self._client()
        of_client = [each for each in _open if each.client() is client]
        for steps in [each.steps() for each in of_client]:
            if steps is not None:
                steps.close()
        futures = [future for each in of_client for future in each.futures() or ()]
        if client is not None and _is_worth(client, futures):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_settle(client, futures, _AT_CLOSE_S, is_end=False), _AT_CLOSE_S)


def let_go_at_end(steps: ClusterBackend) -> None:
    """Have what makes the calls of a strategy let go of its futures at the end of the program.

    Only where the scheduler is in this process: elsewhere it goes on without the program. Then an interrupt of the
    terminal goes to the worker processes too, which the program ends itself: they ignore it.
    """
    _watched.add(steps.streams)
    if not is_here(steps.client.scheduler.address):
        return
    client = steps.client
    _open[:] = [each for each in _open if each.futures() is not None]
    _open.append(_Open(steps))
    if not any(isinstance(each, _BeforeClose) for each in client.preloads):
        client.preloads = PreloadManager([*client.preloads, _BeforeClose(client)])
    client.run(_ignore_interrupts, on_error="ignore")


def is_here(address: str) -> bool:
    """Whether the scheduler of an address is in this process, and running."""
    return any(each.address == address for each in Scheduler._instances if each.status == Status.running)


def settle_before_close(client: Client, futures: Collection[Future]) -> None:
    """Let go of futures; where the cluster may be closed next, do not leave workers in the middle of tasks."""
    if _is_worth(client, futures):
        settle(client, futures, _AT_CLOSE_S, is_end=False)


def _is_worth(client: Client, futures: Collection[Future]) -> bool:
    return any(future.status == "pending" for future in futures) and is_here(client.scheduler.address)


def settle(client: Client, futures: Collection[Future], within_s: float, *, is_end: bool) -> None:
    """Let go of futures, and wait until no worker is in the middle of a task.

    Parameters
    ----------
    client
        The connection that the futures are of.
    futures
        What is let go of.
    within_s
        The most seconds that are waited for tasks: a function of the user's may take long.
    is_end
        Whether it is the end of the program, and all calls of strategies are let go of.
    """
    with contextlib.suppress(Exception):
        work = asyncio.wait_for(_settle(client, futures, within_s, is_end=is_end), within_s)
        asyncio.run_coroutine_threadsafe(work, client.loop.asyncio_loop).result()


async def _settle(client: Client, futures: Collection[Future], within_s: float, *, is_end: bool) -> None:
    # A scheduler takes graphs in turn: once it knows this one, it knows those that were sent before.
    last = client.submit(_nothing, key=f"last-{uuid.uuid4().hex}", pure=False)
    # Some schedulers call no functions.
    with contextlib.suppress(Exception):
        await client._run_on_scheduler(_all_known, last.key, within_s)
    keys = {last.key, *(future.key for future in futures)}
    for future in (last, *futures):
        future.release()
    with contextlib.suppress(Exception):
        await client._run_on_scheduler(_let_go_of, client.id, keys, is_end)
    await client._run(_idle, within_s, on_error="ignore")


def _nothing() -> None:
    """Do nothing."""


async def _all_known(key: str, within_s: float, dask_scheduler: Scheduler) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until and (key not in dask_scheduler.tasks or dask_scheduler._active_graph_updates):
        await asyncio.sleep(_LOOK_EVERY_S)


def _let_go_of(client: str, keys: Collection[Any], is_end: bool, dask_scheduler: Scheduler) -> None:
    # Here, and not only by the futures: of one that was being sent when the program was interrupted nobody knows, and
    # the traceback that the interpreter keeps holds on to others.
    state = dask_scheduler.clients.get(client)
    wanted = [task.key for task in state.wants_what] if state else []
    ours = [key for key in wanted if key in keys or (is_end and is_key_of_ours(key))]
    dask_scheduler.client_releases_keys(keys=ours, client=client, stimulus_id="daskdist-end")


async def _idle(within_s: float, dask_worker: Worker) -> None:
    # Tasks that nobody wants any more are forgotten by the scheduler; a worker that is in the middle of one knows.
    until = time.monotonic() + within_s
    while time.monotonic() < until and dask_worker._async_instructions:
        await asyncio.sleep(_LOOK_EVERY_S)


async def _ignore_interrupts() -> None:
    # Workers that are threads of the program leave its signals alone.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _log_unseen() -> None:
    for streams in list(_watched):
        for failed in streams.unseen():
            error = failed.failure.error()
            logger.error("a step failed, and nobody looked at it: %s: %s", type(error).__name__, error)


def _let_go_of_all() -> None:
    _log_unseen()
    for each in _open:
        if not is_here(each.address):
            continue
        client, steps, futures = each.client(), each.steps(), each.futures()
        if steps is not None:
            steps.close()
        if client is not None and client.status == "running":
            settle(client, list(futures or ()), _MOST_S, is_end=True)
            continue
        # The program has closed its client; tasks may be under way all the same.
        with (
            contextlib.suppress(Exception),
            Client(each.address, security=each.security, timeout=_MOST_S, set_as_default=False) as other,
        ):
            settle(other, (), _MOST_S, is_end=True)


# Those that are registered last are called first, and thread pools have registered theirs by now.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_let_go_of_all)
else:
    atexit.register(_let_go_of_all)
