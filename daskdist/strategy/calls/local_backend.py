"""The backend of strategies in this process: calls run immediately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import Backend
from daskdist.strategy.calls.local_calls import Calls
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.status import RunningCall, WorkerStatus, state_of
from daskdist.strategy.values.refs import FlatResult
from daskdist.strategy.variables.store import VariableStore

if TYPE_CHECKING:
    from daskdist.strategy.replica.contract import StrategyContract


class LocalBackend(Backend):
    """Calls on replicas of this process.

    Parameters
    ----------
    strategy
        Returns the strategy for the replicas; None once it is garbage.
    places
        The device of each replica, on which its functions run.
    store
        The variables of the replicas.
    """

    def __init__(
        self, strategy: Callable[[], StrategyContract | None], places: Sequence[Replica], store: VariableStore
    ) -> None:
        self.places = places
        self.store = store
        self._strategy = strategy
        self._is_closed = False
        self._lock = threading.Lock()
        self._num_steps = 0
        # call -> its operation and function.
        self._under_way: dict[Calls, tuple[str, Callable[..., Any]]] = {}

    def call_replicas(
        self, operation: str, fn: Callable[..., Any], leaves: Sequence[Any], treespec: Any, group: ReplicaGroup
    ) -> list[Any]:
        """Call a function on every replica; return the results, or raise the error of one."""
        self.check_open(operation)
        calls = Calls(self._strategy(), self.places, self.store, fn, leaves, treespec)
        if operation == "run":
            with self._lock:
                self._num_steps += 1
        self._under_way[calls] = operation, fn
        try:
            return calls.results()
        finally:
            del self._under_way[calls]

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, worker: str | None = None, name: str
    ) -> list[Any]:
        """Call ``function(*args)``."""
        self.check_open(name)
        return [function(*args)]

    def structures(self, handles: Sequence[Handle]) -> list[tuple[Any, tuple[bool, ...]]]:
        """Return the structure of each result, and which of its leaves are None."""
        flat = map(FlatResult.of, handles)
        return [(result.treespec, tuple(leaf is None for leaf in result.leaves)) for result in flat]

    def forget(self, variable: int) -> None:
        """Drop the replicas' copies of a variable."""
        self.store.drop(variable)

    def status(self, group: ReplicaGroup, *, asks: bool = True) -> tuple[WorkerStatus, ...]:
        """Return the status of this process."""
        under_way = list(self._under_way.items())
        now = time.monotonic()
        running = tuple(
            [
                RunningCall(number, f"{operation}-{getattr(fn, '__name__', type(fn).__name__)}", now - calls.begun_at)
                for calls, (operation, fn) in under_way
                for number in calls.running()
            ]
        )
        num_in_flight = sum(operation == "run" for _, (operation, _) in under_way)
        replicas = tuple(range(len(group.replicas)))
        devices = tuple([replica.device for replica in group.replicas])
        state = "closed" if self._is_closed else state_of(running, num_in_flight)
        return (WorkerStatus(None, replicas, devices, state, running, self._num_steps, num_in_flight),)

    def check_open(self, operation: str) -> None:
        """Raise an error if the strategy is closed."""
        if self._is_closed:
            raise ClusterError(f"{operation}: the strategy is closed; create another")

    def close(self) -> None:
        """Drop the variables of the replicas."""
        self._is_closed = True
        self.store = VariableStore(self.store.token)
