"""Reductions of device arrays on their devices, with the dtypes of the reductions of NumPy arrays.

They only use functions of the array API standard from the arrays' namespace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from daskdist.devices import Device, dtype_of
from daskdist.errors import ArgumentError
from daskdist.strategy.reduce.reductions import (
    NAMED,
    Axis,
    Op,
    ReduceOp,
    Reduction,
    RowByRow,
    num_rows,
    rows_first,
    wide_dtype,
    without,
)

# Arrays with at least this many rows, and this many times as many rows as columns, are reduced in this many groups.
_TALL_ROWS: Final = 2**16
_TALL_RATIO: Final = 32
_NUM_GROUPS: Final = 1024


def reduction_on(device: Device, op: Op) -> Reduction:
    """Return the record of a reduction for the arrays of a device.

    Raises
    ------
    ArgumentError
        The operation is a NumPy function without a counterpart for these arrays.
    """
    if isinstance(op, Reduction):
        return op
    if isinstance(op, ReduceOp):
        return _named(device, op)  # type: ignore[arg-type]  # devices are values
    xp = device.namespace
    if isinstance(op, np.ufunc):
        function = getattr(xp, op.__name__, None)
        if function is None:
            raise ArgumentError(
                f"reduce: arrays of {device.kind} devices have no {op.__name__}; give a function of two of them, or "
                "return NumPy arrays"
            )
        return Reduction(_Elementwise(xp, op, function), _Promoted(xp, function))
    return Reduction(RowByRow(op, xp), op)


@functools.lru_cache(maxsize=256)
def _named(device: Any, op: ReduceOp) -> Reduction:
    # Cached, as every step uses the same record.
    xp, record = device.namespace, NAMED[op]
    match record.on_device:
        case "sum":
            return Reduction(_Total(device, xp.sum), _Promoted(xp, xp.add))
        case "prod":
            return Reduction(_Total(device, xp.prod), _Promoted(xp, xp.multiply))
        case "mean":
            # Totals are floating or complex numbers, which all namespaces promote alike.
            return Reduction(_SumAndCount(device), record.reduction.combine, _Mean(xp))
        case "min" | "max" as name:
            extreme = _Extreme(device, is_most=name == "max")
            return Reduction(extreme, _Promoted(xp, extreme.of_two))
        case None:
            return record.reduction


def combined_by_library(device: Device, op: Op, partials: Sequence[Any]) -> Any:
    """Combine partial results of several devices on the first by its library; return None if that cannot."""
    name = NAMED[op].on_device if isinstance(op, ReduceOp) else None
    if name is None:
        return None
    if name != "mean":
        return _by_library(device, name.upper(), partials)
    totals, counts, dtypes = zip(*partials, strict=True)
    total = _by_library(device, "SUM", totals) if len(set(dtypes)) == 1 else None
    return None if total is None else (total, sum(counts), dtypes[0])


def _by_library(device: Device, reduction: str, arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    if any(array.dtype != first.dtype or array.shape != first.shape for array in arrays):
        return None
    return device.combined(reduction, arrays)


def cast(xp: Any, array: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array of a namespace cast to a NumPy dtype; the same object if it has that dtype."""
    return array if dtype_of(array) == dtype else xp.astype(array, getattr(xp, dtype.name))


@dataclass(frozen=True)
class _Promoted:
    # A function of two arrays whose result has NumPy's dtype, as namespaces may promote differently.
    xp: Any
    function: Callable[[Any, Any], Any]

    def __call__(self, a: Any, b: Any) -> Any:
        dtype = np.result_type(dtype_of(a), dtype_of(b))
        return self.function(cast(self.xp, a, dtype), cast(self.xp, b, dtype))


@dataclass(frozen=True)
class _Total:
    device: Device
    function: Any

    def __call__(self, array: Any, axis: Axis) -> Any:
        device, dtype = self.device, dtype_of(array)
        wide = wide_dtype(dtype) if dtype.kind in "biu" else dtype
        if axis is None:
            return cast(device.namespace, array, wide)
        return _totalled(device, self.function, array, axis, wide)


def _totalled(device: Device, function: Any, array: Any, axis: Axis, wide: np.dtype[Any]) -> Any:
    # Avoids a copy of the whole array in the wider dtype.
    xp, dtype = device.namespace, dtype_of(array)
    if function == xp.sum and _is_tall(array, axis):
        total = device.sum_rows(array, wide)
        if total is not None:
            return total
    if dtype.kind == "b":
        array = xp.astype(array, xp.uint8)
    if dtype != wide:
        function = partial(function, dtype=getattr(xp, wide.name))
    return _along_rows(xp, function, array, axis)


