"""The page ``/daskdist`` of Dask's dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from distributed import Scheduler

from daskdist.dashboard.figures import DashboardFigures
from daskdist.dashboard.tables import details, summary

_NAME: Final = "daskdist"
_UPDATE_EVERY_MS: Final = 1000
_HEIGHT: Final = 220
# The charts begin a minute ago at the latest.
_FEWEST_S: Final = 60.0
# A chart with more lines has no legend.
_MOST_IN_LEGEND: Final = 6
_SHARES: Final = (
    ("step", "in steps", "#2da160"),
    ("waiting", "for input", "#e8833a"),
    ("idle", "for the program", "#8b949e"),
)
# Bokeh draws on a canvas, which style sheets do not reach.
_COLOURS: Final = """
const is_dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
const [ink, line] = is_dark ? ["#c9d1d9", "#30363d"] : ["#444c56", "#e1e4e8"];
for (const plot of plots) {
  plot.title.text_color = ink;
  plot.outline_line_color = line;
  for (const axis of [...plot.left, ...plot.below]) {
    if (axis.axis_line_color !== undefined) {
      axis.major_label_text_color = ink;
      axis.axis_label_text_color = ink;
      axis.axis_line_color = line;
      axis.major_tick_line_color = line;
      axis.minor_tick_line_color = null;
    }
  }
  for (const part of [...plot.center, ...plot.above]) {
    if (part.grid_line_color !== undefined) { part.grid_line_color = line; }
    if (part.label_text_color !== undefined) { part.label_text_color = ink; }
  }
}
"""
# The texts are in shadow roots, where selectors of the document do not match.
_STYLE: Final = """
div .dd { background: none; max-width: none; }
@media (prefers-color-scheme: dark) {
  div .dd { --dd-fg: #e6edf3; --dd-soft: #9198a1; --dd-line: #3d444d; }
}
"""
_TEMPLATE: Final = """{% extends "simple.html" %}
{% block extra_resources %}<style>
@media (prefers-color-scheme: dark) {
  html, body { background: #0d1117; color: #e6edf3; }
  .navbar ul, .dropdown-content { background-color: #21262d; }
  .navbar li a { color: #e6edf3; }
  #navbar-toggle-icon img { filter: invert(1); }
}
</style>{% endblock %}"""


class DaskdistPage:
    """The content of the page, for one browser."""

    def __init__(self, figures: DashboardFigures) -> None:
        from bokeh.layouts import column, gridplot
        from bokeh.models import ColumnDataSource, Div, Range1d

        self._figures = figures
        self._lines = ColumnDataSource({"at": [], "steps": [], "rows": [], "colour": [], "label": []})
        self._shares = ColumnDataSource({"at": [], "step": [], "waiting": [], "idle": []})
        self._program = ColumnDataSource({"at": [], "waiting": []})
        self._fill = ColumnDataSource({"at": [], "ahead": [], "in_flight": []})
        self._summary = Div(name="summary", sizing_mode="stretch_width", stylesheets=[_STYLE])
        self._details = Div(name="details", sizing_mode="stretch_width", stylesheets=[_STYLE])
        self._seconds = Range1d(start=-_FEWEST_S, end=0)
        self.plots = [
            self._rates("Steps per second of each replica", "steps"),
            self._rates("Rows per second of each replica", "rows"),
            self._time_shares(),
            self._window_fill(),
        ]
        grid = gridplot([self.plots[:2], self.plots[2:]], sizing_mode="stretch_width", toolbar_location=None)
        self.root = column(self._summary, grid, self._details, sizing_mode="stretch_width")
        self.update()

    def update(self) -> None:
        """Show the present figures."""
        from bokeh.palettes import Category10_10

        figures = self._figures
        now = figures.observed_at
        replicas = sorted(figures.replicas.values(), key=lambda replica: (replica.strategy, replica.number))
        histories = [_columns(replica.history, 3, now) for replica in replicas]
        self._lines.data = {
            "at": [at for at, _, _ in histories],
            "steps": [steps for _, steps, _ in histories],
            "rows": [rows for _, _, rows in histories],
            "colour": [Category10_10[number % 10] for number in range(len(replicas))],
            "label": [f"replica {replica.number}" for replica in replicas],
        }
        self._shares.data = dict(zip(self._shares.data, _columns(figures.time_shares, 4, now), strict=True))
        self._program.data = dict(zip(self._program.data, _columns(figures.program_shares, 2, now), strict=True))
        self._fill.data = dict(zip(self._fill.data, _columns(figures.fill, 3, now), strict=True))
        self._seconds.start = min(min(self._shares.data["at"], default=0.0), -_FEWEST_S)
        for plot in self.plots[:2]:
            plot.legend.visible = len(replicas) <= _MOST_IN_LEGEND
        _set_text(self._summary, summary(figures))
        _set_text(self._details, details(figures))

    def _plot(self, title: str, y_format: str, y_range: Any) -> Any:
        from bokeh.models import NumeralTickFormatter, PrintfTickFormatter
        from bokeh.plotting import figure

        plot = figure(
            title=title,
            height=_HEIGHT,
            x_range=self._seconds,
            sizing_mode="stretch_width",
            y_range=y_range,
            tools="",
        )
        plot.yaxis.formatter = NumeralTickFormatter(format=y_format)
        plot.xaxis.formatter = PrintfTickFormatter(format="%d s")
        plot.xaxis.ticker.desired_num_ticks = 5
        plot.xaxis.ticker.num_minor_ticks = 0
        return plot

    def _rates(self, title: str, name: str) -> Any:
        from bokeh.models import DataRange1d, HoverTool

        plot = self._plot(title, "0.[0]a", DataRange1d(start=0))
        plot.multi_line(
            "at", name, source=self._lines, line_color="colour", line_width=2, legend_field="label", alpha=0.9
        )
        plot.add_tools(HoverTool(tooltips=[("", "@label"), (f"{name}/s", "$y{0,0.[0]}")], line_policy="nearest"))
        return _with_legend(plot)

    def _time_shares(self) -> Any:
        plot = self._plot("What the replicas spend their time on", "0%", (0, 1))
        names, labels, colours = zip(*_SHARES, strict=True)
        plot.varea_stack(names, x="at", color=colours, alpha=0.75, legend_label=list(labels), source=self._shares)
        plot.line(
            "at",
            "waiting",
            source=self._program,
            line_color="#4c8bf5",
            line_width=2,
            line_dash="dashed",
            legend_label="program waits",
        )
        return _with_legend(plot)

    def _window_fill(self) -> Any:
        plot = self._plot("How full the windows are", "0%", (0, 1.02))
        options = {"source": self._fill, "line_width": 2}
        plot.line("at", "ahead", line_color="#4c8bf5", legend_label="bytes read ahead", **options)
        plot.line("at", "in_flight", line_color="#a371f7", legend_label="steps in flight", **options)
        return _with_legend(plot)


def _with_legend(plot: Any) -> Any:
    plot.legend.location = "top_left"
    plot.legend.background_fill_alpha = 0
    plot.legend.border_line_alpha = 0
    plot.legend.label_text_font_size = "11px"
    plot.legend.orientation = "horizontal"
    plot.legend.spacing = 8
    plot.legend.margin = plot.legend.padding = 0
    plot.add_layout(plot.legend[0], "above")
    return plot


def _columns(rows: Iterable[Sequence[float]], num_columns: int, now: float) -> list[list[float]]:
    # The first column has times, which become seconds from now.
    columns = [list(values) for values in zip(*rows, strict=True)] or [[] for _ in range(num_columns)]
    columns[0] = [at - now for at in columns[0]]
    return columns


def _set_text(div: Any, text: str) -> None:
    if div.text != text:
        div.text = text


def _document(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    from bokeh.models import CustomJS
    from distributed.dashboard.components import add_periodic_callback
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    page = DaskdistPage(scheduler.plugins["daskdist-dashboard"].figures)
    add_periodic_callback(doc, page, _UPDATE_EVERY_MS)
    doc.add_root(page.root)
    doc.title = "Dask: daskdist"
    doc.template = env.from_string(_TEMPLATE)
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    doc.js_on_event("document_ready", CustomJS(args={"plots": page.plots}, code=_COLOURS))


def add_page(scheduler: Scheduler) -> None:
    """Add the page to a scheduler's dashboard, if it has one."""
    from bokeh.server.tornado import BokehTornado

    applications = scheduler.http_application.applications
    dashboard = next((known for known in applications if isinstance(known, BokehTornado)), None)
    if dashboard is None:
        return
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables

    variables = template_variables(scheduler)
    application = BokehApplication(
        {f"/{_NAME}": _document}, scheduler, prefix=dashboard.prefix, template_variables=variables
    )
    scheduler.http_application.add_application(application)
    application.initialize(scheduler.loop)
    application.start()
    # A link at the top of all pages.
    variables["pages"].append(_NAME)
