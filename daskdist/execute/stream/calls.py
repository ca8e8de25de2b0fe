"""Functions in the form that callers need: the first argument is the list of the handles' results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskdist.core.block import Rows, merge
from daskdist.core.failing.failed_elements import failed_of
from daskdist.core.primitive import Split
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
    """A call of a function of rows and a carried value, with further arguments."""

    function: Callable[..., Any]

    def __call__(self, values: Sequence[Any], *args: Any) -> Any:
        return self.function(*values, *args)


@dataclass(frozen=True)
class GetItem:
    """A call that returns one item of a result."""

    number: int

    def __call__(self, values: Sequence[Any]) -> Any:
        return values[0][self.number]


@dataclass(frozen=True)
class Constant:
    """A call that returns a constant."""

    value: Any

    def __call__(self) -> Any:
        return self.value


@dataclass(frozen=True)
class OfLength:
    """A call that returns rows, checked to be as many as before a position was taken.

    Parameters
    ----------
    name
        The name of the operation, for messages.
    num_rows
        The number of rows.
    """

    name: str
    num_rows: int

    def __call__(self, values: Sequence[Any]) -> Rows:
        rows: Rows = values[0]
        if len(rows) == self.num_rows:
            return rows
        for _, failed in failed_of(rows):
            raise failed.again()
        raise changed_length(self.name, rows.label or "some data", self.num_rows, len(rows))


def changed_length(name: str, what: str, num_before: int, num_now: int) -> ArgumentError:
    """Return the error for a call that makes another number of elements than before a position was taken."""
    return ArgumentError(
        f"load_state_dict: {name} made {num_before} elements of {what} before the position was taken and makes "
        f"{num_now} now; the data or a function has changed"
    )


def pulled(values: Sequence[Any], num_rows: int) -> Rows:
    """Return the next rows of a pass that runs on a worker; called after the call for the rows before."""
    rows: Rows = values[0].pull(num_rows)
    return rows


def pulled_exactly(values: Sequence[Any], num_rows: int) -> Rows:
    """Return so many rows of a pass that runs on a worker; fewer at its end."""
    parts: list[Rows] = []
    while num_rows > 0:
        parts.append(pulled(values, num_rows))
        if not len(parts[-1]):
            break
        num_rows -= len(parts[-1])
    return parts[0] if len(parts) == 1 else merge(parts, parts[0])
