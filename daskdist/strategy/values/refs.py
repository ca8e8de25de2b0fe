"""References to values that are not in this process: the result that they are a part of, and which part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from daskdist.core.block import Rows, read_only, writable
from daskdist.core.failing.short_traceback import with_short_traceback
from daskdist.core.spec import TensorSpec
from daskdist.core.structure import Structure, describe_nesting
from daskdist.devices import are_loaded
from daskdist.errors import DaskdistError
from daskdist.execute.messages.sizes import size_of
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.flat import LEAVES, flattened, loaded_structure, pickled_structure

# The structure of one value.
_LEAF: Final = flattened(0)[1]
# A function that returns a part of a result.
Pick = Callable[[Any], Any]


def whole(result: Any) -> Any:
    """Return the whole result."""
    return result


@dataclass(frozen=True, slots=True)
class RowLeaf:
    """One leaf of one element of a block, or a writable copy of it; created only by `row_leaf`."""

    place: int
    leaf: int
    is_writable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A graph has many of these, and pickling a dataclass takes five times as long.
        return row_leaf, (self.place, self.leaf, self.is_writable)

    def __call__(self, result: Rows) -> Any:
        # The block stays in the worker's memory, and others may read the same leaf.
        leaf = read_only(result.item(self.place)[self.leaf])
        return writable(leaf) if self.is_writable else leaf


@lru_cache(maxsize=2**14)
def row_leaf(place: int, leaf: int, is_writable: bool = False) -> RowLeaf:
    """Return the part that is one leaf of one element; cached, as places start at 0 in every block."""
    return RowLeaf(place, leaf, is_writable)


@lru_cache(maxsize=64)
def list_spec(num_leaves: int) -> Any:
    """Return the structure of a list of ``num_leaves`` leaves."""
    return flattened([0] * num_leaves)[1]


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

    @classmethod
    def listed(cls, leaves: list[Any]) -> FlatResult:
        """Return a list of leaves, which are not flattened any more even if they are nests."""
        return cls(leaves, list_spec(len(leaves)))

    def __sizeof__(self) -> int:
        # Dask calls this; its own function knows the sizes of the leaves.
        return object.__sizeof__(self) + sum(map(size_of, self.leaves))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles hold NumPy arrays, as the receiver may have no device, or another one.
        return FlatResult, (list(map(host_array, self.leaves)) if are_loaded() else self.leaves, self.treespec)


@dataclass(frozen=True, slots=True, eq=False)
class ResultLeaf:
    """One leaf of a function's result, whose structure must be that of its first result for such arguments.

    Parameters
    ----------
    leaf
        The number of the leaf.
    structure
        The structure, as `pickled_structure` returns it.
    """

    leaf: int
    structure: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return result_leaf, (self.leaf, self.structure)

    def __call__(self, result: FlatResult) -> Any:
        treespec, _ = loaded_structure(self.structure)
        if result.treespec != treespec:
            if result.treespec is None:
                return ABSENT
            raise DaskdistError(
                f"run: the function returned {describe_nesting(result.treespec)} here and "
                f"{describe_nesting(treespec)} in its first call with such arguments; it must return the "
                "same structure in all calls with arguments of the same structure and numbers of rows. Return an array "
                "in place of a nest whose length varies"
            )
        return result.leaves[self.leaf]


@lru_cache(maxsize=1024)
def result_leaf(leaf: int, structure: bytes) -> ResultLeaf:
    """Return the part that is one leaf of a result; cached, as each step has some."""
    return ResultLeaf(leaf, structure)


@lru_cache(maxsize=1024)
def leaves_of_results(structure: bytes) -> tuple[ResultLeaf, ...]:
    """Return the parts of the results of a structure that `pickled_structure` returned, one for each leaf."""
    return tuple([result_leaf(leaf, structure) for leaf in range(loaded_structure(structure)[0].num_leaves)])


@lru_cache(maxsize=64)
def leaves_of_list(num_leaves: int) -> tuple[ResultLeaf, ...]:
    """Return the parts of results that are lists of ``num_leaves`` leaves."""
    return leaves_of_results(pickled_structure(list_spec(num_leaves)))


@dataclass(frozen=True, slots=True, eq=False)
class TaskResults:
    """The results of tasks of Dask, one for each replica.

    Parameters
    ----------
    futures
        The futures; None for a replica without rows.
    workers
        The address of the worker that has or computes each, if known.
    """

    futures: Sequence[Any]
    workers: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.futures)


@dataclass(slots=True, eq=False)
class Ref:
    """The name of a value that is not in this process.

    Parameters
    ----------
    source
        The `Call` or the `TaskResults` whose result the value is a part of.
    place
        The number of the result in the source.
    pick
        Extracts the part.
    """

    source: Any
    place: int
    pick: Pick = whole

    @property
    def worker(self) -> str | None:
        """The address of the worker that computes the value, if known."""
        workers: Sequence[str | None] = self.source.workers
        # A call that was made again may have fewer results.
        return workers[self.place] if self.place < len(workers) else None


class Refs(NamedTuple):
    """The names of the values of all replicas.

    Parameters
    ----------
    caller
        The object that fetches them.
    source
        The source of the results, one for each replica.
    picks
        Extracts the part of each, or of all.
    spec
        The common spec of the values, if known.
    """

    caller: ResultSource
    source: Any
    picks: Pick | tuple[Pick, ...]
    spec: TensorSpec | None = None

    def ref(self, number: int) -> Ref:
        """Return the name of one replica's value."""
        picks: Any = self.picks
        return Ref(self.source, number, picks[number] if type(picks) is tuple else picks)


