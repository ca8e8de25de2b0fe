"""The tasks of a cluster that make calls: how one is submitted, and what it does on its worker."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from distributed import Client, Future, get_worker
from distributed.utils import set_thread_state, thread_state

from daskdist.core.array_pool import limit_pool
from daskdist.core.failing.packed_error import raising_packed
from daskdist.execute.callers.sent_blocks import SentBlock
from daskdist.execute.messages.pickling import load_sent
from daskdist.execute.task_times import task_times
from daskdist.watched_calls import Watched

# The share of a worker's memory that is kept for reuse at most.
_POOLS_OF_MEMORY: Final = 8


def submit_task(
    client: Client,
    key: str,
    depth: int,
    is_pinned: bool,
    pickled: bytes,
    handles: list[Future] | None,
    worker: str | None,
) -> Future:
    """Submit a task.

    Parameters
    ----------
    client, key
        The connection to the cluster, and the key of the task.
    depth
        The number of tasks of which each needs the one before it, up to this one.
    is_pinned
        Whether no other worker may run it.
    pickled, handles
        The arguments of `call_sent`.
    worker
        The address of its worker; None for any.
    """
    return client.submit(
        call_sent,
        pickled,
        handles,
        key=key,
        workers=[worker] if worker else None,
        allow_other_workers=bool(worker) and not is_pinned,
        pure=False,
        # Workers run first what is nearest to the program, and of tasks at the same depth the oldest; without
        # `fifo_timeout` they would run the newest of those that are submitted within 100 ms.
        priority=depth,
        fifo_timeout=0,
    )


@raising_packed
def call_sent(pickled: bytes, results: list[Any] | None) -> Any:
    """Call a pickled function, and add its time to `task_times`.

    Parameters
    ----------
    pickled
        The function, its other arguments, the token of the caller, the name of the task, and settings, see `to_send`.
        A `SentBlock` among the arguments stands for data that the program sends.
    results
        The results of other tasks, which are the first argument; None if there is no such argument.
    """
    _prepare_worker()
    function, args, caller, name, settings = load_sent(pickled)
    args = [arg.fetch() if type(arg) is SentBlock else arg for arg in args]
    if results is not None:
        args.insert(0, results)
    begun_at = time.perf_counter()
    try:
        return Watched(name, _call_in_task, settings)(dict(thread_state.__dict__), function, args)
    finally:
        worker = get_worker().address
        for times in (task_times(worker, caller), task_times(worker)):
            times.add(name, begun_at)


def _call_in_task(state: dict[str, Any], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    # Dask's functions, such as `get_worker`, look at the thread for the task that it runs.
    with set_thread_state(**state):
        return function(*args)


class _WithoutOurFailures(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        is_failure = str(record.msg).startswith("Compute Failed")
        return not (is_failure and any(f"{call_sent.__name__}(" in str(arg) for arg in record.args or ()))


@functools.cache
def _prepare_worker() -> None:
    limit_bytes = get_worker().memory_manager.memory_limit
    if limit_bytes:
        limit_pool(limit_bytes // _POOLS_OF_MEMORY)
    # The error of a task is raised where the program uses its result, and so need not appear in the worker's log too.
    logging.getLogger("distributed.worker").addFilter(_WithoutOurFailures())
