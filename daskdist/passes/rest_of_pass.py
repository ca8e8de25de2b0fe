"""The rest of a pass over a distributed dataset, shared out among other replicas and workers than its beginning.

A position records how the pass was shared out, and how many elements each of its streams has returned. If it is shared
out in the same way now, these streams continue. Otherwise they are opened as they were, and their remaining elements,
in the order of steps and replicas, are batched again for the current replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskdist.core.node import Node
from daskdist.core.primitive import Arrange, ByCursor, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run, RunQueue, concat
from daskdist.core.selection.skipping import advance
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec
from daskdist.ops.batch import BatchCursor
from daskdist.ops.split_batches import SplitBatchesCursor
from daskdist.ops.unbatch import ungrouped


@dataclass(frozen=True)
class PassLayout:
    """The way in which a pass is shared out.

    Parameters
    ----------
    num_workers
        The number of workers.
    num_replicas
        The number of replicas of each input pipeline.
    policy
        The name of the sharding policy.
    batch_size
        The global batch size; None if no ``batch`` says it.
    drops_remainder
        Whether that ``batch`` drops an incomplete batch.
    split_bytes
        The setting ``split-bytes`` if workers share files by their splits; 0 if they do not, and None if unknown.
    """

    num_workers: int
    num_replicas: tuple[int, ...]
    policy: str
    batch_size: int | None
    drops_remainder: bool
    split_bytes: int | None = None

    def as_plain(self) -> list[Any]:
        """Return the layout as data."""
        content = [self.num_workers, self.num_replicas, self.policy, self.batch_size, self.drops_remainder]
        return [*content, self.split_bytes]

    @classmethod
    def of_plain(cls, content: Sequence[Any]) -> PassLayout:
        """Return the layout that `as_plain` returned."""
        return cls(*content)

    def is_like(self, other: PassLayout) -> bool:
        """Return whether both share out a pass in the same way; the number of workers counts if each has a pipeline."""
        if self.split_bytes is None:
            other = replace(other, split_bytes=None)
        if len(self.num_replicas) == len(other.num_replicas) == 1 and "HINT" not in (self.policy, other.policy):
            other = replace(other, num_workers=self.num_workers, policy=self.policy)
        return self == other


@dataclass(frozen=True)
class PassSection:
    """A section of a pass, in which its rows were shared out among the same replicas and workers.

    Parameters
    ----------
    layout
        These replicas and workers.
    positions
        For each of its streams the pass, the seeds that operations drew, and the number of elements and of errors.
    """

    layout: PassLayout
    positions: tuple[tuple[Epoch, list[int], int, int], ...]

    def as_plain(self) -> list[Any]:
        """Return the section as data."""
        return [self.layout.as_plain(), list(self.positions)]

    @classmethod
    def of_plain(cls, content: Sequence[Any]) -> PassSection:
        """Return the section that `as_plain` returned."""
        layout, positions = content
        return cls(PassLayout.of_plain(layout), tuple(positions))


@dataclass(frozen=True)
class RestOfStreams:
    """Row arithmetic of the remaining elements of streams, in the order of the steps that they would have made."""

    section: PassSection

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        sources = []
        for opener, (its_epoch, _, num_elements, num_errors) in zip(inputs, self.section.positions, strict=True):
            source: Any = opener(its_epoch)
            advance(source, num_elements, num_errors)
            sources.append(source)
        return StepOrderCursor(sources, self.section.layout.num_replicas)


@dataclass
class StepOrderCursor:
    """A cursor over the elements of several streams in turn: from each as many as it has replicas."""

    sources: list[Any]
    num_replicas: tuple[int, ...]
    queues: list[RunQueue] = field(default_factory=list)

    def pull(self) -> Run:
        if not self.queues:
            self.queues = [RunQueue() for _ in self.sources]
        while True:
            run = self._round()
            if not isinstance(run, Groups):
                return run
            # A batch without rows fills up a step in which other replicas have rows.
            full = np.flatnonzero(run.lengths)
            if len(full):
                return run if len(full) == len(run) else run.take(full)

    def _round(self) -> Run:
        turns = []
        for source, queue, number in zip(self.sources, self.queues, self.num_replicas, strict=True):
            try:
                queue.fill(source.pull, number)
            except Exhausted:
                if not queue:
                    continue
            turns.append((queue, number))
        if not turns:
            raise Exhausted
        num_rounds = min(len(queue.runs[0]) // number for queue, number in turns)
        if num_rounds < 2:
            return concat([queue.pop(number) for queue, number in turns])
        joined = concat([queue.pop(num_rounds * number) for queue, number in turns])
        firsts = np.cumsum([0, *[num_rounds * number for _, number in turns]])
        columns = [
            first + np.arange(num_rounds * number).reshape(num_rounds, number)
            for first, (_, number) in zip(firsts, turns, strict=False)
        ]
        return joined if len(turns) == 1 else joined.take(np.concatenate(columns, axis=1).ravel())


def rest_of(
    streams: Sequence[Primitive], section: PassSection, layout: PassLayout, spec: ElementSpec
) -> tuple[Primitive, tuple[int, ...]]:
    """Return the stream of the remaining elements for a layout, and the path to the node whose inputs are ``streams``.

    If rows can be batched again, batches have the size of the layout. Otherwise each replica gets the pieces of batches
    as they were cut before.

    Parameters
    ----------
    streams
        The streams as they were shared out before.
    section
        How they were shared out, and their positions.
    layout
        How the rest is shared out.
    spec
        The spec of a batch.
    """
    rest = Arrange(tuple(streams), RestOfStreams(section), streams[0].grouped, name="rest")
    batch_size = layout.batch_size
    if batch_size is None or not _stack(spec):
        return rest, ()
    rows = ungrouped(rest)
    batches = ByCursor(BatchCursor, (batch_size, layout.drops_remainder))
    grouped: Primitive = Arrange((rows,), batches, rows.grouped + 1, name="batch")
    num_replicas = sum(layout.num_replicas)
    if num_replicas == 1:
        return grouped, (0, 0)
    pieces = ByCursor(SplitBatchesCursor, (num_replicas,))
    return Arrange((grouped,), pieces, grouped.grouped, name="split_batches"), (0, 0, 0)


def _stack(spec: ElementSpec) -> bool:
    # Return whether the rows of all batches stack.
    return all(
        leaf.shape and None not in leaf.shape[1:] and not isinstance(leaf, (RaggedTensorSpec, DatasetSpec))
        for leaf in spec.leaves
    )


def final_batch(node: Node) -> Node | None:
    """Return the operation with a ``group_size`` that makes the global batches; None if there is none."""
    while node.group_size is None:
        if len(node.inputs) != 1 or node.facts.levels or node.facts.regroups:
            return None
        (node,) = node.inputs
    return node


def with_batch_size(node: Node, size: int | None) -> Node:
    """Return the pipeline with another global batch size."""
    batch = final_batch(node)
    if batch is None or size is None:
        return node

    def visit(operation: Node) -> Node:
        if operation is batch:
            return replace(operation, batch_size=size)  # type: ignore[call-arg]
        return operation.with_inputs((visit(operation.inputs[0]),))

    return visit(node)
