"""A replica's copy of a variable: what it may be, and what is done with it where the replica is."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import optree

from daskdist.checkpoint.nests import as_numpy, like
from daskdist.core.spec import TensorSpec
from daskdist.devices import Device, adopted, dtype_of, is_on_device, named
from daskdist.errors import ArgumentError
from daskdist.execute.messages.by_reference import VariableKey
from daskdist.strategy.collectives.operations import First
from daskdist.strategy.reduce.device_reduction import cast
from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.values.device_arrays import host_array, host_nest, moved
from daskdist.strategy.values.extract import FlatResult
from daskdist.strategy.variables.aggregation import VariableSynchronization
from daskdist.strategy.variables.objects import copied, parts_of

if TYPE_CHECKING:
    from daskdist.strategy.variables.variable import Variable

NUMBERS: Final = (bool, int, float, complex)
_CHANGES: Final = {"assign_add": operator.add, "assign_sub": operator.sub}


@dataclass(frozen=True)
class CopyLayout:
    """What a variable's value is, but for its numbers.

    Parameters
    ----------
    treespec
        The structure of the arrays; None where the value is an object of any kind.
    specs
        Of each array its shape and dtype; of an object too, if it is a nest of arrays of a framework.
    kind
        What messages call an object.
    """

    treespec: Any
    specs: tuple[TensorSpec, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, value: Any) -> CopyLayout:
        """The layout of a value."""
        leaves, treespec = optree.tree_flatten(value, none_is_leaf=True)
        if not leaves or not all(map(is_array, leaves)):
            specs = [_spec_of_framework(leaf) for leaf in leaves]
            return cls(None, tuple(spec for spec in specs if spec) if all(specs) else (), type(value).__name__)
        return cls(treespec, tuple([TensorSpec.of(np.asarray(leaf)) for leaf in leaves]))

    @property
    def num_leaves(self) -> int:
        """The number of arrays, or one of an object."""
        return len(self.specs) if self.treespec is not None else 1

    def packed(self, leaves: Sequence[Any]) -> Any:
        """The value that leaves are of."""
        return leaves[0] if self.treespec is None else optree.tree_unflatten(self.treespec, leaves)


def _spec_of_framework(leaf: Any) -> TensorSpec | None:
    if is_array(leaf):
        return TensorSpec.of(np.asarray(leaf))
    if not hasattr(leaf, "__dlpack__"):
        return None
    try:
        return TensorSpec(tuple(leaf.shape), dtype_of(leaf))
    except TypeError:
        # Of a dtype that NumPy has not; this one has its values.
        return TensorSpec(tuple(leaf.shape), np.dtype(np.float32))


def frozen(leaf: Any) -> Any:
    """A leaf that is a variable's own: if it is an array nobody is to change it."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        leaf = np.asarray(leaf)
        leaf.flags.writeable = False
    return leaf


def is_array(leaf: Any) -> bool:
    """Whether a leaf is numbers."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufc"
    return isinstance(leaf, NUMBERS)


def of_numbers(value: Any) -> Any:
    """Lists of Python numbers as an array; what else there is as it is."""
    if not isinstance(value, (list, tuple)) or not all(type(leaf) in NUMBERS for leaf in optree.tree_leaves(value)):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        # Rows of different lengths are a nest.
        return value
    return array if array.dtype.kind in "biufc" else value


def with_dtype(value: Any, dtype: Any) -> Any:
    """A nest with its arrays of a dtype; as it is if that is None."""
    if dtype is None:
        return value
    return optree.tree_map(lambda leaf: np.asarray(leaf, dtype) if is_array(leaf) else leaf, value, none_is_leaf=True)


def leaves_like(layout: CopyLayout, value: Any, what: str) -> list[Any]:
    """The leaves of a value that is of the structure of a layout.

    Raises
    ------
    ArgumentError
        It is of another.
    """
    if layout.treespec.is_leaf():
        return [of_numbers(value)]
    try:
        leaves: list[Any] = layout.treespec.flatten_up_to(value)
    except ValueError as error:
        raise ArgumentError(f"{what}: the value is of another structure than the variable's: {error}") from None
    return leaves


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Leaves with what can be made an array here made one: other variables, arrays of frameworks.

    Arrays of devices stay there.
    """
    return list(map(_as_array, leaves))


