"""The rest of a pass over a distributed dataset, shared out among other replicas and workers than its beginning.

A position tells how the pass was shared out, and how many elements each of its streams has given. If it is shared out
in the same way now, these streams go on. Otherwise they are opened as they were, and what is left of them, in the order
of steps and replicas, is made batches again, which are dealt to the replicas there are now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from daskdist.core.node import Node
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run, RunQueue, concat
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec
from daskdist.errors import ArgumentError
from daskdist.execute.resume.answers import Answers, Path
from daskdist.execute.resume.position import PipelineIdentity, StreamPosition
from daskdist.execute.resume.skipping import advance
from daskdist.ops.batch import Batch, BatchRows
from daskdist.ops.deal import DealGroups
from daskdist.ops.unbatch import ungrouped
from daskdist.passes.numbering import note_pass
from daskdist.passes.plan import plan
from daskdist.passes.seed import drawn_seeds, fingerprint, with_drawn
from daskdist.strategy.input.pipeline import Pipeline


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
    """

    num_workers: int
    num_replicas: tuple[int, ...]
    policy: str
    batch_size: int | None
    drops_remainder: bool

    def as_plain(self) -> list[Any]:
        """Return the layout as data."""
        return [self.num_workers, self.num_replicas, self.policy, self.batch_size, self.drops_remainder]

    @classmethod
    def of_plain(cls, content: Sequence[Any]) -> PassLayout:
        """Return the layout that `as_plain` returned."""
        return cls(*content)

    def is_like(self, other: PassLayout) -> bool:
        """Return whether both share out a pass in the same way: with one pipeline for all, workers do not count."""
        if len(self.num_replicas) == len(other.num_replicas) == 1 and "HINT" not in (self.policy, other.policy):
            other = replace(other, num_workers=self.num_workers, policy=self.policy)
        return self == other


@dataclass(frozen=True)
class Leg:
    """A part of a pass that was shared out in one way.

    Parameters
    ----------
    layout
        The way.
    positions
        For each of its streams the pass, the seeds that operations drew, and the number of elements and of errors.
    """

    layout: PassLayout
    positions: tuple[tuple[Epoch, list[int], int, int], ...]

    @classmethod
    def of(cls, layout: PassLayout, positions: Sequence[StreamPosition]) -> Leg:
        """Return the leg with streams at some positions."""
        return cls(layout, tuple([(each.epoch, each.seeds, each.num_elements, each.num_errors) for each in positions]))

    def as_plain(self) -> list[Any]:
        """Return the leg as data."""
        return [self.layout.as_plain(), list(self.positions)]

    @classmethod
    def of_plain(cls, content: Sequence[Any]) -> Leg:
        """Return the leg that `as_plain` returned."""
        layout, positions = content
        return cls(PassLayout.of_plain(layout), tuple(positions))


@dataclass(frozen=True)
class RestOfStreams:
    """Row arithmetic of what is left of some streams, in the order of the steps that they would have made.

    Parameters
    ----------
    leg
        The streams and their positions.
    """

    leg: Leg

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        sources = []
        for opener, (its_epoch, _, num_elements, num_errors) in zip(inputs, self.leg.positions, strict=True):
            source: Any = opener(its_epoch)
            advance(source, num_elements, num_errors)
            sources.append(source)
        return StepOrderCursor(sources, self.leg.layout.num_replicas)


@dataclass
class StepOrderCursor:
    """A cursor over elements of several streams, of each as many in turn as it has replicas."""

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


def rest_of(streams: Sequence[Primitive], leg: Leg, layout: PassLayout, spec: ElementSpec) -> tuple[Primitive, Path]:
    """Return the stream of what is left, for the replicas of a layout; and the path to what ``streams`` are inputs of.

    Where batches of any rows can be made, they are as large as the layout says. Otherwise each replica gets the parts
    of batches as they were cut before.

    Parameters
    ----------
    streams
        The streams as they were shared out before.
    leg
        The way in which they were, and their positions.
    layout
        The way in which the rest is.
    spec
        The spec of a batch.
    """
    rest = Arrange(tuple(streams), RestOfStreams(leg), streams[0].grouped, name="rest")
    if layout.batch_size is None or not _stack(spec):
        return rest, ()
    rows = ungrouped(rest)
    batches = BatchRows(layout.batch_size, layout.drops_remainder)
    grouped: Primitive = Arrange((rows,), batches, rows.grouped + 1, name="batch")
    num_replicas = sum(layout.num_replicas)
    if num_replicas == 1:
        return grouped, (0, 0)
    return Arrange((grouped,), DealGroups(num_replicas), grouped.grouped, name="deal"), (0, 0, 0)


def _stack(spec: ElementSpec) -> bool:
    # Return whether the rows of all batches stack.
    return all(
        leaf.shape and None not in leaf.shape[1:] and not isinstance(leaf, (RaggedTensorSpec, DatasetSpec))
        for leaf in spec.leaves
    )


def final_batch(node: Node) -> Batch | None:
    """Return the operation that makes the global batches; None if it is not ``batch``."""
    while not isinstance(node, Batch):
        if len(node.inputs) != 1 or node.facts.levels or node.facts.regroups:
            return None
        (node,) = node.inputs
    return node


def with_batch_size(node: Node, size: int | None) -> Node:
    """Return the pipeline with another global batch size."""
    batch = final_batch(node)
    if batch is None or size is None:
        return node

    def visit(each: Node) -> Node:
        if each is batch:
            return replace(batch, batch_size=size)
        return each.with_inputs((visit(each.inputs[0]),))

    return visit(node)


