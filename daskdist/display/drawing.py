"""Drawings of pipelines: the operations in the order in which elements pass through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from daskdist.core.cardinality import UNKNOWN, counted
from daskdist.core.node import Node, Source, walk
from daskdist.core.primitive import Arrange, Chain, Compute, Fact, Primitive, Read, Stream, same
from daskdist.display.plan import operation_text
from daskdist.errors import DaskdistError

# The first words of a note in a plan: functions called for many rows at once, and others.
_FAST: Final = "vectorised"
_SLOW: Final = "row by row"


@dataclass(frozen=True)
class PlanStep:
    """One operation of a drawing.

    Parameters
    ----------
    kind
        ``"source"``; ``"compute"`` if it looks at values, ``"arrange"`` if it looks at order, ``"both"``; or
        ``"option"`` if it looks at neither.
    text
        The operation and its arguments.
    note
        A remark on how it runs, such as whether its function is vectorised, and if not, why.
    branches
        The drawings of its inputs, if there are several.
    """

    kind: str
    text: str
    note: str = ""
    branches: tuple[tuple[PlanStep, ...], ...] = ()

    @property
    def mark(self) -> str:
        """The CSS classes of the note, which distinguish vectorised functions from others."""
        return " dd-fast" if self.note.startswith(_FAST) else " dd-slow" if self.note.startswith(_SLOW) else ""


def drawing(node: Node) -> tuple[PlanStep, ...]:
    """Return the operations of a pipeline, the source first; nothing is read."""
    return tuple(_steps(node))


def _steps(node: Node) -> Iterator[PlanStep]:
    branches: tuple[tuple[PlanStep, ...], ...] = ()
    if len(node.inputs) == 1:
        yield from _steps(node.inputs[0])
    else:
        branches = tuple(map(drawing, node.inputs))
    yield PlanStep(_kind_of(node), operation_text(node), node.note, branches)


_INPUT: Final = Read(lambda: (), lambda split: split, "input")


def _kind_of(node: Node) -> str:
    if isinstance(node, Source):
        return "source"
    if node.facts.compute or node.facts.on_device:
        return "compute"
    if node.facts.keeps_order:
        return "option"
    kinds = {kind for primitive in _primitives(node) if (kind := _looks_at(primitive))}
    return "both" if len(kinds) > 1 else kinds.pop() if kinds else "option"


def _primitives(node: Node) -> Iterator[Primitive]:
    # The primitives of the operation alone, with placeholders for its inputs.
    waiting = [node.lower(tuple(_INPUT for _ in node.inputs))]
    while waiting:
        primitive = waiting.pop()
        if primitive is not _INPUT:
            yield primitive
            waiting.extend(primitive.inputs if isinstance(primitive, Arrange) else _source(primitive))


def _source(primitive: Primitive) -> list[Primitive]:
    return [] if isinstance(primitive, (Read, Stream, Arrange)) else [primitive.source]


def _looks_at(primitive: Primitive) -> str:
    if isinstance(primitive, Arrange):
        return "arrange"
    is_gather = isinstance(primitive, Compute) and primitive.function is same
    return "compute" if isinstance(primitive, (Compute, Chain, Fact)) and not is_gather else ""


def known_cardinality(node: Node) -> int | None:
    """Return the number of elements; None if counting would read the indexes of many or of remote files."""
    return node.cardinality if is_cheap_to_list(node) else None


def is_cheap_to_list(node: Node) -> bool:
    """Return whether all splits of a pipeline are listed already, or can be listed at little cost."""
    sources = [source for source in walk(node) if isinstance(source, Source)]
    if not all(source.is_cheap_to_list for source in sources):
        return False
    try:
        for source in sources:
            len(source.splits() if source.is_listed else ())
    except (DaskdistError, OSError):
        # A damaged file raises when it is read, not when the plan is shown.
        return False
    return True


def cardinality_in_words(number: int | None, noun: str = "element") -> str:
    """Describe a number of elements that `known_cardinality` returns.

    >>> cardinality_in_words(1000), cardinality_in_words(-1), cardinality_in_words(None, "step")
    ('1,000 elements', 'endless', 'steps not counted yet')
    """
    if number is None:
        return f"{noun}s not counted yet"
    if number == UNKNOWN:
        return f"number of {noun}s unknown"
    return "endless" if number < 0 else counted(number, noun)
