"""Requests to the dispatcher of the data service, and the commands that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from daskdist.service.modes import ShardingPolicy


@dataclass(frozen=True)
class DatasetEntry:
    """A registered dataset.

    Parameters
    ----------
    id
        Its name in the service.
    fingerprint
        Of its pipeline.
    pickle
        The dataset.
    facts
        What consumers are told of it: its spec and cardinality, pickled.
    pieces
        Its number of units and how many are worth a lease, where runs of units can be leased to workers; None where
        one worker has to put the elements together.
    """

    id: str
    fingerprint: str
    pickle: Any = field(repr=False)
    facts: Any = field(repr=False)
    pieces: tuple[int, int] | None = None


@dataclass(frozen=True)
class JobOptions:
    """Options that all consumers of a job must have in common.

    Parameters
    ----------
    mode
        What each worker produces; `ShardingPolicy.FILE_OR_DATA` was decided by the first consumer.
    num_consumers
        The consumers of coordinated reads; None where elements go to whoever asks first.
    cache_bytes
        The window of a cache that trainers share on each worker; None where there is none.
    target
        ``"ANY"``, or ``"LOCAL"`` for the workers on the consumer's host.
    redelivers
        Whether elements that a lost consumer has not acknowledged go to others.
    """

    mode: ShardingPolicy
    num_consumers: int | None = None
    cache_bytes: int | None = None
    target: str = "ANY"
    redelivers: bool = True

    @property
    def has_copies(self) -> bool:
        """Return whether each worker produces the whole dataset, and consumers do not mind how many do."""
        return self.mode is ShardingPolicy.OFF and self.num_consumers is None


@dataclass(frozen=True)
class Join:
    """A consumer's request.

    Parameters
    ----------
    name
        Its own, which no other has.
    dataset
        The id of the dataset.
    job
        The name of the job; None for one of its own.
    iteration
        The number of the iteration.
    options
        Those of the job.
    host
        Its host.
    index
        Its place among the consumers of coordinated reads.
    is_again
        Whether it had joined before, and has lost its connection.
    """

    name: str
    dataset: str
    job: str | None
    iteration: int
    options: JobOptions
    host: str = ""
    index: int | None = None
    is_again: bool = False


@dataclass(frozen=True)
class TaskSpec:
    """The description of a task, from which a worker produces its elements.

    Parameters
    ----------
    id
        Its name.
    attempt
        How often it was begun before: messages of earlier attempts do not count.
    dataset
        The id of the dataset.
    iteration
        The number of the iteration, which is the number of the pass.
    options
        Those of the job.
    index, count
        Which share of how many it is; which of the copies, where each is of the whole dataset.
    lease
        The first of the units to produce, and before which to stop; None where it is no lease.
    done
        The elements that were acknowledged.
    expected
        The consumers of the attempt before, which may hold elements.
    """

    id: str
    attempt: int
    dataset: str
    iteration: int
    options: JobOptions
    index: int
    count: int
    lease: tuple[int, int] | None = None
    done: tuple[tuple[int, int], ...] = ()
    expected: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartTask:
    """Tell a worker to produce the elements of a task."""

    worker: str
    spec: TaskSpec


@dataclass(frozen=True)
class StopTask:
    """Tell a worker to end a task."""

    worker: str
    task: str


@dataclass(frozen=True)
class LoseConsumer:
    """Tell a worker that a consumer of a task is gone, and if it left what it was done with; None if it was lost."""

    worker: str
    task: str
    consumer: str
    done: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class TellTasks:
    """Tell a consumer all tasks that are not done, as ``(task, attempt, worker)``: "" while it waits for a worker."""

    consumer: str
    tasks: tuple[tuple[str, int, str], ...]
    number: int


@dataclass(frozen=True)
class TellEnd:
    """Tell a consumer that its iteration is over; ``was_over`` if it was before the consumer came."""

    consumer: str
    was_over: bool = False


@dataclass(frozen=True)
class TellFailure:
    """Tell a consumer why it gets no more elements: a message, or an error of a worker as it was pickled there."""

    consumer: str
    message: str
    error: Any = None


@dataclass(frozen=True)
class TellWaiting:
    """Tell a consumer what it has waited for."""

    consumer: str
    message: str


Command = StartTask | StopTask | LoseConsumer | TellTasks | TellEnd | TellFailure | TellWaiting
