"""Tests of operations on made-up rows: whether one call for many rows is bitwise identical to a call for each.

NumPy has several loops for most operations, chosen by the processor, the dtype, the shape and the strides, and they may
round differently. So each operation is tested in each memory layout before its first use in a process: all rows at
once, and each row by itself, as in the loop over elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from daskdist.core.vectorize.tracer import (
    KINDS,
    Flagged,
    NotVectorisable,
    Rule,
    Rules,
    Trace,
    Tracer,
    column_of,
    row_of,
)

# The number of values to test if results are exact or depend on the order of sums only, and if they are rounded: then
# one in a thousand values may be rounded differently in another loop. Long rows are tested with at least a few rows.
_NUM_VALUES: Final = 256
_NUM_ROUNDED: Final = 8192
_FEWEST_ROWS: Final = 5
# The number of results to remember.
_REMEMBERED: Final = 4096
# The numbers of a list or array to test values next to.
_NUM_CONSTANTS: Final = 32
# Integers at which conversions round or overflow.
_LIMITS: Final = [2**24 + 1, 2**31, 2**53 - 1, 2**53 + 1, 2**62 + 1, 2**63, 2**64 - 1]
_LARGEST: Final = 1e300
_PROVEN: Final[dict[Any, str | None]] = {}

_FLOATS: Final = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, np.inf, -np.inf, np.nan, 1e-310, -1e-310, 1e-40, 6e4, 1e38, 1e300]


def problem(
    rules: Rules, name: str, native: Callable[..., Any], rule: Rule, args: Any, options: dict[str, Any]
) -> str | None:
    """Return the reason why an operation must not be done for many rows at once, as a clause; None if it may.

    Parameters
    ----------
    rules
        All rules.
    name
        The name of the operation in messages.
    native
        The operation on one element.
    rule
        The operation on columns.
    args, options
        The arguments; tracers have the dtypes, shapes and layouts.
    """
    key = (name, rule, _signature(args, name), _signature(options, name))
    if key in _PROVEN:
        return _PROVEN[key]
    try:
        with np.errstate(all="ignore"):
            reason = _tried(rules, name, native, rule, args, options)
    except (NotVectorisable, Flagged) as error:
        reason = str(error)
    except Exception as error:
        reason = f"it calls {name}, which raised {type(error).__name__} when it was tried out"
    if len(_PROVEN) >= _REMEMBERED:
        _PROVEN.clear()
    _PROVEN[key] = reason
    return reason


def _signature(value: Any, name: str) -> Any:
    """Return a hashable value of everything that NumPy's choice of a loop depends on."""
    if type(value) is Tracer:
        return "column", value.dtype, column_of(value).shape[1:], column_of(value).strides
    if isinstance(value, (list, tuple)):
        return type(value), *[_signature(item, name) for item in value]
    if isinstance(value, dict):
        return tuple([(key, _signature(item, name)) for key, item in value.items()])
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.strides
    if isinstance(value, (float, np.floating)) and name not in ("power", "float_power"):
        return type(value)
    return type(value), repr(value)


def _tried(rules: Rules, name: str, native: Callable[..., Any], rule: Rule, args: Any, options: Any) -> str | None:
    size = max([1, *[tracer.size for tracer in _tracers([args, options])]])
    num_rows = max(_FEWEST_ROWS, (_NUM_ROUNDED if name in rules.rounded else _NUM_VALUES) // size)
    trace = Trace(num_rows, rules, None)
    # A fixed seed, so that the decision is the same in similar processes.
    made_up = _MadeUp(trace, np.random.default_rng(0), name, _constants([args, options]))
    args, options = made_up.like(args), made_up.like(options)
    many, flags_of_many = _flags(lambda: rule(trace, args, options))
    rows_of_args, rows_of_options = _rows(args, num_rows), _rows(options, num_rows)
    one_by_one, flags_of_each = _flags(
        lambda: [native(*row, **named) for row, named in zip(rows_of_args, rows_of_options, strict=True)]
    )
    is_tuple = type(many) is tuple
    for place, column in enumerate(many if is_tuple else (many,)):
        rows = [argument[place] if is_tuple else argument for argument in one_by_one]
        if column.dtype.kind not in KINDS:
            return f"it makes {column.dtype} of a value"
        if name in rules.rounded and column.dtype == np.float16:
            # Too few of their values differ to find these by trial, and NaN may have another sign.
            return f"it calls {name} on half-precision numbers, which may be rounded otherwise for many"
        if any(row.dtype != column.dtype or row.shape != column.shape[1:] for row in rows):
            return f"it calls {name}, which makes another dtype or shape of many rows than of one"
        # NumPy's `stack` makes an array of each number, which takes 20 times as long.
        if not same_bits(column, np.array(rows, column.dtype)):
            return f"it calls {name}, which is rounded otherwise for many rows in this layout"
        if column.dtype.kind in "iu" and np.ndim(rows[0]) == 0:
            # Integer overflow is found by bounds, not by this flag.
            flags_of_each.discard("overflow")
    missing = flags_of_each - flags_of_many
    return f"it calls {name}, which warns of {min(missing)} for one row and not for many" if missing else None


def _tracers(value: Any) -> list[Tracer]:
    if type(value) is Tracer:
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tracer for item in values for tracer in _tracers(item)]


