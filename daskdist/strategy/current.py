"""The strategy and the replica there are where a program is just now."""

from __future__ import annotations

from functools import cache

from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.replica.context import CrossReplicaScope, ReplicaContext, here
from daskdist.strategy.strategy import Strategy


@cache
def _default() -> ReplicaContext:
    # Not on a GPU, were there some: where no strategy is current a program is on the host.
    strategy = MirroredStrategy(["CPU:0"])
    return ReplicaContext(0, 1, lambda: strategy)


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica whose function calls this.

    Returns
    -------
    ReplicaContext or None
        In a function that `Strategy.run` calls, that of its replica. None in a ``with strategy.scope()`` block and in a
        function that `ReplicaContext.merge_call` calls. Anywhere else that of the only replica there is.

    >>> get_replica_context().num_replicas_in_sync
    1
    """
    found = here.get()
    if found is None:
        return _default()
    return found if type(found) is ReplicaContext else None


def in_cross_replica_context() -> bool:
    """Whether this is in a ``with strategy.scope()`` block or in a function that `ReplicaContext.merge_call` calls.

    >>> in_cross_replica_context()
    False
    """
    return type(here.get()) is CrossReplicaScope


def has_strategy() -> bool:
    """Whether a strategy is current: in its scope, and in what its replicas run.

    >>> has_strategy()
    False
    """
    return here.get() is not None


def get_strategy() -> Strategy:
    """The current strategy; where there is none, one of a single replica in this process, on the host.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    strategy: Strategy = (here.get() or _default()).strategy
    return strategy
