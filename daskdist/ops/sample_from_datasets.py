"""``Dataset.sample_from_datasets``: elements of several datasets, drawn at random."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Facts, Node
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Opener, Primitive, same_nesting
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.randomness.seed import generator
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.runs import RunQueue
from daskdist.core.spec import ElementSpec, SpecUnknown, common_spec
from daskdist.ops.choose_from_datasets import DirectedCursor

# Choices drawn at a time; what is drawn does not depend on how much is read.
_DRAWS = 1024


@dataclass(frozen=True, eq=False)
class SampleFromDatasets(Node):
    """The next element of a source drawn at random, each with its weight.

    Parameters
    ----------
    sources
        Where elements come from.
    weights
        Of each source; they sum to 1.
    seed
        Decides the draws.
    stop_on_empty_dataset
        Whether all ends where the source drawn has; else the rest goes on.
    rerandomize_each_iteration
        Whether each pass has draws of its own.
    """

    sources: tuple[Node, ...] = field(repr=False)
    weights: tuple[float, ...]
    seed: int
    stop_on_empty_dataset: bool = False
    rerandomize_each_iteration: bool = True
    is_seeded: bool = field(default=True, repr=False)
    passes: PassNumber = field(default_factory=PassNumber, repr=False)

    name = "sample_from_datasets"
    facts = Facts()

    def __post_init__(self) -> None:
        whole_number(self.name, "seed", self.seed)
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
        # One that has an end ends all, or is left behind.
        is_endless = all if self.stop_on_empty_dataset else any
        return INFINITE if is_endless(each.cardinality == INFINITE for each in self.sources) else UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        inputs = same_nesting(inputs)
        passes = self.passes if self.rerandomize_each_iteration else None
        rows = SampleRows(self.weights, self.seed, 1 + self.passes.stream, self.stop_on_empty_dataset, passes)
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class SampleRows:
    """The arithmetic of it."""

    weights: tuple[float, ...]
    seed: int
    stream: int
    stop_on_empty: bool
    passes: PassNumber | None

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        rng = generator(self.seed, self.stream, () if self.passes is None else self.passes.of(epoch))
        sources = [opener(epoch) for opener in inputs]
        choices = DrawnChoices(rng, np.cumsum(self.weights)[:-1])
        return DirectedCursor(sources, choices, self.stop_on_empty, [RunQueue() for _ in sources])


@dataclass
class DrawnChoices:
    """Choices drawn at random; ``shares`` are the upper ends of all sources' shares but the last."""

    rng: np.random.Generator
    shares: Index

    def pull(self) -> Index:
        """Return the next choices."""
        return np.searchsorted(self.shares, self.rng.random(_DRAWS), side="right")
