"""Values of single keys of Dask graphs, computed in this thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskdist.errors import ClusterError
from daskdist.execute.caller import Graph
from daskdist.waiting import wait_intervals


def compute_key(graph: Graph, key: Any, fetch: Fetch | None = None) -> Any:
    """Compute one key of a Dask graph in this thread; ``fetch`` gets each `RemoteResult` in it."""
    from dask.local import get_sync
    from dask.optimization import cull

    needed = cull(graph, [key])[0]
    # Results on a cluster are fetched directly from the workers.
    fetches: Graph = {}
    for name, task in needed.items():
        if is_future(task) and task.client is None and fetch is not None:
            # The future was sent to this worker in the closure of a function, and so has no client.
            fetches[name] = (partial(fetch, RemoteResult(task.key, ())),)
        elif is_future(task):
            if task.client is None or task.cancelled():
                raise lost_data_error(name)
            fetches[name] = (FutureResult(task),)
        elif type(task) is RemoteResult:
            if fetch is None:
                raise lost_data_error(name)
            fetches[name] = (partial(fetch, task),)
    return get_sync({**needed, **fetches}, key)


@dataclass(frozen=True)
class RemoteResult:
    """A placeholder in a Dask graph on a worker for a result that the worker's cluster holds.

    Parameters
    ----------
    key
        The key of the result on the cluster.
    workers
        The workers that held it when the scheduler was last asked.
    """

    key: Any
    workers: tuple[str, ...]


Fetch = Callable[[RemoteResult], Any]


@dataclass(frozen=True)
class FutureResult:
    """A call that waits for the result of a cluster's future and returns it."""

    future: Any

    def __call__(self) -> Any:
        client = self.future.client
        direct = client.direct_to_workers is not False
        gathering = client.gather(self.future, direct=direct, asynchronous=True)
        task = asyncio.run_coroutine_threadsafe(gathering, client.loop.asyncio_loop)
        try:
            for within_s in wait_intervals(str(self.future.key), "timeouts.data"):
                if futures_wait([task], within_s).done:
                    break
            return task.result()
        except Exception:
            # Do not cancel after an interrupt, as the client's later requests may wait for one that was cancelled.
            task.cancel()
            raise


def is_future(task: Any) -> bool:
    """Return whether a task of a graph is a future of a cluster."""
    # The class is compared by name, because importing distributed here would slow down ``import daskdist``.
    return type(task).__name__ == "Future" and type(task).__module__ == "distributed.client"


def lost_data_error(key: Any) -> ClusterError:
    """Return the error for data that was only on a cluster and is no longer there."""
    return ClusterError(
        f"{key} is no longer on the cluster: the strategy that put it there is closed, or the worker that had it is "
        "lost; create the data again"
    )
