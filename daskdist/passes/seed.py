"""The seed of a pipeline for operations that were given none of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dask.base import tokenize

from daskdist.core.node import Node, Source, walk


def with_seed(node: Any, seed: int) -> Node:
    """The pipeline with a seed in each operation that has drawn one for itself; their places keep them apart."""
    node = node.with_inputs(tuple(with_seed(each, seed) for each in node.inputs)) if node.inputs else node
    if getattr(node, "is_seeded", True):
        return node  # type: ignore[no-any-return]
    return replace(node, seed=seed, is_seeded=True)  # type: ignore[no-any-return]


def fingerprint(node: Node) -> str:
    """A token that equal pipelines have in common, in every process, and that changes with the files they read.

    Seeds that operations have drawn for themselves are not part of it.
    """
    states = [each.state() for each in walk(node) if isinstance(each, Source)]
    return str(tokenize(with_seed(node, 0), states))
