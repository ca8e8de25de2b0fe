"""The dispatcher of the data service, as a state machine without I/O.

It knows the datasets, the jobs and their iterations, the tasks of each iteration, the workers and the consumers. Each
method reports an event and returns commands, which the scheduler plugin carries out in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from daskdist.service.dispatcher.commands import (
    AllRead,
    Command,
    ConsumerAway,
    DatasetEntry,
    GivenUp,
    IterationOver,
    Join,
    Leave,
    LoseConsumer,
    Progress,
    RecordedAsUsed,
    StartTask,
    StopTask,
    TaskOver,
    TasksToRead,
    WaitsFor,
    WorkerReady,
)
from daskdist.service.dispatcher.jobs import (
    LEASES_A_WORKER,
    Iteration,
    Job,
    JobConsumer,
    Task,
)
from daskdist.service.dispatcher.status import JobStatus, job_status
from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.sharding_policy import ShardingPolicy

# The key of a value that is kept: its kind, and its name.
Key = tuple[Any, ...]

# A worker has begun a task that it has had for so many seconds.
_BEGUN_AFTER_S: Final = 0.01
# A consumer that has waited this long for a worker or for other consumers is sent the reason.
WARN_AFTER_S: Final = 30.0
# A message names at most this many intervals of a task: later messages have those that follow.
_MOST_RECORDED: Final = 256
_BY_WORKER: Final = (ShardingPolicy.OFF, ShardingPolicy.FILE, ShardingPolicy.HINT)
_ORDER: Final = ("dataset", "job", "iteration")


class Refused(ValueError):  # noqa: N818 - an answer to a consumer
    """A request that the dispatcher refuses; the message says why."""


class Dispatcher:
    """The state of the data service.

    Parameters
    ----------
    clock
        Returns the time, in seconds.
    gc_timeout_s
        The time for which an iteration without consumers is kept.
    reconnect_timeout_s
        The time to wait for the consumers of the previous dispatcher.
    is_kept
        Whether the state is kept, so that `changes` must report changes.
    most_losses
        The most times in a row that the worker of a task may be lost, without an element that is used between.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        gc_timeout_s: float,
        reconnect_timeout_s: float = 60,
        *,
        is_kept: bool = False,
        most_losses: float = math.inf,
    ) -> None:
        self._clock = clock
        self._most_losses = most_losses
        self._gc_timeout_s = gc_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._is_kept = is_kept
        self.datasets: dict[str, DatasetEntry] = {}
        # By worker address: the host.
        self.workers: dict[str, str] = {}
        self._jobs: dict[str, Job] = {}
        self._consumers: dict[str, JobConsumer] = {}
        self._tasks: dict[str, tuple[Iteration, Task]] = {}
        self._num_messages = 0
        # By the name of the job, "" for all without a name: the elements that consumers have used.
        self.num_used: Counter[str] = Counter()
        # The consumers of the previous dispatcher that have not come back, and the time of the restart.
        self._away: dict[str, float] = {}
        # The changes to be kept, by key; None for a key that was removed.
        self._changed: dict[Key, Any] = {}

    def heard(self, message: Any, worker: str = "", host: str = "") -> list[Command]:
        """Handle a message of a consumer, or of a worker at an address."""
        match message:
            case Join():
                return self.joined(message)
            case AllRead(name, number):
                return self.read_all(name, number)
            case Leave(name, done):
                return self.left(name, done)
            case WorkerReady():
                return self.worker_joined(worker, host)
            case Progress(task, attempt, pairs):
                return self.progressed(task, attempt, pairs)
            case TaskOver(task, attempt):
                return self.task_done(task, attempt)
            case ConsumerAway(name):
                # If it is unknown, it had left before the worker heard of it.
                return [] if self.knows(name) else [LoseConsumer(worker, None, name, ())]
        raise TypeError(f"the dispatcher of the data service got {message!r:.200}")

    # --- datasets ---

    def register(self, dataset: DatasetEntry) -> None:
        """Add a dataset; a dataset that is registered under this id already stays.

        Raises
        ------
        Refused
            Another pipeline has the id.
        """
        known = self.datasets.get(dataset.id)
        if known is None:
            self.datasets[dataset.id] = dataset
            self._note("dataset", dataset.id, value=dataset)
        elif known.fingerprint != dataset.fingerprint:
            raise Refused(
                f"the dataset id {dataset.id!r} is registered with another pipeline, whose fingerprint is "
                f"{known.fingerprint}; that of this pipeline is {dataset.fingerprint}. Register it under another id"
            )

    # --- workers ---

    def worker_joined(self, address: str, host: str) -> list[Command]:
        """Add a worker, which gets tasks that wait for a worker and the datasets of which each worker has a copy."""
        self.workers[address] = host
        # Other workers may still have leases of lost workers beside the usual number: this worker gets new leases.
        return [
            command
            for iteration in self.iterations()
            for command in self._assign(iteration, num_more=max(LEASES_A_WORKER - len(iteration.waiting), 0))
        ]

    def worker_left(self, address: str, *, is_expected: bool = False) -> list[Command]:
        """Remove a worker; its tasks restart on other workers, after the elements that were used.

        Workers that are ``is_expected`` to leave do not count as lost.
        """
        self.workers.pop(address, None)
        commands: list[Command] = []
        for iteration in self.iterations():
            lost = [task for task in iteration.tasks.values() if task.worker == address and not task.is_done]
            num_losses = 0 if is_expected else self._count_losses(iteration, lost)
            for task in lost:
                task.worker = None
            if num_losses > self._most_losses and not (iteration.job.options.has_copies and iteration.running):
                commands += self._give_up(iteration, f"{num_losses} times in a row, last {address}")
                continue
            for task in lost:
                other_tasks = [
                    other for other in iteration.tasks.values() if other is not task and (other.worker or other.is_done)
                ]
                if iteration.job.options.has_copies and other_tasks:
                    # Other tasks produce the whole dataset.
                    del iteration.tasks[task.id], self._tasks[task.id]
            if lost:
                commands += self._assign(iteration) + self._send_tasks_to_all(iteration) + self._end_if_over(iteration)
        return commands

    def _count_losses(self, iteration: Iteration, lost: list[Task]) -> int:
        # Return the most losses in a row of tasks that were begun. Without all consumers, nothing can be used.
        # Workers that are lost together have not begun what they were given one for another.
        if len(iteration.consumers) < (iteration.job.options.num_consumers or 1):
            return 0
        begun = [task for task in lost if self._clock() - iteration.losses[task.id].begun_at >= _BEGUN_AFTER_S]
        if iteration.job.options.has_copies:
            return iteration.losses[""].add(iteration.num_ever_used) if begun else 0
        return max([iteration.losses[task.id].add(len(task.done)) for task in begun], default=0)

    def _give_up(self, iteration: Iteration, lost: str) -> list[Command]:
        iteration.failure = (
            f"workers were lost {lost}, while they produced the same elements of a dataset of the service; the logs of "
            "the workers may have the reason. distributed.scheduler.allowed-failures says how often that may happen"
        )
        stops = self._stop(iteration)
        self._note_change(iteration)
        return stops + [GivenUp(name, iteration.failure) for name in iteration.consumers]

    # --- consumers ---

    def joined(self, join: Join) -> list[Command]:
        """Add a consumer, and start its job and its iteration if they are new.

        Raises
        ------
        Refused
            The request does not match the job of that name, or its dataset is not registered.
        """
        if join.is_again and join.name not in self._consumers:
            raise Refused(
                "this scheduler does not know the consumer: it was restarted without the state of the previous one, "
                "which is kept if the setting daskdist.service.work-dir is set, or it considers the consumer lost"
            )
        job = self._job_of(join)
        if join.iteration in job.over:
            return [IterationOver(join.name, was_over=True)]
        if join.iteration in job.removed:
            raise Refused(
                f"the iteration {join.iteration} of the job {job.name!r} was removed, as no consumer had read it for "
                f"{self._gc_timeout_s:g} s while others read later ones; set daskdist.service.job-gc-timeout higher"
            )
        begun = Iteration(job, join.iteration, join.draws, (0, self._clock()), join.settings)
        iteration = job.iterations.setdefault(join.iteration, begun)
        if join.consumer_index is not None:
            names = {consumer.join.consumer_index: consumer.join.name for consumer in iteration.consumers.values()}
            if names.get(join.consumer_index, join.name) != join.name:
                raise Refused(
                    f"consumer_index {join.consumer_index} is taken by another consumer of the job {job.name!r}"
                )
        consumer = JobConsumer(join, iteration)
        self._consumers[join.name] = iteration.consumers[join.name] = consumer
        self._away.pop(join.name, None)
        iteration.idle_since = None
        self._note_change(iteration)
        self._forget_over(job)
        if iteration.failure:
            return [GivenUp(join.name, iteration.failure)]
        if iteration.is_over:
            return [IterationOver(join.name, was_over=not join.is_again)]
        return self._assign(iteration) + self._send_tasks(consumer)

    def left(self, name: str, done: Mapping[str, Pairs] | None = None) -> list[Command]:
        """Remove a consumer, and its job if that has no name.

        Parameters
        ----------
        name
            The name of the consumer.
        done
            The elements that it used, by task; None if it was lost.
        """
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return []
        self._away.pop(name, None)
        iteration = consumer.iteration
        iteration.consumers.pop(name, None)
        for task_id, pairs in (done or {}).items():
            if task_id in iteration.tasks:
                self._record_used(iteration, iteration.tasks[task_id], pairs)
        if iteration.job.name is None:
            return self._remove(iteration.job)
        self._note_change(iteration)
        if not iteration.consumers:
            iteration.idle_since = self._clock()
            self._forget_over(iteration.job)
        return [
            LoseConsumer(task.worker or "", task.id, name, None if done is None else tuple(done.get(task.id, ())))
            for task in iteration.running
        ]

    def knows(self, name: str) -> bool:
        """Return whether a consumer has joined and not left."""
        return name in self._consumers

    def read_all(self, name: str, message_number: int) -> list[Command]:
        """Record that a consumer reached the end of all tasks named in the message of this number."""
        consumer = self._consumers.get(name)
        if consumer is None or consumer.message_number != message_number:
            # A newer message with other tasks is on its way.
            return []
        iteration = consumer.iteration
        if iteration.failure:
            return []
        if iteration.can_lease:
            # The consumer waits for elements that others have not acknowledged.
            return self._assign(iteration, num_more=1)
        return [IterationOver(name)] if iteration.count and not iteration.waiting else []

    # --- tasks ---

    def progressed(self, task_id: str, attempt: int, pairs: Pairs) -> list[Command]:
        """Record that elements of a task were used."""
        current = self._current(task_id, attempt)
        if current is None:
            return []
        iteration, task = current
        self._record_used(iteration, task, pairs)
        self._note_change(iteration)
        return []

    def task_done(self, task_id: str, attempt: int) -> list[Command]:
        """Record that all elements of a task were used."""
        current = self._current(task_id, attempt)
        if current is None:
            return []
        iteration, task = current
        iteration.finish(task)
        if task.id not in iteration.tasks:
            del self._tasks[task.id]
        self._note_change(iteration)
        commands = self._assign(iteration)
        options = iteration.job.options
        if not commands and options.num_consumers is None and options.cache_bytes is None:
            # The worker did not answer consumers that came after the end.
            commands = self._send_tasks_to_all(iteration)
        return commands + self._end_if_over(iteration)

    def jobs(self) -> list[JobStatus]:
        """Return the status of the iterations of all jobs, without what only their workers know."""
        return [job_status(iteration, {}) for iteration in self.iterations()]

    def iterations(self) -> list[Iteration]:
        """Return the iterations of all jobs."""
        return [iteration for job in self._jobs.values() for iteration in job.iterations.values()]

    # --- time ---

    def tick(self) -> list[Command]:
        """Remove jobs that have had no consumer for long, and send consumers what they are waiting for."""
        now, commands = self._clock(), []
        for job in list(self._jobs.values()):
            idle = {
                number
                for number, iteration in job.iterations.items()
                if iteration.idle_since is not None and now - iteration.idle_since >= self._gc_timeout_s
            }
            if len(idle) == len(job.iterations):
                commands += self._remove(job)
                continue
            first_read = min((number for number, other in job.iterations.items() if other.consumers), default=0)
            for number in idle:
                if number < first_read:
                    # All consumers have continued to later iterations.
                    job.removed.add(number, number + 1)
                    commands += self._forget(job.iterations[number])
        for name, since in list(self._away.items()):
            if now - since >= self._reconnect_timeout_s:
                commands += self.left(name)
        for iteration in self.iterations():
            if iteration.tick(now):
                commands += self._send_recorded(iteration)
            commands += self._warnings(iteration, now)
        return commands

    def _send_recorded(self, iteration: Iteration) -> list[Command]:
        # Consumers keep what they used until it is recorded here, also if their worker is lost. With a cache, elements
        # are recorded that one of the trainers used: workers report that to their consumers themselves.
        if iteration.job.options.cache_bytes is not None:
            return []
        tasks = [
            (task.id, tuple(task.done.first(_MOST_RECORDED))) for task in iteration.tasks.values() if len(task.done)
        ]
        return [RecordedAsUsed(name, tuple(tasks)) for name in iteration.consumers] if tasks else []

    def _warnings(self, iteration: Iteration, now: float) -> list[Command]:
        reason = self._waits_for(iteration)
        if reason != iteration.waits_for:
            iteration.waits_for, iteration.waits_since = reason, now
        elif reason and iteration.waits_since is not None and now - iteration.waits_since >= WARN_AFTER_S:
            iteration.waits_since = None
            return [WaitsFor(name, reason) for name in iteration.consumers]
        return []

    def _waits_for(self, iteration: Iteration) -> str:
        if iteration.is_over or iteration.failure or not iteration.consumers:
            return ""
        if not iteration.running:
            if not self.workers:
                return "the cluster has no worker to produce the dataset"
            return "" if self._eligible(iteration.job) else f"no worker is on the host {iteration.job.host}"
        num_consumers = iteration.job.options.num_consumers
        if num_consumers is not None:
            present = {consumer.join.consumer_index for consumer in iteration.consumers.values()}
            missing = [str(index) for index in range(num_consumers) if index not in present]
            if missing:
                return f"the consumers of consumer_index {', '.join(missing)} are missing"
        return ""

    # --- state that is kept ---

    def changes(self) -> dict[Key, Any]:
        """Return the changes since the last call that a new scheduler needs; the value of a removed key is None."""
        changed, self._changed = self._changed, {}
        return {key: value.saved() if isinstance(value, (Job, Iteration)) else value for key, value in changed.items()}

    def note_unwritten(self, changes: Mapping[Key, Any]) -> None:
        """Report changes again in the next call of `changes`, where newer changes take precedence."""
        self._changed = {**changes, **self._changed}

    def restore(self, state: Mapping[Key, Any]) -> None:
        """Continue from the state of another dispatcher: the latest of its changes for each key."""
        now = self._clock()
        for key, saved in sorted(state.items(), key=lambda item: (_ORDER.index(item[0][0]), *item[0][1:])):
            if key[0] == "dataset":
                self.datasets[saved.id] = saved
            elif key[0] == "job":
                over, removed = Intervals(saved["over"]), Intervals(saved["removed"])
                dataset = self.datasets[saved["dataset"]]
                self._jobs[key[1]] = Job(dataset=dataset, over=over, removed=removed, **saved["fields"])
            # A process that was killed while it removed a job may have left iterations of it.
            elif saved["job"] in self._jobs:
                iteration = Iteration.restored(self._jobs[saved["job"]], saved, now)
                iteration.job.iterations[iteration.number] = iteration
                self._consumers.update(iteration.consumers)
                self._away.update(dict.fromkeys(iteration.consumers, now))
                self._tasks.update((task.id, (iteration, task)) for task in iteration.tasks.values())

    def _note_change(self, iteration: Iteration) -> None:
        self._note("iteration", iteration.job.key, iteration.number, value=iteration)

    def _note(self, *key: Any, value: Any) -> None:
        if self._is_kept:
            self._changed[key] = value

    # --- inside ---

    def _job_of(self, join: Join) -> Job:
        dataset = self.datasets.get(join.dataset)
        if dataset is None:
            raise Refused(f"no dataset is registered under the id {join.dataset!r}")
        key = f"name:{join.job}" if join.job is not None else f"consumer:{join.name}"
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job(key, join.job, dataset, join.options, join.host)
            self._note("job", key, value=job)
            return job
        mismatch = job.mismatch(join, dataset.fingerprint)
        if mismatch is not None:
            raise Refused(mismatch)
        return job

    def _current(self, task_id: str, attempt: int) -> tuple[Iteration, Task] | None:
        known = self._tasks.get(task_id)
        return known if known is not None and known[1].attempt == attempt and not known[1].is_done else None

    def _eligible(self, job: Job) -> list[str]:
        if job.options.target == "LOCAL":
            return [address for address, host in self.workers.items() if host == job.host]
        return list(self.workers)

    def _assign(self, iteration: Iteration, num_more: int = 0) -> list[Command]:
        """Create tasks of an iteration and assign workers; ``num_more`` is the number of leases beside the usual."""
        workers = self._eligible(iteration.job)
        if not workers or iteration.is_over or iteration.failure:
            return []
        for task in self._new_tasks(iteration, workers, num_more):
            self._tasks[task.id] = iteration, task
        commands: list[Command] = []
        for task in iteration.waiting:
            loads = dict.fromkeys(workers, 0)
            for other, its in self._tasks.values():
                if its.worker in loads and not its.is_done:
                    # Balance the tasks of this iteration first, then those of all.
                    loads[its.worker] += 1000 if other is iteration else 1
            task.worker = min(workers, key=lambda worker: loads[worker])
            task.attempt += 1
            iteration.losses[task.id].begun_at = self._clock()
            commands.append(StartTask(task.worker, iteration.spec(task)))
        if not commands:
            return []
        self._note_change(iteration)
        return commands + self._send_tasks_to_all(iteration)

    def _new_tasks(self, iteration: Iteration, workers: list[str], num_more: int) -> Iterator[Task]:
        job, num_workers = iteration.job, len(workers)
        if job.leased_pieces is not None:
            num_running = len(iteration.tasks)
            for _ in range(num_running, max(LEASES_A_WORKER * num_workers, num_running + num_more)):
                if iteration.can_lease:
                    yield iteration.add_lease(num_workers)
        elif not iteration.count:
            for _ in range(num_workers if job.options.mode in _BY_WORKER else 1):
                yield iteration.add_task()
        elif job.options.has_copies:
            with_task = {task.worker for task in iteration.tasks.values()}
            num_without = sum(worker not in with_task for worker in workers)
            for _ in range(num_without - len(iteration.waiting)):
                yield iteration.add_task()

    def _send_tasks_to_all(self, iteration: Iteration) -> list[Command]:
        return [command for consumer in iteration.consumers.values() for command in self._send_tasks(consumer)]

    def _send_tasks(self, consumer: JobConsumer) -> list[Command]:
        # Include tasks that wait for a worker: the consumer must keep what it has of them.
        tasks = [task for task in consumer.iteration.tasks.values() if not task.is_done]
        # Message numbers are unique among all consumers, since a reconnected one may get messages sent before.
        self._num_messages += 1
        consumer.message_number = self._num_messages
        return [
            TasksToRead(
                consumer.join.name,
                tuple((task.id, task.attempt, task.worker or "") for task in tasks),
                self._num_messages,
            )
        ]

    def _end_if_over(self, iteration: Iteration) -> list[Command]:
        return [IterationOver(name) for name in iteration.consumers] if iteration.is_over else []

    def _stop(self, iteration: Iteration) -> list[Command]:
        running = iteration.running
        for task in iteration.tasks.values():
            self._tasks.pop(task.id, None)
        iteration.tasks = {}
        return [StopTask(task.worker or "", task.id) for task in running]

    def _record_used(self, iteration: Iteration, task: Task, pairs: Pairs) -> None:
        num_before = len(task.done)
        task.done.update(pairs)
        iteration.num_ever_used += len(task.done) - num_before
        self.num_used[iteration.job.name or ""] += len(task.done) - num_before

    def _forget_over(self, job: Job) -> None:
        # The number of an iteration that is over suffices for late consumers. The latest is kept for `status`.
        latest = max(job.iterations)
        for number, iteration in list(job.iterations.items()):
            if number < latest and iteration.is_over and not iteration.consumers:
                job.over.add(number, number + 1)
                self._forget(iteration)

    def _forget(self, iteration: Iteration) -> list[Command]:
        job, number = iteration.job, iteration.number
        del job.iterations[number]
        self._note("iteration", job.key, number, value=None)
        self._note("job", job.key, value=job)
        return self._stop(iteration)

    def _remove(self, job: Job) -> list[Command]:
        del self._jobs[job.key]
        if job.name is not None:
            self.num_used.pop(job.name, None)
        self._note("job", job.key, value=None)
        for number in job.iterations:
            self._note("iteration", job.key, number, value=None)
        return [command for iteration in job.iterations.values() for command in self._stop(iteration)]
