"""Random orders of any length that take no memory."""

from __future__ import annotations

from typing import Final

import numpy as np

from daskdist.core.selection.intervals import Index

# Up to this length an order is drawn from all orders; longer ones are drawn by keys, which is faster.
_SMALL: Final = 2**20
# The number of places looked up together: few enough for the cache, enough to share the cost of a call.
_AT_ONCE: Final = 2**16
# Must be even: each round changes one of the halves in turn.
_ROUNDS: Final = 6
_MIX: Final = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))


class Permutation:
    """A random order of ``length`` items, computed place by place.

    Parameters
    ----------
    length
        The number of items, up to ``2**62``.
    rng
        Draws the order.
    most_drawn
        The largest length for which the order is drawn from all orders, which takes 8 bytes for each item; None for
        1,048,576.

    Notes
    -----
    A Feistel network permutes pairs of a number below ``2**low_bits`` and one below ``num_high``. These are slightly
    more pairs than items; a pair beyond the items is permuted again until it stands for an item (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). The rounds mix with the 32-bit function that Wellons measured to
    have the least bias ("hash-prospector", 2018).

    >>> order = Permutation(5, np.random.default_rng(0))
    >>> sorted(order.at(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, rng: np.random.Generator, most_drawn: int | None = None) -> None:
        self.length = length
        self.table = rng.permutation(length) if length <= (_SMALL if most_drawn is None else most_drawn) else None
        self.keys = rng.integers(2**32, size=_ROUNDS, dtype=np.uint32)
        self.low_bits = max((length - 1).bit_length(), 2) // 2
        self.num_high = -(-length >> self.low_bits)

    def at(self, places: Index) -> Index:
        """Return the items at some places, int64, shape ``(num_places,)``."""
        if self.table is not None:
            return np.asarray(self.table.take(places))
        items = np.empty(len(places), np.int64)
        for start in range(0, len(places), _AT_ONCE):
            items[start : start + _AT_ONCE] = self._looked_up(places[start : start + _AT_ONCE])
        return items

    def between(self, start: int, stop: int) -> Index:
        """Return the items from one place to another, int64, shape ``(stop - start,)``; do not change them."""
        return self.at(np.arange(start, stop)) if self.table is None else self.table[start:stop]

    def _looked_up(self, places: Index) -> Index:
        items = self._permuted(places)
        outside = np.flatnonzero(items >= self.length)
        while len(outside):
            items[outside] = self._permuted(items[outside])
            outside = outside[items[outside] >= self.length]
        return items

    def _permuted(self, numbers: Index) -> Index:
        num_high, mask = np.uint32(self.num_high), np.uint32((1 << self.low_bits) - 1)
        high = (numbers >> self.low_bits).astype(np.uint32)
        low = numbers.astype(np.uint32)
        low &= mask
        for key, other in self.keys.reshape(-1, 2):
            low ^= _mixed(high ^ key) & mask
            # Scale to a number below `num_high`, and add it modulo `num_high`.
            step = _mixed(low ^ other).astype(np.uint64)
            step *= np.uint64(num_high)
            step >>= np.uint64(32)
            high += step.astype(np.uint32)
            np.minimum(high, high - num_high, out=high)
        return (high.astype(np.int64) << self.low_bits) | low


def _mixed(numbers: Index) -> Index:
    # In place, as the arguments are temporary.
    numbers ^= numbers >> np.uint32(16)
    numbers *= _MIX[0]
    numbers ^= numbers >> np.uint32(15)
    numbers *= _MIX[1]
    numbers ^= numbers >> np.uint32(16)
    return numbers
