"""Random words for each element, determined by the seed, the pass and the number of the element."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Self

import numpy as np

from daskdist.core.block import Block, Bundle, Rows
from daskdist.core.node import CountingNode, Transformation
from daskdist.core.primitive import EndlessSplits, Epoch, Primitive, Read, Split
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.randomness.seed import WORDS_PER_GENERATOR, fresh_seed, random_words
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.ops.zip import zipped

# The number of generators whose words are drawn at a time.
_ROWS: Final = 65_536
# An element and its words.
PAIR: Final = Structure.of((0, 0))[1]
WORDS: Final = ElementSpec(LONE, (TensorSpec((WORDS_PER_GENERATOR,), np.dtype(np.uint64)),))


def paired(source: Primitive, name: str, seed: int, passes: PassNumber, stream: int = 0) -> Primitive:
    """Return the stream of pairs of an element and its words.

    Parameters
    ----------
    source
        The elements.
    name
        The name of the operation in plans.
    seed
        The seed of the operation.
    passes
        The number of the current pass.
    stream
        Distinguishes operations with the same seed.
    """
    draw = partial(_draw, seed, stream)
    splits_of = partial(_splits_of, passes)
    words = Read(partial(splits_of, (0,)), draw, "rng", divide=_divide, splits_of=splits_of)
    return zipped((source, words), PAIR, name, is_counted=False)


def _splits_of(passes: PassNumber, epoch: Epoch) -> EndlessSplits:
    return EndlessSplits(partial(_split, passes.of(epoch)))


def _split(numbers: tuple[int, ...], number: int) -> Split:
    start = number * _ROWS
    return Split(f"generators {start} on", (numbers, start), _ROWS, _ROWS * 8 * WORDS_PER_GENERATOR)


def _divide(split: Split, start: int, stop: int) -> Split:
    numbers, first = split.payload
    num_rows = stop - start
    num_bytes = 8 * WORDS_PER_GENERATOR * num_rows
    return replace(split, payload=(numbers, first + start), num_rows=num_rows, num_bytes=num_bytes)


def _draw(seed: int, stream: int, split: Split) -> Block:
    numbers, start = split.payload
    # No label, because messages name the element.
    return Block(LONE, [random_words(seed, numbers, start, split.num_rows or 0, stream)])


def unpaired(rows: Rows) -> Block | Bundle:
    """Return the elements of pairs without their words."""
    structure = Structure(rows.structure.treespec.child(0))
    if isinstance(rows, Block):
        return Block(structure, rows.leaves[:-1], rows.label, rows.origin)
    return Bundle(structure, [rows.item(index)[:-1] for index in range(len(rows))], rows.label)


@dataclass(frozen=True, eq=False)
class DrawsForFunction(CountingNode, Transformation):
    """An operation whose function may make datasets that draw at random.

    Operations without a seed in such a dataset draw by the words of the element that the function is called with, so
    that a repeated call, here or on another worker, makes the same dataset.

    Parameters
    ----------
    seed
        The seed of the words.
    is_seeded
        Whether the user gave the seed; always False.
    share
        The number of the worker's share, if the operation is on one.
    """

    seed: int = field(default_factory=fresh_seed, kw_only=True, repr=False)
    is_seeded: bool = field(default=False, kw_only=True, repr=False)
    share: int = field(default=0, kw_only=True, repr=False)

    name = "element_random"

    def __dask_tokenize__(self) -> object:
        from dask.tokenize import normalize_token

        # The seed counts only if something is drawn with it.
        values = [getattr(self, attribute.name) for attribute in fields(self) if attribute.name != "seed"]
        return type(self).__name__, normalize_token(values), self.seed if self.draws else 0

    def on_share(self, index: int, num_shards: int) -> Self:
        return replace(self, share=index)

    def _paired(self, source: Primitive) -> Primitive:
        return paired(source, self.name, self.seed, self.passes, 1 + self.passes.stream + (self.share << 16))


def words_of(pair: Any) -> tuple[Any, list[int]]:
    """Return the element of a pair, and its words as integers."""
    element, words = pair
    return element, words.tolist()
