"""Pass numbers of the operations of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from daskdist.core.node import CountingNode, Node, counting, walk, with_each_upstream
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
        before = 0

        def visit_source(source: Node) -> Node:
            nonlocal before
            source, number = visit(source)
            before += number
            return source

        visited = with_each_upstream(visited, visit_source)
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
    return [_epoch_of(node, numbers) for node in nodes]


def epochs_in_pass(contents: Node, epoch: Epoch, nodes: Iterable[Node]) -> list[Epoch]:
    """Return the epochs of pipelines made from the contents of an operation, in a pass of that operation."""
    numbers = {
        operation.passes.counter: operation.passes.of(epoch)[0] - operation.passes.start
        for operation in counting(contents)
    }
    return [_epoch_of(node, numbers, epoch[1:]) for node in nodes]


def _epoch_of(node: Node, numbers: Mapping[PassCounter, int], repetitions: tuple[int, ...] = ()) -> Epoch:
    return (tuple(numbers[part.passes.counter] + part.passes.start for part in counting(node)), *repetitions)


def at_pass(node: Node, number: int) -> Node:
    """Return the pipeline with counters of its own, whose first pass has a number.

    Operations upstream of one that stores its first pass begin with pass 0, which is the one that it replays. Those
    upstream of one that always reads their first pass stay as they are.
    """
    counters: dict[tuple[PassCounter, int], PassCounter] = {}

    def visit(visited: Any, first: int) -> Any:
        if visited.reads_first_pass:
            return visited
        visited = with_each_upstream(visited, lambda source: visit(source, 0 if visited.replays_first_pass else first))
        if not isinstance(visited, CountingNode):
            return visited
        counter = counters.setdefault((visited.passes.counter, first), PassCounter())
        return replace(visited, passes=replace(visited.passes, counter=counter, start=first, is_at_epoch=True))

    root: Node = visit(node, number)
    return root


def first_pass(node: Node) -> int | None:
    """Return the number that `at_pass` gave to the first pass of a pipeline; None if it did not."""
    numbers = [operation.passes.start for operation in counting(node) if operation.passes.is_at_epoch]
    return max(numbers, default=None)


def from_first_pass(node: Node, epoch: Epoch) -> Epoch:
    """Return the epoch of a whole pipeline from that of an operation which counts the passes over it."""
    number, *repetitions = epoch
    return (number - (first_pass(node) or 0), *repetitions)


def epoch_of_contents(node: Node, epoch: Epoch) -> Epoch:
    """Return the epoch of a pipeline that another process runs, from that of the one whose contents it is.

    Elements that the pipeline stores, which begin empty there, are those of its first pass.
    """
    replayed = {operation.passes for part in walk(node) if part.replays_first_pass for operation in counting(part)}
    passes = [
        operation.passes.start if operation.passes in replayed else operation.passes.of(epoch)[0]
        for operation in counting(node)
    ]
    return (tuple(passes), *epoch[1:])


def skip_passes_of_call(node: Node, epoch: Epoch) -> None:
    """Reserve numbers for the passes that replicas make in one call, of which this is the first.

    The program does not learn how many passes they make, and no later pass may have the number, and so the order, of
    one of those.
    """
    for operation, number in zip(counting(node), epoch[0], strict=True):
        operation.passes.counter.skip_to(number + _MOST_PASSES_IN_A_CALL - operation.passes.start)


def note_pass(node: Node, epoch: Epoch) -> None:
    """Record a pass that was begun elsewhere, so that later iterations have higher numbers."""
    for operation, number in zip(counting(node), epoch[0], strict=True):
        operation.passes.counter.skip_to(number + 1 - operation.passes.start)
