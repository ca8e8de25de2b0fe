"""`DeviceAssignment`: the worker and the device of each replica."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from daskdist.devices import device, name_of, present
from daskdist.errors import ArgumentError
from daskdist.strategy.placement.assign_devices import assign_devices
from daskdist.strategy.placement.probe import check_devices_on_workers, probe_devices
from daskdist.strategy.placement.replicas_per_worker import (
    Counts,
    ReplicasPerWorker,
    Worker,
    as_counts,
    num_replicas_on,
    places_of,
)

_EXAMPLE: Final = 'DeviceAssignment([("0", "CPU:0"), ("1", "CPU:0")])'


@dataclass(frozen=True, init=False)
class DeviceAssignment:
    """The worker and the device of each replica, in the order of their ids.

    Parameters
    ----------
    replicas
        For each replica, the name or address of its worker and the name of its device. Replicas of one worker must be
        consecutive. Workers that are not named are not used, not even to read data.

    Raises
    ------
    ArgumentError
        There are no replicas, one is not such a pair, two are on one device, or those of a worker are not consecutive.
    UnknownDeviceError
        The kind of device is unknown. The devices of workers are only checked when a strategy is created.

    Notes
    -----
    The order of replicas is also the order of workers: the worker that is named first has the first input pipeline.

    >>> DeviceAssignment([("alpha", "CPU:0"), ("alpha", "/cpu:1"), ("beta", "CPU:0")]).replicas
    (('alpha', 'CPU:0'), ('alpha', 'CPU:1'), ('beta', 'CPU:0'))
    """

    replicas: tuple[tuple[str, str], ...]

    def __init__(self, replicas: Iterable[tuple[str | int, str]]) -> None:
        object.__setattr__(self, "replicas", _as_pairs(replicas))
        if not self.replicas:
            raise ArgumentError(f"DeviceAssignment: there are no replicas; give one or more, such as {_EXAMPLE}")
        _check_order([worker for worker, _ in self.replicas], self.replicas)

    @property
    def num_workers(self) -> int:
        """The number of named workers."""
        return len({worker for worker, _ in self.replicas})

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas on one worker."""
        names = [worker for worker, _ in self.replicas]
        return max(map(names.count, names))

    def on(self, workers: Sequence[Worker]) -> list[tuple[str, str]]:
        """Return the address of the worker and the device of each replica.

        Raises
        ------
        ArgumentError
            A named worker does not exist, or has separate entries by name and by address.

        >>> workers = [Worker("tcp://a:1", "alice"), Worker("tcp://b:1", "bob")]
        >>> DeviceAssignment([("bob", "CPU:0"), ("tcp://a:1", "CPU:0")]).on(workers)
        [('tcp://b:1', 'CPU:0'), ('tcp://a:1', 'CPU:0')]
        """
        names = [(name, f"DeviceAssignment: replica {k} is on") for k, (name, _) in enumerate(self.replicas)]
        places = places_of(workers, names)
        pairs = [(workers[place].address, on) for place, (_, on) in zip(places, self.replicas, strict=True)]
        # A worker may be given by its name and by its address.
        _check_order([address for address, _ in pairs], self.replicas)
        return pairs

    def slots(self, client: Any, workers: Sequence[Worker], share_devices: bool = False) -> list[tuple[str, str]]:
        """Return the result of `on` after checking the devices on workers, as `check_devices_on_workers` does.

        Raises
        ------
        ArgumentError
            Two workers would use the same device, and sharing is not allowed.
        """
        pairs = self.on(workers)
        check_devices_on_workers(client, workers, pairs)
        if not share_devices:
            _check_not_shared(client, workers, pairs)
        return pairs


