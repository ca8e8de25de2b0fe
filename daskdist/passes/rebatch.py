"""Global batches cut into one piece per replica."""

from __future__ import annotations

from daskdist.core.node import Node, walk
from daskdist.core.spec import DatasetSpec, ElementSpec, TensorSpec
from daskdist.errors import ShardingError
from daskdist.ops.split_batches import SplitBatches
from daskdist.ops.with_options import merged_options


def rebatch(node: Node, spec: ElementSpec, num_replicas: int) -> Node:
    """Return the pipeline with each of its batches cut into ``num_replicas`` pieces.

    Raises
    ------
    ShardingError
        The elements have no batch dimension.
    """
    if num_replicas == 1:
        return node
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if leaf.shape == ():
            raise ShardingError(
                f"the elements cannot be split over {num_replicas} replicas: leaf {path or '(the element)'} "
                f"{_advice(node, leaf)}"
            )
    # Failing batches are dropped before they are cut: otherwise the pieces of a batch that does not stack would fail
    # one by one, and later pieces would go to other replicas.
    return SplitBatches(node, num_replicas, is_whole=merged_options(node).on_error == "skip")


def _advice(node: Node, leaf: TensorSpec) -> str:
    last = "or use distribute_datasets_from_function"
    if isinstance(leaf, DatasetSpec):
        return (
            "is a dataset and has no batch dimension. Batch its elements, as "
            f".flat_map(lambda window: window.batch(global_batch_size)) does, {last}"
        )
    if any(upstream.facts.regroups for upstream in walk(node)):
        return (
            "is a scalar and has no batch dimension: an operation after batch removes it. Keep a value for each "
            f"row there, or add .batch(global_batch_size) at the end, {last}"
        )
    return f"is a scalar and has no batch dimension. Add .batch(global_batch_size) to the dataset, {last}"