def _as_array(leaf: Any) -> Any:
    if is_array(leaf):
        return leaf
    if hasattr(leaf, "read_value"):
        # Another variable; on a device it has arrays of that.
        leaf = leaf.read_value()
    leaf = adopted(leaf)
    if is_array(leaf) or is_on_device(leaf):
        return leaf
    if not hasattr(leaf, "__array__"):
        return leaf
    try:
        return as_numpy(leaf, copied=False)
    except ArgumentError:
        # Whoever wants an array refuses it.
        return leaf


def check(what: str, layout: CopyLayout, leaves: Sequence[Any]) -> None:
    """Refuse leaves that are not of the shapes of a variable, or not of dtypes that go into its own.

    Raises
    ------
    ArgumentError
        They are not.
    """
    for leaf, spec in zip(leaves, layout.specs, strict=True):
        is_there = is_on_device(leaf)
        if not is_there and not is_array(leaf):
            raise ArgumentError(f"{what}: the value is {type(leaf).__name__}; give an array or a number")
        given = TensorSpec(tuple(leaf.shape), dtype_of(leaf)) if is_there else np.asarray(leaf)
        if given.shape != spec.shape:
            raise ArgumentError(f"{what}: the value has shape {given.shape}; the variable has {spec.shape}")
        if type(leaf) is int and spec.dtype.kind in "iu":
            # A Python number has no dtype, and goes wherever it fits into.
            info = np.iinfo(spec.dtype)
            if not info.min <= leaf <= info.max:
                raise ArgumentError(f"{what}: {leaf} does not fit into the variable's {spec.dtype}")
        elif not np.can_cast(given.dtype, spec.dtype, "same_kind"):
            raise ArgumentError(
                f"{what}: the value has dtype {given.dtype}, which does not go into the variable's {spec.dtype}; cast "
                "it first"
            )


class ReplicaCopy:
    """A replica's copy of a variable, on that replica.

    Parameters
    ----------
    variable
        The variable.
    replica
        The replica, whose function this is in.
    """

    def __init__(self, variable: Variable, replica: ReplicaContext) -> None:
        self.variable = variable
        self.replica = replica
        self.device: Device = named(replica._device)
        self._store: Any = replica._store()

    @property
    def is_own(self) -> bool:
        """Whether it need not be what other replicas have."""
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
        if self.variable._layout.treespec is None:
            self._store.lend(self.variable, self.replica.replica_id_in_sync_group)
        return self.leaves

    @property
    def is_shared(self) -> bool:
        """Whether another replica of this process has the very same object, or something in it."""
        (own,) = self.leaves
        others = self._store.others(self.variable, self.replica.replica_id_in_sync_group)
        return any(parts_of(own) & parts_of(each) for (each,) in others)

    @property
    def host_leaves(self) -> list[Any]:
        """Its arrays as they leave the device, or the object."""
        leaves = self.leaves
        return leaves if self.variable._layout.treespec is None else list(map(host_array, leaves))

    def checked(self, how: str, value: Any) -> list[Any]:
        """The leaves of a value as arrays of the host or of a device, or the object, if the variable can have it."""
        layout = self.variable._layout
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
        if variable._layout.treespec is None:
            self._check_change(how)
            found = list(leaves) if how not in _CHANGES else self._changed(how, *self.leaves, *leaves)
        else:
            specs = variable._layout.specs
            found = [self._own(leaf, spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)]
            change = _CHANGES.get(how)
            if change is not None:
                found = list(map(change, self.leaves, found))
            found = list(map(frozen, found))
        place = variable, self.replica.replica_id_in_sync_group
        self._store.put(*place, found)
        if variable._layout.treespec is None and self.is_shared:
            # Replicas of this process were given the very same.
            self._store.put(*place, [copied(found[0], variable.name)])

    def _check_change(self, how: str) -> None:
        layout = self.variable._layout
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
    """An object that is to be a replica's; of another variable the value, which stays that one's too."""
    return copied(value.read_value(), what) if isinstance(getattr(value, "_key", None), VariableKey) else value


# --- called on each replica ---


def _own(variable: Variable) -> ReplicaCopy:
    copy = variable._copy()
    if copy is None:
        raise RuntimeError(f"{variable.name}: not on a replica")
    return copy


