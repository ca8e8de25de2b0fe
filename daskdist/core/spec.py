"""Shapes and dtypes of leaves, before there are any values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core.structure import Structure, as_array
from daskdist.errors import ArgumentError

Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one leaf.

    Parameters
    ----------
    shape
        One length an axis; None where it varies or is not known.
    dtype
        Anything NumPy takes for a dtype.
    name
        For the reader; specs of different names are compatible.

    >>> TensorSpec((None, 3), "float32")
    TensorSpec(shape=(None, 3), dtype=float32, name=None)
    """

    shape: Shape
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    name: str | None = None

    def __post_init__(self) -> None:
        shape = tuple(None if size is None else int(size) for size in self.shape)
        if any(size is not None and size < 0 for size in shape):
            raise ArgumentError(f"shape {self.shape} has a negative length; write None for one not known")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @classmethod
    def of(cls, value: Any) -> TensorSpec:
        """The spec that fits one array."""
        return cls(np.shape(value), value.dtype)

    def is_compatible_with(self, other: Any) -> bool:
        """Whether an array, or every array another spec describes in part, can be of this spec.

        >>> TensorSpec((None, 3)).is_compatible_with(np.zeros((5, 3), "float32"))
        True
        """
        if not isinstance(other, TensorSpec):
            other = TensorSpec.of(as_array(other))
        return (
            other.dtype == self.dtype
            and len(other.shape) == len(self.shape)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, other.shape, strict=True))
        )

    def most_general_common_spec(self, other: TensorSpec) -> TensorSpec | None:
        """The narrowest spec that holds everything both hold; None where dtype or rank differ.

        >>> TensorSpec((2, 3)).most_general_common_spec(TensorSpec((4, 3)))
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        """
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return None
        shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=True))
        return TensorSpec(shape, self.dtype, self.name if self.name == other.name else None)

    def grouped(self, size: int | None) -> TensorSpec:
        """The spec of ``size`` such leaves stacked along a new first axis."""
        return TensorSpec((size, *self.shape), self.dtype, self.name)

    def zeros(self, num_rows: int = 0) -> np.ndarray[Any, Any]:
        """An array of ``num_rows`` along the first axis; other unknown lengths are 0."""
        return np.zeros((num_rows, *(size or 0 for size in self.shape[1:])), self.dtype)

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype}, name={self.name!r})"


class PerReplicaSpec:
    """The specs of one leaf on every replica, in replica order."""

    __slots__ = ("specs",)

    def __init__(self, *specs: TensorSpec) -> None:
        self.specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.specs))})"


@dataclass(frozen=True, slots=True)
class ElementSpec:
    """The structure of a dataset's elements and the spec of each leaf."""

    structure: Structure
    leaves: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, element: Any) -> ElementSpec:
        """The spec that fits one element."""
        leaves, structure = Structure.flatten(element)
        return cls(structure, tuple(map(TensorSpec.of, leaves)))

    @property
    def packed(self) -> Any:
        """The specs in the structure of an element, as users see them."""
        return self.structure.pack(self.leaves)

    def with_leaves(self, leaves: Sequence[TensorSpec]) -> ElementSpec:
        return ElementSpec(self.structure, tuple(leaves))

    def grouped(self, size: int | None) -> ElementSpec:
        """The spec of ``size`` such elements stacked."""
        return self.with_leaves([leaf.grouped(size) for leaf in self.leaves])

    def example(self, unknown: int, value: int) -> Any:
        """A made-up element that fits.

        Parameters
        ----------
        unknown
            The length of axes whose length is not known.
        value
            What all its numbers are.
        """

        def array(leaf: TensorSpec) -> Any:
            made = np.zeros([unknown if size is None else size for size in leaf.shape], leaf.dtype)
            if leaf.dtype.kind in "biufc":
                made[...] = value
            return made[()]

        return self.structure.pack(map(array, self.leaves))
