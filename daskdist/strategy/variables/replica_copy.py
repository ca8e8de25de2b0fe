"""A replica's copy of a variable, and the functions that read and change it where the replica is."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import optree

from daskdist.checkpoint.nests import as_numpy, like
from daskdist.devices import Device, dtype_of, is_on_device, named
from daskdist.errors import ArgumentError
from daskdist.strategy.collectives.operations import First
from daskdist.strategy.reduce.device_reduction import cast
from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.replica.context import ReplicaContext, current_replica
from daskdist.strategy.values.device_arrays import host_array, host_nest, moved
from daskdist.strategy.values.extract import FlatResult
from daskdist.strategy.variables.aggregation import VariableSynchronization
from daskdist.strategy.variables.layout import CopyLayout, as_arrays, check, frozen, leaves_like, with_dtype
from daskdist.strategy.variables.objects import copied, parts_of
from daskdist.strategy.variables.record import VariableRecord

_CHANGES: Final = {"assign_add": operator.add, "assign_sub": operator.sub}


class ReplicaCopy:
    """A replica's copy of a variable, on that replica.

    Parameters
    ----------
    variable
        The variable.
    replica
        The replica, whose function this is in.
    """

    def __init__(self, variable: VariableRecord, replica: ReplicaContext) -> None:
        self.variable = variable
        self.replica = replica
        self.device: Device = named(replica.devices[0])
        self._store: Any = replica.store()

    @property
    def is_own(self) -> bool:
        """Return whether it may differ from the copies of other replicas."""
        if self.replica.updates_alone or self.replica.num_replicas_in_sync == 1:
            return True
        return self.variable.synchronization is VariableSynchronization.ON_READ

    @property
    def leaves(self) -> list[Any]:
        """Its arrays, which are the device's, or the object."""
        variable = self.variable
        found = self._store.get(variable, self.replica.replica_id_in_sync_group)
        return [leaf[()] if type(leaf) is np.ndarray and not leaf.ndim else leaf for leaf in found]

    @property
    def lent(self) -> list[Any]:
        """Its arrays, or the object, which may be changed in place."""
        if self.variable.layout.treespec is None:
            self._store.lend(self.variable, self.replica.replica_id_in_sync_group)
        return self.leaves

    @property
    def is_shared(self) -> bool:
        """Return whether another replica of this process has the very same object, or something in it."""
        (own,) = self.leaves
        others = self._store.others(self.variable, self.replica.replica_id_in_sync_group)
        return any(parts_of(own) & parts_of(each) for (each,) in others)

    @property
    def host_leaves(self) -> list[Any]:
        """Its arrays as they leave the device, or the object."""
        leaves = self.leaves
        return leaves if self.variable.layout.treespec is None else list(map(host_array, leaves))

    def checked(self, how: str, value: Any) -> list[Any]:
        """Return the leaves of a value as arrays of the host or a device, or the object; refuse what does not fit."""
        layout = self.variable.layout
        if layout.treespec is None:
            self._check_change(how)
            return [own_object(value, self.variable.name)]
        what = f"{self.variable.name}.{how}"
        leaves = as_arrays(leaves_like(layout, value, what))
        check(what, layout, leaves)
        return leaves

    def write(self, how: str, leaves: Sequence[Any]) -> None:
        """Change this copy alone, by arrays of the host or of a device, or another object."""
        variable = self.variable
        if variable.layout.treespec is None:
            self._check_change(how)
            found = list(leaves) if how not in _CHANGES else self._changed(how, *self.leaves, *leaves)
        else:
            specs = variable.layout.specs
            found = [self._own(leaf, spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)]
            change = _CHANGES.get(how)
            if change is not None:
                found = list(map(change, self.leaves, found))
            found = list(map(frozen, found))
        place = variable, self.replica.replica_id_in_sync_group
        self._store.put(*place, found)
        if variable.layout.treespec is None and self.is_shared:
            # Replicas of this process were given the very same.
            self._store.put(*place, [copied(found[0], variable.name)])

    def _check_change(self, how: str) -> None:
        layout = self.variable.layout
        if how in _CHANGES and not layout.specs:
            raise ArgumentError(f"{self.variable.name}.{how}: the value is {layout.kind}, and no array")

    def _changed(self, how: str, nest: Any, delta: Any) -> list[Any]:
        try:
            found = optree.tree_map(_CHANGES[how], nest, delta, none_is_leaf=True)
        except ValueError as error:
            raise ArgumentError(
                f"{self.variable.name}.{how}: the value is of another structure or shape than the variable's: {error}"
            ) from None
        # Without what tensors were computed from, which would be all that they ever were.
        return [optree.tree_map(lambda leaf: leaf.detach() if hasattr(leaf, "detach") else leaf, found)]

    def _own(self, leaf: Any, dtype: np.dtype[Any]) -> Any:
        # An array of the device that nobody else has; of the host, where the device lacks the dtype.
        device = self.device
        if device.lacks(dtype):
            return np.array(host_array(leaf), dtype)
        if device.is_host or not is_on_device(leaf):
            return device.put(np.array(host_array(leaf), dtype))
        xp, here = device.namespace, moved(leaf, device)
        if dtype_of(here) != dtype:
            return cast(xp, here, dtype)
        return xp.asarray(here, copy=True) if here is leaf else here


def own_object(value: Any, what: str) -> Any:
    """Return an object for a replica: of another variable a copy of its value, else the object."""
    return copied(value.read_value(), what) if isinstance(value, VariableRecord) else value


# --- called on each replica ---


