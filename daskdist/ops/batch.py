"""``batch``: consecutive elements stacked along a new first axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Cursor, Exhausted, NotReady, Primitive
from daskdist.core.selection.runs import Run, RunQueue, group
from daskdist.core.spec import ElementSpec

# The most groups of one pull: enough to share its cost, few enough that the first comes without delay.
_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Batch(Transformation):
    """Batches of ``batch_size`` elements, the last of which may be shorter."""

    batch_size: int
    drop_remainder: bool = False

    name = "batch"
    facts = Facts(per_worker=True, regroups=True, levels=1)

    def __post_init__(self) -> None:
        whole_number(self.name, "batch_size", self.batch_size, at_least=1)
        yes_or_no(self.name, "drop_remainder", self.drop_remainder)

    @property
    def drops_remainder(self) -> bool:
        return self.drop_remainder

    @property
    def group_size(self) -> int:
        return self.batch_size

    @property
    def spec(self) -> ElementSpec:
        return self.source.spec.grouped(self.batch_size if self.drop_remainder else None)

    @property
    def cardinality(self) -> int:
        return cardinality.divide(self.source.cardinality, self.batch_size, drop_remainder=self.drop_remainder)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows = ByCursor(BatchCursor, (self.batch_size, self.drop_remainder))
        return Arrange(inputs, rows, inputs[0].grouped + 1, name=self.name)


@dataclass
class BatchCursor:
    """A cursor of batches; elements not yet in a batch are in ``waiting``."""

    source: Cursor
    batch_size: int
    drop_remainder: bool
    waiting: RunQueue = field(default_factory=RunQueue)

    def skip(self, num_batches: int) -> int:
        """Skip all but the last batch, which may be incomplete."""
        return self.source.skip((num_batches - 1) * self.batch_size) // self.batch_size  # type: ignore[attr-defined,no-any-return]

    def pull(self) -> Run:
        size, waiting = self.batch_size, self.waiting
        try:
            waiting.fill(self.source.pull, size)
        except Exhausted:
            if not waiting or self.drop_remainder:
                raise
            rest = waiting.pop(size)
            return group(rest, np.array([0, len(rest)]))
        except NotReady:
            raise
        except Exception:
            # The batch that contains the failing element fails with it.
            if waiting:
                waiting.pop(size)
            raise
        # Only a batch that spans runs is assembled; others are slices of one run.
        num_batches = min(max(len(waiting.runs[0]) // size, 1), _AT_ONCE)
        return group(waiting.pop(num_batches * size), np.arange(num_batches + 1) * size)
