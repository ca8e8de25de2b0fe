"""Conversion of single values to columns, with a fast path for plain values of one type, and stacking of leaves.

Results of functions that are called for each row are arrays, NumPy scalars, Python numbers and text. If all values of
a leaf have one of these types, one call makes an array of them. Anything else is converted value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np

from daskdist.core.array_pool import NUMBERS
from daskdist.core.ragged import Ragged, unchecked_ragged
from daskdist.core.structure import ONE_KIND, TEXT, Leaves, Nested, Structure
from daskdist.core.to_numpy import native
from daskdist.errors import StackError

_SCALARS: Final = frozenset(
    {np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
    | {np.float16, np.float32, np.float64, np.complex64, np.complex128}
)
# The types of leaves that the fast path accepts.
PLAIN: Final = _SCALARS | {np.ndarray, bool, float, int, str}
# Images with at most this many channels are copied pixel by pixel.
_MOST_CHANNELS: Final = 8
_INT32: Final = np.iinfo(np.int32)

_NUMBERS: Final = _SCALARS | {np.ndarray}
dtype_of: Final = attrgetter("dtype")
shape_of: Final = attrgetter("shape")


def plain_leaves_of(structure: Structure) -> Callable[[Any], Sequence[Any] | None]:
    """Return a function from a nest to its leaves.

    Parameters
    ----------
    structure
        The structure that the nests are expected to have.

    Returns
    -------
    callable
        Returns the leaves of a nest in the order of the structure, or None if the nest does not have the structure, has
        a leaf that is not plain, or needs the slow path.
    """
    treespec = structure.treespec
    if treespec.is_leaf():
        return lambda nest: (nest,) if type(nest) in PLAIN else None
    if not all(child.is_leaf() for child in treespec.children()):
        return lambda nest: None
    number = treespec.num_leaves
    if treespec.type is tuple:

        def of_tuple(nest: Any) -> Sequence[Any] | None:
            # A list at the top counts as a tuple.
            is_alike = (type(nest) is tuple or type(nest) is list) and len(nest) == number
            return nest if is_alike and PLAIN.issuperset(map(type, nest)) else None

        return of_tuple
    if treespec.type is dict:
        keys = treespec.entries()

        def of_dict(nest: Any) -> Sequence[Any] | None:
            if type(nest) is not dict or len(nest) != number:
                return None
            try:
                leaves = [nest[key] for key in keys]
            except KeyError:
                return None
            return leaves if PLAIN.issuperset(map(type, leaves)) else None

        return of_dict
    return lambda nest: None


def column_of(values: Sequence[Any], *, narrow: bool = False) -> Any:
    """Return plain values of one type as an array, shape ``(len(values), ...)``.

    Parameters
    ----------
    values
        One value for each row; at least one.
    narrow
        Whether Python numbers become 32 bits wide, as in `daskdist.core.structure.as_array`.

    Returns
    -------
    array, Ragged or None
        Arrays of numbers that differ in length along axis 0 become `Ragged`. None if the values are not plain, or
        differ in type, dtype or other lengths.
    """
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is np.ndarray:
        return _stacked(values)
    if kind in _SCALARS:
        return np.array(values, kind)
    if kind is float:
        array = np.array(values, np.float64)
        # A separate conversion warns about overflow.
        return array.astype(np.float32) if narrow else array
    if kind is int:
        return _integers(values, narrow)
    if kind is bool:
        return np.array(values, np.bool_)
    return np.array(values, TEXT) if kind is str else None


def _stacked(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    if len(set(map(dtype_of, arrays))) != 1:
        return None
    if first.ndim == 1 and first.dtype.kind in NUMBERS:
        try:
            values = np.concatenate(arrays)
        except ValueError:
            # The arrays differ in their number of axes.
            return None
        return _split(values, list(map(len, arrays)))
    all_shapes = list(map(shape_of, arrays))
    shapes = set(all_shapes)
    if len(shapes) != 1:
        # Include the number of the first axes, so that scalars differ from arrays.
        is_ragged = len({(len(shape[:1]), *shape[1:]) for shape in shapes}) == 1 and first.dtype.kind in NUMBERS
        if not is_ragged:
            return None
        return _split(np.concatenate(arrays), [shape[0] for shape in all_shapes])
    if not first.ndim or isinstance(first.dtype, np.dtypes.StringDType):
        return native(stacked(arrays))
    return native(_concatenated(arrays)).reshape(len(arrays), *first.shape)


def _concatenated(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    is_native_number = first.dtype.kind in NUMBERS and first.dtype.isnative
    if first.ndim < 3 or not 1 < first.shape[-1] <= _MOST_CHANNELS or not is_native_number:
        return np.concatenate(arrays)
    value_bytes = first.dtype.itemsize
    pixel_bytes = first.shape[-1] * value_bytes
    strides = {array.strides[-2:] for array in arrays}
    if strides == {(pixel_bytes, value_bytes)} or {value for _, value in strides} != {value_bytes}:
        return np.concatenate(arrays)
    # NumPy copies the pixels of flipped images as a whole in a tenth to two thirds of the time that their values take.
    pixel = np.dtype((np.void, pixel_bytes))
    return np.concatenate([array.view(pixel) for array in arrays]).view(first.dtype)


def stacked(arrays: Sequence[Any]) -> Any:
    """Return arrays of one dtype and shape along a new axis 0."""
    first = arrays[0]
    # NumPy's `stack` takes 20 times as long for numbers.
    is_plain = first.dtype.kind in NUMBERS and first.dtype.isnative and _NUMBERS.issuperset(map(type, arrays))
    return np.array(arrays, first.dtype) if is_plain and not first.ndim else np.stack(arrays)


def _split(values: Any, lengths: list[int]) -> Any:
    # Return the rows of some lengths, as an array if these are equal.
    values = native(values)
    if lengths.count(lengths[0]) == len(lengths):
        return values.reshape(len(lengths), lengths[0], *values.shape[1:])
    row_splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=row_splits[1:])
    return unchecked_ragged(values, row_splits)


def _integers(values: Sequence[int], narrow: bool) -> Any:
    if not narrow:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return None
    # Separately converted, a number that does not fit would be wider than the others.
    fits = _INT32.min <= min(values) and max(values) <= _INT32.max
    return np.array(values, np.int32) if fits else None


def stack(structure: Structure, items: Sequence[Leaves], label: str = "") -> Leaves:
    """Return the leaves of one chunk: the leaves of its elements stacked along a new axis 0.

    Raises
    ------
    StackError
        The elements' shapes or dtypes differ.
    """
    leaves: list[Any] = []
    for path, column in zip(structure.paths, zip(*items, strict=True), strict=True):
        if _are_ragged(column):
            # Ragged even if all have the same length, as in TensorFlow.
            leaves.append(Ragged.of(column, column[0].row_splits.dtype))
            continue
        if agree(column):
            leaves.append(stacked(column))
            continue
        alike = with_empty_alike(column)
        if not agree(alike):
            kinds = dict.fromkeys(map(_kind, column))
            where = f" of {label}" if label else ""
            raise StackError(
                f"elements{where} do not stack to a batch or window, their leaf {path or '(the element)'} occurs as "
                f"{', '.join(list(kinds)[:4])}. {_advice(column)}"
            )
        leaves.append(stacked(alike))
    return tuple(leaves)


def _advice(column: Sequence[Any]) -> str:
    if not all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in column):
        return "Give them one kind first with map(...)"
    if len({leaf.dtype for leaf in column}) > 1:
        return (
            "Give them one dtype first, such as with map(lambda x: x.astype(np.float32)); the datasets that a function "
            "of flat_map or interleave returns, and the results of a function of map, need one dtype too"
        )
    if len({leaf.ndim for leaf in column}) > 1:
        return "Give them one number of axes first with map(...)"
    return "Give them one shape first with map(...), or use padded_batch or ragged_batch"


def _are_ragged(column: Sequence[Any]) -> bool:
    first = column[0]
    return isinstance(first, Ragged) and all(
        isinstance(leaf, Ragged) and leaf.dtype == first.dtype and leaf.ndim == first.ndim for leaf in column
    )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Nested):
        return "a dataset"
    return f"{leaf.dtype}{list(leaf.shape)}"


def with_empty_alike(column: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves of elements, where empty arrays of floats have the dtype of the others, if these have only one.

    NumPy makes an empty list an array of floats, so that it may differ from lists of other numbers or of text.

    >>> with_empty_alike([np.array([]), np.array([1, 2])])
    [array([], dtype=int64), array([1, 2])]
    """
    if not set(map(type, column)) <= {np.ndarray} or len(set(map(dtype_of, column))) == 1:
        return column
    is_open = [not leaf.size and leaf.dtype.kind == "f" for leaf in column]
    dtypes = {leaf.dtype for leaf, may_differ in zip(column, is_open, strict=True) if not may_differ}
    if len(dtypes) != 1:
        return column
    (dtype,) = dtypes
    return [leaf.astype(dtype) if may_differ else leaf for leaf, may_differ in zip(column, is_open, strict=True)]


def agree(column: Sequence[Any], *, but_for_length: bool = False) -> bool:
    """Return whether the leaves of elements can be one array; ``but_for_length`` if they may differ along axis 0."""
    if not all(issubclass(kind, (np.ndarray, np.generic)) for kind in set(map(type, column))):
        return False
    inner = 1 if but_for_length else 0
    shapes, dtypes = set(map(shape_of, column)), set(map(dtype_of, column))
    if min(map(len, shapes)) < inner or len({(len(shape), shape[inner:]) for shape in shapes}) > 1:
        return False
    # Text of different widths differs in dtype, but can be stacked; bytes would become text.
    return len(dtypes) == 1 or {dtype.kind for dtype in dtypes} in ONE_KIND
