"""Stand-ins for the arrays of an element: what is done to one of them is done to a whole column.

A function that is written for one element is called once with stand-ins in the place of its arrays. Each has the
shape and dtype of one element and holds all rows of a column, ``(num_rows, *shape)``. A NumPy function that is
given a stand-in looks up a rule, which does to each row what the function does to one. Whatever has no rule, or
could differ from row to row, ends the trace.

The rules keep to what NumPy computes alike, to the last bit, for one number and for many. Products of matrices,
which add up in another order, have none for that reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.lib.mixins import NDArrayOperatorsMixin

from daskdist.core.structure import as_array

# Numbers and times. Text and objects are other types as elements, and complex products are rounded otherwise.
KINDS: Final = "biufmM"


class NotVectorisable(Exception):  # noqa: N818 - a signal between layers
    """A function does what has no rule; the message says what, as a clause."""


class Trace:
    """One call of a function with stand-ins.

    Parameters
    ----------
    num_rows
        The length of all columns.
    narrow
        Whether Python numbers that it returns become int32 and float32, as in `as_array`.
    """

    __slots__ = ("failure", "names", "narrow", "num_rows")

    def __init__(self, num_rows: int, *, narrow: bool = False) -> None:
        self.num_rows = num_rows
        self.narrow = narrow
        self.failure: str | None = None
        # What was done, in order.
        self.names: list[str] = []

    def fail(self, reason: str) -> NotVectorisable:
        """The exception to raise. The trace has failed even where the function catches it."""
        self.failure = self.failure or reason
        return NotVectorisable(self.failure)

    def leaf(self, leaf: Any) -> Any:
        """All rows of one leaf of a result, by the rules of `as_array`."""
        if type(leaf) is StandIn:
            return np.ascontiguousarray(self.column(leaf))
        if isinstance(leaf, list) and _holds_stand_in(leaf):
            return self._stacked(leaf).astype(as_array(_sampled(leaf), narrow=self.narrow).dtype, copy=False)
        value = as_array(leaf, narrow=self.narrow)
        if not isinstance(value, (np.ndarray, np.generic)):
            raise self.fail(f"it returns a {type(leaf).__name__}")
        return np.ascontiguousarray(self.column(value))

    def column(self, value: Any) -> Any:
        """All rows of a stand-in, or of a constant."""
        if type(value) is not StandIn:
            return np.broadcast_to(value, (self.num_rows, *value.shape))
        if value._trace is not self:
            raise self.fail("it uses what an earlier call left behind")
        return value._column

    def operand(self, value: Any) -> Any:
        """A stand-in as it is, anything else as an array or scalar."""
        if type(value) is StandIn:
            return value
        if _holds_stand_in(value):
            raise self.fail("it makes an array of a list of values, as np.stack could for many rows")
        return np.asarray(value)[()]

    def aligned(self, operands: Sequence[Any]) -> list[Any]:
        """Operands that broadcast by row as those given do by element.

        Axes of length 1 go after the axis of rows. Constants need nothing: broadcasting starts at the last axis.
        Python's numbers are left as they are, for NumPy promotes them by rules of their own.
        """
        given = [each if type(each) in _AS_THEY_ARE else self.operand(each) for each in operands]
        ndim = max([each.ndim for each in given if type(each) not in _WITHOUT_AXES])
        return [self._widened(each, ndim) if type(each) is StandIn else each for each in given]

    def _widened(self, value: StandIn, ndim: int) -> Any:
        column = self.column(value)
        missing = ndim + 1 - column.ndim
        return column[(slice(None), *(None,) * missing)] if missing else column

    def made(self, column: Any, name: str) -> StandIn:
        """The stand-in for what a rule made."""
        if column.dtype.kind not in KINDS:
            raise self.fail(f"it makes {column.dtype} of a value")
        self.names.append(name)
        return StandIn(self, column)

    def _stacked(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return np.stack([self._stacked(each) for each in value], axis=1)
        return self.column(self.operand(value))


class StandIn(NDArrayOperatorsMixin):
    """An array of one element, as far as a function can tell; inside, that array of every row."""

    __slots__ = ("_column", "_trace")

    def __init__(self, trace: Trace, column: Any) -> None:
        self._trace = trace
        self._column = column

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        # So that isinstance(x, np.integer) is what it is of an element.
        return self.dtype.type if self._column.ndim == 1 else np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._column.shape[1:])

    @property
    def ndim(self) -> int:
        return int(self._column.ndim) - 1

    @property
    def dtype(self) -> Any:
        return self._column.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def T(self) -> StandIn:  # noqa: N802 - NumPy's name
        return _transpose(self)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"object of type '{self.dtype.type.__name__}' has no len()")
        return self.shape[0]

    def __iter__(self) -> Iterator[StandIn]:
        if not self.ndim:
            raise TypeError(f"'{self.dtype.type.__name__}' object is not iterable")
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> StandIn:
        parts = key if type(key) is tuple else (key,)
        if any(map(_holds_stand_in, parts)):
            raise self._trace.fail("it looks up a place that depends on the values")
        lists = [part for part in parts if isinstance(part, (list, np.ndarray))]
        numbers = [part for part in parts if _is_place(part)]
        slices = [part for part in parts if part is None or part is Ellipsis or isinstance(part, slice)]
        # With several of them NumPy has rules of its own for the order of axes.
        if len(parts) != len(lists) + len(numbers) + len(slices) or len(lists) > 1 or (lists and numbers):
            raise self._trace.fail("it looks up places along several axes at once")
        return _made(self, self._column[(slice(None), *parts)], "index")

    def __getattr__(self, name: str) -> Any:
        rule = METHODS.get(name)
        if rule is not None:
            return functools.partial(rule, self)
        if hasattr(self.__class__, name):
            raise self._trace.fail(_REFUSED["__array__"] if name.startswith("__array_") else f"it uses .{name}")
        raise AttributeError(f"'{self.__class__.__name__}' object has no attribute '{name}'")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        # Python changes a number, `x += 1`, by making another one.
        if "out" in options and (self.ndim or options.pop("out")[0] is not self):
            raise self._trace.fail("it changes an array in place")
        if method == "reduce":
            return _reduction(ufunc.reduce, ufunc.__name__)(*inputs, **{"axis": 0, **options})
        if method != "__call__" or ufunc.signature is not None or options.keys() - {"dtype"}:
            name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            with_options = f" with {', '.join(options)}" if options else ""
            raise self._trace.fail(f"it calls {name}{with_options}, for which there is no rule")
        return _elementwise(ufunc, ufunc.__name__, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        rule = FUNCTIONS.get(function)
        if rule is None:
            raise self._trace.fail(f"it calls {function.__name__}, for which there is no rule")
        return rule(*args, **options)

    def __pow__(self, other: Any) -> Any:
        if self.ndim and self.dtype != np.float16 and type(other) is not StandIn and np.ndim(other) == 0:
            # Arrays have shortcuts, such as for the root, that np.power lacks.
            return _made(self, self._column**other, "power")
        return _unless_rounded(np.power(self, other))

    def __ipow__(self, other: Any) -> Any:
        if self.ndim:
            raise self._trace.fail("it changes an array in place")
        return self**other

    def __rpow__(self, other: Any) -> Any:
        return _unless_rounded(np.power(other, self))


def _refusing(reason: str) -> Callable[..., Any]:
    def refuse(self: StandIn, *args: Any, **options: Any) -> Any:
        raise self._trace.fail(reason)

    return refuse


# What looks at the values, lets them out, or writes -> what a message calls it.
_REFUSED: Final = {
    "__bool__": "it asks for the truth of a value",
    "__contains__": "it asks for the truth of a value",
    "__int__": "it makes a Python number of a value",
    "__float__": "it makes a Python number of a value",
    "__complex__": "it makes a Python number of a value",
    "__round__": "it makes a Python number of a value",
    "__trunc__": "it makes a Python number of a value",
    "__floor__": "it makes a Python number of a value",
    "__ceil__": "it makes a Python number of a value",
    "__index__": "it looks up a place that depends on the values",
    "__hash__": "it asks for the hash of a value",
    "__str__": "it makes text of a value",
    "__repr__": "it makes text of a value",
    "__format__": "it makes text of a value",
    "__setitem__": "it writes to an array",
    "__delitem__": "it writes to an array",
    "__array__": "it calls np.array or the like on a value; np.stack and .astype have rules",
    "__reduce_ex__": "it copies or pickles a value",
}
for _name, _reason in _REFUSED.items():
    setattr(StandIn, _name, _refusing(_reason))

_AS_THEY_ARE: Final = frozenset({int, float, bool, type(None), StandIn})
_WITHOUT_AXES: Final = _AS_THEY_ARE - {StandIn}

# Of NumPy's loops for half precision, those that give one number what they give many.
_HALF_NAMES: Final = """
    add subtract multiply divide negative positive absolute square sqrt sign maximum minimum fmax fmin floor ceil
    trunc rint equal not_equal less less_equal greater greater_equal isnan isinf isfinite signbit copysign
    logical_and logical_or logical_not logical_xor where clip
