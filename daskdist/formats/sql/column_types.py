"""Types of database columns in Arrow, and conversion of drivers' values to Arrow arrays.

==============================  =================================================================
a column of                     has the Arrow type
==============================  =================================================================
integers                        int64; on PostgreSQL that of their width; unsigned of 8 bytes uint64
floats                          float64; ``real`` on PostgreSQL float32
decimals                        float64, the nearest
booleans                        bool
text, enumerations, UUIDs       text
JSON                            text: the document
bytes                           binary
dates, times, intervals         date32, durations of microseconds
timestamps                      microseconds, UTC if they have a zone
arrays (PostgreSQL)             lists
==============================  =================================================================
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError, FileError
from daskdist.formats.sql.login import sa
from daskdist.storage.libraries import pa, pc

# PostgreSQL's type numbers, which are part of its protocol.
POSTGRESQL: Final[Mapping[int, str]] = {
    16: "bool",
    17: "bytes",
    18: "text",
    19: "text",
    20: "int64",
    21: "int16",
    23: "int32",
    25: "text",
    26: "int64",
    114: "json",
    142: "json",
    700: "float32",
    701: "float64",
    1000: "bool[]",
    1005: "int16[]",
    1007: "int32[]",
    1009: "text[]",
    1015: "text[]",
    1016: "int64[]",
    1021: "float32[]",
    1022: "float64[]",
    1042: "text",
    1043: "text",
    1082: "date",
    1083: "time",
    1114: "timestamp",
    1184: "instant",
    1186: "duration",
    1231: "decimal[]",
    1700: "decimal",
    2950: "uuid",
    3802: "json",
}

# Kind -> Arrow's name. A time is a duration since midnight, as some databases have only that.
_ARROW: Final[Mapping[str, str]] = {
    "bool": "bool",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint64": "uint64",
    "float32": "float32",
    "float64": "float64",
    "decimal": "float64",
    "text": "large_string",
    "uuid": "large_string",
    "json": "large_string",
    "bytes": "large_binary",
    "date": "date32",
    "time": "duration[us]",
    "duration": "duration[us]",
    "timestamp": "timestamp[us]",
    "null": "null",
}

_TEMPORAL: Final = ("date", "time", "duration", "timestamp", "instant")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table or query.

    Parameters
    ----------
    name
        Its name.
    kind
        The kind of its values: a key of the table above, with ``[]`` for arrays.
    arrow
        The Arrow type it is read as.
    """

    name: str
    kind: str
    arrow: Any

    @property
    def is_sized(self) -> bool:
        """True if all values have the same size."""
        types = pa.types
        return not (types.is_list(self.arrow) or types.is_large_string(self.arrow) or types.is_large_binary(self.arrow))


def column_of(name: str, kind: str, dtype: Any = None) -> Column:
    """Return a column of a kind, read as ``dtype`` if that is given."""
    return Column(name, kind, _arrow(kind) if dtype is None else _declared(name, dtype))


def _arrow(kind: str) -> Any:
    if kind.endswith("[]"):
        return pa.list_(_arrow(kind[:-2]))
    if kind == "instant":
        return pa.timestamp("us", "UTC")
    return pa.type_for_alias(_ARROW[kind])


def _declared(name: str, dtype: Any) -> Any:
    try:
        numpy_dtype = np.dtype(dtype)
        if numpy_dtype.kind in "UT":
            return pa.large_string()
        return pa.large_binary() if numpy_dtype.kind in "SO" else pa.from_numpy_dtype(numpy_dtype)
    except (TypeError, pa.ArrowException) as error:
        raise ArgumentError(f"dtypes: {dtype!r:.80} for {name!r} is not a dtype: {error}") from None


def reflected_kind(sql_type: Any) -> str | None:
    """Return the kind of a column by its SQLAlchemy type; None if it depends on the values."""
    # Subclasses come before their bases.
    kinds: Sequence[tuple[Any, str]] = (
        (sa.Boolean, "bool"),
        (sa.Uuid, "uuid"),
        (sa.JSON, "json"),
        (sa.Float, "float64"),
        (sa.Numeric, "decimal"),
        (sa.Integer, "uint64" if getattr(sql_type, "unsigned", False) else "int64"),
        (sa.Date, "date"),
        (sa.DateTime, "instant" if getattr(sql_type, "timezone", False) else "timestamp"),
        (sa.Time, "time"),
        (sa.Interval, "duration"),
        ((sa.LargeBinary, sa.BINARY, sa.VARBINARY), "bytes"),
        (sa.String, "text"),
    )
    return next((kind for base, kind in kinds if isinstance(sql_type, base)), None)


