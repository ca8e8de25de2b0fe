"""Rows of blocks in a random order that is worked out where they are looked at, and takes no memory until then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from daskdist.core.permutation import Permutation
from daskdist.core.selection import BlockRef, Groups, Index, Run, Selection
from daskdist.core.stretched import Stretched

# From so many rows a block on, on the average, it is taken for sure that there are some of each.
_MANY_ROWS: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Permuted:
    """What stands from ``start`` to ``stop`` in a random order of rows of blocks.

    Parameters
    ----------
    rows, which
        The rows before they are put in order, as in a `Selection`, or in stretches.
    order
        Of all of them.
    start, stop
        Which part of it.
    """

    rows: range | Index | Stretched
    which: Index | None
    order: Permutation
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def by_row(self) -> tuple[Index, Index | None]:
        """``rows`` and ``which`` of that part, with a number for each row."""
        return self._rows_at(self.order.between(self.start, self.stop))

    def taken(self, index: Index) -> tuple[Index, Index | None]:
        """The same, of those in some places."""
        return self._rows_at(self.order.at(index + self.start))

    def _rows_at(self, places: Index) -> tuple[Index, Index | None]:
        if isinstance(self.rows, Stretched):
            return self.rows.taken(places)
        if isinstance(self.rows, range):
            return places + self.rows.start if self.rows.start else places, None
        return self.rows.take(places), None if self.which is None else self.which.take(places)


class Shuffled(Selection):
    """A selection in a random order.

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    permuted
        Which rows.
    """

    __slots__ = ("_found", "permuted")

    def __init__(self, blocks: tuple[BlockRef, ...], permuted: Permuted) -> None:
        self.blocks = blocks
        self.permuted = permuted
        self._found: Selection | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Shuffled, (self.blocks, self.permuted)

    def __len__(self) -> int:
        return len(self.permuted)

    def by_row(self) -> Selection:
        """The same, worked out."""
        if self._found is None:
            rows, which = self.permuted.by_row()
            self._found = Selection(self.blocks, rows, which if len(self.blocks) > 1 else None)
        return self._found

    @property
    def rows(self) -> range | Index:  # type: ignore[override]
        return self.by_row().rows

    @property
    def which(self) -> Index | None:  # type: ignore[override]
        return self.by_row().which

    is_range = False
    stretches = None

    def of_blocks(self, blocks: tuple[Any, ...]) -> Selection:
        return Shuffled(blocks, self.permuted)

    def __getitem__(self, part: slice) -> Selection:
        start, stop, _ = part.indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        first = self.permuted.start
        return Shuffled(self.blocks, replace(self.permuted, start=first + start, stop=first + max(start, stop)))

    def take(self, index: Index) -> Selection:
        rows, which = self.permuted.taken(index)
        return Selection(self.blocks, rows, which if len(self.blocks) > 1 else None)

    def without_unused(self) -> Selection:
        # So many have rows of each block, of nearly all orders.
        return self if len(self) >= _MANY_ROWS * len(self.blocks) else self.by_row().without_unused()


def shuffled(run: Run, rng: np.random.Generator) -> Run:
    """The elements of a run, which holds on to no block without any, in a random order."""
    order = Permutation(len(run), rng)
    if isinstance(run, Groups):
        return run.take(order.at(np.arange(len(run))))
    if run.stretches is not None and not run.is_range:
        return Shuffled(run.blocks, Permuted(run.stretches, None, order, 0, len(run)))
    return Shuffled(run.blocks, Permuted(run.rows, run.which, order, 0, len(run)))
