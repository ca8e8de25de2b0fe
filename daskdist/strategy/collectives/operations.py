"""Collective operations: reduce, gather, agree, and a merge function that one replica calls for all."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Final

import numpy as np
import optree

from daskdist.cached_property import cached_property
from daskdist.errors import CollectiveError
from daskdist.strategy.reduce.gather import concatenated
from daskdist.strategy.reduce.reductions import NAMED, Op, ReduceOp, Reduction, checked_op, name_of
from daskdist.strategy.reduce.tree import Fold
from daskdist.strategy.values.device_arrays import host_array, synchronize
from daskdist.strategy.values.regroup import component, regroup
from daskdist.strategy.values.variable_contract import VariableContract, variable_number

# From this many elements on, each process reduces a part.
_LARGE_ELEMENTS: Final = 2**16
# Types of numbers that are frequent in loops (losses and counts) -> the conversion to NumPy.
_NUMBERS: Final[dict[Any, Any]] = {np.float32: None, np.float64: None, np.int64: None, float: np.float64, int: np.int64}


def all_reduce_of(op: object) -> AllReduce:
    """Return the collective for a user's reduction; one object for each name."""
    return _of_name(op) if isinstance(op, (str, ReduceOp)) else AllReduce(checked_op(op))


@cache
def _of_name(op: str | ReduceOp) -> AllReduce:
    return AllReduce(checked_op(op))


def _shapes_of(contribution: tuple[list[Any], Any]) -> Any:
    leaves, treespec = contribution
    shapes = [() if type(leaf) in _NUMBERS else np.shape(leaf) for leaf in leaves]
    return shapes[0] if treespec.is_leaf() else (str(treespec), shapes)


@dataclass(frozen=True)
class AllReduce:
    """The reduction of the values of all replicas; a replica contributes leaves and their structure."""

    op: Op

    @cached_property
    def name(self) -> str:
        return f"all_reduce({name_of(self.op)})"

    def shapes(self, contribution: tuple[list[Any], Any]) -> Any:
        return _shapes_of(contribution)

    def partial(self, contributions: Mapping[int, tuple[list[Any], Any]]) -> Any:
        replicas = [leaves for leaves, _ in contributions.values()]
        kinds = [type(leaf) for leaves in replicas for leaf in leaves]
        # Equivalent to `Fold` but much faster: loops reduce a few losses and counts in each step.
        if self._of_numbers is None or not _NUMBERS.keys() >= set(kinds):
            return self._fold.rows(replicas)
        try:
            return [((), self._partial_of_numbers(column)) for column in zip(*replicas, strict=True)]
        except OverflowError:
            # The number does not fit into 64 bits.
            return self._fold.rows(replicas)

    def _partial_of_numbers(self, numbers: Sequence[Any]) -> Any:
        reduction: Any = self._of_numbers
        converted = [number if (known := _NUMBERS[type(number)]) is None else known(number) for number in numbers]
        return functools.reduce(reduction.combine, [reduction.chunk(number, None) for number in converted])

    def combined(self, partials: Sequence[Any]) -> Any:
        return self._fold.partials(partials)

    def final(self, partial: Any) -> list[Any]:
        if self._of_numbers is not None and all(type(array_of(value)) in _NUMBERS for _, value in partial):
            return [self._of_numbers.finalize(value) for _, value in partial]
        leaves: list[Any] = self._last_fold.partials([partial]).leaves
        return leaves

    @cached_property
    def _of_numbers(self) -> Reduction | None:
        # Cached, as looking the name up takes as long as the sum.
        return NAMED[self.op].reduction if isinstance(self.op, ReduceOp) else None

    @cached_property
    def _fold(self) -> Fold:
        return Fold(self.op, None, False, stays=True, operation=self.name)

    @cached_property
    def _last_fold(self) -> Fold:
        return Fold(self.op, None, True, operation=self.name)

    def is_large(self, partial: Any) -> bool:
        """Return whether a partial result is large and consists of arrays whose parts can be reduced separately."""
        # Decide by properties that are the same on all replicas, as dtypes may differ, and one may give a scalar where
        # another gives a 0-d array.
        is_by_element = isinstance(self.op, ReduceOp) and NAMED[self.op].of_two is not None
        return is_by_element and sum(math.prod(shape) for shape, _ in partial) >= _LARGE_ELEMENTS

    def combined_in_place(self, partials: Sequence[Any], received: int) -> Any:
        """Combine two partial results into the arrays of the received one, which nothing else references."""
        function: Any = NAMED[self.op].of_two
        # An array that a replica contributed twice arrives as one object.
        times = Counter(id(array_of(value)) for _, value in partials[received])
        combined = []
        for (shape, first), (_, other) in zip(*partials, strict=True):
            a, b = array_of(first), array_of(other)
            out = (a, b)[received]
            is_free = times[id(out)] == 1 and out.flags.writeable
            if a.dtype == b.dtype and is_free and not isinstance(first, tuple):
                combined.append((shape, function(a, b, out=out)))
            else:
                combined += self._fold.partials([[(shape, first)], [(shape, other)]])
        return combined

    def cut(self, partial: Any, num_parts: int) -> list[Any]:
        """Cut a large partial result into parts, each with a range of every array."""
        flat = [np.ascontiguousarray(array_of(value)).reshape(-1) for _, value in partial]
        return [
            [(cut.shape, _with(value, cut)) for (_, value), cut in zip(partial, cuts, strict=True)]
            for cuts in zip(*[np.array_split(array, num_parts) for array in flat], strict=True)
        ]

    def joined(self, parts: Sequence[Any], like: Any) -> Any:
        """Join parts into the partial result that they were cut from."""
        joined = []
        for place, (shape, _) in enumerate(like):
            whole = np.concatenate([array_of(part[place][1]) for part in parts])
            joined.append((shape, _with(parts[0][place][1], whole.reshape(shape))))
        return joined


