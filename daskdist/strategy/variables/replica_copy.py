"""A replica's copy of a variable, and the functions that read and change it in the replica's process."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import optree

from daskdist.checkpoint.checkpoint import Stateful
from daskdist.checkpoint.nests import as_numpy, like
from daskdist.devices import Device, dtype_of, is_on_device, named
from daskdist.errors import ArgumentError
from daskdist.strategy.collectives.operations import Collect, First
from daskdist.strategy.reduce.device_reduction import cast
from daskdist.strategy.reduce.reductions import ReduceOp
from daskdist.strategy.replica.context import ReplicaContext, current_replica, meet, store_of, updates_alone
from daskdist.strategy.replica.threads import check_thread
from daskdist.strategy.values.device_arrays import host_array, host_nest, moved
from daskdist.strategy.values.refs import FlatResult
from daskdist.strategy.values.variable_contract import token_of
from daskdist.strategy.variables.aggregation import VariableAggregation, VariableSynchronization
from daskdist.strategy.variables.layout import CopyLayout, array_of_leaf, check, frozen, leaves_like, with_dtype
from daskdist.strategy.variables.objects import copied, parts_of
from daskdist.strategy.variables.record import (
    VariableRecord,
    is_mirrored,
    is_on_read,
    is_saved_per_replica,
    layout_of,
    set_layout,
)

_CHANGES: Final = {"assign_add": operator.add, "assign_sub": operator.sub}


class ReplicaCopy:
    """A replica's copy of a variable, in that replica's process."""

    def __init__(self, variable: VariableRecord, replica: ReplicaContext) -> None:
        self.variable = variable
        self.replica = replica
        self.device: Device = named(replica.devices[0])
        self._store: Any = store_of(replica)

    @property
    def is_own(self) -> bool:
        """Return whether the copy may differ from those of other replicas."""
        if updates_alone(self.replica) or self.replica.num_replicas_in_sync == 1:
            return True
        return self.variable.synchronization is VariableSynchronization.ON_READ

    @property
    def leaves(self) -> list[Any]:
        """The arrays, on the device of the replica, or the object."""
        variable = self.variable
        stored = self._store.get(variable, self.replica.replica_id_in_sync_group)
        return [leaf[()] if type(leaf) is np.ndarray and not leaf.ndim else leaf for leaf in stored]

    @property
    def mutable_leaves(self) -> list[Any]:
        """The arrays, or the object, which the caller may change in place."""
        if layout_of(self.variable).treespec is None:
            self._store.note_mutable(self.variable, self.replica.replica_id_in_sync_group)
        return self.leaves

    @property
    def is_shared(self) -> bool:
        """Return whether another replica of this process has the same object or a part of it."""
        (value,) = self.leaves
        others = self._store.others(self.variable, self.replica.replica_id_in_sync_group)
        return any(parts_of(value) & parts_of(other) for (other,) in others)

    @property
    def host_leaves(self) -> list[Any]:
        """The arrays as NumPy arrays, or the object."""
        leaves = self.leaves
        return leaves if layout_of(self.variable).treespec is None else list(map(host_array, leaves))

    def checked(self, method: str, value: Any) -> list[Any]:
        """Return the leaves of a value as arrays of the host or a device, or the object; raise if it does not fit."""
        layout = layout_of(self.variable)
        if layout.treespec is None:
            self._check_change(method)
            return [own_object(value, self.variable.name)]
        operation = f"{self.variable.name}.{method}"
        leaves = list(map(array_of_leaf, leaves_like(layout, value, operation)))
        check(operation, layout, leaves)
        return leaves

    def write(self, method: str, leaves: Sequence[Any]) -> None:
        """Change only this copy, to arrays on the host or on a device, or to another object."""
        variable = self.variable
        if layout_of(variable).treespec is None:
            self._check_change(method)
            new_leaves = list(leaves) if method not in _CHANGES else self._changed(method, *self.leaves, *leaves)
        else:
            specs = layout_of(variable).specs
            new_leaves = [self._own(leaf, spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)]
            change = _CHANGES.get(method)
            if change is not None:
                new_leaves = list(map(change, self.leaves, new_leaves))
            new_leaves = list(map(frozen, new_leaves))
        place = variable, self.replica.replica_id_in_sync_group
        self._store.put(*place, new_leaves)
        if layout_of(variable).treespec is None and self.is_shared:
            # The replicas of this process received the same object.
            self._store.put(*place, [copied(new_leaves[0], variable.name)])

    def _check_change(self, method: str) -> None:
        layout = layout_of(self.variable)
        if method in _CHANGES and not layout.specs:
            raise ArgumentError(f"{self.variable.name}.{method}: the value is {layout.kind}, not an array")

    def _changed(self, method: str, nest: Any, delta: Any) -> list[Any]:
        try:
            changed = optree.tree_map(_CHANGES[method], nest, delta, none_is_leaf=True)
        except ValueError as error:
            raise ArgumentError(
                f"{self.variable.name}.{method}: the value and the variable differ in structure or shape: {error}"
            ) from None
        # Detach tensors, as their graphs would keep all earlier values alive.
        return [optree.tree_map(lambda leaf: leaf.detach() if hasattr(leaf, "detach") else leaf, changed)]

    def _own(self, leaf: Any, dtype: np.dtype[Any]) -> Any:
        # Return a copy on the device, or on the host if the device lacks the dtype.
        device = self.device
        if device.lacks(dtype):
            return np.array(host_array(leaf), dtype)
        if device.is_host or not is_on_device(leaf):
            return device.put(np.array(host_array(leaf), dtype))
        xp, moved_leaf = device.namespace, moved(leaf, device)
        if dtype_of(moved_leaf) != dtype:
            return cast(xp, moved_leaf, dtype)
        return xp.asarray(moved_leaf, copy=True) if moved_leaf is leaf else moved_leaf


def own_object(value: Any, operation: str) -> Any:
    """Return the object to assign on a replica: a copy of another variable's value, or the object itself."""
    return copied(value.read_value(), operation) if isinstance(value, VariableRecord) else value


