"""Checks of arguments."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from daskdist.errors import ArgumentError


def whole_number(operation: str, name: str, value: Any, at_least: int | None = None) -> int:
    """An argument that is to be a whole number.

    Raises
    ------
    ArgumentError
        It is none, or too small; the message names the operation and the argument.

    >>> whole_number("batch", "batch_size", 3, at_least=1)
    3
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{operation}: {name} is {value!r}; give a whole number") from None
    if at_least is not None and number < at_least:
        raise ArgumentError(f"{operation}: {name} is {number}; give {at_least} or more")
    return number


def number_dtype(operation: str, name: str, value: Any) -> np.dtype[Any]:
    """An argument that is to be a dtype of numbers.

    Raises
    ------
    ArgumentError
        It is none; the message names the operation and the argument.

    >>> number_dtype("range", "output_type", "float32")
    dtype('float32')
    """
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise ArgumentError(f"{operation}: {name} is {value!r}; give a dtype, such as int64") from None
    if dtype.kind not in "iuf":
        raise ArgumentError(f"{operation}: {name} is {dtype}; give an integer or float dtype")
    return dtype  # type: ignore[no-any-return]
