"""Conversion of nests to arrays of other frameworks: the checks and errors that all frameworks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import optree

from daskdist.core.cardinality import INFINITE
from daskdist.core.ragged import Ragged
from daskdist.core.spec import DatasetSpec, PerReplicaSpec, RaggedTensorSpec
from daskdist.core.structure import Nested, as_array
from daskdist.core.to_numpy import native
from daskdist.devices import Device, device_of
from daskdist.errors import ArgumentError, MissingPackageError, UnknownLengthError
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import results_of

# The dtypes of the package ml_dtypes, which NumPy does not class as numbers.
OF_ML_DTYPES: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"})

_RAGGED: Final = (
    "has rows of different lengths: use padded_batch, map it to x.padded(length), or take its values and row_splits "
    "apart"
)
_DATASET: Final = "is a dataset: iterate over it, or batch its elements by flat_map"
# The errors that libraries raise when one does not share an array with another.
_NOT_SHARED: Final = (BufferError, RuntimeError, TypeError, ValueError)
# The device type of host memory in DLPack.
_OF_THE_HOST: Final = 1


class ConversionError(Exception):
    """A leaf that cannot be converted; the message says why."""


def converted(operation: str, nest: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert each leaf of a nest; asynchronous values are awaited together.

    Parameters
    ----------
    operation
        The name of the function or framework in error messages.
    nest
        Tuples, named tuples, lists and dicts are structure; a `PerReplica` becomes one of converted values, and None
        stays.
    convert
        Returns the new leaf, or raises `ConversionError`.

    Raises
    ------
    ArgumentError
        A leaf cannot be converted; the message has its path.
    """
    return _converted(operation, nest, convert, "")


def _converted(operation: str, nest: Any, convert: Callable[[Any], Any], where: str) -> Any:
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
    groups = [leaf.values if isinstance(leaf, PerReplica) else (leaf,) for leaf in leaves]
    values = [value for group in groups for value in group]
    if any(isinstance(value, AsyncValue) for value in values):
        values = results_of(values)
    remaining = iter(values)
    converted_leaves: list[Any] = []
    for number, (leaf, group) in enumerate(zip(leaves, groups, strict=True)):
        parts = []
        for replica in range(len(group)):
            value = next(remaining)
            try:
                if type(value) is np.ndarray or optree.tree_is_leaf(value, none_is_leaf=True):
                    parts.append(None if value is None else convert(value))
                    continue
            except ConversionError as reason:
                path = where + treespec.accessors()[number].codify("")
                on = f" of replica {replica}" if isinstance(leaf, PerReplica) else ""
                raise ArgumentError(f"{operation}: leaf {path or '(the value)'}{on} {reason}") from None
            # The result of a function may itself be a nest.
            path = where + treespec.accessors()[number].codify("")
            parts.append(_converted(operation, value, convert, path))
        converted_leaves.append(PerReplica(parts) if isinstance(leaf, PerReplica) else parts[0])
    return optree.tree_unflatten(treespec, converted_leaves)


def as_numbers(leaf: Any) -> np.ndarray[Any, Any]:
    """Return a leaf as a NumPy array of numbers in native byte order, without a copy where it is one already.

    Raises
    ------
    ConversionError
        The leaf is not an array of numbers.
    """
    if type(leaf) is not np.ndarray:
        leaf = _as_array(leaf)
    if reason := reason_against(leaf.dtype):
        raise ConversionError(reason)
    array: np.ndarray[Any, Any] = native(leaf)
    return array


def _as_array(leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, Ragged):
        raise ConversionError(_RAGGED)
    if isinstance(leaf, Nested):
        raise ConversionError(_DATASET)
    if isinstance(leaf, np.ma.MaskedArray):
        raise ConversionError("is a masked array: map it to x.filled(value)")
    if not isinstance(leaf, (np.generic, bool, int, float, complex, str, bytes)) and not hasattr(leaf, "__array__"):
        raise ConversionError(f"is of type {type(leaf).__name__}, which is neither an array nor a number")
    try:
        return np.asarray(as_array(leaf, narrow=True))
    except ArgumentError as error:
        raise ConversionError(f"cannot be converted: {error}") from None


def handed_over(leaf: Any, framework: str, take: Callable[[Any], Any]) -> Any:
    """Convert an array of another library to a framework's by DLPack, without copying it to the host.

    Parameters
    ----------
    leaf
        The array.
    framework
        The name of the function or framework in error messages.
    take
        The framework's ``from_dlpack``. If it does not accept the memory layout of the array, it gets a contiguous copy
        on the array's device.

    Raises
    ------
    ConversionError
        The framework does not accept the array.
    """
    device = device_of(leaf)
    with contextlib.nullcontext() if device is None else device.using():
        if device is not None and _has_other_strides(leaf):
            leaf = _in_one_piece(leaf, device)
        try:
            return take(leaf)
        except _NOT_SHARED as error:
            with contextlib.suppress(*_NOT_SHARED):
                return take(_in_one_piece(leaf, device))
            raise ConversionError(
                f"is of type {type(leaf).__name__}, which {framework} does not accept: {error}"
            ) from None


