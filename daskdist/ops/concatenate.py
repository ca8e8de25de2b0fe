"""``concatenate``: the elements of one dataset after those of another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from daskdist.core import cardinality
from daskdist.core.node import Facts, Node
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.selection.runs import Run
from daskdist.core.selection.skipping import may_skip_unread, whole_parts
from daskdist.core.spec import ElementSpec, SpecUnknown, common_spec
from daskdist.ops.select import alike


@dataclass(frozen=True, eq=False)
class Concatenate(Node):
    """The elements of the first, then those of the second."""

    first: Node = field(repr=False)
    second: Node = field(repr=False)

    name = "concatenate"
    facts = Facts(per_worker=True)

    def __post_init__(self) -> None:
        with contextlib.suppress(SpecUnknown):
            common_spec(self.name, self.inputs)

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.first, self.second)

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return Concatenate(*inputs, label=self.label)

    @property
    def spec(self) -> ElementSpec:
        return common_spec(self.name, self.inputs, must_be_known=True)

    @property
    def cardinality(self) -> int:
        return cardinality.plus(self.first.cardinality, self.second.cardinality)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        inputs = alike(self.inputs, inputs)
        return Arrange(inputs, ConcatenateRows(), inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class ConcatenateRows:
    """Row arithmetic of ``concatenate``."""

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return ConcatenateCursor([opener(epoch) for opener in inputs], context)


@dataclass
class ConcatenateCursor:
    """A cursor over the sources in turn; ``number`` are exhausted."""

    sources: list[Cursor]
    context: Context
    number: int = 0
    # The number of elements of the current source so far.
    num_elements: int = 0

    @property
    def skips_unread(self) -> bool:
        """Return whether the current source skips elements without reading them."""
        return self.number < len(self.sources) and may_skip_unread(self.sources[self.number])

    def skip(self, num_elements: int) -> int:
        """Skip elements: all elements of sources that were over."""
        self.number, num_skipped = whole_parts(self.context.lengths(), num_elements)
        if self.number < len(self.sources):
            self.num_elements = self.sources[self.number].skip(num_elements - num_skipped)  # type: ignore[attr-defined]
        return num_skipped + self.num_elements

    def pull(self) -> Run:
        while self.number < len(self.sources):
            try:
                run: Run = self.sources[self.number].pull()
            except Exhausted:
                self.context.note_length(self.number, self.num_elements)
                self.number, self.num_elements = self.number + 1, 0
            else:
                self.num_elements += len(run)
                return run
        raise Exhausted