def _listed(leaves: list[Any]) -> FlatResult:
    # Also where a leaf is an object that is a nest of some kind.
    return FlatResult(leaves, list_spec(len(leaves)))


def make_there(variable: Variable, make: Callable[[], Any], dtype: str | None) -> FlatResult:
    """Have a function make what a variable is to begin with."""
    copy = _own(variable)
    replica = copy.replica
    value, layout = None, CopyLayout(None)
    if replica.replica_id_in_sync_group == 0:
        value = with_dtype(host_nest(make()), dtype)
        layout = CopyLayout.of(value)
    if replica.num_replicas_in_sync > 1:
        arrays = optree.tree_leaves(value) if layout.treespec is not None else []
        given = (layout, arrays) if replica.replica_id_in_sync_group == 0 else None
        layout, arrays = replica._meet(First(f"{variable.name} at its beginning"), given)
        if layout.treespec is not None:
            value = layout.packed(arrays)
        elif replica.replica_id_in_sync_group:
            value = make()
            layout = CopyLayout.of(value)
    variable._layout = layout
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
    if copy.variable._layout.treespec is None and worker is not None:
        # One that cannot be copied does not leave the worker either.
        with contextlib.suppress(ArgumentError):
            leaves = [copied(leaf, copy.variable.name) for leaf in leaves]
    return _listed(leaves)


def read_there(variable: Variable, is_asked: bool = True) -> FlatResult:
    """The leaves of a replica's copy; None for each where it is not asked for."""
    return _for_program(_own(variable)) if is_asked else _listed([None] * variable._layout.num_leaves)


def read_together(variables: Sequence[Variable]) -> list[list[Any]]:
    """The leaves of a replica's copies; what objects have in common, such as a model and its optimizer, they keep."""
    found = [_own(each).host_leaves for each in variables]
    objects = [number for number, each in enumerate(variables) if each._layout.treespec is None]
    # What cannot be copied does not leave the worker either.
    with contextlib.suppress(ArgumentError):
        others = copied([found[number] for number in objects], "merge_call")
        for number, leaves in zip(objects, others, strict=True):
            found[number] = leaves
    return found


def write_there(variable: Variable, how: str, leaves: list[Any]) -> FlatResult:
    """Change a replica's copy alone, and give its leaves."""
    copy = _own(variable)
    if variable._layout.treespec is not None:
        leaves = as_arrays(leaves)
        check(f"{variable.name}.{how}", variable._layout, leaves)
    elif how == "assign":
        # The program's own, or what other replicas are given too.
        leaves = [copied(own_object(leaf, variable.name), f"{variable.name}.{how}") for leaf in leaves]
    copy.write(how, leaves)
    return _for_program(copy)


def align_there(variable: Variable) -> FlatResult:
    """Have all replicas have what the first one has."""
    copy = _own(variable)
    replica = copy.replica
    if replica.num_replicas_in_sync > 1:
        is_first = replica.replica_id_in_sync_group == 0
        found = replica._meet(First(f"{variable.name}, aligned"), copy.host_leaves if is_first else None)
        if not is_first:
            copy.write("put", found)
    return _listed([True])


def state_there(variable: Variable) -> FlatResult:
    """What a replica has, in arrays that can be saved."""
    value = variable._layout.packed(_own(variable).host_leaves)
    if variable._layout.treespec is None:
        value = value.state_dict() if hasattr(value, "state_dict") else value
        try:
            value = as_numpy(value)
        except ArgumentError as error:
            raise ArgumentError(
                f"{variable.name}: {variable._layout.kind} cannot be saved; it needs a state_dict() of arrays and a "
                f"load_state_dict(): {error}"
            ) from None
    return FlatResult([value], list_spec(1))


def restore_there(variable: Variable, state: FlatResult) -> FlatResult:
    """Give a replica what was saved."""
    copy = _own(variable)
    value = variable._layout.packed(copy.host_leaves)
    (saved,) = state.leaves
    if hasattr(value, "load_state_dict"):
        value = variable._layout.packed(copy.lent)
        value.load_state_dict(like(value.state_dict(), saved, owner=value))
        return FlatResult([True], list_spec(1))
    restored = like(value, saved)
    if variable._layout.treespec is None:
        copy.write("put", [restored])
    else:
        copy.write("put", copy.checked("restore", restored))
    return FlatResult([True], list_spec(1))
