"""Operations tried out on made-up rows: whether one for many rows gives what one for each gives, to the last bit.

NumPy has several loops for most operations, and which one runs depends on the processor, the dtype, the shape and
the distances of values in memory. They may round differently. So an operation is tried out in each layout before it
is first used in this process: all rows at once, and each row by itself, as the loop over elements has it.
"""

from __future__ import annotations

from collections.abc import Callable
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

# Values that are tried where results are exact, or depend on the order of sums only; and where they are rounded, for
# of a thousand values one may be rounded otherwise in another loop of NumPy's. Of long rows there are a few at least.
_NUM_VALUES: Final = 256
_NUM_ROUNDED: Final = 8192
_FEWEST_ROWS: Final = 5
# Results that are remembered.
_REMEMBERED: Final = 4096
_PROVEN: Final[dict[Any, str | None]] = {}

_FLOATS: Final = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, np.inf, -np.inf, np.nan, 1e-310, -1e-310, 1e-40, 6e4, 1e38, 1e300]


def problem(
    rules: Rules, name: str, native: Callable[..., Any], rule: Rule, args: Any, options: dict[str, Any]
) -> str | None:
    """Return why an operation may not be done for many rows at once, as a clause, or None.

    Parameters
    ----------
    rules
        All rules.
    name
        What messages call the operation.
    native
        The operation on one element.
    rule
        The operation on columns.
    args, options
        The arguments; tracers tell the dtypes, shapes and layouts.
    """
    key = (name, rule, _signature(args, name), _signature(options, name))
    if key in _PROVEN:
        return _PROVEN[key]
    try:
        with np.errstate(all="ignore"):
            found = _tried(rules, name, native, rule, args, options)
    except (NotVectorisable, Flagged) as error:
        found = str(error)
    except Exception as error:
        found = f"it calls {name}, which raised {type(error).__name__} when it was tried out"
    if len(_PROVEN) >= _REMEMBERED:
        _PROVEN.clear()
    _PROVEN[key] = found
    return found


def _signature(value: Any, name: str) -> Any:
    """Return what the way that NumPy computes depends on, hashable."""
    if type(value) is Tracer:
        return "column", value.dtype, column_of(value).shape[1:], column_of(value).strides
    if isinstance(value, (list, tuple)):
        return type(value), *[_signature(each, name) for each in value]
    if isinstance(value, dict):
        return tuple([(key, _signature(each, name)) for key, each in value.items()])
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.strides
    if isinstance(value, (float, np.floating)) and name not in ("power", "float_power"):
        return type(value)
    return type(value), repr(value)


def _tried(rules: Rules, name: str, native: Callable[..., Any], rule: Rule, args: Any, options: Any) -> str | None:
    size = max([1, *[each.size for each in _tracers([args, options])]])
    num_rows = max(_FEWEST_ROWS, (_NUM_ROUNDED if rules.is_rounded(name) else _NUM_VALUES) // size)
    trace = Trace(num_rows, rules, None)
    # The same numbers each time, so that what is decided is the same in every process of a kind.
    made_up = _MadeUp(trace, np.random.default_rng(0), name)
    args, options = made_up.like(args), made_up.like(options)
    many, flags_of_many = _flags(lambda: rule(trace, args, options))
    one_by_one, flags_of_each = _flags(
        lambda: [native(*_row(args, index), **_row(options, index)) for index in range(num_rows)]
    )
    is_tuple = type(many) is tuple
    for place, column in enumerate(many if is_tuple else (many,)):
        rows = [each[place] if is_tuple else each for each in one_by_one]
        if column.dtype.kind not in KINDS:
            return f"it makes {column.dtype} of a value"
        if any(row.dtype != column.dtype or row.shape != column.shape[1:] for row in rows):
            return f"it calls {name}, which makes another dtype or shape of many rows than of one"
        if not same_bits(column, np.stack(rows)):
            return f"it calls {name}, which is rounded otherwise for many rows in this layout"
        if column.dtype.kind in "iu" and np.ndim(rows[0]) == 0:
            # Overflow of integers is found from their bounds, not from this flag.
            flags_of_each.discard("overflow")
    missing = flags_of_each - flags_of_many
    return f"it calls {name}, which warns of {min(missing)} for one row and not for many" if missing else None


def _tracers(value: Any) -> list[Tracer]:
    if type(value) is Tracer:
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for each in values for found in _tracers(each)]


def _flags(function: Callable[[], Any]) -> tuple[Any, set[str]]:
    found: set[str] = set()
    with np.errstate(all="call", call=lambda kind, flag: found.add(kind)):
        return function(), found


def _row(value: Any, index: int) -> Any:
    if type(value) is Tracer:
        is_array = isinstance(row_of(value), np.ndarray) and not value.ndim
        return column_of(value)[index : index + 1].reshape(()) if is_array else column_of(value)[index]
    if isinstance(value, (list, tuple)):
        return type(value)([_row(each, index) for each in value])
    return {key: _row(each, index) for key, each in value.items()} if isinstance(value, dict) else value


class _MadeUp:
    """Columns of made-up values, in memory as given ones are."""

    def __init__(self, trace: Trace, rng: np.random.Generator, name: str) -> None:
        self.trace = trace
        self.rng = rng
        self.name = name

    def like(self, value: Any) -> Any:
        if type(value) is Tracer:
            column = self.laid_out(column_of(value))
            column[...] = self.values(column.shape, column.dtype)
            return Tracer(self.trace, column, row_of(value))
        if isinstance(value, (list, tuple)):
            return type(value)([self.like(each) for each in value])
        return {key: self.like(each) for key, each in value.items()} if isinstance(value, dict) else value

    def laid_out(self, column: Any) -> Any:
        shape = (self.trace.num_rows, *column.shape[1:])
        reach = [(size - 1) * stride for size, stride in zip(shape, column.strides, strict=True)]
        before, after = -sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
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
        if self.name in ("sum", "mean", "std", "var", "cumsum", "prod", "cumprod"):
            # Not too many that make all others count for nothing.
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
        return np.where(rng.random(number) < 0.5, bits, small).view(dtype)


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two arrays are the same to the last bit; every NaN is the same."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind in "mM":
        one, other = one.view(np.int64), other.view(np.int64)
    if one.dtype.kind != "f":
        return bool((one == other).all())
    is_nan = np.isnan(one)
    alike = (one == other) & (np.signbit(one) == np.signbit(other))
    return bool((alike | (is_nan & np.isnan(other))).all())
