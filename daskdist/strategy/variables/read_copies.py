"""The leaves of a nest with variables, for operations on the values of all replicas."""

from __future__ import annotations

from typing import Any

import optree

from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.regroup import component
from daskdist.strategy.variables.variable import Variable


def with_copies(operation: str, token: str, nest: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a nest and its structure, with the copies of each variable in its place.

    Raises
    ------
    ArgumentError
        A variable is of another strategy.
    """
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
    if any(isinstance(leaf, Variable) or has_variables(leaf) for leaf in leaves):
        for leaf in leaves:
            for each in leaf.values if has_variables(leaf) else (leaf,):
                if isinstance(each, Variable):
                    each.check_is_of(token, operation)
        leaves, treespec = optree.tree_flatten(treespec.unflatten(map(_of_copies, leaves)), none_is_leaf=True)
    return leaves, treespec


def has_variables(leaf: Any) -> bool:
    """Return whether a leaf is a `PerReplica` of which some values are variables."""
    return type(leaf) is PerReplica and leaf.spread is None and Variable in set(map(type, leaf.values))


def _of_copies(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.values
    if not has_variables(leaf):
        return leaf
    found = list(leaf.values)
    for variable in {each.key.number: each for each in found if isinstance(each, Variable)}.values():
        # In a cross-replica scope the copies of other replicas may be missing.
        is_asked = [isinstance(each, Variable) and each.key.number == variable.key.number for each in found]
        own = variable.values_where(is_asked)
        found = [component(own, number) if is_asked[number] else each for number, each in enumerate(found)]
    return PerReplica(found)
