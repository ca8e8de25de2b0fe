"""Sharding policies: which worker reads what.

A policy is one sibling file with one pure function, ``decide(outlook) -> Decision``, which looks at numbers
and names and at no data.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from daskdist.errors import ArgumentError


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is sharded over workers; values as in TensorFlow."""

    OFF = -1
    """Each worker gets the whole dataset."""
    AUTO = 0
    """`FILE` where that is possible, else `DATA`."""
    FILE = 1
    """Each worker reads its own files: file ``i`` is read by worker ``i mod num_workers``."""
    DATA = 2
    """Every split is read once, by any worker, and each batch is dealt to all replicas."""


@dataclass(frozen=True)
class FileSource:
    """What is known of one source of a pipeline.

    Parameters
    ----------
    name
        The operation.
    num_files
        Its files; None where it reads none.
    is_splittable
        Whether its files have splits below them.
    num_splits
        Counts those splits; asked only where files are fewer than workers, for it may read every file's index.
    """

    name: str
    num_files: int | None
    is_splittable: bool
    num_splits: Callable[[], int]


@dataclass(frozen=True)
class Outlook:
    """All a policy looks at.

    Parameters
    ----------
    num_pipelines
        Workers to shard over.
    sources
        The pipeline's sources.
    obstacles
        The operations that mean something else on each worker's share than on the whole.
    """

    num_pipelines: int
    sources: tuple[FileSource, ...]
    obstacles: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What a policy comes to.

    Parameters
    ----------
    policy
        ``OFF``, ``FILE`` or ``DATA``.
    reason
        Why, as a clause.
    by_split
        Under ``FILE``: whether splits are dealt to workers, for want of files.
    is_costly
        Whether the user would rather know.
    """

    policy: AutoShardPolicy
    reason: str
    by_split: bool = False
    is_costly: bool = False


# Policy -> the module whose `decide` decides.
POLICIES: Final = {
    AutoShardPolicy.OFF: "daskdist.sharding.off",
    AutoShardPolicy.AUTO: "daskdist.sharding.auto",
    AutoShardPolicy.FILE: "daskdist.sharding.file",
    AutoShardPolicy.DATA: "daskdist.sharding.data",
}


def policy_of(value: object) -> AutoShardPolicy:
    """A policy, from itself or its name in any case."""
    if isinstance(value, AutoShardPolicy):
        return value
    if isinstance(value, str) and value.upper() in AutoShardPolicy.__members__:
        return AutoShardPolicy[value.upper()]
    names = ", ".join(AutoShardPolicy.__members__)
    raise ArgumentError(f"{value!r} is not a sharding policy; there are {names}")


def decide(policy: AutoShardPolicy, outlook: Outlook) -> Decision:
    """What a policy comes to for a pipeline.

    Raises
    ------
    ShardingError
        It cannot be followed; the message says why, and what can be done.
    """
    decision: Decision = importlib.import_module(POLICIES[policy]).decide(outlook)
    return decision
