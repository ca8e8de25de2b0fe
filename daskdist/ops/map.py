"""``map``: a function of each element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from daskdist.core.block import Block, Bundle, Rows, from_items
from daskdist.core.function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute, Primitive
from daskdist.core.spec import ElementSpec, SpecUnknown
from daskdist.errors import UserFunctionError


@dataclass(frozen=True, eq=False)
class Map(Transformation):
    """Each element replaced by what the function makes of it; after ``batch``, each batch."""

    function: UserFunction

    name = "map"
    facts = Facts(compute=True, keeps_count=True, per_worker=True)

    @cached_property
    def _spec(self) -> ElementSpec | SpecUnknown:
        # Tried on made-up elements, nothing is read. An axis whose length follows the unknown one, or the values,
        # is unknown too.
        spec = self.source.spec
        found = []
        for unknown, value in ((2, 1), (3, 2)):
            try:
                result = self.function.leaves(spec.example(unknown, value), lambda: "a made-up element")
            except UserFunctionError as error:
                return SpecUnknown(str(error))
            found.append(ElementSpec.of(result[1].pack(result[0])))
        first, second = found
        if first.structure != second.structure:
            return SpecUnknown("the structure of its result depends on the element")
        leaves = [a.most_general_common_spec(b) for a, b in zip(first.leaves, second.leaves, strict=True)]
        if None in leaves:
            return SpecUnknown("the rank or dtype of its result depends on the element")
        return first.with_leaves([leaf for leaf in leaves if leaf is not None])

    @property
    def spec(self) -> ElementSpec:
        if isinstance(self._spec, SpecUnknown):
            raise self._spec
        return self._spec

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Compute(inputs[0], MapRows(self.function), "map", factor=1)


@dataclass(frozen=True)
class MapRows:
    """The function over the elements of a block or bundle."""

    function: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        items: list[tuple[Any, ...]] = []
        structure = None
        for index, element in enumerate(rows.elements()):
            leaves, found = self.function.leaves(element, lambda index=index: rows.where(index))  # type: ignore[misc]
            if structure is None:
                structure = found
            elif found != structure:
                raise UserFunctionError(
                    f"map: {self.function} returned the structure {found} on {rows.where(index)}, "
                    f"and {structure} before; every element needs the same"
                )
            items.append(leaves)
        if structure is None:
            return Bundle(rows.structure, [], rows.label)
        if isinstance(rows, Block):
            return from_items(structure, items, rows.label, rows.origin)
        return Bundle(structure, items, rows.label)