"""
_HALF: Final = frozenset(_HALF_NAMES.split())


def _is_place(part: Any) -> bool:
    return isinstance(part, (int, np.integer)) and not isinstance(part, bool)


def _holds_stand_in(value: Any) -> bool:
    if type(value) is StandIn:
        return True
    if isinstance(value, slice):
        return _holds_stand_in([value.start, value.stop, value.step])
    return isinstance(value, (list, tuple)) and any(map(_holds_stand_in, value))


def _sampled(value: Any) -> Any:
    # The same list with zeros for stand-ins: what NumPy makes of it has the dtype.
    if type(value) is StandIn:
        return np.zeros(value.shape, value.dtype)[()]
    return [_sampled(each) for each in value] if isinstance(value, (list, tuple)) else value


def _trace_of(operands: Sequence[Any]) -> Trace:
    return next(each._trace for each in operands if type(each) is StandIn)


def _made(like: StandIn, column: Any, name: str) -> StandIn:
    return like._trace.made(column, name)


# --- rules of what looks at each number by itself ---


def _elementwise(function: Callable[..., Any], name: str, operands: Sequence[Any], options: Any) -> Any:
    trace = _trace_of(operands)
    columns = trace.aligned(operands)
    result = function(*columns, **options)
    if name not in _HALF and any(getattr(each, "dtype", None) == np.float16 for each in (*columns, result)):
        raise trace.fail(f"it calls {name} on half-precision numbers, which is rounded otherwise for many")
    if type(result) is tuple:
        return tuple([trace.made(each, name) for each in result])
    made = trace.made(result, name)
    if name in ("power", "float_power") and (type(operands[1]) is StandIn or np.ndim(operands[1])):
        # There is a shortcut for squares, taken where all exponents of a call are one number.
        return _unless_rounded(made)
    return made


def _unless_rounded(power: StandIn) -> StandIn:
    if power.dtype.kind == "f":
        raise power._trace.fail("it takes powers that are rounded otherwise for many; np.power(x, number) is not")
    return power


def _where(*operands: Any) -> Any:
    if len(operands) != 3:
        raise _trace_of(operands).fail("it asks for the places where something holds")
    return _elementwise(np.where, "where", operands, {})


def _clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    # The arguments' names are NumPy's.
    low, high = a_min if min is None else min, a_max if max is None else max
    return _elementwise(np.clip, "clip", (x, low, high), {})


def _isclose(x: Any, y: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return _elementwise(np.isclose, "isclose", (x, y), {"rtol": rtol, "atol": atol, "equal_nan": equal_nan})


def _by_itself(function: Callable[..., Any], *allowed: str) -> Callable[..., Any]:
    # The first argument is a stand-in, all others are constants.
    def rule(x: StandIn, *constants: Any, **options: Any) -> StandIn:
        if type(x) is not StandIn or _holds_stand_in([*constants, *options.values()]) or options.keys() - set(allowed):
            raise _trace_of([x, *constants, *options.values()]).fail(
                f"it calls {function.__name__} with options for which there is no rule"
            )
        return _made(x, function(x._column, *constants, **options), function.__name__)

    return rule


def _astype(x: StandIn, dtype: Any, *, copy: bool = True) -> StandIn:
    if np.dtype(dtype).kind not in KINDS:
        raise x._trace.fail(f"it makes {np.dtype(dtype)} of a value")
    # What becomes of a NaN that is made an integer is up to the processor.
    with np.errstate(invalid="raise"):
        return _made(x, x._column.astype(dtype), "astype")


# --- rules of reductions, and of what goes along an axis ---


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Axes of a column, of those of an element; None is all of them."""
    axes = range(ndim) if axis is None else normalize_axis_tuple(axis, ndim)
    return tuple([each + 1 for each in axes])


