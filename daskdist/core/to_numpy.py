"""Conversion of other arrays to NumPy's: the only place where arrays on devices are copied to the host implicitly.

Elements have no mask: an array with masked or missing values is refused rather than converted with arbitrary values.
"""

from __future__ import annotations

import sys
from array import array as array_of_numbers
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError

# The types without arrays inside, which most converted values have.
PLAIN: Final = frozenset({int, float, bool, complex, str, bytes})


class HostConverters:
    """Functions that convert arrays of other libraries, set by `daskdist.ops` as core knows no devices and tables.

    All return other values unchanged.
    """

    def __init__(self) -> None:
        # Converts arrays on devices.
        self.known: Callable[[Any], Any] = _as_it_is
        # Converts arrays of other libraries that NumPy cannot; raises `ArgumentError` if that is impossible.
        self.others: Callable[[Any], Any] = _as_it_is
        # Converts columns of dataframes to arrays or `Ragged`; raises `ArgumentError` if that is impossible.
        self.columns: Callable[[Any], Any] = _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


HOST_CONVERTERS: Final = HostConverters()


def to_numpy(value: Any) -> Any:
    """Convert a value like ``numpy.asarray``, in the byte order of this machine.

    Arrays on devices, also in lists, are copied to the host.

    Raises
    ------
    ArgumentError
        Values are masked, or missing in an array of integers.

    >>> to_numpy([1, 2])
    array([1, 2])
    """
    kind = type(value)
    if kind is np.ndarray:
        return native(value)
    if kind in PLAIN:
        return native(np.asarray(value))
    if is_masked_array(value):
        return native(unmasked(value))
    if kind is list:
        value = _with_arrays(value)
    if not isinstance(value, (np.ndarray, list)):
        value = HOST_CONVERTERS.known(value)
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError):
        reason = dtype_without_numpy(value)
        if reason is not None:
            raise ArgumentError(reason) from None
        converted = _brought(value)
        if converted is value:
            raise
        return native(np.asarray(converted))
    if array.dtype == object and not array.ndim and not isinstance(value, np.ndarray):
        # NumPy cannot convert it, but its library may.
        array = np.asarray(HOST_CONVERTERS.others(value))
    if isinstance(value, list):
        _refuse_rounded(value, array.dtype)
        if array.dtype.kind == "U":
            _refuse_as_text(value)
        elif array.dtype.kind in "mM":
            _refuse_wrapped(value, array.dtype)
    elif array.dtype.kind == "f":
        _refuse_missing(value, array)
    return native(array)


# The characters of dtypes that are equal to int64 or uint64, but have another type -> the one of that name. NumPy makes
# them of Python's integers from 2**63 on, and libraries that look a dtype up by its type do not know them.
_SAME_NUMBERS: Final[dict[str, Any]] = {
    np.dtype(other).char: np.dtype(kind)
    for other, kind in ((np.longlong, np.int64), (np.ulonglong, np.uint64))
    if np.dtype(other).type is not kind
}


