"""Reductions of the rows of an array with small rounding errors, in an order that does not depend on its strides.

NumPy adds pairwise along the contiguous axis, and row by row along any other, where the error grows with the number of
rows. Here rows are added `_ADDS` at a time, each in vectors that fit the first cache, then the results are added in the
same way, so that the error grows with the logarithm of the number of rows.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

# Functions that round and may be applied in any order.
_ROUNDING: Final = frozenset({np.add, np.logaddexp, np.logaddexp2})
# Rows that are added one after the other.
_ADDS: Final = 16
# The number of elements of the vectors that are added.
_WIDTH: Final = 2048
# Up to this many rows are left to NumPy: a smaller error would not be worth the time of more calls.
_FEW_ROWS: Final = 128


def reduce_rows(ufunc: np.ufunc, array: np.ndarray[Any, Any], axis: int | tuple[int, ...]) -> Any:
    """Reduce as ``ufunc.reduce(array, axis)`` does, with an error that does not grow with the number of rows.

    Parameters
    ----------
    ufunc
        A NumPy function of two arguments.
    array
        An array of any shape.
    axis
        An axis, or several.

    Returns
    -------
    ndarray or scalar
        The result, in NumPy's dtype. It equals NumPy's exactly if nothing is rounded.

    Notes
    -----
    The order depends only on the shape and on whether the array is in Fortran order, which pickling preserves. An array
    with gaps is reduced like its contiguous copy, which is what pickling sends.

    >>> reduce_rows(np.add, np.ones((1000, 2), np.float32), 0)
    array([1000., 1000.], dtype=float32)
    """
    if ufunc not in _ROUNDING or array.dtype.kind not in "fc" or not array.size:
        return ufunc.reduce(array, axis=axis)
    if array.dtype == np.float16:
        # NumPy does the same when it adds pairwise.
        return reduce_rows(ufunc, array.astype(np.float32), axis).astype(np.float16)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.ascontiguousarray(array)
    axes = axis if isinstance(axis, tuple) else (axis,)
    if math.prod([array.shape[number] for number in axes]) <= _FEW_ROWS:
        return ufunc.reduce(array, axis=axis)
    ndim = array.ndim
    if array.flags.c_contiguous:
        return _reduced(ufunc, array, sorted(number % ndim for number in axes))
    return _reduced(ufunc, array.T, sorted(ndim - 1 - number % ndim for number in axes)).T


def _reduced(ufunc: np.ufunc, array: np.ndarray[Any, Any], axes: list[int]) -> Any:
    # Merge neighbouring axes, and reduce the outermost first, as its result is small.
    while axes:
        first = last = axes.pop(0)
        while axes and axes[0] == last + 1:
            last = axes.pop(0)
        outer, inner = array.shape[:first], array.shape[last + 1 :]
        num_rows = math.prod(array.shape[first : last + 1])
        array = _rows(ufunc, array.reshape(math.prod(outer), num_rows, math.prod(inner))).reshape(outer + inner)
        axes = [number - (last + 1 - first) for number in axes]
    return array[()] if not array.ndim else array


def _rows(ufunc: np.ufunc, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Reduce the middle one of three axes of an array in C order.
    num_outer, num_rows, num_inner = array.shape
    if num_inner == 1 and ufunc is np.add:
        # The axis is contiguous: NumPy adds pairwise.
        return np.add.reduce(array, axis=1)  # type: ignore[no-any-return]
    while num_rows > _ADDS:
        width = max(1, min(_WIDTH // num_inner, num_rows // _ADDS))
        num_groups = num_rows // (_ADDS * width)
        num_whole = num_groups * _ADDS * width
        groups = array[:, :num_whole].reshape(num_outer, num_groups, _ADDS, width * num_inner)
        sums = ufunc.reduce(groups, axis=2).reshape(num_outer, num_groups * width, num_inner)
        array = sums if num_whole == num_rows else np.concatenate([sums, array[:, num_whole:]], axis=1)
        num_rows = array.shape[1]
    return ufunc.reduce(array, axis=1)  # type: ignore[no-any-return]
