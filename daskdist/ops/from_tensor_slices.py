"""``Dataset.from_tensor_slices`` and ``Dataset.from_tensors``: arrays in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.block import Block
from daskdist.core.failing.origin import origin_from
from daskdist.core.functions.kept_values import keep_as_they_are
from daskdist.core.node import Pieces, Source
from daskdist.core.primitive import Primitive, Read, Split, payload_itself
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, RaggedRowSpec, RaggedTensorSpec, TensorSpec
from daskdist.core.structure import TEXT, Leaves, Structure
from daskdist.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class FromTensorSlices(Source):
    """Elements that are the rows of arrays in memory.

    Parameters
    ----------
    structure, leaves
        The nest of arrays.
    first
        The number of the first row in the arrays that these were cut from.
    """

    structure: Structure
    leaves: tuple[Any, ...] = field(repr=False)
    first: int = field(default=0, repr=False)

    name = "from_tensor_slices"

    @classmethod
    def of(
        cls,
        tensors: object,
        label: str | None = None,
        operation: str = "from_tensor_slices",
        *,
        narrow: bool = False,
    ) -> FromTensorSlices:
        """Create the source from a nest of arrays of equal length along axis 0; ``narrow`` as in `as_array`."""
        leaves, structure = _arrays(operation, tensors, narrow)
        lengths = {}
        for path, leaf in zip(structure.paths, leaves, strict=True):
            if np.ndim(leaf) == 0:
                raise ArgumentError(
                    f"{operation}: leaf {path or '(the element)'} is a scalar and has no rows; "
                    "use Dataset.from_tensors for one element"
                )
            lengths[path or "(the element)"] = len(leaf)
        if len(set(lengths.values())) > 1:
            raise ArgumentError(f"{operation}: leaves differ in their number of rows: {lengths}")
        return cls(structure, leaves, label=label)

    @classmethod
    def of_one(cls, tensors: object, label: str | None = None, *, narrow: bool = False) -> FromTensorSlices:
        """Create the source of a single element; ``narrow`` as in `as_array`."""
        leaves, structure = _arrays("from_tensors", tensors, narrow)
        return cls(structure, tuple(_alone(leaf) for leaf in leaves), label=label)

    def with_own_arrays(self) -> FromTensorSlices:
        leaves = list(self.leaves)
        # Each array may have one reference more than expected, from the tuple of this node.
        keep_as_they_are(leaves, num_others=1)
        is_same = all(old is new for old, new in zip(self.leaves, leaves, strict=True))
        return self if is_same else replace(self, leaves=tuple(leaves))

    @property
    def spec(self) -> ElementSpec:
        spec = ElementSpec.of_rows(self.structure, self.leaves)
        columns = zip(spec.leaves, self.leaves, strict=True)
        leaves = [_row_of_ragged(leaf) if isinstance(value, Ragged) else leaf for leaf, value in columns]
        return spec.with_leaves(leaves)

    @property
    def may_have_ragged_rows(self) -> bool:
        return any(isinstance(leaf, Ragged) for leaf in self.leaves)

    @property
    def cardinality(self) -> int:
        return len(self.leaves[0]) if self.leaves else 0

    def pieces(self) -> Pieces:
        return Pieces(self.cardinality, self._cut)

    def _cut(self, first: int, stop: int) -> FromTensorSlices:
        return replace(self, leaves=tuple(leaf[first:stop] for leaf in self.leaves), first=self.first + first)

    def splits(self) -> Sequence[Split]:
        num_rows = self.cardinality
        row_bytes = sum(leaf.nbytes for leaf in self.leaves) / max(num_rows, 1)
        size = max(int(in_bytes("split-bytes") // max(row_bytes, 1)), 1)
        splits = []
        for start in range(0, num_rows, size):
            stop = min(start + size, num_rows)
            block = Block(
                self.structure,
                [leaf[start:stop] for leaf in self.leaves],
                f"from_tensor_slices rows {self.first + start} on",
                origin_from("from_tensor_slices", self.first + start, stop - start),
            )
            splits.append(Split(block.label, block, stop - start, block.nbytes))
        return splits

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, payload_itself, self.name, divide=_divide, kept_for=self)


def _arrays(operation: str, tensors: object, narrow: bool) -> tuple[Leaves, Structure]:
    try:
        leaves, structure = Structure.flatten(tensors, narrow=narrow)
        leaves = tuple(map(_with_text, leaves))
    except ArgumentError as error:
        raise ArgumentError(f"{operation}: {error}") from None
    if not leaves:
        raise ArgumentError(f"{operation}: {tensors!r} has no leaves; give at least one array")
    return leaves, structure


def _with_text(leaf: Any) -> Any:
    # An array of Python strings, as pandas returns it for a column, is text.
    if isinstance(leaf, np.ndarray) and leaf.dtype == object and set(map(type, leaf.flat)) == {str}:
        # Text with half of a pair of surrogates stays as it is.
        with contextlib.suppress(TypeError, ValueError):
            return leaf.astype(TEXT)
    return leaf


def _divide(split: Split, start: int, stop: int) -> Split:
    part = split.payload.slice(start, stop)
    return replace(split, payload=part, num_rows=len(part), num_bytes=part.nbytes)


def _row_of_ragged(leaf: TensorSpec) -> TensorSpec:
    return leaf if isinstance(leaf, RaggedTensorSpec) else RaggedRowSpec(leaf.shape, leaf.dtype, leaf.name)


def _alone(leaf: object) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(leaf, [0, len(leaf)])
    return np.asarray(leaf)[None]
