"""Global batches as one piece a replica."""

from __future__ import annotations

from daskdist.core.node import Node
from daskdist.core.spec import ElementSpec
from daskdist.errors import ShardingError
from daskdist.ops.deal import Deal


def rebatch(node: Node, spec: ElementSpec, num_replicas: int) -> Node:
    """The pipeline with each of its batches cut into ``num_replicas`` pieces.

    Raises
    ------
    ShardingError
        The elements have no batch dimension.
    """
    if num_replicas == 1:
        return node
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if not leaf.shape:
            raise ShardingError(
                f"the elements cannot be split over {num_replicas} replicas: leaf {path or '(the element)'} "
                "is a scalar and has no batch dimension. Add .batch(global_batch_size) to the dataset, "
                "or use distribute_datasets_from_function"
            )
    return Deal(node, num_replicas)
