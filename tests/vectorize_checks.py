"""Helpers for tests of vectorised functions: rows, columns and comparisons."""

from __future__ import annotations

import numpy as np

from daskdist.core.block import Block, Bundle
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.structure import Structure
from daskdist.core.vectorize.apply import Vectorised
from daskdist.ops.map import MapColumns, MapRows
from daskdist.testing import same_elements

MEAN = np.array([0.5, -1.5, 2.0])
rng = np.random.default_rng(0)
# The rows that functions with side effects have recorded.
seen: list[int] = []


def block(nest, label="here"):
    leaves, structure = Structure.of(nest)
    return Block(structure, leaves, label)


def scalars(dtype=np.float64, num_rows=300):
    return block((rng.standard_normal(num_rows) * 50).astype(dtype))


def columns(function):
    user = UserFunction(function, "map")
    return MapColumns(MapRows(user), Vectorised(user))


def is_same(given, expected):
    assert type(given) is type(expected)
    assert given.structure == expected.structure
    assert given.label == expected.label
    if isinstance(given, Bundle):
        same_elements(list(given.elements()), list(expected.elements()))
        return
    for leaf, other in zip(given.leaves, expected.leaves, strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        if leaf.dtype.kind in "fmM":
            # Compare bits, so that -0.0 differs from 0.0; all NaN are equal.
            is_nan = np.isnan(leaf)
            assert (is_nan == np.isnan(other)).all()
            assert leaf[~is_nan].tobytes() == other[~is_nan].tobytes()
        else:
            assert (leaf == other).all()
