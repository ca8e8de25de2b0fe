"""Sharding policies: which worker reads what.

A policy is one sibling file with one pure function, ``decide(sharding_input) -> Decision``, which looks at numbers
and names and at no data. How files are dealt by their sizes is in `daskdist.sharding.balance`.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from daskdist.errors import ArgumentError

# In the place of a number of shards and an index: those that the policy HINT is to fill in.
SHARD_HINT: Final = -1


class AutoShardPolicy(enum.IntEnum):
    """The way a dataset is sharded over workers; values as in TensorFlow."""

    OFF = -1
    """Each worker gets the whole dataset."""
    AUTO = 0
    """`FILE` where that is possible and at most 1 % of the rows are dropped that the whole would keep, else `DATA`."""
    FILE = 1
    """Each worker reads its own files, file ``i`` worker ``i mod num_workers``, and batches what it reads."""
    DATA = 2
    """Every split is read once, by any worker, and each batch is dealt to all replicas."""
    HINT = 3
    """Each ``shard(SHARD_HINT, SHARD_HINT)`` of the dataset becomes the worker's: ``shard(num_workers, worker)``."""


@dataclass(frozen=True)
class FileSource:
    """The facts about one source of a pipeline.

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
    objection
        Why it cannot be sharded by files although it reads some, as a clause; empty where it can.
    advice
        What can be done about that.
    label
        What it reads, in words, where that is no number of files.
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
    """An operation that puts together what several inputs have at the same place.

    Parameters
    ----------
    name
        The operation.
    mismatch
        Why it would put together other elements on a worker's share, as a clause; None where it would not. It is
        asked last, with whether splits are dealt instead of files, for it may read every file's index.
    """

    name: str
    mismatch: Callable[[bool], str | None]


@dataclass(frozen=True)
class Remainder:
    """Rows that are dropped because they do not fill a group, by file and of the whole.

    Parameters
    ----------
    num_rows
        That come to the operation that drops some.
    num_kept
        That it keeps, applied to the whole.
    num_kept_by_file
        That it keeps where each worker applies it to its own files.
    unit
        What is counted: rows, or elements.
    """

    num_rows: int
    num_kept: int
    num_kept_by_file: int
    unit: str

    @property
    def num_lost(self) -> int:
        """The number of rows dropped by file beyond those dropped of the whole; fewer where negative."""
        return self.num_kept - self.num_kept_by_file

    @property
    def is_small(self) -> bool:
        """True if sharding by file keeps as many rows as the whole would, up to 1 % of them more or fewer."""
        return 100 * abs(self.num_lost) <= self.num_kept


def _unknown(by_split: bool) -> Remainder | None:
    return None


@dataclass(frozen=True)
class ShardingInput:
    """All a policy looks at.

    Parameters
    ----------
    num_pipelines
        Workers to shard over.
    sources
        The pipeline's sources. Where files are read whose names are elements, what reads them is one.
    obstacles
        The operations that mean something else on each worker's share than on the whole.
    pairings
        The operations that do so unless their inputs have shares alike.
    num_hints
        Places for a shard that the policy HINT fills in.
    cuts
        The obstacles that keep or drop the first elements.
    droppers
        The operations that drop what is left over at the end of a share.
    group_filters
        The operations that keep or drop groups of rows as a whole, batches say.
    drops_uneven
        Whether all workers end with the first.
    remainder
        Counts what `droppers` drop, given whether splits are dealt instead of files; None where only the data tells.
        It may read every file's index.
    uneven
        As `remainder`, of what is dropped because all workers end with the first.
    """

    num_pipelines: int
    sources: tuple[FileSource, ...]
    obstacles: tuple[str, ...]
    pairings: tuple[Pairing, ...] = ()
    num_hints: int = 0
    cuts: tuple[str, ...] = ()
    droppers: tuple[str, ...] = ()
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
        Why, as a clause.
    by_split
        Under ``FILE``: whether splits are dealt to workers, for want of files.
    is_costly
        Whether the user would rather know.
    advice
        What the user can do about it, as a sentence; empty where there is nothing to do.
    """

    policy: AutoShardPolicy
    reason: str
    by_split: bool = False
    is_costly: bool = False
    advice: str = ""

    def __str__(self) -> str:
        """Return one line, for logs and plans."""
        return f"{self.reason}. {self.advice}" if self.advice else self.reason


# Policy -> the module whose `decide` decides.
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
        It cannot be followed; the message says why, and what can be done.
    """
    decision: Decision = importlib.import_module(POLICIES[policy]).decide(sharding_input)
    return decision


def counted(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "file"), counted(2, "file")
    ('1 file', '2 files')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
