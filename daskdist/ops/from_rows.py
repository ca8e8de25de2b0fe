"""Elements in memory as rows, such as those of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.functions.kept_values import kept
from daskdist.core.node import Source
from daskdist.core.primitive import Primitive, Read, Split, payload_itself
from daskdist.core.spec import ElementSpec, SpecUnknown
from daskdist.core.structure import Structure, as_array, is_plain
from daskdist.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class FromRows(Source):
    """A source of elements in memory, one per row.

    Parameters
    ----------
    rows
        The elements.
    known_spec
        Their spec; None to derive it from the rows.
    """

    rows: Block | Bundle = field(repr=False)
    known_spec: ElementSpec | None = field(repr=False)

    name = "from_rows"

    @property
    def may_have_ragged_rows(self) -> bool:
        return self.known_spec is not None and self.known_spec.has_ragged_rows

    @property
    def spec(self) -> ElementSpec:
        return rows_spec(self.rows) if self.known_spec is None else self.known_spec

    @property
    def cardinality(self) -> int:
        return len(self.rows)

    def splits(self) -> Sequence[Split]:
        return [Split(self.rows.label or "rows in memory", self.rows, len(self.rows), self.rows.nbytes)]

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, payload_itself, self.name, kept_for=self)


def rows_spec(rows: Block | Bundle) -> ElementSpec:
    """Return the spec of elements in memory.

    Raises
    ------
    SpecUnknown
        There are no elements, or they have no common spec.
    """
    if isinstance(rows, Block):
        return ElementSpec.of_rows(rows.structure, rows.leaves)
    common = None
    for number, element in enumerate(rows.elements()):
        spec = ElementSpec.of(element)
        common = spec if number == 0 or common is None else common.most_general_common_spec(spec)
        if common is None:
            break
    if common is None:
        raise SpecUnknown("the elements have no common spec")
    return common


def rows_of_elements(operation: str, elements: Sequence[Any], *, narrow: bool) -> Block | Bundle:
    """Return elements as rows.

    Parameters
    ----------
    operation
        Its name, for messages.
    elements
        Nests of one structure. A leaf that is a Python number in all of them gets one dtype, as an array of a list of
        these numbers has.
    narrow
        As in `as_array`.

    Raises
    ------
    ArgumentError
        There are no elements, or their structures or dtypes differ.
    """
    flat = [Structure.flatten(element, narrow=narrow) for element in elements]
    if not flat:
        raise ArgumentError(f"{operation}: the list is empty, so that the spec of its elements is unknown")
    structure = flat[0][1]
    for number, (_, element_structure) in enumerate(flat):
        if element_structure != structure:
            raise ArgumentError(
                f"{operation}: element {number} is {element_structure}, but earlier ones are {structure}"
            )
    columns = [list(column) for column in zip(*[leaves for leaves, _ in flat], strict=True)]
    for number, column in enumerate(columns):
        if len({getattr(leaf, "dtype", None) for leaf in column}) > 1:
            leaf_values = [structure.leaves_of(element)[number] for element in elements]
            if all(isinstance(leaf, int | float) and is_plain(leaf) for leaf in leaf_values):
                columns[number] = list(as_array(leaf_values, narrow=narrow))
            else:
                _check_dtypes(operation, structure.paths[number], column)
    rows = from_items(structure, list(zip(*columns, strict=True)), operation)
    if isinstance(rows, Block):
        return rows
    # Stacked arrays are copies; others are copied here.
    return Bundle(structure, [tuple(map(kept, rows.item(number))) for number in range(len(rows))], operation)


def _check_dtypes(operation: str, path: str, column: Sequence[Any]) -> None:
    # Fixed-width words of different widths agree, and empty arrays agree with any dtype.
    kinds: dict[Any, int] = {}
    for number, leaf in enumerate(column):
        if isinstance(leaf, np.ndarray | np.generic) and leaf.size:
            kinds.setdefault(leaf.dtype.kind if leaf.dtype.kind in "SU" else leaf.dtype, number)
    if len(kinds) > 1:
        first, other = list(kinds.values())[:2]
        raise ArgumentError(
            f"{operation}: leaf {path or '(the element)'} of element {other} is {column[other].dtype}, but of element "
            f"{first} it is {column[first].dtype}; give all of them one dtype"
        )