def sampled_kind(name: str, values: Sequence[Any], where: str) -> str:
    """Infer the kind of a column from some of its values.

    Raises
    ------
    FileError
        The values have several kinds, or one that no array can hold.
    """
    present = [value for value in values if value is not None]
    if any(isinstance(value, uuid.UUID) for value in present):
        return "uuid"
    if any(isinstance(value, dict) for value in present):
        return "json"
    try:
        kind = _kind_of(pa.array(present))
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        kind = None
    if kind is None:
        types = " and ".join(sorted({type(value).__name__ for value in present}))
        raise FileError(
            f"{where}: column {name!r} holds {types}, which have no common dtype; cast it in the query, as in SELECT "
            f"CAST({name} AS TEXT) AS {name}, or leave it out"
        )
    return kind


def _kind_of(array: Any) -> str | None:
    types, arrow_type = pa.types, array.type
    if types.is_list(arrow_type):
        inner = _kind_of(pa.array([], arrow_type.value_type))
        return None if inner is None or inner.endswith("[]") else f"{inner}[]"
    if types.is_timestamp(arrow_type):
        return "timestamp" if arrow_type.tz is None else "instant"
    kinds: Sequence[tuple[Callable[[Any], bool], str]] = (
        (types.is_null, "null"),
        (types.is_boolean, "bool"),
        (types.is_integer, "int64"),
        (types.is_floating, "float64"),
        (types.is_decimal, "decimal"),
        (types.is_string, "text"),
        (types.is_binary, "bytes"),
        (types.is_date, "date"),
        (types.is_time, "time"),
        (types.is_duration, "duration"),
    )
    return next((kind for holds, kind in kinds if holds(arrow_type)), None)


def array_of(values: Sequence[Any], column: Column, where: str, start: int) -> Any:
    """Convert the values that a driver returns for a column to an Arrow array of its type.

    Raises
    ------
    FileError
        A value has another kind; the message names it.
    """
    try:
        return _array(values, column)
    # For example text in a column of numbers.
    except (ValueError, TypeError, ArithmeticError, NotImplementedError) as error:
        reason = error
    for place, value in enumerate(values):
        try:
            _array([value], column)
        except (ValueError, TypeError, ArithmeticError, NotImplementedError) as error:
            problem = (
                "the first rows have nothing but nulls"
                if pa.types.is_null(column.arrow)
                else f"expected {column.arrow}"
            )
            raise FileError(
                f"{where}: column {column.name!r} has {value!r:.60} in row {start + place}, and {problem} ({error}); "
                f"give its type with dtypes={{{column.name!r}: ...}}"
            ) from None
    raise FileError(f"{where}: column {column.name!r} is no {column.arrow}: {reason}")


def _array(values: Sequence[Any], column: Column) -> Any:
    kind, arrow = column.kind, column.arrow
    if kind == "decimal":
        values = [None if value is None else float(value) for value in values]
    elif kind in ("uuid", "json"):
        values = [value if value is None or isinstance(value, str) else _as_text(value, kind) for value in values]
    elif kind == "decimal[]":
        values = [value if value is None else [None if x is None else float(x) for x in value] for value in values]
    if kind in _TEMPORAL:
        return _temporal(values, kind).cast(arrow)
    if pa.types.is_integer(arrow):
        # Asked for integers, Arrow would truncate floats; the cast refuses those.
        try:
            return pa.array(values).cast(arrow)
        except OverflowError:
            return pa.array(values, arrow)
    try:
        return pa.array(values, arrow)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array(values).cast(arrow)


def _as_text(value: Any, kind: str) -> str:
    return json.dumps(value) if kind == "json" else str(value)


def _temporal(values: Sequence[Any], kind: str) -> Any:
    # Let Arrow infer the type first: asked for times, it would accept numbers too, in an arbitrary unit.
    array = pa.array(values)
    types = pa.types
    if kind == "time" and types.is_string(array.type):
        # SQLite has text, which Arrow can convert to a time of day only with a date.
        array = pc.binary_join_element_wise("1970-01-01", array, " ").cast(pa.timestamp("us"))
    if kind == "time" and not types.is_duration(array.type):
        array = array.cast(
            pa.int64() if types.is_null(array.type) or types.is_timestamp(array.type) else pa.time64("us")
        )
        return array.cast(pa.int64()).cast(pa.duration("us"))
    if types.is_integer(array.type) or types.is_floating(array.type):
        raise TypeError(f"a number is not a {kind}")
    return array
