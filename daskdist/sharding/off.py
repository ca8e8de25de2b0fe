"""OFF: no sharding; each worker gets the whole dataset, so each row comes once per worker."""

from __future__ import annotations

from daskdist.sharding import AutoShardPolicy, Decision, ShardingInput


def decide(sharding_input: ShardingInput) -> Decision:
    """Leave the whole dataset to each worker."""
    return Decision(AutoShardPolicy.OFF, "requested: each worker gets the whole dataset")
