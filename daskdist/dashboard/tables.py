"""The numbers and tables of the dashboard's page, as HTML."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from daskdist.core.cardinality import counted
from daskdist.dashboard.figures import DashboardFigures, ReplicaFigures
from daskdist.display.html import Box, PageTable, Section, TimePart, page, texts
from daskdist.display.pages import bars

# The most rows of a table to show; further rows are only counted.
_MOST_ROWS: Final = 32


def summary(figures: DashboardFigures) -> str:
    """Return the totals of all strategies, and a bar of where the replicas' time goes."""
    replicas = list(figures.replicas.values())
    facts = [
        counted(len(replicas), "replica"),
        f"{sum(replica.steps_per_s for replica in replicas):,.1f} steps/s",
        f"{sum(replica.rows_per_s for replica in replicas):,.0f} rows/s",
        f"{counted(figures.num_lost, 'worker')} lost",
        counted(len(figures.jobs()), "service job"),
    ]
    sections = []
    if replicas and figures.time_shares:
        _, *shares = figures.time_shares[-1]
        names = ("in steps", "waiting for input", "waiting for the program to send steps")
        styles = ("step-time", "waiting", "other")
        parts = [
            TimePart(f"{name} {share:.0%}", round(100 * share, 1), style)
            for name, share, style in zip(names, shares, styles, strict=True)
        ]
        sections.append(Section("shares", parts, "What the replicas spend their time on now"))
    elif not replicas:
        sections.append(Section("text", "No strategy uses this cluster."))
    return page("daskdist", facts, sections)


def details(figures: DashboardFigures) -> str:
    """Return tables of the replicas, of lost workers, and of the jobs of the data service."""
    sections = []
    if figures.replicas:
        replicas = sorted(figures.replicas.values(), key=lambda replica: (replica.strategy, replica.number))
        sections.append(_limited("Replicas", _replicas(replicas[:_MOST_ROWS]), len(replicas)))
    if figures.task_s:
        tasks = figures.task_s.most_common(_MOST_ROWS)
        table = bars("task", "all workers", dict(tasks))
        sections.append(_limited("Work of tasks for input", table, len(figures.task_s)))
    if figures.lost:
        sections.append(_limited("Lost workers", _lost(figures), figures.num_lost))
    if jobs := figures.jobs():
        sections.append(_limited("Jobs of the data service", _jobs(jobs[-_MOST_ROWS:]), len(jobs)))
    return page("", [], sections) if sections else ""


def _limited(title: str, table: PageTable, num_rows: int) -> Section:
    num_shown = len(table.rows)
    return Section("table", table, title if num_shown == num_rows else f"{title} ({num_shown} of {num_rows:,})")


def _numbers(*columns: str) -> list[Box]:
    return [Box(name, "number") for name in columns]


def _replicas(replicas: Sequence[ReplicaFigures]) -> PageTable:
    several = len({replica.strategy for replica in replicas}) > 1
    heading = [
        *texts("strategy")[:several],
        *_numbers("replica"),
        *texts("worker", "device"),
        *_numbers("steps", "steps/s", "rows/s", "in steps", "input", "program"),
    ]
    rows = [
        [
            *[Box(replica.strategy, is_code=True)][:several],
            Box(str(replica.number), "number"),
            Box(replica.worker, "wide"),
            Box(replica.device),
            *_numbers(
                f"{replica.num_steps:,}",
                f"{replica.steps_per_s:,.1f}",
                f"{replica.rows_per_s:,.0f}",
                f"{replica.step_share:.0%}",
                f"{replica.waiting_share:.0%}",
                f"{replica.idle_share:.0%}",
            ),
        ]
        for replica in replicas
    ]
    return PageTable(heading, rows)


def _lost(figures: DashboardFigures) -> PageTable:
    rows = [
        [Box(worker.address, "wide"), Box(time.strftime("%H:%M:%S", time.localtime(worker.at)))]
        for worker in reversed(figures.lost)
    ]
    return PageTable(texts("worker", "lost at"), rows)


def _jobs(jobs: Sequence[Any]) -> PageTable:
    heading = [
        *texts("job", "mode", "state"),
        *_numbers("pending", "leased", "done", "elements", "elements/s", "consumers", "workers"),
    ]
    rows = [
        [
            Box(f"{job.name or '(its own)'} #{job.iteration}", "wide"),
            Box(job.mode),
            Box(job.state),
            *_numbers(
                "-" if job.num_pending is None else f"{job.num_pending:,}",
                f"{job.num_leased:,}",
                f"{job.num_done:,} {job.unit}",
                f"{job.num_used:,}",
                f"{job.elements_per_s:,.0f}",
                str(len(job.consumers)),
                str(len(job.workers)),
            ),
        ]
        for job in jobs
    ]
    return PageTable(heading, rows)
