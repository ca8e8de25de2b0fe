"""Distributed datasets: a dataset's batches, cut and handed to replicas step by step."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Node, Source, lower, walk
from daskdist.core.primitive import Exhausted, Primitive
from daskdist.core.spec import ElementSpec, PerReplicaSpec, TensorSpec
from daskdist.display import plan as display
from daskdist.errors import ArgumentError, OutOfRangeError
from daskdist.execute.callers import Caller, lengths_of
from daskdist.execute.delivery import Delivery, Lane
from daskdist.execute.interpreter import Interpreter
from daskdist.ops.deal import piece_bounds
from daskdist.passes.autoshard import autoshard
from daskdist.passes.fuse import fuse
from daskdist.passes.rebatch import rebatch
from daskdist.passes.simplify import simplify
from daskdist.sharding import AutoShardPolicy, Decision
from daskdist.strategy.values import AsyncValue, PerReplica, PickFromRows, Remote

if TYPE_CHECKING:
    from daskdist.dataset import Dataset
    from daskdist.strategy.strategy import Strategy

logger: Final = logging.getLogger("daskdist")


@dataclass(frozen=True)
class Pipeline:
    """The stream of one worker, or of all where they share one.

    Parameters
    ----------
    primitive
        What it comes down to; each of its elements is a piece for one replica.
    readers
        The workers that read it.
    consumers
        The worker of each replica it serves, in replica order.
    """

    primitive: Primitive
    readers: tuple[str | None, ...]
    consumers: tuple[str | None, ...]


class DistributedDataset:
    """A dataset's batches, each cut into one piece a replica. Iterate over it: each step is one batch.

    Made by `Strategy.distribute_dataset`. It takes no further transformations: apply them to the dataset.
    """

    def __init__(self, strategy: Strategy, dataset: Dataset) -> None:
        self._strategy = strategy
        self._dataset = dataset
        self._iterations = itertools.count()
        self._spec: ElementSpec = dataset.spec
        policy = dataset.options().auto_shard_policy or AutoShardPolicy.AUTO
        num_replicas = strategy.num_replicas_in_sync
        workers = strategy.workers
        consumers = [replica.worker for replica in strategy.replicas]
        rebatched = rebatch(dataset.node, self._spec, num_replicas)
        self._decision, self._nodes = autoshard(rebatched, policy, len(workers))
        primitives = [fuse(lower(simplify(node))) for node in self._nodes]
        if len(primitives) == 1:
            self._pipelines = [Pipeline(primitives[0], workers, tuple(consumers))]
        else:
            self._pipelines = [
                Pipeline(primitive, (worker,), tuple(each for each in consumers if each == worker))
                for primitive, worker in zip(primitives, workers, strict=True)
            ]
        if len(workers) > 1:
            level = logging.WARNING if self._decision.is_costly else logging.INFO
            logger.log(level, "sharding by %s: %s", self._decision.policy.name, self._decision.reason)

    @property
    def sharding(self) -> Decision:
        """How the dataset is sharded over workers, and why."""
        return self._decision

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self, next(self._iterations))

    @property
    def element_spec(self) -> Any:
        """The spec of each leaf of a step, a `PerReplicaSpec` where there are several replicas.

        The first length is None where it can vary.
        """
        num_replicas = self._strategy.num_replicas_in_sync
        if num_replicas == 1:
            return self._spec.packed
        is_shared = len(self._strategy.workers) == 1

        def spec(leaf: TensorSpec) -> PerReplicaSpec:
            num_rows = leaf.shape[0]
            is_even = is_shared and num_rows is not None and num_rows % num_replicas == 0
            size = (num_rows or 0) // num_replicas if is_even else None
            return PerReplicaSpec(*[TensorSpec((size, *leaf.shape[1:]), leaf.dtype)] * num_replicas)

        return self._spec.structure.pack([spec(leaf) for leaf in self._spec.leaves])

    def cardinality(self) -> int:
        """The number of steps; `UNKNOWN` (-2) or `INFINITE` (-1) otherwise."""
        if len(self._pipelines) == 1:
            return self._dataset.cardinality()
        return num_steps(self._nodes, [len(pipeline.consumers) for pipeline in self._pipelines])

    def explain(self) -> str:
        """The sharding policy, why it was chosen, and what each worker reads."""
        decision, strategy = self._decision, self._strategy
        lines = [
            f"{strategy.num_replicas_in_sync} replicas on {len(strategy.workers)} workers",
            f"sharding: {decision.policy.name} ({decision.reason})",
        ]
        rows: list[tuple[str, ...]] = [("worker", "replicas", "files", "splits", "rows", "bytes")]
        for number, (worker, splits) in enumerate(self._splits_by_worker()):
            files = {split.file for split in splits if split.file is not None}
            counts = [split.num_rows for split in splits]
            sizes = [split.num_bytes for split in splits]
            rows.append(
                (
                    f"{number} {worker or 'this process'}",
                    str(sum(replica.worker == worker for replica in strategy.replicas)),
                    str(len(files)) if files else "-",
                    str(len(splits)),
                    "?" if None in counts else f"{sum(counts):,}",
                    "?" if None in sizes else display.size(sum(sizes)),
                )
            )
        return "\n".join([*lines, display.table(rows), "pipeline:", display.tree(self._nodes[0])])

    def _splits_by_worker(self) -> Iterator[tuple[str | None, list[Any]]]:
        nodes = dict(zip([id(p) for p in self._pipelines], self._nodes, strict=True))
        for number, worker in enumerate(self._strategy.workers):
            pipeline = self._pipelines[0] if len(self._pipelines) == 1 else self._pipelines[number]
            sources = [node for node in walk(nodes[id(pipeline)]) if isinstance(node, Source)]
            turn = pipeline.readers.index(worker)
            # Readers take a source's splits in turn.
            yield (
                worker,
                [split for node in sources for split in node.splits()[turn :: len(pipeline.readers)]],
            )

    def __repr__(self) -> str:
        return f"<DistributedDataset over {self._strategy.num_replicas_in_sync} replicas: {self.element_spec}>"


def num_steps(nodes: Sequence[Node], num_lanes: Sequence[int]) -> int:
    """The steps that pipelines which each cut their own batches come to, where arithmetic tells; else UNKNOWN.

    A step is one in which some piece has rows, so how many rows each batch has must be known.
    """
    if any(node.cardinality == INFINITE for node in nodes):
        return INFINITE
    steps: set[int] = set()
    for node, lanes in zip(nodes, num_lanes, strict=True):
        deal, batch = node, node.inputs[0]
        num_pieces, num_rows = (
            getattr(deal, "num_pieces", 1),
            batch.inputs[0].cardinality if batch.inputs else UNKNOWN,
        )
        if batch.group_size is None or num_rows < 0:
            return UNKNOWN
        for number in range(batch.cardinality):
            bounds = piece_bounds(min(batch.group_size, num_rows - number * batch.group_size), num_pieces)
            steps.update(
                (number * num_pieces + k) // lanes for k, (start, stop) in enumerate(pairwise(bounds)) if start < stop
            )
    return len(steps)


class Optional:
    """The next value of an iterator, or none.

    >>> Optional(None, None).has_value()
    False
    """

    def __init__(self, value: Any, element_spec: Any, *, has_value: bool = False) -> None:
        self._value = value
        self._has_value = has_value
        self.element_spec = element_spec

    def has_value(self) -> bool:
        """Whether there is one."""
        return self._has_value

    def get_value(self) -> Any:
        """The value.

        Raises
        ------
        ArgumentError
            There is none.
        """
        if not self._has_value:
            raise ArgumentError("this optional has no value: the iterator is at its end; ask has_value() first")
        return self._value


class _Feed:
    """The elements of one pipeline, a step at a time.

    Parameters
    ----------
    delivery
        Gives them.
    caller
        Who makes calls.
    asks_lengths
        Whether to ask how many rows each has, where arithmetic does not tell.
    """

    def __init__(self, delivery: Delivery, caller: Caller, asks_lengths: bool) -> None:
        self.delivery = delivery
        self.caller = caller
        self.asks_lengths = asks_lengths
        self.lanes: list[Lane] = []
        self.position = self.length = 0

    def next(self) -> list[tuple[Lane, int]] | None:
        """Each replica's lane and its place in that; None at the end."""
        if self.position == self.length:
            try:
                stretch = self.delivery.pull()
            except Exhausted:
                return None
            self.lanes = [self._without_empty(lane) if self.asks_lengths else lane for lane in stretch.lanes]
            self.position, self.length = 0, len(stretch)
        step = [(lane, lane.places[self.position]) for lane in self.lanes]
        self.position += 1
        return step

    def _without_empty(self, lane: Lane) -> Lane:
        if lane.ref is None:
            return lane
        lengths = self.caller.result(self.caller.call(lengths_of, [lane.ref.handle], name="lengths"))
        return Lane(lane.ref, [place if place >= 0 and lengths[place] else -1 for place in lane.places])


