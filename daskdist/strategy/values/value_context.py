"""`ValueContext`: the replica that a function computes a value for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ValueContext:
    """The replica that a ``value_fn`` computes a value for.

    Parameters
    ----------
    replica_id_in_sync_group
        The number of the replica, from 0.
    num_replicas_in_sync
        The number of replicas.

    >>> print(ValueContext(1, 2))
    ValueContext(replica id 1, total replicas in sync: 2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )
