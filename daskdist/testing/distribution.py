"""Laws of distribution: replicas get the dataset's rows, split by the rule, on any number of workers."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.dataset_base import node_of
from daskdist.core.node import CountingNode, walk, with_each_upstream
from daskdist.core.randomness.pass_numbers import PassCounter
from daskdist.core.spec import PerReplicaSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.dataset import Dataset
from daskdist.execute.caller import Caller
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.stream.local_iterator import iterate
from daskdist.ops.split_batches import SplitBatches, piece_bounds
from daskdist.passes.plan import plan
from daskdist.sharding import AutoShardPolicy
from daskdist.strategy.calls.local_backend import LocalBackend
from daskdist.strategy.group import Replica, ReplicaGroup, new_token
from daskdist.strategy.input.dataset import DistributedDataset, input_pipelines_of
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.input.pipeline import Pipeline
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.strategy import Strategy
from daskdist.strategy.values.refs import Ref, TaskResults, results_of
from daskdist.strategy.variables.store import VariableStore
from daskdist.testing.equality import check, same_element, same_multiset


class SimulatedWorkers(Strategy):
    """A strategy with replicas on several simulated workers, whose calls are made in this thread.

    It plans, shards, splits and hands out batches like a strategy on a cluster, at a small part of the cost.

    Parameters
    ----------
    num_replicas
        The number of replicas of each worker.

    >>> steps = SimulatedWorkers([1, 2]).distribute_dataset(Dataset.range(6).batch(6))
    >>> next(iter(steps))
    PerReplica:{
      0: array([0, 1]),
      1: array([2, 3]),
      2: array([4, 5])
    }
    """

    def __init__(self, num_replicas: Sequence[int]) -> None:
        replicas = [Replica(f"worker-{w}", f"CPU:{k}") for w, number in enumerate(num_replicas) for k in range(number)]
        group = ReplicaGroup(new_token(), tuple(replicas))
        backend = _SimulatedBackend(weakref.ref(self), group.replicas, VariableStore(group.token))
        super().__init__(group, backend, _SimulatedInput())


class _SimulatedBackend(LocalBackend):
    # The source of the values in batches, whose data is in this process.
    def can_use(self, value: Any) -> bool:
        return False

    def results(self, handles: Sequence[Any]) -> list[Any]:
        return [ref.pick(ref.source.futures[ref.place]) if type(ref) is Ref else ref for ref in handles]

    def attempt(self, read: Callable[[], Any]) -> Any:
        return read()

    def applied(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
        return Ref(TaskResults((function(*results_of(args), **kwargs),), (None,)), 0)

    def peek(self, ref: Ref) -> tuple[Any]:
        return (*self.results([ref]),)

    def as_future(self, ref: Ref) -> Any:
        raise NotImplementedError


class _SimulatedInput(InputBackend):
    def reader(self, dataset: Dataset) -> Caller:
        return Synchronous()


def afresh(dataset: Dataset) -> Dataset:
    """Return the dataset as in a new program, where the next iteration is the first.

    >>> dataset = Dataset.range(9).shuffle(9)
    >>> list(afresh(dataset)) == list(dataset) == list(afresh(dataset))
    True
    """
    counters: defaultdict[PassCounter, PassCounter] = defaultdict(PassCounter)

    def visit(node: Any) -> Any:
        node = with_each_upstream(node, visit)
        if not isinstance(node, CountingNode):
            return node
        return replace(node, passes=replace(node.passes, counter=counters[node.passes.counter]))

    return Dataset(visit(node_of(dataset)))


@dataclass(frozen=True)
class Outcome:
    """The result of a pass over a dataset on a strategy."""

    name: str
    distributed: DistributedDataset
    steps: list[tuple[Any, ...]]

    @classmethod
    def of(cls, strategy: Strategy, dataset: Dataset) -> Outcome:
        """Return the result of the first pass over a dataset on a strategy."""
        distributed = strategy.distribute_dataset(afresh(dataset))
        steps = [strategy.local_results(step) for step in distributed]
        numbers = [sum(r.worker == worker for r in strategy.replicas) for worker in strategy.workers]
        pipeline = " of ".join(map(str, walk(node_of(dataset))))
        policy = distributed.sharding.policy.name
        return cls(f"{pipeline} by {policy}, replicas {numbers}", distributed, steps)


class DistributionLaws:
    """Laws of distribution; a subclass defines `datasets`, whose rows must not depend on how they are batched.

    So they are not padded to the longest row of a batch, and under the policy FILE do not set ``drop_remainder``, which
    leaves out rows of each worker.
    """

    def datasets(self) -> Sequence[Dataset]:
        """Return finite datasets of batches, whose policy is set by their options."""
        raise NotImplementedError

    def strategies(self) -> Sequence[Strategy]:
        """Return the strategies to test: with replicas that share a worker, and with one replica per worker."""
        embedded = [MirroredStrategy([f"CPU:{k}" for k in range(number)]) for number in (1, 2, 3, 4)]
        return [*embedded, *map(SimulatedWorkers, ([1, 1], [2, 2], [1, 1, 1], [2, 1]))]

    def outcomes(self) -> Iterator[tuple[Dataset, Strategy, Outcome]]:
        """Yield the outcome of each dataset on each strategy."""
        for dataset in self.datasets():
            for strategy in self.strategies():
                yield dataset, strategy, Outcome.of(strategy, dataset)

    def test_rows_are_those_of_the_dataset(self) -> None:
        # The rows do not depend on the strategy, so each dataset is read once.
        batches: dict[Dataset, list[Any]] = {}
        for dataset, strategy, outcome in self.outcomes():
            if dataset not in batches:
                batches[dataset] = list(dataset)
            check_rows(batches[dataset], strategy, outcome)

    def test_pieces_have_the_documented_sizes(self) -> None:
        for _, _, outcome in self.outcomes():
            check_pieces(outcome)

    def test_each_step_has_a_row(self) -> None:
        for _, strategy, outcome in self.outcomes():
            if strategy.num_replicas_in_sync > 1:
                check(all(any(map(_has_rows, step)) for step in outcome.steps), f"{outcome.name}: a step without rows")

    def test_cardinality_is_the_number_of_steps(self) -> None:
        for _, _, outcome in self.outcomes():
            check_cardinality(outcome)

    def test_element_spec_fits_the_elements(self) -> None:
        for _, _, outcome in self.outcomes():
            check_spec(outcome)


def check_rows(dataset: Iterable[Any], strategy: Strategy, outcome: Outcome) -> None:
    """Check that all replicas together get the rows of batches, each equally often; under OFF once per worker."""
    is_off = outcome.distributed.sharding.policy is AutoShardPolicy.OFF
    times = len(strategy.workers) if is_off else 1
    pieces = [Structure.flatten(piece)[0] for step in outcome.steps for piece in step]
    batches = [Structure.flatten(batch)[0] for batch in dataset]
    # If leaves of a batch differ in length, as in zipped batches, each leaf is split separately.
    are_rows = all(len({len(leaf) if leaf.shape else -1 for leaf in leaves}) == 1 for leaves in batches)
    actual, expected = ([row for leaves in values for row in _rows(leaves, are_rows)] for values in (pieces, batches))
    same_multiset(actual, expected * times, f"{outcome.name}: rows")


def check_pieces(outcome: Outcome) -> None:
    """Check that each replica gets, step by step, the pieces into which the rule splits the batches of its pipeline."""
    pipelines = input_pipelines_of(outcome.distributed)
    lanes = [list(_expected_steps(pipeline)) for pipeline in pipelines]
    num_replicas = [len(pipeline.consumers) for pipeline in pipelines]
    expected = []
    for number in range(max(map(len, lanes))):
        step: list[Any] = []
        for lane, replicas in zip(lanes, num_replicas, strict=True):
            step += lane[number] if number < len(lane) else [None] * replicas
        if sum(num_replicas) == 1 or any(piece is not None and _has_rows(piece) for piece in step):
            expected.append(step)
    numbers = len(outcome.steps), len(expected)
    check(numbers[0] == numbers[1], f"{outcome.name}: {numbers[0]} steps, and should be {numbers[1]}")
    for number, (actual, step) in enumerate(zip(outcome.steps, expected, strict=True)):
        for replica, (piece, other) in enumerate(zip(actual, step, strict=True)):
            has_none = sum(num_replicas) > 1 and (other is None or not _has_rows(other))
            is_right = not _has_rows(piece) if has_none else same_element(piece, other)
            should = "no rows" if has_none else repr(other)
            check(
                is_right, f"{outcome.name}: in step {number} replica {replica} has {piece!r}, and should have {should}"
            )


def check_cardinality(outcome: Outcome) -> None:
    """Check that the number of steps equals the cardinality, if that is known."""
    number = outcome.distributed.cardinality()
    check(
        number in (UNKNOWN, len(outcome.steps)), f"{outcome.name}: cardinality {number}, and {len(outcome.steps)} steps"
    )


def check_spec(outcome: Outcome) -> None:
    """Check that every value conforms to the element spec."""
    specs, structure = Structure.of(outcome.distributed.element_spec)
    for number, step in enumerate(outcome.steps):
        for replica, piece in enumerate(step):
            leaves, actual = Structure.flatten(piece)
            check(actual == structure, f"{outcome.name}: {actual} in step {number}, and should be {structure}")
            for leaf, spec in zip(leaves, specs, strict=True):
                expected: TensorSpec = spec.specs[replica] if isinstance(spec, PerReplicaSpec) else spec
                is_compatible = expected.is_compatible_with(leaf)
                check(is_compatible, f"{outcome.name}: {leaf!r} in step {number} is not of {expected}")


def _expected_steps(pipeline: Pipeline) -> Iterator[list[Any]]:
    # Yield the pieces that a pipeline should hand out in each step, computed from its whole batches.
    node, num_replicas = pipeline.node, len(pipeline.consumers)
    is_split = isinstance(node, SplitBatches)
    batches = iterate(Synchronous(), plan(node.source if isinstance(node, SplitBatches) else node), 0)
    pieces = [piece for batch in batches for piece in (_cut(batch, node.num_pieces) if is_split else [batch])]  # type: ignore[attr-defined]
    for start in range(0, len(pieces), num_replicas):
        step = pieces[start : start + num_replicas]
        yield [*step, *[None] * (num_replicas - len(step))]


def _cut(batch: Any, num_pieces: int) -> list[Any]:
    leaves, structure = Structure.flatten(batch)
    bounds = [piece_bounds(len(leaf), num_pieces) for leaf in leaves]
    return [
        structure.pack([leaf[cut[k] : cut[k + 1]] for leaf, cut in zip(leaves, bounds, strict=True)])
        for k in range(num_pieces)
    ]


def _has_rows(piece: Any) -> bool:
    return any(leaf.shape and leaf.shape[0] for leaf in Structure.flatten(piece)[0])


def _rows(leaves: Sequence[Any], are_rows: bool) -> list[Any]:
    if not all(leaf.shape for leaf in leaves):
        return [tuple(leaves)]
    if are_rows:
        return list(zip(*leaves, strict=True))
    return [(number, row) for number, leaf in enumerate(leaves) for row in leaf]
