"""Results of Dask tasks as arguments of steps: taken from the worker's memory, or fetched from other workers."""

from __future__ import annotations

import asyncio
import pickle
import weakref
from typing import Any, Final

from distributed import Status, Worker, WorkerPlugin
from distributed.utils_comm import gather_from_workers

from daskdist.errors import ClusterError
from daskdist.execute.callers.cluster_requests import ask_from_worker
from daskdist.execute.callers.compute_key import lost_data_error
from daskdist.execute.private_names import is_reading_graphs
from daskdist.waiting import wait_intervals

# Seconds to wait for a task before the first query for it; later queries are less frequent.
_FIRST_LOOK_S: Final = 0.02
_MOST_LOOK_S: Final = 0.5
# The scheduler may not know a task yet, or may be about to recompute it: so many answers in a row that it does not have
# it, half a second apart, are a loss. Time in which it does not answer is none.
_MOST_NOT_THERE: Final = 20
_NOT_THERE: Final = (None, "released", "forgotten", "erred")
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

    async def bring(self, key: Any) -> Any:
        """Wait for the data of a key and return it; fetch it from another worker if it is there.

        Raises
        ------
        ClusterError
            The cluster does not have the data any more, or it cannot be read.
        """
        event = asyncio.Event()
        self._events.setdefault(key, []).append(event)
        try:
            return await self._bring(key, event)
        finally:
            waiting = self._events[key]
            waiting.remove(event)
            if not waiting:
                del self._events[key]

    async def _bring(self, key: Any, event: asyncio.Event) -> Any:
        worker, look_s = self._worker, _FIRST_LOOK_S
        num_not_there = 0
        # This wait has no limit of its own: the program, which waits for the call, has one.
        waiting = wait_intervals(lambda: self._name_of(key), None, _MOST_LOOK_S)
        while key not in worker.data:
            event.clear()
            try:
                await asyncio.wait_for(event.wait(), min(look_s, next(waiting)))
                continue
            except TimeoutError:
                look_s = min(2 * look_s, _MOST_LOOK_S)
            status = (await ask_from_worker(worker, "get_task_status", keys=[key]))[key]
            if status == "memory":
                data = await self._from_others(key)
                if data is not None:
                    return data[key]
            is_there = status not in _NOT_THERE or await self._may_come()
            num_not_there = 0 if is_there else num_not_there + 1
            if num_not_there > _MOST_NOT_THERE:
                raise lost_data_error(key)
        return worker.data[key]

    async def _may_come(self) -> bool:
        # A busy scheduler takes seconds to read the tasks that clients submit, and answers meanwhile.
        request = {"function": pickle.dumps(is_reading_graphs), "args": pickle.dumps(()), "kwargs": pickle.dumps({})}
        answer = await ask_from_worker(self._worker, "run_function", **request)
        return bool(answer.get("result"))

    def _name_of(self, key: Any) -> str:
        is_paused = self._worker.status is Status.paused
        return f"{key} (this worker is paused, as its memory is nearly full)" if is_paused else str(key)

    async def _from_others(self, key: Any) -> dict[Any, Any] | None:
        worker = self._worker
        others = await self._others_with(key)
        if not others:
            return None
        gathering = asyncio.ensure_future(gather_from_workers({key: others}, rpc=worker.rpc, who=worker.address))
        try:
            # Dask tries for half a minute to connect to a worker that is gone.
            while not (await asyncio.wait([gathering], timeout=_MOST_LOOK_S))[0]:
                if not set(others) & set(await self._others_with(key)):
                    return None
        finally:
            gathering.cancel()
        data, _, failed, _ = gathering.result()
        if failed:
            raise ClusterError(f"{key} is on {', '.join(others)} and cannot be read on {worker.address}: see its log")
        return data if key in data else None

    async def _others_with(self, key: Any) -> list[str]:
        worker = self._worker
        holders = (await ask_from_worker(worker, "who_has", keys=[key])).get(key, ())
        return [address for address in holders if address != worker.address]


def data_keys_of(worker: Worker) -> DataKeys:
    """Return the table of a worker's waits, created in the worker's event loop at the first use."""
    data_keys: DataKeys | None = worker.plugins.get(_PLUGIN)
    if data_keys is None:
        data_keys = worker.plugins[_PLUGIN] = DataKeys(worker)
    return data_keys
