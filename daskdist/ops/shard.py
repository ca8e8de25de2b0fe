"""``shard``: every n-th element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Opener, Primitive
from daskdist.core.selection import Run
from daskdist.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Shard(Transformation):
    """The elements whose number is ``index`` modulo ``num_shards``."""

    num_shards: int
    index: int

    name = "shard"
    facts = Facts(keeps_spec=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "num_shards", self.num_shards, at_least=1)
        whole_number(self.name, "index", self.index, at_least=0)
        if self.index >= self.num_shards:
            raise ArgumentError(f"shard: index is {self.index}; of {self.num_shards} shards it is below that")

    @property
    def cardinality(self) -> int:
        rest = cardinality.beyond(self.source.cardinality, self.index)
        return cardinality.divide(rest, self.num_shards, drop_remainder=False)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Arrange(inputs, ShardRows(self.num_shards, self.index), inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class ShardRows:
    """The arithmetic of it."""

    num_shards: int
    index: int

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return ShardCursor(inputs[0](epoch), self.num_shards, self.index)


@dataclass
class ShardCursor:
    """The next one is ``to_skip`` elements ahead."""

    source: Cursor
    num_shards: int
    to_skip: int

    def pull(self) -> Run:
        while True:
            run: Run = self.source.pull()
            kept = np.arange(self.to_skip, len(run), self.num_shards)
            self.to_skip = (self.to_skip - len(run)) % self.num_shards if len(kept) else self.to_skip - len(run)
            if len(kept):
                return run.take(kept)
