"""A pipeline's elements in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from daskdist.core.node import Node
from daskdist.core.primitive import Primitive
from daskdist.execute.callers import embedded
from daskdist.execute.delivery import Delivery
from daskdist.execute.interpreter import Interpreter


def iterate(node: Node, primitive: Primitive, iteration: int) -> Iterator[Any]:
    """The elements, in order.

    Parameters
    ----------
    node
        The pipeline.
    primitive
        What it comes down to.
    iteration
        How many passes over it were begun before: the order of a shuffle depends on it.
    """
    caller = embedded(node)
    try:
        for stretch in Delivery(Interpreter(caller), primitive, (iteration,)):
            (lane,) = stretch.lanes
            if lane.ref is not None:
                places = lane.places
                yield from caller.result(lane.ref.handle).elements(places[0], places[-1] + 1)
    finally:
        caller.close()
