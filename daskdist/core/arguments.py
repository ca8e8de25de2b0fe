"""Checks of arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError

# The whole numbers that arrays can hold.
_LEAST: Final = -(2**63)
_MOST: Final = 2**63 - 1


def whole_number(
    operation: str, name: str, value: Any, at_least: int | None = None, *, at_most: int | None = _MOST
) -> int:
    """Return an argument as a whole number of int64, or of any size if ``at_most`` is None.

    Raises
    ------
    ArgumentError
        The value is not a whole number, or is too small or large; the message names the operation and the argument.

    >>> whole_number("batch", "batch_size", 3, at_least=1)
    3
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    # Python counts bools as numbers, but here a bool is a mistake.
    if number is None or isinstance(value, bool):
        raise ArgumentError(f"{operation}: {name} is {value!r:.80}; give a whole number")
    if at_least is not None and number < at_least:
        raise ArgumentError(f"{operation}: {name} is {number}; give {at_least} or more")
    if at_most is not None and not _LEAST <= number <= at_most:
        least = _LEAST if at_least is None else at_least
        raise ArgumentError(f"{operation}: {name} is {number}, beyond int64; give a number from {least} to {at_most}")
    return number


def whole_numbers(operation: str, name: str, values: Any, at_least: int | None = None) -> tuple[int, ...]:
    """Return an argument as a sequence of whole numbers.

    Raises
    ------
    ArgumentError
        The value is not a list of whole numbers, or one is too small; the message names the operation and the argument.

    >>> whole_numbers("rebatch", "batch_size", [2, 1])
    (2, 1)
    """
    if not is_list(values):
        raise ArgumentError(f"{operation}: {name} is {values!r:.80}; give a list of whole numbers")
    return tuple(whole_number(operation, f"{name}[{place}]", value, at_least) for place, value in enumerate(values))


def numbers(operation: str, name: str, values: Any, *, advice: str = "give a list of numbers") -> tuple[float, ...]:
    """Return an argument as a sequence of finite numbers; ``advice`` is the end of the message about others.

    Raises
    ------
    ArgumentError
        It is not one; the message names the operation and the argument.

    >>> numbers("sample_from_datasets", "weights", [1, 2.5])
    (1.0, 2.5)
    """
    try:
        converted = tuple(map(float, values)) if is_list(values) else None
    except (TypeError, ValueError):
        converted = None
    if converted is None or not np.isfinite(converted).all():
        raise ArgumentError(f"{operation}: {name} is {values!r:.80}; {advice}")
    return converted


def is_list(values: Any) -> bool:
    """Return whether an argument is a sequence of values, and no text."""
    return isinstance(values, np.ndarray) or (isinstance(values, Sequence) and not isinstance(values, (str, bytes)))


def yes_or_no(operation: str, name: str, value: Any) -> None:
    """Check that an argument is True or False.

    Raises
    ------
    ArgumentError
        The value is neither True nor False; the message names the operation and the argument.

    >>> yes_or_no("batch", "drop_remainder", True)
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{operation}: {name} is {value!r:.80}; give True or False")


def number_dtype(operation: str, name: str, value: Any) -> np.dtype[Any]:
    """Return an argument as a dtype of numbers.

    Raises
    ------
    ArgumentError
        It is not one; the message names the operation and the argument.

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
