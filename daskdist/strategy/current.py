"""The current strategy and the current replica."""

from __future__ import annotations

from functools import cache

from daskdist.core.functions.current_context import current_context
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.replica.context import CrossReplicaScope, ReplicaContext, set_default_strategy
from daskdist.strategy.replica.threads import check_thread
from daskdist.strategy.strategy import Strategy
from daskdist.strategy.variables.variable import Variable as Variable


@cache
def _default() -> ReplicaContext:
    # Use the host even if there are GPUs, as a program without a strategy does.
    strategy = MirroredStrategy(["CPU:0"])
    return ReplicaContext(0, 1, lambda: strategy)


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica whose function calls this.

    Returns
    -------
    ReplicaContext or None
        In a function called by `Strategy.run`, the context of its replica. None in a ``with strategy.scope()`` block
        and in a function called by `ReplicaContext.merge_call`. Anywhere else, the context of the default single
        replica.

    Raises
    ------
    RuntimeError
        It is called in a thread that a replica's function started without giving it the replica's context.

    >>> get_replica_context().num_replicas_in_sync
    1
    """
    context = current_context.get()
    if context is None:
        check_thread("get_replica_context")
        return _default()
    return context if type(context) is ReplicaContext else None


def in_cross_replica_context() -> bool:
    """Return whether the caller is in a ``with strategy.scope()`` block or a function of `ReplicaContext.merge_call`.

    >>> in_cross_replica_context()
    False
    """
    return type(current_context.get()) is CrossReplicaScope


def has_strategy() -> bool:
    """Return whether a strategy is current: in its scope and in functions that its replicas run.

    >>> has_strategy()
    False
    """
    return current_context.get() is not None


def get_strategy() -> Strategy:
    """Return the current strategy; if there is none, a default one with a single replica on the host of this process.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    context = current_context.get()
    if context is None:
        check_thread("get_strategy")
    strategy: Strategy = (context or _default()).strategy
    return strategy


# The module of variables cannot import strategies, which themselves have variables.
set_default_strategy(lambda: _default().strategy)
