"""Lineages: how blocks can be made again. A position in a stream stores them in place of the blocks themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from daskdist.core.primitive import Epoch
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, Zipped

# The path from the end of a pipeline to a primitive: the numbers of inputs, and keys that arrangements opened.
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PathKey:
    """A step of a path: the value that an arrangement opened a primitive for."""

    value: Any


@runtime_checkable
class OpenedCursor(Protocol):
    """A cursor that says which primitive it was opened for, and for which pass."""

    opened_at: tuple[Path, Epoch]


@runtime_checkable
class HasExtraState(Protocol):
    """A cursor whose position needs more than the fields that are data."""

    def saved(self) -> Any:
        """Return what a position needs besides those fields."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A cursor that has to prepare itself once its fields are set from a position."""

    def resumed(self, saved: Any) -> Any:
        """Continue from what `HasExtraState.saved` returned; None where the cursor has no such method."""
        ...


class Lineage:
    """The origin of one block, as data.

    Parameters
    ----------
    path, epoch
        The primitive whose cursor requested the block, and the pass. The path is None for rows that were only gathered.
    extent
        The part of the cursor's work, in a form that the cursor defines.
    run
        The elements that the block was made of, whose blocks are lineages; None if the block was read.
    """

    __slots__ = ("epoch", "extent", "nbytes", "num_rows", "path", "run")

    def __init__(self, path: Path | None, epoch: Epoch, extent: Any, run: Run | Zipped | None) -> None:
        self.path = path
        self.epoch = epoch
        self.extent = extent
        self.run = run
        # The size of the block, as far as known.
        self.num_rows = -1
        self.nbytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _lineage, (self.path, self.epoch, self.extent, self.run, self.num_rows, self.nbytes)


def _lineage(path: Path | None, epoch: Epoch, extent: Any, run: Any, num_rows: int, nbytes: int) -> Lineage:
    lineage = Lineage(path, epoch, extent, run)
    lineage.num_rows, lineage.nbytes = num_rows, nbytes
    return lineage


def with_blocks(run: Any, change: Any) -> Any:
    """Return a run with each block replaced by ``change(block)``."""
    if isinstance(run, Zipped):
        return Zipped(tuple(with_blocks(part, change) for part in run.parts), run.structure)
    if isinstance(run, Groups):
        return Groups(with_blocks(run.flat, change), run.bounds, run.inners)
    return run.with_blocks(tuple(map(change, run.blocks)))


def with_lineages(run: Any) -> Any:
    """Return a run with each block replaced by its lineage."""
    return with_blocks(run, lineage_of)


def lineage_of(ref: BlockRef) -> Lineage:
    """Return the lineage of a block."""
    lineage: Lineage = ref.lineage
    lineage.num_rows, lineage.nbytes = ref.num_rows, ref.nbytes
    return lineage


def without_moves(run: Selection) -> Selection:
    """Replace lineages of rows that were only gathered by the lineages of those rows.

    Otherwise the lineage of rows that are compacted repeatedly would grow with every move.
    """
    lineages: Any = run.blocks
    if all(lineage.path is not None for lineage in lineages):
        return run
    rows, places = run.row_numbers.copy(), run.places
    block_index: Index = np.empty(len(rows), np.intp)
    origins: list[Any] = []
    for place, lineage in enumerate(lineages):
        at = np.flatnonzero(places == place)
        if lineage.path is None and isinstance(lineage.run, Selection):
            inner = lineage.run.take(rows[at])
            rows[at], block_index[at] = inner.row_numbers, inner.places + len(origins)
            origins += inner.blocks
        else:
            block_index[at] = len(origins)
            origins.append(lineage)
    selection = Selection(tuple(origins), rows, block_index).without_unused()
    return Selection(
        selection.blocks,
        selection.row_numbers.astype(np.int32),
        None if selection.block_index is None else selection.block_index.astype(np.int32),
    )