def _along_rows(xp: Any, function: Callable[..., Any], array: Any, axis: Axis) -> Any:
    # Reduce tall and narrow arrays in groups of rows, then reduce the groups: CuPy uses one block of threads for a few
    # columns, which would take some 60 ms for 256 MB instead of 0.1.
    if not _is_tall(array, axis):
        return function(array, axis=axis)
    shape = array.shape
    group_rows = shape[0] // _NUM_GROUPS
    stop = group_rows * _NUM_GROUPS
    totals = function(xp.reshape(array[:stop, ...], (_NUM_GROUPS, group_rows, *shape[1:])), axis=1)
    if stop < shape[0]:
        totals = xp.concat([totals, xp.expand_dims(function(array[stop:, ...], axis=0), axis=0)])
    return function(totals, axis=0)


def _is_tall(array: Any, axis: Axis) -> bool:
    # CuPy arrays have flags, which the array API standard does not.
    shape, is_contiguous = array.shape, not hasattr(array, "flags") or bool(array.flags.c_contiguous)
    if axis not in (0, (0,)) or len(shape) < 2 or not is_contiguous:
        return False
    return bool(shape[0] >= _TALL_ROWS and shape[0] >= _TALL_RATIO * math.prod(shape[1:]) > 0)


@dataclass(frozen=True)
class _Extreme:
    device: Device
    is_most: bool

    def __call__(self, array: Any, axis: Axis) -> Any:
        xp, kind = self.device.namespace, dtype_of(array).kind
        if axis is None:
            return array
        if 0 in array.shape:
            # The rows are empty; not all namespaces can reduce those.
            return self.device.empty(without(array.shape, axis), dtype_of(array))
        if kind == "b":
            return (xp.any if self.is_most else xp.all)(array, axis=axis)
        if kind == "c":
            return _by_halves(xp, self._of_complex, array, axis)
        return _along_rows(xp, xp.max if self.is_most else xp.min, array, axis)

    def of_two(self, a: Any, b: Any) -> Any:
        # Both have the same dtype.
        xp, kind = self.device.namespace, dtype_of(a).kind
        if kind == "b":
            return (xp.logical_or if self.is_most else xp.logical_and)(a, b)
        if kind == "c":
            return self._of_complex(a, b)
        return (xp.maximum if self.is_most else xp.minimum)(a, b)

    def _of_complex(self, a: Any, b: Any) -> Any:
        # NumPy's order, which the standard does not define: by the real part, then the imaginary part.
        xp = self.device.namespace
        (low, high) = (b, a) if self.is_most else (a, b)
        real, other = xp.real(low), xp.real(high)
        is_less = (real < other) | ((real == other) & (xp.imag(low) <= xp.imag(high)))
        return xp.where(xp.isnan(a) | (is_less & ~xp.isnan(b)), a, b)


@dataclass(frozen=True)
class _SumAndCount:
    device: Device

    def __call__(self, array: Any, axis: Axis) -> tuple[Any, int, Any]:
        xp, dtype = self.device.namespace, dtype_of(array)
        wide = np.dtype(np.float32) if dtype == np.float16 else dtype
        result = dtype if dtype.kind in "fc" else np.dtype(np.float64)
        if dtype.kind in "biu":
            # The total of any number of small integers fits 64 bits.
            wide = wide_dtype(dtype) if axis is not None and dtype.itemsize < 8 else result
        if axis is None:
            return cast(xp, array, wide), 1, result
        total = _totalled(self.device, xp.sum, array, axis, wide)
        if dtype.kind in "biu":
            total = cast(xp, total, result)
        return total, num_rows(array.shape, axis), result


@dataclass(frozen=True)
class _Mean:
    xp: Any

    def __call__(self, partial: tuple[Any, int, Any]) -> Any:
        total, count, dtype = partial
        if dtype.kind == "c":
            # NumPy divides complex numbers in this precision.
            total = cast(self.xp, total, np.dtype(np.complex128))
        return cast(self.xp, total / float(count), dtype)


@dataclass(frozen=True)
class _Elementwise:
    # The namespace's counterpart of a NumPy function of two arguments.
    xp: Any
    ufunc: np.ufunc
    function: Callable[[Any, Any], Any]

    def __call__(self, array: Any, axis: Axis) -> Any:
        xp = self.xp
        identity = self.ufunc.identity
        if axis is not None or identity is not None:
            # The result has NumPy's dtype, for example bool for `logical_and` of numbers.
            array = cast(xp, array, self.ufunc.reduce(np.ones((1, 1), dtype_of(array)), axis=0).dtype)
        if identity is not None and (axis is None or num_rows(array.shape, axis) == 1):
            # NumPy also applies the function to a single value: `hypot` returns its absolute value.
            first = np.asarray(identity).astype(dtype_of(array)).item()
            array = self.function(xp.full_like(array, first), array)
        return array if axis is None else _by_halves(xp, self.function, array, axis)


def _by_halves(xp: Any, function: Callable[[Any, Any], Any], array: Any, axis: int | tuple[int, ...]) -> Any:
    # Combine all rows in pairs at once, then the results in pairs, and so on.
    rows = rows_first(xp, array, axis)
    while (number := rows.shape[0]) > 1:
        even = number - number % 2
        pairs = function(rows[0:even:2, ...], rows[1:even:2, ...])
        rows = pairs if even == number else xp.concat([pairs, rows[even:number, ...]])
    return rows[0, ...]
