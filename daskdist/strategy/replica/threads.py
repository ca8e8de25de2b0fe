"""Threads that functions on replicas start, which have no replica's context.

Python's threads begin without the context variables of the code that starts them. Without this module, they would count
as the program, and a sum over all replicas would be their own value.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

from daskdist.core.functions.current_context import current_context
from daskdist.strategy.replica.context import current_replica

_start_thread: Final = threading.Thread.start
# The attribute of a thread with the number of the replica whose function started it.
_REPLICA: Final = "_daskdist_replica"
# The names of threads of this package, which do not run a replica's code, begin with this.
_OWN: Final = "daskdist"


@functools.wraps(_start_thread)
def _start(thread: threading.Thread) -> None:
    replica = current_replica()
    if replica is not None and not thread.name.startswith(_OWN):
        setattr(thread, _REPLICA, replica.replica_id_in_sync_group)
    _start_thread(thread)


threading.Thread.start = _start  # type: ignore[assignment, method-assign]


def check_thread(operation: str) -> None:
    """Raise an error in a thread that a replica's function started without the replica's context.

    Raises
    ------
    RuntimeError
        The thread has no context.
    """
    number = getattr(threading.current_thread(), _REPLICA, None)
    if number is not None and current_context.get() is None:
        raise RuntimeError(
            f"{operation}: called in a thread that the function of replica {number} started, and threads have no "
            "replica's context. Call it in the function itself, or give the thread a copy of the context: "
            "Thread(target=contextvars.copy_context().run, args=(function, ...)), and for pools "
            "pool.submit(contextvars.copy_context().run, function, ...)"
        )