def _constants(value: Any) -> list[Any]:
    """Return the numbers in arguments that are the same for all rows, the first ones of arrays and lists."""
    if type(value) is Tracer:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, np.ndarray):
        value = value.ravel()[:_NUM_CONSTANTS].tolist()
    if isinstance(value, (list, tuple)):
        return [number for item in value[:_NUM_CONSTANTS] for number in _constants(item)]
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, np.timedelta64)
    return [value] if is_number and -_LARGEST < value < _LARGEST else []


def _flags(function: Callable[[], Any]) -> tuple[Any, set[str]]:
    flags: set[str] = set()
    with np.errstate(all="call", call=lambda kind, flag: flags.add(kind)):
        return function(), flags


def _rows(value: Any, num_rows: int) -> Sequence[Any]:
    """Return a value for each row, with the row of each tracer."""
    if type(value) is Tracer:
        column = column_of(value)
        is_array = isinstance(row_of(value), np.ndarray) and not value.ndim
        return [column[index : index + 1].reshape(()) for index in range(num_rows)] if is_array else list(column)
    if isinstance(value, (list, tuple)) and value:
        columns = zip(*[_rows(item, num_rows) for item in value], strict=True)
        return [type(value)(row) for row in columns]
    if isinstance(value, dict) and value:
        columns = zip(*[_rows(item, num_rows) for item in value.values()], strict=True)
        return [dict(zip(value, row, strict=True)) for row in columns]
    return [value] * num_rows


class _MadeUp:
    """Columns of made-up values with the memory layout of real ones."""

    def __init__(self, trace: Trace, rng: np.random.Generator, name: str, constants: Sequence[int | float]) -> None:
        self.trace = trace
        self.rng = rng
        self.name = name
        self.constants = constants

    def like(self, value: Any) -> Any:
        if type(value) is Tracer:
            column = self.laid_out(column_of(value))
            column[...] = self.values(column.shape, column.dtype)
            return Tracer(self.trace, column, row_of(value))
        if isinstance(value, (list, tuple)):
            return type(value)([self.like(item) for item in value])
        return {key: self.like(item) for key, item in value.items()} if isinstance(value, dict) else value

    def laid_out(self, column: Any) -> Any:
        shape = (self.trace.num_rows, *column.shape[1:])
        reach = [(size - 1) * stride for size, stride in zip(shape, column.strides, strict=True)]
        before, after = -sum(min(step, 0) for step in reach), sum(max(step, 0) for step in reach)
        memory = np.empty(before + after + column.itemsize, np.uint8)
        return np.ndarray(shape, column.dtype, memory, before, column.strides)

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        rng, number = self.rng, int(np.prod(shape))
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(bool)
        if dtype.kind != "f":
            return self._integers(number, dtype).reshape(shape)
        kinds = [
            rng.standard_normal(number) * 20,
            rng.uniform(-1, 1, number),
            rng.standard_normal(number) * 10 ** rng.uniform(-30, 30, number),
            rng.integers(-9, 10, number).astype(float),
            rng.choice(_FLOATS, number),
        ]
        values = np.choose(rng.choice(5, number, p=[0.35, 0.3, 0.1, 0.15, 0.1]), kinds)
        if self.constants:
            near = np.array(list(map(float, self.constants)))
            near = np.concatenate([near, np.nextafter(near, -np.inf), np.nextafter(near, np.inf)])
            values = np.where(rng.random(number) < 0.1, rng.choice(near, number), values)
        if self.name in ("sum", "mean", "std", "var", "cumsum", "prod", "cumprod"):
            # Few special values, as they would dominate the result.
            values = np.where(rng.random(number) < 0.02, values, kinds[0] if "prod" not in self.name else kinds[1])
        if self.name in ("maximum", "minimum", "fmax", "fmin", "clip", "max", "min"):
            values = values + 0.0
        if self.name in ("signbit", "copysign"):
            values = np.nan_to_num(values)
        return values.astype(dtype).reshape(shape)

    def _integers(self, number: int, dtype: np.dtype[Any]) -> Any:
        rng = self.rng
        bits = rng.integers(0, 256, number * dtype.itemsize, np.uint8).view(f"i{dtype.itemsize}")
        if self.name == "power":
            return rng.integers(0, 7, number).astype(dtype)
        small = rng.integers(-9 if dtype.kind != "u" else 0, 10, number).astype(bits.dtype)
        values = np.where(rng.random(number) < 0.5, bits, small).view(dtype)
        if dtype.kind not in "iu":
            return values
        limits = np.iinfo(dtype)
        near = [int(constant) + by for constant in self.constants for by in (-1, 0, 1)]
        near = [
            number for number in (*_LIMITS, *[-limit for limit in _LIMITS], *near) if limits.min <= number <= limits.max
        ]
        return np.where(rng.random(number) < 0.2, rng.choice(np.array(near, dtype), number), values) if near else values


def same_bits(array: Any, other: Any) -> bool:
    """Return whether two arrays are bitwise identical; all NaN count as identical."""
    if array.dtype != other.dtype or array.shape != other.shape:
        return False
    if array.dtype.kind in "mM":
        array, other = array.view(np.int64), other.view(np.int64)
    if array.dtype.kind != "f":
        return bool((array == other).all())
    is_nan = np.isnan(array)
    alike = (array == other) & (np.signbit(array) == np.signbit(other))
    return bool((alike | (is_nan & np.isnan(other))).all())
