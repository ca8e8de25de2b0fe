"""The end of strategies on clusters: completing their calls and freeing their resources.

Calls are completed by `Strategy.close`, by a separate thread if the strategy is no longer referenced, and at the end of
the program, unless it ends with an error.

A scheduler in the program's own process needs more. Python shuts thread pools down before it calls ``atexit``
functions, but the scheduler needs a pool for each graph that it receives, and logs an error for each that arrives
later. Then Dask closes the cluster, and warns of each result that is still referenced and of each task that is still
running. So everything that strategies have in flight is released earlier: when the main thread has ended and thread
pools still exist.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import signal
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Final

from distributed import Client, Future, Scheduler, Worker
from distributed.preloading import PreloadManager

from daskdist.errors import ClusterError
from daskdist.execute.callers.cluster_requests import is_key_of_ours, run_on_workers
from daskdist.execute.callers.submit import Submit
from daskdist.execute.private_names import is_here, is_reading_graphs, is_running_tasks
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.calls.worker.on_scheduler import release_soon

logger: Final = logging.getLogger("daskdist")

# The longest time that the end of a program waits for running tasks.
_MOST_S: Final = 3.0
# The longest time that the end of a strategy waits for running tasks.
_AT_CLOSE_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.005
# If the end of a program waits longer for calls, it logs a warning.
_SILENT_S: Final = 5.0


class ClusterUse:
    """The resources of a strategy on a cluster, until they are freed.

    Parameters
    ----------
    streams
        The streams to its workers.
    submit
        Submits its tasks.
    token
        The token of the strategy.
    opened
        The connection and the cluster, if the strategy created them.
    """

    def __init__(self, streams: StreamSet, submit: Submit, token: str, opened: contextlib.ExitStack) -> None:
        self.client: Client = submit.client
        # A closed client does not know the address any more.
        self.address = self.client.scheduler.address
        self.security = self.client.security
        self.streams = streams
        self.futures = submit.futures
        self._submit = submit
        self._token = token
        self._opened = opened
        self._lock = threading.RLock()
        _uses.add(self)
        if is_here(self.address):
            _clients_here.add(self.client)
            # An interrupt at the terminal reaches the worker processes too; these should be ended by the program.
            if not any(isinstance(preload, _BeforeClose) for preload in self.client.preloads):
                self.client.preloads = PreloadManager([*self.client.preloads, _BeforeClose(self.client)])
            run_on_workers(self.client, _ignore_interrupts, workers=None, on_error="ignore")

    def complete(self, within_s: float | None = None) -> bool:
        """Wait until all calls have ended, at most ``within_s`` seconds; return whether they have."""
        # If workers are lost or the connection is closed, there is nothing to wait for.
        with contextlib.suppress(ClusterError):
            self.streams.finish(within_s)
        return not self.streams.is_busy

    def complete_and_free(self) -> None:
        """Free all resources once the calls have ended; log failures that were never read."""
        self.complete()
        self.log_unobserved()
        self.free()

    def log_unobserved(self) -> None:
        """Log the failures that were never read."""
        if error := self.streams.take_unobserved():
            text = "; ".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
            logger.error("a step failed, and its results were not read: %s", text)

    def free(self) -> None:
        """Free all resources once; a second caller waits until that is done."""
        with self._lock:
            if self not in _uses:
                return
            self.streams.close()
            # At the end of the program, Dask is closing its clients: send nothing.
            if self.client.status == "running" and not _is_ending.is_set():
                if _is_worth(self.client, self.futures):
                    # The cluster may be closed next: do not leave workers with running tasks.
                    settle(self.client, list(self.futures), is_end=False)
                self._submit.release()
                release_soon(self.client, self._token)
            try:
                self._opened.close()
            finally:
                # Remove it last, as the end of the program waits for all uses in this set.
                _uses.discard(self)

    def let_go(self) -> None:
        """Release all calls and results at the end of the program, unless another thread is freeing them."""
        with self._lock:
            if self not in _uses:
                return
            self.log_unobserved()
            if not is_here(self.address):
                return
            self.streams.close()
            if self.client.status == "running":
                settle(self.client, list(self.futures), is_end=True)
                return
            # Tasks may be running even if the program has closed its client.
            with (
                contextlib.suppress(Exception),
                Client(self.address, security=self.security, timeout=_MOST_S, set_as_default=False) as other,
            ):
                settle(other, (), is_end=True)


def end_unused(use: ClusterUse) -> None:
    """Free the resources of a strategy that is no longer referenced, once its calls have ended."""
    if use.streams.is_busy and threading.main_thread().is_alive():
        threading.Thread(target=use.complete_and_free, name="daskdist ending", daemon=True).start()
    else:
        use.log_unobserved()
        use.free()


# The clients of schedulers in this process that strategies have used. Dask would close the clusters first, and log what
# these clients still hold and send.
_clients_here: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
# The uses of clusters that are not freed yet. The event is set when the program ends.
_uses: Final[set[ClusterUse]] = set()
_is_ending: Final = threading.Event()


class _BeforeClose:
    """A hook that releases the futures of strategies before the program's client closes; Dask calls it."""

    def __init__(self, client: Client) -> None:
        self.name = "daskdist"
        self._client = weakref.ref(client)

    async def start(self) -> None:
        """Do nothing: the client has started."""

    async def teardown(self) -> None:
        """Release futures while the client can still inform the scheduler."""
        client = self._client()
        of_client = [use for use in list(_uses) if use.client is client]
        for use in of_client:
            use.streams.close()
        futures = [future for use in of_client for future in use.futures]
        if client is not None and _is_worth(client, futures):
            await _settle(client, futures, is_end=False)