def native(array: Any) -> Any:
    """Return an array in the byte order of this machine: NumPy changes others to it in some operations, but not in all.

    Integers of C's type ``long long`` become int64 or uint64.

    >>> native(np.array([1, 2], ">i4")).dtype
    dtype('int32')
    >>> native(np.array([1, 2], np.ulonglong)).dtype.type is np.uint64
    True
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    same = _SAME_NUMBERS.get(array.dtype.char)
    return array if same is None else array.view(same)


def plain_array(array: Any) -> Any:
    """Return an array of a subclass as a plain one, if it differs from it in what its rows or operations are.

    Rows of a matrix are matrices, and words of a ``chararray`` lose spaces at their end. Others stay as they are.

    Raises
    ------
    ArgumentError
        Values are masked.
    """
    if is_masked_array(array):
        return unmasked(array)
    return np.asarray(array) if isinstance(array, np.matrix | np.char.chararray) else array


def is_masked_array(value: Any) -> bool:
    """Return whether a value is a NumPy masked array or ``numpy.ma.masked``."""
    # If the module is not imported there are no masked arrays; do not import it, which takes a while.
    masked_type = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked_type is not None and isinstance(value, masked_type)


def unmasked(array: Any) -> Any:
    """Return the data of a masked array.

    Raises
    ------
    ArgumentError
        Some values are masked.
    """
    mask = np.ma.getmask(array)
    num_masked = int(np.count_nonzero(np.ascontiguousarray(mask).view(bool)))
    if num_masked:
        raise ArgumentError(
            f"a masked array with {num_masked} masked values, but elements have no mask: fill them with "
            "array.filled(fill_value=...), and keep numpy.ma.getmaskarray(array) if the mask is needed"
        )
    return np.asarray(array.data)


def _with_arrays(values: Sequence[Any]) -> Sequence[Any]:
    # Return a list with arrays in place of the columns and other sequences in it, of which NumPy would ignore what is
    # masked, missing or rounded; the same object if it has none.
    if PLAIN.issuperset(map(type, values)):
        return values
    parts = list(map(_as_array, values))
    return parts if any(part is not value for part, value in zip(parts, values, strict=True)) else values


def _as_array(part: Any) -> Any:
    kind = type(part)
    if kind is np.ndarray or kind in PLAIN:
        return part
    if kind in (list, tuple, deque):
        return _with_arrays(part if kind is not deque else list(part))
    is_sequence = hasattr(kind, "__array__") or kind in (range, memoryview, array_of_numbers)
    if not is_sequence or isinstance(part, np.generic):
        return part
    column = HOST_CONVERTERS.columns(part)
    return to_numpy(column) if column is part or isinstance(column, np.ndarray) else part


# Floats have all integers up to this one, but not all larger ones.
_LARGEST_EXACT: Final = 2**53
# The dtypes float64 and complex128.
_ROUNDING: Final = "dD"
# The types without integers, or with those that all floats have.
_EXACT: Final[frozenset[Any]] = frozenset({float, bool, complex, str, bytes, np.float64, np.float32, np.bool_})


def _refuse_rounded(values: Sequence[Any], dtype: np.dtype[Any]) -> None:
    # NumPy makes floats of large integers in a list with floats, or with integers that fit no dtype together.
    if dtype.char not in _ROUNDING:
        return
    kinds: set[Any] = set(map(type, values))
    for kind in kinds - _EXACT:
        for value in values:
            if type(value) is not kind:
                continue
            if kind in (list, tuple):
                _refuse_rounded(value, dtype)
            elif _is_rounded_number(value) or (kind is np.ndarray and is_rounded(value, dtype)):
                raise ArgumentError(
                    f"a list whose integers would be rounded, {value!r:.80}, as NumPy makes {dtype} of its numbers: "
                    "give them one dtype"
                )


def _refuse_wrapped(values: Sequence[Any], dtype: np.dtype[Any]) -> None:
    # NumPy gives all times in a list the finest unit, which may not have those of coarser ones.
    for value in values:
        if isinstance(value, list | tuple):
            _refuse_wrapped(value, dtype)
            continue
        if is_wrapped(value if hasattr(value, "dtype") else np.asarray(value, dtype.kind + "8"), dtype):
            raise ArgumentError(
                f"a list of times of several units, of which {value!r:.80} does not fit into {dtype}, which "
                "NumPy makes of all: give them one unit"
            )


def is_wrapped(times: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether times have other values when they are converted to a dtype.

    >>> is_wrapped(np.array(["9999-01-01"], "datetime64[D]"), np.dtype("datetime64[ns]"))
    True
    """
    if times.dtype.kind not in "mM" or times.dtype == dtype:
        return False
    return not np.array_equal(times.astype(dtype).astype(times.dtype), times, equal_nan=True)


def loss_in(column: Any, dtype: np.dtype[Any]) -> tuple[str, str] | None:
    """Return which values of an array change when it is converted to a dtype, and how; None if none does.

    >>> loss_in(np.array([2**53 + 1]), np.dtype("float64"))
    ('integers', 'would be rounded')
    """
    if is_rounded(column, dtype):
        return "integers", "would be rounded"
    return ("times", "do not fit") if is_wrapped(column, dtype) else None


