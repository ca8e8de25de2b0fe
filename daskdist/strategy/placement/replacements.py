"""The workers that take the places of lost ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Final

from daskdist.core.arguments import yes_or_no
from daskdist.core.cardinality import counted
from daskdist.devices import named
from daskdist.errors import ArgumentError, ClusterError, WaitTimeoutError
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.placement.cluster_resolver import in_order
from daskdist.strategy.placement.replicas_per_worker import Worker
from daskdist.waiting import wait_intervals

# Returns the address of the worker and the device of each replica.
Assign = Callable[[Sequence[Worker]], Sequence[tuple[str, str]]]
_LOOK_EVERY_S: Final = 0.1
logger: Final = logging.getLogger("daskdist")


@dataclass
class _Place:
    name: Any
    devices: tuple[str, ...]
    worker: str


class Replacements:
    """The places of a strategy's workers, which other workers may take.

    A worker that was restarted takes the place of the one of its name, with the same devices. If any worker may take
    part, so may others take places without GPUs.

    Parameters
    ----------
    group
        The replicas at first.
    connected
        The scheduler's description of each connected worker, by address.
    assign
        Places replicas on workers, if all places are to be taken by other workers.
    takes_any
        Whether any worker of the cluster may take part.
    is_elastic
        Whether workers for which there is no place take part as well.

    >>> group = ReplicaGroup("token", (Replica("tcp://a:1", "CPU:0"), Replica("tcp://b:1", "CPU:0")))
    >>> running = {"name": "bob", "status": "running", "local_directory": "/tmp/1"}
    >>> connected = {"tcp://a:1": {**running, "name": "alice"}, "tcp://b:1": running}
    >>> replacements = Replacements(group, connected, lambda workers: [(worker.address, "CPU:0") for worker in workers])
    >>> replacements.take(["tcp://a:1"], connected)
    []
    >>> replacements.take(["tcp://a:1"], {**connected, "tcp://b:1": {**running, "local_directory": "/tmp/2"}})
    [Replica(worker='tcp://b:1', device='CPU:0')]
    """

    def __init__(
        self,
        group: ReplicaGroup,
        connected: Mapping[str, Mapping[str, Any]],
        assign: Assign,
        *,
        takes_any: bool = False,
        is_elastic: bool = False,
    ) -> None:
        self._places = _places_of(group.replicas, connected)
        self._assign = assign
        self._takes_any = takes_any
        self._is_elastic = is_elastic
        self._num_workers, self._num_replicas = len(connected), len(group.replicas)
        # The address of each worker that ever took part, with the local directory of the last one, which identifies it.
        self._known: dict[str, str] = {}
        # The address of the process that restarts each of them, if Dask started one.
        self._nannies: dict[str, str | None] = {}
        self._note(group.workers, connected)

    def are_needed(self, present: Sequence[str]) -> bool:
        """Return whether a place is free, or further workers may take part."""
        return self._is_elastic or any(place.worker not in present for place in self._places)

    def nannies(self, workers: Iterable[str]) -> list[str]:
        """Return the addresses of the processes that restart workers, as far as there are some."""
        return [nanny for worker in workers if (nanny := self._nannies.get(worker)) is not None]

    def take(self, present: Sequence[str], connected: Mapping[str, Mapping[str, Any]]) -> list[Replica]:
        """Give the free places to workers, and further places if possible; return their replicas."""
        candidates = self._candidates(connected)
        added: list[_Place] = []
        for may_take in (self._is_restarted, self._is_like):
            for place in [free for free in self._places if free.worker not in present and free not in added]:
                worker = next((address for address in candidates if may_take(connected[address]["name"], place)), None)
                if worker is not None:
                    place.worker, place.name = worker, connected[worker]["name"]
                    candidates.remove(worker)
                    self._note([worker], connected)
                    added.append(place)
        if self._is_elastic and candidates:
            added += self._further_places(candidates, present, connected)
        return [Replica(place.worker, device) for place in added for device in place.devices]

    def _further_places(
        self, candidates: Sequence[str], present: Sequence[str], connected: Mapping[str, Mapping[str, Any]]
    ) -> list[_Place]:
        workers = in_order({address: connected[address] for address in (*present, *candidates) if address in connected})
        try:
            slots = self._assign(workers)
        except ArgumentError as error:
            logger.warning("%s cannot take part: %s", ", ".join(candidates), error)
            return []
        taken = {(place.worker, device) for place in self._places for device in place.devices}
        if not taken.issuperset(slot for slot in slots if slot[0] in present):
            logger.warning("%s cannot take part, as replicas would need other devices", ", ".join(candidates))
            return []
        further = _places_of([Replica(*slot) for slot in slots if slot[0] in candidates], connected)
        self._places += further
        self._note([place.worker for place in further], connected)
        self._num_workers, self._num_replicas = len(self._places), sum(len(place.devices) for place in self._places)
        return further

    def take_all(self, client: Any) -> list[Replica]:
        """Place all replicas on other workers, which have connected to another scheduler; return the replicas.

        It waits for as many workers as there were, and continues with fewer after ``daskdist.timeouts.workers``.

        Raises
        ------
        ClusterError
            There is none then, or one is missing that the user named.
        """
        names = [place.name for place in self._places]
        tried: list[Worker] | None = None
        replicas: list[Replica] = []
        refused: Exception | None = None
        waited_for = f"{counted(self._num_workers, 'worker')} of the scheduler at {client.scheduler.address}"
        try:
            for within_s in wait_intervals(waited_for, "timeouts.workers", _LOOK_EVERY_S):
                connected = workers_of(client)
                workers = in_order({address: connected[address] for address in self._candidates(connected)})
                workers = sorted(workers, key=lambda worker: worker.name not in names)[: self._num_workers]
                if workers != tried:
                    tried = workers
                    try:
                        replicas = [Replica(*slot) for slot in self._assign(workers)] if workers else []
                    except ArgumentError as error:
                        replicas, refused = [], error
                if len(replicas) >= self._num_replicas:
                    break
                time.sleep(within_s)
        except WaitTimeoutError as error:
            if not replicas:
                raise ClusterError(str(error)) from (refused or error)
        taken = _places_of(replicas, connected)
        names = [place.name for place in taken]
        free = [replace(place, worker="") for place in self._places if place.name not in names]
        # Workers that come later may take the other places.
        self._places = taken + free[: max(len(self._places) - len(taken), 0)]
        self._note([place.worker for place in taken], connected)
        return replicas

    def forget(self, workers: Sequence[str]) -> None:
        """Let workers be chosen again, which were chosen and did not take part."""
        for worker in workers:
            self._known.pop(worker, None)

    def _candidates(self, connected: Mapping[str, Mapping[str, Any]]) -> list[str]:
        # A worker that was given up may still be connected.
        return [
            worker
            for worker, info in connected.items()
            if info["status"] == "running"
            and (worker not in self._known or self._known[worker] != info["local_directory"])
        ]

    def _note(self, workers: Sequence[str], connected: Mapping[str, Mapping[str, Any]]) -> None:
        for worker in filter(connected.__contains__, workers):
            self._known[worker] = connected[worker]["local_directory"]
            self._nannies[worker] = connected[worker].get("nanny")

    def _is_restarted(self, name: Any, place: _Place) -> bool:
        return bool(name == place.name)

    def _is_like(self, name: Any, place: _Place) -> bool:
        return self._takes_any and all(named(device).is_host for device in place.devices)


def checked_elastic(elastic: Any, device_assignment: Any, num_replicas_per_worker: Any) -> bool:
    """Return whether further workers may take part.

    Raises
    ------
    ArgumentError
        The value is neither True nor False, or the workers are given.
    """
    yes_or_no("MultiWorkerMirroredStrategy", "elastic", elastic)
    if elastic and (device_assignment is not None or not isinstance(num_replicas_per_worker, (int, NoneType))):
        raise ArgumentError(
            "MultiWorkerMirroredStrategy: elastic is for any number of workers, and device_assignment or "
            "num_replicas_per_worker names those with replicas; give one number for all workers, or leave it out"
        )
    return bool(elastic)


def _places_of(replicas: Sequence[Replica], connected: Mapping[str, Mapping[str, Any]]) -> list[_Place]:
    devices = {
        worker: tuple([replica.device for replica in replicas if replica.worker == worker])
        for worker in dict.fromkeys(str(replica.worker) for replica in replicas)
    }
    return [_Place(connected[worker]["name"], on, worker) for worker, on in devices.items() if worker in connected]
