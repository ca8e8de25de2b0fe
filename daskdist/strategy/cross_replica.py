"""What there is between the replicas of a cluster, on the worker of the first: their strategy, and all they keep."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import optree

from daskdist.devices import named
from daskdist.errors import ArgumentError
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.input.input_backend import LocalInput
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.steps.local_backend import LocalBackend
from daskdist.strategy.strategy import Strategy
from daskdist.strategy.values.device_arrays import put_on
from daskdist.strategy.variables.layout import frozen
from daskdist.strategy.variables.record import VariableRecord
from daskdist.strategy.variables.replica_copy import ReplicaCopy, read_together
from daskdist.strategy.variables.store import VariableStore

# Variables, each with the leaves of a replica's copy.
_States: TypeAlias = Sequence[tuple[VariableRecord, list[Any]]]


class _StoreOfAll(VariableStore):
    """What all replicas keep, where one of them is; what is changed there is still to be given to the others.

    Parameters
    ----------
    own
        What those of this process keep.
    first
        One of these.
    given
        By the number of a variable what each replica has.
    objects
        By replica, those of which it has an object.
    """

    def __init__(
        self,
        own: VariableStore,
        first: int,
        given: Mapping[int, Mapping[int, Any]],
        objects: Mapping[int, Sequence[VariableRecord]],
    ) -> None:
        super().__init__(own.token)
        self._own = own
        self._first = first
        self._states.update({number: dict(states) for number, states in given.items()})
        self._objects = objects
        self._changed: dict[int, dict[int, VariableRecord]] = {}

    def get(self, variable: VariableRecord, replica: int) -> Any:
        if replica in self._states.get(variable.key.number, ()):
            return super().get(variable, replica)
        if not variable.is_mirrored:
            raise ArgumentError(
                f"{variable.name}: each replica has its own, and on a cluster a function between replicas has those of "
                "the variables that it is given: put it in args of merge_call"
            )
        return self._own.get(variable, self._first)

    def put(self, variable: VariableRecord, replica: int, state: Any) -> None:
        super().put(variable, replica, state)
        self._note(variable, replica)

    def lend(self, variable: VariableRecord, replica: int) -> None:
        # Objects that share parts with it, as an optimizer does with a model, change too.
        for each in (variable, *self._objects.get(replica, ())):
            self._note(each, replica)

    def _note(self, variable: VariableRecord, replica: int) -> None:
        self._changed.setdefault(replica, {})[variable.key.number] = variable

    def changes(self, replica: int) -> list[tuple[VariableRecord, Any]]:
        """Return the new values of variables of a replica."""
        return [(each, self._sent(each, replica)) for each in self._changed.get(replica, {}).values()]

    def _sent(self, variable: VariableRecord, replica: int) -> Any:
        own = self.get(variable, replica)
        if not variable.is_mirrored:
            return own
        # The same object for all replicas is pickled once.
        first = self.get(variable, 0)
        return first if all(map(_is_same, first, own)) else own


def _is_same(one: Any, other: Any) -> bool:
    # To the last bit.
    if type(one) is not np.ndarray or type(other) is not np.ndarray:
        return False
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


class _CrossReplicaBackend(LocalBackend):
    """Calls replicas for functions between them, and for nobody else."""

    is_between = False

    def call_replicas(
        self, operation: str, fn: Callable[..., Any], leaves: Sequence[Any], treespec: Any, group: ReplicaGroup
    ) -> list[Any]:
        if not self.is_between:
            raise RuntimeError(f"{operation}: called on a worker; a strategy is for the program that made it")
        return super().call_replicas(operation, fn, leaves, treespec, group)


class _MergeCallsOnWorker:
    """Functions between the replicas of a cluster, on the worker of one of them.

    Parameters
    ----------
    backend
        Calls replicas for the functions.
    replica, number
        The replica that calls them, and its number.
    own
        What the replicas of this worker keep; None if it is not known.
    """

    # The program would not know of them.
    makes_variables = False

    def __init__(self, backend: _CrossReplicaBackend, replica: Replica, number: int, own: VariableStore | None) -> None:
        self._backend = backend
        self._replica = replica
        self._number = number
        self._own = own

    def collect(self, given: Any) -> list[tuple[VariableRecord, list[Any]]]:
        if self._backend.is_between:
            # All replicas that it calls itself are here.
            return []
        leaves = (leaf for leaf in optree.tree_leaves(given) if isinstance(leaf, VariableRecord))
        apart = list({each.key.number: each for each in leaves if not each.is_mirrored}.values())
        return list(zip(apart, read_together(apart), strict=True))

    @contextlib.contextmanager
    def open(
        self, along: Sequence[Sequence[tuple[VariableRecord, list[Any]]]]
    ) -> Iterator[Callable[[], Sequence[Any]]]:
        backend = self._backend
        if self._own is None or backend.is_between:
            yield lambda: [()] * len(along)
            return
        device = named(self._replica.device)
        given: dict[int, dict[int, Any]] = {}
        objects: dict[int, list[VariableRecord]] = {}
        for replica, states in enumerate(along):
            for variable, leaves in states:
                found = leaves if device.is_host else [put_on(device, leaf) for leaf in leaves]
                given.setdefault(variable.key.number, {})[replica] = list(map(frozen, found))
                if variable.layout.treespec is None:
                    objects.setdefault(replica, []).append(variable)
        store = backend.store = _StoreOfAll(self._own, self._number, given, objects)
        backend.is_between = True
        try:
            yield lambda: [store.changes(replica) for replica in range(len(along))]
        finally:
            backend.is_between = False
            backend.store = VariableStore(store.token)

    def apply(self, changes: Sequence[tuple[VariableRecord, Any]], replica: ReplicaContext) -> None:
        for variable, leaves in changes:
            ReplicaCopy(variable, replica).write("put", leaves)


class CrossReplicaStrategy(Strategy):
    """The strategy as a worker knows it: of use to what its replicas have called between them, and to nobody else.

    Parameters
    ----------
    group
        The replicas.
    own
        What those of this worker keep; None if it is not known.
    number
        Which of them has this.
    """

    def __init__(self, group: ReplicaGroup, own: VariableStore | None, number: int) -> None:
        replica = group.replicas[number]
        # All replicas are called on this one's device: there may be no such devices here as those of other workers.
        places = (replica,) * len(group.replicas)
        backend = _CrossReplicaBackend(weakref.ref(self), places, VariableStore(group.token))
        super().__init__(group, backend, LocalInput(), _MergeCallsOnWorker(backend, replica, number, own))
