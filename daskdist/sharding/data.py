"""DATA: each split is read once on the cluster, and each batch is divided among all replicas.

The order does not depend on the number of workers; rows of a block on another worker are sent.
"""

from __future__ import annotations

from daskdist.sharding import AutoShardPolicy, Decision, ShardingInput


def decide(sharding_input: ShardingInput) -> Decision:
    """Split each batch over all replicas."""
    return Decision(AutoShardPolicy.DATA, "requested: each batch is split over all replicas")
