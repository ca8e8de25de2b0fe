"""The workers that strategies use, as the scheduler knows them: adaptive scaling does not close them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

_NAME: Final = "daskdist-workers-in-use"


class WorkersInUse(SchedulerPlugin):  # type: ignore[misc]
    """Keeps the workers of strategies out of those that may be closed to scale a cluster down.

    Workers that are retired by name are closed all the same.
    """

    name = _NAME

    def __init__(self) -> None:
        # By the id of a client and the token of its strategy, the addresses of the workers.
        self.used: dict[tuple[str, str], Sequence[str]] = {}

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return those of some workers that may be closed."""
        used = {address for addresses in self.used.values() for address in addresses}
        return [worker for worker in workers if worker.address not in used]

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget the strategies of a program that is gone."""
        for key in [each for each in self.used if each[0] == client]:
            del self.used[key]


def note_in_use(client: Client, token: str, workers: Sequence[str]) -> None:
    """Tell the scheduler which workers a strategy uses; a scheduler that calls no functions does not learn of it."""
    with contextlib.suppress(Exception):
        client.run_on_scheduler(_use, client.id, token, tuple(workers))


def release_soon(client: Client, token: str) -> None:
    """Tell the scheduler to forget a strategy, without waiting for it; called in any thread."""
    if client.status == "running":
        with contextlib.suppress(RuntimeError):
            client.loop.add_callback(_release_now, client, token)


async def _release_now(client: Client, token: str) -> None:
    with contextlib.suppress(Exception):
        await client._run_on_scheduler(_release, client.id, token)


def _use(client: str, token: str, workers: Sequence[str], dask_scheduler: Scheduler) -> None:
    plugin = dask_scheduler.plugins.get(_NAME)
    if plugin is None:
        plugin = WorkersInUse()
        dask_scheduler.add_plugin(plugin)
    plugin.used[client, token] = workers


def _release(client: str, token: str, dask_scheduler: Scheduler) -> None:
    plugin = dask_scheduler.plugins.get(_NAME)
    if plugin is not None:
        plugin.used.pop((client, token), None)
