"""The interface of a strategy for its replicas, variables and datasets, which cannot import the strategy itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from daskdist.strategy.group import Replica


def internals_of(strategy: Any) -> Any:
    """Return the internal parts of a strategy, its `daskdist.strategy.internals.StrategyInternals`."""
    return strategy._internals


class StrategyContract(Protocol):
    """The interface of `Strategy` for its replicas, variables and datasets."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Return the number of replicas."""
        ...

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Return the worker and device of each replica, in replica order."""
        ...

    @property
    def workers(self) -> tuple[str | None, ...]:
        """Return the address of each worker; ``(None,)`` for this process."""
        ...

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Call a function on every replica."""
        ...

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Reduce the values of all replicas to one."""
        ...

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Wait for the values of a `PerReplica` and return them in replica order."""
        ...
