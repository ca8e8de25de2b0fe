"""``Dataset.range``: evenly spaced integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.arguments import number_dtype, whole_number
from daskdist.core.block import Block
from daskdist.core.failing.origin import Origin, SelectedOrigins, origin_from
from daskdist.core.node import Pieces, Source
from daskdist.core.primitive import LazySplits, Primitive, Read, Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Range(Source):
    """The integers from ``start`` up to ``stop``, ``step`` apart, as scalars.

    Parameters
    ----------
    start, stop, step, output_type
        The arguments.
    cut_from
        The name in messages of the source that it is a piece of, and the number of its first element there.
    """

    start: int
    stop: int
    step: int = 1
    output_type: Any = np.int64
    cut_from: tuple[str, int] = field(default=("range", 0), repr=False)

    name = "range"

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            # Not the stop, but the numbers before it have to fit.
            whole_number(self.name, name, getattr(self, name), at_most=None)
        whole_number(self.name, "step", self.step)
        dtype = number_dtype(self.name, "output_type", self.output_type)
        if self.step == 0:
            raise ArgumentError("range: step is 0; give a positive or negative number")
        numbers = range(self.start, self.stop, self.step)
        for number in (numbers[0], numbers[-1]) if numbers else ():
            fits(self.name, number, dtype)
        try:
            len(numbers)
        except OverflowError:
            raise ArgumentError(
                f"range: there are more than {2**63 - 1} numbers; give fewer, or Dataset.counter()"
            ) from None

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec(LONE, (TensorSpec((), np.dtype(self.output_type)),))

    @property
    def cardinality(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def splits(self) -> Sequence[Split]:
        name, place = self.cut_from
        numbers = Numbers(self.start, self.step, self.cardinality, place)
        size = max(in_bytes("split-bytes") // 8, 1)
        return LazySplits(-(-len(numbers) // size), CutNumbers(numbers, size, name))

    def pieces(self) -> Pieces:
        return Pieces(self.cardinality, self._cut)

    def _cut(self, first: int, stop: int) -> Range:
        numbers = range(self.start, self.stop, self.step)[first:stop]
        name, place = self.cut_from
        return replace(self, start=numbers.start, stop=numbers.stop, cut_from=(name, place + first))

    @property
    def rows_at(self) -> Callable[[np.ndarray[Any, Any]], Block]:
        return self._rows_at

    def _rows_at(self, places: np.ndarray[Any, Any]) -> Block:
        """Return the elements at these places."""
        numbers = self.start + places.astype(np.int64) * self.step
        name, place = self.cut_from
        origin = SelectedOrigins([Origin(name)], places + place)
        return Block(LONE, [numbers.astype(self.output_type, copy=False)], name, origin)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, ReadNumbers(np.dtype(self.output_type)), self.name, divide=divide_numbers)


def fits(operation: str, number: int, dtype: np.dtype[Any]) -> None:
    """Check that a number can be an element.

    Raises
    ------
    ArgumentError
        The number is out of the range of its dtype, or of int64.
    """
    bounds = np.iinfo(dtype if dtype.kind in "iu" else np.int64)
    lowest, highest = int(bounds.min), min(int(bounds.max), 2**63 - 1)
    if not lowest <= number <= highest:
        raise ArgumentError(f"{operation}: {number} is out of the range of {bounds.dtype}, {lowest} to {highest}")


@dataclass(frozen=True)
class Numbers:
    """An arithmetic sequence of ``length`` numbers; ``place`` is the index of ``start`` in the whole."""

    start: int
    step: int
    length: int
    place: int = 0

    def __len__(self) -> int:
        return self.length

    def cut(self, start: int, stop: int) -> Numbers:
        """Return the part from index ``start`` to ``stop``."""
        stop = min(stop, self.length)
        return Numbers(self.start + start * self.step, self.step, stop - start, self.place + start)


@dataclass(frozen=True)
class CutNumbers:
    """A function that returns parts of ``size`` numbers as splits."""

    numbers: Numbers
    size: int
    name: str

    def __call__(self, index: int) -> Split:
        start = index * self.size
        part = self.numbers.cut(start, start + self.size)
        return numbered_split(self.name, part.place, part, len(part))


def numbered_split(name: str, start: int, payload: Any, num_rows: int) -> Split:
    """Return a split of 64-bit numbers, whose label states the place of its first row."""
    return Split(f"{name} rows {start} on", payload, num_rows, num_rows * 8)


def divide_numbers(split: Split, start: int, stop: int) -> Split:
    """Return the part of a split from index ``start`` to ``stop``."""
    part = split.payload.cut(start, stop)
    return numbered_split(_name_of(split), part.place, part, len(part))


def _name_of(split: Split) -> str:
    return split.label.partition(" ")[0]


@dataclass(frozen=True)
class ReadNumbers:
    """A function that reads numbers as a block."""

    dtype: np.dtype[Any]

    def __call__(self, split: Split) -> Block:
        numbers: Numbers = split.payload
        values = numbers.start + numbers.step * np.arange(len(numbers), dtype=np.int64)
        origin = origin_from(_name_of(split), numbers.place, len(numbers))
        return Block(LONE, [values.astype(self.dtype, copy=False)], split.label, origin)
