"""The workers that take part, and the end of calls on lost workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from daskdist.errors import ClusterError
from daskdist.execute.callers.compute_key import lost_data_error
from daskdist.execute.paused_workers import PausedWorkers, error_of_task

if TYPE_CHECKING:
    from distributed import Client, Future, Scheduler

logger: Final = logging.getLogger("daskdist")

# After this time, a silent worker is logged, with this text.
LOGGED_AFTER_S: Final = 5.0
STILL_WAITED_FOR: Final = "%s has not answered for %.0f s, and is waited for up to %g s (daskdist.timeouts.silence)"
# Seconds within which a nanny ends a worker that is given up.
_RESTART_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.01
_OVER: Final = frozenset({"memory", "erred"})


class LiveWorkers:
    """The workers that take part, shared by all callers of one strategy."""

    def __init__(self, workers: Sequence[str]) -> None:
        # Present and lost workers, replaced together so that readers see a consistent pair.
        self._present_and_lost: tuple[tuple[str, ...], tuple[str, ...]] = tuple(workers), ()
        # The workers that have joined others, from which they got the values of variables; lost ones included.
        self.joined: set[str] = set()
        # The local directory of each worker, which identifies its process.
        self._directories: dict[str, str] = {}
        # Address -> the last heartbeat that the scheduler knew of, and the time in this process at which it was first
        # seen.
        self._heartbeats: dict[str, tuple[float, float]] = {}
        # Workers that have said that they are going to end, for example as they are retired -> the values that only
        # they have, each time that they handed them over.
        self._leaving: dict[str, list[Any]] = {}
        # True once a worker has said so.
        self.is_left = False
        # True if something failed since the workers were last checked, and if one is known to be lost. Any thread sets
        # them; the one that checks the workers clears both first.
        self.in_doubt = self.has_lost = False
        # A list with the least memory limit of the workers, None without one; empty until it is requested.
        self.memory_bytes: list[int | None] = []
        # The reason why all earlier workers were lost; "" if they never were.
        self._lost_with = ""
        # True if the program connects to the workers directly.
        self.is_direct = True
        # Ends waits for workers that stay paused.
        self.paused_workers = PausedWorkers()

    @property
    def present(self) -> tuple[str, ...]:
        """The workers that take part."""
        return self._present_and_lost[0]

    @property
    def lost(self) -> tuple[str, ...]:
        """The lost workers, without which the others continue."""
        return self._present_and_lost[1]

    def missing(self, connected: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the participating workers that are gone, including those replaced by another at the same address.

        Parameters
        ----------
        connected
            The scheduler's description of each connected worker, by address.

        >>> live_workers = LiveWorkers(["tcp://a:1", "tcp://b:1"])
        >>> live_workers.missing({"tcp://a:1": {"local_directory": "/tmp/1"}})
        ['tcp://b:1']
        >>> live_workers.missing({"tcp://a:1": {"local_directory": "/tmp/2"}})
        ['tcp://a:1', 'tcp://b:1']
        """
        known = self._directories
        return [
            worker
            for worker in self.present
            if worker not in connected
            or known.setdefault(worker, connected[worker]["local_directory"]) != connected[worker]["local_directory"]
        ]

    def silent_s(self, connected: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, float]:
        """Return for each participating worker the seconds since this process first saw its last heartbeat.

        Parameters
        ----------
        connected
            The scheduler's description of each connected worker, by address.
        now
            The time here.

        >>> live_workers = LiveWorkers(["tcp://a:1"])
        >>> live_workers.silent_s({"tcp://a:1": {"last_seen": 5.0}}, now=100.0)
        {'tcp://a:1': 0.0}
        >>> live_workers.silent_s({"tcp://a:1": {"last_seen": 5.0}}, now=107.0)
        {'tcp://a:1': 7.0}
        """
        for worker in self.present:
            last_seen = connected[worker]["last_seen"] if worker in connected else 0.0
            if self._heartbeats.get(worker, (None,))[0] != last_seen:
                self._heartbeats[worker] = last_seen, now
        return {worker: now - self._heartbeats[worker][1] for worker in self.present if worker in connected}

    def drop(self, addresses: Collection[str]) -> None:
        """Continue without some workers.

        >>> live_workers = LiveWorkers(["tcp://a:1", "tcp://b:1"])
        >>> live_workers.drop(["tcp://a:1"])
        >>> live_workers.present, live_workers.lost
        (('tcp://b:1',), ('tcp://a:1',))
        """
        present, lost = self._present_and_lost
        self._present_and_lost = (
            tuple(address for address in present if address not in addresses),
            (*lost, *(address for address in present if address in addresses)),
        )

    def lost_error(self, data: Any) -> ClusterError:
        """Return the error for data that is no longer on the cluster; the workers are checked at the next call."""
        self.in_doubt = True
        if self._lost_with:
            return ClusterError(f"{data} is gone: {self.advice}")
        if not self.lost:
            return lost_data_error(data)
        return ClusterError(f"lost {', '.join(self.lost)}, which {data} needs; create it again")

    async def error_of(self, client: Client, future: Future) -> BaseException | None:
        """Wait for the end of a task, and return the error with which it ended, if any."""
        error = await future.exception()
        if future.status == "error":
            return error_of_task(client, error)
        return self.lost_error(future.key) if future.cancelled() else None

    @property
    def advice(self) -> str:
        """Advice about a value that lost workers had."""
        return (
            f"{self._lost_with}; load the last checkpoint, or create it again" if self._lost_with else "create it again"
        )

    def replace_all(self, addresses: Sequence[str], why: str) -> None:
        """Continue with other workers only.

        >>> live_workers = LiveWorkers(["tcp://a:1"])
        >>> live_workers.replace_all(["tcp://a:2"], "the scheduler was lost")
        >>> live_workers.present, live_workers.lost
        (('tcp://a:2',), ('tcp://a:1',))
        """
        self.drop(self.present)
        # Values that were handed over are lost like others.
        self._leaving.clear()
        self._lost_with = why
        self.memory_bytes.clear()
        self.add(addresses)

    def note_leaving(self, address: str, *values: Any) -> None:
        """Record that a worker is going to end once it has completed the calls that were sent to it, and its values."""
        self._leaving.setdefault(address, []).extend(values)
        self.is_left = True

    def num_handed_over(self, address: str) -> int:
        """Return how often a worker that is going to end has handed over its values."""
        return len(self._leaving.get(address, ()))

    def take_handed_over(self) -> list[Any]:
        """Return, only once, the last values that workers handed over which no longer take part.

        >>> live_workers = LiveWorkers(["tcp://a:1", "tcp://b:1"])
        >>> live_workers.note_leaving("tcp://a:1", {0: "first"})
        >>> live_workers.note_leaving("tcp://a:1", {0: "last"})
        >>> live_workers.note_leaving("tcp://a:1")
        >>> live_workers.drop(["tcp://a:1"])
        >>> live_workers.take_handed_over(), live_workers.take_handed_over()
        ([{0: 'last'}], [])
        """
        values = [self._leaving.pop(address, []) for address in self.lost]
        return [of_worker[-1] for of_worker in values if of_worker and of_worker[-1]]

    @property
    def leaving(self) -> list[str]:
        """The workers that take part and are going to end."""
        leaving = self._leaving
        return [address for address in self.present if address in leaving] if leaving else []

    def add(self, addresses: Sequence[str]) -> None:
        """Continue with further workers, which may have the addresses of lost ones.

        >>> live_workers = LiveWorkers(["tcp://a:1", "tcp://b:1"])
        >>> live_workers.drop(["tcp://a:1"])
        >>> live_workers.add(["tcp://c:1", "tcp://a:1"])
        >>> live_workers.present, live_workers.lost
        (('tcp://b:1', 'tcp://c:1', 'tcp://a:1'), ())
        """
        present, lost = self._present_and_lost
        self.joined = {*self.joined, *addresses} if present else set()
        for address in addresses:
            for known in (self._directories, self._heartbeats, self._leaving):
                known.pop(address, None)
        self._present_and_lost = (*present, *addresses), tuple([known for known in lost if known not in addresses])


