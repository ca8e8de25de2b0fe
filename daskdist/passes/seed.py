"""Seeds of operations without a seed from the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from daskdist.core.node import CountingNode, Node, with_each_upstream
from daskdist.core.randomness.seed import generator


def with_seed(node: Node, seed: int) -> Node:
    """Return the pipeline with a seed set in each operation without a seed from the user.

    These operations still count as unseeded: `PassNumber.stream` makes them draw differently.
    """
    return _reseeded(node, lambda operation: replace(operation, seed=seed))


def drawn_seeds(node: Node) -> list[int]:
    """Return the seeds that unseeded operations drew."""
    return [operation.seed for operation in _upstream_first(node) if not _is_seeded(operation)]


def with_drawn(node: Node, seeds: Sequence[int]) -> Node:
    """Return the pipeline with other seeds in place of the drawn ones."""
    coming = iter(seeds)
    return _reseeded(node, lambda operation: replace(operation, seed=next(coming)))


def of_worker(node: Node, index: int) -> Node:
    """Return the pipeline of one worker, in which unseeded operations draw differently from other workers.

    Otherwise workers that each have the whole dataset would get the same batches in each step.
    """
    seeds = drawn_seeds(node)
    if not index or not seeds:
        return node
    return with_drawn(node, [int(generator(seed, index, ()).integers(2**63)) for seed in seeds])


def _reseeded(node: Node, change: Callable[[Any], Node]) -> Node:
    node = with_each_upstream(node, lambda source: _reseeded(source, change))
    return node if _is_seeded(node) else change(node)


def _upstream_first(node: Node) -> Iterator[Any]:
    for source in (*node.inputs, *node.contents):
        yield from _upstream_first(source)
    yield node


def _is_seeded(node: Any) -> bool:
    return not isinstance(node, CountingNode) or node.is_seeded
