"""``Dataset.zip``: elements made of one element of each of several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from daskdist.core import cardinality
from daskdist.core.node import Facts, Node
from daskdist.core.primitive import Arrange, Compute, Context, Cursor, Epoch, Opener, Primitive, same
from daskdist.core.selection import RunQueue, Zipped
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure


@dataclass(frozen=True, eq=False)
class Zip(Node):
    """An element of each source, nested; as many as the shortest has."""

    structure: Structure
    sources: tuple[Node, ...] = field(repr=False)

    name = "zip"
    facts = Facts(pairs=True)

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.sources

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return Zip(self.structure, inputs, label=self.label)

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec.nest(self.structure, [source.spec for source in self.sources])

    @property
    def cardinality(self) -> int:
        return cardinality.shortest(source.cardinality for source in self.sources)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return zipped(inputs, self.structure, self.name)


def zipped(inputs: tuple[Primitive, ...], structure: Structure, name: str) -> Primitive:
    """The stream of elements made of one of each input."""
    # Put together at once: views, where the inputs are contiguous.
    return Compute(Arrange(inputs, ZipRows(structure), grouped=0, name=name), same, name, factor=1)


@dataclass(frozen=True)
class ZipRows:
    """The arithmetic of it."""

    structure: Structure

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        sources = [opener(epoch) for opener in inputs]
        return ZipCursor(sources, self.structure, [RunQueue() for _ in sources])


@dataclass
class ZipCursor:
    """Elements whose partners have not come yet wait."""

    sources: list[Cursor]
    structure: Structure
    queues: list[RunQueue]

    def pull(self) -> Zipped:
        for source, queue in zip(self.sources, self.queues, strict=True):
            queue.fill(source.pull, 1)
        num_elements = min(len(queue.runs[0]) for queue in self.queues)
        return Zipped(tuple(queue.pop(num_elements) for queue in self.queues), self.structure)
