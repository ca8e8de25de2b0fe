"""Reductions: a partial result on each replica, the combination of two, and the final result."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.core.to_numpy import dtype_without_numpy
from daskdist.errors import ArgumentError
from daskdist.strategy.reduce.pairwise import reduce_rows

Axis: TypeAlias = int | tuple[int, ...] | None
# A reduction in any form that is accepted.
Op: TypeAlias = "ReduceOp | Reduction | Callable[[Any, Any], Any]"


class ReduceOp(enum.Enum):
    """A named reduction of the values of replicas.

    >>> ReduceOp.of("max")
    <ReduceOp.MAX: 'MAX'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    # Every step looks up its record several times, and the hash of `enum` is a slow Python function.
    __hash__ = object.__hash__

    @classmethod
    def of(cls, value: object) -> ReduceOp:
        """Return the operation of a name, in any case, or the given operation itself."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and (member := cls._member_map_.get(value.upper())) is not None:
            return member  # type: ignore[return-value]
        raise ArgumentError(
            f"{value!r:.80} is not a reduction; give {', '.join(cls.__members__)}, an associative function of "
            "two values, or a Reduction"
        )


def as_it_is(partial: Any) -> Any:
    """Return the last partial result unchanged, as most reductions do."""
    return partial


@dataclass(frozen=True)
class Reduction:
    """A custom reduction for `Strategy.reduce`.

    Parameters
    ----------
    chunk
        ``chunk(array, axis)`` returns the partial result of a replica's array: a number, an array, or a nest of those.
        The axis is a number or a tuple of numbers, as given; None to reduce over replicas only.
    combine
        ``combine(a, b)`` combines two partial results. It must be associative.
    finalize
        ``finalize(partial)`` returns the result from the last partial result.
    identity
        The partial result of no rows, which does not change others that it is combined with. If partial results are
        arrays, its numbers stand for arrays filled with them. None if there is none: a reduction in which no replica
        has a row then raises an error.

    Raises
    ------
    ArgumentError
        ``chunk``, ``combine`` or ``finalize`` is not a function.

    Notes
    -----
    The functions are not called for replicas without rows if others have rows.

    >>> import daskdist
    >>> norm = Reduction(lambda x, axis: np.sum(x * x, axis=axis), np.add, np.sqrt, identity=0)
    >>> values = daskdist.PerReplica([np.array([2.0, 4.0]), np.array([4.0])])
    >>> daskdist.MirroredStrategy(["CPU:0", "CPU:1"]).reduce(norm, values, axis=0)
    np.float64(6.0)
    """

    chunk: Callable[[Any, Axis], Any]
    combine: Callable[[Any, Any], Any]
    finalize: Callable[[Any], Any] = as_it_is
    identity: Any = None

    def __post_init__(self) -> None:
        for name in ("chunk", "combine", "finalize"):
            if not callable(getattr(self, name)):
                raise ArgumentError(f"Reduction: {name} is {getattr(self, name)!r:.80}; give a function")


@dataclass(frozen=True)
class Ufunc:
    """The partial result of a replica's array by a NumPy function of two arguments.

    Parameters
    ----------
    function
        The function.
    widens
        Whether small integers and bools are widened over replicas too, as NumPy's sum does over rows.
    """

    function: Any
    widens: bool = False

    def __call__(self, array: Any, axis: Axis) -> Any:
        if axis is not None:
            return reduce_rows(self.function, array, axis)
        if self.widens:
            return array.astype(wide_dtype(array.dtype), copy=False) if array.dtype.kind in "biu" else array
        if self.function.identity is None or not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
            return array
        # One replica's result has the same dtype as several: bool for `logical_and` of numbers.
        return self.function.reduce(array[None], axis=0)


@functools.cache
def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sums and products of an integer or bool dtype."""
    return np.result_type(dtype, np.uint64 if dtype.kind == "u" else np.int64)


