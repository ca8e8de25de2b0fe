"""Reductions: what is done on a replica, how two partial results combine, and what is made of the last.

Partial results combine in a tree of fixed shape: the replicas of a worker first, in order, then workers, so
many at a time, in order. So a result does not depend on which part was ready first, to the last bit.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.errors import ArgumentError
from daskdist.execute.callers import Caller, Handle
from daskdist.strategy.values import Pick, Returned, Wiring, fill

Axis = int | tuple[int, ...] | None


class ReduceOp(enum.Enum):
    """How values of replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: object) -> ReduceOp:
        """An operation, from itself or its name in any case."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ArgumentError(f"{value!r} is not a reduction; there are {', '.join(cls.__members__)}")


@dataclass(frozen=True)
class Reduction:
    """One way to reduce.

    Parameters
    ----------
    chunk
        Makes a replica's array its partial result, along an axis or along none.
    combine
        Makes two partial results one.
    finalize
        Makes the last partial result the result.
    """

    chunk: Callable[[Any, Axis], Any]
    combine: Callable[[Any, Any], Any]
    finalize: Callable[[Any], Any]


def _sum(array: Any, axis: Axis) -> Any:
    if axis is None:
        # As NumPy's sum does: small integers and bools must not run over.
        return array.astype(np.result_type(array.dtype, np.int64)) if array.dtype.kind == "b" else array
    return np.sum(array, axis=axis)


def _sum_and_count(array: Any, axis: Axis) -> tuple[Any, int]:
    if not np.issubdtype(array.dtype, np.inexact):
        array = array.astype(np.float64)
    if axis is None:
        return array, 1
    axes = axis if isinstance(axis, tuple) else (axis,)
    return np.sum(array, axis=axis), int(np.prod([array.shape[each] for each in axes]))


def _mean(partial: tuple[Any, int]) -> Any:
    total, count = partial
    # No rows at all: 0/0, which is NaN, as NumPy's mean of nothing is; without its warning on a worker.
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / total.dtype.type(count)


REDUCTIONS: Final = {
    ReduceOp.SUM: Reduction(_sum, lambda a, b: a + b, lambda partial: partial),
    ReduceOp.MEAN: Reduction(_sum_and_count, lambda a, b: (a[0] + b[0], a[1] + b[1]), _mean),
}


@dataclass(frozen=True)
class Fold:
    """One node of the tree: chunks of some replicas, or partial results, made one.

    Parameters
    ----------
    op
        The reduction.
    axis
        The axis or axes of each array to reduce along; None for none.
    is_final
        Whether the result is wanted, and not a partial one.
    """

    op: ReduceOp
    axis: Axis
    is_final: bool

    def chunks(self, results: Sequence[Any], picks: Sequence[tuple[int, Pick]], replicas: list[Any]) -> Any:
        """From the values of replicas: for each replica a wired list of leaves."""
        parts = [pick(results[number]) for number, pick in picks]
        reduction = REDUCTIONS[self.op]
        arrays = [[_checked(leaf, self.axis) for leaf in leaves] for leaves in fill(replicas, parts)]
        return self._fold([[reduction.chunk(array, self.axis) for array in leaves] for leaves in arrays])

    def partials(self, results: Sequence[Any]) -> Any:
        """From partial results."""
        return self._fold(results)

    def _fold(self, parts: Sequence[list[Any]]) -> Any:
        reduction = REDUCTIONS[self.op]
        for column in zip(*parts, strict=True):
            # NumPy would stretch the smaller to the larger where it can.
            check_shapes([np.shape(part[0] if isinstance(part, tuple) else part) for part in column], self.axis)
        folded = [functools.reduce(reduction.combine, column) for column in zip(*parts, strict=True)]
        if not self.is_final:
            return folded
        return Returned.of([reduction.finalize(partial) for partial in folded])


def _checked(value: Any, axis: Axis) -> Any:
    # Python's numbers are as wide here as they are in Python.
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise ArgumentError(f"reduce: a value is {array.dtype}, and only numbers add up")
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if len({each % max(array.ndim, 1) for each in axes}) < len(axes):
        raise ArgumentError(f"reduce: axis {axis} of a value of shape {array.shape} names an axis twice")
    for each in axes:
        if not -array.ndim <= each < array.ndim:
            raise ArgumentError(
                f"reduce: axis {each} of a value of shape {array.shape}; use axis=None to reduce over replicas only"
            )
    return array


def check_shapes(shapes: Sequence[tuple[int, ...]], axis: Axis) -> None:
    """Refuse values whose shapes, without the axes reduced along, differ."""
    if len(set(shapes)) == 1:
        return
    differ = f"the values' shapes differ over the replicas: {', '.join(map(str, shapes))}"
    if axis is None:
        advice = "Give axis=0 to reduce along the rows too; a last batch need not be full"
        raise ArgumentError(f"reduce: {differ}. {advice}")
    raise ArgumentError(f"reduce: once reduced along axis {axis}, {differ}; they must be one shape")


@dataclass(frozen=True)
class Group:
    """Values of some replicas.

    Parameters
    ----------
    worker
        The address of the worker they are on; None for this process.
    values
        For each replica its leaves, some of them asynchronous.
    """

    worker: str | None
    values: list[list[Any]]

    @cached_property
    def wiring(self) -> Wiring:
        """What the values need."""
        return Wiring()

    @cached_property
    def replicas(self) -> list[Any]:
        """The values, wired."""
        return [self.wiring.wire(leaves) for leaves in self.values]

    @classmethod
    def merged(cls, groups: Sequence[Group]) -> Group:
        """The values of several workers, to be combined on the first."""
        return cls(groups[0].worker, [leaves for group in groups for leaves in group.values])


def fold_tree(
    caller: Caller,
    op: ReduceOp,
    axis: Axis,
    groups: Sequence[Group],
    split_every: int,
) -> Handle:
    """Reduce values of replicas in a tree.

    Parameters
    ----------
    caller
        Who makes the calls.
    op, axis
        The reduction.
    groups
        The values of each worker's replicas.
    split_every
        How many partial results of workers are combined at a time.

    Returns
    -------
    Handle
        Of a `Returned` list of the leaves' results.
    """
    whole_number("reduce", "the setting daskdist.split-every", split_every, at_least=2)
    if axis is None and all(len(group.values) == 1 for group in groups):
        # A chunk would be the value itself: workers are combined at once.
        groups = [Group.merged(groups[k : k + split_every]) for k in range(0, len(groups), split_every)]
    level = []
    for group in groups:
        fold = Fold(op, axis, len(groups) == 1)
        handle = caller.call(
            fold.chunks, group.wiring.handles, group.wiring.picks, group.replicas, on=group.worker, name="reduce-chunk"
        )
        level.append((group.worker, handle))
    while len(level) > 1:
        is_last = len(level) <= split_every
        fold = Fold(op, axis, is_last)
        level = [
            (part[0][0], caller.call(fold.partials, [each for _, each in part], on=part[0][0], name="reduce"))
            for part in (level[k : k + split_every] for k in range(0, len(level), split_every))
        ]
    return level[0][1]
