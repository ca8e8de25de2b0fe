"""Rewrites of nodes that save work without changing the elements or their order.

Each rule is a function from a node to a better one, or None. Rules read facts, never the names of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from daskdist.core.node import Node, with_each_input


def simplify(node: Node) -> Node:
    """Return the tree with every rule applied until none applies."""
    if node.facts.leaves_out_failed:
        # Elements that failed are left out before operations that group elements: no operation may move.
        return node
    node = with_each_input(node, simplify)
    for rule in RULES:
        better = rule(node)
        if better is not None:
            return simplify(better)
    return node


def count_rows_not_batches(node: Any) -> Node | None:
    """Turn ``batch(b).take(n)`` into ``take(b * n).batch(b)``: skipped batches are never built."""
    if not node.facts.by_count or node.count < 0 or node.source.group_size is None:
        return None
    batch = node.source
    better: Node = batch.with_inputs((replace(node, source=batch.source, count=node.count * batch.group_size),))
    return better


def count_before_computing(node: Any) -> Node | None:
    """Turn ``map(f).take(n)`` into ``take(n).map(f)``: elements that are not taken are not computed."""
    if not node.facts.by_count or not (node.source.facts.compute and node.source.facts.keeps_count):
        return None
    compute = node.source
    better: Node = compute.with_inputs((replace(node, source=compute.source),))
    return better


def count_before_passing_on(node: Any) -> Node | None:
    """Turn ``prefetch(n).take(m)`` into ``take(m).prefetch(n)``, so that other rules apply to ``take``."""
    if not node.facts.by_count or not node.source.facts.keeps_order:
        return None
    passing = node.source
    better: Node = passing.with_inputs((replace(node, source=passing.source),))
    return better


def compute_before_reordering(node: Any) -> Node | None:
    """Turn ``shuffle(n).map(f)`` into ``map(f).shuffle(n)``: the function runs in the call that reads.

    The results of ``f`` are then in the buffer of the shuffle, so they must not be much larger than its arguments.
    """
    if not (node.facts.compute and node.facts.keeps_count) or not node.source.facts.keeps_rows:
        return None
    if node.may_be_large:
        return None
    below = node.source.source
    while below.facts.keeps_rows:
        below = below.source
    if below.inputs and not below.facts.compute:
        return None
    order = node.source
    better: Node = order.with_inputs((node.with_inputs(order.inputs),))
    return better


RULES: Final[tuple[Callable[[Any], Node | None], ...]] = (
    count_rows_not_batches,
    count_before_computing,
    count_before_passing_on,
    compute_before_reordering,
)
