"""Consecutive pieces of a pipeline, each of which can be produced without the ones before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from daskdist.core import cardinality
from daskdist.core.cardinality import INFINITE
from daskdist.core.node import CountingNode, Node, Pieces, Source
from daskdist.ops.with_options import merged_options


def pieces_of(node: Node) -> Pieces | None:
    """Return how a pipeline can be cut into consecutive pieces; None if it cannot.

    The elements of all pieces, in order, are those of the pipeline. Shuffles, and operations that depend on earlier
    elements, cannot be cut. This may list files.
    """
    return None if merged_options(node).on_error == "skip" else _pieces(node)


def _pieces(node: Node) -> Pieces | None:
    facts = node.facts
    if isinstance(node, Source):
        return node.pieces()
    if len(node.inputs) != 1 or facts.leaves_out_failed or isinstance(node, CountingNode):
        return None
    changes_number = node.group_size is not None or node.first_taken is not None
    if not (changes_number or facts.keeps_order or facts.compute):
        return None
    (source,) = node.inputs
    below = _pieces(source)
    if below is None:
        return None
    if not changes_number:
        is_exact = below.is_exact and (facts.keeps_order or facts.keeps_count)
        return replace(below, cut=_applied(node, below.cut), is_exact=is_exact)
    if not below.is_exact:
        return None
    if node.first_taken is not None:
        first_taken = node.first_taken
        return replace(
            below,
            num_units=node.cardinality,
            cut=lambda first, stop: below.cut(first_taken + first, first_taken + stop),
        )
    size, num_units = node.group_size or 1, below.num_units

    def cut_groups(first: int, stop: int) -> Node:
        last = stop * size if num_units == INFINITE else min(stop * size, num_units)
        return below.cut(first * size, last)

    number = cardinality.divide(num_units, size, drop_remainder=node.drops_remainder)
    return Pieces(number, _applied(node, cut_groups), -(-below.grain // size))


def _applied(node: Node, cut: Callable[[int, int], Node]) -> Callable[[int, int], Node]:
    return lambda first, stop: node.with_inputs((cut(first, stop),))
