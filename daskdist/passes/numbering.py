"""Pass numbers of the operations of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from daskdist.core.node import CountingNode, Node, counting
from daskdist.core.primitive import Epoch
from daskdist.core.randomness.pass_numbers import PassCounter

_MOST_PASSES_IN_A_CALL: Final = 2**20


def numbered(node: Node) -> Node:
    """Return the pipeline with the place of each operation that counts its passes set.

    The place is the index of the operation's number in the epochs of `begin_pass`. An operation without a seed also
    learns how many such operations are before it, so that those that share one seed draw differently.
    """
    places = iter(range(sum(1 for _ in counting(node))))

    def visit(visited: Any) -> tuple[Any, int]:
        numbered_sources = [visit(source) for source in visited.inputs]
        before = sum(number for _, number in numbered_sources)
        if any(new is not old for (new, _), old in zip(numbered_sources, visited.inputs, strict=True)):
            visited = visited.with_inputs(tuple(source for source, _ in numbered_sources))
        if not isinstance(visited, CountingNode):
            return visited, before
        stream = 0 if visited.is_seeded else before
        visited = replace(visited, passes=replace(visited.passes, place=next(places), stream=stream))
        # An operation whose function creates no random dataset does not count.
        return visited, before + (visited.is_seeded or visited.draws)

    root: Node = visit(node)[0]
    return root


def begin_pass(*nodes: Node) -> list[Epoch]:
    """Take the pass numbers of one iteration over some pipelines, and return the epoch of each.

    An operation has one number in an iteration, wherever it is used: in two places of a pipeline, such as
    ``zip(ds.map(f), ds.map(g))``, both of which get the same elements, and in the shares of several workers.
    """
    numbers: dict[PassCounter, int] = {}
    for node in nodes:
        for operation in counting(node):
            counter = operation.passes.counter
            if counter not in numbers:
                numbers[counter] = counter.draw()
    return [(tuple(numbers[operation.passes.counter] for operation in counting(node)),) for node in nodes]


def at_pass(node: Node, number: int) -> Node:
    """Return the pipeline with counters of its own, whose first pass has a number.

    Operations upstream of one that stores its first pass begin with pass 0, which is the one that it replays.
    """
    counters: dict[tuple[PassCounter, int], PassCounter] = {}

    def visit(visited: Any, first: int) -> Any:
        if visited.inputs:
            first_of_sources = 0 if visited.replays_first_pass else first
            visited = visited.with_inputs(tuple(visit(source, first_of_sources) for source in visited.inputs))
        if not isinstance(visited, CountingNode):
            return visited
        counter = counters.setdefault((visited.passes.counter, first), PassCounter(first))
        return replace(visited, passes=replace(visited.passes, counter=counter))

    root: Node = visit(node, number)
    return root


def skip_passes_of_call(node: Node, epoch: Epoch) -> None:
    """Reserve numbers for the passes that replicas make in one call, of which this is the first.

    The program does not learn how many passes they make, and no later pass may have the number, and so the order, of
    one of those.
    """
    for operation, number in zip(counting(node), epoch[0], strict=True):
        operation.passes.counter.skip_to(number + _MOST_PASSES_IN_A_CALL)


def note_pass(node: Node, epoch: Epoch) -> None:
    """Record a pass that was begun elsewhere, so that later iterations have higher numbers."""
    for operation, number in zip(counting(node), epoch[0], strict=True):
        operation.passes.counter.skip_to(number + 1)
