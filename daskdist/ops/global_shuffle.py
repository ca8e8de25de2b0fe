"""``global_shuffle``: all elements in one uniformly random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.arguments import whole_number
from daskdist.core.block import Block
from daskdist.core.cardinality import INFINITE
from daskdist.core.node import Facts, Transformation
from daskdist.core.permutation import Permutation
from daskdist.core.primitive import (
    Arrange,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    LazySplits,
    Opener,
    Primitive,
    Read,
    Split,
)
from daskdist.core.seed import generator
from daskdist.core.selection import Index, Run, Selection, concat
from daskdist.errors import UnknownLengthError

# Elements ordered at a time.
_AT_ONCE = 65_536


@dataclass(frozen=True, eq=False)
class GlobalShuffle(Transformation):
    """All elements, every order as likely.

    Parameters
    ----------
    seed
        Decides the order, together with the operation's place in the pipeline.
    reshuffle_each_iteration
        Whether each pass has an order of its own.
    """

    seed: int
    reshuffle_each_iteration: bool = True
    node_id: int = field(default=0, repr=False)
    is_seeded: bool = field(default=True, repr=False)

    name = "global_shuffle"
    # Not `keeps_rows`: what is computed of elements is better computed after than held.
    facts = Facts(keeps_count=True, keeps_spec=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "seed", self.seed)
        if self.source.cardinality == INFINITE:
            raise UnknownLengthError(
                "global_shuffle: the dataset is endless, and all of it is put in order; use take(n)"
            )

    def rng(self, epoch: Epoch) -> np.random.Generator:
        """What draws the order of a pass."""
        return generator(self.seed, self.node_id, epoch if self.reshuffle_each_iteration else ())

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows_at = getattr(self.source, "rows_at", None)
        if rows_at is None:
            return Arrange(inputs, GlobalShuffleRows(self), inputs[0].grouped, name=self.name)
        # What can be had at any place is had where it is wanted: nothing is read before, nor kept.
        splits = partial(self._splits, ())
        return Read(splits, partial(_read, rows_at), self.name, divide=_divide, splits_of=self._splits)

    def _splits(self, epoch: Epoch) -> LazySplits:
        number = self.source.cardinality
        order = Permutation(number, self.rng(epoch))
        size = max(in_bytes("split-bytes") // 8, 1)
        return LazySplits(-(-number // size), partial(_split, order, size))


def _split(order: Permutation, size: int, number: int) -> Split:
    start = number * size
    num_rows = min(size, order.length - start)
    return Split(f"global_shuffle rows {start} on", (order, start), num_rows, num_rows * 8)


def _read(rows_at: Any, split: Split) -> Block:
    order, start = split.payload
    block: Block = rows_at(order.at(np.arange(start, start + (split.num_rows or 0))))
    return block


def _divide(split: Split, start: int, stop: int) -> Split:
    order, first = split.payload
    return replace(split, payload=(order, first + start), num_rows=stop - start, num_bytes=(stop - start) * 8)


@dataclass(frozen=True)
class GlobalShuffleRows:
    """The arithmetic of it."""

    shuffle: GlobalShuffle

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return GlobalShuffleCursor(inputs[0](epoch), self.shuffle, epoch)


@dataclass
class GlobalShuffleCursor:
    """All elements; ``position`` were given."""

    source: Cursor
    shuffle: GlobalShuffle
    epoch: Epoch
    runs: list[Run] = field(default_factory=list)
    is_read: bool = False
    position: int = 0
    order: Permutation | None = None
    starts: Index = field(default_factory=lambda: np.zeros(0, np.intp))

    def pull(self) -> Run:
        while not self.is_read:
            try:
                self.runs.append(self.source.pull())
            except Exhausted:
                self.is_read = True
        if self.order is None:
            self.starts = np.cumsum([0, *map(len, self.runs)])
            self.order = Permutation(int(self.starts[-1]), self.shuffle.rng(self.epoch))
        stop = min(self.position + _AT_ONCE, self.order.length)
        if self.position == stop:
            raise Exhausted
        places = self.order.at(np.arange(self.position, stop))
        self.position = stop
        return self._taken(places)

    def _taken(self, places: Index) -> Run:
        runs = self.runs
        if not all(isinstance(run, Selection) and isinstance(run.rows, range) for run in runs):
            self.runs = [concat(runs)]
            self.starts = self.starts[[0, -1]]
            return self.runs[0].take(places)
        # Whole blocks: which one, and where in it, is arithmetic too.
        which = np.searchsorted(self.starts, places, side="right") - 1
        firsts = np.array([run.rows.start for run in runs])  # type: ignore[union-attr]
        rows = places - self.starts.take(which) + firsts.take(which)
        return Selection(tuple(run.blocks[0] for run in runs), rows, which).without_unused()  # type: ignore[union-attr]
