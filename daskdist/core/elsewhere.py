"""Arrays that are not NumPy's made such: what lies on devices comes to the host here, and nowhere else by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

# What has no arrays in it, as most that is made an array has not.
_PLAIN: Final = frozenset({int, float, bool, complex, str, bytes})


class Bringers:
    """How arrays come to the host, as `daskdist.ops` sets it: this folder knows no devices.

    Both give whatever else it is as it is.
    """

    def __init__(self) -> None:
        # Of arrays of devices.
        self.known: Callable[[Any], Any] = _as_it_is
        # Of other libraries' arrays, which NumPy makes none of; raises `ArgumentError` where it cannot be done.
        self.others: Callable[[Any], Any] = _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


BRINGERS: Final = Bringers()


def to_numpy(value: Any) -> Any:
    """What ``numpy.asarray`` gives; arrays of devices are copied to the host, by themselves or in a list.

    >>> to_numpy([1, 2])
    array([1, 2])
    """
    kind = type(value)
    if kind is np.ndarray:
        return value
    if kind in _PLAIN:
        return np.asarray(value)
    if not isinstance(value, (np.ndarray, list)):
        value = BRINGERS.known(value)
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError):
        here = _brought(value)
        if here is value:
            raise
        return np.asarray(here)
    if array.dtype == object and not array.ndim and not isinstance(value, np.ndarray):
        # It does not say how it is made one; but another library's device may.
        array = np.asarray(BRINGERS.others(value))
    return array


def _brought(value: Any) -> Any:
    # The very same where there is nothing to bring.
    if isinstance(value, (list, tuple)):
        parts = list(map(_brought, value))
        return parts if any(part is not given for part, given in zip(parts, value, strict=True)) else value
    here = BRINGERS.known(value)
    return BRINGERS.others(value) if here is value else here
