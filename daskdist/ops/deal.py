"""Splitting batches among replicas: each global batch cut into one piece a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daskdist.core.block import Bundle, Rows
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Compute, Context, Cursor, Epoch, Opener, Primitive
from daskdist.core.selection import Groups, Run
from daskdist.core.spec import ElementSpec, TensorSpec


def piece_bounds(num_rows: int, num_pieces: int) -> list[int]:
    """Where a batch is cut: pieces of ``ceil(num_rows / num_pieces)`` rows until they run out, then none.

    >>> piece_bounds(8, 3), piece_bounds(2, 4), piece_bounds(0, 2)
    ([0, 3, 6, 8], [0, 1, 2, 2, 2], [0, 0, 0])
    """
    size = -(-num_rows // num_pieces)
    return [min(k * size, num_rows) for k in range(num_pieces + 1)]


@dataclass(frozen=True, eq=False)
class Deal(Transformation):
    """Each batch as ``num_pieces`` elements: its rows, cut into contiguous pieces."""

    num_pieces: int

    name = "deal"
    facts = Facts(per_worker=True)

    @property
    def spec(self) -> ElementSpec:
        return self.source.spec.with_leaves([self._piece(leaf) for leaf in self.source.spec.leaves])

    def _piece(self, leaf: TensorSpec) -> TensorSpec:
        num_rows = leaf.shape[0]
        even = num_rows is not None and num_rows % self.num_pieces == 0
        return TensorSpec((num_rows // self.num_pieces if even and num_rows else None, *leaf.shape[1:]), leaf.dtype)

    @property
    def cardinality(self) -> int:
        cardinality = self.source.cardinality
        return cardinality * self.num_pieces if cardinality > 0 else cardinality

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        # Batches that are not gathered yet are cut by arithmetic, and only the pieces are gathered, each where
        # it is wanted. What a function made of a batch is cut where it lies.
        if inputs[0].grouped:
            return Arrange(inputs, DealGroups(self.num_pieces), inputs[0].grouped, name=self.name)
        return Compute(inputs[0], DealRows(self.num_pieces), "deal", factor=self.num_pieces)


@dataclass(frozen=True)
class DealGroups:
    """Batches that are not gathered yet, cut by arithmetic."""

    num_pieces: int

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return DealCursor(inputs[0](epoch), self.num_pieces)


@dataclass
class DealCursor:
    """No state of its own."""

    source: Cursor
    num_pieces: int

    def pull(self) -> Run:
        batches: Groups = self.source.pull()
        return batches.cut(self.num_pieces)


@dataclass(frozen=True)
class DealRows:
    """Each element of a block or bundle cut along its own first axis, leaf by leaf."""

    num_pieces: int

    def __call__(self, rows: Rows) -> Rows:
        pieces = []
        for leaves in map(rows.item, range(len(rows))):
            cuts = [piece_bounds(len(leaf), self.num_pieces) for leaf in leaves]
            pieces += [
                tuple(leaf[cut[k] : cut[k + 1]] for leaf, cut in zip(leaves, cuts, strict=True))
                for k in range(self.num_pieces)
            ]
        return Bundle(rows.structure, pieces, rows.label)