class DistributedIterator:
    """A place in a distributed dataset: each value is one step's, for all replicas."""

    def __init__(self, dataset: DistributedDataset, iteration: int) -> None:
        self._dataset = dataset
        strategy = dataset._strategy
        self._caller = strategy.reader(dataset._dataset)
        # The threads of a reader end with its iterator, closed or dropped.
        self._finalizer = weakref.finalize(self, self._caller.close)
        self._is_plain = strategy.workers == (None,)
        self._feeds = []
        for pipeline in dataset._pipelines:
            interpreter = Interpreter(self._caller, pipeline.readers)
            delivery = Delivery(interpreter, pipeline.primitive, (iteration,), pipeline.consumers)
            # Pieces that a function's results were cut into: only they tell whether a step has rows.
            asks_lengths = len(dataset._pipelines) > 1 and not pipeline.primitive.grouped
            self._feeds.append(_Feed(delivery, self._caller, asks_lengths))
        self._num_lanes = [len(pipeline.consumers) for pipeline in dataset._pipelines]
        spec = dataset._spec
        self._structure = spec.structure
        self._empty = tuple(leaf.zeros() for leaf in spec.leaves) if strategy.num_replicas_in_sync > 1 else ()
        self._error: BaseException | None = None

    @property
    def element_spec(self) -> Any:
        """As of the dataset."""
        return self._dataset.element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """The next step's values.

        Returns
        -------
        nest
            In the structure of an element, a `PerReplica` a leaf; with one replica the plain value. A replica
            for which no rows are left has zero rows.

        Raises
        ------
        OutOfRangeError
            There are no more.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._step()
        except BaseException as error:
            # What failed once is not passed over in silence the next time.
            if isinstance(error, Exception):
                self._error = error
            self.close()
            raise

    def get_next_as_optional(self) -> Optional:
        """The next step's values, or at the end an `Optional` without."""
        try:
            return Optional(self.get_next(), self.element_spec, has_value=True)
        except OutOfRangeError:
            return Optional(None, self.element_spec)

    def close(self) -> None:
        """Stop reading ahead and let go of what was read."""
        self._feeds = []
        self._finalizer()

    def _step(self) -> Any:
        while True:
            steps = [feed.next() for feed in self._feeds]
            if all(step is None for step in steps):
                raise OutOfRangeError("the iterator is at its end; iterate over the dataset again for another pass")
            places: list[tuple[Lane, int] | None] = []
            for step, num_lanes in zip(steps, self._num_lanes, strict=True):
                places += [None] * num_lanes if step is None else step
            values = [None if place is None or place[1] < 0 else self._leaves(*place) for place in places]
            # A step is one if any replica has a row.
            if any(leaves is not None for leaves in values):
                break
        rows = [self._empty if leaves is None else leaves for leaves in values]
        if len(rows) == 1:
            return self._structure.pack(rows[0])
        return self._structure.pack([PerReplica(column) for column in zip(*rows, strict=True)])

    def _leaves(self, lane: Lane, place: int) -> Sequence[Any]:
        ref = lane.ref
        if self._is_plain:
            return self._caller.result(ref.handle).item(place)  # type: ignore[union-attr, no-any-return]
        picks = [PickFromRows(place, number) for number in range(self._structure.num_leaves)]
        return [AsyncValue(self._caller, Remote(ref.handle, pick, ref)) for pick in picks]  # type: ignore[union-attr]
