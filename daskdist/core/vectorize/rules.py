"""Operations on columns: for each NumPy operation on one array, the operation that does the same to every row.

Each is tested once for each dtype, shape and memory layout (`daskdist.core.vectorize.proof`), so a rule may be wrong
for some of them. It must not depend on values, unless it raises `Flagged` for the values that matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from typing import Any, Final

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from daskdist.core.to_numpy import is_rounded
from daskdist.core.vectorize.tracer import (
    KINDS,
    NAMES,
    Flagged,
    Rule,
    Rules,
    Trace,
    Tracer,
    column_of,
    holds_tracer,
    row_of,
    traced_bounds,
)

# The names of NumPy's elementwise ufuncs; ufuncs that users create are not among them.
_UFUNC_NAMES: Final = """
    absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_count bitwise_or bitwise_xor
    cbrt ceil conjugate copysign cos cosh deg2rad degrees divide divmod equal exp exp2 expm1 fabs float_power floor
    floor_divide fmax fmin fmod frexp gcd greater greater_equal heaviside hypot invert isfinite isinf isnan isnat lcm
    ldexp left_shift less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor maximum minimum modf multiply negative nextafter not_equal positive power rad2deg radians reciprocal
    remainder right_shift rint sign signbit sin sinh spacing sqrt square subtract tan tanh trunc
"""
UFUNCS: Final[dict[Any, str]] = {getattr(np, name): name for name in _UFUNC_NAMES.split() if hasattr(np, name)}
_REDUCED: Final[dict[Any, str]] = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_and: "all",
    np.logical_or: "any",
}

# Operations whose result is a zero of either sign if both operands are zeros.
_EITHER_ZERO: Final = frozenset({"maximum", "minimum", "fmax", "fmin", "clip", "max", "min"})
# Operations whose result depends on the sign of a NaN, and so on how that was computed.
_SIGN_OF_NAN: Final = frozenset({"signbit", "copysign"})


_NO_FLOAT: Final = np.dtype(bool)

# Operations with rounded results, which may differ between NumPy's loops.
_ROUNDED_NAMES: Final = """
    arccos arccosh arcsin arcsinh arctan arctan2 arctanh cbrt cos cosh exp exp2 expm1 float_power hypot log log10 log1p
    log2 logaddexp logaddexp2 power sin sinh tan tanh
