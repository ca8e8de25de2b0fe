"""Replacements of nulls, which must not become other values when they get the type of their column."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import numpy as np

from daskdist.errors import ArgumentError


def scalar_of(missing: Any, kind: Any) -> Any:
    """Return a replacement as an Arrow scalar of a type.

    Raises
    ------
    ValueError
        The type cannot hold the value. Arrow itself makes 1 of 1.5, a date of a time, and infinity of large numbers.
    """
    import pyarrow as pa

    scalar = pa.scalar(missing, kind)
    converted, is_kept = scalar.as_py(), True
    if isinstance(missing, datetime):
        # A date is the midnight at its beginning.
        when = converted if isinstance(converted, datetime) else datetime.combine(converted, time())
        is_kept = _in_utc(when) == _in_utc(missing)
    elif isinstance(missing, time | timedelta):
        is_kept = converted == missing
    elif isinstance(missing, float | np.floating) and np.isfinite(missing):
        is_kept = converted == missing or (isinstance(converted, float) and bool(np.isfinite(converted)))
    if not is_kept:
        raise ValueError(f"as {kind} it would become {converted!r}")
    return scalar


def _in_utc(when: datetime) -> datetime:
    return when if when.tzinfo is None else when.astimezone(UTC).replace(tzinfo=None)


def fill_times(times: np.ndarray[Any, Any], missing: Any, where: str) -> np.ndarray[Any, Any]:
    """Return times with NaT replaced by one of NumPy's times, which Arrow takes for few of its types.

    Raises
    ------
    ArgumentError
        Times of this dtype cannot hold the value.
    """
    dtype, fill_value = times.dtype, np.asarray(missing)
    if dtype.kind != fill_value.dtype.kind or not (np.isnat(missing) or fill_value.astype(dtype) == missing):
        raise ArgumentError(f"missing: {missing!r} cannot stand for a null of {where}: {dtype} cannot hold it")
    return np.where(np.isnat(times), fill_value.astype(dtype), times)
