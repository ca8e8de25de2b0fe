"""The assignment of devices to the replicas of each worker, without sharing a device between workers if possible.

All of it is pure: what workers see is asked for elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from daskdist.errors import ArgumentError
from daskdist.strategy.placement.replica_counts import Worker

_OPERATION: Final = "MultiWorkerMirroredStrategy"


@dataclass(frozen=True)
class VisibleDevices:
    """The devices, other than processors, that a worker sees.

    Parameters
    ----------
    host
        The machine it is on.
    names, uuids
        Of its devices, in their order there.
    has_first
        Whether who started it means it to have the first of them, as dask-cuda does.
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
        In order.
    visible_devices
        What each sees.
    wanted
        How many replicas each is to have, where that is said.
    share_devices
        Whether workers may have one device where there are not enough.

    Raises
    ------
    ArgumentError
        A worker is to have more than it sees; or there are not enough for all, and they are not to be shared.

    Notes
    -----
    A worker that sees none has processors, as many as it is to have, or one. Devices are dealt in rounds, one to each
    worker in order, the first in its own order that is left; a worker gives one up for another of its own where a later
    one would have none. Where it is not said how many, a worker has all that are left to it, but where each of them is
    meant to have its first: dask-cuda shows each worker all GPUs, from its own on.

    >>> alice, bob = Worker("tcp://a:1", "alice", 1), Worker("tcp://a:2", "bob", 1)
    >>> both = VisibleDevices("a", ("GPU:0", "GPU:1"), ("GPU-6f", "GPU-70"))
    >>> assign_devices([alice, bob], [both, both], [None, None])
    [('GPU:0',), ('GPU:1',)]
    """
    _check_enough_seen(workers, visible_devices, wanted)
    those = [number for number, visible in enumerate(visible_devices) if visible.uuids and wanted[number] != 0]
    dealt = _Assignment([visible.uuids for visible in visible_devices])
    goals = dict.fromkeys(those, 1)
    for number in those:
        goals[number] = wanted[number] or 1
    for turn in range(max(goals.values(), default=0)):
        for number in those:
            if turn < goals[number] and not dealt.give(number) and not (share_devices and dealt.share(number)):
                raise _too_few(workers, visible_devices, those, goals, number)
    open_ended = [each for each in those if wanted[each] is None and not _has_first(visible_devices, those, each)]
    dealt.give_rest(open_ended)
    return [
        _in_order(visible, dealt.of(number)) if visible.uuids else _processors(1 if count is None else count)
        for number, (visible, count) in enumerate(zip(visible_devices, wanted, strict=True))
    ]


class _Assignment:
    # Which worker has which device, of what each sees; workers are numbers.
    def __init__(self, seen: Sequence[Sequence[str]]) -> None:
        self._seen = seen
        self._owners: dict[str, int] = {}
        self._shared: list[tuple[int, str]] = []

    def of(self, worker: int) -> set[str]:
        return {each for each, owner in self._owners.items() if owner == worker} | {
            each for owner, each in self._shared if owner == worker
        }

    def give(self, worker: int) -> bool:
        # One more, if need be one for which its owner takes another.
        tried: set[str] = set()
        free = next((each for each in self._seen[worker] if each not in self._owners), None)
        if free is None:
            return self._move(worker, tried)
        self._owners[free] = worker
        return True

    def _move(self, worker: int, tried: set[str]) -> bool:
        for each in self._seen[worker]:
            owner = self._owners.get(each)
            if owner == worker or each in tried:
                continue
            tried.add(each)
            if owner is None or self._move(owner, tried):
                self._owners[each] = worker
                return True
        return False

    def share(self, worker: int) -> bool:
        # The one that fewest have, the first of those.
        own = self.of(worker)
        times = Counter([*self._owners, *(each for _, each in self._shared)])
        left = [each for each in self._seen[worker] if each not in own]
        if left:
            self._shared.append((worker, min(left, key=lambda each: times[each])))
        return bool(left)

    def give_rest(self, workers: Sequence[int]) -> None:
        # To who has fewest of those that see it.
        for each in dict.fromkeys(each for worker in workers for each in self._seen[worker]):
            if each not in self._owners:
                who = [worker for worker in workers if each in self._seen[worker]]
                self._owners[each] = min(who, key=lambda worker: len(self.of(worker)))


def _in_order(visible: VisibleDevices, own: set[str]) -> tuple[str, ...]:
    return tuple(name for name, each in zip(visible.names, visible.uuids, strict=True) if each in own)


def _processors(count: int) -> tuple[str, ...]:
    return tuple(f"CPU:{k}" for k in range(count))


def _has_first(visible_devices: Sequence[VisibleDevices], those: Sequence[int], worker: int) -> bool:
    own = visible_devices[worker]
    others = [
        visible_devices[each].uuids
        for each in those
        if each != worker and set(visible_devices[each].uuids) & set(own.uuids)
    ]
    lists = [own.uuids, *others]
    are_turned = all(_is_turned(own.uuids, each) for each in others)
    return own.has_first or bool(others and are_turned and len({each[0] for each in lists}) == len(lists))


def _is_turned(one: Sequence[str], other: Sequence[str]) -> bool:
    # True if one list is a rotation of the other.
    return any(tuple(one) == (*other[start:], *other[:start]) for start in range(len(other)))


def _check_enough_seen(
    workers: Sequence[Worker], visible_devices: Sequence[VisibleDevices], wanted: Sequence[int | None]
) -> None:
    for worker, visible, count in zip(workers, visible_devices, wanted, strict=True):
        if visible.names and count is not None and count > len(visible.names):
            raise ArgumentError(
                f"{_OPERATION}: worker {worker.name!r} is to have {count} replicas and sees "
                f"{', '.join(visible.names)}; "
                f"give num_replicas_per_worker {len(visible.names)} or less, or name devices, processors too, with "
                "device_assignment"
            )


def _too_few(
    workers: Sequence[Worker],
    visible_devices: Sequence[VisibleDevices],
    those: Sequence[int],
    goals: dict[int, int],
    worker: int,
) -> ArgumentError:
    # The workers that see the same devices, and the devices.
    around, seen = {worker}, set(visible_devices[worker].uuids)
    while more := {each for each in those if each not in around and seen & set(visible_devices[each].uuids)}:
        around |= more
        seen |= {each for number in more for each in visible_devices[number].uuids}
    who = sorted(around)
    names = ", ".join(workers[each].name for each in who)
    needed = sum(goals[each] for each in who)
    kind = visible_devices[worker].names[0].partition(":")[0]
    host = f" on {visible_devices[worker].host}" if visible_devices[worker].host else ""
    return ArgumentError(
        f"{_OPERATION}: workers {names}{host} are to have {needed} devices, and see {len(seen)} of kind {kind} between "
        f"them ({', '.join(sorted(seen))}); start one worker a device, as dask-cuda does, give some none with "
        "num_replicas_per_worker, or let workers share devices with share_devices=True"
    )