"""
ROUNDED: Final = frozenset(_ROUNDED_NAMES.split())


def _is_place(part: Any) -> bool:
    return isinstance(part, (int, np.integer)) and not isinstance(part, bool) and not holds_tracer(part)


def _like(trace: Trace, x: Any, name: str) -> Tracer:
    if type(x) is not Tracer:
        raise trace.fail(f"it calls {name} with a value where an option is expected")
    return x


# --- elementwise operations ---


def _check_values(trace: Trace, name: str, columns: list[Any], result: Any, *, adds_up: bool = False) -> None:
    if trace.prove is None:
        return
    floats = [column for column in columns if isinstance(column, (np.ndarray, np.floating))]
    floats = [column for column in floats if column.dtype.kind == "f"]
    floats += [np.float64(column) for column in columns if type(column) is float]
    if name in _EITHER_ZERO and getattr(result, "dtype", None) is not None and result.dtype.kind == "f":
        for column in floats:
            if not (result != 0).all() and bool(((column == 0) & np.signbit(column)).any()):
                raise Flagged(f"it calls {name} on zeros of both signs")
    if name in _SIGN_OF_NAN and any(bool(np.isnan(column).any()) for column in floats):
        raise Flagged(f"it calls {name} on NaN")
    # NumPy's loops for one row and for many choose different ones of several NaN.
    may_choose = (adds_up or len(floats) > 1) and any(map(_has_nan, result if type(result) is tuple else [result]))
    if may_choose and _have_unlike_nans(np.broadcast_arrays(*floats), adds_up=adds_up):
        raise Flagged(f"it calls {name} on NaN of several signs")


def _has_nan(array: Any) -> bool:
    return getattr(array, "dtype", _NO_FLOAT).kind == "f" and bool(np.isnan(array).any())


def _have_unlike_nans(operands: Sequence[Any], *, adds_up: bool) -> bool:
    """Return whether two NaN differ in their bits: at one place of operands, or with ``adds_up`` in one row of one."""
    bits = [np.where(np.isnan(column), column.astype(np.float64).view(np.uint64), 0) for column in operands]
    if adds_up:
        rows = bits[0].reshape(len(bits[0]), -1)
        return bool(((rows != 0) & (rows != rows.max(axis=1, keepdims=True))).any())
    return any(bool(((a != 0) & (b != 0) & (a != b)).any()) for a, b in combinations(bits, 2))


def _elementwise(function: Callable[..., Any], name: str) -> Rule:
    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if holds_tracer(list(options.values())):
            raise trace.fail(f"it calls {name} with a value where an option is expected")
        columns = trace.aligned(args)
        if name in ROUNDED:
            columns = _next_to_each_other(trace, name, args, columns)
        result = function(*columns, **options)
        _check_values(trace, name, columns, result)
        return result

    return rule


def _next_to_each_other(trace: Trace, name: str, args: tuple[Any, ...], columns: list[Any]) -> list[Any]:
    """Return columns for which NumPy uses the same loop as for rows that are contiguous in memory.

    Raises
    ------
    NotVectorisable
        Rows are not contiguous, or differ in length between operands.
    """
    if name in ("power", "float_power"):
        _check_power(trace, args)
    rows = [row_of(arg) for arg in args if type(arg) is Tracer]
    rows += [row for row in args if type(row) is np.ndarray]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1 or not all(row.flags.c_contiguous for row in rows if isinstance(row, np.ndarray)):
        raise trace.fail(f"it calls {name}, which may be rounded otherwise for many rows in this layout")
    return [np.ascontiguousarray(column) if type(column) is np.ndarray else column for column in columns]


def _check_power(trace: Trace, args: tuple[Any, ...]) -> None:
    # NumPy has a shortcut for squares and roots if the exponent is a scalar.
    is_float = any(getattr(arg, "dtype", np.dtype(type(arg))).kind == "f" for arg in args)
    if is_float and (type(args[1]) is Tracer or np.ndim(args[1])):
        raise trace.fail("it takes powers that are rounded otherwise for many; np.power(x, number) is not")


# Operator that checks overflow for NumPy scalars -> the bounds of its result.
_BOUNDS: Final[dict[Any, Callable[..., list[int]]]] = {
    operator.add: lambda a, b: [a[0] + b[0], a[1] + b[1]],
    operator.sub: lambda a, b: [a[0] - b[1], a[1] - b[0]],
    operator.mul: lambda a, b: [left * other for left in a for other in b],
    operator.neg: lambda a: [-a[0], -a[1]],
    operator.abs: lambda a: [abs(a[0]), abs(a[1]), 0 if a[0] < 0 < a[1] else abs(a[0])],
}


def _arithmetic(function: Callable[..., Any], name: str) -> Rule:
    on_columns = _elementwise(function, name)

    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "power" and type(args[0]) is Tracer and not args[0].ndim and args[0].dtype.kind == "f":
            raise trace.fail("it takes powers that are rounded otherwise for many; np.power(x, number) is not")
        result = on_columns(trace, args, options)
        if function in _BOUNDS and trace.prove is not None and result.ndim == 1 and result.dtype.kind in "iu":
            _check_overflow(trace, function, args, result)
        return result

    return rule


def _check_overflow(trace: Trace, function: Any, args: tuple[Any, ...], result: Any) -> None:
    # NumPy warns about integer overflow for scalars, but not for arrays.
    if np.geterr()["over"] == "ignore":
        return
    limits = np.iinfo(result.dtype)
    # Derived bounds may be too wide; then compute exact ones.
    for is_exact in (False, True):
        bounds = _BOUNDS[function](*[_bounds_of(arg, is_exact=is_exact) for arg in args])
        if min(bounds) >= limits.min and max(bounds) <= limits.max:
            trace.bounds = min(bounds), max(bounds)
            return
    raise Flagged(f"an integer may not fit {result.dtype}")


def _bounds_of(value: Any, *, is_exact: bool) -> tuple[int, int]:
    if type(value) is not Tracer:
        return int(value), int(value)
    return traced_bounds(value, is_exact=is_exact)


def _where(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if len(args) != 3 or options:
        raise trace.fail("it asks for the places where something holds")
    return np.where(*trace.aligned(args))


def _clip(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    names = {"a_min": 1, "a_max": 2, "min": 1, "max": 2}
    operands = [*args, None, None][:3]
    if len(args) > 3 or options.keys() - names.keys():
        raise trace.fail("it calls clip with options for which there is no rule")
    for name, value in options.items():
        operands[names[name]] = value
    return _elementwise(np.clip, "clip")(trace, tuple(operands), {})


def _isclose(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if len(args) != 2 or holds_tracer(list(options.values())) or options.keys() - {"rtol", "atol", "equal_nan"}:
        raise trace.fail("it calls isclose with options for which there is no rule")
    return np.isclose(*trace.aligned(args), **options)


def _by_itself(function: Callable[..., Any], *allowed: str) -> Rule:
    # The first argument is a tracer, all others are constants.
    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x, *constants = args
        if type(x) is not Tracer or holds_tracer([*constants, *options.values()]) or options.keys() - set(allowed):
            raise trace.fail(f"it calls {function.__name__} with options for which there is no rule")
        return function(column_of(x), *constants, **options)

    return rule


def _isin(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if len(args) == 2 and type(args[0]) is Tracer and not holds_tracer(args[1]):
        x, wanted = args[0], np.asarray(args[1])
        if wanted.dtype.kind in "iuf":
            common = np.result_type(x.dtype, wanted.dtype)
            # NumPy compares a few values one by one, and many by sorting them, as floats if these have both dtypes.
            if is_rounded(np.array([np.iinfo(x.dtype).max - 1] if x.dtype.kind in "iu" else [], x.dtype), common):
                raise trace.fail(f"it calls isin with {x.dtype} and {wanted.dtype}, which rounds many in another way")
            if is_rounded(wanted, common):
                raise trace.fail(f"it calls isin with integers that {common} does not have")
    return _by_itself(np.isin)(trace, args, options)


def _astype(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if len(args) + ("dtype" in options) != 2 or options.keys() - {"dtype", "copy"}:
        raise trace.fail("it calls astype with options for which there is no rule")
    dtype = np.dtype(args[1] if len(args) == 2 else options["dtype"])
    if dtype.kind not in KINDS:
        raise trace.fail(f"it makes {dtype} of a value")
    return column_of(args[0]).astype(dtype)


# --- reductions, and other operations along an axis ---


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes of a column for the axes of an element; None means all."""
    axes = range(ndim) if axis is None else normalize_axis_tuple(axis, ndim)
    return tuple([number + 1 for number in axes])


