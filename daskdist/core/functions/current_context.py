"""The replica or cross-replica scope in which the current code runs, for packages below ``strategy``."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# A `ReplicaContext` or `CrossReplicaScope` of `daskdist.strategy.replica.context`; None outside of both.
current_context: ContextVar[Any] = ContextVar("daskdist context", default=None)


def refuse_replicas(operation: str, advice: str) -> None:
    """Refuse an operation in functions that replicas run.

    Raises
    ------
    RuntimeError
        A replica calls it, in a function that `Strategy.run` calls.
    """
    context = current_context.get()
    if context is not None and context.replica_id_in_sync_group is not None:
        number = context.replica_id_in_sync_group
        raise RuntimeError(f"{operation}: replica {number} calls it, inside the function that it runs. {advice}")
