"""The backend of strategies in this process: calls run immediately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.strategy.calls.local_calls import Calls
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.status import RunningCall, WorkerStatus, state_of
from daskdist.strategy.values.refs import FlatResult
from daskdist.strategy.variables.store import VariableStore

if TYPE_CHECKING:
    from daskdist.strategy.replica.contract import StrategyContract


class NoWorkers:
    """The workers of replicas that are in this process: there are none that could be lost."""

    in_doubt = has_lost = is_left = False
    leaving: Sequence[str] = ()


class NoRecovery:
    """The recovery of replicas that cannot be lost, as they are in this process: it has nothing to do."""

    in_doubt = False

    def take_handed_over(self) -> Sequence[Any]:
        """Return nothing, as replicas of this process do not leave."""
        return ()

    def lost_workers(self, within_s: float) -> list[str]:
        """Return none: replicas of this process cannot be lost."""
        return []

    def recover(self, group: ReplicaGroup) -> ReplicaGroup:
        """Return the group, as replicas of this process cannot be lost."""
        return group

    def with_replacements(self, group: ReplicaGroup) -> ReplicaGroup:
        """Return the group."""
        return group

    def waits_for_replacement(self, lost: Collection[str]) -> Iterator[float]:
        """Yield nothing, as replicas of this process cannot be lost."""
        return iter(())

    def lost_once(self) -> Collection[str]:
        """Return none, as replicas of this process cannot be lost."""
        return ()

    def on_loss(self, recover: Callable[[], Callable[[], None] | None]) -> None:
        """Ignore the function."""

    def made_again_since(self, number: int) -> bool:
        """Return False."""
        return False

    def first_to_undo(self) -> int | None:
        """Return None."""
        return None

    def note_undone(self) -> None:
        """Return immediately."""

    def note_aligned(self) -> None:
        """Return immediately."""

    def make_again(self, group: ReplicaGroup) -> None:
        """Return immediately."""

    def give_up(self, why: str) -> None:
        """Return immediately."""


class LocalBackend:
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

    defers = False
    client = None
    live_workers = NoWorkers()

    def __init__(
        self, strategy: Callable[[], StrategyContract | None], places: Sequence[Replica], store: VariableStore
    ) -> None:
        self.places = places
        self.store = store
        self.recovery = self.repetition = NoRecovery()
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

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Return the results, which are the handles."""
        return list(handles)

    def wait_for_step(self, step: Sequence[Handle]) -> None:
        """Return immediately: errors are raised by the call itself."""

    def logged(self, make: Callable[[ReplicaGroup], Any], group: ReplicaGroup | None = None) -> Any:
        """Make the call."""
        return make(group)  # type: ignore[arg-type]

    def cut_for(self, leaf: Any, group: ReplicaGroup) -> None:
        """Return immediately: as many replicas as pieces are there."""

    def is_done(self, handle: Handle) -> bool:
        """Return True."""
        return True

    def finish(self, *, raises_all: bool = False) -> None:
        """Return immediately: errors are raised by the call itself."""

    def raise_unobserved(self) -> None:
        """Return immediately: errors are raised by the call itself."""

    def note_iterator(self, iterator: Any) -> None:
        """Return immediately: no scheduler shows its figures."""

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Return immediately: calls have finished."""

    def forget(self, variable: int) -> None:
        """Drop the replicas' copies of a variable."""
        self.store.drop(variable)

    def end_call(self, handles: Sequence[Handle], why: str) -> None:
        """Return immediately: calls have finished."""

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
