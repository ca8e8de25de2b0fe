"""The assignment of devices to the replicas of each worker, without sharing a device between workers if possible.

The functions are pure; `probe` queries the devices of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from daskdist.errors import ArgumentError
from daskdist.strategy.placement.replicas_per_worker import Worker

_OPERATION: Final = "MultiWorkerMirroredStrategy"


@dataclass(frozen=True)
class VisibleDevices:
    """The devices, other than CPUs, that a worker sees.

    Parameters
    ----------
    host
        The machine of the worker.
    names, uuids
        The names and UUIDs of the devices, in the worker's order.
    has_first
        Whether the worker was started to use the first device, as dask-cuda does.
    """

    host: str = ""
    names: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    has_first: bool = False


def assign_devices(
    workers: Sequence[Worker],
    visible_devices: Sequence[VisibleDevices],
    wanted: Sequence[int | None],
    share_devices: bool = False,
) -> list[tuple[str, ...]]:
    """Return the names of the devices of each worker's replicas.

    Parameters
    ----------
    workers
        The workers, in order.
    visible_devices
        The devices that each worker sees.
    wanted
        The number of replicas of each worker; None if not given.
    share_devices
        Whether workers may share a device if there are not enough.

    Raises
    ------
    ArgumentError
        A worker should have more devices than it sees; or there are not enough for all, and sharing is not allowed.

    Notes
    -----
    A worker that sees no devices gets CPUs: the given number, or one. Devices are assigned in rounds, one to each
    worker in order: the first free one in the worker's own order. A worker exchanges a device for another that it sees
    if a later worker would get none. Without a given number, a worker also gets the remaining devices, unless each
    worker is meant to use its first: dask-cuda shows each worker all GPUs, starting at its own.

    >>> alice, bob = Worker("tcp://a:1", "alice"), Worker("tcp://a:2", "bob")
    >>> both = VisibleDevices("a", ("GPU:0", "GPU:1"), ("GPU-6f", "GPU-70"))
    >>> assign_devices([alice, bob], [both, both], [None, None])
    [('GPU:0',), ('GPU:1',)]
    """
    _check_enough_visible(workers, visible_devices, wanted)
    takers = [number for number, visible in enumerate(visible_devices) if visible.uuids and wanted[number] != 0]
    assigned = _Assignment([visible.uuids for visible in visible_devices])
    goals = {number: wanted[number] or 1 for number in takers}
    for turn in range(max(goals.values(), default=0)):
        for number in takers:
            if turn < goals[number] and not assigned.give(number) and not (share_devices and assigned.share(number)):
                raise _too_few(workers, visible_devices, takers, goals, number)
    open_ended = [
        number for number in takers if wanted[number] is None and not _has_first(visible_devices, takers, number)
    ]
    assigned.give_rest(open_ended)
    return [
        _in_order(visible, assigned.of(number)) if visible.uuids else _processors(1 if count is None else count)
        for number, (visible, count) in enumerate(zip(visible_devices, wanted, strict=True))
    ]


class _Assignment:
    # The devices assigned to workers, given by number, out of those that each worker sees.
    def __init__(self, seen: Sequence[Sequence[str]]) -> None:
        self._seen = seen
        # UUID -> the worker that the device was given to, and then those that share it.
        self._holders: dict[str, list[int]] = {}

    def of(self, worker: int) -> set[str]:
        return {uuid for uuid, holders in self._holders.items() if worker in holders}

    def give(self, worker: int) -> bool:
        # Assign one more device; if none is free, one whose owner can take another instead.
        free = next((uuid for uuid in self._seen[worker] if uuid not in self._holders), None)
        if free is None:
            return self._move(worker, set())
        self._holders[free] = [worker]
        return True

    def _move(self, worker: int, tried: set[str]) -> bool:
        for uuid in self._seen[worker]:
            holders = self._holders.get(uuid, [])
            if holders[:1] == [worker] or uuid in tried:
                continue
            tried.add(uuid)
            if not holders or self._move(holders[0], tried):
                self._holders[uuid] = [worker, *holders[1:]]
                return True
        return False

    def share(self, worker: int) -> bool:
        # Share the device that the fewest workers have, the first of those.
        left = [holders for uuid in self._seen[worker] if worker not in (holders := self._holders[uuid])]
        if left:
            min(left, key=len).append(worker)
        return bool(left)

    def give_rest(self, workers: Sequence[int]) -> None:
        # Assign each to the worker with the fewest devices among those that see it.
        for uuid in dict.fromkeys(uuid for worker in workers for uuid in self._seen[worker]):
            if uuid not in self._holders:
                candidates = [worker for worker in workers if uuid in self._seen[worker]]
                self._holders[uuid] = [min(candidates, key=lambda worker: len(self.of(worker)))]


def _in_order(visible: VisibleDevices, assigned: set[str]) -> tuple[str, ...]:
    return tuple(name for name, uuid in zip(visible.names, visible.uuids, strict=True) if uuid in assigned)


def _processors(count: int) -> tuple[str, ...]:
    return tuple(f"CPU:{k}" for k in range(count))


def _has_first(visible_devices: Sequence[VisibleDevices], takers: Sequence[int], worker: int) -> bool:
    visible = visible_devices[worker]
    others = [
        visible_devices[taker].uuids
        for taker in takers
        if taker != worker and set(visible_devices[taker].uuids) & set(visible.uuids)
    ]
    lists = [visible.uuids, *others]
    are_turned = all(_is_turned(visible.uuids, uuids) for uuids in others)
    return visible.has_first or bool(others and are_turned and len({uuids[0] for uuids in lists}) == len(lists))


def _is_turned(uuids: Sequence[str], other: Sequence[str]) -> bool:
    # True if one list is a rotation of the other.
    return any(tuple(uuids) == (*other[start:], *other[:start]) for start in range(len(other)))


def _check_enough_visible(
    workers: Sequence[Worker], visible_devices: Sequence[VisibleDevices], wanted: Sequence[int | None]
) -> None:
    for worker, visible, count in zip(workers, visible_devices, wanted, strict=True):
        if visible.names and count is not None and count > len(visible.names):
            raise ArgumentError(
                f"{_OPERATION}: worker {worker.name!r} should have {count} replicas and sees "
                f"{', '.join(visible.names)}; "
                f"give num_replicas_per_worker {len(visible.names)} or less, or name devices, also CPUs, with "
                "device_assignment"
            )


def _too_few(
    workers: Sequence[Worker],
    visible_devices: Sequence[VisibleDevices],
    takers: Sequence[int],
    goals: dict[int, int],
    worker: int,
) -> ArgumentError:
    # Find the workers that see common devices, and these devices.
    around, seen = {worker}, set(visible_devices[worker].uuids)
    while more := {taker for taker in takers if taker not in around and seen & set(visible_devices[taker].uuids)}:
        around |= more
        seen |= {uuid for number in more for uuid in visible_devices[number].uuids}
    sharing = sorted(around)
    names = ", ".join(workers[number].name for number in sharing)
    needed = sum(goals[number] for number in sharing)
    kind = visible_devices[worker].names[0].partition(":")[0]
    host = f" on {visible_devices[worker].host}" if visible_devices[worker].host else ""
    return ArgumentError(
        f"{_OPERATION}: workers {names}{host} should have {needed} devices, and see {len(seen)} of kind {kind} between "
        f"them ({', '.join(sorted(seen))}); start one worker per device, as dask-cuda does, exclude workers with "
        "num_replicas_per_worker, or let workers share devices with share_devices=True"
    )
