"""Values of single keys of Dask graphs, computed in this thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskdist.errors import ClusterError
from daskdist.execute.caller import Graph


def compute_key(graph: Graph, key: Any, fetch: Fetch | None = None) -> Any:
    """One key of a Dask graph, computed in this thread; ``fetch`` brings what is `RemoteResult` of it."""
    from dask.local import get_sync
    from dask.optimization import cull

    wanted = cull(graph, [key])[0]
    # What is on a cluster is brought here, straight from the workers.
    brought: Graph = {}
    for name, task in wanted.items():
        if is_future(task) and task.client is None and fetch is not None:
            # It came to a worker with a function that has it from around it.
            brought[name] = (partial(fetch, RemoteResult(task.key, ())),)
        elif is_future(task):
            if task.client is None or task.cancelled():
                raise lost_data_error(name)
            brought[name] = (FutureResult(task),)
        elif type(task) is RemoteResult:
            if fetch is None:
                raise lost_data_error(name)
            brought[name] = (partial(fetch, task),)
    return get_sync({**wanted, **brought}, key)


@dataclass(frozen=True)
class RemoteResult:
    """Stands in a Dask graph for what the cluster has on whose worker the graph is.

    Parameters
    ----------
    key
        What the cluster calls it.
    workers
        The workers that had it when that was asked.
    """

    key: Any
    workers: tuple[str, ...]


Fetch = Callable[[RemoteResult], Any]


@dataclass(frozen=True)
class FutureResult:
    """The result of a future of a cluster, waited for."""

    future: Any

    def __call__(self) -> Any:
        client = self.future.client
        return client.gather(self.future, direct=client.direct_to_workers is not False)


def is_future(task: Any) -> bool:
    """Whether a task of a graph stands for a result that a cluster has or is to have."""
    # By its name: this is no place to load distributed.
    return type(task).__name__ == "Future" and type(task).__module__ == "distributed.client"


def lost_data_error(key: Any) -> ClusterError:
    """What is raised where data was on a cluster only, and is no longer."""
    return ClusterError(
        f"{key} is no longer on the cluster: the strategy that put it there is closed, or the worker that had it is "
        "lost; make the data again"
    )
