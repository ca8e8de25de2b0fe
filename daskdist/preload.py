"""``dask scheduler --preload daskdist.preload``: a scheduler that has the data service from its start."""

from __future__ import annotations

from distributed import Scheduler

from daskdist.service.dispatcher.scheduler_plugin import ServiceOnScheduler


async def dask_setup(server: object) -> None:
    """Add the data service to a scheduler; workers get it from their scheduler."""
    if isinstance(server, Scheduler):
        # Dask starts its plugins next.
        server.add_plugin(ServiceOnScheduler(), idempotent=True)
