"""The rest of a pass over a distributed dataset, shared out among other replicas and workers than its beginning.

A position records how the pass was shared out, and how many elements each of its streams has returned. If it is shared
out in the same way now, these streams continue. Otherwise they are opened as they were, and their remaining elements,
in the order of steps and replicas, are batched again for the current replicas. Batches that have their size already,
or whose rows cannot be batched again, such as those of ``padded_batch``, are joined from their remaining pieces and cut
for the current replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from daskdist.core.block import Batches, Bundle
from daskdist.core.node import Node
from daskdist.core.primitive import Arrange, ByCursor, Compute, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.ragged import concat as concat_leaves
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run, RunQueue, concat, group
from daskdist.core.selection.skipping import advance
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec
from daskdist.ops.batch import BatchCursor
from daskdist.ops.split_batches import SplitBatchesCursor, SplitBatchesRows
from daskdist.ops.unbatch import ungrouped

logger: Final = logging.getLogger("daskdist")


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
        return list(astuple(self))

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
    positions: tuple[tuple[Epoch, list[int], int], ...]

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
        return StepOrderCursor(self.sources(inputs), self.section.layout.num_replicas)

    def sources(self, inputs: Sequence[Opener]) -> list[Any]:
        """Return cursors over the remaining elements of each stream."""
        sources = []
        for opener, (its_epoch, _, num_elements) in zip(inputs, self.section.positions, strict=True):
            source: Any = opener(its_epoch)
            advance(source, num_elements)
            sources.append(source)
        return sources


@dataclass(frozen=True)
class RestOfBatches(RestOfStreams):
    """Row arithmetic of the remaining batches of streams, a batch of each stream in turn.

    Parameters
    ----------
    num_pieces
        The number of pieces to cut each batch into; None to return each batch as the group of its pieces.
    """

    num_pieces: int | None = None

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        num_before = sum(self.section.layout.num_replicas)
        # Each stream cuts its batches for all replicas, and some pieces of a batch may have been handed out.
        missing = [num_before - num_elements % num_before for _, _, num_elements in self.section.positions]
        return WholeBatchCursor(self.sources(inputs), missing, num_before, self.num_pieces)


@dataclass
class StreamsInTurn:
    """The elements of several streams, of which some of each are taken in turn."""

    sources: list[Any]
    queues: list[RunQueue] = field(init=False)

    def __post_init__(self) -> None:
        self.queues = [RunQueue() for _ in self.sources]

    def fill(self, numbers: Sequence[int]) -> list[int]:
        """Queue a number of elements of each stream; return the places of the streams that have some left.

        Raises
        ------
        Exhausted
            All streams are at their end.
        """
        places = []
        for place, (source, queue, number) in enumerate(zip(self.sources, self.queues, numbers, strict=True)):
            try:
                queue.fill(source.pull, number)
            except Exhausted:
                if not queue:
                    continue
            places.append(place)
        if not places:
            raise Exhausted
        return places


@dataclass
class WholeBatchCursor(StreamsInTurn):
    """A cursor over the batches of several streams of their pieces, a batch of each stream in turn.

    Parameters
    ----------
    missing
        The number of pieces of the next batch of each stream.
    num_before
        The number of pieces of later batches.
    num_pieces
        As in `RestOfBatches`.
    """

    missing: list[int]
    num_before: int
    num_pieces: int | None

    def pull(self) -> Run:
        begun = self.fill(self.missing)
        batches = concat([self._batches(place, is_alone=len(begun) == 1) for place in begun])
        return batches if self.num_pieces is None else batches.cut(self.num_pieces)  # type: ignore[union-attr]

    def _batches(self, place: int, *, is_alone: bool) -> Run:
        queue, first = self.queues[place], self.missing[place]
        self.missing[place] = self.num_before
        # A stream that is alone returns all batches of a run together.
        num_more = max(len(queue.runs[0]) - first, 0) // self.num_before if is_alone else 0
        pieces = queue.pop(first + num_more * self.num_before)
        starts = np.minimum([0, *(first + np.arange(num_more + 1) * self.num_before)], len(pieces))
        if self.num_pieces is None:
            return group(pieces, starts)
        inners = None if pieces.inners is None else tuple([pieces.inners[start] for start in starts[:-1]])  # type: ignore[union-attr]
        return Groups(pieces.flat, pieces.bounds[starts], inners)  # type: ignore[union-attr]


def join_pieces(batches: Batches) -> Bundle:
    """Return batches, the pieces of each of which are joined."""
    rows, joined = batches.rows, []
    for start, stop in pairwise(batches.bounds):
        columns = zip(*[rows.item(place) for place in range(start, stop)], strict=True)
        joined.append(tuple(map(concat_leaves, columns)))
    return Bundle(rows.structure, joined, rows.label)


@dataclass
class StepOrderCursor(StreamsInTurn):
    """A cursor over the elements of several streams in turn: from each as many as it has replicas."""

    num_replicas: tuple[int, ...]

    def pull(self) -> Run:
        while True:
            run = self._round()
            if not isinstance(run, Groups):
                return run
            # A batch without rows fills up a step in which other replicas have rows.
            full = np.flatnonzero(run.lengths)
            if len(full):
                return run if len(full) == len(run) else run.take(full)

    def _round(self) -> Run:
        turns = [(self.queues[place], self.num_replicas[place]) for place in self.fill(self.num_replicas)]
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

    Batches of the size of the layout stay as they are, and are cut for its replicas. If the size is another, or several
    workers have read, rows are batched again if they can be.

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
    batch_size, num_replicas = layout.batch_size, sum(layout.num_replicas)
    # Batches of their size stay as they are: an incomplete one may be between others, as with ``repeat``.
    are_whole = len(streams) == 1 and section.layout.batch_size == batch_size
    if batch_size is None or are_whole or not _stack(spec):
        if section.layout.batch_size != batch_size:
            logger.warning(
                "load_state_dict: the rest of this pass keeps its batches of %s rows, as they cannot be batched again; "
                "batches of %s rows begin with the next pass",
                section.layout.batch_size,
                batch_size,
            )
        return _rest_of_batches(streams, section, num_replicas)
    rest = Arrange(tuple(streams), RestOfStreams(section), streams[0].grouped, name="rest")
    rows = ungrouped(rest)
    batches = ByCursor(BatchCursor, (batch_size, layout.drops_remainder))
    grouped: Primitive = Arrange((rows,), batches, rows.grouped + 1, name="batch")
    if num_replicas == 1:
        return grouped, (0, 0)
    pieces = ByCursor(SplitBatchesCursor, (num_replicas,))
    return Arrange((grouped,), pieces, grouped.grouped, name="split_batches"), (0, 0, 0)


def _rest_of_batches(
    streams: Sequence[Primitive], section: PassSection, num_pieces: int
) -> tuple[Primitive, tuple[int, ...]]:
    level = streams[0].grouped
    if level:
        return Arrange(tuple(streams), RestOfBatches(section, num_pieces), level, name="rest"), ()
    joined = Compute(
        Arrange(tuple(streams), RestOfBatches(section), 1, name="rest"), join_pieces, "rest", factor=1, unstacked=True
    )
    if num_pieces == 1:
        return joined, (0,)
    return Compute(joined, SplitBatchesRows(num_pieces), "split_batches", factor=num_pieces), (0, 0)


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
