"""The policies that divide a dataset among the workers of a job, by TensorFlow's names."""

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
    """Every worker produces the elements of its share of the files."""
    DATA = 3
    """The dataset is produced once, in its order: all workers read and compute, and one assembles the elements."""
    FILE_OR_DATA = 4
    """`FILE` where files can be shared out, else `DATA`."""
    HINT = 5
    """Each ``shard(SHARD_HINT, SHARD_HINT)`` of the dataset becomes the shard of the worker."""


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
        The mode is neither a `ShardingPolicy` nor one of TensorFlow's names.
    """
    if isinstance(mode, ShardingPolicy):
        return mode
    if isinstance(mode, str) and mode in _BY_NAME:
        return _BY_NAME[mode]
    names = ", ".join(map(repr, _BY_NAME))
    raise ArgumentError(f"processing_mode is {mode!r}; give {names} or a ShardingPolicy")


@dataclass(frozen=True)
class CrossTrainerCache:
    """A cache on workers for trainers that read one job: each trainer gets all elements, which are produced once.

    Workers keep the latest elements in memory, and each trainer reads them at its own pace. A trainer that is too slow
    misses the elements that have left the window. The dataset must have no end, and the job must have a name.

    Parameters
    ----------
    trainer_id
        The name of the trainer; readers with the same name share its elements.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.trainer_id, str) or not self.trainer_id:
            raise ArgumentError(
                f"CrossTrainerCache: trainer_id is {self.trainer_id!r}; give a string that is not empty"
            )
