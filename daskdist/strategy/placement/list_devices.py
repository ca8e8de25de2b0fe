"""`list_devices`: the devices of this process, or of each worker of a cluster."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from daskdist.devices import Device, device, name_of, present
from daskdist.execute.callers.cluster_requests import run_on_workers
from daskdist.strategy.placement.cluster_resolver import ClusterResolver, connect
from daskdist.strategy.placement.device_assignment import PerWorker


@dataclass(frozen=True)
class ListedDevice:
    """One device, as of the time when it was listed.

    Parameters
    ----------
    name
        The name for strategies, such as ``"GPU:0"``.
    description
        A description, such as the model of a GPU.
    uuid
        The unique id; for an NVIDIA GPU as shown by ``nvidia-smi -L``.
    free_bytes, total_bytes
        The free and total memory.
    worker, address
        The name and address of the device's worker; None for this process.
    """

    name: str
    description: str
    uuid: str
    free_bytes: int
    total_bytes: int
    worker: str | None = None
    address: str | None = None


class ListedDevices(tuple[ListedDevice, ...]):
    """A tuple of devices, which prints as a table with one row per device."""

    __slots__ = ()

    def __repr__(self) -> str:
        with_worker = any(listed_device.worker is not None for listed_device in self)
        headings = [*["worker"] * with_worker, "name", "free", "total", "uuid", "description"]
        rows = [[*[str(listed_device.worker)] * with_worker, *_cells(listed_device)] for listed_device in self]
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (headings, *rows)]
        return "\n".join(lines)


def list_devices(client: Any = None) -> ListedDevices:
    """List the devices that replicas can be on.

    Parameters
    ----------
    client
        The cluster whose workers are asked, in any form that `MultiWorkerMirroredStrategy` accepts: a client, a cluster
        object, an address or a `ClusterResolver`. If None, the devices of this process are listed.

    Returns
    -------
    ListedDevices
        A tuple of `ListedDevice`, by worker: the GPUs that it sees, in its order, and ``CPU:0``. Further CPUs,
        ``CPU:1`` and so on, are slots on the same processors, and are not listed.

    Raises
    ------
    ClusterError
        The cluster cannot be used.

    Notes
    -----
    Workers that see the same GPU each list it, with the same UUID. The memory of a GPU that a process has not used is
    read from NVIDIA's driver, which does not initialize the GPU.

    >>> [each.name for each in list_devices()][-1]
    'CPU:0'
    """
    if client is None:
        return ListedDevices(listed())
    devices: list[ListedDevice] = []
    with ExitStack() as opened:
        resolver = client if isinstance(client, ClusterResolver) else ClusterResolver(client)
        client, workers = connect(resolver, opened, PerWorker(None))
        # In a thread, as device libraries are slow to load.
        by_address = run_on_workers(client, asyncio.to_thread, listed, workers=[worker.address for worker in workers])
        for worker in workers:
            devices += [
                replace(listed_device, worker=worker.name, address=worker.address)
                for listed_device in by_address[worker.address]
            ]
    return ListedDevices(devices)


def listed() -> list[ListedDevice]:
    """Return the devices of this process."""
    return [_of(present_device) for present_device in (*present(), device("CPU:0"))]


def _of(device: Device) -> ListedDevice:
    free, total = device.memory_info()
    return ListedDevice(name_of(device), device.description, device.uuid, free, total)


def _cells(listed: ListedDevice) -> list[str]:
    return [listed.name, _size(listed.free_bytes), _size(listed.total_bytes), listed.uuid, listed.description]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
