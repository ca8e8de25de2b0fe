"""``global_shuffle``: all elements in one uniformly random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.arguments import whole_number
from daskdist.core.block import Block
from daskdist.core.cardinality import INFINITE
from daskdist.core.node import CountingNode, Facts, Transformation
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
from daskdist.core.randomness.seed import generator
from daskdist.core.selection.lazy_shuffle import shuffled
from daskdist.core.selection.permutation import Permutation
from daskdist.core.selection.runs import Run, concat
from daskdist.errors import UnknownLengthError
from daskdist.ops.range import numbered_split

# The most elements whose whole order is sent with each split; the order does not depend on it.
_MOST_SENT: Final = 2**16


@dataclass(frozen=True, eq=False)
class GlobalShuffle(CountingNode, Transformation):
    """All elements, in an order drawn uniformly from all orders."""

    seed: int
    reshuffle_each_iteration: bool = True

    name = "global_shuffle"
    # Not `keeps_rows`: results of computations take more memory than elements, so they are computed afterwards.
    facts = Facts(keeps_count=True, keeps_spec=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "seed", self.seed, at_most=None)
        if self.source.cardinality == INFINITE:
            raise UnknownLengthError(
                "global_shuffle: the dataset is endless, and all of it would be put in order; use take(n)"
            )

    def rng(self, epoch: Epoch) -> np.random.Generator:
        """Return the generator that draws the order of a pass."""
        numbers = self.passes.of(epoch) if self.reshuffle_each_iteration else ()
        return generator(self.seed, 1 + self.passes.stream, numbers)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows_at = self.source.rows_at
        if rows_at is None:
            return Arrange(inputs, self, inputs[0].grouped, name=self.name)
        # A source with random access is read in the shuffled order: nothing is read ahead or stored.
        splits = partial(self._splits, (0,))
        return Read(splits, partial(_read, rows_at), self.name, divide=_divide, splits_of=self._splits)

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        """Start a pass, as an `Arrangement` does."""
        return GlobalShuffleCursor(inputs[0](epoch), self, epoch)

    def _splits(self, epoch: Epoch) -> LazySplits:
        number = self.source.cardinality
        order = Permutation(number, self.rng(epoch), _MOST_SENT)
        size = max(in_bytes("split-bytes") // 8, 1)
        return LazySplits(-(-number // size), partial(_split, order, size))


def _split(order: Permutation, size: int, number: int) -> Split:
    start = number * size
    num_rows = min(size, order.length - start)
    return numbered_split("global_shuffle", start, (order, start), num_rows)


def _read(rows_at: Any, split: Split) -> Block:
    order, start = split.payload
    block: Block = rows_at(order.at(np.arange(start, start + (split.num_rows or 0))))
    return block


def _divide(split: Split, start: int, stop: int) -> Split:
    order, first = split.payload
    return numbered_split("global_shuffle", first + start, (order, first + start), stop - start)


@dataclass
class GlobalShuffleCursor:
    """A cursor that reads all elements, then returns them in order."""

    source: Cursor
    shuffle: GlobalShuffle
    epoch: Epoch
    runs: list[Run] = field(default_factory=list)
    is_read: bool = False

    def pull(self) -> Run:
        while not self.is_read:
            try:
                self.runs.append(self.source.pull())
            except Exhausted:
                self.is_read = True
        if not self.runs:
            raise Exhausted
        elements, self.runs = concat(self.runs).without_unused(), []
        return shuffled(elements, self.shuffle.rng(self.epoch), _MOST_SENT)
