"""Input pipelines: the stream of one worker, or one stream that all workers share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.core.cardinality import INFINITE, UNKNOWN, shortest
from daskdist.core.node import Node, Source, upstream, walk
from daskdist.core.primitive import Primitive, Split
from daskdist.core.selection.intervals import Index
from daskdist.core.spec import SpecUnknown
from daskdist.display.drawing import is_cheap_to_list
from daskdist.display.plan import Share
from daskdist.ops.read_files import ReadFiles
from daskdist.ops.split_batches import SplitBatches, num_pieces_with_rows
from daskdist.ops.with_options import merged_options
from daskdist.passes.autoshard import read_by
from daskdist.passes.plan import plan
from daskdist.passes.seed import drawn_seeds
from daskdist.strategy.group import Replica
from daskdist.strategy.input.on_worker import OnWorker


@dataclass(frozen=True)
class Pipeline:
    """The stream of one worker, or one stream that all workers share.

    Parameters
    ----------
    node
        Its operations; each of its elements is for one replica.
    readers
        The workers that read it.
    consumers
        The worker of each replica that it feeds, in replica order.
    varies
        Whether elements may have different numbers of rows, also none.
    rest
        The rest of a pass that was divided otherwise before a position was loaded; read instead of ``node``.
    """

    node: Node
    readers: tuple[str | None, ...]
    consumers: tuple[str | None, ...]
    varies: bool = True
    rest: Primitive | None = None

    @cached_property
    def primitive(self) -> Primitive:
        """The primitive that the pipeline is lowered to."""
        return plan(self.node) if self.rest is None else self.rest

    @property
    def seeds(self) -> list[int]:
        """The seeds that its operations have drawn because none was given; none of the rest of a pass."""
        node = self.node
        if self.rest is not None:
            return []
        return list(node.seeds or node.known.seeds) if isinstance(node, OnWorker) else drawn_seeds(node)

    @property
    def budget_bytes(self) -> int | None:
        """The bytes that may be outstanding on each reader; None for the setting ``daskdist.window-bytes``."""
        return merged_options(self.node).memory_budget_bytes

    @property
    def is_listed(self) -> bool:
        """Return whether all its sources list their splits."""
        return all(node.is_listed for node in walk(self.node) if isinstance(node, Source))

    def splits_by_reader(self) -> Iterator[tuple[str | None, list[Split]]]:
        """Yield each reader and its splits; readers take the splits of every source in turn."""
        sources = list(read_by(self.node))
        for turn, reader in enumerate(self.readers):
            yield reader, [split for splits in sources for split in splits[turn :: len(self.readers)]]


def pipelines_of(
    nodes: Sequence[Node], workers: Sequence[str | None], consumers: Sequence[str | None]
) -> list[Pipeline]:
    """Return the pipelines for the nodes that `autoshard` returned: one per worker, or one that all share."""
    if len(nodes) == 1:
        return [Pipeline(nodes[0], tuple(workers), tuple(consumers))]
    return [
        Pipeline(node, (worker,), tuple([consumer for consumer in consumers if consumer == worker]))
        for node, worker in zip(nodes, workers, strict=True)
    ]


def shares_of(pipelines: Sequence[Pipeline], replicas: Sequence[Replica], *, reads_indexes: bool = True) -> list[Share]:
    """Return what each worker reads, as far as it is known without the indexes of files unless these are read."""
    return [share for pipeline in pipelines for share in _shares(pipeline, replicas, reads_indexes=reads_indexes)]


def _shares(pipeline: Pipeline, replicas: Sequence[Replica], *, reads_indexes: bool) -> Iterator[Share]:
    devices = {
        reader: [replica.device for replica in replicas if replica.worker == reader] for reader in pipeline.readers
    }
    if reads_indexes or is_cheap_to_list(pipeline.node):
        for reader, splits in pipeline.splits_by_reader():
            yield Share.of(reader or "this process", devices[reader], splits, is_all=pipeline.is_listed)
        return
    # Readers of a shared pipeline take its splits in turn; their files are not known yet.
    files = sum(len(node.files) for node in walk(pipeline.node) if isinstance(node, ReadFiles))
    for reader in pipeline.readers:
        yield Share(reader or "this process", devices[reader], files if len(pipeline.readers) == 1 else None)


@dataclass(frozen=True)
class Cuts:
    """The sizes of the pieces into which a pipeline cuts its batches.

    Parameters
    ----------
    num_rows
        The rows of each batch except a shorter last one.
    num_batches
        The number of these batches, or INFINITE.
    num_rest
        The rows of a shorter last batch; 0 if there is none.
    num_pieces
        The number of pieces per batch.
    num_replicas
        The number of pieces per step.
    """

    num_rows: int
    num_batches: int
    num_rest: int
    num_pieces: int
    num_replicas: int

    @classmethod
    def of(cls, pipeline: Pipeline) -> Cuts | None:
        """Return the cuts of a pipeline; None if they depend on its data."""
        if not isinstance(pipeline.node, SplitBatches):
            return None
        source, rest = pipeline.node.source, 0
        number, batch = source.cardinality, upstream(source)
        size = batch.group_size
        if size is None:
            size = _length(source)
        elif number != INFINITE:
            num_rows = batch.inputs[0].cardinality
            if num_rows < 0:
                return None
            rest = num_rows % size if number * size > num_rows else 0
            number = min(number, num_rows // size)
        if size is None or number == UNKNOWN:
            return None
        return cls(size, number, rest, pipeline.node.num_pieces, len(pipeline.consumers))

    @classmethod
    def of_elements(cls, number: int, num_replicas: int) -> Cuts:
        """Return the cuts of a number of elements, each for one replica."""
        return cls(1, number, 0, 1, num_replicas)

    @property
    def num_full(self) -> int:
        """The number of pieces with rows in each batch except a shorter last one."""
        return num_pieces_with_rows(self.num_rows, self.num_pieces)

    @property
    def num_even_steps(self) -> int:
        """The number of steps before the first in which some replica has no rows; UNKNOWN if even steps may follow."""
        if self.num_batches and self.num_full < self.num_pieces:
            return 0 if self.num_replicas == self.num_pieces else UNKNOWN
        if self.num_batches == INFINITE:
            return INFINITE
        num_last = num_pieces_with_rows(self.num_rest, self.num_pieces)
        return (self.num_batches * self.num_pieces + num_last) // self.num_replicas

    @cached_property
    def num_steps(self) -> int | None:
        """The number of steps up to the last in which some replica has rows; None if there is no end."""
        if self.num_batches == INFINITE and self.num_full:
            return None
        return max([int(lasts[-1]) + 1 for _, lasts in self.steps()], default=0)

    def full(self, first: int, stop: int) -> Any:
        """Return whether each replica has rows in the steps from ``first`` to ``stop``, as ``(step, replica)``."""
        batch, piece = np.divmod(np.arange(first * self.num_replicas, stop * self.num_replicas), self.num_pieces)
        has_rows = piece < self.num_full
        if self.num_batches != INFINITE:
            num_last = num_pieces_with_rows(self.num_rest, self.num_pieces)
            is_last = (batch == self.num_batches) & (piece < num_last)
            has_rows = ((batch < self.num_batches) & has_rows) | is_last
        return has_rows.reshape(-1, self.num_replicas)

    def is_over(self, step: int) -> bool:
        """Return whether no step has rows from this one on."""
        return self.num_steps is not None and step >= self.num_steps

    def steps(self) -> Iterator[tuple[Index, Index]]:
        """Yield the first and the last steps of runs of steps in which some replica has rows, as two arrays."""
        first, of_last = self.num_batches * self.num_pieces, num_pieces_with_rows(self.num_rest, self.num_pieces)
        if self.num_batches and self.num_full:
            # Two runs join if the pieces without rows between them do not fill a step.
            follow_on = self.num_pieces - self.num_full < self.num_replicas
            starts = np.arange(0, first, first if follow_on else self.num_pieces)
            lasts = starts + (first - self.num_pieces if follow_on else 0) + self.num_full - 1
            yield starts // self.num_replicas, lasts // self.num_replicas
        if of_last:
            yield np.array([first // self.num_replicas]), np.array([(first + of_last - 1) // self.num_replicas])


def num_steps(pipelines: Sequence[Pipeline], *, drops_uneven: bool = False) -> int:
    """Return the number of steps of pipelines; UNKNOWN if it depends on data.

    In a step some replica has rows, of its element or of its piece of a batch. With ``drops_uneven``, the pass ends
    before the first step in which some replica has rows and another has none.
    """
    cardinalities = [pipeline.node.cardinality for pipeline in pipelines]
    if sum(len(pipeline.consumers) for pipeline in pipelines) == 1:
        return cardinalities[0]
    if not drops_uneven:
        if INFINITE in cardinalities or UNKNOWN in cardinalities:
            return INFINITE if INFINITE in cardinalities else UNKNOWN
        node = pipelines[0].node
        if len(pipelines) == 1 and isinstance(node, SplitBatches):
            # Each batch is a step, unless it has no rows.
            return node.source.cardinality if _length(node.source) != 0 else 0
    all_cuts = set(map(_cuts_of, pipelines))
    known = [cuts for cuts in all_cuts if cuts is not None]
    if len(known) < len(all_cuts):
        return UNKNOWN
    if drops_uneven:
        ends = [cuts.num_even_steps for cuts in known]
        return UNKNOWN if UNKNOWN in ends else shortest(ends)
    return _num_covered([stretch for cuts in known for stretch in cuts.steps()])


def _cuts_of(pipeline: Pipeline) -> Cuts | None:
    number = pipeline.node.cardinality
    if isinstance(pipeline.node, SplitBatches) or number == UNKNOWN:
        return Cuts.of(pipeline)
    return Cuts.of_elements(number, len(pipeline.consumers))


def _length(node: Node) -> int | None:
    # The number of rows of every element, if the spec has it.
    try:
        lengths = {leaf.shape[0] if leaf.shape else None for leaf in node.spec.leaves}
    except SpecUnknown:
        return None
    return lengths.pop() if len(lengths) == 1 else None


def _num_covered(stretches: Sequence[tuple[Index, Index]]) -> int:
    # The number of integers in the union of inclusive intervals.
    if not stretches:
        return 0
    firsts, lasts = (np.concatenate(column) for column in zip(*stretches, strict=True))
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], lasts[order]
    before = np.concatenate([[-1], np.maximum.accumulate(lasts)[:-1]])
    return int(np.maximum(lasts - np.maximum(firsts - 1, before), 0).sum())
