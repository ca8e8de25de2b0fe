"""The results of `Dataset.describe` and `Dataset.head`, which print as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from daskdist.core.cardinality import counted
from daskdist.core.spec import ElementSpec
from daskdist.display.html import Box, PageTable, Section, page
from daskdist.display.plan import table
from daskdist.display.preview import Preview
from daskdist.display.values import Summary
from daskdist.tables.describe import MOST_COUNTED, ColumnStatistics, column_name

# The most characters of a value in a table.
_SHOWN: Final = 24
# The most columns in the table of a dataset's leaves.
_MOST_COLUMNS: Final = 40


class Description:
    """Statistics of the columns of a dataset, which print as a table."""

    def __init__(self, num_elements: int, columns: dict[str, ColumnStatistics]) -> None:
        self.num_elements = num_elements
        self._columns = {name: column.to_dict() for name, column in columns.items()}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each column as a dict of numbers."""
        return {name: dict(values) for name, values in self._columns.items()}

    def __getitem__(self, column: str) -> dict[str, Any]:
        if column not in self._columns:
            raise KeyError(f"no column {column!r}; there are {', '.join(map(repr, self._columns)) or 'none'}")
        return dict(self._columns[column])

    def __repr__(self) -> str:
        if not self._columns:
            return counted(self.num_elements, "element")
        heading, *rows = self._table
        return f"{counted(self.num_elements, 'element')}\n{table([('', *heading[1:]), *rows])}"

    def _repr_html_(self) -> str:
        heading, *rows = self._table
        boxes = [[Box(name, is_code=True), *(Box(value, "number") for value in values)] for name, *values in rows]
        shown = PageTable([Box(heading[0]), *(Box(name, "number") for name in heading[1:])], boxes)
        return page("Dataset", [counted(self.num_elements, "element")], [Section("table", shown)] if rows else [])

    @property
    def _table(self) -> list[tuple[str, ...]]:
        heading = ("column", *(name for values in list(self._columns.values())[:1] for name in values))
        return [heading, *((name, *_numbers(values)) for name, values in self._columns.items())]


class Head(list[Any]):
    """The first elements of a dataset: a list that prints as a table."""

    def __repr__(self) -> str:
        return repr(Preview(self, is_all=False))

    def _repr_html_(self) -> str:
        return Preview(self, is_all=False)._repr_html_()


def columns_table(spec: ElementSpec) -> str:
    """Return a table of the leaves of elements: the name, dtype and shape of each."""
    rows = [
        (column_name(path), str(getattr(leaf, "dtype", type(leaf).__name__)), str(getattr(leaf, "shape", "")))
        for path, leaf in spec.structure.in_order(spec.leaves)
    ]
    more = f"\n  and {len(rows) - _MOST_COLUMNS} more columns" if len(rows) > _MOST_COLUMNS else ""
    return table([("column", "dtype", "shape"), *rows[:_MOST_COLUMNS]]) + more


def _numbers(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        is_estimate = name == "distinct" and value > MOST_COUNTED
        yield f"~{_number(value)}" if is_estimate else _number(value)


def _number(value: Any) -> str:
    if isinstance(value, float):
        # A column of text has no mean.
        return "-" if math.isnan(value) else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else _short(value) if value is not None else "-"


def _short(value: Any) -> str:
    text = Summary.of(value).text
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