@dataclass(frozen=True)
class RowByRow:
    """The partial result of a replica's array by an associative function of pairs of rows, then pairs of results.

    The function need not be elementwise.

    Parameters
    ----------
    function
        The function.
    xp
        The namespace of the array.
    """

    function: Callable[[Any, Any], Any]
    xp: Any = np

    def __call__(self, array: Any, axis: Axis) -> Any:
        if axis is None:
            return array
        whole = rows_first(self.xp, array, axis)
        # Rows of NumPy arrays are scalars if there are no other axes. Not all namespaces iterate over arrays.
        rows = list(whole) if self.xp is np else [whole[number, ...] for number in range(whole.shape[0])]
        while len(rows) > 1:
            pairs = [self.function(rows[k], rows[k + 1]) for k in range(0, len(rows) - 1, 2)]
            rows = pairs + rows[len(pairs) * 2 :]
        return rows[0]


def rows_first(xp: Any, array: Any, axis: int | tuple[int, ...]) -> Any:
    """Return an array of a namespace with the axes to reduce as its first one."""
    axes = sorted(number % array.ndim for number in (axis if isinstance(axis, tuple) else (axis,)))
    rest = [number for number in range(array.ndim) if number not in axes]
    shape = (num_rows(array.shape, axis), *without(array.shape, axis))
    return xp.reshape(xp.permute_dims(array, (*axes, *rest)), shape)


