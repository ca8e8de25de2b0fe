"""Prometheus metrics of strategies and of the data service, with those of Dask's scheduler at ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from distributed import Scheduler
from distributed.http.prometheus import PrometheusCollector

from daskdist.dashboard.figures import DashboardFigures

_PLUGIN: Final = "daskdist-dashboard"
_OF_REPLICA: Final = ("strategy", "replica", "worker", "device")


class DaskdistCollector(PrometheusCollector):  # type: ignore[misc]
    """The metrics of the scheduler that is asked for them."""

    def collect(self) -> Iterator[Any]:
        """Return the metrics now."""
        plugin = self.server.plugins.get(_PLUGIN)
        if plugin is not None:
            figures: DashboardFigures = plugin.figures
            yield from _of_strategies(figures)
            yield from _of_jobs(figures)


def _family(kind: str, name: str, text: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = make(f"daskdist_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


# For each kind of figure: the type of the metric, its name, its meaning, and the attribute that has it.
_REPLICA_METRICS: Final = (
    ("counter", "replica_steps", "Steps that a replica has taken", "num_steps"),
    ("counter", "replica_rows", "Rows of datasets in the steps of a replica", "num_rows"),
    ("counter", "replica_step_seconds", "Time that a replica has spent in its steps", "step_s"),
    ("counter", "replica_waiting_seconds", "Time that a replica has waited for the input of a step", "waiting_s"),
)
_PROGRAM_METRICS: Final = (
    (
        "counter",
        "program_waiting_seconds",
        "Time that a program has waited for next steps of distributed datasets",
        "waiting_s",
    ),
    ("gauge", "steps_in_flight", "Steps that were sent to replicas and have not finished", "num_in_flight"),
    ("gauge", "read_ahead_bytes", "Bytes of batches that workers have read ahead", "ahead_bytes"),
    (
        "gauge",
        "read_ahead_limit_bytes",
        "The most bytes of batches that workers may read ahead",
        "most_ahead_bytes",
    ),
)


def _of_strategies(figures: DashboardFigures) -> Iterator[Any]:
    replicas = [
        ((replica.strategy, str(replica.number), replica.worker, replica.device), replica)
        for replica in figures.replicas.values()
    ]
    programs = [((token,), program) for token, program in figures.programs.items()]
    for metrics, labels, observed in (
        (_REPLICA_METRICS, _OF_REPLICA, replicas),
        (_PROGRAM_METRICS, ("strategy",), programs),
    ):
        for kind, name, text, attribute in metrics:
            rows = [(values, getattr(known, attribute)) for values, known in observed]
            yield _family(kind, name, text, labels, rows)
    tasks = [((name,), seconds) for name, seconds in figures.task_s.items()]
    text = "Time that tasks of datasets with a name have taken on all workers"
    yield _family("counter", "task_seconds", text, ("task",), tasks)
    text = "Workers that were lost while a strategy used them"
    yield _family("counter", "lost_workers", text, (), [((), figures.num_lost)])


def _of_jobs(figures: DashboardFigures) -> Iterator[Any]:
    if figures.service is None:
        return
    consumers: Counter[str] = Counter()
    for job in figures.jobs():
        consumers[job.name or ""] += len(job.consumers)
    yield _family(
        "counter",
        "service_elements",
        "Elements of the data service that the consumers of a job have used; of all jobs without a name together",
        ("job",),
        [((name,), number) for name, number in figures.service.num_used.items()],
    )
    yield _family(
        "gauge",
        "service_consumers",
        "Consumers of a job of the data service",
        ("job",),
        [((name,), number) for name, number in consumers.items()],
    )


def add_collector(scheduler: Scheduler) -> None:
    """Add the metrics to those of a scheduler, and of later ones in this process."""
    from distributed.http.scheduler.prometheus import core
    from prometheus_client import REGISTRY

    if DaskdistCollector in core.COLLECTORS:
        return
    core.COLLECTORS.append(DaskdistCollector)
    # Dask makes its collectors when it is first asked for metrics, which may have been before.
    known = getattr(core.PrometheusHandler, "_collectors", None)
    if known:
        collector = DaskdistCollector(scheduler)
        REGISTRY.register(collector)
        core.PrometheusHandler._collectors = (*known, collector)
