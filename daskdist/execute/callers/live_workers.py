"""The workers that take part, and what becomes of calls on those that are lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from distributed import Scheduler

_OVER: Final = frozenset({"memory", "erred"})


class LiveWorkers:
    """The workers that take part, as all callers of one strategy know them.

    Parameters
    ----------
    workers
        Their addresses.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        # Those that are left and those that are not, replaced together.
        self._both: tuple[tuple[str, ...], tuple[str, ...]] = tuple(workers), ()
        # The directory of each, which no other process has.
        self._directories: dict[str, str] = {}
        # Whether something failed since it was last seen which workers are there.
        self.in_doubt = False
        # Whether the program connects to the workers directly.
        self.is_direct = True

    @property
    def present(self) -> tuple[str, ...]:
        """Those that take part."""
        return self._both[0]

    @property
    def lost(self) -> tuple[str, ...]:
        """Those without which the others go on."""
        return self._both[1]

    def missing(self, there: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Those that take part and are not there any more, though another one may be at the address.

        Parameters
        ----------
        there
            What the scheduler knows of each worker, by address.

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
            if worker not in there
            or known.setdefault(worker, there[worker]["local_directory"]) != there[worker]["local_directory"]
        ]

    def drop(self, addresses: Collection[str]) -> None:
        """Go on without some.

        >>> live_workers = LiveWorkers(["tcp://a:1", "tcp://b:1"])
        >>> live_workers.drop(["tcp://a:1"])
        >>> live_workers.present, live_workers.lost
        (('tcp://b:1',), ('tcp://a:1',))
        """
        present, lost = self._both
        self._both = (
            tuple(each for each in present if each not in addresses),
            (*lost, *(each for each in present if each in addresses)),
        )


def cancel_lost_tasks(addresses: Sequence[str], client: str, *, dask_scheduler: Scheduler) -> None:
    """Cancel what can be made on lost workers only, and what waits for it: Dask would wait without end."""
    # One that was started anew at its address makes what others want of it.
    lost = set(addresses) - set(dask_scheduler.workers)
    waiting: list[Any] = [
        task
        for task in dask_scheduler.tasks.values()
        if task.worker_restrictions and not task.loose_restrictions and task.worker_restrictions <= lost
    ]
    found: dict[str, Any] = {}
    while waiting:
        task = waiting.pop()
        if task.state not in _OVER and task.key not in found:
            found[task.key] = task
            waiting += task.dependents
    asking = dask_scheduler.clients.get(client)
    wanted = [key for key, task in found.items() if asking in (task.who_wants or ())]
    if wanted:
        dask_scheduler.client_releases_keys(wanted, client, stimulus_id="daskdist-lost-worker")
        dask_scheduler.report({"op": "cancelled-keys", "keys": wanted, "reason": "lost worker"}, client=client)
