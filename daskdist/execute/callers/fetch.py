"""What a cluster has already, read by a pipeline on one of its workers: told of by key, brought by the workers."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as futures_wait
from typing import Any, Final

import cloudpickle
from distributed import Future, Worker
from distributed.core import Status
from distributed.utils_comm import gather_from_workers

from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.compute_key import RemoteResult, is_future, lost_data_error
from daskdist.execute.callers.submit import Submit

# Seconds between two looks at whether what is waited for can still come.
_LOOK_EVERY_S: Final = 1.0
# So long is waited for what is being moved, or made again.
_PATIENCE_S: Final = 8.0
_ASK_AGAIN_S: Final = 0.05
_ENDED: Final = (Status.closing, Status.closed, Status.failed)


class WithRemoteResults:
    """A value that goes to workers, in which futures of their cluster are told of by key: the data does not go along.

    Parameters
    ----------
    value
        The value.
    futures
        All futures in it, by key. Whoever calls something with the value holds on to them until that is over.
    holders
        For the keys that are told of, the workers that have the data; what else is in it stays a future.
    """

    def __init__(self, value: Any, futures: Mapping[Any, Future], holders: Mapping[Any, Sequence[str]]) -> None:
        self.value = value
        self.futures = futures
        self.holders = holders

    def __reduce__(self) -> Any:
        file = io.BytesIO()
        _RemoteResultPickler(file, self.holders).dump(self.value)
        return cloudpickle.loads, (file.getvalue(),)


class _RemoteResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, holders: Mapping[Any, Sequence[str]]) -> None:
        super().__init__(file, protocol=5)
        self._holders = holders

    def reducer_override(self, obj: Any) -> Any:
        if is_future(obj) and obj.key in self._holders:
            return RemoteResult, (obj.key, tuple(self._holders[obj.key]))
        return super().reducer_override(obj)


def workers_with_data(submit: Submit, futures: Mapping[Any, Future]) -> dict[Any, Sequence[str]]:
    """The workers that have data of a cluster, by key; what is still being made is waited for.

    Raises
    ------
    ArgumentError
        It is on another cluster.
    ClusterError
        It is no longer there, or a worker is lost that takes part.
    Exception
        What was raised where it was made.
    """
    client = submit.client
    for key, future in futures.items():
        if future.cancelled():
            raise lost_data_error(key)
        if future.client.scheduler.address != client.scheduler.address:
            raise ArgumentError(
                f"run: {key} lies on another cluster, at {future.client.scheduler.address}, and replicas read their "
                "own parts themselves; persist it on the cluster of the strategy, or iterate over the distributed "
                "dataset here and give run each step"
            )
    submit.wait(list(futures.values()))
    for future in futures.values():
        if future.status == "error":
            future.result()
    found: dict[Any, Sequence[str]] = client.sync(client.scheduler.who_has, keys=list(futures))
    return found


class WorkerFetch:
    """Brings what the cluster has to the thread that calls it, on a worker; from another worker where it is there.

    Parameters
    ----------
    worker
        The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, kept: RemoteResult) -> Any:
        """The data.

        Raises
        ------
        ClusterError
            It is no longer there, or cannot be read here.
        """
        task = asyncio.run_coroutine_threadsafe(self._brought(kept), self._worker.loop.asyncio_loop)
        while not futures_wait([task], timeout=_LOOK_EVERY_S).done:
            if self._worker.status in _ENDED:
                task.cancel()
                raise lost_data_error(kept.key)
        return task.result()

    async def _brought(self, kept: RemoteResult) -> Any:
        worker, key = self._worker, kept.key
        holders: Sequence[str] = kept.workers
        end = time.monotonic() + _PATIENCE_S
        while True:
            if key in worker.data:
                return worker.data[key]
            others = [each for each in holders if each != worker.address]
            found = await self._from_others(key, others) if others else {}
            if key in found:
                return found[key]
            status = (await worker.scheduler.get_task_status(keys=[key]))[key]
            if status in (None, "released", "forgotten", "erred") or time.monotonic() > end:
                raise lost_data_error(key)
            await asyncio.sleep(_ASK_AGAIN_S)
            holders = await self._holders(key)

    async def _holders(self, key: Any) -> Sequence[str]:
        # The scheduler is asked only after what was known has turned out to be so no longer.
        found: dict[Any, Sequence[str]] = await self._worker.scheduler.who_has(keys=[key])
        return found.get(key, ())

    async def _from_others(self, key: Any, others: Sequence[str]) -> dict[Any, Any]:
        worker = self._worker
        task = asyncio.ensure_future(gather_from_workers({key: others}, rpc=worker.rpc, who=worker.address))
        while not (await asyncio.wait([task], timeout=_LOOK_EVERY_S))[0]:
            # To one that is lost it would try to connect for long.
            if not set(others) & set(await self._holders(key)):
                task.cancel()
                return {}
        found: dict[Any, Any]
        found, _, failed, _ = task.result()
        if failed:
            raise ClusterError(f"{key} is on {', '.join(others)} and cannot be read on {worker.address}: see its log")
        return found