def without(shape: tuple[int, ...], axis: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without some of its axes.

    >>> without((2, 3, 4), (0, -1))
    (3,)
    """
    if isinstance(axis, int):
        axis = axis % len(shape)
        return shape[:axis] + shape[axis + 1 :]
    gone = {number % len(shape) for number in axis}
    return tuple(size for place, size in enumerate(shape) if place not in gone)


def num_rows(shape: tuple[int, ...], axis: int | tuple[int, ...]) -> int:
    """Return the number of rows of a shape along axes."""
    return shape[axis] if isinstance(axis, int) else math.prod([shape[number] for number in axis])


def _sum_and_count(array: Any, axis: Axis) -> tuple[Any, int, Any]:
    # Return the total, the count, and the dtype of the mean.
    dtype = array.dtype
    if dtype == np.float16:
        # As NumPy's mean does: the total overflows long before the mean would.
        array = array.astype(np.float32)
    if dtype.kind not in "fc":
        dtype = np.dtype(np.float64)
        if array.dtype.itemsize == 8 or axis is None:
            array = array.astype(np.float64)
    if axis is None:
        return array, 1, dtype
    total = reduce_rows(np.add, array, axis)
    if total.dtype.kind in "iu":
        # The total of any number of small integers fits 64 bits.
        total = total.astype(np.float64)
    return total, num_rows(array.shape, axis), dtype


def _add_up(a: tuple[Any, int, Any], b: tuple[Any, int, Any]) -> tuple[Any, int, Any]:
    return a[0] + b[0], a[1] + b[1], a[2] if a[2] == b[2] else np.result_type(a[2], b[2])


def _mean(partial: tuple[Any, int, Any]) -> Any:
    total, count, dtype = partial
    # The mean of no rows is NaN, as in NumPy, but without NumPy's warning.
    if not count:
        return np.full_like(total, np.nan, dtype=dtype)
    # NumPy divides complex numbers in this precision; otherwise the result would differ.
    of_complex = np.float64 if type(count) is float else np.int64
    mean = total / (of_complex(count) if dtype.kind == "c" else total.dtype.type(count))
    return mean if mean.dtype == dtype else mean.astype(dtype)


def _weighted_total(partial: Any, weight: float) -> Any:
    return partial * weight


def _weighted_mean(partial: tuple[Any, int, Any], weight: float) -> tuple[Any, float, Any]:
    total, _, dtype = partial
    if isinstance(total, (np.ndarray, np.generic)):
        total = total.astype(np.result_type(total.dtype, np.float64))
    return total * weight, weight, dtype


@dataclass(frozen=True)
class NamedReduction:
    """The definition of a named reduction.

    Parameters
    ----------
    reduction
        The reduction of NumPy arrays.
    of_two
        The NumPy function that combines the arrays of two partial results; None if there is no such function.
    on_device
        The function of the array API standard that reduces device arrays; None to call ``reduction`` with them.
    needs_order
        Whether values must be ordered; otherwise it must be possible to add them.
    keeps_equal
        Whether the reduction of equal values is that value.
    weighted
        Returns the partial result of a value that counts as often as a weight says; None if weights have no meaning.
    """

    reduction: Reduction
    of_two: np.ufunc | None = None
    on_device: Literal["sum", "prod", "mean", "min", "max"] | None = None
    needs_order: bool = False
    keeps_equal: bool = False
    weighted: Callable[[Any, float], Any] | None = None


NAMED: Final[dict[Any, NamedReduction]] = {
    ReduceOp.SUM: NamedReduction(
        Reduction(Ufunc(np.add, widens=True), np.add, identity=0),
        np.add,
        "sum",
        weighted=_weighted_total,
    ),
    ReduceOp.MEAN: NamedReduction(
        Reduction(_sum_and_count, _add_up, _mean, identity=(0, 0, None)),
        np.add,
        "mean",
        keeps_equal=True,
        weighted=_weighted_mean,
    ),
    ReduceOp.MIN: NamedReduction(
        Reduction(Ufunc(np.minimum), np.minimum),
        np.minimum,
        "min",
        needs_order=True,
        keeps_equal=True,
    ),
    ReduceOp.MAX: NamedReduction(
        Reduction(Ufunc(np.maximum), np.maximum),
        np.maximum,
        "max",
        needs_order=True,
        keeps_equal=True,
    ),
    ReduceOp.PROD: NamedReduction(
        Reduction(Ufunc(np.multiply, widens=True), np.multiply, identity=1), np.multiply, "prod"
    ),
}
# NumPy function -> its named reduction.
_OF_UFUNC: Final = {record.of_two: op for op, record in NAMED.items() if record.of_two is record.reduction.combine}


def checked_op(value: object) -> Op:
    """Return a reduction from the argument of `Strategy.reduce`.

    Raises
    ------
    ArgumentError
        The value is not a reduction.
    """
    if isinstance(value, (ReduceOp, Reduction)):
        return value
    if isinstance(value, np.ufunc):
        if value.nin != 2 or value.nout != 1 or value.signature is not None:
            raise ArgumentError(
                f"reduce: np.{value.__name__} returns {value.nout} of {value.nin} values; give a function that returns "
                "one of two, such as np.logaddexp"
            )
        return _OF_UFUNC.get(value) or value
    if callable(value) and not isinstance(value, type):
        return value
    return ReduceOp.of(value)


def numpy_array(value: Any, operation: str) -> np.ndarray[Any, Any]:
    """Return a value as a NumPy array, in which Python numbers keep their full precision.

    Raises
    ------
    ArgumentError
        It does not convert.
    """
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        reason = dtype_without_numpy(value) or f"{type(value).__name__}, which does not convert to an array: {error}"
        raise ArgumentError(f"{operation}: a value is a {reason}") from error


def reduction_of(op: Op) -> Reduction:
    """Return the record of a reduction."""
    if isinstance(op, ReduceOp):
        return NAMED[op].reduction
    if isinstance(op, Reduction):
        return op
    if isinstance(op, np.ufunc):
        return Reduction(Ufunc(op), op, identity=op.identity)
    return Reduction(RowByRow(op), op)


def name_of(op: Op) -> str:
    """Return the name of a reduction in messages."""
    if isinstance(op, ReduceOp):
        return op.name
    return "the reduction" if isinstance(op, Reduction) else str(getattr(op, "__name__", type(op).__name__))


def checked_axis(axis: Any) -> Axis:
    """Return the checked axis or axes of a reduction; None for no axes.

    Raises
    ------
    ArgumentError
        An axis is not a whole number, or is given twice.
    """
    if axis is None or type(axis) is int:
        return axis
    if not isinstance(axis, (list, tuple)):
        return whole_number("reduce", "axis", axis)
    axes = tuple(whole_number("reduce", f"axis[{place}]", number) for place, number in enumerate(axis))
    if len(set(axes)) < len(axes):
        raise ArgumentError(f"reduce: axis {axes} names an axis twice")
    return axes or None