def _reduction(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def rule(x: StandIn, axis: Any = None, **options: Any) -> StandIn:
        column = x._column
        dtype = options.get("dtype")
        if options.keys() - {"keepdims", "dtype", "ddof"} or (
            dtype is not None and (x.dtype.kind == "f" or np.dtype(dtype).kind == "f") and np.dtype(dtype) != x.dtype
        ):
            raise x._trace.fail(f"it calls {name} with {', '.join(options)}, for which there is no rule")
        if name in ("mean", "std", "var") and x.dtype.kind != "f":
            # NumPy makes floats of them piece by piece, and a piece has at most 8,192.
            if x.ndim > 1 or x.size > 8192:
                raise x._trace.fail(f"it calls {name} on many integers, which are added up in another order")
            column = column.astype(np.float64)
        elif x.dtype == np.float16 and name in ("mean", "std", "var"):
            raise x._trace.fail(f"it calls {name} on half-precision numbers, which is rounded otherwise for many")
        return _made(x, function(column, axis=_axes(axis, x.ndim), **options), name)

    return rule


def _place(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: StandIn, axis: int | None = None) -> StandIn:
        column = x._column.reshape(x._trace.num_rows, -1) if axis is None or not x.ndim else x._column
        return _made(x, function(column, axis=1 if axis is None else _axes(axis, x.ndim)[0]), function.__name__)

    return rule


def _along(function: Callable[..., Any], default: int | None) -> Callable[..., Any]:
    def rule(x: StandIn, axis: int | None = default) -> StandIn:
        column = x._column.reshape(x._trace.num_rows, -1) if axis is None else x._column
        return _made(x, function(column, axis=1 if axis is None else _axes(axis, x.ndim)[0]), function.__name__)

    return rule


# --- rules of shapes ---


def _reshape(x: StandIn, *shape: Any, order: str = "C") -> StandIn:
    wanted = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if order != "C":
        raise x._trace.fail(f"it reshapes in order {order}")
    if -1 in wanted:
        wanted[wanted.index(-1)] = x.size // -prod(wanted)
    return _made(x, x._column.reshape(x._trace.num_rows, *wanted), "reshape")


def _ravel(x: StandIn, order: str = "C") -> StandIn:
    return _reshape(x, x.size, order=order)


def _transpose(x: StandIn, *axes: Any) -> StandIn:
    given = axes[0] if len(axes) == 1 and not _is_place(axes[0]) else axes
    order = _axes(tuple(given), x.ndim) if given else _axes(None, x.ndim)[::-1]
    return _made(x, x._column.transpose(0, *order), "transpose")


def _swapaxes(x: StandIn, axis1: int, axis2: int) -> StandIn:
    (first,), (second,) = _axes(axis1, x.ndim), _axes(axis2, x.ndim)
    return _made(x, x._column.swapaxes(first, second), "swapaxes")


def _squeeze(x: StandIn, axis: Any = None) -> StandIn:
    axes = [place for place, size in enumerate(x.shape) if size == 1] if axis is None else axis
    return _made(x, np.squeeze(x._column, _axes(axes, x.ndim)), "squeeze")


def _expand_dims(x: StandIn, axis: Any) -> StandIn:
    number = len(axis) if isinstance(axis, (tuple, list)) else 1
    return _made(x, np.expand_dims(x._column, _axes(axis, x.ndim + number)), "expand_dims")


def _copy(x: StandIn, order: str = "C") -> StandIn:
    # Stand-ins cannot be written to, so that one does for both.
    return x


def _joined(arrays: Any, function: Callable[..., Any], axis: int, *, adds_axis: bool) -> StandIn:
    parts = list(arrays)
    trace = _trace_of(parts)
    values = [trace.operand(each) for each in parts]
    (place,) = _axes(axis, values[0].ndim + adds_axis)
    return trace.made(function([trace.column(each) for each in values], axis=place), function.__name__)


def _stack(arrays: Any, axis: int = 0) -> StandIn:
    return _joined(arrays, np.stack, axis, adds_axis=True)


def _concatenate(arrays: Any, axis: int = 0) -> StandIn:
    return _joined(arrays, np.concatenate, axis, adds_axis=False)


def _filled_like(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, *value: Any, dtype: Any = None) -> Any:
        if any(map(_holds_stand_in, value)):
            raise _trace_of([x, *value]).fail("it fills an array with a value")
        return function(x.shape, *value, dtype=x.dtype if dtype is None else dtype)

    return rule


# --- where the rules are looked up ---

METHODS: Final[dict[str, Callable[..., Any]]] = {
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

FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    np.sum: METHODS["sum"],
    np.prod: METHODS["prod"],
    np.mean: METHODS["mean"],
    np.std: METHODS["std"],
    np.var: METHODS["var"],
    np.min: METHODS["min"],
    np.max: METHODS["max"],
    np.any: METHODS["any"],
    np.all: METHODS["all"],
    np.count_nonzero: _reduction(np.count_nonzero, "count_nonzero"),
    np.argmin: METHODS["argmin"],
    np.argmax: METHODS["argmax"],
    np.cumsum: METHODS["cumsum"],
    np.cumprod: METHODS["cumprod"],
    np.sort: _along(np.sort, -1),
    np.argsort: _along(np.argsort, -1),
    np.where: _where,
    np.clip: _clip,
    np.isclose: _isclose,
    np.isin: _by_itself(np.isin),
    np.digitize: _by_itself(np.digitize, "right"),
    np.round: METHODS["round"],
    np.nan_to_num: _by_itself(np.nan_to_num, "nan", "posinf", "neginf"),
    np.reshape: _reshape,
    np.ravel: _ravel,
    np.transpose: _transpose,
    np.swapaxes: _swapaxes,
    np.squeeze: _squeeze,
    np.expand_dims: _expand_dims,
    np.copy: _copy,
    np.stack: _stack,
    np.concatenate: _concatenate,
    np.zeros_like: _filled_like(np.zeros),
    np.ones_like: _filled_like(np.ones),
    np.full_like: _filled_like(np.full),
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
}
