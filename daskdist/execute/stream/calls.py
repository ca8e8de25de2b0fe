"""Functions in the form of calls on handles, which are given the results of those first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskdist.core.block import Rows
from daskdist.core.primitive import Split


@dataclass(frozen=True)
class ReadGraphValue:
    """A reader of values of a Dask graph."""

    function: Callable[..., Any]

    def __call__(self, values: Sequence[Any], split: Split) -> Any:
        return self.function(split, values[0])


@dataclass(frozen=True)
class ReadKeptSplit:
    """A reader of data that is kept on a cluster.

    The split comes without its data; ``divide`` gives the part to read, where that is not all of it.
    """

    function: Callable[[Split], Any]
    divide: Callable[[Split, int, int], Split] | None

    def __call__(self, values: Sequence[Any], split: Split, start: int, stop: Any) -> Any:
        split = replace(split, payload=values[0])
        return self.function(split if self.divide is None else self.divide(split, start, stop))


@dataclass(frozen=True)
class CallWithCarry:
    """A function of rows and what is carried on."""

    function: Callable[[Rows, Any], Any]

    def __call__(self, values: Sequence[Any]) -> Any:
        return self.function(*values)


@dataclass(frozen=True)
class GetItem:
    """One part of a result."""

    number: int

    def __call__(self, values: Sequence[Any]) -> Any:
        return values[0][self.number]


def pulled(values: Sequence[Any], num_rows: int) -> Rows:
    """The next rows of a pass that is on a worker; called after the call that gave those before."""
    rows: Rows = values[0].pull(num_rows)
    return rows
