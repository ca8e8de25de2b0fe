"""`DistributeOptions`: the sharding options among TensorFlow's options."""

from __future__ import annotations

from daskdist.errors import ArgumentError
from daskdist.ops.with_options import Options
from daskdist.sharding import AutoShardPolicy


class DistributeOptions(Options):
    """Options of sharding, for ``options.experimental_distribute`` or `Dataset.with_options`.

    Parameters
    ----------
    auto_shard
        Whether a dataset is sharded over the workers of a cluster. False is `AutoShardPolicy.OFF`: each worker reads
        the whole dataset.
    auto_shard_policy
        An `AutoShardPolicy` or its name.

    Raises
    ------
    ArgumentError
        A value is not allowed, or ``auto_shard`` is False and a policy that shards is given.

    >>> DistributeOptions(auto_shard=False).auto_shard_policy
    <AutoShardPolicy.OFF: -1>
    """

    def __init__(
        self, auto_shard: bool | None = None, auto_shard_policy: AutoShardPolicy | str | int | None = None
    ) -> None:
        super().__init__()
        if auto_shard is not None:
            self.auto_shard = auto_shard
        if auto_shard_policy is not None:
            # The check of the field converts names and numbers to the policy.
            self.auto_shard_policy = auto_shard_policy  # type: ignore[assignment]
            if auto_shard is False and self.auto_shard:
                raise ArgumentError(
                    f"DistributeOptions: auto_shard is False, and auto_shard_policy {auto_shard_policy!r} shards; "
                    "give one of them"
                )
