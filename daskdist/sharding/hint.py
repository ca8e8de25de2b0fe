"""HINT: the shard that the dataset leaves a place for is each worker's.

Only where the places are is up to the user: before them each worker reads everything, after them its own share.
"""

from __future__ import annotations

from daskdist.sharding import AutoShardPolicy, Decision, Outlook


def decide(outlook: Outlook) -> Decision:
    if not outlook.num_hints:
        return Decision(
            AutoShardPolicy.OFF,
            "HINT was asked for, and the dataset has no shard(SHARD_HINT, SHARD_HINT): each worker gets all of it",
            is_costly=True,
            advice="Put dataset.shard(daskdist.SHARD_HINT, daskdist.SHARD_HINT) where it is to be sharded, "
            "or use AutoShardPolicy.OFF to say that this is meant",
        )
    places = "a place" if outlook.num_hints == 1 else f"{outlook.num_hints} places"
    return Decision(AutoShardPolicy.HINT, f"asked for: {outlook.num_pipelines} shards at {places} of the dataset")
