"""Replacements of nulls, which must not become other values when they get the type of their column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final

import numpy as np

from daskdist.core.to_numpy import is_wrapped
from daskdist.errors import ArgumentError
from daskdist.storage.libraries import pa

# Stands for the replacement of nulls that are kept as NaN, in arrays of objects.
KEPT: Final = object()


class NullsKept(dict[str, Any]):
    """Replacements of nulls by column; those of other columns are kept as NaN, in arrays of objects."""

    def __bool__(self) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        """Return the replacement in a column, or `KEPT`."""
        return super().get(name, KEPT)


@dataclass(frozen=True, slots=True)
class Place:
    """A column, or a field of its structs, for messages.

    Parameters
    ----------
    label
        The origin of the rows.
    names
        The name of the column, and of the field in it; empty if the values are not those of a column.
    is_within_lists
        Whether the values are those of lists.
    """

    label: str
    names: tuple[str, ...] = ()
    is_within_lists: bool = False

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names))
        where = f"{self.label}: column {names}" if names else self.label
        return f"{where}, within its lists" if self.is_within_lists else where

    def field(self, name: str) -> Place:
        """Return the place of a field of the structs here."""
        return replace(self, names=(*self.names, name))

    def within_lists(self) -> Place:
        """Return the place of the values of the lists here."""
        return replace(self, is_within_lists=True)

    def replaced_by(self, value: str) -> str:
        """Return the argument by which a value, given as Python code, replaces the nulls here."""
        for name in reversed(self.names):
            value = f"{{{name!r}: {value}}}"
        return f"missing={value}"


def of_field(missing: Any, kind: Any, number: int, where: Place) -> Any:
    """Return the replacement of a null in a field of structs, by the number of the field.

    Raises
    ------
    ArgumentError
        The replacement of the structs is not a dict by field.
    """
    if missing is None or missing is KEPT:
        return missing
    names = [kind.field(k).name for k in range(kind.num_fields)]
    if not isinstance(missing, Mapping) or not set(missing) <= set(names):
        raise ArgumentError(
            f"missing: for {where}, which holds structs, give a dict by field, of {', '.join(map(repr, names))}, "
            f"not {missing!r:.80}"
        )
    return missing.get(names[number])


def scalar_of(missing: Any, kind: Any) -> Any:
    """Return a replacement as an Arrow scalar of a type.

    Raises
    ------
    ValueError
        The type cannot hold the value. Arrow itself makes 1 of 1.5, a date of a time, and infinity of large numbers.
    """
    scalar = pa.scalar(missing, kind)
    converted, is_kept = scalar.as_py(), True
    if isinstance(missing, datetime):
        # A date is the midnight at its beginning.
        when = converted if isinstance(converted, datetime) else datetime.combine(converted, time())
        is_kept = _in_utc(when) == _in_utc(missing)
    elif isinstance(missing, time | timedelta):
        is_kept = converted == missing
    elif isinstance(missing, int | float | np.integer | np.floating) and missing not in (math.inf, -math.inf):
        is_kept = converted == missing or (isinstance(converted, float) and not math.isinf(converted))
    if not is_kept:
        raise ValueError(f"as {kind} it would become {converted!r}")
    return scalar


def _in_utc(when: datetime) -> datetime:
    return when if when.tzinfo is None else when.astimezone(UTC).replace(tzinfo=None)


def fill_times(times: np.ndarray[Any, Any], missing: Any, where: Place) -> np.ndarray[Any, Any]:
    """Return times with NaT replaced by one of NumPy's times, which Arrow takes for few of its types.

    Raises
    ------
    ArgumentError
        Times of this dtype cannot hold the value.
    """
    dtype, fill_value = times.dtype, np.asarray(missing)
    if dtype.kind != fill_value.dtype.kind or is_wrapped(fill_value, dtype):
        raise ArgumentError(f"missing: {missing!r} cannot stand for a null of {where}: {dtype} cannot hold it")
    return np.where(np.isnat(times), fill_value.astype(dtype), times)
