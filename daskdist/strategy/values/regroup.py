"""Nests of `PerReplica` from the values of replicas, and one replica's part of such a nest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from daskdist.core.structure import describe_nesting
from daskdist.errors import DaskdistError
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.flat import LEAVES
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import FlatResult


def component(nest: Any, replica: int) -> Any:
    """Return a nest with one replica's value in place of each `PerReplica`."""
    return optree.tree_map(
        lambda leaf: leaf.values[replica] if isinstance(leaf, PerReplica) else leaf, nest, none_is_leaf=True
    )


def regroup(results: Sequence[Any], num_rows: frozenset[int] = frozenset(), *, always: bool = False) -> Any:
    """Return the results of all replicas, which have one structure, as one nest of `PerReplica`.

    An object that all replicas share is not wrapped, unless ``always``. The results come from a step with ``num_rows``.
    """
    if all(type(result) in LEAVES for result in results):
        # Most steps return numbers.
        return results[0] if not always and _is_one_object(results) else PerReplica(results, num_rows)
    present = {number: FlatResult.of(result) for number, result in enumerate(results) if result is not ABSENT}
    if not present:
        return PerReplica(results, num_rows)
    first, treespec = next((number, result.treespec) for number, result in present.items())
    for number, flat_result in present.items():
        if flat_result.treespec != treespec:
            raise DaskdistError(
                f"run: the function returned {describe_nesting(treespec)} on replica {first} and "
                f"{describe_nesting(flat_result.treespec)} on replica {number}; it must return one structure on all"
            )
    absent = FlatResult([ABSENT] * treespec.num_leaves, treespec)
    flat = [present.get(number, absent) for number in range(len(results))]
    leaves = [
        column[first] if not always and _is_one_object(column) else PerReplica(column, num_rows)
        for column in zip(*[result.leaves for result in flat], strict=True)
    ]
    return optree.tree_unflatten(treespec, leaves)


def _is_one_object(column: Sequence[Any]) -> bool:
    # Equal small numbers are the same object in Python, so identity is no criterion: `len(batch)` must not be per
    # replica for some batches and a single value for others.
    first = column[0]
    if isinstance(first, (int, float, complex, np.generic)):
        return False
    if any(value is ABSENT for value in column):
        return all(value is None or value is ABSENT for value in column)
    return all(value is first for value in column)
