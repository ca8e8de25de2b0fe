"""``Dataset.sample_from_datasets``: elements of several datasets, each drawn at random."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import CountingNode, Node
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Opener, Primitive
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.randomness.seed import generator
from daskdist.core.selection.intervals import Index
from daskdist.core.spec import ElementSpec, SpecUnknown, common_spec
from daskdist.ops.choose_from_datasets import DirectedCursor
from daskdist.ops.select import alike

# The number of choices drawn at a time; fixed, so that draws do not depend on the size of reads.
_DRAWS = 1024


@dataclass(frozen=True, eq=False)
class SampleFromDatasets(CountingNode):
    """The next elements of sources drawn at random by their weights.

    Parameters
    ----------
    sources
        The datasets to draw from.
    weights
        The probability of each source; they sum to 1.
    seed
        Determines the draws.
    stop_on_empty_dataset
        Whether to end when the drawn source is exhausted; otherwise the other sources continue.
    rerandomize_each_iteration
        Whether each pass has different draws.
    """

    sources: tuple[Node, ...] = field(repr=False)
    weights: tuple[float, ...]
    seed: int
    stop_on_empty_dataset: bool = False
    rerandomize_each_iteration: bool = True

    name = "sample_from_datasets"

    def __post_init__(self) -> None:
        whole_number(self.name, "seed", self.seed, at_most=None)
        for name in ("stop_on_empty_dataset", "rerandomize_each_iteration"):
            yes_or_no(self.name, name, getattr(self, name))
        with contextlib.suppress(SpecUnknown):
            common_spec(self.name, self.sources)

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.sources

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return replace(self, sources=inputs)

    @property
    def spec(self) -> ElementSpec:
        return common_spec(self.name, self.sources, must_be_known=True)

    @property
    def cardinality(self) -> int:
        # A finite source ends all, or endless ones continue without it.
        is_endless = all if self.stop_on_empty_dataset else any
        return INFINITE if is_endless(source.cardinality == INFINITE for source in self.sources) else UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        inputs = alike(self.sources, inputs)
        passes = self.passes if self.rerandomize_each_iteration else None
        rows = SampleRows(self.weights, self.seed, 1 + self.passes.stream, self.stop_on_empty_dataset, passes)
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class SampleRows:
    """Row arithmetic of ``sample_from_datasets``."""

    weights: tuple[float, ...]
    seed: int
    stream: int
    stop_on_empty: bool
    passes: PassNumber | None

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        rng = generator(self.seed, self.stream, () if self.passes is None else self.passes.of(epoch))
        sources = [opener(epoch) for opener in inputs]
        return DrawnCursor(sources, self.stop_on_empty, rng, np.cumsum(self.weights)[:-1])


@dataclass
class DrawnCursor(DirectedCursor):
    """A cursor of elements drawn at random; ``shares`` are the cumulative weights of all sources but the last."""

    rng: np.random.Generator
    shares: Index

    def next_choices(self) -> Index:
        return np.searchsorted(self.shares, self.rng.random(_DRAWS), side="right")
