"""The caller that makes each call at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from daskdist.core.block import Rows
from daskdist.execute.caller import Graph, Handle, LocalCaller, Report, report_of
from daskdist.execute.callers.compute_key import Fetch, compute_key
from daskdist.watched_calls import watched


class Synchronous(LocalCaller):
    """A caller that makes each call at once, in this thread; a handle is the result itself.

    Parameters
    ----------
    fetch
        Gets results that the cluster of this worker holds; None in the program.
    """

    home: Hashable | None = "now"

    def __init__(self, fetch: Fetch | None = None) -> None:
        super().__init__()
        self._fetch = fetch

    def call(self, function: Callable[..., Any], handles: Sequence[Handle], *args: Any, name: str, **_: Any) -> Handle:
        return watched(name, self.timed, name, function, handles, *args)

    def source(self, function: Callable[..., Rows], *args: Any, name: str, **_: Any) -> Handle:
        return watched(name, self.timed, name, function, *args)

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        return watched(str(key), compute_key, graph(), key, self._fetch)

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        return take()

    def report(self, handle: Handle, *, wait: bool) -> Report | None:
        return report_of(handle)
