"""The messages between the dispatcher of the data service, its consumers and the workers.

===================  ====================  ==========================  =================================================
message              is sent by            is answered by              if the connection is lost
===================  ====================  ==========================  =================================================
`Hello`              a consumer            `Welcome`                   the consumer connects again and sends it again
`Register`           a consumer            `Registered`, `Refusal`     the same
`Join`               a consumer            `TasksToRead`, `Refusal`,   the same
                                            or an end
`AllRead`            a consumer            an end, or more tasks       it joins again, and gets the tasks again
`Leave`              a consumer            nothing                     the dispatcher takes it for lost
`JobsAsked`          a program             `Jobs`                      the program gets an error
`TasksToRead`        the dispatcher        `AllRead`                   the consumer joins again
`RecordedAsUsed`     the dispatcher        nothing                     others follow
`WaitsFor`           the dispatcher        nothing                     nothing: it is a line in the log
`IterationOver`      the dispatcher        nothing: the consumer ends  the consumer joins again, and gets it again
`GivenUp`            the dispatcher        nothing: the consumer ends  the same
`StartTask`          the dispatcher        `Progress`, `TaskOver`      the worker is lost: another one gets the task
`StopTask`           the dispatcher        nothing                     the worker is lost
`LoseConsumer`       the dispatcher        nothing                     the worker is lost
`WorkerReady`        a worker              nothing                     the worker is lost
`Progress`           a worker              nothing                     the worker is lost: elements may be made again
`TaskOver`           a worker              nothing                     the same
`ConsumerAway`       a worker              `LoseConsumer` if unknown   the worker is lost
===================  ====================  ==========================  =================================================

Consumers and programs have a connection to the scheduler, and workers Dask's stream. What the dispatcher sends begins
with the name of the consumer or the address of the worker that gets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from daskdist.core.primitive import Epoch
from daskdist.service.intervals import Pairs
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


class Join(NamedTuple):
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
    consumer_index
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
    consumer_index: int | None = None
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
        The elements that were used before.
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


class Hello(NamedTuple):
    """The question whether the dispatcher knows a dataset, by its id."""

    dataset: str


class Welcome(NamedTuple):
    """The pickled `DatasetFacts` of a dataset, None if it is unknown, and whether the dispatcher keeps its state."""

    facts: Any
    is_kept: bool


class Register(NamedTuple):
    """The request to register a dataset."""

    entry: DatasetEntry


class Registered(NamedTuple):
    """The id of a dataset that is registered now."""

    dataset: str


class Refusal(NamedTuple):
    """The reason why a request is refused."""

    message: str


class Leave(NamedTuple):
    """The end of a consumer, and the elements that it has used, by task, as far as they may not be recorded."""

    name: str
    done: dict[str, Pairs]


class AllRead(NamedTuple):
    """A consumer has read all tasks of the `TasksToRead` of a number to their end."""

    name: str
    number: int


class JobsAsked(NamedTuple):
    """The question for the status of all jobs."""


class Jobs(NamedTuple):
    """The addresses of the workers, and the `JobStatus` of each iteration."""

    workers: list[str]
    jobs: list[Any]


class TasksToRead(NamedTuple):
    """All unfinished tasks of a consumer, as ``(task, attempt, worker)``; "" if a task waits for a worker."""

    consumer: str
    tasks: tuple[tuple[str, int, str], ...]
    number: int


class RecordedAsUsed(NamedTuple):
    """Elements that are recorded as used: ``(task, pairs)``; some may be left out."""

    consumer: str
    tasks: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


class WaitsFor(NamedTuple):
    """The worker or the consumers that a consumer is waiting for."""

    consumer: str
    message: str


class IterationOver(NamedTuple):
    """The end of an iteration; ``was_over`` if it was over before the consumer joined."""

    consumer: str
    was_over: bool = False


class GivenUp(NamedTuple):
    """The reason why an iteration is given up."""

    consumer: str
    message: str


class StartTask(NamedTuple):
    """Produce the elements of a task; ``dataset`` has the pickled dataset if the worker has not got it before."""

    worker: str
    spec: TaskSpec
    dataset: bytes | None = None


class StopTask(NamedTuple):
    """End a task."""

    worker: str
    task: str


class LoseConsumer(NamedTuple):
    """A consumer of a task, or of all if None, is gone; ``done`` has what it used, None if it was lost."""

    worker: str
    task: str | None
    consumer: str
    done: Pairs | None = None


class WorkerReady(NamedTuple):
    """A worker can produce elements."""


class Progress(NamedTuple):
    """Elements that consumers have used since the last report about an attempt of a task."""

    task: str
    attempt: int
    pairs: Pairs


class TaskOver(NamedTuple):
    """All elements of a task were used."""

    task: str
    attempt: int


class ConsumerAway(NamedTuple):
    """The connection of a consumer to a worker has ended."""

    consumer: str


ToConsumer = TasksToRead | RecordedAsUsed | WaitsFor | IterationOver | GivenUp
ToWorker = StartTask | StopTask | LoseConsumer
Command = ToConsumer | ToWorker
