"""Input pipelines: the stream of one worker, or of all where they share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Node, Source, upstream, walk
from daskdist.core.primitive import Primitive, Split
from daskdist.ops.deal import piece_bounds
from daskdist.ops.with_options import merged_options
from daskdist.passes.plan import plan


@dataclass(frozen=True)
class Pipeline:
    """The stream of one worker, or of all where they share one.

    Parameters
    ----------
    node
        Each of its elements is a piece for one replica.
    readers
        The workers that read it.
    consumers
        The worker of each replica it serves, in replica order.
    """

    node: Node
    readers: tuple[str | None, ...]
    consumers: tuple[str | None, ...]

    @cached_property
    def primitive(self) -> Primitive:
        """What it comes down to."""
        return plan(self.node)

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that may be outstanding on each reader; the setting ``window-bytes`` if None."""
        return merged_options(self.node).memory_budget_bytes

    def splits_by_reader(self) -> Iterator[tuple[str | None, list[Split]]]:
        """Each reader, and the splits it reads: of every source they take turns."""
        sources = [node for node in walk(self.node) if isinstance(node, Source) and node.is_listed]
        for turn, reader in enumerate(self.readers):
            yield reader, [split for node in sources for split in node.splits()[turn :: len(self.readers)]]


def num_steps(pipelines: Sequence[Pipeline]) -> int:
    """The steps that pipelines which each cut their own batches come to, where arithmetic tells; else UNKNOWN.

    A step is one in which some piece has rows, so how many rows each batch has must be known.
    """
    cardinalities = [pipeline.node.cardinality for pipeline in pipelines]
    if INFINITE in cardinalities or UNKNOWN in cardinalities:
        return INFINITE if INFINITE in cardinalities else UNKNOWN
    steps: set[int] = set()
    for pipeline in pipelines:
        batch = upstream(pipeline.node.inputs[0])
        num_rows = batch.inputs[0].cardinality if batch.inputs else UNKNOWN
        if batch.group_size is None or num_rows < 0:
            return UNKNOWN
        num_pieces = pipeline.node.cardinality // max(batch.cardinality, 1)
        for number in range(batch.cardinality):
            bounds = piece_bounds(min(batch.group_size, num_rows - number * batch.group_size), num_pieces)
            with_rows = [k for k, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
            steps.update((number * num_pieces + k) // len(pipeline.consumers) for k in with_rows)
    return len(steps)
