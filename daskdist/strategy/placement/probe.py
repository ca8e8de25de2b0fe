"""Queries of the devices that workers see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from daskdist.devices import name_of, named, present
from daskdist.errors import UnknownDeviceError
from daskdist.strategy.placement.assign_devices import VisibleDevices
from daskdist.strategy.placement.replica_counts import Worker

# What dask-cuda gives each worker that it starts for a GPU, and nobody else gives any; what it has them load, others
# may load too.
_DASK_CUDA: Final = ("dask_cuda", "CPUAffinity")


async def visible_on_worker(dask_worker: Any) -> VisibleDevices:
    """Return the devices that this worker sees; in a thread, as the libraries of devices take long to load."""
    return await asyncio.to_thread(_look, dask_worker)


def _look(worker: Any) -> VisibleDevices:
    found = present()
    plugins = map(type, worker.plugins.values())
    return VisibleDevices(
        os.uname().nodename,
        tuple(map(name_of, found)),
        tuple(each.uuid for each in found),
        _DASK_CUDA in [(each.__module__.partition(".")[0], each.__name__) for each in plugins],
    )


async def missing_on_worker(names: Mapping[str, Sequence[str]], dask_worker: Any) -> list[tuple[str, str]]:
    """Return the devices, of those named for this worker's address, that it cannot use, each with the reason."""
    return await asyncio.to_thread(_missing, names[dask_worker.address])


def _missing(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, why) for name in names if (why := named(name).missing())]


def probe_devices(client: Any, workers: Sequence[Worker]) -> list[VisibleDevices]:
    """Return the devices that each worker sees."""
    addresses = [each.address for each in workers]
    found = client.run(visible_on_worker, workers=addresses) if addresses else {}
    return [found[each] for each in addresses]


def check_devices_on_workers(client: Any, workers: Sequence[Worker], slots: Sequence[tuple[str, str]]) -> None:
    """Check that the devices of replicas can be used on their workers.

    Raises
    ------
    UnknownDeviceError
        One cannot; the message names the worker.
    """
    names: dict[str, list[str]] = {}
    for address, name in slots:
        if not named(name).is_host:
            names.setdefault(address, []).append(name)
    found = client.run(missing_on_worker, names, workers=list(names)) if names else {}
    for worker in workers:
        for name, why in found.get(worker.address, ()):
            raise UnknownDeviceError(
                f"{name!r} cannot be used on worker {worker.name!r} ({worker.address}): {why}; list_devices(client) "
                "lists what there is"
            )
