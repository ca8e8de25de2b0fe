"""HINT: each worker's shard replaces the placeholders in the dataset.

The user decides where the placeholders are: each worker reads everything before them, and its own share after them.
"""

from __future__ import annotations

from daskdist.sharding import AutoShardPolicy, Decision, ShardingInput


def decide(sharding_input: ShardingInput) -> Decision:
    """Replace the hints of the dataset by each worker's shard; without hints, each worker gets the whole dataset."""
    if not sharding_input.num_hints:
        return Decision(
            AutoShardPolicy.OFF,
            "HINT was requested, but the dataset has no shard(SHARD_HINT, SHARD_HINT): each worker gets all of it",
            is_costly=True,
            advice="Put dataset.shard(daskdist.SHARD_HINT, daskdist.SHARD_HINT) at the place to shard, "
            "or use AutoShardPolicy.OFF to confirm that this is intended",
        )
    places = "a place" if sharding_input.num_hints == 1 else f"{sharding_input.num_hints} places"
    return Decision(
        AutoShardPolicy.HINT, f"requested: {sharding_input.num_pipelines} shards at {places} of the dataset"
    )
