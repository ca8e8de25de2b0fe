"""The choice of a caller for a pipeline that runs in this process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from daskdist.context_variables import changed
from daskdist.core.node import Node, walk
from daskdist.errors import DaskdistError
from daskdist.execute.caller import Caller, LocalCaller
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.processes import Processes
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads


class NeverRun(LocalCaller):
    """A caller that refuses every call, which shows that building a pipeline runs none of it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise DaskdistError("a call was made where none may be")

    call = source = upstream = stream = is_done = wait_for_one = report = result = results = _refuse


_chosen: ContextVar[Callable[[], Caller] | None] = ContextVar("daskdist caller", default=None)


def using(make: Callable[[], Caller]) -> AbstractContextManager[None]:
    """Run every pipeline that starts inside this context by a caller that ``make`` returns."""
    return changed(_chosen, make)


def local_caller(
    node: Node,
    num_threads: int | None = None,
    fetch: Fetch | None = None,
    *,
    num_processes: int | str | None = None,
) -> Caller:
    """Return the caller for a pipeline in this process.

    It uses processes or threads if requested, and threads if some operation gains by them.
    """
    make = _chosen.get()
    if make is not None:
        return make()
    # A cluster's workers are several processes already, and may not be allowed to start others.
    if num_processes is not None and not multiprocessing.current_process().daemon:
        return Processes((os.cpu_count() or 1) if num_processes == "auto" else int(num_processes), fetch)
    is_threaded = num_threads or any(operation.background for operation in walk(node))
    return Threads(num_threads, fetch) if is_threaded else Synchronous(fetch)


def client_caller() -> tuple[Caller, tuple[str | None, ...], int | None] | None:
    """Return a caller on the workers of this program's Dask client, their addresses and no limit; None without one."""
    if _chosen.get() is not None or "distributed" not in sys.modules:
        return None
    from daskdist.execute.callers.submit import of_default_client

    caller = of_default_client()
    return None if caller is None else (caller, tuple(caller.workers), None)
