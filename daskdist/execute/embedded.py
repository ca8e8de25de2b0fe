"""A pipeline's elements in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from daskdist.core.block import Rows
from daskdist.core.primitive import Primitive
from daskdist.execute.callers import Caller, Now
from daskdist.execute.delivery import Delivery
from daskdist.execute.interpreter import Interpreter

logger: Final = logging.getLogger("daskdist")


def iterate(
    caller: Caller,
    primitive: Primitive,
    iteration: int,
    empty: Callable[[], Any] | None = None,
    budget_bytes: int | None = None,
) -> Iterator[Any]:
    """The elements, in order, brought here.

    Parameters
    ----------
    caller
        Who makes the calls; closed at the end, or when the iterator is let go of.
    primitive
        What the pipeline comes down to.
    iteration
        How many passes over it were begun before: the order of a shuffle depends on it.
    empty
        Makes an element without rows, where a pipeline can have such.
    budget_bytes
        Bytes that may be read ahead; the setting ``window-bytes`` if None.
    """
    interpreter = Interpreter(caller, budget_bytes=budget_bytes)
    try:
        for stretch in Delivery(interpreter, primitive, (iteration,)):
            (lane,) = stretch.lanes
            places = lane.places
            if lane.ref is not None and min(places[0], places[-1]) >= 0 and places[-1] - places[0] == len(places) - 1:
                yield from caller.result(lane.ref.handle).elements(places[0], places[-1] + 1)
                continue
            for place in places:
                if place >= 0:
                    yield from caller.result(lane.ref.handle).elements(place, place + 1)  # type: ignore[union-attr]
                elif empty is not None:
                    yield empty()
    finally:
        if interpreter.num_skipped:
            logger.warning("left out %d elements in all", interpreter.num_skipped)
        caller.close()


def rows_of(primitive: Primitive) -> Iterator[Rows]:
    """The elements computed in this thread, as rows: the way of a dataset that a function makes of an element."""
    caller = Now()
    for stretch in Delivery(Interpreter(caller), primitive, (0,)):
        (lane,) = stretch.lanes
        if lane.ref is not None:
            rows: Rows = caller.result(lane.ref.handle)
            places = [place for place in lane.places if place >= 0]
            yield rows if len(places) == len(rows) else rows.slice(places[0], places[-1] + 1)
