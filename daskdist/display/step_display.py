"""The progress of a pass: a tqdm bar if tqdm is installed, otherwise one line that is redrawn."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol, TextIO

# The least time between two redraws, in seconds.
_REDRAW_S: Final = 0.1


class StepDisplay(Protocol):
    """A display of the number of steps that are done."""

    def update(self, num_steps: int, text: str) -> None:
        """Show the number of steps that are done, and a text."""
        ...

    def close(self) -> None:
        """End the display; what was shown stays."""
        ...


def step_display(total: int | None, title: str, stream: TextIO | None = None) -> StepDisplay | None:
    """Return a display on standard error; None unless that is a terminal or a notebook.

    Parameters
    ----------
    total
        The number of steps, if it is known.
    title
        A label shown first.
    stream
        The stream to write to instead.
    """
    stream = sys.stderr if stream is None else stream
    in_notebook = is_notebook()
    if not in_notebook and not stream.isatty():
        return None
    if importlib.util.find_spec("tqdm") is None:
        return RedrawnLine(total, title, stream)
    return TqdmBar(total, title, stream, in_notebook=in_notebook and importlib.util.find_spec("ipywidgets") is not None)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class RedrawnLine:
    """One line that is redrawn."""

    def __init__(self, total: int | None, title: str, stream: TextIO) -> None:
        self._total = total
        self._title = title
        self._stream = stream
        self._drawn_s = float("-inf")
        self._latest = ""

    def update(self, num_steps: int, text: str) -> None:
        """Show the number of steps that are done, and a text."""
        of_all = "" if self._total is None else f"/{self._total:,}"
        parts = [self._title, f"{num_steps:,}{of_all} steps", text]
        self._latest = "  ".join(part for part in parts if part)
        now_s = time.perf_counter()
        if now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._draw()

    def _draw(self) -> None:
        room = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{self._latest[:room]}\x1b[K")
        self._stream.flush()

    def close(self) -> None:
        """End the line; what was shown stays."""
        if self._latest:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()


class TqdmBar:
    """A tqdm bar: a widget in notebooks that support widgets, otherwise text."""

    def __init__(self, total: int | None, title: str, stream: TextIO, *, in_notebook: bool) -> None:
        if in_notebook:
            from tqdm.notebook import tqdm
        else:
            from tqdm.std import tqdm
        # tqdm's own rate is an average of the latest steps; the text has the rate of the whole pass.
        so_far = "{n_fmt} steps" if total is None else "{l_bar}{bar}| {n_fmt}/{total_fmt} steps"
        self._bar = tqdm(
            total=total,
            desc=title or None,
            file=stream,
            bar_format=f"{so_far} [{{elapsed}}{{postfix}}]",
            dynamic_ncols=True,
            mininterval=_REDRAW_S,
        )

    def update(self, num_steps: int, text: str) -> None:
        """Show the number of steps that are done, and a text."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(num_steps - self._bar.n)

    def close(self) -> None:
        """End the bar; what was shown stays."""
        self._bar.refresh()
        self._bar.close()


def figures_in_words(figures: Mapping[str, Any]) -> str:
    """Format values that a program reports.

    >>> figures_in_words({"loss": 0.123456, "epoch": 3})
    'loss 0.1235  epoch 3'
    """
    return "  ".join(f"{name} {_short(value)}" for name, value in figures.items())


def _short(value: Any) -> str:
    try:
        return f"{value:.4g}" if not isinstance(value, (int, str)) else str(value)
    except (TypeError, ValueError):
        return str(value)[:20]
