"""``Dataset.counter``: an endless sequence of evenly spaced integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.arguments import number_dtype, whole_number
from daskdist.core.cardinality import INFINITE
from daskdist.core.node import Pieces, Source
from daskdist.core.primitive import EndlessSplits, Primitive, Read
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE
from daskdist.ops.range import CutNumbers, Numbers, Range, ReadNumbers, divide_numbers, fits


@dataclass(frozen=True, eq=False)
class Counter(Source):
    """The integers from ``start`` on, ``step`` apart, as scalars."""

    start: int = 0
    step: int = 1
    dtype: Any = np.int64

    name = "counter"
    is_listed = False

    def __post_init__(self) -> None:
        for name in ("start", "step"):
            whole_number(self.name, name, getattr(self, name))
        fits(self.name, self.start, number_dtype(self.name, "dtype", self.dtype))

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec(LONE, (TensorSpec((), np.dtype(self.dtype)),))

    @property
    def cardinality(self) -> int:
        return INFINITE

    def pieces(self) -> Pieces | None:
        return Pieces(INFINITE, self._cut) if self.step else None

    def _cut(self, first: int, stop: int) -> Range:
        start, end = self.start + first * self.step, self.start + stop * self.step
        return Range(start, end, self.step, self.dtype, cut_from=(self.name, first))

    def endless_splits(self) -> EndlessSplits:
        """Return the splits, which are endless."""
        size = max(in_bytes("split-bytes") // 8, 1)
        return EndlessSplits(CutNumbers(Numbers(self.start, self.step, 2**63), size, self.name))

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        read = ReadNumbers(np.dtype(self.dtype))
        return Read(self.endless_splits, read, self.name, divide=divide_numbers)
