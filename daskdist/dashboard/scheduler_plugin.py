"""The dashboard's part on the scheduler: it collects figures once a second, and registers the page and the metrics."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from daskdist.dashboard.figures import REPORT_OPERATION, TIMES_METRIC, DashboardFigures
from daskdist.dashboard.page import add_page
from daskdist.dashboard.prometheus import add_collector

logger: Final = logging.getLogger("daskdist")

NAME: Final = "daskdist-dashboard"
_OBSERVE_EVERY_S: Final = 1.0


class DashboardOnScheduler(SchedulerPlugin):  # type: ignore[misc]
    """A plugin that collects the figures of a scheduler's strategies and jobs."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self.figures = DashboardFigures()
        self._scheduler = scheduler
        scheduler.handlers[REPORT_OPERATION] = self._program_reported
        self._observing = PeriodicCallback(self._observe, 1000 * _OBSERVE_EVERY_S)
        self._observing.start()

    async def before_close(self) -> None:
        """Stop before the scheduler closes its connections."""
        self._observing.stop()

    def _observe(self) -> None:
        metrics = {address: state.metrics for address, state in self._scheduler.workers.items()}
        reports = {address: known[TIMES_METRIC] for address, known in metrics.items() if known.get(TIMES_METRIC)}
        try:
            self.figures.observe(time.time(), reports)
        except Exception:
            # For example, a worker with another version of daskdist.
            logger.exception("the figures of daskdist's page on the dashboard are out of date")
            self._observing.stop()

    def _program_reported(self, token: str, report: dict[str, Any]) -> None:
        self.figures.program_reported(time.time(), token, report)


def _try_to(add: Callable[[Scheduler], None], scheduler: Scheduler) -> None:
    # Strategies and the service work without it, as with another version of Dask or of the library.
    try:
        add(scheduler)
    except Exception:
        logger.exception("daskdist's page or its metrics cannot be added to the dashboard")


def dashboard_of(scheduler: Scheduler) -> DashboardFigures:
    """Return the figures of a scheduler; the first call starts to collect them. Call it in the event loop."""
    plugin = scheduler.plugins.get(NAME)
    if plugin is None:
        plugin = DashboardOnScheduler(scheduler)
        scheduler.add_plugin(plugin, name=NAME)
        for library, add in (("bokeh", add_page), ("prometheus_client", add_collector)):
            if importlib.util.find_spec(library) is not None:
                _try_to(add, scheduler)
    figures: DashboardFigures = plugin.figures
    return figures
