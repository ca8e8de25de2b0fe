"""``unbatch``: the rows of each element as elements."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.core.block import Block, Bundle, Rows, from_items
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.failing.origin import Origin, SelectedOrigins
from daskdist.core.node import Facts, Node, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Compute, Cursor, Primitive
from daskdist.core.ragged import Ragged
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run
from daskdist.core.spec import AnyRankSpec, ElementSpec, RaggedRowSpec, RaggedTensorSpec, SpecUnknown, TensorSpec
from daskdist.core.structure import Leaves, as_array
from daskdist.errors import ArgumentError, StackError


@dataclass(frozen=True, eq=False)
class Unbatch(Transformation):
    """The rows of each element along its first axis."""

    name = "unbatch"
    facts = Facts(compute=True, per_worker=True, levels=-1)
    may_have_ragged_rows = True

    def __post_init__(self) -> None:
        with contextlib.suppress(SpecUnknown):
            row_spec(self.name, self.source.spec)

    @property
    def spec(self) -> ElementSpec:
        return row_spec(self.name, self.source.spec)

    @property
    def _factor(self) -> int | None:
        try:
            lengths = {leaf.shape[0] if leaf.shape else None for leaf in self.source.spec.leaves}
        except SpecUnknown:
            return None
        return lengths.pop() if len(lengths) == 1 else None

    @property
    def cardinality(self) -> int:
        number, factor = self.source.cardinality, self._factor
        if number <= 0:
            return number
        return num_in_groups(self.source) if factor is None else number * factor

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return ungrouped(inputs[0], self._factor)


def num_in_groups(node: Node) -> int:
    """Return the number of elements in all groups of a pipeline that ends with making them; else it is unknown."""
    while node.facts.keeps_rows:
        (node,) = node.inputs
    if node.group_size is None:
        return UNKNOWN
    number = node.inputs[0].cardinality
    return number - number % node.group_size if number >= 0 and node.drops_remainder else number


def ungrouped(primitive: Primitive, factor: int | None = None) -> Primitive:
    """Return the stream of the rows of each element; ``factor`` is their number per element, if known."""
    if primitive.grouped:
        rows = ByCursor(UngroupCursor)
        return Arrange((primitive,), rows, primitive.grouped - 1, name="unbatch", on_stacked=unbatch_rows)
    return Compute(primitive, unbatch_rows, "unbatch", factor=factor)


def row_spec(operation: str, spec: ElementSpec) -> ElementSpec:
    """Return the spec of an element's rows.

    Raises
    ------
    ArgumentError
        A leaf has no rows, or leaves have different numbers of them.
    """
    lengths: dict[str, int] = {}
    rows: list[TensorSpec] = []
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if isinstance(leaf, AnyRankSpec):
            rows.append(leaf)
            continue
        if not leaf.shape:
            raise ArgumentError(f"{operation}: leaf {path or '(the element)'} is {leaf} and has no rows")
        if leaf.shape[0] is not None:
            lengths[path or "(the element)"] = leaf.shape[0]
        kind = TensorSpec
        if isinstance(leaf, RaggedTensorSpec):
            kind = RaggedTensorSpec if None in leaf.shape[2:] else RaggedRowSpec
        rows.append(kind(leaf.shape[1:], leaf.dtype, leaf.name))
    if len(set(lengths.values())) > 1:
        raise ArgumentError(f"{operation}: leaves differ in their number of rows: {lengths}")
    return spec.with_leaves(rows)


@dataclass
class UngroupCursor:
    """A cursor of the rows of batches that are not gathered yet, without state."""

    source: Cursor

    def pull(self) -> Run:
        while True:
            batches: Groups = self.source.pull()
            run = batches.ungroup()
            if len(run):
                return run


def unbatch_rows(rows: Rows) -> Block | Bundle:
    """Return the rows of each element of a block or bundle."""
    if isinstance(rows, Block) and all(len(leaf.shape) > 1 for leaf in rows.leaves):
        block = _reshaped(rows)
        if block is not None:
            return block
    items: list[tuple[Any, ...]] = []
    counts: list[int] = []
    for index in range(len(rows)):
        leaves = rows.item(index)
        _check_rows(rows, leaves, index)
        lengths = {path or "(the element)": len(leaf) for path, leaf in zip(rows.structure.paths, leaves, strict=True)}
        if len(set(lengths.values())) > 1:
            raise StackError(f"unbatch: leaves of {rows.where(index)} differ in their number of rows: {lengths}")
        # Items of arrays of strings are Python strings, and become arrays again.
        items += zip(*[map(as_array, leaf) for leaf in leaves], strict=True)
        counts += list(lengths.values())[:1]
    return from_items(rows.structure, items, rows.label, _origin(rows, counts))


def _origin(rows: Rows, counts: Any) -> Origin | SelectedOrigins:
    # Return the origin of the rows of elements, which messages name by their element.
    if not isinstance(rows, Block):
        return Origin(rows.label, is_exact=False)
    return SelectedOrigins([rows.origin], np.repeat(np.arange(len(rows)), counts))


def _check_rows(rows: Rows, leaves: Leaves, index: int) -> None:
    for path, leaf in zip(rows.structure.paths, leaves, strict=True):
        if not np.ndim(leaf):
            raise StackError(
                f"unbatch: leaf {path or '(the element)'} of {rows.where(index)} is a single value and has no rows"
            )


def _reshaped(block: Block) -> Block | None:
    # Return all rows of all elements as one view of each leaf, if the lengths of leaves agree.
    first = block.leaves[0]
    lengths = first.row_lengths if isinstance(first, Ragged) else np.full(len(first), first.shape[1])
    leaves = []
    for leaf in block.leaves:
        if isinstance(leaf, Ragged):
            if not np.array_equal(leaf.row_lengths, lengths):
                return None
            leaves.append(leaf.values)
        else:
            if (lengths != leaf.shape[1]).any():
                return None
            # The number of rows is given, since NumPy cannot infer it for rows without values.
            leaves.append(leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]))
    return Block(block.structure, leaves, block.label, _origin(block, lengths))
