"""Functions in the form that callers need: the first argument is the list of the handles' results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskdist.core.block import Rows, merge
from daskdist.core.primitive import Exhausted, Split
from daskdist.core.selection.runs import RunQueue
from daskdist.errors import ArgumentError


@dataclass(frozen=True)
class ReadGraphValue:
    """A call that reads a split from a value of a Dask graph."""

    function: Callable[..., Any]

    def __call__(self, values: Sequence[Any], split: Split) -> Any:
        return self.function(split, values[0])


@dataclass(frozen=True)
class ReadKeptSplit:
    """A call that reads a split whose payload is kept on a cluster.

    The split is passed without its payload; ``divide`` selects the part to read, or is None to read all.
    """

    function: Callable[[Split], Any]
    divide: Callable[[Split, int, int], Split] | None

    def __call__(self, values: Sequence[Any], split: Split, start: int, stop: Any) -> Any:
        split = replace(split, payload=values[0])
        return self.function(split if self.divide is None else self.divide(split, start, stop))


@dataclass(frozen=True)
class CallWithCarry:
    """A call of a function of rows and a carried value.

    Parameters
    ----------
    function
        The function, for elements some of which failed.
    name
        The name of the operation, for messages.
    num_rows, carried
        The number of results, and the value that was carried on, before a position was taken; None if it is unknown.
    """

    function: Callable[..., tuple[Rows, Any]]
    name: str
    num_rows: int | None = None
    carried: tuple[Any, ...] | None = None

    def __call__(self, values: Sequence[Any]) -> tuple[Rows, Any]:
        rows, carried = self.function(*values)
        if self.num_rows is not None:
            check_length(self.name, rows, self.num_rows)
        if self.carried is not None and not _are_equal(carried, self.carried):
            raise ArgumentError(
                f"load_state_dict: {self.name} has another state after {rows.label or 'some data'} than before the "
                "position was taken: the data or a function has changed, or an element fails that did not fail before, "
                "or the other way round"
            )
        return rows, carried


def _are_equal(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(map(_is_equal, values, others))


def _is_equal(value: Any, other: Any) -> bool:
    one, two = np.asarray(value), np.asarray(other)
    return np.array_equal(one, two, equal_nan=one.dtype.kind in "fc")


@dataclass(frozen=True)
class GetItem:
    """A call that returns one item of a result."""

    number: int

    def __call__(self, values: Sequence[Any]) -> Any:
        return values[0][self.number]


@dataclass(frozen=True, eq=False)
class Constant:
    """A call that returns a constant, which may not be hashable."""

    value: Any

    def __call__(self) -> Any:
        return self.value


@dataclass(frozen=True)
class OfLength:
    """A call that returns rows, checked to be as many as before a position was taken."""

    name: str
    num_rows: int

    def __call__(self, values: Sequence[Any]) -> Rows:
        rows: Rows = values[0]
        check_length(self.name, rows, self.num_rows)
        return rows


def check_length(name: str, rows: Rows, num_rows: int) -> None:
    """Check that a call makes as many elements as before a position was taken.

    Raises
    ------
    ArgumentError
        It makes another number.
    """
    if len(rows) != num_rows:
        raise changed_length(name, rows.label or "some data", num_rows, len(rows))


def changed_length(name: str, label: str, num_before: int, num_now: int) -> ArgumentError:
    """Return the error for a call that makes another number of elements than before a position was taken."""
    return ArgumentError(
        f"load_state_dict: {name} made {num_before} elements of {label} before the position was taken and makes "
        f"{num_now} now; the data or a function has changed"
    )


def fill_again(waiting: RunQueue, pull: Callable[[], Any], num_elements: int, name: str) -> None:
    """Fill a queue with the elements of a call that was made before a position was taken.

    Without one of them, all later elements would take the places of others.
    """
    try:
        waiting.fill(pull, num_elements)
    except Exhausted:
        raise ArgumentError(
            f"load_state_dict: {name} had more elements before the position was taken than there are now; the data or "
            "a function has changed"
        ) from None


def pulled(values: Sequence[Any], num_rows: int, first_needed: int | None = None) -> Rows:
    """Return the next rows of a pass that runs on a worker; called after the call for the rows before."""
    rows: Rows = values[0].pull(num_rows, first_needed)
    return rows


@dataclass(frozen=True)
class PulledAgain:
    """A call that returns the rows of a pass on a worker that it returned before a position was taken.

    Parameters
    ----------
    first
        The number of rows of the calls before; None if these are made, too.
    """

    first: int | None = None

    def __call__(self, values: Sequence[Any], num_rows: int) -> Rows:
        if self.first is None:
            return pulled_exactly(values, num_rows)
        rows: Rows = values[0].pull_from(self.first, num_rows)
        return rows


def pulled_exactly(values: Sequence[Any], num_rows: int, first_needed: int | None = None) -> Rows:
    """Return so many rows of a pass that runs on a worker; fewer at its end."""
    parts: list[Rows] = []
    while num_rows > 0:
        parts.append(pulled(values, num_rows, first_needed))
        if not len(parts[-1]):
            break
        num_rows -= len(parts[-1])
    return parts[0] if len(parts) == 1 else merge(parts, parts[0])
