"""Results of Dask tasks as arguments of steps: taken from the worker's memory, or fetched from other workers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, Final

from distributed import Status, Worker, WorkerPlugin

from daskdist.execute.callers.fetch import fetched, others_with
from daskdist.waiting import wait_intervals

# Seconds to wait for a task before the first look for it elsewhere; later looks are less frequent.
_FIRST_LOOK_S: Final = 0.02
_MOST_LOOK_S: Final = 0.5
_PLUGIN: Final = "daskdist-keys"


class DataKeys(WorkerPlugin):  # type: ignore[misc]
    """A table of waits for keys of one worker's memory.

    Parameters
    ----------
    worker
        The worker.
    """

    name = _PLUGIN

    def __init__(self, worker: Worker) -> None:
        self._worker = weakref.proxy(worker)
        # key -> the events of its waiters.
        self._events: dict[Any, list[asyncio.Event]] = {}

    def transition(self, key: Any, start: Any, finish: Any, **rest: Any) -> None:
        """Wake the waiters for a key; called by Dask in the event loop."""
        if finish == "memory" and self._events:
            for event in self._events.get(key, ()):
                event.set()

    async def bring(self, key: Any, is_wanted: Callable[[], bool]) -> Any:
        """Wait for the data of a key and return it; fetch it from another worker if it is there.

        Only the program knows whether data can still come.

        Parameters
        ----------
        key
            The key.
        is_wanted
            Called again and again while the data is not there; returns whether it is still waited for.

        Returns
        -------
        data
            None if it is not waited for any more.

        Raises
        ------
        ClusterError
            It cannot be read.
        """
        event = asyncio.Event()
        self._events.setdefault(key, []).append(event)
        try:
            return await self._bring(key, event, is_wanted)
        finally:
            waiting = self._events[key]
            waiting.remove(event)
            if not waiting:
                del self._events[key]

    async def _bring(self, key: Any, event: asyncio.Event, is_wanted: Callable[[], bool]) -> Any:
        worker, look_s = self._worker, _FIRST_LOOK_S
        # This wait has no limit of its own: the program, which waits for the call, has one.
        waiting = wait_intervals(lambda: self._name_of(key), None, _MOST_LOOK_S)
        while key not in worker.data:
            event.clear()
            try:
                await asyncio.wait_for(event.wait(), min(look_s, next(waiting)))
                continue
            except TimeoutError:
                look_s = min(2 * look_s, _MOST_LOOK_S)
            if not is_wanted():
                return None
            data = await fetched(worker, key, await others_with(worker, key))
            if data:
                return data[key]
        return worker.data[key]

    def _name_of(self, key: Any) -> str:
        is_paused = self._worker.status is Status.paused
        return f"{key} (this worker is paused, as its memory is nearly full)" if is_paused else str(key)


def data_keys_of(worker: Worker) -> DataKeys:
    """Return the table of a worker's waits, created in the worker's event loop at the first use."""
    data_keys: DataKeys | None = worker.plugins.get(_PLUGIN)
    if data_keys is None:
        data_keys = worker.plugins[_PLUGIN] = DataKeys(worker)
    return data_keys
