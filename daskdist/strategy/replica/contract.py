"""The contract between a strategy and its replicas, variables and datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from daskdist.execute.caller import Caller
from daskdist.strategy.backend import Backend
from daskdist.strategy.group import Replica
from daskdist.strategy.replica.merge_calls import MergeCalls
from daskdist.strategy.values.per_replica import PerReplica


class Internals(Protocol):
    """The parts of a strategy that users do not call."""

    @property
    def token(self) -> str:
        """Return the name under which variables and workers know the strategy."""
        ...

    @property
    def backend(self) -> Backend:
        """Return the backend, which makes the calls."""
        ...

    @property
    def input(self) -> Any:
        """Return the `InputBackend`, which reads and places datasets."""
        ...

    @property
    def merge_calls(self) -> MergeCalls:
        """Return the part that `ReplicaContext.merge_call` uses."""
        ...

    def register(self, variable: Any) -> None:
        """Remember a new variable; free what replicas keep of it when the program drops it."""
        ...

    def call_each(self, num_leaves: int, operation: str, fn: Callable[..., Any], *args: Any) -> list[PerReplica]:
        """Call a function on each replica; return the leaves of the list of ``num_leaves`` that it returns."""
        ...


class StrategyContract(Protocol):
    """A strategy as its replicas, variables and datasets see it."""

    @property
    def internals(self) -> Internals:
        """Return the parts that users do not call."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """Return the number of replicas."""
        ...

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Return the worker and device of each replica, in order of their ids."""
        ...

    @property
    def workers(self) -> tuple[str | None, ...]:
        """Return the address of each worker; ``(None,)`` for this process."""
        ...

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Call a function on every replica."""
        ...

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Reduce the values of all replicas to one."""
        ...

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of a `PerReplica` in replica order, waited for."""
        ...

    def reader(self, dataset: Any) -> Caller:
        """Return a caller for one pass over a dataset."""
        ...
