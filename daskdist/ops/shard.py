"""``shard``: every n-th element."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Node, Transformation, check_numbered
from daskdist.core.primitive import Arrange, ByCursor, Primitive
from daskdist.core.selection.runs import Run
from daskdist.errors import ArgumentError, ShardingError
from daskdist.ops.take import CountingCursor
from daskdist.sharding import SHARD_HINT


@dataclass(frozen=True, eq=False)
class Shard(Transformation):
    """The elements whose number modulo ``num_shards`` is ``index``.

    Parameters
    ----------
    num_shards
        The number of shards; `SHARD_HINT` for a placeholder that the policy HINT replaces, whatever the index.
    index
        The number of this shard.
    is_worker_share
        Whether it is a worker's share, so that other workers count the same elements.
    """

    num_shards: int
    index: int
    is_worker_share: bool = field(default=False, repr=False)

    name = "shard"
    facts = Facts(keeps_spec=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "num_shards", self.num_shards)
        if self.is_shard_hint:
            return
        whole_number(self.name, "num_shards", self.num_shards, at_least=1)
        whole_number(self.name, "index", self.index, at_least=0)
        check_numbered(self.name, self.source)
        if self.index >= self.num_shards:
            raise ArgumentError(f"shard: index is {self.index}; with {self.num_shards} shards it must be below that")

    @property
    def is_shard_hint(self) -> bool:
        """True if it is a placeholder for a shard."""
        return self.num_shards == SHARD_HINT

    def on_share(self, index: int, num_shards: int) -> Node:
        if not self.is_shard_hint:
            return self
        return replace(self, num_shards=num_shards, index=index, is_worker_share=True)

    @property
    def cardinality(self) -> int:
        if self.is_shard_hint:
            return cardinality.UNKNOWN
        rest = cardinality.beyond(self.source.cardinality, self.index)
        return cardinality.divide(rest, self.num_shards, drop_remainder=False)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        if self.is_shard_hint:
            raise ShardingError(
                "shard(SHARD_HINT, SHARD_HINT) is a placeholder that AutoShardPolicy.HINT replaces when the dataset is "
                "distributed; iterate over strategy.distribute_dataset(dataset.with_options("
                "Options(auto_shard_policy='hint'))), or use shard(num_shards, index) with numbers"
            )
        rows = ByCursor(ShardCursor, (self.num_shards, self.index))
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name, is_counted=True)


@dataclass
class ShardCursor(CountingCursor):
    """A cursor of a shard, whose next element is ``to_skip`` elements ahead."""

    num_shards: int
    to_skip: int

    def skip(self, num_elements: int) -> int:
        """Skip elements of the shard with those of the others before them."""
        num_before: int = self.source.skip(self.to_skip + (num_elements - 1) * self.num_shards)  # type: ignore[attr-defined]
        num_skipped = max(-((self.to_skip - num_before) // self.num_shards), 0)
        self.to_skip += num_skipped * self.num_shards - num_before
        return num_skipped

    def pull(self) -> Run:
        while True:
            run: Run = self.source.pull()
            kept = np.arange(self.to_skip, len(run), self.num_shards)
            self.to_skip = (self.to_skip - len(run)) % self.num_shards if len(kept) else self.to_skip - len(run)
            if len(kept):
                return run.take(kept)
