"""A pipeline's elements in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from daskdist.core.primitive import Primitive
from daskdist.execute.callers import Caller
from daskdist.execute.delivery import Delivery
from daskdist.execute.interpreter import Interpreter


def iterate(caller: Caller, primitive: Primitive, iteration: int) -> Iterator[Any]:
    """The elements, in order, brought here.

    Parameters
    ----------
    caller
        Who makes the calls; closed at the end, or when the iterator is let go of.
    primitive
        What the pipeline comes down to.
    iteration
        How many passes over it were begun before: the order of a shuffle depends on it.
    """
    try:
        for stretch in Delivery(Interpreter(caller), primitive, (iteration,)):
            (lane,) = stretch.lanes
            if lane.ref is not None:
                places = lane.places
                yield from caller.result(lane.ref.handle).elements(places[0], places[-1] + 1)
    finally:
        caller.close()
