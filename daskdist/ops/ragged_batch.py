"""``ragged_batch``: consecutive elements of different lengths as an array of values and their row splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core.arguments import number_dtype
from daskdist.core.block import Batches, Block, Bundle
from daskdist.core.columns import stack as stack_leaves
from daskdist.core.columns import with_empty_alike
from daskdist.core.node import Node, Transformation
from daskdist.core.primitive import Compute, Primitive, gathered
from daskdist.core.ragged import Ragged, ragged_of_dense
from daskdist.core.spec import (
    DatasetSpec,
    ElementSpec,
    RaggedRowSpec,
    RaggedTensorSpec,
    TensorSpec,
    check_ranks,
    known_spec,
)
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, StackError
from daskdist.ops.batch import Batch


@dataclass(frozen=True, eq=False)
class RaggedBatch(Batch):
    """Batches of ``batch_size`` elements; leaves of varying length become `Ragged`.

    Parameters
    ----------
    element_spec
        The spec of the elements, which says which lengths vary; None if only the data shows that.
    row_splits_dtype
        int32 or int64.
    is_of_rows
        Whether only leaves that are rows of `Ragged` become `Ragged`, as in ``batch``; others are stacked.
    """

    element_spec: ElementSpec | None = field(repr=False, kw_only=True)
    row_splits_dtype: Any = np.int64
    is_of_rows: bool = False

    name = "ragged_batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.element_spec is not None:
            no_datasets(self.name, self.element_spec)
            if not self.is_of_rows:
                check_ranks(self.name, self.element_spec)
        if number_dtype(self.name, "row_splits_dtype", self.row_splits_dtype) not in (np.int32, np.int64):
            raise ArgumentError(f"ragged_batch: row_splits_dtype is {self.row_splits_dtype!r}; give int32 or int64")

    @property
    def spec(self) -> ElementSpec:
        size = self.batch_size if self.drop_remainder else None
        spec = self.source.spec if self.element_spec is None else self.element_spec
        return spec.with_leaves([self._grouped(leaf, size) for leaf in spec.leaves])

    def _grouped(self, leaf: TensorSpec, size: int | None) -> TensorSpec:
        return leaf.grouped(size) if self.is_of_rows else _ragged_leaf(leaf, size)

    def _is_ragged(self, leaf: TensorSpec) -> bool:
        return isinstance(leaf, RaggedRowSpec) if self.is_of_rows else is_ragged(leaf)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        batches = super().lower((gathered(inputs[0]),))
        ragged_leaves = None if self.element_spec is None else tuple(map(self._is_ragged, self.element_spec.leaves))
        function = RaggedRows(ragged_leaves, np.dtype(self.row_splits_dtype))
        return Compute(batches, function, self.name, factor=1, unstacked=True)


def is_ragged(leaf: TensorSpec) -> bool:
    """Return whether batches of a leaf are `Ragged`: one of its lengths varies."""
    return None in leaf.shape


def ragged_spec(spec: ElementSpec, size: int | None) -> ElementSpec:
    """Return the spec of batches of ``size`` elements, where leaves with a length that varies become `Ragged`."""
    return spec.with_leaves([_ragged_leaf(leaf, size) for leaf in spec.leaves])


def _ragged_leaf(leaf: TensorSpec, size: int | None) -> TensorSpec:
    kind = RaggedTensorSpec if is_ragged(leaf) else TensorSpec
    return kind((size, *leaf.shape), leaf.dtype, leaf.name)


def batch(source: Node, batch_size: int, drop_remainder: bool, label: str | None) -> Transformation:
    """Return batches of elements; rows of `Ragged` become `Ragged`, as in TensorFlow."""
    plain = Batch(source, batch_size, drop_remainder, label=label)
    spec = known_spec(source) if source.may_have_ragged_rows else None
    if spec is None or not spec.has_ragged_rows:
        return plain
    return RaggedBatch(source, batch_size, drop_remainder, is_of_rows=True, element_spec=spec, label=label)


@dataclass(frozen=True)
class RaggedRows:
    """A function that assembles groups of rows as batches.

    Parameters
    ----------
    is_ragged
        Whether each leaf becomes `Ragged`; None if exactly the leaves with an axis do.
    splits_dtype
        The dtype of row splits.
    """

    is_ragged: tuple[bool, ...] | None
    splits_dtype: np.dtype[Any]

    def __call__(self, batches: Batches) -> Bundle:
        rows = batches.rows
        columns = rows.leaves if isinstance(rows, Block) else columns_of(rows)
        items = []
        for start, stop in zip(batches.bounds[:-1], batches.bounds[1:], strict=True):
            # An empty batch takes its shape and dtype from a row.
            first = start if start < stop else min(start, len(rows) - 1)
            cuts = [column[first : max(stop, first + 1)] for column in columns]
            leaves = tuple([self._leaf(cut, number, rows) for number, cut in enumerate(cuts)])
            items.append(leaves if start < stop else tuple([leaf[:0] for leaf in leaves]))
        return Bundle(rows.structure, items, rows.label)

    def _leaf(self, column: Any, number: int, rows: Block | Bundle) -> Any:
        is_ragged = np.ndim(column[0]) > 0 if self.is_ragged is None else self.is_ragged[number]
        if not is_ragged:
            return column if isinstance(column, np.ndarray) else stacked(column, rows, number)
        if isinstance(column, Ragged):
            return column.with_splits(self.splits_dtype)
        if isinstance(column, np.ndarray) and column.ndim > 1:
            return ragged_of_dense(column, self.splits_dtype)
        try:
            return Ragged.of(of_one_kind(column), self.splits_dtype)
        except StackError as error:
            raise StackError(f"ragged_batch: {leaf_of(rows, number)} {error}") from None


def of_one_kind(column: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves of elements as arrays of one dtype and number of axes; empty lists have those of the others.

    Raises
    ------
    StackError
        Others differ; the message continues a sentence about the leaf.
    """
    arrays = with_empty_alike([leaf if isinstance(leaf, Ragged) else np.asarray(leaf) for leaf in column])
    # NumPy's fixed-width words of different lengths differ in dtype.
    kinds = dict.fromkeys(
        (array.dtype.kind if array.dtype.kind in "SU" else array.dtype, array.ndim) for array in arrays
    )
    if len(kinds) > 1:
        descriptions = ", ".join(f"{dtype} of {num_axes} axes" for dtype, num_axes in kinds)
        raise StackError(f"comes as {descriptions} in one batch; give it one dtype and rank with map(...)")
    return arrays