def copy_on_replica(variable: VariableRecord) -> ReplicaCopy | None:
    """Return the copy of the current replica; None outside of replicas.

    Raises
    ------
    ArgumentError
        The replica has none: its strategy is closed, its worker was restarted, or it is of another strategy.
    """
    replica = current_replica()
    if replica is None:
        return None
    store = replica.store()
    if store is None:
        raise ArgumentError(
            f"{variable.name}: its worker knows nothing of it; its strategy is closed, or the worker was restarted"
        )
    if store.token != variable.token:
        raise ArgumentError(
            f"{variable.name}: used on a replica of another strategy; a variable is for the strategy in whose scope it "
            "was made"
        )
    return ReplicaCopy(variable, replica)


def _required_copy(variable: VariableRecord) -> ReplicaCopy:
    copy = copy_on_replica(variable)
    if copy is None:
        raise RuntimeError(f"{variable.name}: not on a replica")
    return copy


def _listed(leaves: list[Any]) -> FlatResult:
    # Also where a leaf is an object that is a nest of some kind.
    return FlatResult(leaves, list_spec(len(leaves)))


def make_on_replica(variable: VariableRecord, make: Callable[[], Any], dtype: str | None) -> FlatResult:
    """Call a function that makes the initial value of a variable."""
    copy = _required_copy(variable)
    replica = copy.replica
    value, layout = None, CopyLayout(None)
    if replica.replica_id_in_sync_group == 0:
        value = with_dtype(host_nest(make()), dtype)
        layout = CopyLayout.of(value)
    if replica.num_replicas_in_sync > 1:
        arrays = optree.tree_leaves(value) if layout.treespec is not None else []
        given = (layout, arrays) if replica.replica_id_in_sync_group == 0 else None
        layout, arrays = replica.meet(First(f"{variable.name} at its beginning"), given)
        if layout.treespec is not None:
            value = layout.packed(arrays)
        elif replica.replica_id_in_sync_group:
            value = make()
            layout = CopyLayout.of(value)
    variable.layout = layout
    if layout.treespec is not None:
        copy.write("put", optree.tree_leaves(value))
        return _listed([layout])
    copy.write("put", [value])
    return _listed([layout])


def _for_program(copy: ReplicaCopy) -> FlatResult:
    # On a cluster an object is looked at later, when calls may have changed it.
    leaves = copy.host_leaves
    replica = copy.replica
    worker = replica.strategy.replicas[replica.replica_id_in_sync_group].worker
    if copy.variable.layout.treespec is None and worker is not None:
        # One that cannot be copied does not leave the worker either.
        with contextlib.suppress(ArgumentError):
            leaves = [copied(leaf, copy.variable.name) for leaf in leaves]
    return _listed(leaves)


def read_on_replica(variable: VariableRecord, is_asked: bool = True) -> FlatResult:
    """Return the leaves of a replica's copy; None for each if the replica is not asked."""
    return _for_program(_required_copy(variable)) if is_asked else _listed([None] * variable.layout.num_leaves)


def read_together(variables: Sequence[VariableRecord]) -> list[list[Any]]:
    """Return the leaves of a replica's copies; what objects share, as a model and its optimizer do, stays shared."""
    found = [_required_copy(each).host_leaves for each in variables]
    objects = [number for number, each in enumerate(variables) if each.layout.treespec is None]
    # An object that cannot be copied does not leave the worker either.
    with contextlib.suppress(ArgumentError):
        others = copied([found[number] for number in objects], "merge_call")
        for number, leaves in zip(objects, others, strict=True):
            found[number] = leaves
    return found


def write_on_replica(variable: VariableRecord, how: str, leaves: list[Any]) -> FlatResult:
    """Change a replica's copy alone, and give its leaves."""
    copy = _required_copy(variable)
    if variable.layout.treespec is not None:
        leaves = as_arrays(leaves)
        check(f"{variable.name}.{how}", variable.layout, leaves)
    elif how == "assign":
        # The program's own, or what other replicas are given too.
        leaves = [copied(own_object(leaf, variable.name), f"{variable.name}.{how}") for leaf in leaves]
    copy.write(how, leaves)
    return _for_program(copy)


def align_on_replica(variable: VariableRecord) -> FlatResult:
    """Assign the first replica's value to all replicas."""
    copy = _required_copy(variable)
    replica = copy.replica
    if replica.num_replicas_in_sync > 1:
        is_first = replica.replica_id_in_sync_group == 0
        found = replica.meet(First(f"{variable.name}, aligned"), copy.host_leaves if is_first else None)
        if not is_first:
            copy.write("put", found)
    return _listed([True])


def state_on_replica(variable: VariableRecord) -> FlatResult:
    """Return a replica's value in arrays that can be saved."""
    value = variable.layout.packed(_required_copy(variable).host_leaves)
    if variable.layout.treespec is None:
        value = value.state_dict() if hasattr(value, "state_dict") else value
        try:
            value = as_numpy(value)
        except ArgumentError as error:
            raise ArgumentError(
                f"{variable.name}: {variable.layout.kind} cannot be saved; it needs a state_dict() of arrays and a "
                f"load_state_dict(): {error}"
            ) from None
    return FlatResult([value], list_spec(1))


def restore_on_replica(variable: VariableRecord, state: FlatResult) -> FlatResult:
    """Restore a replica's value from its saved state."""
    copy = _required_copy(variable)
    value = variable.layout.packed(copy.host_leaves)
    (saved,) = state.leaves
    if hasattr(value, "load_state_dict"):
        value = variable.layout.packed(copy.lent)
        value.load_state_dict(like(value.state_dict(), saved, owner=value))
        return FlatResult([True], list_spec(1))
    restored = like(value, saved)
    if variable.layout.treespec is None:
        copy.write("put", [restored])
    else:
        copy.write("put", copy.checked("restore", restored))
    return FlatResult([True], list_spec(1))
