"""Queries of the devices that workers see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from daskdist.devices import name_of, named, present
from daskdist.errors import UnknownDeviceError
from daskdist.execute.callers.cluster_requests import run_on_workers
from daskdist.strategy.placement.assign_devices import VisibleDevices
from daskdist.strategy.placement.replicas_per_worker import Worker

# The name of the plugin that dask-cuda adds to each worker that it starts for a GPU, and nothing else does; others may
# preload its modules, too.
_DASK_CUDA: Final = ("dask_cuda", "CPUAffinity")


async def visible_on_worker(dask_worker: Any) -> VisibleDevices:
    """Return the devices that this worker sees; in a thread, as device libraries are slow to load."""
    return await asyncio.to_thread(_look, dask_worker)


def _look(worker: Any) -> VisibleDevices:
    devices = present()
    plugins = map(type, worker.plugins.values())
    return VisibleDevices(
        os.uname().nodename,
        tuple(map(name_of, devices)),
        tuple(device.uuid for device in devices),
        _DASK_CUDA in [(plugin.__module__.partition(".")[0], plugin.__name__) for plugin in plugins],
    )


async def missing_on_worker(names: Mapping[str, Sequence[str]], dask_worker: Any) -> list[tuple[str, str]]:
    """Return the devices named for this worker's address that it cannot use, each with the reason."""
    return await asyncio.to_thread(_missing, names[dask_worker.address])


def _missing(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, why) for name in names if (why := named(name).missing())]


def probe_devices(client: Any, workers: Sequence[Worker]) -> list[VisibleDevices]:
    """Return the devices that each worker sees."""
    addresses = [worker.address for worker in workers]
    visible = run_on_workers(client, visible_on_worker, workers=addresses) if addresses else {}
    return [visible[address] for address in addresses]


def check_devices_on_workers(client: Any, workers: Sequence[Worker], slots: Sequence[tuple[str, str]]) -> None:
    """Check that the devices of replicas can be used on their workers.

    Raises
    ------
    UnknownDeviceError
        A device cannot be used; the message names the worker.
    """
    names: dict[str, list[str]] = {}
    for address, name in slots:
        if not named(name).is_host:
            names.setdefault(address, []).append(name)
    missing = run_on_workers(client, missing_on_worker, names, workers=list(names)) if names else {}
    for worker in workers:
        for name, why in missing.get(worker.address, ()):
            raise UnknownDeviceError(
                f"{name!r} cannot be used on worker {worker.name!r} ({worker.address}): {why}; list_devices(client) "
                "lists the available devices"
            )
