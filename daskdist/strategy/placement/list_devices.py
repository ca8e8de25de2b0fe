"""`list_devices`: the devices of this process, or of each worker of a cluster."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from daskdist.devices import Device, device, name_of, present
from daskdist.strategy.placement.cluster_resolver import ClusterResolver, connect


@dataclass(frozen=True)
class ListedDevice:
    """One device, as it was when it was listed.

    Parameters
    ----------
    name
        As a strategy takes it, such as ``"GPU:0"``.
    description
        What it is: a GPU's model.
    uuid
        What tells it from any other; of a GPU of NVIDIA's as ``nvidia-smi -L`` writes it.
    free_bytes, total_bytes
        Its memory.
    worker, address
        Of the worker that has it, the name and address; None of this process.
    """

    name: str
    description: str
    uuid: str
    free_bytes: int
    total_bytes: int
    worker: str | None = None
    address: str | None = None


class ListedDevices(tuple[ListedDevice, ...]):
    """Devices; it prints as a table, one row a device."""

    __slots__ = ()

    def __repr__(self) -> str:
        with_worker = any(each.worker is not None for each in self)
        headings = [*["worker"] * with_worker, "name", "free", "total", "uuid", "description"]
        rows = [[*[str(each.worker)] * with_worker, *_cells(each)] for each in self]
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (headings, *rows)]
        return "\n".join(lines)

    __str__ = __repr__


def list_devices(client: Any = None) -> ListedDevices:
    """List the devices that replicas can be on.

    Parameters
    ----------
    client
        If None, those of this process. Or else the cluster whose workers are asked, in whatever way
        `MultiWorkerMirroredStrategy` takes it: a client, a cluster object, an address, a `ClusterResolver`.

    Returns
    -------
    ListedDevices
        A tuple of `ListedDevice`, worker by worker: the GPUs it sees in its own order, and ``CPU:0``. More processors,
        ``CPU:1`` and so on, are slots that share what there is, and are not listed.

    Raises
    ------
    ClusterError
        The cluster cannot be used.

    Notes
    -----
    Workers that see the same GPU each list it, with one UUID. Of a GPU that a process does not use yet the memory is
    what NVIDIA's driver tells, and asking makes no use of it.

    >>> [each.name for each in list_devices()][-1]
    'CPU:0'
    """
    if client is None:
        return ListedDevices(_listed())
    found: list[ListedDevice] = []
    with ExitStack() as opened:
        resolver = client if isinstance(client, ClusterResolver) else ClusterResolver(client)
        client, workers = connect(resolver, opened)
        there = client.run(listed, workers=[each.address for each in workers])
        for worker in workers:
            found += [replace(each, worker=worker.name, address=worker.address) for each in there[worker.address]]
    return ListedDevices(found)


async def listed() -> list[ListedDevice]:
    """Return the devices of this worker; in a thread, as the libraries of devices take long to load."""
    return await asyncio.to_thread(_listed)


def _listed() -> list[ListedDevice]:
    return [_of(each) for each in (*present(), device("CPU:0"))]


def _of(device: Device) -> ListedDevice:
    free, total = device.memory_info()
    return ListedDevice(name_of(device), device.description, device.uuid, free, total)


def _cells(listed: ListedDevice) -> list[str]:
    return [listed.name, _size(listed.free_bytes), _size(listed.total_bytes), listed.uuid, listed.description]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
