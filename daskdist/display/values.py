"""Short text and tables of replicas' values of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.devices import device_of, dtype_of, name_of
from daskdist.display.html import Box, PageTable, Section, page, texts

# The number of characters of a value to show in a table, and of lines and characters in text.
_SHOWN: Final = 72
_TEXT_LINES: Final = 8
_TEXT_CHARACTERS: Final = 1000
# Arrays of more values, or rows, are abridged in text.
_WHOLE_VALUES: Final = 60
_WHOLE_ROWS: Final = 8
# The range of larger arrays is not computed.
_RANGE_VALUES: Final = 10_000_000
# With more replicas, text has only the values of the first and the last.
_ALL_REPLICAS: Final = 12


@dataclass(frozen=True)
class Summary:
    """A description of a value, for display.

    Parameters
    ----------
    shape, dtype
        The shape and dtype of an array or number; empty for other values.
    text
        The beginning of its printed form.
    device
        The device of an array that is not on the host.
    span
        The smallest and the largest number of an array on the host.
    """

    shape: str
    dtype: str
    text: str
    device: str = ""
    span: str = ""

    @classmethod
    def of(cls, value: Any) -> Summary:
        """Summarize a value in the process that holds it."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        shape = shape if isinstance(shape, tuple) else None
        if shape is None and isinstance(value, (bool, int, float, complex)):
            shape, dtype = (), type(value).__name__
        with np.printoptions(threshold=8, edgeitems=2, precision=4):
            # Use only the beginning: a list may be long.
            text = " ".join(text_of(value)[: 100 * _SHOWN].split())
        device = device_of(value)
        return cls(
            "" if shape is None else str(tuple(shape)),
            "" if dtype is None else str(dtype),
            _cut(text, _SHOWN),
            "" if device is None else name_of(device),
            _span(value),
        )


def _span(value: Any) -> str:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf" or not 1 < value.size <= _RANGE_VALUES:
        return ""
    with np.errstate(all="ignore"):
        return f"{value.min():.4g} to {value.max():.4g}"


def _cut(text: str, number: int) -> str:
    return text if len(text) <= number else text[: number - 3] + "..."


def shown(value: Any, show: Callable[[Any], str] = repr) -> str:
    """Return the text of a value; for a large array on a device only its type and device, which avoids a copy."""
    device = device_of(value)
    if device is None or math.prod(value.shape) <= np.get_printoptions()["threshold"]:
        return show(value)
    return f"<array of shape {tuple(value.shape)}, {dtype_of(value)}, on {name_of(device)}>"


def text_of(value: Any) -> str:
    """Return the ``str`` of a value, as `shown`; of a time without zeros at its end.

    >>> import numpy as np
    >>> text_of(np.datetime64("2024-02-29T12:30:00.000000")), text_of(np.datetime64("2024-02-29T12:30:00.250"))
    ('2024-02-29T12:30:00', '2024-02-29T12:30:00.25')
    """
    text = shown(value, str)
    is_time = isinstance(value, np.datetime64) and "." in text
    return text.rstrip("0").removesuffix(".") if is_time else text


def abridged(value: Any) -> str:
    """Return the ``repr`` of a value, abridged to a few lines.

    >>> import numpy as np
    >>> abridged(np.arange(1000))
    'array([  0,   1,   2, ..., 997, 998, 999], shape=(1000,))'
    """
    if isinstance(value, np.ndarray) and device_of(value) is None:
        if value.ndim > 3:
            return f"<array of shape {value.shape}, {value.dtype}>"
        is_long = value.size > _WHOLE_VALUES or (value.ndim > 1 and value.size > _WHOLE_ROWS * value.shape[-1])
        if is_long:
            with np.printoptions(threshold=0, edgeitems=1 if value.ndim == 3 else 3 if value.ndim == 1 else 2):
                return repr(value)
    return _few_lines(shown(value))


def _few_lines(text: str) -> str:
    lines = text.split("\n")
    if len(lines) > _TEXT_LINES:
        text = "\n".join([*lines[:_TEXT_LINES], f"... {len(lines) - _TEXT_LINES} more lines"])
    return _cut(text, _TEXT_CHARACTERS)


def values_text(title: str, values: Sequence[Any]) -> str:
    """Return the text of the values of replicas; of many replicas, only the first and the last."""
    lines = [f"  {number}: {abridged(value)}" for number, value in _first_and_last(values)]
    if len(lines) < len(values):
        lines[-2] = f"  ... {len(values) - len(lines)} more replicas\n{lines[-2]}"
    return f"{title}:{{\n" + ",\n".join(lines) + "\n}"


def _first_and_last(values: Sequence[Any]) -> list[tuple[int, Any]]:
    numbered = list(enumerate(values))
    return numbered if len(numbered) <= _ALL_REPLICAS else [*numbered[: _ALL_REPLICAS - 4], *numbered[-2:]]


def values_page(title: str, summaries: Sequence[Summary], workers: Sequence[str | None], note: str) -> str:
    """Return a page with one row per replica."""
    columns: dict[str, Sequence[str]] = {
        "replica": [str(number) for number in range(len(summaries))],
        "worker": [worker or "" for worker in workers],
        "device": [summary.device for summary in summaries],
        "shape": [summary.shape for summary in summaries],
        "dtype": [summary.dtype for summary in summaries],
        "range": [summary.span for summary in summaries],
    }
    texts_of_values = [summary.text for summary in summaries]
    # Drop empty columns.
    columns = {name: texts_of for name, texts_of in columns.items() if any(texts_of)}
    rows: list[list[Box]] = [list(map(Box, cells)) for cells in zip(*columns.values(), strict=True)]
    heading = list(columns)
    if any(texts_of_values):
        heading.append("value")
        for row, text in zip(rows, texts_of_values, strict=True):
            row.append(Box(text, "wide", is_code=True))
    sections = [Section("table", PageTable(texts(*heading), rows))]
    if note:
        sections.append(Section("text", note))
    return page(title, [f"{len(rows):,} replica{'s' * (len(rows) != 1)}"], sections)
