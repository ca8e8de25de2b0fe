"""Jobs of the data service, their iterations, and the tasks of each iteration."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, Final

from daskdist.core.cardinality import INFINITE
from daskdist.service.dispatcher.commands import (
    DatasetEntry,
    IterationDraws,
    JobOptions,
    Join,
    TaskSpec,
)
from daskdist.service.intervals import Intervals
from daskdist.service.sharding_policy import ShardingPolicy

# The leases of an iteration that a worker has at a time: one is produced while the end of another is read.
LEASES_A_WORKER: Final = 2
# Leases get smaller towards the end: a lease is what is left, divided by this number for each worker.
_SHARES_A_WORKER: Final = 4
# A bound on the number of leases: none is smaller than the whole, divided by this number for each worker.
_MOST_LEASES_A_WORKER: Final = 16
# The units of the first leases of an endless dataset, and the most doublings of that number.
_FIRST_UNITS: Final = 16
_MOST_DOUBLINGS: Final = 16
# The half-life of measurements of the speed.
_RATE_OVER_S: Final = 2.0


@dataclass
class Task:
    """A part of the elements of an iteration, which one worker produces.

    Parameters
    ----------
    id
        The unique name of the task.
    index
        The number of the task in its iteration.
    lease
        The interval of units of the task, as in `TaskSpec`.
    worker
        The address of the task's worker; None while the task waits for one.
    attempt
        The number of earlier attempts; -1 before the first.
    is_done
        Whether all elements of the task were used.
    done
        The elements that were used.
    """

    id: str
    index: int
    lease: tuple[int, int] | None = None
    worker: str | None = None
    attempt: int = -1
    is_done: bool = False
    done: Intervals = field(default_factory=Intervals)


@dataclass
class LossesInARow:
    """The losses of workers of a task in a row, without an element that was used between them."""

    number: int = 0
    num_used: int = 0
    # The time since which a worker has the task.
    begun_at: float = 0.0

    def add(self, num_used: int) -> int:
        """Record a loss after so many elements; return the number of losses in a row."""
        self.number = self.number + 1 if num_used == self.num_used else 1
        self.num_used = num_used
        return self.number


@dataclass
class JobConsumer:
    """A consumer of an iteration."""

    join: Join
    iteration: Iteration
    # The number of the last message with its tasks; -1 before the first.
    message_number: int = -1


@dataclass
class Iteration:
    """An iteration of a job.

    Parameters
    ----------
    job
        The job of the iteration.
    number
        The number of the iteration, from 0 on.
    draws
        Its random draws, which its first consumer has chosen.
    measured
        A time, and the number of elements that had been used by then.
    settings
        The settings of its first consumer.
    """

    job: Job
    number: int
    draws: IterationDraws
    measured: tuple[int, float]
    settings: tuple[Any, ...] | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    consumers: dict[str, JobConsumer] = field(default_factory=dict)
    # The number of shares if each worker has one, otherwise the leases so far; 0 before the first worker.
    count: int = 0
    # The first unit that was not leased, and the number of elements of the finished leases.
    next_unit: int = 0
    num_done: int = 0
    idle_since: float | None = None
    # The reason for waiting, and since when; no time once consumers were sent it.
    waits_for: str = ""
    waits_since: float | None = None
    elements_per_s: float = 0.0
    # By task, and "" for all copies of the dataset: the losses of workers. Other schedulers begin to count anew.
    losses: defaultdict[str, LossesInARow] = field(default_factory=lambda: defaultdict(LossesInARow))
    # The number of elements that were ever used, also by tasks that were removed.
    num_ever_used: int = 0
    # The reason why the iteration is given up; "" if it is not.
    failure: str = ""

    @property
    def key(self) -> str:
        """The unique name of the iteration."""
        return f"{self.job.key}/{self.number}"

    @property
    def num_used(self) -> int:
        """The number of elements that were used."""
        return self.num_done + sum(len(task.done) for task in self.tasks.values())

    def tick(self, now: float) -> bool:
        """Update the number of elements that are used per second; return whether there were any."""
        num_used, (before, since) = self.num_used, self.measured
        if now > since:
            share = 1 - 2 ** -((now - since) / _RATE_OVER_S)
            self.elements_per_s += share * ((num_used - before) / (now - since) - self.elements_per_s)
        self.measured = num_used, now
        return num_used != before

    @property
    def is_over(self) -> bool:
        """Return whether all elements were used."""
        if self.failure or self.can_lease or not self.count:
            return False
        return all(task.is_done for task in self.tasks.values())

    @property
    def can_lease(self) -> bool:
        """Return whether units are left to lease."""
        pieces = self.job.leased_pieces
        return pieces is not None and (pieces[0] == INFINITE or self.next_unit < pieces[0])

    @property
    def running(self) -> list[Task]:
        """The tasks that a worker has."""
        return [task for task in self.tasks.values() if task.worker is not None and not task.is_done]

    @property
    def waiting(self) -> list[Task]:
        """The tasks that wait for a worker."""
        return [task for task in self.tasks.values() if task.worker is None and not task.is_done]

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
        """Record that all elements of a task were used."""
        task.is_done = True
        if task.lease is not None:
            del self.tasks[task.id]
            self.num_done += len(task.done)

    def spec(self, task: Task) -> TaskSpec:
        """Return the description of a task for its worker."""
        expected = tuple(self.consumers) if task.attempt else ()
        job = self.job
        return TaskSpec(
            task.id,
            task.attempt,
            job.dataset.id,
            self.draws,
            job.options,
            task.index,
            self.count,
            task.lease,
            tuple(task.done),
            expected,
            self.settings,
        )

    def saved(self) -> dict[str, Any]:
        """Return the state that a new scheduler needs to continue the iteration."""
        tasks = [replace(task, worker=None, done=list(task.done)) for task in self.tasks.values()]  # type: ignore[arg-type]
        return {
            "job": self.job.key,
            "number": self.number,
            "draws": self.draws,
            "settings": self.settings,
            "tasks": tasks,
            "consumers": [consumer.join for consumer in self.consumers.values()],
            "count": self.count,
            "next_unit": self.next_unit,
            "num_done": self.num_done,
            "failure": self.failure,
        }

    @classmethod
    def restored(cls, job: Job, saved: dict[str, Any], now: float) -> Iteration:
        """Return the iteration of a state from `saved`: its consumers must join again, its tasks wait for workers."""
        iteration = cls(
            job,
            saved["number"],
            saved["draws"],
            (0, now),
            saved["settings"],
            count=saved["count"],
            next_unit=saved["next_unit"],
            num_done=saved["num_done"],
            failure=saved.get("failure", ""),
        )
        iteration.tasks = {task.id: replace(task, done=Intervals(task.done)) for task in saved["tasks"]}
        iteration.measured = iteration.num_used, now
        iteration.consumers = {join.name: JobConsumer(join, iteration) for join in saved["consumers"]}
        if not iteration.consumers:
            iteration.idle_since = now
        return iteration


@dataclass
class Job:
    """A job: the iterations of a dataset that consumers share.

    Parameters
    ----------
    key
        The unique key of the job.
    name
        The name that users gave it; None if it has a single consumer.
    dataset, options
        The dataset, and the options of the job.
    host
        The host of the job's first consumer.
    over, removed
        The numbers of forgotten iterations: those that were over, and those that no consumer read any more.
    """

    key: str
    name: str | None
    dataset: DatasetEntry
    options: JobOptions
    host: str
    over: Intervals = field(default_factory=Intervals)
    removed: Intervals = field(default_factory=Intervals)
    iterations: dict[int, Iteration] = field(default_factory=dict)

    @property
    def leased_pieces(self) -> tuple[int, int] | None:
        """The number of units and the number that is worth a lease; None if units are not leased to workers."""
        options = self.options
        is_shared = options.num_consumers is None and options.cache_bytes is None
        return self.dataset.pieces if options.mode is ShardingPolicy.DYNAMIC and is_shared else None

    def saved(self) -> dict[str, Any]:
        """Return the state that a new scheduler needs to continue the job, without its iterations."""
        fields = {name: getattr(self, name) for name in ("key", "name", "options", "host")}
        return {
            "dataset": self.dataset.id,
            "fields": fields,
            "over": list(self.over),
            "removed": list(self.removed),
        }

    def mismatch(self, join: Join, fingerprint: str) -> str | None:
        """Return why a request does not match the job; None if it does."""
        if self.dataset.fingerprint != fingerprint:
            return (
                f"the job {join.job!r} has a dataset of fingerprint {self.dataset.fingerprint}; that of this one is "
                f"{fingerprint}. Use another job_name"
            )
        for name in ("mode", "num_consumers", "target", "cache_bytes", "redelivers"):
            expected, requested = getattr(self.options, name), getattr(join.options, name)
            if expected != requested:
                return f"the job {join.job!r} has {name} {_shown(expected)}, this dataset {_shown(requested)}"
        return None


def _shown(value: Any) -> str:
    return value.name if isinstance(value, ShardingPolicy) else repr(value)
