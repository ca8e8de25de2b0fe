"""Seeds of operations that were given none of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dask.base import tokenize

from daskdist.core.functions.user_function import code_of
from daskdist.core.node import Node, Source, walk
from daskdist.core.randomness.seed import generator


def with_seed(node: Node, seed: int) -> Node:
    """Return the pipeline with a seed in each operation that has drawn one for itself.

    It does not count as given: by `PassNumber.stream` those operations draw differently.
    """
    return _reseeded(node, lambda each: replace(each, seed=seed))


def drawn_seeds(node: Node) -> list[int]:
    """Return the seeds that operations have drawn for themselves."""
    return [each.seed for each in _upstream_first(node) if not _is_seeded(each)]


def with_drawn(node: Node, seeds: Sequence[int]) -> Node:
    """Return the pipeline with given seeds instead of the ones drawn."""
    coming = iter(seeds)
    return _reseeded(node, lambda each: replace(each, seed=next(coming)))


def of_worker(node: Node, index: int) -> Node:
    """Return the pipeline in which what has drawn a seed for itself draws otherwise than it does for other workers.

    Workers that each have the whole dataset would all get the same batches in each step.
    """
    seeds = drawn_seeds(node)
    if not index or not seeds:
        return node
    return with_drawn(node, [int(generator(seed, index, ()).integers(2**63)) for seed in seeds])


def _reseeded(node: Node, change: Callable[[Any], Node]) -> Node:
    if node.inputs:
        node = node.with_inputs(tuple(_reseeded(each, change) for each in node.inputs))
    return node if _is_seeded(node) else change(node)


def _upstream_first(node: Node) -> Iterator[Any]:
    for each in node.inputs:
        yield from _upstream_first(each)
    yield node


def _is_seeded(node: Any) -> bool:
    return bool(getattr(node, "is_seeded", True))


def fingerprint(node: Node) -> str:
    """Return a token that equal pipelines share in every process, and that changes with the files they read.

    Seeds that operations have drawn for themselves are not part of it.
    """
    states = [each.state() for each in walk(node) if isinstance(each, Source)]
    return str(tokenize(with_seed(node, 0), states))


def with_new_fingerprints(node: Node) -> Node:
    """Return the pipeline in which what is kept by a fingerprint goes by the functions as they are now."""
    inputs = tuple(map(with_new_fingerprints, node.inputs))
    if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
        node = node.with_inputs(inputs)
    code = getattr(node, "code", None)
    if code is None or code == code_of(inputs[0]):
        return node
    keeps: Any = node
    return keeps.of_code(code_of(inputs[0]), fingerprint(inputs[0]))  # type: ignore[no-any-return]
