"""``bucket_by_sequence_length``: batches of elements of similar length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core.arguments import whole_numbers, yes_or_no
from daskdist.core.block import Rows
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Compute, Fact, Primitive, gathered
from daskdist.core.selection.intervals import Index
from daskdist.core.spec import ElementSpec
from daskdist.core.vectorize.apply import Vectorised
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.ops.group_by_window import GroupRows, KeysOf
from daskdist.ops.padded_batch import Padding, PadRows


@dataclass(frozen=True, eq=False)
class BucketBySequenceLength(Transformation):
    """Batches of elements whose lengths are between the same two boundaries.

    Parameters
    ----------
    length_function
        Returns an element's length.
    boundaries
        The smallest length of each bucket except the first, in ascending order.
    batch_sizes
        The number of elements of a batch, for each bucket; one more than boundaries.
    padding
        The shapes and values to pad to; None if the elements of a bucket have one shape.
    pad_to_boundary
        Whether batches are padded to one less than the upper boundary of their bucket.
    drop_remainder
        Whether incomplete batches at the end are left out.
    """

    length_function: UserFunction
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    padding: Padding | None = field(repr=False)
    pad_to_boundary: bool = False
    drop_remainder: bool = False

    name = "bucket_by_sequence_length"
    facts = Facts(per_worker=True, regroups=True, levels=1)

    def __post_init__(self) -> None:
        whole_numbers(self.name, "bucket_boundaries", self.boundaries)
        whole_numbers(self.name, "bucket_batch_sizes", self.batch_sizes, at_least=1)
        yes_or_no(self.name, "pad_to_bucket_boundary", self.pad_to_boundary)
        yes_or_no(self.name, "drop_remainder", self.drop_remainder)
        if len(self.batch_sizes) != len(self.boundaries) + 1:
            raise ArgumentError(
                f"bucket_by_sequence_length: {len(self.batch_sizes)} bucket_batch_sizes for {len(self.boundaries)} "
                "bucket_boundaries; there is one bucket more than boundaries"
            )
        if any(b <= a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ArgumentError(f"bucket_by_sequence_length: bucket_boundaries {list(self.boundaries)} do not ascend")
        if self.pad_to_boundary and not self.boundaries:
            raise ArgumentError("bucket_by_sequence_length: pad_to_bucket_boundary is True without bucket_boundaries")

    @property
    def drops_remainder(self) -> bool:
        return self.drop_remainder

    @property
    def spec(self) -> ElementSpec:
        sizes = set(self.batch_sizes)
        size = self.batch_sizes[0] if len(sizes) == 1 and self.drop_remainder else None
        return self.source.spec.grouped(size) if self.padding is None else self.padding.spec(self.source.spec, size)

    @property
    def note(self) -> str:
        """Describe whether the length function is called for many rows at once, and if not, why; nothing is read."""
        return Vectorised(self.length_function).note(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        bucket = BucketOf(KeysOf(self.length_function, Vectorised(self.length_function), "length"), self.boundaries)
        buckets = Fact(gathered(inputs[0]), bucket, f"{self.name}-lengths")
        rows = GroupRows(self.batch_sizes, self.drop_remainder)
        batches = Arrange((buckets,), rows, grouped=1, name=self.name)
        if self.padding is None:
            return batches
        pad = PadRows(self.padding, bucket.length_before if self.pad_to_boundary else None)
        return Compute(batches, pad, self.name, factor=1, unstacked=True)


@dataclass(frozen=True)
class BucketOf:
    """The bucket of each element, shape ``(num_rows,)``."""

    lengths: KeysOf
    boundaries: tuple[int, ...]

    def __call__(self, rows: Rows) -> Index:
        return np.searchsorted(np.array(self.boundaries, np.int64), self.lengths(rows), side="right")

    def length_before(self, element: Any, where: Callable[[], str]) -> int:
        """Return one less than the upper boundary of an element's bucket."""
        length = int(self.lengths.key(element, where))
        for boundary in self.boundaries:
            if length < boundary:
                return boundary - 1
        raise UserFunctionError(
            f"bucket_by_sequence_length: {self.lengths.function} returned {length} on {where()}; with "
            f"pad_to_bucket_boundary=True all lengths are below the last boundary, {self.boundaries[-1]}"
        )