def _named(trace: Trace, name: str, args: tuple[Any, ...], options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the arguments after the first by name, without omitted ones.

    Raises
    ------
    NotVectorisable
        There are other arguments, or one is a tracer.
    """
    options_by_name = {**dict(zip(names, args[1:], strict=False)), **options}
    if len(args) > len(names) + 1 or options.keys() - set(names) or holds_tracer(list(options_by_name.values())):
        raise trace.fail(f"it calls {name} with {', '.join(options) or 'a value'}, for which there is no rule")
    return options_by_name


def _rows_apart(column: Any) -> Any:
    """Return a column with the values of each row contiguous, in their order in memory.

    NumPy iterates over the axis with the smallest stride first, which must be an axis within a row.
    """
    apart = abs(column.strides[0])
    if column.ndim == 1 or apart >= max(map(abs, column.strides[1:])):
        return column
    axes = [0, *sorted(range(1, column.ndim), key=lambda axis: -abs(column.strides[axis]))]
    return np.ascontiguousarray(column.transpose(axes)).transpose(np.argsort(axes))


def _reduction(function: Callable[..., Any], name: str, axis: int | None = None) -> Rule:
    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x = _like(trace, args[0], name)
        if len(args) > 2:
            raise trace.fail(f"it calls {name} with {len(args)} arguments, for which there is no rule")
        options_by_name = _named(trace, name, args, options, "axis", "keepdims", "dtype", "ddof")
        column, dtype = _rows_apart(column_of(x)), options_by_name.get("dtype")
        if dtype is not None and (x.dtype.kind == "f" or np.dtype(dtype).kind == "f") and np.dtype(dtype) != x.dtype:
            raise trace.fail(f"it calls {name} with dtype, for which there is no rule")
        axes = _axes(options_by_name.get("axis", axis), x.ndim)
        number = prod([x.shape[axis - 1] for axis in axes])
        if not x.size or (name in ("std", "var") and number <= options_by_name.get("ddof", 0)):
            raise trace.fail(f"it calls {name} on too few values")
        if name in ("mean", "std", "var") and x.dtype.kind != "f":
            # NumPy converts integers to floats in pieces of at most 8,192.
            if x.ndim > 1 or x.size > 8192:
                raise trace.fail(f"it calls {name} on many integers, which are added up in another order")
            column = column.astype(np.float64)
        elif x.dtype == np.float16 and name in ("mean", "std", "var"):
            raise trace.fail(f"it calls {name} on half-precision numbers, which is rounded otherwise for many")
        options_by_name["axis"] = axes
        result = function(column, **options_by_name)
        _check_values(trace, name, [column], result, adds_up=True)
        return result

    return rule


def _place(function: Callable[..., Any]) -> Rule:
    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x = _like(trace, args[0], function.__name__)
        axis = _named(trace, function.__name__, args, options, "axis").get("axis")
        column = column_of(x).reshape(trace.num_rows, -1) if axis is None or not x.ndim else column_of(x)
        return function(column, axis=1 if axis is None or not x.ndim else _axes(axis, x.ndim)[0])

    return rule


def _along(function: Callable[..., Any], default: int | None) -> Rule:
    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x = _like(trace, args[0], function.__name__)
        axis = _named(trace, function.__name__, args, options, "axis").get("axis", default)
        column = _rows_apart(column_of(x))
        column = column.reshape(trace.num_rows, -1) if axis is None else column
        result = function(column, axis=1 if axis is None else _axes(axis, x.ndim)[0])
        _check_values(trace, function.__name__, [column], result, adds_up=True)
        return result

    return rule


# --- shapes ---


def _index(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    x, key = args
    parts = key if type(key) is tuple else (key,)
    lists = [part for part in parts if isinstance(part, (list, np.ndarray))]
    numbers = [part for part in parts if _is_place(part)]
    slices = [part for part in parts if part is None or part is Ellipsis or isinstance(part, slice)]
    # With several index arrays, NumPy has special rules for the order of axes.
    if len(parts) != len(lists) + len(numbers) + len(slices) or len(lists) > 1 or (lists and numbers):
        raise trace.fail("it looks up places along several axes at once")
    return column_of(x)[(slice(None), *parts)]


def _reshape(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    x, *shape = args
    shape = options.get("shape", shape)
    new_shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if options.keys() - {"shape", "order"} or options.get("order", "C") != "C" or holds_tracer(new_shape):
        raise trace.fail(f"it reshapes in order {options.get('order')}")
    if not all(map(_is_place, new_shape)):
        raise trace.fail("it reshapes in a way for which there is no rule")
    if -1 in new_shape:
        rest = 1
        for size in new_shape:
            rest *= size
        new_shape[new_shape.index(-1)] = x.size // -rest if rest else 0
    return column_of(x).reshape(trace.num_rows, *new_shape)


def _ravel(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if _named(trace, "ravel", args, options, "order").get("order", "C") != "C":
        raise trace.fail("it calls ravel in another order than C")
    return column_of(args[0]).reshape(trace.num_rows, args[0].size)


def _transpose(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    x, *axes = args
    axes = [options["axes"]] if "axes" in options else axes
    if options.keys() - {"axes"} or holds_tracer(axes):
        raise trace.fail("it transposes in a way for which there is no rule")
    axis_order = axes[0] if len(axes) == 1 and not _is_place(axes[0]) else axes
    order = _axes(tuple(axis_order), x.ndim) if axis_order else _axes(None, x.ndim)[::-1]
    return column_of(x).transpose(0, *order)


def _swapaxes(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    options_by_name = _named(trace, "swapaxes", args, options, "axis1", "axis2")
    (first,), (second,) = _axes(options_by_name["axis1"], args[0].ndim), _axes(options_by_name["axis2"], args[0].ndim)
    return column_of(args[0]).swapaxes(first, second)


def _squeeze(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    x = args[0]
    axis = _named(trace, "squeeze", args, options, "axis").get("axis")
    axes = [place for place, size in enumerate(x.shape) if size == 1] if axis is None else axis
    return np.squeeze(column_of(x), _axes(axes, x.ndim))


def _expand_dims(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    axis = _named(trace, "expand_dims", args, options, "axis")["axis"]
    number = len(axis) if isinstance(axis, (tuple, list)) else 1
    return np.expand_dims(column_of(args[0]), _axes(axis, args[0].ndim + number))


def _copy(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    # Tracers are immutable, so no copy is needed; the trace arranges the rows like those of a copy.
    return column_of(_like(trace, args[0], "copy"))


def _joined(function: Callable[..., Any], *, adds_axis: bool) -> Rule:
    def rule(trace: Trace, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        axis = _named(trace, function.__name__, args, options, "axis").get("axis", 0)
        values = [trace.operand(item) for item in args[0]]
        (place,) = _axes(axis, values[0].ndim + adds_axis)
        return function([trace.column(item) for item in values], axis=place)

    return rule


# --- lookup of the rules ---

_METHODS: Final[dict[str, Rule]] = {
    "sum": _reduction(np.sum, "sum"),
    "prod": _reduction(np.prod, "prod"),
    "mean": _reduction(np.mean, "mean"),
    "std": _reduction(np.std, "std"),
    "var": _reduction(np.var, "var"),
    "min": _reduction(np.min, "min"),
    "max": _reduction(np.max, "max"),
    "any": _reduction(np.any, "any"),
    "all": _reduction(np.all, "all"),
    "argmin": _place(np.argmin),
    "argmax": _place(np.argmax),
    "cumsum": _along(np.cumsum, None),
    "cumprod": _along(np.cumprod, None),
    "clip": _clip,
    "round": _by_itself(np.round, "decimals"),
    "astype": _astype,
    "reshape": _reshape,
    "ravel": _ravel,
    "flatten": _ravel,
    "transpose": _transpose,
    "swapaxes": _swapaxes,
    "squeeze": _squeeze,
    "copy": _copy,
}

# Functions of NumPy with the names of methods have the rules of these.
_ALSO_FUNCTIONS: Final = _METHODS.keys() - {"astype", "flatten"}
FUNCTIONS: Final[dict[Any, Rule]] = {
    **{getattr(np, name): _METHODS[name] for name in _ALSO_FUNCTIONS},
    np.count_nonzero: _reduction(np.count_nonzero, "count_nonzero"),
    np.sort: _along(np.sort, -1),
    np.argsort: _along(np.argsort, -1),
    np.where: _where,
    np.isclose: _isclose,
    np.isin: _isin,
    np.digitize: _by_itself(np.digitize, "right"),
    np.nan_to_num: _by_itself(np.nan_to_num, "nan", "posinf", "neginf"),
    np.expand_dims: _expand_dims,
    np.stack: _joined(np.stack, adds_axis=True),
    np.concatenate: _joined(np.concatenate, adds_axis=False),
}

_OPERATORS: Final[dict[Any, Rule]] = {
    function: _arithmetic(function, name) for function, name in NAMES.items() if name != "matmul"
}
_ON_UFUNCS: Final = {ufunc: _elementwise(ufunc, name) for ufunc, name in UFUNCS.items()}
_ON_REDUCE: Final = {ufunc: _reduction(ufunc.reduce, name, axis=0) for ufunc, name in _REDUCED.items()}


_OF_SHAPES: Final = frozenset({np.shape, np.ndim, np.size, np.zeros_like, np.ones_like, np.full_like})


RULES: Final = Rules(
    _METHODS, FUNCTIONS, _OPERATORS, _ON_UFUNCS, _ON_REDUCE, index=_index, of_shapes=_OF_SHAPES, rounded=ROUNDED
)
