"""Interfaces of a strategy for its replicas, variables and datasets, which cannot import the strategy itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from daskdist.strategy.backend import Backend
from daskdist.strategy.group import Replica
from daskdist.strategy.replica.merge_calls import MergeCalls
from daskdist.strategy.values.per_replica import PerReplica

_InternalsT = TypeVar("_InternalsT", covariant=True)


class InternalsContract(Protocol):
    """The interface of `StrategyInternals` for replicas, variables and datasets."""

    @property
    def token(self) -> str:
        """Return the name that identifies the strategy to variables and workers."""
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

    def replicas_left(self, *, after_error: bool = False) -> tuple[Replica, ...]:
        """Return the replicas, without those that are known to be lost; after an error also if the scheduler is."""
        ...

    def finish(self, *, raises_all: bool = False) -> None:
        """Wait for all calls; raise errors like `Backend.finish`."""
        ...

    def take_replacements(self) -> None:
        """Give replicas to workers that can take the places of lost ones, before a pass."""
        ...

    def raise_unobserved(self) -> None:
        """Raise the error of a call whose results were not read and no longer can be.

        Make calls again that need lost workers.
        """
        ...

    def register(self, variable: Any) -> None:
        """Register a new variable; its copies on replicas are freed when the program drops it."""
        ...

    def call_each(self, num_leaves: int, operation: str, fn: Callable[..., Any], *args: Any) -> list[PerReplica]:
        """Call a function that returns a list of ``num_leaves`` leaves on each replica; return each leaf's values."""
        ...


class WithInternals(Protocol[_InternalsT]):
    """An object with internal parts, which users do not see."""

    @property
    def _internals(self) -> _InternalsT: ...


def internals_of(strategy: WithInternals[_InternalsT]) -> _InternalsT:
    """Return the internal parts of a strategy: a `StrategyInternals`, or its contract for lower modules."""
    return strategy._internals


class StrategyContract(WithInternals[InternalsContract], Protocol):
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
