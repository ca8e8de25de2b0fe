"""Jobs of the data service, their iterations, and the tasks of those."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from daskdist.core.cardinality import INFINITE
from daskdist.service.dispatcher.commands import (
    DatasetEntry,
    JobOptions,
    Join,
    TaskSpec,
)
from daskdist.service.intervals import Intervals
from daskdist.service.modes import ShardingPolicy

# A worker has so many leases of an iteration at a time: one is produced while the end of another is read.
LEASES_A_WORKER: Final = 2
# Leases get smaller towards the end: a share of what is left, which is one in so many a worker.
_SHARES_A_WORKER: Final = 4
# No lease is smaller than one in so many a worker, so that there are not too many of them.
_MOST_LEASES_A_WORKER: Final = 16
# The units of the first leases of what has no end, and how often they double.
_FIRST_UNITS: Final = 16
_MOST_DOUBLINGS: Final = 16
# What was measured so long ago counts for half.
_RATE_OVER_S: Final = 2.0


@dataclass
class Task:
    """Some elements of an iteration, which one worker produces.

    Parameters
    ----------
    id
        Its name.
    index
        Its number among those of the iteration.
    lease
        As `TaskSpec` has it.
    worker
        The address of its worker; None while it waits for one.
    attempt
        How often it was begun before; -1 before it is begun.
    is_done
        Whether all its elements were acknowledged.
    done
        The elements that were.
    """

    id: str
    index: int
    lease: tuple[int, int] | None = None
    worker: str | None = None
    attempt: int = -1
    is_done: bool = False
    done: Intervals = field(default_factory=Intervals)


@dataclass
class JobConsumer:
    """A consumer of an iteration.

    Parameters
    ----------
    join
        The request that it made.
    iteration
        The iteration.
    joined_at
        The time at which it did so.
    """

    join: Join
    iteration: Iteration
    joined_at: float
    # The number of the message that told it its tasks; -1 before that.
    told: int = -1


@dataclass
class Iteration:
    """An iteration of a job.

    Parameters
    ----------
    job
        The job.
    number
        Its number, from 0 on.
    measured
        The number of elements that were acknowledged at a time, and that time.
    """

    job: Job
    number: int
    measured: tuple[int, float]
    tasks: dict[str, Task] = field(default_factory=dict)
    consumers: dict[str, JobConsumer] = field(default_factory=dict)
    # The number of shares, where each worker has one; of leases, those that there were. 0 before there was a worker.
    count: int = 0
    # The first unit that was not leased, and of leases that are done the number of elements.
    next_unit: int = 0
    num_done: int = 0
    failure: tuple[str, Any] | None = None
    idle_since: float | None = None
    # What it waits for, and since when; None once that was told.
    waits_for: str = ""
    waits_since: float | None = None
    elements_per_s: float = 0.0

    @property
    def key(self) -> str:
        """Its name, which no other has."""
        return f"{self.job.key}/{self.number}"

    @property
    def num_used(self) -> int:
        """The number of elements that were acknowledged."""
        return self.num_done + sum(len(task.done) for task in self.tasks.values())

    def tick(self, now: float) -> None:
        """Measure how many elements are acknowledged in a second."""
        num_used, (before, since) = self.num_used, self.measured
        if now > since:
            share = 1 - 2 ** -((now - since) / _RATE_OVER_S)
            self.elements_per_s += share * ((num_used - before) / (now - since) - self.elements_per_s)
        self.measured = num_used, now

    @property
    def is_over(self) -> bool:
        """Return whether all elements were acknowledged."""
        if self.can_lease or not self.count:
            return False
        return all(task.is_done for task in self.tasks.values())

    @property
    def can_lease(self) -> bool:
        """Return whether there are units that were not leased."""
        pieces = self.job.leased_pieces
        return pieces is not None and (pieces[0] == INFINITE or self.next_unit < pieces[0])

    @property
    def running(self) -> list[Task]:
        """The tasks that a worker has."""
        return [each for each in self.tasks.values() if each.worker is not None and not each.is_done]

    @property
    def waiting(self) -> list[Task]:
        """The tasks that wait for a worker."""
        return [each for each in self.tasks.values() if each.worker is None and not each.is_done]

    def add_task(self, lease: tuple[int, int] | None = None) -> Task:
        """Add a task."""
        task = Task(f"{self.key}/{self.count}", self.count, lease)
        self.tasks[task.id] = task
        self.count += 1
        return task

    def add_lease(self, num_workers: int) -> Task:
        """Add a task that is a lease of the next units."""
        num_units, grain = self.job.leased_pieces or (0, 1)
        first = self.next_unit
        if num_units == INFINITE:
            doublings = min(self.count // (LEASES_A_WORKER * num_workers), _MOST_DOUBLINGS)
            self.next_unit += max(grain, _FIRST_UNITS) << doublings
        else:
            left, fewest = num_units - first, -(-num_units // (LEASES_A_WORKER * num_workers))
            size = max(
                left // (_SHARES_A_WORKER * num_workers),
                num_units // (_MOST_LEASES_A_WORKER * num_workers),
                min(grain, fewest),
                1,
            )
            if size > grain:
                size -= size % grain
            self.next_unit = min(first + size, num_units)
        return self.add_task((first, self.next_unit))

    def finish(self, task: Task) -> None:
        """Note that all elements of a task were acknowledged."""
        task.is_done = True
        if task.lease is not None:
            del self.tasks[task.id]
            self.num_done += len(task.done)

    def spec(self, task: Task) -> TaskSpec:
        """Return what the worker of a task needs."""
        expected = tuple(self.consumers) if task.attempt else ()
        job = self.job
        return TaskSpec(
            task.id,
            task.attempt,
            job.dataset.id,
            self.number,
            job.options,
            task.index,
            self.count,
            task.lease,
            tuple(task.done),
            expected,
        )

    def saved(self) -> dict[str, Any]:
        """Return what a new scheduler needs to go on with it."""
        tasks = [replace(each, worker=None, done=list(each.done)) for each in self.tasks.values()]  # type: ignore[arg-type]
        return {
            "job": self.job.key,
            "number": self.number,
            "tasks": tasks,
            "consumers": [each.join for each in self.consumers.values()],
            "count": self.count,
            "next_unit": self.next_unit,
            "num_done": self.num_done,
            "failure": self.failure,
        }

    @classmethod
    def restored(cls, job: Job, saved: dict[str, Any], now: float) -> Iteration:
        """Return what `saved` told, with consumers that are to come again and tasks that wait for workers."""
        iteration = cls(
            job,
            saved["number"],
            (0, now),
            count=saved["count"],
            next_unit=saved["next_unit"],
            num_done=saved["num_done"],
            failure=saved["failure"],
        )
        iteration.tasks = {each.id: replace(each, done=Intervals(each.done)) for each in saved["tasks"]}
        iteration.measured = iteration.num_used, now
        iteration.consumers = {each.name: JobConsumer(each, iteration, now) for each in saved["consumers"]}
        if not iteration.consumers:
            iteration.idle_since = now
        return iteration


@dataclass
class Job:
    """A job: the iterations of a dataset that consumers share.

    Parameters
    ----------
    key
        Its name among all jobs.
    name
        Its name as users give it; None where it has but one consumer.
    dataset, options
        The dataset, and how it is shared.
    host
        The host of its first consumer.
    """

    key: str
    name: str | None
    dataset: DatasetEntry
    options: JobOptions
    host: str
    iterations: dict[int, Iteration] = field(default_factory=dict)

    @property
    def leased_pieces(self) -> tuple[int, int] | None:
        """The number of units, and how many are worth a lease, where workers are leased some; None where not."""
        options = self.options
        is_shared = options.num_consumers is None and options.cache_bytes is None
        return self.dataset.pieces if options.mode is ShardingPolicy.DYNAMIC and is_shared else None

    def saved(self) -> dict[str, Any]:
        """Return what a new scheduler needs to go on with it, without its iterations."""
        fields = {name: getattr(self, name) for name in ("key", "name", "options", "host")}
        return {"dataset": self.dataset.id, "fields": fields}

    def mismatch(self, join: Join, fingerprint: str) -> str | None:
        """Return why a request does not go with it; None where it does."""
        if self.dataset.fingerprint != fingerprint:
            return (
                f"the job {join.job!r} has another dataset, of fingerprint {self.dataset.fingerprint}; this one's is "
                f"{fingerprint}. Use another job_name"
            )
        for name in ("mode", "num_consumers", "target", "cache_bytes", "redelivers"):
            own, other = getattr(self.options, name), getattr(join.options, name)
            if own != other:
                return f"the job {join.job!r} has {name} {_shown(own)}, this dataset {_shown(other)}"
        return None


def _shown(value: Any) -> str:
    return value.name if isinstance(value, ShardingPolicy) else repr(value)
