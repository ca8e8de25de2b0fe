"""The workers that take the places of lost ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskdist.devices import named
from daskdist.strategy.group import Replica, ReplicaGroup


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
    takes_any
        Whether any worker of the cluster may take part.

    >>> group = ReplicaGroup("token", (Replica("tcp://a:1", "CPU:0"), Replica("tcp://b:1", "CPU:0")))
    >>> running = {"name": "bob", "status": "running"}
    >>> replacements = Replacements(group, {"tcp://a:1": {**running, "name": "alice"}, "tcp://b:1": running})
    >>> replacements.take(["tcp://a:1"], {"tcp://a:1": running, "tcp://b:2": running})
    [Replica(worker='tcp://b:2', device='CPU:0')]
    """

    def __init__(
        self, group: ReplicaGroup, connected: Mapping[str, Mapping[str, Any]], *, takes_any: bool = False
    ) -> None:
        self._places = [
            _Place(
                connected[worker]["name"],
                tuple([group.replicas[number].device for number in group.members(worker)]),
                worker,
            )
            for worker in group.workers
            if worker in connected
        ]
        self._takes_any = takes_any
        # The addresses of all workers that ever took part.
        self._known = set(group.workers)

    def are_needed(self, present: Sequence[str]) -> bool:
        """Return whether a place is free."""
        return any(place.worker not in present for place in self._places)

    def take(self, present: Sequence[str], connected: Mapping[str, Mapping[str, Any]]) -> list[Replica]:
        """Give the places that are free to workers; return their replicas."""
        # A worker at the address of a lost one would be taken for it.
        candidates = [
            worker for worker, what in connected.items() if worker not in self._known and what["status"] == "running"
        ]
        added: list[_Place] = []
        for may_take in (self._is_restarted, self._is_like):
            for place in [free for free in self._places if free.worker not in present and free not in added]:
                worker = next((address for address in candidates if may_take(connected[address]["name"], place)), None)
                if worker is not None:
                    place.worker, place.name = worker, connected[worker]["name"]
                    candidates.remove(worker)
                    self._known.add(worker)
                    added.append(place)
        return [Replica(place.worker, device) for place in added for device in place.devices]

    def _is_restarted(self, name: Any, place: _Place) -> bool:
        return bool(name == place.name)

    def _is_like(self, name: Any, place: _Place) -> bool:
        return self._takes_any and all(named(device).is_host for device in place.devices)