def _has_other_strides(array: Any) -> bool:
    # Negative strides, which end the whole process in PyTorch, or strides that are not multiples of the item size.
    if not hasattr(array, "strides") and array.__dlpack_device__()[0] == _OF_THE_HOST:
        array = np.from_dlpack(array)
    return any(stride < 0 or stride % array.itemsize for stride in getattr(array, "strides", ()))


def _in_one_piece(array: Any, device: Device | None) -> Any:
    if device is not None:
        return device.namespace.asarray(array, copy=True)
    # PyTorch's method.
    return array.contiguous() if hasattr(array, "contiguous") else array


def extremes(array: Any) -> tuple[int, int]:
    """Return the minimum and maximum of an array of integers; only these two numbers are copied from a device."""
    device = device_of(array)
    if device is not None:
        with device.using():
            return int(device.namespace.min(array)), int(device.namespace.max(array))
    if not isinstance(array, np.ndarray) and array.__dlpack_device__()[0] == _OF_THE_HOST:
        # PyTorch does not compare unsigned integers.
        array = np.from_dlpack(array)
    return int(array.min()), int(array.max())


def reason_against(dtype: np.dtype[Any]) -> str:
    """Return why other frameworks do not have a dtype; ``""`` if one has it."""
    if dtype.kind in "biufc":
        if dtype.char in "gG":
            return f"is {dtype}: map it to x.astype({'complex128' if dtype.kind == 'c' else 'float64'!r})"
        return ""
    if dtype.name in OF_ML_DTYPES:
        return ""
    if dtype.kind in "TUS":
        return f"is text ({dtype}): map it to numbers first, such as its places in a list of words"
    if dtype.kind == "O":
        return "has Python objects, as bytes are: map it to numbers first, such as np.frombuffer(x, np.uint8)"
    if dtype.kind in "mM":
        return f"is {dtype}: map it to numbers first, such as x.astype('int64')"
    return f"is of dtype {dtype}: map it to numbers first"


def check_spec(operation: str, element_spec: Any, *, needs_rows: bool = False) -> None:
    """Check that elements of a spec can be converted.

    Parameters
    ----------
    operation
        The name of the function or framework in error messages.
    element_spec
        The specs of the leaves, in the structure of an element.
    needs_rows
        Whether a leaf must have an axis of rows.

    Raises
    ------
    ArgumentError
        A leaf cannot be converted; the message has its path.
    """
    specs, treespec = optree.tree_flatten(element_spec, none_is_leaf=True)
    for spec, accessor in zip(specs, treespec.accessors(), strict=True):
        replica_spec = spec.specs[0] if isinstance(spec, PerReplicaSpec) else spec
        if isinstance(replica_spec, RaggedTensorSpec):
            reason = _RAGGED
        elif isinstance(replica_spec, DatasetSpec):
            reason = _DATASET
        else:
            reason = reason_against(replica_spec.dtype)
            if not reason and needs_rows and not replica_spec.shape:
                reason = "is a scalar: batch the dataset"
        if reason:
            raise ArgumentError(f"{operation}: leaf {accessor.codify('') or '(the element)'} {reason}")


def checked_source(operation: str, dataset: Any) -> Any:
    """Return an argument after checking that it is a dataset, distributed or not.

    Raises
    ------
    ArgumentError
        The argument is not a dataset.
    """
    if all(hasattr(type(dataset), name) for name in ("__iter__", "cardinality", "element_spec")):
        return dataset
    raise ArgumentError(f"{operation}: give a Dataset or a DistributedDataset, not {type(dataset).__name__}")


def length_of(dataset: Any) -> int:
    """Return the number of elements or steps.

    Raises
    ------
    UnknownLengthError
        The number is infinite or unknown.
    """
    number = int(dataset.cardinality())
    if number < 0:
        words = "endless" if number == INFINITE else "not known before they are read"
        raise UnknownLengthError(
            f"the number of batches is {words}; if you know it, state it with assert_cardinality or take"
        )
    return number


def needs(operation: str, framework: str, extra: str, error: ImportError) -> MissingPackageError:
    """Return the error that says which package to install."""
    return MissingPackageError(f"{operation} needs {framework}: pip install 'daskdist[{extra}]' ({error})")
