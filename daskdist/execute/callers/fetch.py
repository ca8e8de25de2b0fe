"""Data that a cluster already holds, for pipelines on its workers: it is sent as a key, and fetched from workers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as futures_wait
from typing import Any, Final

import cloudpickle
from distributed import Future, Worker
from distributed.core import Status
from distributed.utils_comm import gather_from_workers

from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.cluster_requests import ask_from_worker, ask_scheduler
from daskdist.execute.callers.compute_key import RemoteResult, is_future, lost_data_error
from daskdist.execute.callers.submit import Submit
from daskdist.waiting import wait_intervals

# Seconds between two checks of whether the awaited data can still arrive.
_CHECK_EVERY_S: Final = 0.5
_RETRY_EVERY_S: Final = 0.05
_ENDED: Final = (Status.closing, Status.closed, Status.failed)


class WithRemoteResults:
    """A value for workers that is pickled with keys in place of its futures, so that their data is not sent.

    Parameters
    ----------
    value
        The value.
    futures
        All futures in the value, by key. The caller must hold them until the call with the value is over.
    holders
        The workers that hold the data, by key. A future whose key is missing here stays a future.
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
    """Return the workers that hold the data of some futures, by key; wait for data that is still being computed.

    Raises
    ------
    ArgumentError
        The data is on another cluster.
    ClusterError
        The data is no longer there, or a participating worker is lost.
    Exception
        Computing the data raised this.
    """
    client = submit.client
    for key, future in futures.items():
        if future.cancelled():
            raise lost_data_error(key)
        if future.client.scheduler.address != client.scheduler.address:
            raise ArgumentError(
                f"run: {key} is on another cluster, at {future.client.scheduler.address}, and replicas read their "
                "own parts themselves; persist it on the cluster of the strategy, or iterate over the distributed "
                "dataset here and give run each step"
            )
    submit.wait(list(futures.values()))
    for future in futures.values():
        if future.status == "error":
            future.result()
    who_has: dict[Any, Sequence[str]] = ask_scheduler(client, client.scheduler.who_has, keys=list(futures))
    return who_has


class WorkerFetch:
    """Fetching of a cluster's data on a worker: from its own memory, or from another worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, remote: RemoteResult) -> Any:
        """Return the data.

        Raises
        ------
        ClusterError
            The data is no longer there, or cannot be read here.
        """
        task = asyncio.run_coroutine_threadsafe(self._fetch(remote), self._worker.loop.asyncio_loop)
        while not futures_wait([task], timeout=_CHECK_EVERY_S).done:
            if self._worker.status in _ENDED:
                task.cancel()
                raise lost_data_error(remote.key)
        return task.result()

    async def _fetch(self, remote: RemoteResult) -> Any:
        worker, key = self._worker, remote.key
        holders: Sequence[str] = remote.workers
        # Only an answer of the scheduler is a loss, however long it takes.
        for within_s in wait_intervals(str(key), "timeouts.data", _RETRY_EVERY_S):
            if key in worker.data:
                return worker.data[key]
            data = await fetched(worker, key, [address for address in holders if address != worker.address])
            if data:
                return data[key]
            status = (await ask_from_worker(worker, "get_task_status", keys=[key]))[key]
            if status in (None, "released", "forgotten", "erred"):
                break
            await asyncio.sleep(within_s)
            # The scheduler is asked only after the holders known so far no longer have the data.
            holders = await others_with(worker, key)
        raise lost_data_error(key)


async def others_with(worker: Worker, key: Any) -> list[str]:
    """Return the other workers that have the data of a key, according to the scheduler."""
    holders = (await ask_from_worker(worker, "who_has", keys=[key])).get(key, ())
    return [address for address in holders if address != worker.address]


async def fetched(worker: Worker, key: Any, addresses: Sequence[str]) -> dict[Any, Any]:
    """Return the data of a key that other workers have, by key; nothing if they no longer have it.

    Raises
    ------
    ClusterError
        The data cannot be read here.
    """
    if not addresses:
        return {}
    task = asyncio.ensure_future(gather_from_workers({key: addresses}, rpc=worker.rpc, who=worker.address))
    try:
        while not (await asyncio.wait([task], timeout=_CHECK_EVERY_S))[0]:
            # Without this check, Dask would try for a long time to connect to a lost worker.
            if not set(addresses) & set(await others_with(worker, key)):
                return {}
    finally:
        task.cancel()
    data: dict[Any, Any]
    data, _, failed, _ = task.result()
    if failed:
        raise ClusterError(f"{key} is on {', '.join(addresses)} and cannot be read on {worker.address}: see its log")
    return data
