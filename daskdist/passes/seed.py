"""The seed of a pipeline for operations that were given none of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from daskdist.core.node import Node


def with_seed(node: Any, seed: int) -> Node:
    """The pipeline with a seed in each operation that has drawn one for itself; their places keep them apart."""
    node = node.with_inputs(tuple(with_seed(each, seed) for each in node.inputs)) if node.inputs else node
    if getattr(node, "is_seeded", True):
        return node  # type: ignore[no-any-return]
    return replace(node, seed=seed, is_seeded=True)  # type: ignore[no-any-return]
