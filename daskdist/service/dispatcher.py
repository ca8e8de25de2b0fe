"""The dispatcher of the data service, as a state machine without I/O.

It knows the datasets, the jobs, the iterations of those, the tasks of each iteration, the workers and the consumers.
Its methods are told what has happened and return commands, which the extension of the scheduler carries out in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from daskdist.service.intervals import Intervals
from daskdist.service.modes import ShardingPolicy

Pairs = Iterable[tuple[int, int]]

# A consumer that has waited for so long for a worker, or for other consumers, is told what it waits for.
_WARN_AFTER_S: Final = 30.0
_BY_WORKER: Final = (ShardingPolicy.OFF, ShardingPolicy.FILE, ShardingPolicy.HINT)


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
    """

    id: str
    fingerprint: str
    pickle: Any = field(repr=False)
    facts: Any = field(repr=False)


@dataclass(frozen=True)
class JobOptions:
    """What all consumers of a job must have in common.

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
        """Whether each worker produces the whole dataset, and consumers do not mind how many do."""
        return self.mode is ShardingPolicy.OFF and self.num_consumers is None


@dataclass(frozen=True)
class Join:
    """What a consumer asks for.

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
    """

    name: str
    dataset: str
    job: str | None
    iteration: int
    options: JobOptions
    host: str = ""
    index: int | None = None


@dataclass(frozen=True)
class TaskSpec:
    """What a worker needs to produce the elements of a task.

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
    done: tuple[tuple[int, int], ...] = ()
    expected: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartTask:
    """Have a worker produce the elements of a task."""

    worker: str
    spec: TaskSpec


@dataclass(frozen=True)
class StopTask:
    """Have a worker end a task."""

    worker: str
    task: str


@dataclass(frozen=True)
class LoseConsumer:
    """Tell a worker that a consumer of a task is gone."""

    worker: str
    task: str
    consumer: str


@dataclass(frozen=True)
class TellTasks:
    """Tell a consumer from which workers to read, as ``(task, attempt, worker)``; all the tasks there are."""

    consumer: str
    tasks: tuple[tuple[str, int, str], ...]


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


@dataclass(frozen=True)
class Write:
    """Append an entry to the journal."""

    entry: dict[str, Any]


Command = StartTask | StopTask | LoseConsumer | TellTasks | TellEnd | TellFailure | TellWaiting | Write


@dataclass
class _Task:
    id: str
    index: int
    worker: str | None = None
    attempt: int = -1
    is_done: bool = False
    done: Intervals = field(default_factory=Intervals)


@dataclass
class _Consumer:
    join: Join
    iteration: _Iteration
    joined_at: float
    # How often it was told its tasks.
    num_told: int = 0
    was_warned: bool = False


@dataclass
class _Iteration:
    job: _Job
    number: int
    tasks: dict[str, _Task] = field(default_factory=dict)
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    # Fixed where each worker has a share; 0 before there was a worker.
    count: int = 0
    failure: tuple[str, Any] | None = None
    idle_since: float | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.tasks) and all(task.is_done for task in self.tasks.values())


@dataclass
class _Job:
    key: str
    name: str | None
    dataset: DatasetEntry
    options: JobOptions
    host: str
    iterations: dict[int, _Iteration] = field(default_factory=dict)


class Refused(ValueError):  # noqa: N818 - what a consumer is told
    """A request that the dispatcher does not take; the message says why."""


