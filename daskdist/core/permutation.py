"""Random orders of any length that take no memory."""

from __future__ import annotations

from typing import Any

import numpy as np

Index = np.ndarray[Any, Any]

# Up to here an order is drawn from all there are; above, from as many as there are keys.
_SMALL = 2**16
_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """A random order of ``length`` things, looked up place by place.

    Parameters
    ----------
    length
        How many things there are, up to ``2**62``.
    rng
        Draws the order.

    Notes
    -----
    A Feistel network permutes the numbers below the next power of four; numbers not below ``length`` are
    permuted again until they are (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The
    rounds mix by the finaliser of SplitMix64.

    >>> order = Permutation(5, np.random.default_rng(0))
    >>> sorted(order.at(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, rng: np.random.Generator) -> None:
        self.length = length
        self._table = rng.permutation(length) if length <= _SMALL else None
        self._keys = rng.integers(2**64, size=_ROUNDS, dtype=np.uint64)
        self._half_bits = np.uint64(max((length - 1).bit_length() + 1, 2) // 2)

    def at(self, places: Index) -> Index:
        """What stands at these places, int64, shape ``(num_places,)``."""
        if self._table is not None:
            return np.asarray(self._table.take(places))
        found = self._permuted(places.astype(np.uint64))
        # Less than four out of five come out too large on average each time, whatever the length.
        outside = np.flatnonzero(found >= self.length)
        while len(outside):
            found[outside] = self._permuted(found[outside])
            outside = outside[found[outside] >= self.length]
        return np.asarray(found, np.int64)

    def _permuted(self, numbers: Index) -> Index:
        half, mask = self._half_bits, (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = numbers >> half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << half) | right


def _mixed(numbers: Any) -> Any:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
