"""A table of the values of replicas, for notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np

from daskdist.devices import device_of, dtype_of, name_of

# The number of characters of a value to show.
_SHOWN: Final = 72


@dataclass(frozen=True)
class Summary:
    """A description of a value, for display.

    Parameters
    ----------
    shape, dtype
        Those of an array or number; empty for other values.
    text
        The beginning of its printed form.
    """

    shape: str
    dtype: str
    text: str

    @classmethod
    def of(cls, value: Any) -> Summary:
        """Summarize a value in the process that holds it."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        shape = shape if isinstance(shape, tuple) else None
        if shape is None and isinstance(value, (bool, int, float, complex)):
            shape, dtype = (), type(value).__name__
        with np.printoptions(threshold=8, edgeitems=2, precision=4):
            # The beginning is enough: a list may be long.
            text = " ".join(shown(value, str)[: 100 * _SHOWN].split())
        text = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
        return cls("" if shape is None else str(tuple(shape)), "" if dtype is None else str(dtype), text)


def shown(value: Any, show: Callable[[Any], str] = repr) -> str:
    """Return the text of a value; for a large array on a device only its type and place, which avoids a copy."""
    device = device_of(value)
    if device is None or math.prod(value.shape) <= np.get_printoptions()["threshold"]:
        return show(value)
    return f"<array of shape {tuple(value.shape)}, {dtype_of(value)}, on {name_of(device)}>"


def table(summaries: Sequence[Summary], workers: Sequence[str | None]) -> str:
    """Format one row per replica, with its worker if that is known."""
    with_workers = any(workers)
    headings = ["replica", "shape", "dtype", *["worker"] * with_workers, "value"]
    rows = []
    for number, (summary, worker) in enumerate(zip(summaries, workers, strict=True)):
        cells = [str(number), summary.shape, summary.dtype, *[worker or ""] * with_workers]
        row = "".join(f'<td style="white-space: nowrap">{escape(cell)}</td>' for cell in cells)
        rows.append(f'<tr>{row}<td style="text-align: left"><code>{escape(summary.text)}</code></td></tr>')
    head = "".join(f"<th>{heading}</th>" for heading in headings[:-1])
    return (
        '<table><caption style="caption-side: top; text-align: left">PerReplica</caption>'
        f'<thead><tr>{head}<th style="text-align: left">{headings[-1]}</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
