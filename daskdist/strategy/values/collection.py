"""`ValueCollection`: values and nests of values as Dask collections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask import threaded
from dask.base import DaskMethodsMixin
from dask.optimization import cull

from daskdist.execute.caller import Handle
from daskdist.execute.callers.graph import one_task
from daskdist.strategy.backend import Picks
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.placeholders import PendingValue, Placeholders, filled_on_host


class ValueCollection(DaskMethodsMixin):  # type: ignore[misc]
    """The base of values and nests of values as Dask collections, with a key for each value."""

    __slots__ = ()

    def _values_by_key(self) -> dict[Any, Any]:
        """Return the values, some of them asynchronous, by key and in order."""
        raise NotImplementedError

    def __dask_graph__(self) -> Any:
        graph: dict[Any, Any] = {}
        for key, value in self._values_by_key().items():
            placeholders = Placeholders()
            template = placeholders.template(value)
            handles: Sequence[Handle] = placeholders.handles
            picks: Picks = placeholders.picks
            if placeholders.caller is not None:
                handles, picks = placeholders.caller.as_futures(handles, picks)
            graph.update(one_task(key, filled_on_host, handles, picks, host_array(template)))
        return graph

    def __dask_keys__(self) -> list[Any]:
        return list(self._values_by_key())

    @staticmethod
    def __dask_optimize__(graph: Any, keys: Any, **kwargs: Any) -> Any:
        return cull(dict(graph), keys)[0]

    @property
    def __dask_scheduler__(self) -> Any:
        # Use the scheduler of the values' source, even if they are here already, so that several are computed together.
        for value in self._values_by_key().values():
            client = value.caller.client if isinstance(value, PendingValue) else None
            if client is not None and client.status == "running":
                return client.get
        return threaded.get
