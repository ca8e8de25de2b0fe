"""The workers of a cluster that hold the values of a Dask graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from dask.core import get_dependencies

from daskdist.execute.caller import Graph
from daskdist.execute.callers.cluster_requests import ask_scheduler
from daskdist.execute.callers.compute_key import is_future

# The most tasks to visit when looking for the futures that one value depends on.
_MOST_TASKS: Final = 64


class DataLocations:
    """The workers that hold the values of a graph's keys, or most of the data these depend on.

    Parameters
    ----------
    client
        The connection to the cluster.
    graph
        Tasks by key; persisted ones are futures.
    workers
        The workers that take part.
    """

    def __init__(self, client: Any, graph: Graph, workers: Sequence[str]) -> None:
        self._client = client
        self._graph = graph
        self._workers = frozenset(workers)
        self._futures = {key: task for key, task in graph.items() if is_future(task) and task.client is client}
        self._holders: dict[Any, tuple[str, ...]] = {}
        # One request for all futures. Those still being computed are asked for again once they are done.
        self._ask(list(self._futures.values()))

    def __bool__(self) -> bool:
        return bool(self._futures)

    def __call__(self, key: Any) -> Sequence[str]:
        """Return the participating workers that hold most of a key's value."""
        futures = self._dependencies_of(key)
        if any(future.key not in self._holders and future.done() for future in futures):
            self._ask([future for future in self._futures.values() if future.done()])
        counts = Counter(worker for future in futures for worker in self._holders.get(future.key, ()))
        most = max(counts.values(), default=0)
        return [worker for worker, count in counts.items() if count == most]

    def _ask(self, futures: Sequence[Any]) -> None:
        unknown = {future.key: future for future in futures if future.key not in self._holders}
        if not unknown:
            return
        who_has = ask_scheduler(self._client, self._client.scheduler.who_has, keys=list(unknown))
        for key, future in unknown.items():
            holders = tuple(worker for worker in who_has.get(key, ()) if worker in self._workers)
            if holders or future.done():
                self._holders[key] = holders

    def _dependencies_of(self, key: Any) -> list[Any]:
        # Return the futures nearest to the key; none if too many tasks would have to be visited.
        unvisited, seen, futures = [key], {key}, []
        while unvisited:
            task_key = unvisited.pop()
            if task_key in self._futures:
                futures.append(self._futures[task_key])
                continue
            dependencies = get_dependencies(self._graph, task_key) - seen
            seen |= dependencies
            unvisited += dependencies
            if len(seen) > _MOST_TASKS:
                return []
        return futures
