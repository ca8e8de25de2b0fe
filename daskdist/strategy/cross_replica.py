"""The strategy in functions called by `ReplicaContext.merge_call` on a cluster, and the variables available there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optree

from daskdist.devices import named
from daskdist.errors import ArgumentError
from daskdist.strategy.calls.local_backend import LocalBackend
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.replica.merge_calls import MergeCalls
from daskdist.strategy.strategy import Strategy
from daskdist.strategy.values.device_arrays import put_on
from daskdist.strategy.values.variable_contract import variable_number
from daskdist.strategy.variables.layout import frozen
from daskdist.strategy.variables.record import VariableRecord, is_mirrored, layout_of
from daskdist.strategy.variables.replica_copy import ReplicaCopy, read_together
from daskdist.strategy.variables.store import VariableStore


class _StoreOfAll(VariableStore):
    """The variables of all replicas in the process of one; changes are sent to the others afterwards.

    Parameters
    ----------
    local_store
        The store of the replicas in this process.
    first
        One of the replicas in this process.
    variable_states
        The number of a variable -> replica -> its state.
    objects
        Replica -> the variables that are objects.
    """

    def __init__(
        self,
        local_store: VariableStore,
        first: int,
        variable_states: Mapping[int, Mapping[int, Any]],
        objects: Mapping[int, Sequence[VariableRecord]],
    ) -> None:
        super().__init__(local_store.token)
        self._own = local_store
        self._first = first
        self._states.update({number: dict(states) for number, states in variable_states.items()})
        self._objects = objects
        self._changed: dict[int, dict[int, VariableRecord]] = {}

    def get(self, variable: VariableRecord, replica: int) -> Any:
        if replica in self._states.get(variable_number(variable), ()):
            return super().get(variable, replica)
        if not is_mirrored(variable):
            raise ArgumentError(
                f"{variable.name}: each replica has its own value, and on a cluster a function of merge_call "
                "only has the values of variables among its arguments: pass it in args of merge_call"
            )
        return self._own.get(variable, self._first)

    def put(self, variable: VariableRecord, replica: int, state: Any) -> None:
        super().put(variable, replica, state)
        self._note(variable, replica)

    def note_mutable(self, variable: VariableRecord, replica: int) -> None:
        # Objects that share parts with it, as an optimizer does with a model, may change too.
        for changed in (variable, *self._objects.get(replica, ())):
            self._note(changed, replica)

    def _note(self, variable: VariableRecord, replica: int) -> None:
        self._changed.setdefault(replica, {})[variable_number(variable)] = variable

    def changes(self, replica: int) -> list[tuple[VariableRecord, Any]]:
        """Return the new values of variables of a replica."""
        return [(variable, self._sent(variable, replica)) for variable in self._changed.get(replica, {}).values()]

    def _sent(self, variable: VariableRecord, replica: int) -> Any:
        state = self.get(variable, replica)
        if not is_mirrored(variable):
            return state
        # Return the same object for all replicas if possible, as it is then pickled once.
        first = self.get(variable, 0)
        return first if all(map(_is_same, first, state)) else state


def _is_same(first: Any, other: Any) -> bool:
    # Compare to the last bit.
    if type(first) is not np.ndarray or type(other) is not np.ndarray:
        return False
    return np.array_equal(first.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


class _CrossReplicaBackend(MergeCalls, LocalBackend):
    """The backend of functions called by merge_call on a cluster, in the process of one replica, with their variables.

    Parameters
    ----------
    strategy
        Returns the strategy of the functions.
    group
        The replicas.
    local_store
        The store of the replicas on this worker; None if unknown.
    number
        The number of the replica that calls the functions.
    """

    # The program would not know of new variables.
    makes_variables = False

    def __init__(
        self,
        strategy: Callable[[], Strategy | None],
        group: ReplicaGroup,
        local_store: VariableStore | None,
        number: int,
    ) -> None:
        # All replicas are called on this replica's device, as this worker may lack the devices of the others.
        super().__init__(strategy, (group.replicas[number],) * len(group.replicas), VariableStore(group.token))
        self._own = local_store
        self._number = number

    @property
    def is_between(self) -> bool:
        """Return whether a function is being called."""
        return isinstance(self.store, _StoreOfAll)

    def call_replicas(
        self, operation: str, fn: Callable[..., Any], leaves: Sequence[Any], treespec: Any, group: ReplicaGroup
    ) -> list[Any]:
        if not self.is_between:
            raise RuntimeError(
                f"{operation}: called on a worker; a strategy can only be used in the program that created it"
            )
        return super().call_replicas(operation, fn, leaves, treespec, group)

    def collect(self, arguments: Any) -> list[tuple[VariableRecord, list[Any]]]:
        """Return the variables among a replica's arguments that are its own, with their values."""
        if self.is_between:
            # The replicas that the function itself calls are all in this process.
            return []
        leaves = (leaf for leaf in optree.tree_leaves(arguments) if isinstance(leaf, VariableRecord))
        apart = list({variable_number(variable): variable for variable in leaves if not is_mirrored(variable)}.values())
        return list(zip(apart, read_together(apart), strict=True))

    @contextlib.contextmanager
    def open(
        self, along: Sequence[Sequence[tuple[VariableRecord, list[Any]]]]
    ) -> Iterator[Callable[[], Sequence[Any]]]:
        """Make the variables of all replicas available in a ``with`` block, as a getter of each replica's changes."""
        if self._own is None or self.is_between:
            yield lambda: [()] * len(along)
            return
        device = named(self.places[0].device)
        variable_states: dict[int, dict[int, Any]] = {}
        objects: dict[int, list[VariableRecord]] = {}
        for replica, states in enumerate(along):
            for variable, leaves in states:
                placed = leaves if device.is_host else [put_on(device, leaf) for leaf in leaves]
                variable_states.setdefault(variable_number(variable), {})[replica] = list(map(frozen, placed))
                if layout_of(variable).treespec is None:
                    objects.setdefault(replica, []).append(variable)
        store = self.store = _StoreOfAll(self._own, self._number, variable_states, objects)
        try:
            yield lambda: [store.changes(replica) for replica in range(len(along))]
        finally:
            self.store = VariableStore(store.token)

    def apply(self, changes: Sequence[tuple[VariableRecord, Any]], replica: ReplicaContext) -> None:
        """Apply a replica's changes of variables to it."""
        for variable, leaves in changes:
            ReplicaCopy(variable, replica).write("put", leaves)


class CrossReplicaStrategy(Strategy):
    """The strategy on a worker, for functions called by merge_call only.

    Parameters
    ----------
    group
        The replicas.
    local_store
        The store of the replicas on this worker; None if unknown.
    number
        The number of the replica that uses it.
    """

    def __init__(self, group: ReplicaGroup, local_store: VariableStore | None, number: int) -> None:
        backend = _CrossReplicaBackend(weakref.ref(self), group, local_store, number)
        super().__init__(group, backend, InputBackend(), backend)
