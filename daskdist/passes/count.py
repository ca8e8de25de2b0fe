"""The smallest part of a pipeline that must be read to count its elements."""

from __future__ import annotations

from typing import Any

from daskdist.core import cardinality
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.node import Node
from daskdist.ops.select import by_column
from daskdist.ops.with_options import merged_options


def counted_by(node: Node) -> tuple[Node, list[Node]]:
    """Return the pipeline whose elements are to be counted, and the batch operations after it, the last one first.

    Operations that return one element for each are left out, with the errors that their functions may raise. Only one
    column of files is read.
    """
    batches: list[Node] = []
    if merged_options(node).on_error == "skip":
        return node, batches
    while node.cardinality == UNKNOWN:
        facts = node.facts
        if node.group_size is not None and len(node.inputs) == 1:
            batches.append(node)
        elif not (facts.keeps_order or facts.keeps_rows or (facts.compute and facts.keeps_count)):
            break
        (node,) = node.inputs
    if node.cardinality == UNKNOWN:
        node = node.reading(_first_column) or node
    return node, batches


def number_of_batches(number: int, batches: list[Node]) -> int:
    """Return the number of elements after some batch operations, given the number before them."""
    for node in reversed(batches):
        number = cardinality.divide(number, node.group_size or 1, drop_remainder=node.drops_remainder)
    return number


def _first_column(nest: Any) -> Any:
    return dict(list(by_column(nest).items())[:1]) if isinstance(nest, (dict, tuple)) else nest