def _is_rounded_number(value: Any) -> bool:
    if not isinstance(value, int | np.integer):
        return False
    number = int(value)
    return abs(number) > _LARGEST_EXACT and int(float(number)) != number


def _refuse_as_text(values: Sequence[Any]) -> None:
    # NumPy makes text of numbers and bytes in a list with text.
    kinds: set[Any] = set(map(type, values))
    for kind in kinds - {str}:
        for value in values:
            if type(value) is not kind:
                continue
            if kind in (list, tuple):
                _refuse_as_text(value)
            elif not issubclass(kind, str) and getattr(value, "dtype", _NO_TEXT).kind not in "UT":
                raise ArgumentError(f"a list of text and of {value!r:.80}, which NumPy would make text: give one type")


_NO_TEXT: Final = np.dtype("V")


def is_rounded(column: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether an array of integers has other values when it is converted to a dtype.

    >>> is_rounded(np.array([2**53 + 1]), np.dtype("float64")), is_rounded(np.array([2**60]), np.dtype("float64"))
    (True, False)
    """
    if column.dtype.kind not in "iu" or column.dtype.itemsize < 8 or dtype.char not in _ROUNDING:
        return False
    if not column.size or -_LARGEST_EXACT <= int(column.min()) <= int(column.max()) <= _LARGEST_EXACT:
        return False
    floats, limits = column.astype(np.float64), np.iinfo(column.dtype)
    # The largest integers are rounded to a number that the dtype does not have.
    exact = np.where(floats < float(limits.max), floats, limits.min).astype(column.dtype)
    return bool((exact != column).any())


def _refuse_missing(value: Any, array: Any) -> None:
    # NumPy converts pandas' nullable integers and bools to floats if some are missing.
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "f") in "iub" and not isinstance(dtype, np.dtype) and np.isnan(array).any():
        raise ArgumentError(
            f"{type(value).__name__} of {dtype} with {np.count_nonzero(np.isnan(array))} missing values, which "
            "integers cannot represent: fill them with fillna(...), or convert them with astype('float64')"
        )


def dtype_without_numpy(value: Any) -> str | None:
    """Return what to do with an array, or a list of arrays, of a dtype that NumPy does not have; None for others."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    dtype = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if not dtype.startswith(("bfloat16", "float8")):
        return None
    return (
        f"{type(value).__name__} of {dtype}, a dtype that NumPy does not have: convert it to float32 first, in PyTorch "
        "with .float()"
    )


def _brought(value: Any) -> Any:
    # Return the same object if nothing needs converting.
    if isinstance(value, (list, tuple)):
        parts = list(map(_brought, value))
        return parts if any(part is not old for part, old in zip(parts, value, strict=True)) else value
    converted = HOST_CONVERTERS.known(value)
    return HOST_CONVERTERS.others(value) if converted is value else converted


# The kinds of dtypes of numbers, and those that they may be converted to.
_CONVERTED: Final = frozenset({"ii", "iu", "ui", "uu", "if", "uf", "ic", "uc", "ff", "fc", "cc"})


def without_loss(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array or scalar in another dtype; unchanged if that could lose more than the precision of floats.

    Raises
    ------
    OverflowError, FloatingPointError
        The dtype does not have one of its numbers.

    >>> without_loss(np.float64(1.5), np.dtype("float32")), without_loss(np.float64(1.5), np.dtype("int64"))
    (np.float32(1.5), np.float64(1.5))
    """
    kinds = array.dtype.kind + dtype.kind
    if kinds in ("UT", "SO"):
        # A single text would be a Python string, without a dtype.
        return np.asarray(array).astype(dtype)
    if kinds not in _CONVERTED:
        return array
    with np.errstate(over="raise"):
        converted = array.astype(dtype)
    if array.dtype.kind in "iu" and array.size and not _is_exact(array, converted):
        raise OverflowError
    return converted


def _is_exact(integers: Any, converted: Any) -> bool:
    if converted.dtype.kind in "iu":
        return np.array_equal(integers, converted)
    most = 2 ** (np.finfo(converted.dtype).nmant + 1)
    if -most <= int(integers.min()) <= int(integers.max()) <= most:
        return True
    return bool(list(map(int, converted.real.ravel())) == integers.ravel().tolist())
