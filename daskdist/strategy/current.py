"""The current strategy and the current replica."""

from __future__ import annotations

from functools import cache

from daskdist.core.functions.current_context import current_context
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.replica.context import CrossReplicaScope, ReplicaContext
from daskdist.strategy.strategy import Strategy


@cache
def _default() -> ReplicaContext:
    # Not on a GPU, were there some: where no strategy is current a program is on the host.
    strategy = MirroredStrategy(["CPU:0"])
    return ReplicaContext(0, 1, lambda: strategy)


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica whose function calls this.

    Returns
    -------
    ReplicaContext or None
        In a function that `Strategy.run` calls, that of its replica. None in a ``with strategy.scope()`` block and in a
        function that `ReplicaContext.merge_call` calls. Anywhere else that of the only replica there is.

    >>> get_replica_context().num_replicas_in_sync
    1
    """
    found = current_context.get()
    if found is None:
        return _default()
    return found if type(found) is ReplicaContext else None


def in_cross_replica_context() -> bool:
    """Return whether this is in a ``with strategy.scope()`` block or in a function of `ReplicaContext.merge_call`.

    >>> in_cross_replica_context()
    False
    """
    return type(current_context.get()) is CrossReplicaScope


def has_strategy() -> bool:
    """Return whether a strategy is current: in its scope, and in functions that its replicas run.

    >>> has_strategy()
    False
    """
    return current_context.get() is not None


def get_strategy() -> Strategy:
    """Return the current strategy; where there is none, one of a single replica in this process, on the host.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    strategy: Strategy = (current_context.get() or _default()).strategy
    return strategy
