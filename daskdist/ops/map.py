"""``map``: a function of each element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from daskdist.core.block import Block, Bundle, Rows, from_items
from daskdist.core.function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute, Primitive
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, RaggedTensorSpec, SpecUnknown, TensorSpec, learned_spec
from daskdist.core.vectorize import Vectorised, blocks_of, call_at_once
from daskdist.errors import UserFunctionError


@dataclass(frozen=True, eq=False)
class Map(Transformation):
    """Each element replaced by what the function makes of it; after ``batch``, each batch.

    Parameters
    ----------
    function
        Makes an element of an element.
    vectorized
        True where it makes many elements of many, with rows along axis 0; False where it is called for each; None
        where it is written for one, and may be called for many if that makes no difference.
    in_order
        Whether elements come in the order of the input's; else block by block as they are done.
    """

    function: UserFunction
    vectorized: bool | None = None
    in_order: bool = True

    name = "map"
    facts = Facts(compute=True, keeps_count=True, per_worker=True)

    @cached_property
    def _spec(self) -> ElementSpec | SpecUnknown:
        spec = self.source.spec
        try:
            return learned_spec(lambda unknown, value: self._tried(spec, unknown, value))
        except SpecUnknown as unknown:
            return unknown

    def _tried(self, spec: ElementSpec, unknown: int, value: int) -> ElementSpec:
        if not self.vectorized:
            leaves, structure = self.function.leaves(spec.example(unknown, value), lambda: "a made-up element")
            return ElementSpec.of(structure.pack(leaves))
        columns = [leaf.grouped(2).example(unknown, value) for leaf in spec.leaves]
        leaves, structure = call_at_once(self.function, spec.structure, columns, 2, "two made-up rows")
        return ElementSpec(structure, tuple(map(_spec_of_rows, leaves)))

    @property
    def spec(self) -> ElementSpec:
        if isinstance(self._spec, SpecUnknown):
            raise self._spec
        return self._spec

    @cached_property
    def _vectorised(self) -> Vectorised:
        return Vectorised.of(self.function)

    @property
    def note(self) -> str:
        """Whether the function is called for many rows at once, and if not, why; found without reading anything."""
        if self.vectorized is None:
            return self._vectorised.note(self.source)
        return "vectorised: given whole blocks" if self.vectorized else "row by row: vectorized=False"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        function: Callable[[Rows], Rows] = MapRows(self.function)
        if self.vectorized is None:
            function = MapColumns(MapRows(self.function), self._vectorised)
        elif self.vectorized:
            function = MapBlocks(self.function)
        return Compute(inputs[0], function, "map", factor=1, in_order=self.in_order)


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


@dataclass(frozen=True)
class MapColumns:
    """The function over the elements of a block at once where that is the same, else over each."""

    by_row: MapRows
    vectorised: Vectorised

    def __call__(self, rows: Rows) -> Rows:
        return self.vectorised(rows, self.by_row) if isinstance(rows, Block) else self.by_row(rows)


@dataclass(frozen=True)
class MapBlocks:
    """A function of many rows over the rows of a block.

    Batches are rows too, of one row more axis: those of one shape are given together, others each alone.
    """

    function: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        if not len(rows):
            return Bundle(rows.structure, [], rows.label)
        if isinstance(rows, Block):
            return self._on(rows)
        made = [self._on(block) for block in blocks_of(rows, "map")]
        structure = made[0].structure
        for block in made:
            if block.structure != structure:
                raise UserFunctionError(
                    f"map: {self.function} returned the structure {block.structure} on rows of "
                    f"{rows.label or 'this data'}, and {structure} before; every element needs the same"
                )
        items = [block.item(index) for block in made for index in range(len(block))]
        return Bundle(structure, items, rows.label)

    def _on(self, block: Block) -> Block:
        where = f"{len(block)} rows of {block.label or 'a block'}"
        leaves, structure = call_at_once(self.function, block.structure, block.leaves, len(block), where)
        return Block(structure, leaves, block.label, block.origin)


def _spec_of_rows(column: Any) -> TensorSpec:
    shape = column.shape[1:]
    if isinstance(column, Ragged) and isinstance(column.values, Ragged):
        return RaggedTensorSpec(shape, column.dtype)
    return TensorSpec(shape, column.dtype)
