"""The scheduler plugin of strategies: it records the workers in use, and relays streams of steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from distributed import Client, Scheduler, Worker
from distributed.comm import Comm, connect
from distributed.core import Status, send_recv
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from daskdist.dashboard.scheduler_plugin import dashboard_of
from daskdist.execute.callers.cluster_requests import run_on_scheduler
from daskdist.execute.messages.outbox import flush
from daskdist.strategy.calls.stream import RELAY

logger: Final = logging.getLogger("daskdist")

_NAME: Final = "daskdist-steps"
# Seconds within which a process that restarts workers accepts a connection.
_ANSWERS_WITHIN_S: Final = 5.0
# Seconds after the loss of a worker until tasks that others have forgotten are begun again.
_FORGOTTEN_AFTER_S: Final = 5.0
# The schedulers for which the warning was logged.
_warned: Final[set[str]] = set()


class StepsOnScheduler(SchedulerPlugin):  # type: ignore[misc]
    """A plugin that keeps adaptive scaling from closing strategies' workers, and relays streams.

    Workers that are retired by name are closed nevertheless. After a loss, it begins tasks again that others forgot.

    Parameters
    ----------
    scheduler
        The scheduler.
    """

    name = _NAME

    def __init__(self, scheduler: Scheduler) -> None:
        # (id of a client, token of its strategy) -> the addresses of the workers.
        self.used: dict[tuple[str, str], Sequence[str]] = {}
        self._scheduler = scheduler
        self.figures = dashboard_of(scheduler)
        scheduler.handlers[RELAY] = self._relay

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return the workers, of those given, that may be closed."""
        used = {address for addresses in self.used.values() for address in addresses}
        return [worker for worker in workers if worker.address not in used]

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Show a lost worker of a strategy on the dashboard, and begin tasks again that others have forgotten."""
        if any(worker in addresses for addresses in self.used.values()):
            self.figures.worker_lost(time.time(), worker)
            self._scheduler.loop.add_callback(self._begin_forgotten_tasks)

    async def _begin_forgotten_tasks(self) -> None:
        # Dask's workers forget a task, and the scheduler waits for it without end, if three messages arrive while a
        # worker fetches the result of the task from the lost one: that one is lost, run the task, and what needed it
        # is of no use any more.
        assigned = self._assigned()
        await asyncio.sleep(_FORGOTTEN_AFTER_S)
        left = assigned.items() & self._assigned().items()
        asked = {worker for _, (worker, _) in left}
        known = dict(zip(asked, await asyncio.gather(*map(self._known_tasks, asked)), strict=True))
        left &= self._assigned().items()
        forgotten = {key: "released" for key, (worker, _) in left if key not in known[worker]}
        if forgotten:
            logger.warning("beginning %d tasks again that a worker has forgotten", len(forgotten))
            self._scheduler.transitions(forgotten, f"daskdist-forgotten-{time.time()}")

    async def _known_tasks(self, worker: str) -> Collection[Any]:
        # All tasks count as known if the worker does not answer.
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                comm = await connect(worker, **self._scheduler.connection_args)
                try:
                    answer = await send_recv(comm, op="run", function=dumps(_tasks_of), close=True)
                finally:
                    comm.abort()
            return answer["result"]  # type: ignore[no-any-return]
        except (OSError, KeyError):
            return self._assigned()

    def _assigned(self) -> dict[Any, tuple[str, int]]:
        # Return the worker of each task that is to be run, and the number of the run.
        workers = self._scheduler.workers.values()
        return {task.key: (worker.address, task.run_id) for worker in workers for task in worker.processing}

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget the strategies of a program that has disconnected."""
        for key in [used_key for used_key in self.used if used_key[0] == client]:
            del self.used[key]

    async def _relay(self, comm: Comm, worker: str) -> Any:
        """Connect a program to a worker, and pass on their messages until one of them closes."""
        if worker not in self._scheduler.workers:
            return "the scheduler does not know it"
        try:
            other = await connect(worker, deserialize=False, **self._scheduler.connection_args)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        try:
            await comm.write("OK")
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_pass_on(comm, other))
                directions.create_task(_pass_on(other, comm))
        except* Exception:
            # One of them has closed.
            pass
        finally:
            comm.abort()
            other.abort()
        return Status.dont_reply


def _tasks_of(dask_worker: Worker) -> list[Any]:
    return list(dask_worker.state.tasks)


async def _pass_on(source: Comm, target: Comm) -> None:
    while True:
        await target.write(await source.read())
        # If one end is slow, let the other wait, rather than fill the scheduler's memory.
        await flush(target)


def note_in_use(client: Client, token: str, workers: Sequence[str]) -> bool:
    """Report to the scheduler which workers a strategy uses.

    If that fails, log one warning per scheduler and return False.
    """
    try:
        run_on_scheduler(client, _use, client.id, token, tuple(workers))
        return True
    except Exception as error:
        address = client.scheduler.address
        if address not in _warned:
            _warned.add(address)
            logger.warning(
                "the scheduler at %s cannot note which workers a strategy uses (%s: %s): adaptive scaling may close "
                "them, and then their replicas are lost; nor can it relay steps to workers that this program does not "
                "reach. Install the same daskdist where the scheduler runs, or do not "
                "scale the cluster down while strategies are open",
                address,
                type(error).__name__,
                error,
            )
        return False


def release_soon(client: Client, token: str) -> None:
    """Make the scheduler forget a strategy, without waiting for an answer; can be called in any thread."""
    if client.status == "running":
        with contextlib.suppress(RuntimeError):
            client.loop.add_callback(_release_now, client, token)


async def _release_now(client: Client, token: str) -> None:
    with contextlib.suppress(Exception):
        await client.run_on_scheduler(_release, client.id, token)


def _use(client: str, token: str, workers: Sequence[str], dask_scheduler: Scheduler) -> None:
    plugin = dask_scheduler.plugins.get(_NAME)
    if plugin is None:
        plugin = StepsOnScheduler(dask_scheduler)
        dask_scheduler.add_plugin(plugin)
    plugin.used[client, token] = workers


def _release(client: str, token: str, dask_scheduler: Scheduler) -> None:
    plugin = dask_scheduler.plugins.get(_NAME)
    if plugin is not None:
        plugin.used.pop((client, token), None)
        plugin.figures.program_ended(token)


async def answers(nannies: Collection[str], dask_scheduler: Scheduler) -> bool:
    """Return whether one of the processes that restart workers is there."""
    for nanny in nannies:
        with contextlib.suppress(OSError):
            comm = await connect(nanny, timeout=_ANSWERS_WITHIN_S, **dask_scheduler.connection_args)
            comm.abort()
            return True
    return False
