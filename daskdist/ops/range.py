"""``Dataset.range``: evenly spaced integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.block import Block
from daskdist.core.node import Facts, Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError

_LONE = Structure.of(0)[1]


@dataclass(frozen=True, eq=False)
class Range(Source):
    """The integers from ``start`` up to ``stop``, ``step`` apart, as scalars of dtype int64."""

    start: int
    stop: int
    step: int = 1

    name = "range"
    facts = Facts()

    def __post_init__(self) -> None:
        if self.step == 0:
            raise ArgumentError("range: step is 0; give a positive or negative number")

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec(_LONE, (TensorSpec((), np.dtype(np.int64)),))

    @property
    def cardinality(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def splits(self) -> Sequence[Split]:
        values = range(self.start, self.stop, self.step)
        size = max(in_bytes("split-bytes") // 8, 1)
        parts = [values[first : first + size] for first in range(0, len(values), size)]
        return [Split(f"range rows {k * size} on", part, len(part), len(part) * 8) for k, part in enumerate(parts)]

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, _read, "range", divide=_divide)


def _divide(split: Split, start: int, stop: int) -> Split:
    part = split.payload[start:stop]
    return replace(split, payload=part, num_rows=len(part), num_bytes=len(part) * 8)


def _read(split: Split) -> Block:
    values = split.payload
    return Block(_LONE, [np.arange(values.start, values.stop, values.step)], split.label)
