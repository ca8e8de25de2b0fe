"""Arrays that are not NumPy's made such: what lies on devices comes to the host here, and nowhere else by accident.

Elements have no mask: an array of which values are masked, or missing, is refused rather than made one of whatever is
in their places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError

# Types without arrays in them, as most values that are made arrays are.
_PLAIN: Final = frozenset({int, float, bool, complex, str, bytes})


class HostConverters:
    """Functions that copy arrays to the host. `daskdist.ops` sets them: core knows no devices.

    Both give whatever else it is as it is.
    """

    def __init__(self) -> None:
        # Converts arrays of devices.
        self.known: Callable[[Any], Any] = _as_it_is
        # Converts arrays of other libraries that NumPy cannot; raises `ArgumentError` where that is impossible.
        self.others: Callable[[Any], Any] = _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


HOST_CONVERTERS: Final = HostConverters()


def to_numpy(value: Any) -> Any:
    """Return what ``numpy.asarray`` gives; arrays of devices are copied to the host, by themselves or in a list.

    Raises
    ------
    ArgumentError
        Values are masked, or missing where numbers are whole.

    >>> to_numpy([1, 2])
    array([1, 2])
    """
    kind = type(value)
    if kind is np.ndarray:
        return value
    if kind in _PLAIN:
        return np.asarray(value)
    if is_masked_array(value):
        return unmasked(value)
    if kind is list:
        _refuse_masked_parts(value)
    if not isinstance(value, (np.ndarray, list)):
        value = HOST_CONVERTERS.known(value)
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError):
        here = _brought(value)
        if here is value:
            raise
        return np.asarray(here)
    if array.dtype == object and not array.ndim and not isinstance(value, np.ndarray):
        # It does not say how it is made one; but another library's device may.
        array = np.asarray(HOST_CONVERTERS.others(value))
    if array.dtype.kind == "f" and kind is not list:
        _refuse_missing(value, array)
    return array


def is_masked_array(value: Any) -> bool:
    """Return whether a value is one of NumPy's masked arrays, or ``numpy.ma.masked``."""
    # If nobody has imported the module there are none, and importing it takes a while.
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def unmasked(array: Any) -> Any:
    """Return the data of a masked array.

    Raises
    ------
    ArgumentError
        There are values that are masked.
    """
    mask = np.ma.getmask(array)
    num_masked = int(np.count_nonzero(np.ascontiguousarray(mask).view(bool)))
    if num_masked:
        raise ArgumentError(
            f"a masked array with {num_masked} masked values, and elements have no mask: fill them by "
            "array.filled(fill_value=...), and keep numpy.ma.getmaskarray(array) beside it if it is needed"
        )
    return np.asarray(array.data)


def _refuse_masked_parts(values: list[Any]) -> None:
    # NumPy leaves the masks of the parts of a list out.
    for kind in set(map(type, values)) - _PLAIN:
        if kind is list:
            for each in values:
                if type(each) is list:
                    _refuse_masked_parts(each)
        elif issubclass(kind, np.ndarray):
            for each in values:
                if is_masked_array(each):
                    unmasked(each)


def _refuse_missing(value: Any, array: Any) -> None:
    # NumPy makes floats of nullable integers and bools, as pandas has them, if some are missing.
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "f") in "iub" and not isinstance(dtype, np.dtype) and np.isnan(array).any():
        raise ArgumentError(
            f"{type(value).__name__} of {dtype} with {np.count_nonzero(np.isnan(array))} missing values, for which "
            "nothing stands in whole numbers: fill them by fillna(...), or make them floats by astype('float64')"
        )


def _brought(value: Any) -> Any:
    # The very same where there is nothing to bring.
    if isinstance(value, (list, tuple)):
        parts = list(map(_brought, value))
        return parts if any(part is not given for part, given in zip(parts, value, strict=True)) else value
    here = HOST_CONVERTERS.known(value)
    return HOST_CONVERTERS.others(value) if here is value else here
