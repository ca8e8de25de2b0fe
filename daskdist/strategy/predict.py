"""`Strategy.predict`: the results of a function for the rows of a dataset, computed on replicas, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import optree

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.dataset_base import node_of
from daskdist.core.failing.origin import origin_from
from daskdist.core.node import Node, Source, counting
from daskdist.core.primitive import Epoch, Primitive, Stream
from daskdist.core.randomness.pass_numbers import PassCounter
from daskdist.core.spec import ElementSpec, SpecUnknown, known_spec
from daskdist.core.structure import Leaves, Structure
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError, ClusterError
from daskdist.ops.from_generator import GeneratorFunction
from daskdist.ops.with_options import Options
from daskdist.passes.seed import drawn_seeds
from daskdist.sharding import AutoShardPolicy
from daskdist.strategy.input.dataset import iterator_in_pass
from daskdist.strategy.replica.contract import StrategyContract
from daskdist.strategy.values.device_arrays import host_nest

# Steps that are called before the results of the first of them are waited for.
_STEPS_AHEAD: Final = 4
# Options with one pipeline for all replicas, so that the pieces of a batch are in the order of its rows.
_IN_ORDER: Final = Options(auto_shard_policy=AutoShardPolicy.DATA, deterministic=True, last_batch="skip_empty")


class PredictRows:
    """A user's function, whose results must have a row for each row of its batch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.__qualname__ = self.__name__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, batch: Any, *args: Any) -> Any:
        result = self.__wrapped__(batch, *args)
        num_rows = {leaf.shape[0] for leaf in optree.tree_leaves(batch)}
        for leaf in optree.tree_leaves(result, none_is_leaf=True):
            shape = getattr(leaf, "shape", None)
            if not shape or {shape[0]} != num_rows:
                words = f"{leaf!r:.80}" if shape is None else f"{type(leaf).__name__} of shape {tuple(shape)}"
                raise ArgumentError(
                    f"predict: the function returned {words} for {min(num_rows)} rows; return an array, or a "
                    "nest of arrays, with a row for each row of the batch"
                )
        return result


@dataclass(frozen=True, eq=False)
class Predictions(Source):
    """Batches of predictions.

    Parameters
    ----------
    pipeline
        The dataset of batches that the function is called with.
    generator
        Returns an iterator over the predictions for one pass of a pipeline: ``generator(pipeline, epoch)``.
    of_no_rows
        The spec of the predictions for no rows, if a pass had none.
    """

    pipeline: Node = field(repr=False)
    generator: GeneratorFunction = field(repr=False)
    of_no_rows: list[ElementSpec] = field(repr=False)

    name = "predict"
    is_listed = False
    is_cheap = False
    is_repeatable = False
    may_have_ragged_rows = True

    @property
    def spec(self) -> ElementSpec:
        if self.of_no_rows:
            return self.of_no_rows[-1]
        raise SpecUnknown(
            "the spec of the predictions is known when a batch was predicted, or before if the function accepts "
            "a batch without rows"
        )

    @property
    def cardinality(self) -> int:
        return UNKNOWN

    @property
    def contents(self) -> tuple[Node, ...]:
        return (self.pipeline,)

    def with_contents(self, contents: tuple[Node, ...]) -> Node:
        (pipeline,) = contents
        return replace(self, pipeline=pipeline)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Stream(partial(PredictedBatches, self.generator, self.pipeline), self.name)


class PredictedBatches:
    """The predictions of one pass."""

    element_bytes = None

    def __init__(self, generator: GeneratorFunction, pipeline: Node, epoch: Epoch) -> None:
        self._batches = generator.function(pipeline, epoch)
        self._structure: Structure | None = None

    def __iter__(self) -> Iterator[Leaves]:
        for batch in self._batches:
            leaves, self._structure = Structure.of(batch)
            yield leaves

    def close(self) -> None:
        """Stop predicting."""
        self._batches.close()

    def rows(self, items: Sequence[Leaves], first: int) -> Block | Bundle:
        """Return batches as rows; ``first`` is the number of the first one."""
        origin = origin_from("predict", first, len(items))
        return from_items(self._structure, items, f"predict batches {first} on", origin)  # type: ignore[arg-type]


def predictions_of(strategy: Any, function: Callable[..., Any], dataset: Dataset, args: Sequence[Any]) -> Dataset:
    """Return the dataset of `Strategy.predict`."""
    try:
        number = dataset.unbatch().cardinality()
    except ArgumentError as error:
        raise ArgumentError(f"predict: elements are not batches ({error}); give dataset.batch(n)") from None
    node = node_of(dataset)
    distributed = strategy.distribute_dataset(dataset.with_options(_IN_ORDER))
    predict = PredictRows(function)
    of_no_rows: list[ElementSpec] = []

    def batches(pipeline: Node, epoch: Epoch) -> Iterator[Any]:
        # A pipeline that draws otherwise, as after `at_epoch`, is another dataset.
        is_same = _draws_of(pipeline) == _draws_of(node)
        source = distributed if is_same else strategy.distribute_dataset(Dataset(pipeline).with_options(_IN_ORDER))
        steps: deque[Any] = deque()
        iterator = iterator_in_pass(source, pipeline, epoch)
        has_rows = False
        try:
            for step in _called(iterator, lambda batch: strategy.run(predict, args=(batch, *args))):
                has_rows = True
                steps.append(step)
                if len(steps) > _STEPS_AHEAD:
                    yield from _of_replicas(strategy, steps.popleft())
            while steps:
                yield from _of_replicas(strategy, steps.popleft())
        finally:
            iterator.close()
        if not has_rows:
            of_no_rows[:] = _spec_of_no_rows(strategy, predict, dataset, args)

    predictions = Dataset(Predictions(node, GeneratorFunction(batches, "predict"), of_no_rows)).unbatch()
    return predictions if number == UNKNOWN else predictions.assert_cardinality(number)


def _draws_of(pipeline: Node) -> tuple[list[tuple[PassCounter, int]], list[int]]:
    # The counters and first passes of random operations, and the seeds that the user did not give.
    return [(node.passes.counter, node.passes.start) for node in counting(pipeline)], drawn_seeds(pipeline)


def _called(batches: Iterator[Any], run: Callable[[Any], Any]) -> Iterator[Any]:
    # Call a function with each batch. An error is the last step, as the steps before it are still to be used.
    try:
        for batch in batches:
            yield run(batch)
    except Exception as error:
        yield error


def _spec_of_no_rows(
    strategy: StrategyContract, predict: PredictRows, dataset: Dataset, args: Sequence[Any]
) -> list[ElementSpec]:
    # Call the function with a batch of no rows, so that files and tables of no predictions have their columns. Return
    # nothing if it does not take such a batch.
    known = known_spec(node_of(dataset))
    if known is None:
        return []
    batch = optree.tree_map(lambda leaf: leaf[:0], known.example(0, 0))
    try:
        results = strategy.local_results(strategy.run(predict, args=(batch, *args)))
        result = host_nest(results[0])
    except ClusterError:
        raise
    except Exception:
        return []
    spec = ElementSpec.of(result)
    return [spec.with_leaves([leaf.of_any_length() for leaf in spec.leaves])]


def _of_replicas(strategy: StrategyContract, step: Any) -> Iterator[Any]:
    if isinstance(step, Exception):
        raise step
    for part in strategy.local_results(step):
        if any(leaf is not None for leaf in optree.tree_leaves(part, none_is_leaf=True)):
            yield host_nest(part)
