"""Nests as leaves and their structure, quickly for those there are many of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import optree

from daskdist.errors import ArgumentError

# Leaves for certain; anything else may be a nest of some kind.
LEAVES: Final = frozenset(
    {np.ndarray, np.float32, np.float64, np.int32, np.int64, int, float, complex, bool, str, bytes, type(None)}
)


def check_is_no_dict(value: Any, operation: str) -> None:
    """Refuse a replica's value that is a dict.

    Raises
    ------
    ArgumentError
        It is one; the message says which nest to give.
    """
    if isinstance(value, Mapping):
        names = ", ".join(f"{key!r}: PerReplica(...)" for key in value)
        raise ArgumentError(
            f"{operation}: a replica's value is a dict; give a dict of PerReplica values, {{{names}}}, as run and "
            "experimental_distribute_values_from_function return it"
        )


def flattened(nest: Any, leaf_types: frozenset[type] = LEAVES) -> tuple[list[Any], Any]:
    """The leaves of a nest, and its structure, one object for all nests of the structure.

    What optree gives. But steps come by the thousand, with nests of a few kinds, and while other threads have something
    to do optree takes many times as long as this.
    """
    leaves: list[Any] = []
    shape = _shape(nest, leaves, leaf_types)
    if shape is None:
        leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
        return leaves, canonical(treespec)
    return leaves, _treespec(shape)


def _shape(nest: Any, leaves: list[Any], leaf_types: frozenset[type]) -> Any:
    # Something hashable that stands for the structure of plain tuples, lists and dicts; None where there is else.
    kind = type(nest)
    if kind in leaf_types:
        leaves.append(nest)
        return "*"
    if kind is tuple or kind is list:
        found = [_shape(each, leaves, leaf_types) for each in nest]
    elif kind is dict:
        try:
            names = sorted(nest)
        except TypeError:
            return None
        if not all(type(name) is str for name in names):
            return None
        found = [_shape(nest[name], leaves, leaf_types) for name in names]
        return None if None in found else (kind, tuple(names), *found)
    else:
        return None
    return None if None in found else (kind, None, *found)


@lru_cache(1024)
def _treespec(shape: Any) -> Any:
    return optree.tree_structure(_made(shape), none_is_leaf=True)


def _made(shape: Any) -> Any:
    if shape == "*":
        return 0
    kind, names, *parts = shape
    made = map(_made, parts)
    return dict(zip(names, made, strict=True)) if kind is dict else kind(made)


@lru_cache(256)
def canonical(treespec: Any) -> Any:
    """Return the one object that stands for all structures that are equal."""
    return treespec