class Dispatcher:
    """The state of the data service.

    Parameters
    ----------
    clock
        Returns the time, in seconds.
    gc_timeout_s
        How long an iteration without consumers is kept.
    """

    def __init__(self, clock: Callable[[], float], gc_timeout_s: float) -> None:
        self._clock = clock
        self._gc_timeout_s = gc_timeout_s
        self.datasets: dict[str, DatasetEntry] = {}
        # By address, the host.
        self.workers: dict[str, str] = {}
        self._jobs: dict[str, _Job] = {}
        self._consumers: dict[str, _Consumer] = {}
        self._tasks: dict[str, tuple[_Iteration, _Task]] = {}

    # --- datasets ---

    def register(self, dataset: DatasetEntry) -> list[Command]:
        """Add a dataset; one that is there under this id stays.

        Raises
        ------
        Refused
            Another pipeline has the id.
        """
        known = self.datasets.get(dataset.id)
        if known is None:
            self.datasets[dataset.id] = dataset
            entry = {"op": "dataset", "id": dataset.id, "fingerprint": dataset.fingerprint}
            return [Write({**entry, "pickle": dataset.pickle, "facts": dataset.facts})]
        if known.fingerprint != dataset.fingerprint:
            raise Refused(
                f"the dataset id {dataset.id!r} is registered with another pipeline, of fingerprint "
                f"{known.fingerprint}; this one's is {dataset.fingerprint}. Register it under another id"
            )
        return []

    # --- workers ---

    def worker_joined(self, address: str, host: str) -> list[Command]:
        """Note a worker: it takes tasks that wait for one, and copies of datasets that each worker has one of."""
        self.workers[address] = host
        return [command for each in self._iterations() for command in self._assign(each)]

    def worker_left(self, address: str) -> list[Command]:
        """Note that a worker is gone: its tasks begin anew on others, behind what was acknowledged."""
        self.workers.pop(address, None)
        commands: list[Command] = []
        for iteration in self._iterations():
            lost = [each for each in iteration.tasks.values() if each.worker == address and not each.is_done]
            for task in lost:
                task.worker = None
                is_copy = (
                    iteration.job.options.mode is ShardingPolicy.OFF and iteration.job.options.num_consumers is None
                )
                others = [
                    each for each in iteration.tasks.values() if each is not task and (each.worker or each.is_done)
                ]
                if is_copy and others:
                    # Others produce the whole dataset.
                    del iteration.tasks[task.id], self._tasks[task.id]
            if lost:
                commands += self._assign(iteration) + self._tell_tasks(iteration) + self._end_if_over(iteration)
        return commands

    # --- consumers ---

    def joined(self, join: Join) -> list[Command]:
        """Add a consumer; begin its job and its iteration where they are new.

        Raises
        ------
        Refused
            It does not go with the job of that name, or its dataset is not registered.
        """
        job = self._job_of(join)
        commands: list[Command] = []
        iteration = job.iterations.get(join.iteration)
        if iteration is None:
            iteration = job.iterations[join.iteration] = _Iteration(job, join.iteration)
            commands.append(Write({"op": "iteration", "job": job.key, "number": join.iteration}))
        if join.index is not None:
            taken = [each for each in iteration.consumers.values() if each.join.index == join.index]
            if taken and taken[0].join.name != join.name:
                raise Refused(f"consumer_index {join.index} is taken by another consumer of the job {job.name!r}")
        consumer = _Consumer(join, iteration, self._clock())
        self._consumers[join.name] = iteration.consumers[join.name] = consumer
        iteration.idle_since = None
        if iteration.failure is not None:
            return [*commands, TellFailure(join.name, *iteration.failure)]
        if iteration.is_over:
            return [*commands, TellEnd(join.name, was_over=True)]
        commands += self._assign(iteration)
        return commands + self._tell(consumer)

    def left(self, name: str) -> list[Command]:
        """Remove a consumer; a job without a name goes with it."""
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return []
        iteration = consumer.iteration
        iteration.consumers.pop(name, None)
        if iteration.job.name is None:
            return self._remove(iteration.job)
        if not iteration.consumers:
            iteration.idle_since = self._clock()
        running = [task for task in iteration.tasks.values() if task.worker and not task.is_done]
        return [LoseConsumer(task.worker or "", task.id, name) for task in running]

    def read_all(self, name: str, num_told: int) -> list[Command]:
        """Note that a consumer got the end of all tasks that it was told of, in so many messages."""
        consumer = self._consumers.get(name)
        if consumer is None or consumer.num_told != num_told:
            # It is about to learn of others.
            return []
        tasks = consumer.iteration.tasks.values()
        return [TellEnd(name)] if tasks and all(task.worker or task.is_done for task in tasks) else []

    # --- tasks ---

    def progressed(self, task_id: str, attempt: int, pairs: Pairs) -> list[Command]:
        """Note which elements of a task were acknowledged."""
        found = self._current(task_id, attempt)
        if found is None:
            return []
        found[1].done.update(pairs)
        return [Write({"op": "progress", "task": task_id, "done": list(found[1].done)})]

    def task_done(self, task_id: str, attempt: int) -> list[Command]:
        """Note that all elements of a task were acknowledged."""
        found = self._current(task_id, attempt)
        if found is None:
            return []
        iteration, task = found
        task.is_done = True
        return [Write({"op": "task_done", "task": task_id}), *self._end_if_over(iteration)]

    def task_failed(self, task_id: str, attempt: int, message: str, error: Any) -> list[Command]:
        """Note that a task failed: so does its iteration."""
        found = self._current(task_id, attempt)
        if found is None:
            return []
        iteration, _ = found
        iteration.failure = (message, error)
        commands: list[Command] = [TellFailure(name, message, error) for name in iteration.consumers]
        return self._stop(iteration) + commands

    # --- time ---

    def tick(self) -> list[Command]:
        """Remove jobs that nobody has read for long, and tell consumers what they have waited for."""
        now, commands = self._clock(), []
        for job in list(self._jobs.values()):
            idle = [each.idle_since for each in job.iterations.values()]
            if all(since is not None and now - since >= self._gc_timeout_s for since in idle):
                commands += self._remove(job)
        for consumer in self._consumers.values():
            if not consumer.was_warned and now - consumer.joined_at >= _WARN_AFTER_S:
                message = self._waits_for(consumer)
                if message:
                    consumer.was_warned = True
                    commands.append(TellWaiting(consumer.join.name, message))
        return commands

    def _waits_for(self, consumer: _Consumer) -> str:
        iteration = consumer.iteration
        if not any(task.worker for task in iteration.tasks.values()):
            return "no worker has come yet that could produce the dataset"
        num_consumers = iteration.job.options.num_consumers
        if num_consumers is not None:
            present = {each.join.index for each in iteration.consumers.values()}
            missing = [index for index in range(num_consumers) if index not in present]
            if missing:
                return f"the consumers of consumer_index {', '.join(map(str, missing))} have not come yet"
        return ""

    # --- inside ---

    def _iterations(self) -> list[_Iteration]:
        return [each for job in self._jobs.values() for each in job.iterations.values() if each.failure is None]

    def _job_of(self, join: Join) -> _Job:
        dataset = self.datasets.get(join.dataset)
        if dataset is None:
            raise Refused(f"no dataset is registered under the id {join.dataset!r}")
        key = f"name:{join.job}" if join.job is not None else f"consumer:{join.name}"
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(key, join.job, dataset, join.options, join.host)
            return job
        if job.dataset.fingerprint != dataset.fingerprint:
            raise Refused(
                f"the job {join.job!r} has another dataset, of fingerprint {job.dataset.fingerprint}; this one's is "
                f"{dataset.fingerprint}. Use another job_name"
            )
        for name in ("mode", "num_consumers", "target", "cache_bytes", "redelivers"):
            own, given = getattr(job.options, name), getattr(join.options, name)
            if own != given:
                raise Refused(f"the job {join.job!r} has {name} {_shown(own)}, this dataset {_shown(given)}")
        return job

    def _current(self, task_id: str, attempt: int) -> tuple[_Iteration, _Task] | None:
        found = self._tasks.get(task_id)
        return found if found is not None and found[1].attempt == attempt and not found[1].is_done else None

    def _eligible(self, job: _Job) -> list[str]:
        if job.options.target == "LOCAL":
            return [address for address, host in self.workers.items() if host == job.host]
        return list(self.workers)

    def _assign(self, iteration: _Iteration) -> list[Command]:
        """Make the tasks of an iteration, and give those without a worker one."""
        workers = self._eligible(iteration.job)
        if not workers or iteration.failure is not None or iteration.is_over:
            return []
        options = iteration.job.options
        if not iteration.count:
            iteration.count = len(workers) if options.mode in _BY_WORKER else 1
            for index in range(iteration.count):
                self._add_task(iteration, index)
        elif options.has_copies:
            with_task = {task.worker for task in iteration.tasks.values()}
            num_waiting = sum(task.worker is None for task in iteration.tasks.values())
            for _ in range(len([each for each in workers if each not in with_task]) - num_waiting):
                self._add_task(iteration, iteration.count)
                iteration.count += 1
        commands: list[Command] = []
        for task in [each for each in iteration.tasks.values() if each.worker is None and not each.is_done]:
            loads = dict.fromkeys(workers, 0)
            for other, its in self._tasks.values():
                if its.worker in loads and not its.is_done:
                    # Of its own iteration each worker has one, where that is possible.
                    loads[its.worker] += 1000 if other is iteration else 1
            task.worker = min(workers, key=lambda worker: loads[worker])
            task.attempt += 1
            commands.append(StartTask(task.worker, self._spec(iteration, task)))
        return commands + self._tell_tasks(iteration) if commands else []

    def _add_task(self, iteration: _Iteration, index: int) -> None:
        task = _Task(f"{iteration.job.key}/{iteration.number}/{index}", index)
        iteration.tasks[task.id] = task
        self._tasks[task.id] = iteration, task

    def _spec(self, iteration: _Iteration, task: _Task) -> TaskSpec:
        job = iteration.job
        expected = tuple(iteration.consumers) if task.attempt else ()
        return TaskSpec(
            task.id,
            task.attempt,
            job.dataset.id,
            iteration.number,
            job.options,
            task.index,
            iteration.count,
            tuple(task.done),
            expected,
        )

    def _tell_tasks(self, iteration: _Iteration) -> list[Command]:
        return [command for each in iteration.consumers.values() for command in self._tell(each)]

    def _tell(self, consumer: _Consumer) -> list[Command]:
        tasks = [each for each in consumer.iteration.tasks.values() if each.worker is not None and not each.is_done]
        consumer.num_told += 1
        return [TellTasks(consumer.join.name, tuple((each.id, each.attempt, each.worker or "") for each in tasks))]

    def _end_if_over(self, iteration: _Iteration) -> list[Command]:
        return [TellEnd(name) for name in iteration.consumers] if iteration.is_over else []

    def _stop(self, iteration: _Iteration) -> list[Command]:
        running = [task for task in iteration.tasks.values() if task.worker is not None and not task.is_done]
        for task in iteration.tasks.values():
            self._tasks.pop(task.id, None)
        iteration.tasks = {}
        return [StopTask(task.worker or "", task.id) for task in running]

    def _remove(self, job: _Job) -> list[Command]:
        del self._jobs[job.key]
        commands = [command for each in job.iterations.values() for command in self._stop(each)]
        return [*commands, Write({"op": "job_removed", "job": job.key})]


def _shown(value: Any) -> str:
    return value.name if isinstance(value, ShardingPolicy) else repr(value)
