"""The tree in which the partial results of replicas are combined.

Its shape is fixed: first the replicas of each worker, in order, then the workers, a few at a time, in order. So results
are equal to the last bit, whichever part is ready first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.config import setting
from daskdist.core.arguments import whole_number
from daskdist.core.ragged import Ragged
from daskdist.devices import Device, adopted, device_of, dtype_of
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import Backend
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.reduce.device_reduction import combined_by_library, reduction_on
from daskdist.strategy.reduce.no_rows import NoRows
from daskdist.strategy.reduce.reductions import (
    NAMED,
    Axis,
    Op,
    ReduceOp,
    Reduction,
    as_it_is,
    name_of,
    num_rows,
    numpy_array,
    reduction_of,
    without,
)
from daskdist.strategy.reduce.weights import weighted, weighted_rows
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.device_arrays import Placed, home_of, in_stream_of, moved_nest
from daskdist.strategy.values.encoding import NUMBERS, SteadyFunction, is_small, is_small_part
from daskdist.strategy.values.error_context import add_context
from daskdist.strategy.values.flat import check_is_no_dict
from daskdist.strategy.values.per_replica import PerReplica, values_read_later
from daskdist.strategy.values.refs import FlatResult, Pick, Refs

# The kinds of dtypes that can be added, and those that are ordered.
_NUMBERS: Final = "biufc"
_ORDERED: Final = "biufcmM"
# Types passed to functions unchanged, as converting them to arrays would change their meaning.
_COMBINED_AS_THEY_ARE: Final = (str, bytes, Ragged)


@dataclass(frozen=True, eq=False)
class Fold(SteadyFunction):
    """One node of the tree, which combines the chunks of some replicas, or partial results.

    The fold of a named reduction is the same object in all steps, so that it is sent to a worker once.

    Parameters
    ----------
    op
        The reduction.
    axis
        The axis or axes of each array to reduce along; None for none.
    is_final
        Whether the node returns the final result instead of a partial one.
    stays
        Whether partial results do not leave this process, so that they stay on their device.
    operation
        The name of the operation in messages.
    is_weighted
        Whether the last leaf of each replica is the weight of its other leaves, or with an axis those of their rows.
    is_of_values
        Whether it is called with one value of each of some replicas, not with partial results.
    """

    op: Op
    axis: Axis
    is_final: bool
    stays: bool = False
    operation: str = "reduce"
    is_weighted: bool = False
    is_of_values: bool = False

    def __call__(self, *results: Any) -> Any:
        return self.rows([[result] for result in results]) if self.is_of_values else self.partials(results)

    def is_quick(self, results: Sequence[Any], picks: Sequence[Pick]) -> bool:
        """Return whether a call takes only microseconds and runs no code of the user, given what its values are of."""
        if not isinstance(self.op, ReduceOp):
            return False
        return all(map(is_small_part, results, picks) if self.is_of_values else map(is_small, results))

    def rows(self, replicas: Sequence[Sequence[Any]]) -> Any:
        """Fold the values of replicas, some of each."""
        columns: Iterable[Sequence[Any]] = zip(*replicas, strict=True)
        if not self.is_weighted:
            return self._fold(map(self._chunk, column) for column in columns)
        *columns, weights = columns
        weigh = weighted if self.axis is None else partial(weighted_rows, self._checked)
        return self._fold(map(partial(weigh, self.op, self._chunk), column, weights) for column in columns)

    def partials(self, results: Sequence[Any]) -> Any:
        """Fold partial results."""
        return self._fold(zip(*results, strict=True))

    @cached_property
    def _reduction(self) -> Reduction:
        return reduction_of(self.op)

    def _chunk(self, value: Any) -> tuple[tuple[int, ...], Any]:
        # Also return the remaining shape, which must be the same for all replicas.
        if type(value) not in NUMBERS:
            if value is ABSENT:
                # Another replica's value has the shape; arrays with a dimension of 0 do not show it.
                return (0,), NoRows(None, None)
            value = adopted(value)
            if (device := device_of(value)) is not None:
                return self._chunk_there(value, device)
        array = self._checked(value)
        axis = self.axis
        if axis is None:
            # Only arrays have a shape to compare.
            shape = array.shape if isinstance(array, np.ndarray) else ()
            return shape, self._called(self._reduction.chunk, array, None)
        shape = without(array.shape, axis)
        if not array.size and not num_rows(array.shape, axis):
            return shape, NoRows(_one_row(array.shape, axis), array.dtype)
        return shape, self._called(self._reduction.chunk, array, axis)

    def _chunk_there(self, array: Any, device: Device) -> tuple[tuple[int, ...], Any]:
        # The value is reduced on its device, and nothing is copied to the host.
        shape, dtype, axis = tuple(array.shape), dtype_of(array), self.axis
        self._check_dtype(dtype)
        self._check_axes(shape)
        if axis is not None:
            if not num_rows(shape, axis):
                return without(shape, axis), NoRows(_one_row(shape, axis), dtype, device)
            shape = without(shape, axis)
        with in_stream_of(device):
            return shape, Placed(device, self._called(reduction_on(device, self.op).chunk, array, axis))

    def _checked(self, value: Any) -> Any:
        op, axis = self.op, self.axis
        array = value
        kind = type(value)
        if kind in NUMBERS:
            if kind is not np.ndarray:
                array = np.asarray(value)
        elif not isinstance(value, np.ma.MaskedArray):
            if axis is None and isinstance(value, _COMBINED_AS_THEY_ARE) and not isinstance(op, (ReduceOp, np.ufunc)):
                return value
            array = _as_array(value, self.operation)
        if not array.flags.aligned:
            # Arrays from a message may be unaligned: NumPy adds those in another order, with another rounding.
            array = np.require(array, requirements="A")
        if isinstance(op, ReduceOp):
            if kind not in NUMBERS:
                check_is_no_dict(value, self.operation)
                if isinstance(array, np.ma.MaskedArray):
                    raise ArgumentError(
                        f"{self.operation}: a value is a masked array; replace the masked elements first, for example "
                        "with filled(0)"
                    )
            self._check_dtype(array.dtype)
        elif axis is None and array.dtype.hasobject:
            # Other values are combined unchanged.
            return value
        self._check_axes(array.shape)
        return array

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        op = self.op
        if not isinstance(op, ReduceOp):
            return
        needs_order = NAMED[op].needs_order
        if dtype.kind not in (_ORDERED if needs_order else _NUMBERS):
            ability = "have an order" if needs_order else "add up"
            raise ArgumentError(f"{self.operation}: a value is {dtype}, and only numbers {ability}")

    def _check_axes(self, shape: tuple[int, ...]) -> None:
        axis, ndim = self.axis, len(shape)
        if axis is None:
            return
        axes = axis if isinstance(axis, tuple) else (axis,)
        for number in axes:
            if not -ndim <= number < ndim:
                raise ArgumentError(
                    f"reduce: axis {number} of a value of shape {shape}; use axis=None to reduce over replicas only"
                )
        if len(axes) > 1 and len({number % ndim for number in axes}) < len(axes):
            raise ArgumentError(f"reduce: axis {axis} of a value of shape {shape} names an axis twice")

    def _fold(self, columns: Iterable[Iterable[tuple[tuple[int, ...], Any]]]) -> Any:
        folded = [self._combined(list(column)) for column in columns]
        if not self.is_final:
            return folded if self.stays else [(shape, _here(partial)) for shape, partial in folded]
        return FlatResult.listed([self._final(*entry) for entry in folded])

    def _combined(self, column: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[Any, Any]:
        kinds = {type(partial) for _, partial in column}
        with_shape = with_rows = column
        if NoRows in kinds:
            with_rows = [entry for entry in column if type(entry[1]) is not NoRows]
            # An unknown dimension is 0 in arrays without rows.
            with_shape = [*with_rows, *(entry for entry in column if type(entry[1]) is NoRows and 0 not in entry[0])]
        shape, partial = (with_shape or column)[0]
        if any(entry[0] != shape for entry in with_shape):
            raise _shapes_error([entry[0] for entry in column], self.axis)
        if NoRows in kinds and len(kinds) == 1:
            return shape, replace(partial, device=home_of([entry[1].device for entry in column]))
        if Placed in kinds:
            return shape, self._combined_there([entry[1] for entry in with_rows])
        for _, other in with_rows[1:]:
            partial = self._called(self._reduction.combine, partial, other)
        return shape, partial

    def _combined_there(self, partials: Sequence[Any]) -> Any:
        # Combine on the device of the first, or on the host if any partial result is there.
        home = home_of([partial.device if type(partial) is Placed else None for partial in partials])
        if home is None:
            combined = _here(partials[0])
            for other in partials[1:]:
                combined = self._called(self._reduction.combine, combined, _here(other))
            return combined
        combined, *others = [partial.partial for partial in partials]
        if not others:
            return partials[0]
        with contextlib.ExitStack() as streams:
            # A library reads in every device's stream without waiting: the callers' streams must not reuse that memory
            # before it has.
            for device in reversed(dict.fromkeys(partial.device for partial in partials)):
                streams.enter_context(in_stream_of(device))
            at_once = combined_by_library(home, self.op, [combined, *others])
            if at_once is not None:
                return Placed(home, at_once)
            combine = reduction_on(home, self.op).combine
            for other in others:
                combined = self._called(combine, combined, moved_nest(other, home))
        return Placed(home, combined)

    def _final(self, shape: tuple[int, ...], partial: Any) -> Any:
        reduction = self._reduction
        if type(partial) is NoRows:
            if partial.one_row is None:
                raise ArgumentError("reduce: no replica has a value: all were without rows, and were skipped")
            if reduction.identity is None and 0 not in shape:
                name = name_of(self.op)
                raise ArgumentError(
                    f"reduce: no replica has a row along axis {self.axis}, and {name} of no rows has no value; leave "
                    "such a step out, or use a Reduction with an identity"
                )
            if partial.device is not None:
                return self._final_there(partial, partial.device)
            with np.errstate(all="ignore"):
                partial = partial.partial(reduction, self.axis)
        if type(partial) is Placed:
            finalize = reduction_on(partial.device, self.op).finalize
            if finalize is as_it_is:
                # Making a device's stream current takes longer than many reductions.
                return partial.partial
            with in_stream_of(partial.device):
                return self._called(finalize, partial.partial)
        result = self._called(reduction.finalize, partial)
        # Return a scalar, as NumPy's reductions do.
        return result[()] if type(result) is np.ndarray and not result.ndim else result

    def _final_there(self, no_rows: NoRows, device: Device) -> Any:
        # Return the result of no rows on a device. A user's Reduction is called with device arrays.
        is_own = isinstance(self.op, Reduction)
        with in_stream_of(device), np.errstate(all="ignore"):
            partial = (no_rows if is_own else replace(no_rows, device=None)).partial(self._reduction, self.axis)
            partial = moved_nest(partial, device) if is_own else partial
            return moved_nest(self._called(self._reduction.finalize, partial), device)

    def _called(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            if type(self.op) is not ReduceOp:
                add_context(
                    error, f"raised by {name_of(self.op)}, with which {self.operation} combines the values of replicas"
                )
            raise


def _here(partial: Any) -> Any:
    # Return the partial result in a form that can leave the process.
    if type(partial) is NoRows and partial.device is not None:
        return replace(partial, device=None)
    return partial.here() if type(partial) is Placed else partial


def _one_row(shape: tuple[int, ...], axis: int | tuple[int, ...]) -> tuple[int, ...]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    once = {number % len(shape) for number in axes}
    return tuple(1 if k in once else n for k, n in enumerate(shape))


def _as_array(value: Any, operation: str) -> np.ndarray[Any, Any]:
    if isinstance(value, Ragged):
        raise ArgumentError(
            f"{operation}: a value has rows of different lengths; reduce its flat values, which "
            "run(lambda rows: rows.values, args=(value,)) returns"
        )
    return numpy_array(value, operation)


def _shapes_error(shapes: Sequence[tuple[int, ...]], axis: Axis) -> ArgumentError:
    # The error of values whose shapes, without the reduced axes, differ.
    differ = f"the values' shapes differ over the replicas: {', '.join(map(str, shapes))}"
    if axis is None:
        advice = "Give axis=0 to reduce along the rows too; a last batch need not be full"
        return ArgumentError(f"reduce: {differ}. {advice}")
    return ArgumentError(f"reduce: after the reduction along axis {axis}, {differ}; they must be equal")


@functools.lru_cache(maxsize=256)
def groups_of(
    workers: tuple[str | None, ...], *, in_order: bool, at_once: int = 1
) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
    """Return the groups of replicas that are combined first, each as its worker and the numbers of its replicas.

    Parameters
    ----------
    workers
        The worker of each replica.
    in_order
        Whether only neighbouring replicas may be combined, even if others are on the same worker.
    at_once
        The number of workers that form one group, on the first of them, if each has only one replica.
    """
    numbered = list(enumerate(workers))
    if not in_order:
        first = {worker: number for number, worker in reversed(numbered)}
        numbered.sort(key=lambda pair: first[pair[1]])
    runs = itertools.groupby(numbered, lambda pair: pair[1])
    groups = [(worker, tuple(number for number, _ in run)) for worker, run in runs]
    if at_once > 1 and all(len(numbers) == 1 for _, numbers in groups):
        parts = (groups[k : k + at_once] for k in range(0, len(groups), at_once))
        groups = [(part[0][0], tuple(itertools.chain.from_iterable(numbers for _, numbers in part))) for part in parts]
    return tuple(groups)


# Cached, so that it is sent to a worker once for all steps.
_fold_of_name: Final = functools.lru_cache(maxsize=64)(Fold)


@dataclass(slots=True)
class FoldTree:
    """A reduction of values of replicas, which is made by calling this with the replicas, and again after a loss.

    It is a single object, as each step under way has one.

    Parameters
    ----------
    caller
        The backend that makes the calls.
    op, axis
        The reduction.
    values
        The values; once it was made, the references of one value of each replica, if they are of the caller.
    on
        The worker to place the result on, if it has replicas; None for the first.
    is_weighted
        Whether the last value is the weight of the others, or with an axis those of their rows.
    split_every
        The number of workers' partial results that are combined at a time; the setting at the time of its creation.
    """

    caller: Backend
    op: Op
    axis: Axis
    values: Refs | Sequence[PerReplica]
    on: str | None = None
    is_weighted: bool = False
    split_every: int = field(default_factory=partial(setting, "split-every"))

    def __call__(self, group: ReplicaGroup) -> Sequence[Handle]:
        """Return the handle of a `FlatResult` list of the results of the values."""
        caller, op, axis, split_every = self.caller, self.op, self.axis, self.split_every
        if type(split_every) is not int or split_every < 2:
            whole_number("reduce", "the setting daskdist.split-every", split_every, at_least=2)
        values: Any = self.values
        refs: Any = values if type(values) is Refs else values[0].refs if len(values) == 1 else None
        # If not all are references of one value, the values of each replica.
        rows: Any = None
        if refs is None or refs.caller is not caller:
            rows = list(zip(*map(values_read_later, values), strict=True))
        elif values is not refs and values[0].batch is None:
            # The pieces of a batch may be cut again.
            self.values = refs
        size, workers = len(refs.source.workers if rows is None else rows), group.worker_of
        if size != len(workers):
            # There are fewer replicas than values now, and the values are in this process.
            workers = (workers[0],) * size
        on = self.on if self.on in group.workers else None
        # Functions need not be commutative. If the chunk is the value itself, workers are combined directly.
        in_order = not isinstance(op, ReduceOp)
        new_fold = Fold if in_order else _fold_of_name
        groups = groups_of(workers, in_order=in_order, at_once=split_every if axis is None else 1)
        level = []
        for group_worker, numbers in groups:
            is_last = len(groups) == 1
            worker = on if is_last and on else group_worker
            fold = new_fold(op, axis, is_last, is_weighted=self.is_weighted, is_of_values=True)
            if rows is None:
                call = caller.call(fold, tuple(map(refs.ref, numbers)), worker=worker, name="reduce-chunk")
            else:
                some = [list(rows[number]) for number in numbers]
                call = caller.call(fold.rows, (some,), worker=worker, name="reduce-chunk")
            level.append((worker, call))
        while len(level) > 1:
            is_last = len(level) <= split_every
            fold = new_fold(op, axis, is_last)
            parts = [level[k : k + split_every] for k in range(0, len(level), split_every)]
            level = []
            for part in parts:
                worker = on if is_last and on else part[0][0]
                # A single partial result needs no call.
                if len(part) == 1:
                    level.append(part[0])
                    continue
                handles = tuple([call[0] for _, call in part])
                level.append((worker, caller.call(fold, handles, worker=worker, name="reduce")))
        return level[0][1]
