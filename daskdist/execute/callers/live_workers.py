"""The workers that take part, and the end of calls on lost workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from distributed import Scheduler

_OVER: Final = frozenset({"memory", "erred"})


class LiveWorkers:
    """The workers that take part, shared by all callers of one strategy.

    Parameters
    ----------
    workers
        Their addresses.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        # Present and lost workers, replaced together so that readers see a consistent pair.
        self._present_and_lost: tuple[tuple[str, ...], tuple[str, ...]] = tuple(workers), ()
        # The local directory of each worker, which identifies its process.
        self._directories: dict[str, str] = {}
        # True if something failed since the workers were last checked.
        self.in_doubt = False
        # True if the program connects to the workers directly.
        self.is_direct = True

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


def cancel_lost_tasks(addresses: Sequence[str], client: str, *, dask_scheduler: Scheduler) -> None:
    """Cancel the tasks that only lost workers may run, and their dependents: Dask would wait for them forever."""
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
