"""Tracers: stand-ins for the arrays of one element that hold the columns of many.

A tracer has the shape and dtype of one element's array and holds the column of all rows, ``(num_rows, *shape)``. It
also holds the first row as in the loop over elements, with its strides. Each operation is done on both: NumPy's result
for the row determines the type, dtype, shape and memory layout that the column must have.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.structure import TEXT, as_array
from daskdist.core.to_numpy import is_rounded

# Numbers and times. Elements of text and objects have other types, and complex products are rounded differently.
KINDS: Final = "biufmM"
_MOST_OPERATIONS: Final = 5000


class NotVectorisable(Exception):  # noqa: N818 - a signal between layers
    """A function does something that may differ for many rows; the message names it, as a clause."""


class Flagged(Exception):  # noqa: N818 - a signal between layers
    """These rows, but perhaps not others, must be computed one by one; the message gives the reason, as a clause."""


# An operation on columns: its arguments are the trace, and those of the operation on one element.
Rule = Callable[["Trace", tuple[Any, ...], dict[str, Any]], Any]


class Trace:
    """One call of a function with tracers.

    Parameters
    ----------
    num_rows
        The length of all columns.
    rules
        Looks up the rule of an operation.
    prove
        Tests an operation on made-up values and returns the problem, as a clause; None if no test is needed.
    narrow
        Whether returned Python numbers become int32 and float32, as in `as_array`.
    """

    __slots__ = ("bounds", "failure", "names", "narrow", "num_rows", "prove", "rules")

    def __init__(
        self, num_rows: int, rules: Rules, prove: Callable[..., str | None] | None, *, narrow: bool = False
    ) -> None:
        self.narrow = narrow
        self.num_rows = num_rows
        self.rules = rules
        self.prove = prove
        self.failure: str | None = None
        # The smallest and largest possible integers in a rule's result, if the rule sets them.
        self.bounds: tuple[int, int] | None = None
        # The operations, in order.
        self.names: list[str] = []

    def fail(self, reason: str) -> NotVectorisable:
        """Return the exception to raise. The trace fails even if the function catches the exception."""
        self.failure = self.failure or reason
        return NotVectorisable(self.failure)

    def enter(self, column: Any) -> Tracer | TracedText:
        """Return the tracer for a column of the elements.

        Raises
        ------
        NotVectorisable
            It is not a plain array of numbers or times, or of text.
        """
        if type(column) is np.ndarray and column.dtype == TEXT and column.ndim == 1:
            return TracedText(self, column)
        if type(column) is not np.ndarray or column.dtype.kind not in KINDS:
            raise self.fail(f"its elements have a leaf of {getattr(column, 'dtype', type(column).__name__)}")
        if not column.flags.aligned or not column.dtype.isnative:
            raise self.fail("its elements have a leaf that is not aligned, or not in this machine's byte order")
        return Tracer(self, column, column[0])

    def apply(
        self, name: str, native: Callable[..., Any], rule: Rule, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Do an operation on columns and on the first row.

        Parameters
        ----------
        name
            The name of the operation in messages and plans.
        native
            The operation on one element, as in the loop.
        rule
            The operation on columns.
        args, options
            The arguments; some of them are tracers.

        Raises
        ------
        NotVectorisable
            The results for one row and for many may differ.
        Flagged
            The results may differ for these rows.
        """
        if len(self.names) > _MOST_OPERATIONS:
            raise self.fail("it takes too many steps to look into")
        problem = self.prove(self.rules, name, native, rule, args, options) if self.prove else None
        if problem:
            raise self.fail(problem)
        row = native(*row_of(args), **row_of(options))
        self.bounds = None
        column = rule(self, args, options)
        self.names.append(name)
        if type(column) is tuple:
            return tuple([self._checked(name, *pair) for pair in zip(column, row, strict=True)])
        return self._checked(name, column, row)

    def _checked(self, name: str, column: Any, row: Any) -> Any:
        dtype = getattr(row, "dtype", None)
        if dtype is None or column.dtype != dtype or column.shape[1:] != row.shape or len(column) != self.num_rows:
            many_rows = f"{column.dtype}{list(column.shape[1:])}"
            raise self.fail(f"it calls {name}, which makes {dtype} of one row and {many_rows} of many")
        if dtype.kind not in KINDS:
            raise self.fail(f"it makes {dtype} of a value")
        tracer = Tracer(self, self._laid_out(name, column, row), row)
        tracer._bounds = self.bounds
        return tracer

    def _laid_out(self, name: str, column: Any, row: Any) -> Any:
        """Return the column with the memory layout that its rows have in the loop."""
        if not row.ndim or _strides(column[0]) == _strides(row):
            return column
        order = sorted(range(row.ndim), key=lambda axis: -row.strides[axis])
        if not row.transpose(order).flags.c_contiguous:
            raise self.fail(f"it calls {name}, which leaves gaps between values in memory")
        axes = [0, *[axis + 1 for axis in order]]
        return np.ascontiguousarray(column.transpose(axes)).transpose(np.argsort(axes))

    def leaf(self, leaf: Any) -> Any:
        """Return all rows of one leaf of a result, by the rules of `as_array`."""
        if type(leaf) in (Tracer, TracedText):
            return np.ascontiguousarray(self.column(leaf))
        if isinstance(leaf, list) and holds_tracer(leaf):
            dtype = as_array(_sampled(leaf), narrow=self.narrow).dtype
            if self._has_rounded(leaf, dtype):
                raise Flagged(f"it returns a list whose integers would be rounded to {dtype}")
            return self._stacked(leaf).astype(dtype, copy=False)
        value = as_array(leaf, narrow=self.narrow)
        if not isinstance(value, (np.ndarray, np.generic)):
            raise self.fail(f"it returns a {type(leaf).__name__}")
        if value.dtype.kind in "TSUO" and " at 0x" in str(value):
            # The copies of functions and objects have other addresses.
            raise self.fail("it makes text of a function")
        return np.ascontiguousarray(self.column(value))

    def column(self, value: Any) -> Any:
        """Return all rows of a tracer, or of a constant."""
        if type(value) not in (Tracer, TracedText):
            return np.broadcast_to(value, (self.num_rows, *value.shape))
        if value._trace is not self:
            raise self.fail("it uses a value that an earlier call stored")
        return value._column

    def operand(self, value: Any) -> Any:
        """Return a tracer unchanged, anything else as an array or scalar."""
        if type(value) is Tracer:
            return value
        if holds_tracer(value):
            raise self.fail("it makes an array of a list of values, as np.stack could for many rows")
        return np.asarray(value)[()]

    def aligned(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands that broadcast for columns as the originals do for one element.

        Axes of length 1 are inserted after the axis of rows. Constants stay unchanged, as broadcasting starts at the
        last axis; so do Python numbers, which have their own promotion rules in NumPy.
        """
        aligned_operands = [operand if type(operand) in _AS_THEY_ARE else self.operand(operand) for operand in operands]
        ndim = max([operand.ndim for operand in aligned_operands if type(operand) not in _WITHOUT_AXES])
        return [self._widened(operand, ndim) if type(operand) is Tracer else operand for operand in aligned_operands]

    def _widened(self, value: Tracer, ndim: int) -> Any:
        column = self.column(value)
        missing = ndim + 1 - column.ndim
        return column[(slice(None), *(None,) * missing)] if missing else column

    def _has_rounded(self, value: Any, dtype: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._has_rounded(item, dtype) for item in value)
        return type(value) is Tracer and is_rounded(self.column(value), dtype)

    def _stacked(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return np.stack([self._stacked(item) for item in value], axis=1)
        return self.column(self.operand(value))


def _strides(array: Any) -> list[int]:
    return [stride for stride, size in zip(array.strides, array.shape, strict=True) if size != 1]


@dataclass(frozen=True)
class Rules:
    """The rules of operations.

    Parameters
    ----------
    methods
        By the name of the method of arrays.
    functions, operators
        By the NumPy function, or the function of the module ``operator``.
    ufuncs, reductions
        By the ufunc, and by the ufunc whose method ``reduce`` is called.
    index
        The rule of ``x[key]``.
    of_shapes
        NumPy functions whose results depend on shapes only.
    rounded
        The names of operations with rounded results.
    """

    methods: Mapping[str, Rule]
    functions: Mapping[Any, Rule]
    operators: Mapping[Any, Rule]
    ufuncs: Mapping[Any, Rule]
    reductions: Mapping[Any, Rule]
    index: Rule
    of_shapes: frozenset[Any]
    rounded: frozenset[str]


class Method:
    """A bound method of a tracer."""

    __slots__ = ("_name", "_tracer")

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        name, trace = self._name, self._tracer._trace
        rule = trace.rules.methods[name]
        return trace.apply(
            name,
            lambda row, *args, **options: getattr(row, name)(*args, **options),
            rule,
            (self._tracer, *args),
            options,
        )


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: Tracer, *other_operands: Any) -> Any:
        operands = (*other_operands, self) if swapped else (self, *other_operands)
        return _operate(self._trace, function, operands)

    return operate


def _operate(trace: Trace, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    rule = trace.rules.operators.get(function)
    name = NAMES.get(function, function.__name__)
    if rule is None:
        raise trace.fail(f"it calls {name}, for which there is no rule")
    return trace.apply(name, function, rule, operands, {})


# Function of the module `operator` (or the builtin `divmod`) -> NumPy's name.
NAMES: Final[dict[Any, str]] = {
    operator.add: "add",
    operator.sub: "subtract",
    operator.mul: "multiply",
    operator.truediv: "divide",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    divmod: "divmod",
    operator.pow: "power",
    operator.lshift: "left_shift",
    operator.rshift: "right_shift",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.matmul: "matmul",
    operator.lt: "less",
    operator.le: "less_equal",
    operator.eq: "equal",
    operator.ne: "not_equal",
    operator.gt: "greater",
    operator.ge: "greater_equal",
    operator.neg: "negative",
    operator.pos: "positive",
    operator.invert: "invert",
    operator.abs: "absolute",
}
_OPERATORS: Final = {getattr(np, name): function for function, name in NAMES.items()}
_UNARY: Final = frozenset({operator.neg, operator.pos, operator.invert, operator.abs})
_COMPARISONS: Final = frozenset({operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge})


class Tracer:
    """An array of one element, as seen by a function, which holds the arrays of all rows."""

    __slots__ = ("_bounds", "_column", "_row", "_trace")

    def __init__(self, trace: Trace, column: Any, row: Any) -> None:
        self._trace = trace
        self._column = column
        self._row = row
        # The smallest and largest value, computed on first use.
        self._bounds: tuple[int, int] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        # Makes isinstance(x, np.integer) the same as for an element.
        return type(self._row)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._row.shape)

    @property
    def ndim(self) -> int:
        return int(self._row.ndim)

    @property
    def dtype(self) -> Any:
        return self._row.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def T(self) -> Any:  # noqa: N802 - NumPy's name
        """The transposed array."""
        return Method(self, "transpose")() if self.ndim else self

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"object of type '{self.dtype.type.__name__}' has no len()")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError(f"'{self.dtype.type.__name__}' object is not iterable")
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if any(map(holds_tracer, key if type(key) is tuple else (key,))):
            raise self._trace.fail("it looks up a place that depends on the values")
        return self._trace.apply("index", operator.getitem, self._trace.rules.index, (self, key), {})

    def __getattr__(self, name: str) -> Any:
        if name in self._trace.rules.methods:
            return Method(self, name)
        if hasattr(self.__class__, name):
            raise self._trace.fail(REFUSED["__array__"] if name.startswith("__array_") else f"it uses .{name}")
        raise AttributeError(f"'{self.__class__.__name__}' object has no attribute '{name}'")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        trace = self._trace
        if "out" in options:
            raise trace.fail("it changes an array in place")
        if method == "__call__" and not options and ufunc in _OPERATORS and _is_number(inputs[0]):
            # An operator calls the ufunc here if a NumPy number is on its left, but checks overflow for one element.
            return _operate(trace, _OPERATORS[ufunc], inputs)
        rules = {"__call__": trace.rules.ufuncs, "reduce": trace.rules.reductions}.get(method, {})
        rule = None if method == "__call__" and options.keys() - {"dtype"} else rules.get(ufunc)
        if rule is None:
            name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            with_options = f" with {', '.join(options)}" if options else ""
            raise trace.fail(f"it calls {name}{with_options}, for which there is no rule")
        native = ufunc if method == "__call__" else getattr(ufunc, method)
        return trace.apply(ufunc.__name__, native, rule, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        rules = self._trace.rules
        if function in rules.of_shapes and not holds_tracer([*args[1:], *options.values()]):
            return function(*row_of(tuple(args)), **options)
        rule = rules.functions.get(function)
        if rule is None:
            raise self._trace.fail(f"it calls {function.__name__}, for which there is no rule")
        return self._trace.apply(function.__name__, function, rule, tuple(args), dict(options))


def _refusing(reason: str) -> Callable[..., Any]:
    def refuse(self: Tracer, *args: Any, **options: Any) -> Any:
        raise self._trace.fail(reason)

    return refuse


def _in_place(self: Tracer, other: Any) -> Any:
    if isinstance(self._row, np.ndarray):
        raise self._trace.fail("it changes an array in place")
    # For numbers, `x += 1` creates a new object.
    return NotImplemented


# Special method that reads or exposes values or writes -> its description in messages.
REFUSED: Final = {
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
for _name, _reason in REFUSED.items():
    setattr(Tracer, _name, _refusing(_reason))
# Operators, with a tracer on either side.
for _function in NAMES:
    _name = _function.__name__.strip("_")
    setattr(Tracer, f"__{_name}__", _operator(_function))
    if _function not in _UNARY and _function not in _COMPARISONS:
        setattr(Tracer, f"__r{_name}__", _operator(_function, swapped=True))
        setattr(Tracer, f"__i{_name}__", _in_place)


class TracedText:
    """The text of one element, as seen by a function that may only pass it on; it holds the text of all rows."""

    __slots__ = ("_column", "_trace")

    def __init__(self, trace: Trace, column: Any) -> None:
        self._trace = trace
        self._column = column

    def __getattr__(self, name: str) -> Any:
        raise self._trace.fail(_USES_TEXT)


_USES_TEXT: Final = "its elements have a leaf of text, which it uses"
for _name in (
    *REFUSED,
    *("__array_ufunc__", "__array_function__", "__len__", "__iter__", "__getitem__", "__bytes__"),
    *("__add__", "__radd__", "__mul__", "__rmul__", "__mod__", "__rmod__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
):
    setattr(TracedText, _name, _refusing(_USES_TEXT))

_AS_THEY_ARE: Final = frozenset({int, float, bool, type(None), Tracer})
_WITHOUT_AXES: Final = _AS_THEY_ARE - {Tracer}


def _is_number(value: Any) -> bool:
    return type(value) is not Tracer and isinstance(value, np.generic)


def holds_tracer(value: Any) -> bool:
    """Return whether a value is a tracer, or a list, tuple or slice with one in it."""
    if type(value) is Tracer:
        return True
    if type(value) is slice:
        return holds_tracer([value.start, value.stop, value.step])
    return isinstance(value, (list, tuple)) and any(map(holds_tracer, value))


def row_of(value: Any) -> Any:
    """Return a value with each tracer replaced by its first row."""
    if type(value) is Tracer:
        return value._row
    if type(value) in (list, tuple):
        return type(value)(map(row_of, value))
    return {key: row_of(item) for key, item in value.items()} if type(value) is dict else value


def _sampled(value: Any) -> Any:
    # Return the list with tracers replaced by zeros, from which NumPy determines the dtype.
    if type(value) is Tracer:
        return np.zeros(value.shape, value.dtype)[()]
    return [_sampled(item) for item in value] if isinstance(value, (list, tuple)) else value


def column_of(tracer: Tracer) -> Any:
    """Return a tracer's values for all rows; a function, because tracers only have the attributes of arrays."""
    return tracer._column


def traced_bounds(tracer: Tracer, *, is_exact: bool) -> tuple[int, int]:
    """Return bounds of a tracer's integers, computed from its values if there are none yet or ``is_exact``."""
    if tracer._bounds is None or is_exact:
        tracer._bounds = int(tracer._column.min()), int(tracer._column.max())
    return tracer._bounds
