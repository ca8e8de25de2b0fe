"""The source of a value on a cluster: the result of a call, and the extraction of a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from daskdist.core.block import Rows, read_only, writable
from daskdist.core.spec import TensorSpec
from daskdist.core.structure import describe_nesting
from daskdist.devices import are_loaded
from daskdist.errors import DaskdistError
from daskdist.execute.caller import Handle
from daskdist.execute.messages.sizes import size_of
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.flat import flattened


class Extract(Protocol):
    """Takes a part out of a call's result."""

    # True if the rest of the result is large, so that it had better stay on its worker.
    is_small_part: bool

    def __call__(self, result: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class ExtractFromRows:
    """One leaf of one element of a block, or a copy of it that can be written into; made by `pick_from_rows` only."""

    place: int
    leaf: int
    is_writable: bool = False
    is_small_part = True

    def __reduce__(self) -> tuple[Any, ...]:
        # Many go with each graph, and what dataclasses have for it takes five times as long.
        return pick_from_rows, (self.place, self.leaf, self.is_writable)

    def __call__(self, result: Rows) -> Any:
        # Others may be given the same: it stays in the worker's memory.
        leaf = read_only(result.item(self.place)[self.leaf])
        return writable(leaf) if self.is_writable else leaf


@lru_cache(maxsize=2**14)
def pick_from_rows(place: int, leaf: int, is_writable: bool = False) -> ExtractFromRows:
    """Return the extraction of one leaf of one element; cached, as places begin at 0 in each block."""
    return ExtractFromRows(place, leaf, is_writable)


@dataclass(frozen=True, slots=True)
class ExtractAll:
    """The whole result."""

    is_small_part = False

    def __call__(self, result: Any) -> Any:
        return result


# Not frozen: each step makes some, and that takes three times as long.
@dataclass(slots=True)
class FlatResult:
    """The value that a function returned on a replica, as leaves."""

    leaves: list[Any]
    treespec: Any

    @classmethod
    def of(cls, result: Any) -> FlatResult:
        return result if type(result) is cls else cls(*flattened(result))

    def __sizeof__(self) -> int:
        # Dask asks for it, and knows the sizes of what there is in it.
        return object.__sizeof__(self) + sum(map(size_of, self.leaves))

    def __reduce__(self) -> tuple[Any, ...]:
        # Data that leaves the process leaves the device: the receiver may have none, and puts it on its own.
        return FlatResult, (list(map(host_array, self.leaves)) if are_loaded() else self.leaves, self.treespec)


# Told apart by identity: each step asks, and those of one layout are the same.
@dataclass(frozen=True, slots=True, eq=False)
class ExtractFromResult:
    """One leaf of what a function gave, if that is of the structure it gave before."""

    leaf: int
    treespec: Any
    is_small_part = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ExtractFromResult, (self.leaf, self.treespec)

    def __call__(self, result: FlatResult) -> Any:
        if result.treespec != self.treespec:
            raise DaskdistError(
                f"run: the function returned {describe_nesting(result.treespec)} here and "
                f"{describe_nesting(self.treespec)} in its first call; it must nest its values alike in all calls"
            )
        return result.leaves[self.leaf]


class Remote(NamedTuple):
    """A part of a call's result.

    Parameters
    ----------
    handle
        What the caller gave for the result.
    pick
        Takes the part out.
    worker
        The address of the worker it was asked of; None where that is not known.
    step
        The results of all replicas in the same step, which fails if one of them does.
    """

    handle: Handle
    pick: Extract
    worker: str | None = None
    step: Sequence[Handle] = ()


class PerReplicaRef(NamedTuple):
    """Parts of what a call gave on each replica.

    Parameters
    ----------
    caller
        Who made the call.
    handles
        Of the results.
    picks
        What takes the part out of each; one where it is the same for all.
    workers
        For each replica the address of its worker.
    spec
        What is known of all of them.
    is_step
        Whether the results are those of a step, which fails on all replicas if it does on one.
    """

    caller: ResultSource
    handles: Sequence[Handle]
    picks: Extract | tuple[Extract, ...]
    workers: tuple[str | None, ...]
    spec: TensorSpec | None = None
    is_step: bool = False

    def pick(self, number: int) -> Extract:
        """Return the extraction of one replica's part."""
        return self.picks[number] if isinstance(self.picks, tuple) else self.picks

    def part(self, number: int) -> Remote:
        """Return one replica's part."""
        step = self.handles if self.is_step else ()
        return Remote(self.handles[number], self.pick(number), self.workers[number], step)


class Applied(NamedTuple):
    """A function of values, some of them asynchronous."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_operations: int
