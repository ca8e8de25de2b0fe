"""``Dataset.zip``: tuples of one element of each of several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from daskdist.core import cardinality
from daskdist.core.arguments import yes_or_no
from daskdist.core.node import Facts, Node
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Opener,
    Primitive,
    same,
)
from daskdist.core.selection.runs import RunQueue, Zipped
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, CardinalityError


@dataclass(frozen=True, eq=False)
class Zip(Node):
    """Nests of one element of each source, up to the shortest; if ``strict``, all must be equally long."""

    structure: Structure
    sources: tuple[Node, ...] = field(repr=False)
    strict: bool = False

    name = "zip"
    facts = Facts(pairs=True)

    def __post_init__(self) -> None:
        yes_or_no(self.name, "strict", self.strict)
        if not self.strict:
            return
        lengths = [source.cardinality for source in self.sources]
        known = {length for length in lengths if length != cardinality.UNKNOWN}
        if len(known) > 1:
            raise ArgumentError(
                f"zip: strict=True, but the datasets have {', '.join(map(_in_words, lengths))} elements; give datasets "
                "of equal length, or leave strict out to stop with the shortest"
            )

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.sources

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return Zip(self.structure, inputs, self.strict, label=self.label)

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec.nest(self.structure, [source.spec for source in self.sources])

    @property
    def cardinality(self) -> int:
        return cardinality.shortest(source.cardinality for source in self.sources)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return zipped(inputs, self.structure, self.name, strict=self.strict, is_of_pairs=True)


def zipped(
    inputs: tuple[Primitive, ...],
    structure: Structure,
    name: str,
    *,
    strict: bool = False,
    is_counted: bool = True,
    is_of_pairs: bool = False,
) -> Primitive:
    """Return the stream of nests of one element of each input.

    Parameters
    ----------
    inputs, structure, name
        The inputs, the structure of their nest, and the name of the operation in plans.
    strict
        Whether all must be equally long.
    is_counted, is_of_pairs
        As in `Arrange`: whether it matters which elements are together, and whether some may be missing.
    """
    # Gathered immediately: the results are views if the inputs are contiguous.
    rows = ZipRows(structure, strict)
    arrange = Arrange(inputs, rows, grouped=0, name=name, is_counted=is_counted, is_of_pairs=is_of_pairs)
    return Compute(arrange, same, name, factor=1)


def _in_words(length: int) -> str:
    return {cardinality.UNKNOWN: "an unknown number of", cardinality.INFINITE: "endless"}.get(length, str(length))


@dataclass(frozen=True)
class ZipRows:
    """Row arithmetic of ``zip``."""

    structure: Structure
    strict: bool = False

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        sources = [opener(epoch) for opener in inputs]
        return ZipCursor(sources, self.structure, [RunQueue() for _ in sources], self.strict)


@dataclass
class ZipCursor:
    """A cursor of nests; elements whose partners are missing are in ``queues``."""

    sources: list[Cursor]
    structure: Structure
    queues: list[RunQueue]
    strict: bool = False

    def skip(self, num_elements: int) -> int:
        """Skip elements of all sources."""
        return min([source.skip(num_elements) for source in self.sources])  # type: ignore[attr-defined,no-any-return]

    def pull(self) -> Zipped:
        for number, (source, queue) in enumerate(zip(self.sources, self.queues, strict=True)):
            try:
                queue.fill(source.pull, 1)
            except Exhausted:
                if self.strict:
                    self._check_ends(number)
                raise
        num_elements = min(len(queue.runs[0]) for queue in self.queues)
        return Zipped(tuple(queue.pop(num_elements) for queue in self.queues), self.structure)

    def _check_ends(self, ended: int) -> None:
        # Check that all sources are exhausted when one is.
        for number, (source, queue) in enumerate(zip(self.sources, self.queues, strict=True)):
            if number == ended:
                continue
            try:
                queue.fill(source.pull, 1)
            except Exhausted:
                continue
            raise CardinalityError(
                f"zip: strict=True, but dataset {ended} is shorter than dataset {number}; give datasets of equal "
                "length, or leave strict out to stop with the shortest"
            )