# --- called on each replica ---


def copy_on_replica(variable: VariableRecord) -> ReplicaCopy | None:
    """Return the copy of the current replica, as `_own_copy` does; None if no replica's function is running."""
    if current_replica() is None:
        check_thread("a variable")
        return None
    return _own_copy(variable)


def _own_copy(variable: VariableRecord) -> ReplicaCopy:
    """Return the copy of the current replica.

    Raises
    ------
    ArgumentError
        The replica has no copy: the strategy is closed, the worker was restarted, or the replica belongs to another
        strategy.
    """
    replica: Any = current_replica()
    store = store_of(replica)
    if store is None:
        raise ArgumentError(f"{variable.name}: not on this worker; its strategy is closed, or the worker was restarted")
    if store.token != token_of(variable):
        raise ArgumentError(
            f"{variable.name}: used on a replica of another strategy; use a variable with the strategy in whose "
            "scope it was created"
        )
    return ReplicaCopy(variable, replica)


def make_on_replica(variable: VariableRecord, make: Callable[[], Any], dtype: str | None) -> FlatResult:
    """Call a function that creates the initial value of a variable."""
    copy = _own_copy(variable)
    replica = copy.replica
    value, layout = None, CopyLayout(None)
    if replica.replica_id_in_sync_group == 0:
        value = with_dtype(host_nest(make()), dtype)
        layout = CopyLayout.of(value)
    if replica.num_replicas_in_sync > 1:
        arrays = optree.tree_leaves(value) if layout.treespec is not None else []
        contribution = (layout, arrays) if replica.replica_id_in_sync_group == 0 else None
        layout, arrays = meet(replica, First(f"the initial value of {variable.name}"), contribution)
        if layout.treespec is not None:
            value = layout.packed(arrays)
        elif replica.replica_id_in_sync_group:
            value = make()
            layout = CopyLayout.of(value)
    set_layout(variable, layout)
    copy.write("put", [value] if layout.treespec is None else optree.tree_leaves(value))
    return FlatResult.listed([layout])


