"""The sources of values on a cluster: results of calls, extractions of parts of them, and batches of such parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from daskdist.core.block import Rows, read_only, writable
from daskdist.core.spec import TensorSpec
from daskdist.core.structure import Structure, describe_nesting
from daskdist.devices import are_loaded
from daskdist.errors import DaskdistError
from daskdist.execute.caller import Handle
from daskdist.execute.messages.sizes import size_of
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.flat import LEAVES, flattened

# The structure of one value.
_LEAF: Final = flattened(0)[1]


class Extract(Protocol):
    """A function that extracts a part of a call's result."""

    # True if the rest of the result is large and should stay on its worker.
    is_small_part: bool

    def __call__(self, result: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class ExtractFromRows:
    """One leaf of one element of a block, or a writable copy of it; created only by `pick_from_rows`."""

    place: int
    leaf: int
    is_writable: bool = False
    is_small_part = True

    def __reduce__(self) -> tuple[Any, ...]:
        # A graph has many of these, and pickling a dataclass takes five times as long.
        return pick_from_rows, (self.place, self.leaf, self.is_writable)

    def __call__(self, result: Rows) -> Any:
        # The block stays in the worker's memory, and others may read the same leaf.
        leaf = read_only(result.item(self.place)[self.leaf])
        return writable(leaf) if self.is_writable else leaf


@lru_cache(maxsize=2**14)
def pick_from_rows(place: int, leaf: int, is_writable: bool = False) -> ExtractFromRows:
    """Return the extraction of one leaf of one element; cached, as places start at 0 in every block."""
    return ExtractFromRows(place, leaf, is_writable)


@dataclass(frozen=True, slots=True)
class ExtractAll:
    """The whole result."""

    is_small_part = False

    def __call__(self, result: Any) -> Any:
        return result


# The class is not frozen, as every step creates some objects, and those of a frozen class take three times as long.
@dataclass(slots=True)
class FlatResult:
    """The value that a function returned on a replica, as leaves."""

    leaves: list[Any]
    treespec: Any

    @classmethod
    def of(cls, result: Any) -> FlatResult:
        kind = type(result)
        if kind in LEAVES:
            return cls([result], _LEAF)
        return result if kind is cls else cls(*flattened(result))

    def __sizeof__(self) -> int:
        # Dask calls this; its own function knows the sizes of the leaves.
        return object.__sizeof__(self) + sum(map(size_of, self.leaves))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles hold NumPy arrays, as the receiver may have no device, or another one.
        return FlatResult, (list(map(host_array, self.leaves)) if are_loaded() else self.leaves, self.treespec)


# Objects are compared by identity, as every step compares them, and each layout has one set of objects.
@dataclass(frozen=True, slots=True, eq=False)
class ExtractFromResult:
    """One leaf of a function's result, whose structure must be that of its first result for such arguments."""

    leaf: int
    treespec: Any
    is_small_part = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ExtractFromResult, (self.leaf, self.treespec)

    def __call__(self, result: FlatResult) -> Any:
        if result.treespec != self.treespec:
            if result.treespec is None:
                return ABSENT
            raise DaskdistError(
                f"run: the function returned {describe_nesting(result.treespec)} here and "
                f"{describe_nesting(self.treespec)} in its first call with such arguments; it must return the "
                "same structure in all calls with arguments of the same structure and numbers of rows. Return an array "
                "in place of a nest whose length varies"
            )
        return result.leaves[self.leaf]


class Remote(NamedTuple):
    """A part of a call's result.

    Parameters
    ----------
    handle
        The handle of the result.
    pick
        Extracts the part.
    worker
        The address of the worker that computes it; None if unknown.
    step
        The results of all replicas in the same step, which fails if any of them fails.
    """

    handle: Handle
    pick: Extract
    worker: str | None = None
    step: Sequence[Handle] = ()


class PerReplicaRef(NamedTuple):
    """Parts of the results of a call on each replica.

    Parameters
    ----------
    caller
        The source that made the call.
    handles
        The handles of the results, in replica order.
    picks
        The extraction of each part, or a single one for all replicas.
    workers
        The address of each replica's worker; None if the handles know it, as those of calls on replicas do.
    spec
        The common spec of the parts, if known.
    is_step
        Whether the results are those of a step, which fails on all replicas if it fails on one.
    """

    caller: ResultSource
    handles: Sequence[Handle]
    picks: Extract | tuple[Extract, ...]
    workers: tuple[str | None, ...] | None = None
    spec: TensorSpec | None = None
    is_step: bool = False

    def pick(self, number: int) -> Extract:
        """Return the extraction of one replica's part."""
        return self.picks[number] if isinstance(self.picks, tuple) else self.picks

    def part(self, number: int) -> Remote:
        """Return one replica's part."""
        step = self.handles if self.is_step else ()
        handle = self.handles[number]
        worker: str | None = handle.worker if self.workers is None else self.workers[number]
        return Remote(handle, self.pick(number), worker, step)


class GlobalBatch:
    """The batch of one step, of which each replica has a piece.

    Parameters
    ----------
    structure
        The structure of an element.
    leaves
        For each leaf the pieces of all replicas.
    is_writable
        Whether replicas get writable copies.
    skips_empty
        Whether replicas without rows are skipped: `ABSENT` stands for their pieces.
    """

    __slots__ = ("is_writable", "leaves", "skips_empty", "structure")

    def __init__(
        self,
        structure: Structure,
        leaves: Sequence[PerReplicaRef | Sequence[Any]],
        *,
        is_writable: bool,
        skips_empty: bool,
    ) -> None:
        self.structure = structure
        self.leaves = leaves
        self.is_writable = is_writable
        self.skips_empty = skips_empty

    def __len__(self) -> int:
        first = self.leaves[0]
        return len(first.handles if type(first) is PerReplicaRef else first)

    def pieces(self, leaf: int) -> Sequence[Any]:
        """Return the pieces of all replicas of a leaf."""
        pieces = self.leaves[leaf]
        return list(map(pieces.part, range(len(self)))) if type(pieces) is PerReplicaRef else pieces


class Applied(NamedTuple):
    """A function of values, some of them asynchronous."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_operations: int
