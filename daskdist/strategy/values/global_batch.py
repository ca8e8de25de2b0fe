"""`GlobalBatch`: the batch of one step, which can be cut again for other replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daskdist.core.structure import Structure
from daskdist.strategy.values.extract import PerReplicaRef


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