def _for_program(copy: ReplicaCopy) -> FlatResult:
    # On a cluster an object is sent later, when other calls may have changed it, so copy it.
    leaves = copy.host_leaves
    replica = copy.replica
    worker = replica.strategy.replicas[replica.replica_id_in_sync_group].worker
    if layout_of(copy.variable).treespec is None and worker is not None:
        # An object that cannot be copied cannot be sent either.
        with contextlib.suppress(ArgumentError):
            leaves = [copied(leaf, copy.variable.name) for leaf in leaves]
    return FlatResult.listed(leaves)


def read_on_replica(variable: VariableRecord) -> FlatResult:
    """Return the leaves of a replica's copy."""
    return _for_program(_own_copy(variable))


def value_on_replica(value: Any) -> FlatResult:
    """Return a replica's value of a `PerReplica`, which is that of its copy for a variable."""
    if isinstance(value, VariableRecord):
        value = layout_of(value).packed(read_on_replica(value).leaves)
    return FlatResult.listed([value])


def read_together(variables: Sequence[VariableRecord]) -> list[list[Any]]:
    """Return the leaves of a replica's copies; objects keep the parts that they share, as an optimizer does."""
    copies = [_own_copy(variable).host_leaves for variable in variables]
    objects = [number for number, variable in enumerate(variables) if layout_of(variable).treespec is None]
    # An object that cannot be copied cannot be sent either.
    with contextlib.suppress(ArgumentError):
        object_copies = copied([copies[number] for number in objects], "merge_call")
        for number, leaves in zip(objects, object_copies, strict=True):
            copies[number] = leaves
    return copies


def write_on_replica(variable: VariableRecord, method: str, leaves: list[Any]) -> FlatResult:
    """Change only a replica's copy, and return its leaves."""
    copy = _own_copy(variable)
    if layout_of(variable).treespec is not None:
        leaves = list(map(array_of_leaf, leaves))
        check(f"{variable.name}.{method}", layout_of(variable), leaves)
    elif method == "assign":
        # Copy, as the program or other replicas may have the same object.
        leaves = [copied(own_object(leaf, variable.name), f"{variable.name}.{method}") for leaf in leaves]
    copy.write(method, leaves)
    return _for_program(copy)


def align_on_replica(variable: VariableRecord) -> FlatResult:
    """Assign the first replica's value to all replicas."""
    copy = _own_copy(variable)
    replica = copy.replica
    if replica.num_replicas_in_sync > 1:
        is_first = replica.replica_id_in_sync_group == 0
        first_leaves = meet(replica, First(f"{variable.name}, aligned"), copy.host_leaves if is_first else None)
        if not is_first:
            copy.write("put", first_leaves)
    return FlatResult.listed([True])


def inherit_on_replica(variable: VariableRecord, values: Mapping[int, list[Any]]) -> FlatResult:
    """Take over the values that replicas had which have left, by their old numbers; the first replica does."""
    copy = _own_copy(variable)
    if copy.replica.replica_id_in_sync_group == 0:
        if variable.aggregation is VariableAggregation.SUM:
            for leaves in values.values():
                copy.write("assign_add", leaves)
        elif variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and 0 in values:
            copy.write("put", values[0])
    return FlatResult.listed([True])


def join_on_replica(variable: VariableRecord) -> FlatResult:
    """Give a replica that was added a value; all replicas call it.

    It is that of the first replica; for values that replicas have of their own (``ON_READ``) and that are summed, zero,
    and for those of which the mean is read, the mean of the others.
    """
    if is_mirrored(variable):
        return align_on_replica(variable)
    copy = _own_copy(variable)
    try:
        leaves = copy.host_leaves
    except ArgumentError:
        leaves = None
    collected = meet(copy.replica, Collect(f"{variable.name}, joined"), leaves)
    of_all = [values for values in collected if values is not None]
    if leaves is None and of_all:
        leaves = of_all[0]
        if variable.aggregation is VariableAggregation.SUM:
            leaves = [np.zeros_like(leaf) for leaf in leaves]
        elif variable.aggregation is VariableAggregation.MEAN:
            leaves = [np.mean(column, axis=0, dtype=column[0].dtype) for column in zip(*of_all, strict=True)]
        copy.write("put", leaves)
    return FlatResult.listed([True])


