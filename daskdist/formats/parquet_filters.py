"""Filters of the rows of Parquet files: conditions on columns, fitted to the types of the columns."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError
from daskdist.storage.libraries import pa, pq
from daskdist.tables.extension_types import is_tensor, stored_as, stored_values
from daskdist.tables.replacements import Place

# A column, an operator and a value.
Condition = tuple[str, str, Any]
# A name that no column has.
_NUMBER: Final = "\0number"
# The seconds of NumPy's units of time.
_SECONDS: Final = {
    "W": Fraction(604_800),
    "D": Fraction(86_400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    **{unit: Fraction(1, 1000**k) for k, unit in enumerate(("ms", "us", "ns", "ps", "fs", "as"), 1)},
}


def clauses_of(filters: Any) -> list[list[Condition]]:
    """Return lists of conditions; all conditions of at least one list must hold.

    Raises
    ------
    ArgumentError
        Something is not a condition.
    """
    if filters is None:
        return []
    is_nested = bool(filters) and all(isinstance(clause, list) for clause in filters)
    clauses = [list(clause) for clause in filters] if is_nested else [list(filters)]
    for condition in (condition for clause in clauses for condition in clause):
        if not (isinstance(condition, tuple) and len(condition) == 3):
            raise ArgumentError(f"filters: {condition!r} is not a condition; give tuples (column, operator, value)")
    return clauses


def filtered(table: Any, filters: Any) -> Any:
    """Return the rows of a table for which the filters hold.

    Raises
    ------
    ArgumentError
        A value does not fit the type of its column, or an operator is unknown.
    """
    clauses = clauses_of(filters)
    compared = _comparable(table, {name for clause in clauses for name, _, _ in clause})
    clauses = [[_fitted(condition, compared.schema) for condition in clause] for clause in clauses]
    try:
        expression = pq.filters_to_expression(clauses)
        if compared is table:
            return table.filter(expression)
        numbers = pa.array(np.arange(len(table)))
        return table.take(compared.append_column(_NUMBER, numbers).filter(expression)[_NUMBER])
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        kinds = {name: str(table.schema.field(name).type) for clause in clauses for name, _, _ in clause}
        shown = ", ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
        raise ArgumentError(
            f"filters: {filters!r:.200} does not fit the columns, of which {shown}: {error}; give values of these types"
        ) from None


def _comparable(table: Any, names: Collection[str]) -> Any:
    # Return a table whose columns of the given names have types that Arrow compares; the same one if all have.
    for name in names:
        place = table.schema.get_field_index(name)
        column, kind = table.column(place), table.schema.field(place).type
        if isinstance(kind, pa.BaseExtensionType) and not is_tensor(kind):
            where = Place("filters", (name,))
            chunks = [stored_values(chunk, where) for chunk in column.chunks]
            table = table.set_column(place, name, pa.chunked_array(chunks, stored_as(kind)))
        elif pa.types.is_float16(kind):
            table = table.set_column(place, name, column.cast(pa.float32()))
    return table


def _fitted(condition: Condition, schema: Any) -> Condition:
    # Return an equal condition whose value is of the column's type: Arrow would convert the column to the type of the
    # value, which may not be able to hold it.
    name, operator, value = condition
    kind = schema.field(name).type
    whole = _whole_numbers(kind)
    is_list = operator in ("in", "not in")
    if is_list and (isinstance(value, (str, bytes)) or not isinstance(value, Collection)):
        raise ArgumentError(f"filters: {condition!r:.200}: give a list of values")
    if pa.types.is_decimal(kind):
        return name, operator, [_as_decimal(item) for item in value] if is_list else _as_decimal(value)
    if pa.types.is_floating(kind) and is_list and any(isinstance(item, Real) and item == 0 for item in value):
        # Arrow distinguishes the two zeros in lists, and only there.
        return name, operator, [*value, 0.0, -0.0]
    if whole is None or isinstance(value, (str, bytes)):
        return condition
    if is_list:
        items = [None if item is None else _number_of(item, kind) for item in value]
        if any(number is None and item is not None for number, item in zip(items, value, strict=True)):
            if kind == whole:
                # Arrow would read text as numbers, which it does for no other operator.
                raise ArgumentError(f"filters: {condition!r:.200}: column {name!r} is {kind}; give a list of numbers")
            return condition
        least, greatest = _limits(whole)
        kept = [
            int(item) if item is not None else None
            for item in items
            if item is None or (least <= item <= greatest and item == math.floor(item))
        ]
        return name, operator, pa.array(kept, whole).cast(kind)
    number = _number_of(value, kind)
    if number is None:
        return condition
    operator, bound = _in_whole_numbers(operator, number, *_limits(whole))
    return name, operator, pa.scalar(bound, whole).cast(kind)


def _as_decimal(value: Any) -> Any:
    # Arrow gives an integer the precision of all integers of its size, which few columns have besides their scale.
    return Decimal(int(value)) if isinstance(value, int | np.integer) and not isinstance(value, bool) else value


def _in_whole_numbers(operator: str, number: Any, least: int, greatest: int) -> tuple[str, int]:
    # Return an operator and a value in the range that hold for the same whole numbers in the range.
    none, every = ("<", least), (">=", least)
    if number != number:
        return every if operator == "!=" else none
    number = max(least - 1, min(number, greatest + 1))
    low, high = math.floor(number), math.ceil(number)
    match operator:
        case ">" | ">=":
            first = low + 1 if operator == ">" else high
            return none if first > greatest else (">=", max(first, least))
        case "<" | "<=":
            last = high - 1 if operator == "<" else low
            return none if last < least else ("<=", min(last, greatest))
        case "=" | "==" | "!=":
            if low == high and least <= low <= greatest:
                return operator, low
            return every if operator == "!=" else none
    raise ArgumentError(f"filters: \"{operator}\" is not a valid operator; give ==, !=, <, <=, >, >=, 'in' or 'not in'")


def _whole_numbers(kind: Any) -> Any:
    # Return the type of the whole numbers that a column consists of; None if it has none.
    types = pa.types
    if types.is_integer(kind):
        return kind
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    is_time = types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind) or types.is_date64(kind)
    return pa.int64() if is_time else None


def _limits(whole: Any) -> tuple[int, int]:
    limits = np.iinfo(whole.to_pandas_dtype())
    return int(limits.min), int(limits.max)


def _number_of(value: Any, kind: Any) -> Any:
    # Return a value as one of Python's numbers, in the unit of the column, which compares exactly with whole numbers;
    # None if Arrow converts it, or refuses it.
    types = pa.types
    if types.is_integer(kind):
        if isinstance(value, (bool, np.bool_)):
            return None
        if isinstance(value, np.generic):
            value = value.item()
        return value if isinstance(value, (Real, Decimal)) else None
    if isinstance(value, datetime.datetime) and value.tzinfo is not None and getattr(kind, "tz", None) is not None:
        # pandas' times have nanoseconds. Arrow does not compare times of two zones and units.
        exact = getattr(value, "asm8", None)
        value = np.datetime64(value.astimezone(datetime.UTC).replace(tzinfo=None)) if exact is None else exact
    is_time = types.is_duration(kind) or types.is_time(kind)
    has_zone = getattr(value, "tzinfo", None) is not None or getattr(kind, "tz", None) is not None
    if isinstance(value, datetime.date) and not is_time and not has_zone:
        # pandas' times have nanoseconds. In a list, Arrow would make dates of times.
        value = getattr(value, "asm8", None) or np.datetime64(value)
    if not isinstance(value, np.timedelta64 if is_time else np.datetime64):
        return None
    if np.isnat(value):
        return math.nan
    unit, count = np.datetime_data(value.dtype)
    number = int(value.astype(np.int64))
    if unit in ("Y", "M") and not is_time:
        unit, count, number = "D", 1, int(value.astype("datetime64[D]").astype(np.int64))
    column_unit = "D" if types.is_date32(kind) else "ms" if types.is_date64(kind) else kind.unit
    return Fraction(number * count) * _SECONDS[unit] / _SECONDS[column_unit] if unit in _SECONDS else None


def may_hold(condition: Condition, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
    """Return whether a condition may hold for a row, by the bounds of columns; it never holds for nulls.

    >>> bounds = {"n": (3, 8)}
    >>> may_hold(("n", ">", 8), bounds), may_hold(("n", "in", {1, 5}), bounds), may_hold(("m", "==", 0), bounds)
    (False, True, True)
    """
    name, operator, value = condition
    if name not in bounds:
        return True
    least, greatest = bounds[name]
    if least != least or greatest != greatest:
        # Some writers take NaN for a bound.
        return True
    try:
        if operator == "in":
            # Statistics ignore NaN, and of nulls only their number is known.
            return any(item != item or least <= item <= greatest for item in _like(least, value))
        (value,) = _like(least, [value])
        match operator:
            case "==" | "=":
                return bool(least <= value <= greatest)
            case "<":
                return bool(least < value)
            case "<=":
                return bool(least <= value)
            case ">":
                return bool(greatest > value)
            case ">=":
                return bool(greatest >= value)
    # Incomparable values, such as a time with a zone and one without.
    except TypeError:
        pass
    # NaN, which statistics ignore, differs from any value.
    return True


def _like(bound: Any, values: Sequence[Any]) -> list[Any]:
    # Return NumPy's values as Python's, which compare exactly: NumPy would round Python's numbers to its own first.
    return [_python_value(value, bound) if isinstance(value, np.generic) else value for value in values]


def _python_value(value: Any, bound: Any) -> Any:
    if value.dtype.kind != "M":
        if value.dtype.kind == "m":
            raise TypeError("durations have no bounds")
        return value.item() if value.dtype.kind in "biuf" else value
    unit = "us" if isinstance(bound, datetime.datetime) else "D"
    exact = value.astype(f"datetime64[{unit}]")
    if not exact == value:
        raise TypeError(f"{value} is not a whole number of {unit}")
    if unit == "us" and bound.tzinfo is not None:
        return exact.item().replace(tzinfo=datetime.UTC)
    return exact.item()