async def give_up(client: Any, silent: Sequence[str]) -> None:
    """Make the scheduler restart or remove silent workers, so that others get their tasks."""
    logger.warning("%s: no sign of life, and so given up", ", ".join(silent))
    await client.scheduler.restart_workers(
        workers=list(silent),
        timeout=_RESTART_S,
        wait_for_workers=False,
        on_error="return",
        stimulus_id="daskdist-silent-workers",
    )


async def cancel_lost_tasks(
    addresses: Sequence[str], client: str, within_s: float = 0.0, *, dask_scheduler: Scheduler
) -> None:
    """Cancel the tasks that only lost workers may run, and their dependents: Dask would wait for them forever.

    The scheduler may know the end of a worker some seconds later than the program.
    """
    until = time.monotonic() + within_s
    while set(addresses) & set(dask_scheduler.workers) and time.monotonic() < until:
        await asyncio.sleep(_LOOK_EVERY_S)
    # A worker restarted at the same address runs the tasks that are restricted to it.
    lost = set(addresses) - set(dask_scheduler.workers)
    unvisited: list[Any] = [
        task
        for task in dask_scheduler.tasks.values()
        if task.worker_restrictions and not task.loose_restrictions and task.worker_restrictions <= lost
    ]
    stuck: dict[str, Any] = {}
    while unvisited:
        task = unvisited.pop()
        if task.state not in _OVER and task.key not in stuck:
            stuck[task.key] = task
            unvisited += task.dependents
    client_state = dask_scheduler.clients.get(client)
    keys = [key for key, task in stuck.items() if client_state in (task.who_wants or ())]
    if keys:
        dask_scheduler.client_releases_keys(keys, client, stimulus_id="daskdist-lost-worker")
        dask_scheduler.report({"op": "cancelled-keys", "keys": keys, "reason": "lost worker"}, client=client)
