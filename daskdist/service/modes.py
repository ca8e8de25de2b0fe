"""Policies that share a job's elements among workers, by TensorFlow's names."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from daskdist.errors import ArgumentError


class ShardingPolicy(enum.IntEnum):
    """The part of a dataset that each worker of a job produces; values as in TensorFlow."""

    OFF = 0
    """Every worker produces the whole dataset, each in its own shuffle order."""
    DYNAMIC = 1
    """The dataset is produced once, by all workers together, in any order: runs of elements are leased to workers."""
    FILE = 2
    """Every worker produces what is in its share of the files."""
    DATA = 3
    """The dataset is produced once, in its order; all workers read and compute what one puts together."""
    FILE_OR_DATA = 4
    """`FILE` where files can be shared out, else `DATA`."""
    HINT = 5
    """Each ``shard(SHARD_HINT, SHARD_HINT)`` of the dataset becomes the worker's."""


_BY_NAME: Final = {
    "parallel_epochs": ShardingPolicy.OFF,
    "distributed_epoch": ShardingPolicy.DYNAMIC,
    "one_epoch": ShardingPolicy.DYNAMIC,
}


def checked_mode(mode: Any) -> ShardingPolicy:
    """Return the policy of a ``processing_mode``.

    Raises
    ------
    ArgumentError
        It is neither a `ShardingPolicy` nor one of TensorFlow's names.
    """
    if isinstance(mode, ShardingPolicy):
        return mode
    if isinstance(mode, str) and mode in _BY_NAME:
        return _BY_NAME[mode]
    names = ", ".join(map(repr, _BY_NAME))
    raise ArgumentError(f"processing_mode is {mode!r}; give {names} or a ShardingPolicy")


@dataclass(frozen=True)
class CrossTrainerCache:
    """Has trainers that read one job share what the workers produce: each gets all of it, produced once.

    Workers keep the elements of late in memory, and each trainer reads there at its own pace. One that is slower than
    the window passes over what has gone. The dataset must have no end, and the job a name.

    Parameters
    ----------
    trainer_id
        Names the trainer; readers of one name share its elements.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.trainer_id, str) or not self.trainer_id:
            raise ArgumentError(
                f"CrossTrainerCache: trainer_id is {self.trainer_id!r}; give a string that is not empty"
            )
