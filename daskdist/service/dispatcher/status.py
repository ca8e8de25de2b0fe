"""The status of a service: its jobs, their consumers and their progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from daskdist.core.cardinality import INFINITE, counted
from daskdist.display.plan import size, table
from daskdist.service.dispatcher.jobs import Iteration

# The reports of workers, by task: the bytes that are kept, and by consumer the number and the bytes of the elements
# that were sent to it and that it has not used.
Reports = Mapping[str, tuple[int, Mapping[str, tuple[int, int]]]]


@dataclass(frozen=True)
class ConsumerStatus:
    """A consumer of a job.

    Parameters
    ----------
    name
        The unique name of the consumer, which begins with its host.
    num_waiting
        The number of elements that were sent to it and that it has not used yet: its lag.
    waiting_bytes
        The size of these elements in bytes.
    """

    name: str
    num_waiting: int
    waiting_bytes: int


@dataclass(frozen=True)
class JobStatus:
    """An iteration of a job.

    Parameters
    ----------
    name
        The name of the job; None for the unnamed job of one consumer.
    iteration
        The number of the iteration.
    mode
        The name of its `ShardingPolicy`.
    state
        ``"running"``, ``"idle"`` while it has no consumer, or ``"over"``.
    unit
        The unit of the numbers pending, leased and done: ``"units"``, the elements, rows or splits that are leased to
        workers; or ``"tasks"``, if none are leased.
    num_pending, num_leased, num_done
        The numbers of units that no worker has, that workers have, and that consumers have used. ``num_pending`` is
        None if the dataset has no end.
    num_used
        The number of elements that consumers have used.
    elements_per_s
        The number of elements that consumers used per second recently.
    buffered_bytes
        The bytes of the elements that workers keep for it.
    workers
        The addresses of the workers that produce it.
    consumers
        The consumers of the iteration.
    """

    name: str | None
    iteration: int
    mode: str
    state: str
    unit: str
    num_pending: int | None
    num_leased: int
    num_done: int
    num_used: int
    elements_per_s: float
    buffered_bytes: int
    workers: tuple[str, ...]
    consumers: tuple[ConsumerStatus, ...]


@dataclass(frozen=True, repr=False)
class ServiceStatus:
    """The status of a service, printed as a table.

    Parameters
    ----------
    address
        The address of its scheduler.
    workers
        The addresses of its workers.
    jobs
        The iterations of the service's jobs. Of those that are over and have no consumers, the latest of each job.
    """

    address: str
    workers: tuple[str, ...]
    jobs: tuple[JobStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts, tuples, text and numbers."""
        return asdict(self)

    def __repr__(self) -> str:
        extent = f"{counted(len(self.workers), 'worker')}, {counted(len(self.jobs), 'iteration')} of jobs"
        head = f"data service at {self.address}: {extent}"
        if not self.jobs:
            return head
        titles = ("job", "mode", "state", "pending", "leased", "done", "used", "per s", "buffered", "consumers", "lag")
        rows: list[tuple[str, ...]] = [titles]
        for job in self.jobs:
            lag = sum(consumer.num_waiting for consumer in job.consumers)
            lag_bytes = sum(consumer.waiting_bytes for consumer in job.consumers)
            rows.append(
                (
                    f"{job.name or '(its own)'} #{job.iteration}",
                    job.mode,
                    job.state,
                    "-" if job.num_pending is None else f"{job.num_pending:,}",
                    f"{job.num_leased:,}",
                    counted(job.num_done, job.unit.removesuffix("s")),
                    f"{job.num_used:,}",
                    f"{job.elements_per_s:,.0f}",
                    size(job.buffered_bytes),
                    str(len(job.consumers)),
                    f"{lag:,} ({size(lag_bytes)})",
                )
            )
        return f"{head}\n{table(rows)}"


def job_status(iteration: Iteration, reports: Reports) -> JobStatus:
    """Return the status of an iteration, from the dispatcher's state and the reports of workers."""
    job, running = iteration.job, iteration.running
    task_reports = [reports[task.id] for task in running if task.id in reports]
    if job.leased_pieces is not None:
        unit, num_units = "units", job.leased_pieces[0]
        num_waiting = sum(stop - first for first, stop in (task.lease or (0, 0) for task in iteration.waiting))
        num_leased = sum(stop - first for first, stop in (task.lease or (0, 0) for task in running))
        num_pending = None if num_units == INFINITE else num_units - iteration.next_unit + num_waiting
        num_done = iteration.next_unit - num_leased - num_waiting
    else:
        unit, num_leased, num_pending = "tasks", len(running), len(iteration.waiting)
        num_done = iteration.count - num_leased - num_pending
    consumers = []
    for name in iteration.consumers:
        lags = [lag_of[name] for _, lag_of in task_reports if name in lag_of]
        consumers.append(ConsumerStatus(name, sum(lag[0] for lag in lags), sum(lag[1] for lag in lags)))
    return JobStatus(
        job.name,
        iteration.number,
        job.options.mode.name,
        _state(iteration),
        unit,
        num_pending,
        num_leased,
        max(num_done, 0),
        iteration.num_used,
        iteration.elements_per_s,
        sum(kept_bytes for kept_bytes, _ in task_reports),
        tuple(sorted({task.worker for task in running if task.worker is not None})),
        tuple(consumers),
    )


def _state(iteration: Iteration) -> str:
    if iteration.is_over:
        return "over"
    return "running" if iteration.consumers else "idle"
