"""Reductions of the rows of an array that round little, and in the same order however the array lies.

NumPy adds pairwise along the axis that memory runs along, and row by row along any other: there the error grows with
the number of rows. Here rows are added up `_ADDS` at a time, each in vectors that fit the first cache, then what came
of that in the same way, so that it grows with the logarithm of their number.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

# Functions that round, and may be applied in any order.
_ROUNDING: Final = frozenset({np.add, np.logaddexp, np.logaddexp2})
# Rows added up one after the other.
_ADDS: Final = 16
# Elements of the vectors that are added.
_WIDTH: Final = 2048
# So few rows are left to NumPy: what more could be lost is less than what the calls take.
_FEW_ROWS: Final = 128


def reduce_rows(ufunc: np.ufunc, array: np.ndarray[Any, Any], axis: int | tuple[int, ...]) -> Any:
    """Reduce as ``ufunc.reduce(array, axis)`` does, with an error that does not grow with the number of rows.

    Parameters
    ----------
    ufunc
        Of two arguments.
    array
        Of any shape.
    axis
        An axis, or several.

    Returns
    -------
    ndarray or scalar
        Of the dtype that NumPy's has. The bits are those of NumPy where nothing is rounded.

    Notes
    -----
    The order depends on the shape alone, and on whether the array is of Fortran's order, which it keeps when it is sent
    to another process. An array with gaps in it does not, and is reduced as the copy without that would come there.

    >>> reduce_rows(np.add, np.ones((1000, 2), np.float32), 0)
    array([1000., 1000.], dtype=float32)
    """
    if ufunc not in _ROUNDING or array.dtype.kind not in "fc" or not array.size:
        return ufunc.reduce(array, axis=axis)
    if array.dtype == np.float16:
        # NumPy does the same where it adds pairwise.
        return reduce_rows(ufunc, array.astype(np.float32), axis).astype(np.float16)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.ascontiguousarray(array)
    axes = axis if isinstance(axis, tuple) else (axis,)
    if math.prod([array.shape[each] for each in axes]) <= _FEW_ROWS:
        return ufunc.reduce(array, axis=axis)
    ndim = array.ndim
    if array.flags.c_contiguous:
        return _reduced(ufunc, array, sorted(each % ndim for each in axes))
    return _reduced(ufunc, array.T, sorted(ndim - 1 - each % ndim for each in axes)).T


def _reduced(ufunc: np.ufunc, array: np.ndarray[Any, Any], axes: list[int]) -> Any:
    # Neighbouring axes are one, and the outermost goes first: what is left after it is small.
    while axes:
        first = last = axes.pop(0)
        while axes and axes[0] == last + 1:
            last = axes.pop(0)
        outer, inner = array.shape[:first], array.shape[last + 1 :]
        num_rows = math.prod(array.shape[first : last + 1])
        array = _rows(ufunc, array.reshape(math.prod(outer), num_rows, math.prod(inner))).reshape(outer + inner)
        axes = [each - (last + 1 - first) for each in axes]
    return array[()] if not array.ndim else array


def _rows(ufunc: np.ufunc, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Along the middle one of three axes, in order of C.
    num_outer, num_rows, num_inner = array.shape
    if num_inner == 1 and ufunc is np.add:
        # Memory runs along it: NumPy adds pairwise.
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
