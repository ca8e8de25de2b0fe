"""Fast flattening of nests into leaves and structure."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import cloudpickle
import numpy as np
import optree

from daskdist.errors import ArgumentError

# Types that are certainly leaves; any other may be some kind of nest.
LEAVES: Final = frozenset(
    {np.ndarray, np.float32, np.float64, np.int32, np.int64, int, float, complex, bool, str, bytes, type(None)}
)
# A description of a structure, by `_shape` or else its pickle -> the structure.
_treespecs: Final[dict[Any, Any]] = {}
_MOST_STRUCTURES: Final = 1024


def check_is_no_dict(value: Any, operation: str) -> None:
    """Raise an error if a replica's value is a dict.

    Raises
    ------
    ArgumentError
        The value is a dict; the message says which nest to give instead.
    """
    if isinstance(value, Mapping):
        names = ", ".join(f"{key!r}: PerReplica(...)" for key in value)
        raise ArgumentError(
            f"{operation}: a replica's value is a dict; give a dict of PerReplica values, {{{names}}}, as run and "
            "experimental_distribute_values_from_function return it"
        )


def flattened_call(
    args: Sequence[Any], kwargs: dict[str, Any], leaf_types: frozenset[type] | set[type] = LEAVES
) -> tuple[list[Any], Any]:
    """Return the leaves of ``(args, kwargs)`` and their structure, as `flattened` does."""
    if not kwargs and leaf_types.issuperset(map(type, args)):
        return list(args), _treespec_of_args(len(args))
    return flattened((tuple(args), kwargs), leaf_types)


@lru_cache(64)
def _treespec_of_args(num_args: int) -> Any:
    return flattened(((0,) * num_args, {}))[1]


def flattened(nest: Any, leaf_types: Collection[type] = LEAVES) -> tuple[list[Any], Any]:
    """Return the leaves of a nest and its structure, one object for all nests of the structure.

    The result is that of optree, and dicts keep the order of their keys. This is many times faster than optree while
    other threads are busy, and thousands of steps have nests of a few kinds.
    """
    leaves: list[Any] = []
    key = _shape(nest, leaves, leaf_types)
    known = _treespecs.get(key)
    if known is not None:
        return leaves, known
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
    if key is None:
        # Structures of dicts with different key orders are equal, but their pickles differ.
        try:
            key = pickle.dumps(treespec)
        except Exception:
            # A class in the structure cannot be pickled by name.
            return leaves, treespec
    if len(_treespecs) >= _MOST_STRUCTURES:
        _treespecs.clear()
    known = _treespecs.setdefault(key, treespec)
    # A class may have been redefined under the same name.
    return leaves, known if known == treespec else treespec


def _shape(nest: Any, leaves: list[Any], leaf_types: Collection[type]) -> Any:
    # A hashable description of the structure of plain tuples, lists and dicts; None if there are other nodes.
    kind = type(nest)
    if kind in leaf_types:
        leaves.append(nest)
        return "*"
    names = None
    if kind is tuple or kind is list:
        shapes = [_shape(child, leaves, leaf_types) for child in nest]
    elif kind is dict:
        names = tuple(nest)
        if not all(type(name) is str for name in names):
            return None
        # The leaves come in the order of the sorted keys.
        shapes = [_shape(nest[name], leaves, leaf_types) for name in sorted(names)]
    else:
        return None
    return None if None in shapes else (kind, names, *shapes)


# (address of a structure, which leaves are None) -> structure and pickle; by address, since structures of dicts in
# different orders are equal.
_structures: Final[dict[tuple[int, tuple[bool, ...]], tuple[Any, bytes]]] = {}


def pickled_structure(treespec: Any, are_none: tuple[bool, ...] = ()) -> bytes:
    """Return the pickle of a structure and of which leaves are None; cached, as pickling takes long."""
    known = _structures.get((id(treespec), are_none))
    if known is None:
        if len(_structures) >= _MOST_STRUCTURES:
            _structures.clear()
        # Keep the structure, so that its address is not reused.
        known = treespec, cloudpickle.dumps((treespec, are_none))
        _structures[id(treespec), are_none] = known
    return known[1]


@lru_cache(maxsize=1024)
def loaded_structure(pickled: bytes) -> Any:
    """Return a structure from its pickle, one object for all equal ones."""
    return cloudpickle.loads(pickled)
