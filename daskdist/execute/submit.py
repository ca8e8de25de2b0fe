"""The caller that makes calls on a Dask cluster."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dask.optimization import cull
from distributed import Client, Future, wait

from daskdist.config import in_bytes
from daskdist.core.block import Block, Rows
from daskdist.core.primitive import Split
from daskdist.execute.callers import Graph, Handle, Report, report_of


class Submit:
    """Calls as tasks of a cluster; a handle is a Dask future, and letting go of it lets go of the result.

    Workers are a preference: where one is lost, another takes its tasks.

    Parameters
    ----------
    client
        The connection to the cluster.
    num_workers
        How many workers take part; how far calls run ahead grows with it.
    futures
        Where its futures are kept note of, for as long as somebody has them.
    """

    bundle_chunks = 64
    compacts = True
    reports_freely = False
    divides = True

    def __init__(self, client: Client, num_workers: int, futures: weakref.WeakSet[Future] | None = None) -> None:
        self.client = client
        self.num_ahead = 4 * num_workers
        self.bundle_bytes = in_bytes("bundle-bytes")
        self._keys = (f"{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count())
        self._reports: dict[str, Future] = {}
        self.futures: weakref.WeakSet[Future] = weakref.WeakSet() if futures is None else futures

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        on: str | None = None,
        name: str,
    ) -> Handle:
        return self._submit(name, on, function, list(handles), *args)

    def source(self, function: Callable[..., Rows], *args: Any, on: str | None = None, name: str) -> Handle:
        # Data is sent to its worker, where a task of its size would have to go by way of the scheduler.
        placed = [self._placed(arg, on) if _has_data(arg) else arg for arg in args]
        return self._submit(name, on, function, *placed)

    def _placed(self, data: Any, on: str | None) -> Future:
        future = self.client.scatter(data, workers=[on] if on else None, hash=False)
        self.futures.add(future)
        return future

    def upstream(self, graph: Callable[[], Graph], key: Any, on: str | None = None) -> Handle:
        return self.client.get(cull(graph(), [key])[0], key, sync=False)

    def _submit(self, name: str, on: str | None, function: Callable[..., Any], *args: Any) -> Future:
        future = self.client.submit(
            function,
            *args,
            key=f"{name}-{next(self._keys)}",
            workers=[on] if on else None,
            allow_other_workers=bool(on),
            pure=False,
        )
        self.futures.add(future)
        return future

    def report(self, handle: Future, *, wait: bool) -> Report | None:
        # Made on the worker that has the block: the block itself does not travel.
        asked = self._reports.get(handle.key)
        if asked is None:
            asked = self._reports[handle.key] = self._submit("report", None, report_of, handle)
        if not (wait or asked.done()):
            return None
        del self._reports[handle.key]
        report: Report = asked.result()
        return report

    def result(self, handle: Future) -> Any:
        return self.results([handle])[0]

    def results(self, handles: Sequence[Future]) -> list[Any]:
        # Straight from the workers that have them.
        # By way of the scheduler it would be five times slower.
        return list(self.client.gather(list(handles), direct=True))

    def wait(self, handles: Sequence[Future]) -> None:
        """Wait until calls are over, however they end."""
        with self.client.as_current():
            wait(handles)

    def close(self) -> None:
        # What a consumer still has of its results stays; what it has let go of, Dask has let go of too.
        self._reports.clear()

    def release(self) -> None:
        """Let go of every result, also those that somebody still holds on to, in a traceback say."""
        self._reports.clear()
        if self.client.status == "running":
            for future in list(self.futures):
                future.release()


def _has_data(arg: Any) -> bool:
    return isinstance(arg, Split) and isinstance(arg.payload, Block)