# Types of arguments that are certainly leaves; those of pending values are added as they are defined.
REFERENCE_LEAVES: Final[set[type]] = {*LEAVES, Ref}


class Pending:
    """A value that may or may not be in this process: the base of `AsyncValue`.

    Attributes
    ----------
    caller
        The object that fetches the value.
    ref
        The name of the value; None once it is in this process.
    known, worker_before
        The value, once it is in this process, and the worker that it was on.
    """

    __slots__ = ("caller", "known", "ref", "worker_before")

    caller: ResultSource
    ref: Ref | None
    known: Any
    worker_before: str | None

    def __init_subclass__(cls) -> None:
        REFERENCE_LEAVES.add(cls)

    @property
    def worker(self) -> str | None:
        """The address of the worker that computes or computed the value, if known."""
        ref = self.ref
        return self.worker_before if ref is None else ref.worker

    @with_short_traceback
    def result(self) -> Any:
        """Wait for the value and return it."""
        # Another thread may read it at the same time.
        if (ref := self.ref) is not None:
            (self.known,), self.worker_before = self.caller.results([ref]), ref.worker
            self.ref = None
        return self.known


@with_short_traceback
def results_of(values: Sequence[Any]) -> list[Any]:
    """Return several values, and nests of values; wait for the pending ones and fetch them together."""
    leaves, treespec = flattened(list(values), REFERENCE_LEAVES)
    # Another thread may read a value at the same time.
    pending = [(leaf, ref) for leaf in leaves if isinstance(leaf, Pending) and (ref := leaf.ref) is not None]
    for caller in {id(leaf.caller): leaf.caller for leaf, _ in pending}.values():
        asked = [(leaf, ref) for leaf, ref in pending if leaf.caller is caller]
        for (leaf, ref), result in zip(asked, caller.results([ref for _, ref in asked]), strict=True):
            leaf.known, leaf.worker_before = result, ref.worker
            leaf.ref = None
    results: list[Any] = treespec.unflatten([leaf.known if isinstance(leaf, Pending) else leaf for leaf in leaves])
    return results


@dataclass(slots=True, eq=False)
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

    structure: Structure
    leaves: Sequence[Refs | Sequence[Any]]
    is_writable: bool
    skips_empty: bool

    def __len__(self) -> int:
        first = self.leaves[0]
        return len(first.source if type(first) is Refs else first)

    def pieces(self, leaf: int) -> Sequence[Any]:
        """Return the pieces of all replicas of a leaf."""
        pieces = self.leaves[leaf]
        return list(map(pieces.ref, range(len(self)))) if type(pieces) is Refs else pieces
