"""Pass numbers of the operations of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from daskdist.core.node import Node, counting
from daskdist.core.primitive import Epoch
from daskdist.core.randomness.pass_numbers import PassCounter

_MOST_PASSES_IN_A_CALL: Final = 2**20


def numbered(node: Node) -> Node:
    """Return the pipeline with each operation that counts its passes told its place among them.

    The place is the index of its number in the epochs of `begin_pass`. An operation without a seed of its own is told
    too how many others are before it, so that those that share one seed draw differently.
    """
    places = iter(range(sum(1 for _ in counting(node))))

    def visit(each: Any) -> tuple[Any, int]:
        found = [visit(source) for source in each.inputs]
        before = sum(number for _, number in found)
        if any(new is not old for (new, _), old in zip(found, each.inputs, strict=True)):
            each = each.with_inputs(tuple(source for source, _ in found))
        if getattr(each, "passes", None) is None:
            return each, before
        stream = 0 if getattr(each, "is_seeded", True) else before
        each = replace(each, passes=replace(each.passes, place=next(places), stream=stream))
        # A function that makes no dataset that draws is not one of them.
        return each, before + (getattr(each, "is_seeded", True) or each.draws)

    made: Node = visit(node)[0]
    return made


def begin_pass(*nodes: Node) -> list[Epoch]:
    """Draw the pass numbers of one iteration over some pipelines, and return the epoch of each.

    An operation has one number in an iteration, wherever it is used: in two places of a pipeline, as in
    ``zip(ds.map(f), ds.map(g))``, which so gives both of the same elements; and in the shares of several workers.
    """
    numbers: dict[PassCounter, int] = {}
    for node in nodes:
        for each in counting(node):
            counter = each.passes.counter
            if counter not in numbers:
                numbers[counter] = counter.draw()
    return [(tuple(numbers[each.passes.counter] for each in counting(node)),) for node in nodes]


def skip_passes_of_call(node: Node, epoch: Epoch) -> None:
    """Leave numbers to the passes that replicas make in one call, of which this is the first.

    The program does not learn how many they make, and no later pass is to have the number, and so the order, of one of
    those.
    """
    for each, number in zip(counting(node), epoch[0], strict=True):
        each.passes.counter.skip_to(number + _MOST_PASSES_IN_A_CALL)


def note_pass(node: Node, epoch: Epoch) -> None:
    """Count a pass that was begun elsewhere: iterations to come are later ones."""
    for each, number in zip(counting(node), epoch[0], strict=True):
        each.passes.counter.skip_to(number + 1)
