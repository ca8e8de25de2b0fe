"""Check of columns of Python objects, of which Arrow changes some when it converts them to one type.

Arrow takes the type of a column from some of its values, and then converts others without an error: a datetime to a
date, nanoseconds to microseconds, text to bytes, a float16 to an integer, and masked values to what the mask hides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError

# Types whose values stay the same beside those of no other type but float. Arrow refuses integers that floats round.
_SAFE: Final[Set[Any]] = frozenset({str, bytes, int, bool, Decimal, date, timedelta, np.datetime64, np.timedelta64})


def check_unchanged(column: Any, array: Any, label: str) -> None:
    """Check that an Arrow array has the values of the pandas column of objects from which it was made.

    Raises
    ------
    ArgumentError
        A value would be changed.
    """
    pandas = sys.modules["pandas"]
    values = np.asarray(column, object)
    if _are_kept(values[~pandas.isna(values)].tolist()):
        return
    for value, converted in zip(values, array.to_pylist(), strict=True):
        if not _is_same(value, converted):
            raise ArgumentError(
                f"{label} cannot become an array: {value!r:.80} would become {converted!r:.80}; leave it out, or give "
                "its values one type, such as with astype('datetime64[ns]')"
            )


def _are_kept(values: Sequence[Any]) -> bool:
    # Return whether the types show that all values stay the same, which takes much less time than a look at each.
    kinds = set(map(_kind, values)) - {float}
    while kinds == {list}:
        values = list(chain.from_iterable([value for value in values if type(value) is list]))
        kinds = set(map(type, values)) - {float, NoneType}
    if kinds and kinds <= {datetime, sys.modules["pandas"].Timestamp}:
        times = [value for value in values if isinstance(value, datetime)]
        have_zones = {value.tzinfo is not None for value in times}
        return len(have_zones) == 1 and not any(getattr(value, "nanosecond", 0) for value in times)
    return not kinds or (len(kinds) == 1 and all(kind in _SAFE or isinstance(kind, np.dtype) for kind in kinds))


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
