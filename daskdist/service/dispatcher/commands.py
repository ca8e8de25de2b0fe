"""Requests to the dispatcher of the data service, and the commands that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from daskdist.core.primitive import Epoch
from daskdist.service.sharding_policy import ShardingPolicy


@dataclass(frozen=True)
class DatasetEntry:
    """A registered dataset.

    Parameters
    ----------
    id
        The dataset's id in the service.
    fingerprint
        The fingerprint of its pipeline.
    pickle
        The pickled dataset.
    facts
        The pickled `DatasetFacts` that consumers are sent.
    pieces
        The number of units and the number that is worth a lease, if runs of units can be leased to workers; None if
        one worker has to assemble the elements.
    """

    id: str
    fingerprint: str
    pickle: Any = field(repr=False)
    facts: Any = field(repr=False)
    pieces: tuple[int, int] | None = None


@dataclass(frozen=True)
class JobOptions:
    """Options that must be the same for all consumers of a job.

    Parameters
    ----------
    mode
        The part that each worker produces; `ShardingPolicy.FILE_OR_DATA` is resolved by the first consumer.
    num_consumers
        The number of consumers of coordinated reads; None if each element goes to the first consumer with room for it.
    cache_bytes
        The size of the window of the cache that trainers share on each worker; None without a cache.
    target
        The workers to read from: ``"ANY"``, or ``"LOCAL"`` for those on the consumer's host.
    redelivers
        Whether elements that a lost consumer has not acknowledged go to other consumers.
    """

    mode: ShardingPolicy
    num_consumers: int | None = None
    cache_bytes: int | None = None
    target: str = "ANY"
    redelivers: bool = True

    @property
    def has_copies(self) -> bool:
        """Return whether each worker produces the whole dataset and consumers accept any number of copies."""
        return self.mode is ShardingPolicy.OFF and self.num_consumers is None


@dataclass(frozen=True)
class IterationDraws:
    """The values on which the random numbers of an iteration depend.

    Parameters
    ----------
    epoch
        The pass over the registered pipeline.
    seeds
        The seeds of its operations without a seed from the user; None for those that it was registered with.
    """

    epoch: Epoch = (0,)
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Join:
    """The request of a consumer to join a job.

    Parameters
    ----------
    name
        The unique name of the consumer.
    dataset
        The id of the dataset.
    job
        The name of the job; None for a job of this consumer alone.
    iteration
        The number of the iteration.
    options
        The options of the job.
    draws
        The random draws of the iteration, if this consumer is its first.
    host
        The host of the consumer.
    index
        The index of the consumer in coordinated reads.
    is_again
        Whether the consumer had joined before and lost its connection.
    settings
        The settings of its program for the iteration, if this consumer is its first; see `daskdist.config.to_send`.
    """

    name: str
    dataset: str
    job: str | None
    iteration: int
    options: JobOptions
    draws: IterationDraws = IterationDraws()
    host: str = ""
    index: int | None = None
    is_again: bool = False
    settings: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class TaskSpec:
    """The description of a task, from which a worker produces its elements.

    Parameters
    ----------
    id
        The unique name of the task.
    attempt
        The number of earlier attempts, whose messages are ignored.
    dataset
        The id of the dataset.
    draws
        The random draws of the iteration.
    options
        The options of the job.
    index, count
        The index and the number of shares, or of copies if each task produces the whole dataset.
    lease
        The interval of units to produce, as ``(first, stop)``; None if the task is not a lease.
    done
        The elements that were acknowledged before.
    expected
        The consumers of the previous attempt, which may hold elements.
    settings
        The settings of the program that calls are made with.
    """

    id: str
    attempt: int
    dataset: str
    draws: IterationDraws
    options: JobOptions
    index: int
    count: int
    lease: tuple[int, int] | None = None
    done: tuple[tuple[int, int], ...] = ()
    expected: tuple[str, ...] = ()
    settings: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class StartTask:
    """Order a worker to produce the elements of a task."""

    worker: str
    spec: TaskSpec


@dataclass(frozen=True)
class StopTask:
    """Order a worker to end a task."""

    worker: str
    task: str


@dataclass(frozen=True)
class LoseConsumer:
    """Report to a worker that a consumer of a task is gone; ``done`` has what it used, None if it was lost."""

    worker: str
    task: str
    consumer: str
    done: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class SendTasks:
    """Send a consumer all unfinished tasks, as ``(task, attempt, worker)``; "" if a task waits for a worker."""

    consumer: str
    tasks: tuple[tuple[str, int, str], ...]
    number: int


@dataclass(frozen=True)
class SendEnd:
    """Report to a consumer that its iteration is over; ``was_over`` if it was over before the consumer joined."""

    consumer: str
    was_over: bool = False


@dataclass(frozen=True)
class SendWaiting:
    """Report to a consumer what it is waiting for."""

    consumer: str
    message: str


@dataclass(frozen=True)
class SendFailure:
    """Report to a consumer why its iteration is given up."""

    consumer: str
    message: str


@dataclass(frozen=True)
class SendRecorded:
    """Report to a consumer which elements are recorded as used: ``(task, pairs)``; some may be left out."""

    consumer: str
    tasks: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


Command = StartTask | StopTask | LoseConsumer | SendTasks | SendEnd | SendWaiting | SendFailure | SendRecorded
