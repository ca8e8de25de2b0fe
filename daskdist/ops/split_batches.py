"""Splitting of batches among replicas: each global batch is cut into one piece per replica."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from daskdist.core.block import Bundle, Rows
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Compute, Cursor, Primitive, gathered
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.errors import ShardingError


def piece_bounds(num_rows: int, num_pieces: int) -> list[int]:
    """Return the bounds of the pieces of a batch: ``ceil(num_rows / num_pieces)`` rows each until none are left.

    >>> piece_bounds(8, 3), piece_bounds(2, 4), piece_bounds(0, 2)
    ([0, 3, 6, 8], [0, 1, 2, 2, 2], [0, 0, 0])
    """
    size = -(-num_rows // num_pieces)
    return [min(k * size, num_rows) for k in range(num_pieces + 1)]


def num_pieces_with_rows(num_rows: int, num_pieces: int) -> int:
    """Return the number of pieces of a batch that have rows; these are the first ones.

    >>> num_pieces_with_rows(5, 4), num_pieces_with_rows(0, 4)
    (3, 0)
    """
    return -(-num_rows // -(-num_rows // num_pieces)) if num_rows else 0


@dataclass(frozen=True, eq=False)
class SplitBatches(Transformation):
    """Each batch as ``num_pieces`` elements: its rows, cut into contiguous pieces.

    Parameters
    ----------
    num_pieces
        The number of pieces of each batch.
    is_whole
        Whether batches are assembled before they are cut, so that one that fails is left out as a whole.
    """

    num_pieces: int
    is_whole: bool = False

    name = "split_batches"
    facts = Facts(per_worker=True)

    @property
    def spec(self) -> ElementSpec:
        return self.source.spec.with_leaves([self._piece(leaf) for leaf in self.source.spec.leaves])

    def _piece(self, leaf: TensorSpec) -> TensorSpec:
        num_rows = leaf.shape[0]
        is_even = num_rows is not None and num_rows % self.num_pieces == 0
        return replace(leaf, shape=(num_rows // self.num_pieces if is_even and num_rows else None, *leaf.shape[1:]))

    @property
    def cardinality(self) -> int:
        cardinality = self.source.cardinality
        return cardinality * self.num_pieces if cardinality > 0 else cardinality

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        # Batches that are not gathered yet are cut by arithmetic, and each piece is gathered on its worker. Batches
        # that a function returned are cut where they are.
        if inputs[0].grouped and not self.is_whole:
            pieces = ByCursor(SplitBatchesCursor, (self.num_pieces,))
            return Arrange(inputs, pieces, inputs[0].grouped, name=self.name)
        return Compute(gathered(inputs[0]), SplitBatchesRows(self.num_pieces), "split_batches", factor=self.num_pieces)


@dataclass
class SplitBatchesCursor:
    """A cursor of the pieces of batches that are not gathered yet, without state."""

    source: Cursor
    num_pieces: int

    def skip(self, num_pieces: int) -> int:
        """Skip whole batches."""
        return self.source.skip(num_pieces // self.num_pieces) * self.num_pieces  # type: ignore[attr-defined,no-any-return]

    def pull(self) -> Run:
        batches: Groups = self.source.pull()
        return batches.cut(self.num_pieces)


@dataclass(frozen=True)
class SplitBatchesRows:
    """A function that cuts each element of a block or bundle along its first axis, leaf by leaf."""

    num_pieces: int

    def __call__(self, rows: Rows) -> Rows:
        pieces = []
        for index in range(len(rows)):
            leaves = rows.item(index)
            cuts = [self._cut(leaf, number, rows, index) for number, leaf in enumerate(leaves)]
            pieces += [
                tuple(leaf[cut[k] : cut[k + 1]] for leaf, cut in zip(leaves, cuts, strict=True))
                for k in range(self.num_pieces)
            ]
        return Bundle(rows.structure, pieces, rows.label)

    def _cut(self, leaf: Any, number: int, rows: Rows, index: int) -> list[int]:
        if not getattr(leaf, "shape", ()):
            raise ShardingError(
                f"{rows.where(index)} cannot be split over {self.num_pieces} replicas: its leaf "
                f"{_path(rows.structure, number)} is a scalar and has no batch dimension. Give it a row for each "
                "row of the batch"
            )
        return piece_bounds(len(leaf), self.num_pieces)


def _path(structure: Structure, number: int) -> str:
    return structure.paths[number] or "(the element)"
