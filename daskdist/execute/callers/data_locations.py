"""Where on a cluster the values of a Dask graph lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from dask.core import get_dependencies

from daskdist.execute.caller import Graph
from daskdist.execute.callers.compute_key import is_future

# Tasks that are looked at for what one value is made of.
_MOST_TASKS: Final = 64


class DataLocations:
    """Which workers have the values of a graph's keys, or most of what these are made of.

    Parameters
    ----------
    client
        The connection to the cluster.
    graph
        Tasks by key; those that were persisted are futures.
    workers
        The workers that take part.
    """

    def __init__(self, client: Any, graph: Graph, workers: Sequence[str]) -> None:
        self._client = client
        self._graph = graph
        self._workers = frozenset(workers)
        self._futures = {key: task for key, task in graph.items() if is_future(task) and task.client is client}
        self._holders: dict[Any, tuple[str, ...]] = {}
        # One question for all. What is still being made is asked for once more when it is made.
        self._ask(list(self._futures.values()))

    def __bool__(self) -> bool:
        return bool(self._futures)

    def __call__(self, key: Any) -> Sequence[str]:
        """The workers that have most of a key's value, of those that take part."""
        futures = self._made_of(key)
        if any(future.key not in self._holders and future.done() for future in futures):
            self._ask([future for future in self._futures.values() if future.done()])
        counts = Counter(worker for future in futures for worker in self._holders.get(future.key, ()))
        most = max(counts.values(), default=0)
        return [worker for worker, count in counts.items() if count == most]

    def _ask(self, futures: Sequence[Any]) -> None:
        unknown = {future.key: future for future in futures if future.key not in self._holders}
        if not unknown:
            return
        found = self._client.sync(self._client.scheduler.who_has, keys=list(unknown))
        for key, future in unknown.items():
            there = tuple(worker for worker in found.get(key, ()) if worker in self._workers)
            if there or future.done():
                self._holders[key] = there

    def _made_of(self, key: Any) -> list[Any]:
        # The futures nearest to the key; none where there is more to look at than that is worth.
        waiting, seen, futures = [key], {key}, []
        while waiting:
            each = waiting.pop()
            if each in self._futures:
                futures.append(self._futures[each])
                continue
            below = get_dependencies(self._graph, each) - seen
            seen |= below
            waiting += below
            if len(seen) > _MOST_TASKS:
                return []
        return futures