@dataclass(frozen=True)
class PerWorker:
    """A number of replicas on each worker, on its devices in order.

    Parameters
    ----------
    counts
        The result of `as_counts`; None for one replica per device.
    """

    counts: Counts | None

    @property
    def num_workers(self) -> int | None:
        """The number of workers with a given count, or that this process has devices for; None for any."""
        if self.counts is None or isinstance(self.counts, int):
            num_devices = len(present())
            return max(1, num_devices // (self.counts or 1)) if num_devices else None
        return len(self.counts)

    @property
    def most_replicas(self) -> int:
        """The largest of the counts."""
        counts = self.counts
        if counts is None or isinstance(counts, int):
            return counts or 1
        return max(counts.values() if isinstance(counts, dict) else counts)

    def slots(self, client: Any, workers: Sequence[Worker], share_devices: bool = False) -> list[tuple[str, str]]:
        """Return the address of the worker and the device of each replica.

        It raises the errors of `num_replicas_on`, `assign_devices` and `check_devices_on_workers`.
        """
        numbers = num_replicas_on(workers, self.counts)
        # Workers without replicas are not asked, and their devices are free for others.
        wanted = {worker: number for worker, number in zip(workers, numbers, strict=True) if number != 0}
        taking = list(wanted)
        names = assign_devices(taking, probe_devices(client, taking), list(wanted.values()), share_devices)
        pairs = [
            (worker.address, name)
            for worker, worker_devices in zip(taking, names, strict=True)
            for name in worker_devices
        ]
        check_devices_on_workers(client, taking, pairs)
        return pairs


def placing(
    device_assignment: DeviceAssignment | None,
    num_replicas_per_worker: ReplicasPerWorker | None,
) -> DeviceAssignment | PerWorker:
    """Return the placement of replicas by the given argument; on each worker's devices if neither is given.

    Raises
    ------
    ArgumentError
        Both are given, or one is invalid.
    """
    if device_assignment is None:
        return PerWorker(None if num_replicas_per_worker is None else as_counts(num_replicas_per_worker))
    if num_replicas_per_worker is not None:
        raise ArgumentError(
            "MultiWorkerMirroredStrategy: device_assignment and num_replicas_per_worker both place the replicas; "
            "give one of them"
        )
    if not isinstance(device_assignment, DeviceAssignment):
        raise ArgumentError(
            f"MultiWorkerMirroredStrategy: device_assignment is {device_assignment!r:.80}; write it like {_EXAMPLE}"
        )
    return device_assignment


def _check_not_shared(client: Any, workers: Sequence[Worker], pairs: Sequence[tuple[str, str]]) -> None:
    by_address = {worker.address: worker for worker in workers}
    with_devices = [
        by_address[address] for address in dict.fromkeys(address for address, on in pairs if not device(on).is_host)
    ]
    if len(with_devices) < 2:
        return
    visible_devices = dict(zip(with_devices, probe_devices(client, with_devices), strict=True))
    seen: dict[str, tuple[int, Worker, str]] = {}
    for number, (address, on) in enumerate(pairs):
        worker = by_address[address]
        visible = visible_devices.get(worker)
        if visible is None or on not in visible.names:
            continue
        uuid = visible.uuids[visible.names.index(on)]
        before, other, its = seen.setdefault(uuid, (number, worker, on))
        if before != number:
            raise ArgumentError(
                f"DeviceAssignment: replica {before} on {its} of worker {other.name!r} and replica {number} on {on} of "
                f"worker {worker.name!r} are on one device, {uuid}; give each a separate device, which "
                "list_devices(client) lists, or let workers share devices with share_devices=True"
            )


def _as_pairs(replicas: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(replicas, (str, bytes)) or not isinstance(replicas, Iterable):
        raise ArgumentError(
            f"DeviceAssignment: {replicas!r:.80} is not a list of workers and devices; write it like {_EXAMPLE}"
        )
    pairs = []
    for number, replica in enumerate(replicas):
        is_pair = isinstance(replica, Sequence) and not isinstance(replica, str) and len(replica) == 2
        if not is_pair or not isinstance(replica[0], (str, int)) or not isinstance(replica[1], str):
            raise ArgumentError(
                f"DeviceAssignment: replica {number} is {replica!r:.80}; give the name of a worker and of a device, "
                'such as ("0", "CPU:0")'
            )
        worker, on = replica
        pairs.append((str(worker), name_of(device(on))))
    return tuple(pairs)


def _check_order(workers: Sequence[str], replicas: Sequence[tuple[str, str]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for number, (worker, (_, on)) in enumerate(zip(workers, replicas, strict=True)):
        if (before := seen.setdefault((worker, on), number)) != number:
            raise ArgumentError(
                f"DeviceAssignment: replicas {before} and {number} are both on {on} of worker {worker!r}; give each a "
                "separate device"
            )
    in_turn = [worker for worker, _ in itertools.groupby(workers)]
    for worker in in_turn:
        if in_turn.count(worker) > 1:
            numbers = [number for number, address in enumerate(workers) if address == worker]
            raise ArgumentError(
                f"DeviceAssignment: worker {worker!r} has replicas {numbers}, with others between them; put the "
                "replicas of one worker next to each other, as they share the data that it reads"
            )
