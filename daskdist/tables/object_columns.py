"""Check of columns of Python objects, of which Arrow changes some when it converts them to one type.

Arrow takes the type of a column from some of its values, and then converts others without an error: a datetime to a
date, nanoseconds to microseconds, text to bytes, a float16 to an integer, and masked values to what the mask hides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from datetime import date
from decimal import Decimal
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError

# Types whose values stay the same beside those of no other type but float. Arrow refuses integers that floats round.
_SAFE: Final[Set[Any]] = frozenset({str, bytes, int, bool, Decimal, date, np.datetime64, np.timedelta64})


def check_unchanged(column: Any, array: Any, label: str) -> None:
    """Check that an Arrow array has the values of the pandas column of objects from which it was made.

    Raises
    ------
    ArgumentError
        A value would be changed.
    """
    pandas = sys.modules["pandas"]
    values = np.asarray(column, object)
    kinds = set(map(_kind, values[~pandas.isna(values)])) - {float}
    if not kinds or (len(kinds) == 1 and all(kind in _SAFE or isinstance(kind, np.dtype) for kind in kinds)):
        return
    for value, converted in zip(values, array.to_pylist(), strict=True):
        if not _is_same(value, converted):
            raise ArgumentError(
                f"{label} cannot become an array: {value!r:.80} would become {converted!r:.80}; leave it out, or give "
                "its values one type, such as with astype('datetime64[ns]')"
            )


def _kind(value: Any) -> Any:
    # Return the type of a value, or the dtype of an array without objects.
    return value.dtype if type(value) is np.ndarray and value.dtype != object else type(value)


def _is_same(value: Any, converted: Any) -> bool:
    if converted is None:
        # For arrays and lists the result is an array.
        return sys.modules["pandas"].isna(value) is True
    if isinstance(converted, list):
        return len(value) == len(converted) and all(map(_is_same, value, converted))
    if isinstance(value, Mapping):
        return all(_is_same(value.get(name), item) for name, item in converted.items())
    return bool(value == converted)