def array_of(partial: Any) -> Any:
    """Return the array of a partial result: that of a mean is a total, a count and a dtype."""
    return partial[0] if isinstance(partial, tuple) else partial


def _with(partial: Any, array: Any) -> Any:
    return (array, *partial[1:]) if isinstance(partial, tuple) else array


@dataclass(frozen=True)
class _Axes:
    """A shape that equals any other with the same number of axes."""

    ndim: int
    shape: tuple[int, ...] = field(compare=False)

    def __repr__(self) -> str:
        return str(self.shape)


class OfEachReplica:
    """The contributions of all replicas, in their order; partial results are pairs of a number and a value."""

    def shapes(self, contribution: Any) -> Any:
        return None

    def partial(self, contributions: Mapping[int, Any]) -> Any:
        return list(contributions.items())

    def combined(self, partials: Sequence[Any]) -> Any:
        return list(chain.from_iterable(partials))

    def final(self, partial: Any) -> Any:
        """Return the values of all replicas."""
        return [value for _, value in sorted(partial, key=lambda entry: entry[0])]


@dataclass(frozen=True)
class AllGather(OfEachReplica):
    """The values of all replicas concatenated along an axis; a replica contributes leaves and their structure."""

    axis: int

    @property
    def name(self) -> str:
        return f"all_gather(axis={self.axis})"

    def shapes(self, contribution: tuple[list[Any], Any]) -> Any:
        leaves, treespec = contribution
        # Lengths along the axis are checked when the values are concatenated.
        shapes = [_Axes(np.ndim(leaf), np.shape(leaf)) for leaf in leaves]
        return shapes[0] if treespec.is_leaf() else (str(treespec), shapes)

    def partial(self, contributions: Mapping[int, tuple[list[Any], Any]]) -> Any:
        return [(number, leaves) for number, (leaves, _) in contributions.items()]

    def final(self, partial: Any) -> list[Any]:
        rows = super().final(partial)
        return [concatenated(values, self.axis, self.name) for values in zip(*rows, strict=True)]


@dataclass(frozen=True)
class Collect(OfEachReplica):
    """The contributions of all replicas, of any type that pickles, in the order of the replicas."""

    name: str


@dataclass(frozen=True)
class First(Collect):
    """The value of the first replica for all; the others contribute None."""

    def final(self, partial: Any) -> Any:
        return super().final(partial)[0]


@dataclass(frozen=True)
class Agreed(OfEachReplica):
    """The check that all replicas contribute the same leaves and structure; only digests are sent."""

    name: str
    advice: str

    def shapes(self, contribution: Any) -> Any:
        return _shapes_of(contribution)

    def partial(self, contributions: Mapping[int, Any]) -> Any:
        return [(number, _digest(leaves)) for number, (leaves, _) in contributions.items()]

    def final(self, partial: Any) -> None:
        """Check that the digests of all replicas are equal.

        Raises
        ------
        CollectiveError
            Two replicas contribute different values.
        """
        (first, digest), *rest = sorted(partial)
        for number, other in rest:
            if other != digest:
                raise CollectiveError(
                    f"{self.name}: replica {number} gives another value than replica {first}; {self.advice}"
                )


def _digest(leaves: Sequence[Any]) -> bytes:
    digest = hashlib.sha256()
    for leaf in leaves:
        array = np.ascontiguousarray(host_array(leaf))
        digest.update(f"{array.dtype!r} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return digest.digest()


def _merged(arguments: Sequence[Any]) -> Any:
    leaves, treespec = optree.tree_flatten(regroup(arguments, always=True), none_is_leaf=True)
    return optree.tree_unflatten(treespec, [leaf.values[0] if _is_one(leaf.values) else leaf for leaf in leaves])


def _is_one(values: Sequence[Any]) -> bool:
    # Return whether all are equal texts, None, or the same variable: those are passed as one value, not one per
    # replica.
    first, *rest = values
    if isinstance(first, VariableContract):
        # Other replicas may contribute arrays.
        return all(
            isinstance(value, VariableContract) and variable_number(value) == variable_number(first) for value in rest
        )
    return isinstance(first, (str, bytes, type(None))) and all(
        type(value) is type(first) and value == first for value in rest
    )


@dataclass(frozen=True)
class Merge(OfEachReplica):
    """The call of a function once for all replicas, with the values of each.

    Parameters
    ----------
    fn
        The function.
    call
        Calls it with the arguments of all replicas and the extra data of each; returns its result and the changes for
        each replica.

    Notes
    -----
    A replica contributes its arguments and extra data.
    """

    fn: Callable[..., Any]
    call: Callable[[Callable[..., Any], Any, Sequence[Any]], tuple[Any, Sequence[Any]]]

    @property
    def name(self) -> str:
        return f"merge_call({getattr(self.fn, '__qualname__', self.fn)})"

    def final(self, partial: Any) -> Any:
        """Call the function; return each replica's part of the result and its changes."""
        arguments, along = zip(*super().final(partial), strict=True)
        result, news = self.call(self.fn, arguments[0] if len(arguments) == 1 else _merged(arguments), along)
        parts = [(component(result, number), news[number]) for number in range(len(arguments))]
        # The function may compute in any stream, and replicas read the result in theirs.
        synchronize(parts)
        return parts
