"""Random numbers that depend on what they are for, never on who draws them or when."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from daskdist.config import setting


def fresh_seed() -> int:
    """A seed for an operation that was given none: the setting ``daskdist.seed``, or where that is null, any."""
    seed = setting("seed")
    return secrets.randbits(63) if seed is None else int(seed)


def generator(seed: int, node: int, epoch: Sequence[int] = ()) -> np.random.Generator:
    """The generator of one operation in one epoch.

    Parameters
    ----------
    seed
        The operation's seed.
    node
        The operation's place in its pipeline, so that two with one seed do not draw alike.
    epoch
        Which pass this is: one number for each enclosing repetition, the outermost first. Empty where every
        pass is to draw the same.

    >>> [int(generator(1, 0, epoch).integers(100)) for epoch in [(0,), (1,), (0,)]]
    [47, 97, 47]
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(seed) % 2**64, node, *epoch])))