def leaf_of(rows: Block | Bundle, number: int) -> str:
    """Return the name of a leaf of elements for messages."""
    return f"leaf {rows.structure.paths[number] or '(the element)'} of elements of {rows.label or 'this data'}"


def no_datasets(operation: str, spec: ElementSpec) -> None:
    """Check that no leaf of elements is a dataset.

    Raises
    ------
    ArgumentError
        A leaf is a dataset; the message names it.
    """
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if isinstance(leaf, DatasetSpec):
            raise ArgumentError(
                f"{operation}: leaf {path or '(the element)'} is a dataset, {leaf}; convert it to arrays first, "
                "for example by flat_map(lambda window: window.batch(n))"
            )


def columns_of(rows: Bundle) -> list[list[Any]]:
    """Return the elements leaf by leaf."""
    return [list(column) for column in zip(*[rows.item(k) for k in range(len(rows))], strict=True)]


def stacked(column: Any, rows: Block | Bundle, number: int) -> Any:
    """Return the leaves of elements as one array.

    Raises
    ------
    StackError
        Their shapes or dtypes differ.
    """
    path = rows.structure.paths[number]
    structure = Structure.of({path: 0})[1] if path else rows.structure
    (leaf,) = stack_leaves(structure, [(leaf_of_row,) for leaf_of_row in column], rows.label)
    return leaf
