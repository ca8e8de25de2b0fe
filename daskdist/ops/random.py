"""``Dataset.random``: an endless sequence of random integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.block import Block
from daskdist.core.cardinality import INFINITE
from daskdist.core.failing.origin import origin_from
from daskdist.core.node import CountingNode, Source
from daskdist.core.primitive import EndlessSplits, Epoch, Primitive, Read, Split
from daskdist.core.randomness.seed import generator
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE
from daskdist.ops.range import numbered_split

# The number of integers drawn from one generator; fixed, so that they do not depend on the size of reads.
_ROWS = 65_536


@dataclass(frozen=True, eq=False)
class Random(CountingNode, Source):
    """Uniform integers from 0 up to 2**32, as int64 scalars."""

    seed: int
    rerandomize_each_iteration: bool = False

    name = "random"
    is_listed = False

    def __post_init__(self) -> None:
        whole_number(self.name, "seed", self.seed, at_most=None)
        yes_or_no(self.name, "rerandomize_each_iteration", self.rerandomize_each_iteration)

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec(LONE, (TensorSpec((), np.dtype(np.int64)),))

    @property
    def cardinality(self) -> int:
        return INFINITE

    def splits_of(self, epoch: Epoch) -> EndlessSplits:
        """Return the splits of a pass, which are endless."""
        return EndlessSplits(partial(_split, self.passes.of(epoch) if self.rerandomize_each_iteration else ()))

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        draw = partial(_draw, self.seed, self.passes.stream)
        return Read(partial(self.splits_of, (0,)), draw, self.name, divide=_divide, splits_of=self.splits_of)


def _split(numbers: tuple[int, ...], number: int) -> Split:
    return numbered_split("random", number * _ROWS, (numbers, number, 0, _ROWS), _ROWS)


def _divide(split: Split, start: int, stop: int) -> Split:
    numbers, number, first, _ = split.payload
    payload = (numbers, number, first + start, first + stop)
    return numbered_split("random", number * _ROWS + first + start, payload, stop - start)


def _draw(seed: int, stream: int, split: Split) -> Block:
    numbers, number, start, stop = split.payload
    drawn = generator(seed, stream, (*numbers, number)).integers(2**32, size=_ROWS)
    origin = origin_from("random", number * _ROWS + start, stop - start)
    return Block(LONE, [drawn[start:stop]], split.label, origin)
