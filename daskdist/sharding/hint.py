"""HINT: the shard that the dataset leaves a place for is each worker's.

Only where the places are is up to the user: before them each worker reads everything, after them its own share.
"""

from __future__ import annotations

from daskdist.sharding import AutoShardPolicy, Decision, ShardingInput


def decide(sharding_input: ShardingInput) -> Decision:
    """Replace the hints of the dataset by each worker's shard; without hints, leave it whole to each worker."""
    if not sharding_input.num_hints:
        return Decision(
            AutoShardPolicy.OFF,
            "HINT was asked for, and the dataset has no shard(SHARD_HINT, SHARD_HINT): each worker gets all of it",
            is_costly=True,
            advice="Put dataset.shard(daskdist.SHARD_HINT, daskdist.SHARD_HINT) where it is to be sharded, "
            "or use AutoShardPolicy.OFF to say that this is meant",
        )
    places = "a place" if sharding_input.num_hints == 1 else f"{sharding_input.num_hints} places"
    return Decision(
        AutoShardPolicy.HINT, f"asked for: {sharding_input.num_pipelines} shards at {places} of the dataset"
    )
