"""The leaves of nests with variables, for operations on the values of all replicas."""

from __future__ import annotations

from typing import Any

import optree

from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.variables.record import check_is_of
from daskdist.strategy.variables.variable import Variable, with_copies_in


def with_copies(operation: str, token: str, nest: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a nest, with each variable replaced by its copies.

    Raises
    ------
    ArgumentError
        A variable belongs to another strategy.
    """
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
    if any(isinstance(leaf, Variable) or has_variables(leaf) for leaf in leaves):
        for leaf in leaves:
            for value in leaf.values if has_variables(leaf) else (leaf,):
                if isinstance(value, Variable):
                    check_is_of(value, token, operation)
        leaves, treespec = optree.tree_flatten(treespec.unflatten(map(_of_copies, leaves)), none_is_leaf=True)
    return leaves, treespec


def has_variables(leaf: Any) -> bool:
    """Return whether a leaf is a `PerReplica` with variables among its values."""
    return type(leaf) is PerReplica and leaf.refs is None and Variable in set(map(type, leaf.values))


def _of_copies(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.values
    return with_copies_in(leaf) if has_variables(leaf) else leaf
