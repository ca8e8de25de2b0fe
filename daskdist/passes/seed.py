"""Seeds of operations without a seed from the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from daskdist.core.node import CountingNode, Node, counting, with_each_upstream
from daskdist.core.randomness.seed import generator


def with_seed(node: Node, seed: int) -> Node:
    """Return the pipeline with a seed set in each operation without a seed from the user.

    These operations still count as unseeded: `PassNumber.stream` makes them draw differently.
    """
    return _reseeded(node, lambda operation: replace(operation, seed=seed))


def drawn_seeds(node: Node) -> list[int]:
    """Return the seeds that unseeded operations drew."""
    operations: Iterator[Any] = counting(node)
    return [operation.seed for operation in operations if not operation.is_seeded]


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
    return change(node) if isinstance(node, CountingNode) and not node.is_seeded else node
