"""Sharding policies: the decision which worker reads what.

A policy is one file with one pure function, ``decide(sharding_input) -> Decision``, which uses numbers and names but
no data. `daskdist.sharding.balance` distributes files by size.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from daskdist.errors import ArgumentError

# A placeholder for a number of shards or an index that the policy HINT replaces.
SHARD_HINT: Final = -1


class AutoShardPolicy(enum.IntEnum):
    """The way a dataset is sharded over workers; values as in TensorFlow."""

    OFF = -1
    """Each worker gets the whole dataset."""
    AUTO = 0
    """`FILE` if possible and it drops at most 1 % of the rows that the unsharded dataset keeps, else `DATA`."""
    FILE = 1
    """Worker ``i mod num_workers`` reads file ``i``, and each worker batches its own elements."""
    DATA = 2
    """Every split is read once, by any worker, and each batch is divided among all replicas."""
    HINT = 3
    """Each ``shard(SHARD_HINT, SHARD_HINT)`` of the dataset becomes the worker's: ``shard(num_workers, worker)``."""


@dataclass(frozen=True)
class FileSource:
    """The facts about one source of a pipeline.

    Parameters
    ----------
    name
        The name of the operation.
    num_files
        The number of its files; None if it reads none.
    is_splittable
        Whether its files consist of several splits.
    num_splits
        Returns the number of splits; called only if there are fewer files than workers, as it may read every index.
    objection
        The reason why it cannot be sharded although it reads files, as a clause; empty if it can.
    advice
        The remedy.
    label
        A description of what it reads, if that is not a number of files.
    """

    name: str
    num_files: int | None
    is_splittable: bool
    num_splits: Callable[[], int]
    objection: str = ""
    advice: str = ""
    label: str = ""


@dataclass(frozen=True)
class Pairing:
    """An operation that combines the elements of several inputs at the same position.

    Parameters
    ----------
    name
        The name of the operation.
    mismatch
        Returns, as a clause, why it would combine other elements on a worker's share; None if it would not. The
        argument says whether splits are distributed instead of files. Called last, as it may read every file's index.
    """

    name: str
    mismatch: Callable[[bool], str | None]


@dataclass(frozen=True)
class Remainder:
    """Rows that are dropped because they do not fill a group, under `FILE` and without sharding.

    Parameters
    ----------
    num_rows
        The number of rows that reach the dropping operation.
    num_kept
        The number that it keeps without sharding.
    num_kept_by_file
        The number that it keeps if each worker applies it to its own files.
    unit
        The counted unit: rows or elements.
    """

    num_rows: int
    num_kept: int
    num_kept_by_file: int
    unit: str

    @property
    def num_lost(self) -> int:
        """The additional rows dropped under `FILE`; negative if fewer."""
        return self.num_kept - self.num_kept_by_file

    @property
    def is_small(self) -> bool:
        """True if the number of rows kept under `FILE` differs by at most 1 % from that without sharding."""
        return 100 * abs(self.num_lost) <= self.num_kept


def _unknown(by_split: bool) -> Remainder | None:
    return None


@dataclass(frozen=True)
class ShardingInput:
    """All facts on which a policy bases its decision.

    Parameters
    ----------
    num_pipelines
        The number of workers.
    sources
        The pipeline's sources. An operation that reads files whose names are elements counts as one.
    obstacles
        The names of operations that have another result on a worker's share than on the whole.
    pairings
        The operations that do so unless the shares of their inputs correspond.
    num_hints
        The number of placeholders for the policy HINT.
    cuts
        The obstacles that keep or drop the first elements.
    row_splits
        The obstacles that divide the rows, which a division of the files would not do as well.
    dropping_operations
        The operations that drop the remainder at the end of a share.
    group_filters
        The operations that drop whole groups of rows, such as batches.
    drops_uneven
        Whether all workers end when the first one does.
    remainder
        Returns the rows that `dropping_operations` drop, given whether splits are distributed instead of files; None if
        that depends on the data. It may read every file's index.
    uneven
        Like `remainder`, for rows that are dropped because all workers end when the first one does.
    """

    num_pipelines: int
    sources: tuple[FileSource, ...]
    obstacles: tuple[str, ...]
    pairings: tuple[Pairing, ...] = ()
    num_hints: int = 0
    cuts: tuple[str, ...] = ()
    row_splits: tuple[str, ...] = ()
    dropping_operations: tuple[str, ...] = ()
    group_filters: tuple[str, ...] = ()
    drops_uneven: bool = False
    remainder: Callable[[bool], Remainder | None] = _unknown
    uneven: Callable[[bool], Remainder | None] = _unknown


@dataclass(frozen=True)
class Decision:
    """The decision of a policy.

    Parameters
    ----------
    policy
        ``OFF``, ``FILE``, ``DATA`` or ``HINT``.
    reason
        The reason, as a clause.
    by_split
        Under ``FILE``: whether splits are distributed, because there are too few files.
    is_costly
        Whether the user should be warned.
    advice
        A remedy, as a sentence; empty if there is none.
    """

    policy: AutoShardPolicy
    reason: str
    by_split: bool = False
    is_costly: bool = False
    advice: str = ""

    def __str__(self) -> str:
        """Return one line, for logs and plans."""
        return f"{self.reason}. {self.advice}" if self.advice else self.reason


# Policy -> the module with its `decide`.
POLICIES: Final = {
    AutoShardPolicy.OFF: "daskdist.sharding.off",
    AutoShardPolicy.AUTO: "daskdist.sharding.auto",
    AutoShardPolicy.FILE: "daskdist.sharding.file",
    AutoShardPolicy.DATA: "daskdist.sharding.data",
    AutoShardPolicy.HINT: "daskdist.sharding.hint",
}


def policy_of(value: object) -> AutoShardPolicy:
    """Return a policy, given itself or its name in any case."""
    if isinstance(value, AutoShardPolicy):
        return value
    if isinstance(value, str) and value.upper() in AutoShardPolicy.__members__:
        return AutoShardPolicy[value.upper()]
    names = ", ".join(AutoShardPolicy.__members__)
    raise ArgumentError(f"{value!r} is not a sharding policy; there are {names}")


def decide(policy: AutoShardPolicy, sharding_input: ShardingInput) -> Decision:
    """Return the decision of a policy for a pipeline.

    Raises
    ------
    ShardingError
        The policy cannot be followed; the message gives the reason and a remedy.
    """
    decision: Decision = importlib.import_module(POLICIES[policy]).decide(sharding_input)
    return decision
