"""`CopyLayout`: the structure, shapes and dtypes of a variable's value, and the conversion of values to its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import optree

from daskdist.checkpoint.nests import as_numpy
from daskdist.core.spec import TensorSpec
from daskdist.core.structure import narrow_array
from daskdist.devices import adopted, dtype_of, is_on_device
from daskdist.errors import ArgumentError
from daskdist.strategy.values.variable_contract import VariableContract

NUMBERS: Final = (bool, int, float, complex)


@dataclass(frozen=True)
class CopyLayout:
    """The structure, shapes and dtypes of a variable's value.

    Parameters
    ----------
    treespec
        The structure of the arrays; None if the value is an object of any other kind.
    specs
        The shape and dtype of each array; also for an object that is a nest of a framework's arrays.
    kind
        The name of an object's type in messages.
    """

    treespec: Any
    specs: tuple[TensorSpec, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, value: Any) -> CopyLayout:
        """Return the layout of a value."""
        leaves, treespec = optree.tree_flatten(value, none_is_leaf=True)
        if not leaves or not all(map(is_array, leaves)):
            specs = [_spec_of_framework(leaf) for leaf in leaves]
            return cls(None, tuple(spec for spec in specs if spec) if all(specs) else (), type(value).__name__)
        return cls(treespec, tuple([TensorSpec.of(np.asarray(leaf)) for leaf in leaves]))

    @property
    def num_leaves(self) -> int:
        """The number of arrays; 1 for an object."""
        return len(self.specs) if self.treespec is not None else 1

    @property
    def zeros(self) -> Any:
        """A value of arrays of zeros."""
        return self.packed([np.zeros(spec.shape, spec.dtype) for spec in self.specs])

    def packed(self, leaves: Sequence[Any]) -> Any:
        """Return the value with the given leaves."""
        return leaves[0] if self.treespec is None else optree.tree_unflatten(self.treespec, leaves)


def _spec_of_framework(leaf: Any) -> TensorSpec | None:
    if is_array(leaf):
        return TensorSpec.of(np.asarray(leaf))
    if not hasattr(leaf, "__dlpack__"):
        return None
    try:
        return TensorSpec(tuple(leaf.shape), dtype_of(leaf))
    except TypeError:
        # NumPy lacks the dtype; float32 represents all its values.
        return TensorSpec(tuple(leaf.shape), np.dtype(np.float32))


def frozen(leaf: Any) -> Any:
    """Return a leaf of a variable, made read-only if it is an array."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        leaf = np.asarray(leaf)
        leaf.flags.writeable = False
    return leaf


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a number or an array of numbers."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufc"
    return isinstance(leaf, NUMBERS)


def of_numbers(value: Any, *, narrow: bool = False) -> Any:
    """Return a list of Python numbers as an array, and any other value unchanged; ``narrow`` as in `as_array`."""
    if not isinstance(value, (list, tuple)) or not all(type(leaf) in NUMBERS for leaf in optree.tree_leaves(value)):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        # Rows of different lengths are a nest.
        return value
    if array.dtype.kind not in "biufc":
        return value
    return narrow_array(value) if narrow else array


def with_dtype(value: Any, dtype: Any) -> Any:
    """Return a nest with its arrays cast to a dtype; if that is None, with Python numbers as int32 and float32."""
    leaves = optree.tree_leaves(value, none_is_leaf=True)
    if dtype is None and not (all(map(is_array, leaves)) and any(type(leaf) in (int, float) for leaf in leaves)):
        return value
    cast = narrow_array if dtype is None else partial(np.asarray, dtype=dtype)
    return optree.tree_map(lambda leaf: cast(leaf) if is_array(leaf) else leaf, value, none_is_leaf=True)


def leaves_like(layout: CopyLayout, value: Any, operation: str) -> list[Any]:
    """Return the leaves of a value, which must have the structure of a layout.

    Raises
    ------
    ArgumentError
        The value has another structure.
    """
    if layout.treespec.is_leaf():
        return [of_numbers(value)]
    try:
        leaves: list[Any] = layout.treespec.flatten_up_to(value)
    except ValueError as error:
        raise ArgumentError(f"{operation}: the value and the variable have different structures: {error}") from None
    return leaves


def array_of_leaf(leaf: Any) -> Any:
    """Convert a leaf to an array if possible in this process: another variable, or an array of a framework.

    A device array stays on its device.
    """
    if is_array(leaf):
        return leaf
    if isinstance(leaf, VariableContract):
        # Another variable, whose value may be device arrays.
        leaf = leaf.read_value()
    leaf = adopted(leaf)
    if is_array(leaf) or is_on_device(leaf):
        return leaf
    if not hasattr(leaf, "__array__"):
        return leaf
    try:
        return as_numpy(leaf, copied=False)
    except ArgumentError:
        # Callers that need an array raise the error.
        return leaf


def check(operation: str, layout: CopyLayout, leaves: Sequence[Any]) -> None:
    """Raise an error if leaves have other shapes than a variable, or dtypes that cannot be cast to its own.

    Raises
    ------
    ArgumentError
        A leaf does not fit.
    """
    for leaf, spec in zip(leaves, layout.specs, strict=True):
        is_there = is_on_device(leaf)
        if not is_there and not is_array(leaf):
            raise ArgumentError(f"{operation}: the value is {type(leaf).__name__}; give an array or a number")
        value_spec = TensorSpec(tuple(leaf.shape), dtype_of(leaf)) if is_there else np.asarray(leaf)
        if value_spec.shape != spec.shape:
            raise ArgumentError(f"{operation}: the value has shape {value_spec.shape}; the variable has {spec.shape}")
        if type(leaf) is int and spec.dtype.kind in "iu":
            # A Python number has no dtype, so only its value must fit.
            info = np.iinfo(spec.dtype)
            if not info.min <= leaf <= info.max:
                raise ArgumentError(f"{operation}: {leaf} does not fit into the variable's {spec.dtype}")
        elif not is_there and not _fits(np.asarray(leaf), spec.dtype):
            raise ArgumentError(
                f"{operation}: a value of {value_spec.dtype} does not fit into the variable's {spec.dtype}; create the "
                f"variable with dtype=np.{value_spec.dtype}"
            )
        elif not np.can_cast(value_spec.dtype, spec.dtype, "same_kind"):
            raise ArgumentError(
                f"{operation}: the value has dtype {value_spec.dtype}, but the variable has {spec.dtype}; cast it first"
            )


def _fits(array: Any, dtype: np.dtype[Any]) -> bool:
    # Casting integers to fewer bits would change those that are too large.
    if not (array.size and array.dtype.kind in "iu" and dtype.kind in "iu") or np.can_cast(array.dtype, dtype):
        return True
    info = np.iinfo(dtype)
    return bool(info.min <= array.min() and array.max() <= info.max)
