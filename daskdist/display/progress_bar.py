"""Progress of passes and of other long work, as bars of tqdm."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from daskdist.context_variables import changed
from daskdist.long_work import ProgressDisplay, displays

# The least time between two redraws, in seconds.
_REDRAW_S: Final = 0.1


def progress() -> AbstractContextManager[None]:
    """Show the progress of long work in this context on standard error.

    This covers writing (`save`, `to_parquet` and so on), statistics, listing many files, and passes over datasets, for
    example the first one of a `cache`. Passes over distributed datasets have `DistributedDataset.progress`. Nothing is
    shown unless standard error is a terminal or a notebook.

    >>> import daskdist, tempfile
    >>> with daskdist.progress(), tempfile.TemporaryDirectory() as directory:
    ...     daskdist.Dataset.range(1000).save(directory)
    """
    return changed(displays, progress_bar)


def progress_bar(total: int | None, title: str, unit: str = "steps") -> ProgressDisplay | None:
    """Return a display on standard error; None unless that is a terminal or a notebook."""
    in_notebook = is_notebook()
    if not in_notebook and not sys.stderr.isatty():
        return None
    has_widgets = in_notebook and importlib.util.find_spec("ipywidgets") is not None
    return TqdmBar(total, title, unit, in_notebook=has_widgets)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class TqdmBar:
    """A tqdm bar: a widget in notebooks that support widgets, otherwise text."""

    def __init__(self, total: int | None, title: str, unit: str, *, in_notebook: bool) -> None:
        if in_notebook:
            from tqdm.notebook import tqdm
        else:
            from tqdm.std import tqdm
        # tqdm's own rate is an average of the latest steps; the text has the rate of the whole pass.
        first = "{desc}: " if title else ""
        so_far = first + "{n:,}" if total is None else "{l_bar}{bar}| {n:,}/{total:,}"
        self._bar = tqdm(
            total=total,
            desc=title or None,
            file=sys.stderr,
            bar_format=f"{so_far} {unit} [{{elapsed}}{{postfix}}]",
            dynamic_ncols=True,
            mininterval=_REDRAW_S,
        )

    def update(self, number: int, text: str) -> None:
        """Show how much is done, and a text."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(number - self._bar.n)

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
