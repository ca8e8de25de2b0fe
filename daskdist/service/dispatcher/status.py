"""The status of a service: its jobs, who reads them, and how far they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from daskdist.core.cardinality import INFINITE
from daskdist.display.plan import size, table
from daskdist.service.dispatcher.jobs import Iteration

# What a worker tells of its tasks. Of each: the bytes that it keeps, and for each consumer the number and the bytes of
# elements that were sent to it and that it has not used.
Reports = Mapping[str, tuple[int, Mapping[str, tuple[int, int]]]]


@dataclass(frozen=True)
class ConsumerStatus:
    """A consumer of a job.

    Parameters
    ----------
    name
        Its name: its host, and what no other has.
    num_waiting
        Elements that were sent to it, and that it has not used: how far it lags behind.
    waiting_bytes
        Their bytes.
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
        The name of the job; None where it is one consumer's own.
    iteration
        The number of the iteration.
    mode
        The name of its `ShardingPolicy`.
    state
        ``"running"``, ``"idle"`` while nobody reads it, ``"over"`` or ``"failed"``.
    unit
        What is counted as pending, leased and done: ``"units"``, the elements, rows or splits that workers lease; or
        ``"tasks"``, where they lease none.
    num_pending, num_leased, num_done
        How many no worker has, how many workers have, and how many were used by consumers. Nothing is known of what is
        pending where the dataset has no end: None.
    num_used
        Elements that consumers have used.
    elements_per_s
        How many they use in a second, of late.
    buffered_bytes
        The bytes of elements that workers keep for it.
    workers
        The addresses of the workers that produce it.
    consumers
        Its consumers.
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
    """The status of a service; printed, it is a table.

    Parameters
    ----------
    address
        The address of its scheduler.
    workers
        The addresses of its workers.
    jobs
        The iterations of its jobs.
    """

    address: str
    workers: tuple[str, ...]
    jobs: tuple[JobStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts, tuples, text and numbers."""
        return asdict(self)

    def __repr__(self) -> str:
        head = f"data service at {self.address}: {len(self.workers)} workers, {len(self.jobs)} iterations of jobs"
        if not self.jobs:
            return head
        titles = ("job", "mode", "state", "pending", "leased", "done", "used", "per s", "buffered", "consumers", "lag")
        rows: list[tuple[str, ...]] = [titles]
        for job in self.jobs:
            lag = sum(each.num_waiting for each in job.consumers)
            lag_bytes = sum(each.waiting_bytes for each in job.consumers)
            rows.append(
                (
                    f"{job.name or '(its own)'} #{job.iteration}",
                    job.mode,
                    job.state,
                    "-" if job.num_pending is None else f"{job.num_pending:,}",
                    f"{job.num_leased:,}",
                    f"{job.num_done:,} {job.unit}",
                    f"{job.num_used:,}",
                    f"{job.elements_per_s:,.0f}",
                    size(job.buffered_bytes),
                    str(len(job.consumers)),
                    f"{lag:,} ({size(lag_bytes)})",
                )
            )
        return f"{head}\n{table(rows)}"


def job_status(iteration: Iteration, reports: Reports) -> JobStatus:
    """Return the status of an iteration, from what the dispatcher knows and workers have told."""
    job, running = iteration.job, iteration.running
    own = [reports[task.id] for task in running if task.id in reports]
    if job.leased_pieces is not None:
        unit, num_units = "units", job.leased_pieces[0]
        num_waiting = sum(stop - first for first, stop in (each.lease or (0, 0) for each in iteration.waiting))
        num_leased = sum(stop - first for first, stop in (each.lease or (0, 0) for each in running))
        num_pending = None if num_units == INFINITE else num_units - iteration.next_unit + num_waiting
        num_done = iteration.next_unit - num_leased - num_waiting
    else:
        unit, num_leased, num_pending = "tasks", len(running), len(iteration.waiting)
        num_done = iteration.count - num_leased - num_pending
    consumers = []
    for name in iteration.consumers:
        lags = [told[name] for _, told in own if name in told]
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
        sum(kept_bytes for kept_bytes, _ in own),
        tuple(sorted({each.worker for each in running if each.worker is not None})),
        tuple(consumers),
    )


def _state(iteration: Iteration) -> str:
    if iteration.failure is not None:
        return "failed"
    if iteration.is_over:
        return "over"
    return "running" if iteration.consumers else "idle"