def _is_worth(client: Client, futures: Iterable[Future]) -> bool:
    return any(future.status == "pending" for future in futures) and is_here(client.scheduler.address)


def settle(client: Client, futures: Collection[Future], *, is_end: bool) -> None:
    """Release futures, and wait for some seconds until no worker is running a task, as a user's function may take long.

    Parameters
    ----------
    client
        The client of the futures.
    futures
        The futures to release.
    is_end
        Whether the program is ending, and all calls of strategies are to be released.
    """
    with contextlib.suppress(Exception):
        work = _settle(client, futures, is_end=is_end)
        # The loop itself may have stopped.
        asyncio.run_coroutine_threadsafe(work, client.loop.asyncio_loop).result(_MOST_S + _AT_CLOSE_S)


async def _settle(client: Client, futures: Collection[Future], *, is_end: bool) -> None:
    within_s = _MOST_S if is_end else _AT_CLOSE_S
    with contextlib.suppress(Exception):
        async with asyncio.timeout(within_s):
            # The scheduler receives graphs in order: once it has this one, it has all earlier ones.
            last = client.submit(int, key=f"last-{uuid.uuid4().hex}", pure=False)
            # Some schedulers refuse to run functions.
            with contextlib.suppress(Exception):
                await client.run_on_scheduler(_all_known, last.key, within_s)
            keys = {last.key, *(future.key for future in futures)}
            for future in (last, *futures):
                future.release()
            with contextlib.suppress(Exception):
                await client.run_on_scheduler(_let_go_of, client.id, keys, is_end)
            await client.run(_idle, within_s, on_error="ignore")


async def _all_known(key: str, within_s: float, dask_scheduler: Scheduler) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until and (key not in dask_scheduler.tasks or is_reading_graphs(dask_scheduler)):
        await asyncio.sleep(_LOOK_EVERY_S)


def _let_go_of(client: str, keys: Collection[Any], is_end: bool, dask_scheduler: Scheduler) -> None:
    # Release keys on the scheduler, not only futures: an interrupt may leave a graph without futures, or keep futures
    # alive in the interpreter's last traceback.
    state = dask_scheduler.clients.get(client)
    wanted_keys = [task.key for task in state.wants_what] if state else []
    ours = [key for key in wanted_keys if key in keys or (is_end and is_key_of_ours(key))]
    dask_scheduler.client_releases_keys(keys=ours, client=client, stimulus_id="daskdist-end")


async def _idle(within_s: float, dask_worker: Worker) -> None:
    # Ask the workers: the scheduler forgets released tasks, but a worker may still be running one.
    until = time.monotonic() + within_s
    while time.monotonic() < until and is_running_tasks(dask_worker):
        await asyncio.sleep(_LOOK_EVERY_S)


async def _ignore_interrupts() -> None:
    # Workers in threads of the program must not change its signal handlers.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _has_failed() -> bool:
    # True if the program ends with an error. At a prompt, the last error may be an old one.
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


def _complete_all() -> None:
    # An interrupt ends the wait.
    with contextlib.suppress(KeyboardInterrupt):
        for use in list(_uses):
            if not use.complete(_SILENT_S):
                names = Counter(use.streams.names_under_way())
                text = ", ".join(f"{number} of {name}" for name, number in names.items())
                logger.warning("the program ends when calls on replicas are over (%s); interrupt it to drop them", text)
                use.complete()


def _let_go_of_all() -> None:
    _is_ending.set()
    if not _has_failed():
        _complete_all()
    for use in list(_uses):
        use.let_go()


def _free_all() -> None:
    for use in list(_uses):
        use.free()
    for client in list(_clients_here):
        if client.status == "running" and is_here(client.scheduler.address):
            with contextlib.suppress(Exception):
                client.close(_MOST_S)


# Functions are called in reverse order of registration, and thread pools have registered theirs by now.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_let_go_of_all)
else:
    atexit.register(_let_go_of_all)
# Runs before Dask closes clusters itself and warns of each result that still exists.
atexit.register(_free_all)
