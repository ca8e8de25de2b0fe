"""The first elements of a dataset as a table, for terminals and notebooks."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from daskdist.core.cardinality import counted
from daskdist.core.structure import Structure
from daskdist.display.html import Box, PageTable, Section, page, texts
from daskdist.display.pictures import pictures_of
from daskdist.display.values import text_of
from daskdist.tables.describe import column_name

# The most characters of a value; and in a terminal its most lines, and the least width of a column that is cut.
_MOST_CHARACTERS: Final = 600
_MOST_LINES: Final = 4
_LEAST_WIDTH: Final = 12
_ELEMENT: Final = "element"


class Preview:
    """The first elements of a dataset.

    Parameters
    ----------
    elements
        The elements.
    is_all
        Whether the dataset has no other elements.

    >>> import numpy as np
    >>> Preview([{"x": np.int64(1), "name": "one"}, {"x": np.int64(2), "name": "two"}], is_all=True)
      element  x  name
            0  1  one
            1  2  two
    all 2 elements
    """

    def __init__(self, elements: Sequence[Any], *, is_all: bool) -> None:
        self._rows: list[list[Any]] = []
        self._columns: tuple[str, ...] = ()
        for element in elements:
            leaves, structure = Structure.of(element)
            columns = structure.in_order(leaves)
            self._columns = self._columns or tuple(column_name(path) for path, _ in columns)
            self._rows.append([leaf for _, leaf in columns])
        which = "" if not elements else ("only" if len(elements) == 1 else "all") if is_all else "first"
        number = counted(len(elements), "element").removeprefix("1 ")
        self._extent = {"": "no elements", "all": f"all {number}"}.get(which, f"the {which} {number}")

    def _repr_html_(self) -> str:
        heading = [Box(_ELEMENT, "number"), *texts(*self._columns)]
        rows = [
            [Box(str(number), "number"), *[_box(leaf) for leaf in leaves]] for number, leaves in enumerate(self._rows)
        ]
        return page("Dataset", [self._extent], [Section("table", PageTable(heading, rows))] if rows else [])

    def __repr__(self) -> str:
        if not self._rows:
            return self._extent
        texts_of = [
            [name, *map(_text, leaves)]
            for name, leaves in zip(self._columns, zip(*self._rows, strict=True), strict=True)
        ]
        room = shutil.get_terminal_size((100, 24)).columns - len(_ELEMENT) - 2
        widths = _widths([max(map(len, column)) for column in texts_of], room)
        columns = [[_wrapped(text, width) for text in column] for column, width in zip(texts_of, widths, strict=False)]
        numbers = [[text.rjust(len(_ELEMENT))] for text in [_ELEMENT, *map(str, range(len(self._rows)))]]
        lines = [line for row in zip(numbers, *columns, strict=True) for line in _lines(row, [len(_ELEMENT), *widths])]
        left_out = self._columns[len(widths) :]
        more = f"; {counted(len(left_out), 'column')} more: {', '.join(left_out)[:200]}" if left_out else ""
        return "\n".join([*lines, f"{self._extent}{more}"])


def _widths(longest: Sequence[int], room: int) -> list[int]:
    # The widths of the columns that fit. Columns that need less leave their width to longer ones.
    least = list(itertools.accumulate(min(length, _LEAST_WIDTH) + 2 for length in longest))
    longest = longest[: max(sum(end <= room for end in least), 1)]
    widths = dict.fromkeys(range(len(longest)), 0)
    left = room - 2 * len(longest)
    for rank, number in enumerate(sorted(widths, key=longest.__getitem__)):
        widths[number] = min(longest[number], max(left // (len(longest) - rank), 1))
        left -= widths[number]
    return list(widths.values())


def _lines(row: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for cells in itertools.zip_longest(*row, fillvalue=""):
        texts_of = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        yield "  " + "  ".join(texts_of).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text[: width * (_MOST_LINES + 1)], width) or [""]
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "..."]


def _box(leaf: Any) -> Box:
    pictures = pictures_of(leaf)
    if pictures:
        return Box(f"{leaf.dtype} {leaf.shape}", "wide", pictures=pictures)
    return Box(_text(leaf), "wide", is_code=not isinstance(leaf, str))


def _text(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        if leaf.size > 12 and leaf.ndim > 1:
            return f"{leaf.dtype} {leaf.shape}"
        with np.printoptions(threshold=12, edgeitems=3, precision=4):
            text = " ".join(str(leaf).split())
        return f"{text} {leaf.shape}" if leaf.size > 12 else text
    if isinstance(leaf, (float, np.floating)):
        number = f"{leaf:.6g}"
        return f"{number}.0" if number.lstrip("-").isdigit() else number
    # Control characters of a text would move the cursor of a terminal.
    text = "".join(char if char.isprintable() else " " for char in text_of(leaf)[: _MOST_CHARACTERS + 1])
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def show(value: Any) -> None:
    """Show a value: in IPython and notebooks by its richest form, elsewhere as text on standard output."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from IPython.display import display

        display(value)  # type: ignore[no-untyped-call]
    else:
        sys.stdout.write(f"{value}\n")
