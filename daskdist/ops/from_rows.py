"""Elements that are in memory as rows: what a window is a dataset of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from daskdist.core.block import Block, Bundle
from daskdist.core.node import Facts, Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec


@dataclass(frozen=True, eq=False)
class FromRows(Source):
    """Each row an element.

    Parameters
    ----------
    rows
        The elements.
    known_spec
        Their spec; None for what they are.
    """

    rows: Block | Bundle = field(repr=False)
    known_spec: ElementSpec | None = field(repr=False)

    name = "from_rows"
    facts = Facts()

    @property
    def spec(self) -> ElementSpec:
        return rows_spec(self.rows) if self.known_spec is None else self.known_spec

    @property
    def cardinality(self) -> int:
        return len(self.rows)

    def splits(self) -> Sequence[Split]:
        return [Split(self.rows.label or "rows in memory", self.rows, len(self.rows), self.rows.nbytes)]

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, _payload, self.name)


def rows_spec(rows: Block | Bundle) -> ElementSpec:
    """The spec of elements that are there.

    Raises
    ------
    SpecUnknown
        There are none, or they have none in common.
    """
    if isinstance(rows, Block):
        return ElementSpec(rows.structure, tuple(TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in rows.leaves))
    common = None
    for number, element in enumerate(rows.elements()):
        spec = ElementSpec.of(element)
        common = spec if number == 0 or common is None else common.most_general_common_spec(spec)
        if common is None:
            break
    if common is None:
        raise SpecUnknown("the elements have no spec in common")
    return common


def _payload(split: Split) -> Block | Bundle:
    rows: Block | Bundle = split.payload
    return rows