def undo_on_replica(call: int) -> FlatResult:
    """Restore the variables of a replica as they were before a call; return whether they are known."""
    replica: Any = current_replica()
    store = store_of(replica)
    return FlatResult.listed([store is None or store.undo(replica.replica_id_in_sync_group, call)])


def state_on_replica(variable: VariableRecord) -> FlatResult:
    """Return a replica's value in arrays that can be saved."""
    value = layout_of(variable).packed(_own_copy(variable).host_leaves)
    if layout_of(variable).treespec is None:
        value = value.state_dict() if isinstance(value, Stateful) else value
        try:
            value = as_numpy(value)
        except ArgumentError as error:
            raise ArgumentError(
                f"{variable.name}: {layout_of(variable).kind} cannot be saved; it needs a state_dict() of arrays and a "
                f"load_state_dict(): {error}"
            ) from None
    return FlatResult.listed([value])


def restore_on_replica(variable: VariableRecord, state: FlatResult) -> FlatResult:
    """Restore a replica's value from its saved state."""
    copy, layout = _own_copy(variable), layout_of(variable)
    # The replica may have no value, after its scheduler was lost.
    value = copy.host_leaves[0] if layout.treespec is None else layout.zeros
    (saved,) = state.leaves
    if isinstance(value, Stateful):
        (value,) = copy.mutable_leaves
        value.load_state_dict(like(value.state_dict(), saved, owner=value))
    else:
        copy.write("put", copy.checked("restore", like(value, saved)))
    return FlatResult.listed([True])


def checked_state(variable: VariableRecord, state: Any, num_replicas: int) -> Any:
    """Return the value in a state of `Variable.state_dict`.

    Raises
    ------
    ArgumentError
        The state is of another kind of variable, or of another number of replicas that each have their own value.
    """
    key = "replicas" if is_saved_per_replica(variable) else "value"
    if not isinstance(state, Mapping) or key not in state:
        raise ArgumentError(f"{variable.name}: the state has no {key!r}, so it belongs to another kind of variable")
    saved = state[key]
    if is_saved_per_replica(variable) and len(saved) != num_replicas:
        raise ArgumentError(
            f"{variable.name}: each replica has its own value; the state has {len(saved)}, and there are "
            f"{num_replicas} replicas"
        )
    return saved


def equal_part(value: Any, dtype: np.dtype[Any], number: int, num_replicas: int) -> Any:
    """Return a replica's part of a sum of all replicas' values; parts of whole numbers may differ by one."""
    if dtype.kind not in "iu":
        return value / num_replicas
    quotient, rest = value // num_replicas, value % num_replicas
    return quotient + (rest > number)


def state_among_replicas(variable: VariableRecord) -> dict[str, Any]:
    """Return the state of a variable, on a replica; all call it if values of replicas differ."""
    copy = _own_copy(variable)
    (state,) = state_on_replica(variable).leaves
    if is_saved_per_replica(variable):
        return {"replicas": meet(copy.replica, Collect(f"{variable.name}.state_dict"), state)}
    if is_on_read(variable) and variable.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
        state = copy.replica.all_reduce(ReduceOp(variable.aggregation.value), state)
    return {"value": state}


def restore_among_replicas(variable: VariableRecord, saved: Any) -> None:
    """Restore a replica's value from the value in a state of all replicas."""
    replica = _own_copy(variable).replica
    number, num_replicas = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    if is_saved_per_replica(variable):
        saved = saved[number]
    elif is_on_read(variable) and variable.aggregation is VariableAggregation.SUM:
        leaves = leaves_like(layout_of(variable), saved, f"{variable.name}.restore")
        saved = layout_of(variable).packed(
            [
                equal_part(np.asarray(leaf), spec.dtype, number, num_replicas)
                for leaf, spec in zip(leaves, layout_of(variable).specs, strict=True)
            ]
        )
    restore_on_replica(variable, FlatResult.listed([saved]))