@dataclass(frozen=True)
class PassSource:
    """The dataset of a pass, and the way in which the pass is shared out.

    Parameters
    ----------
    node
        The dataset, or what stands for it.
    spec
        The spec of its elements.
    pipelines
        The input pipelines.
    num_workers, policy
        The number of workers, and the name of the sharding policy.
    shared_out
        Returns the policy and the nodes of the pipelines of a dataset, for so many workers and replicas; None if it
        cannot be shared out otherwise than it is.
    told
        The identity of the dataset; None if its nodes tell it.
    """

    node: Node
    spec: ElementSpec
    pipelines: Sequence[Pipeline]
    num_workers: int
    policy: str
    shared_out: Callable[[Node, int, int], tuple[str, Sequence[Node]]] | None = None
    told: PipelineIdentity | None = None

    @cached_property
    def layout(self) -> PassLayout:
        """The way in which the pass is shared out."""
        batch = final_batch(self.node)
        num_replicas = tuple(len(pipeline.consumers) for pipeline in self.pipelines)
        size, drops = (None, False) if batch is None else (batch.batch_size, batch.drop_remainder)
        return PassLayout(self.num_workers, num_replicas, self.policy, size, drops)

    @cached_property
    def identity(self) -> PipelineIdentity:
        """The identity of the dataset, whatever its global batch size."""
        if self.told is not None:
            return self.told
        node = with_batch_size(self.node, 1)
        return PipelineIdentity.of(node, fingerprint(node))

    def note_pass(self, leg: Leg) -> None:
        """Count the pass of which a leg is the first one: later passes have other numbers."""
        if len(leg.positions) == len(self.pipelines):
            for pipeline, (epoch, *_) in zip(self.pipelines, leg.positions, strict=True):
                note_pass(pipeline.node, epoch)
        else:
            # The same operations count in all pipelines.
            note_pass(self.pipelines[0].node, leg.positions[0][0])

    def pipelines_at(
        self, before: Sequence[Leg], leg: Leg, positions: Sequence[StreamPosition]
    ) -> tuple[list[Leg], list[Pipeline], list[StreamPosition], bool]:
        """Return how to go on from a position.

        Parameters
        ----------
        before
            How the beginning of the pass was shared out, if otherwise than when the position was taken.
        leg
            How it was shared out when the position was taken.
        positions
            The positions of its streams.

        Returns
        -------
        before, pipelines, positions, is_exact
            ``before`` for positions to come, the pipelines, the position in each of them, and whether errors were
            raised before.
        """
        legs = [*before, leg]
        is_exact = any(num_errors for each in legs for *_, num_errors in each.positions)
        if leg.layout.is_like(self.layout):
            if before:
                return list(before), [self._rest(legs[:-1], leg.layout)[0]], list(positions), is_exact
            seeded = [
                pipeline
                if position.seeds == drawn_seeds(pipeline.node)
                else replace(pipeline, node=with_drawn(pipeline.node, position.seeds))
                for pipeline, position in zip(self.pipelines, positions, strict=True)
            ]
            return [], seeded, list(positions), is_exact
        if before:
            # What was left then was one stream for all replicas.
            legs[-1] = replace(leg, layout=replace(leg.layout, num_replicas=(sum(leg.layout.num_replicas),)))
        pipeline, path = self._rest(legs, self.layout)
        answers = Answers()
        for number, position in enumerate(positions):
            answers.add(position.answers, (*path, number))
        return legs, [pipeline], [StreamPosition((0,), [], 0, 0, answers)], is_exact

    def _rest(self, legs: Sequence[Leg], layout: PassLayout) -> tuple[Pipeline, Any]:
        streams = [plan(node) for node in self._nodes_of(legs[0])]
        path: Any = ()
        for leg, following in zip(legs, [*[each.layout for each in legs[1:]], layout], strict=True):
            primitive, path = rest_of(streams, leg, following, self.spec)
            streams = [primitive]
        readers = tuple(dict.fromkeys(reader for pipeline in self.pipelines for reader in pipeline.readers))
        consumers = tuple(consumer for pipeline in self.pipelines for consumer in pipeline.consumers)
        return Pipeline(self.pipelines[0].node, readers, consumers, varies=True, rest=streams[0]), path

    def _nodes_of(self, leg: Leg) -> list[Node]:
        # Return the pipelines as they were shared out.
        layout = leg.layout
        if self.shared_out is None:
            raise ArgumentError(
                f"load_state_dict: the position is of {len(layout.num_replicas)} input pipelines of "
                f"{sum(layout.num_replicas)} replicas, whose datasets a function made; here are {len(self.pipelines)} "
                f"of {sum(self.layout.num_replicas)}. Go on with as many, or distribute one dataset with "
                "distribute_dataset, which goes on with any number"
            )
        node = with_batch_size(self.node, layout.batch_size)
        policy, nodes = self.shared_out(node, layout.num_workers, sum(layout.num_replicas))
        if policy != layout.policy or len(nodes) != len(layout.num_replicas):
            raise ArgumentError(
                f"load_state_dict: the position is of a pass shared out by {layout.policy}, and for as many workers "
                f"the dataset is shared out by {policy} now; set the option auto_shard_policy as it was"
            )
        return [with_drawn(each, seeds) for each, (_, seeds, *_) in zip(nodes, leg.positions, strict=True)]


def seeds_of(pipelines: Sequence[Pipeline]) -> list[list[int]]:
    """Return for each pipeline the seeds that its operations have drawn for themselves."""
    return [[] if pipeline.rest is not None else drawn_seeds(pipeline.node) for pipeline in pipelines]
