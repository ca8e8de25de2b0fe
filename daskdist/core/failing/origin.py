"""Origins of rows, resolved only when a message needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

# Rows are looked at one by one if blocks have fewer on average; arrays of so few take more time.
_ROWS_OF_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Origin:
    """Rows of one split.

    Parameters
    ----------
    label
        The name of the split, such as a file and a row group.
    is_exact
        Whether the number of a row here is its number in the split.
    """

    label: str
    is_exact: bool = True

    def where(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"{f'row {index}' if self.is_exact else 'a row'} of {self.label or 'a block'}"

    def __reduce__(self) -> Any:
        return Origin, (self.label, self.is_exact)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Data that was left out because it could not be read or computed.

    Parameters
    ----------
    where
        Its name in messages.
    reason
        The reason.
    file
        The file that it is in; empty if it is not in a file.
    """

    where: str
    reason: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SelectedOrigins:
    """The origin of rows that are selected from other rows.

    Parameters
    ----------
    origins
        The origins of the other rows, one for each block.
    rows
        The number of each row in its block.
    block_index
        The block of each row, as an index into ``origins``; None if there is only one.
    """

    origins: Sequence[Origin | SelectedOrigins | JoinedOrigin]
    rows: Any
    block_index: Any = None

    def where(self, index: int) -> str:
        """Return the name of a row in messages."""
        block = 0 if self.block_index is None else int(self.block_index[index])
        return self.origins[block].where(int(self.rows[index]))

    def __reduce__(self) -> Any:
        # Otherwise a few rows of many blocks would keep the origins of all rows of those blocks.
        origins, rows, block_index = _selected(self, range(len(self.rows)))
        if any(type(origin) is not Origin for origin in origins):
            return SelectedOrigins, (origins, rows, block_index)
        # Strings are pickled far faster than objects.
        labels, are_exact = tuple([origin.label for origin in origins]), bytes([origin.is_exact for origin in origins])
        return _of_labels, (labels, are_exact, rows, block_index)


def _of_labels(labels: Sequence[str], are_exact: bytes, rows: Any, block_index: Any) -> SelectedOrigins:
    return SelectedOrigins(list(map(Origin, labels, map(bool, are_exact))), rows, block_index)


def origin_from(label: str, start: int, num_rows: int) -> SelectedOrigins:
    """Return the origin of rows ``start`` to ``start + num_rows`` of the source that ``label`` names."""
    return SelectedOrigins([Origin(label)], range(start, start + num_rows))


@dataclass(frozen=True, slots=True)
class JoinedOrigin:
    """The origin of rows that each combine one row of several sources."""

    origins: Sequence[Origin | SelectedOrigins | JoinedOrigin]

    def where(self, index: int) -> str:
        """Return the name of a row in messages."""
        return ", ".join(dict.fromkeys(origin.where(index) for origin in self.origins))


def _selected(origin: Origin | SelectedOrigins | JoinedOrigin, rows: Any) -> tuple[list[Any], Any, Any]:
    # Return the arguments of a `SelectedOrigins` that has the origins of these rows only.
    if isinstance(origin, JoinedOrigin):
        parts = [SelectedOrigins(*_selected(part, rows)) for part in origin.origins]
        return [JoinedOrigin(parts)], range(len(rows)), None
    if isinstance(origin, Origin):
        return [origin], rows, None
    rows_there = _at(origin.rows, rows)
    if origin.block_index is None:
        return _selected(origin.origins[0], rows_there)
    blocks, rows_there = np.asarray(_at(origin.block_index, rows)), np.asarray(rows_there)
    if len(blocks) < _ROWS_OF_BLOCK * len(origin.origins):
        by_row = _selected_by_row(origin.origins, rows_there.tolist(), blocks.tolist())
        if by_row is not None:
            return by_row
    origins: list[Any] = []
    places, block_index = np.empty((2, len(blocks)), np.intp)
    order = np.argsort(blocks, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1) if len(order) else ():
        parts, part_rows, part_index = _selected(origin.origins[int(blocks[at[0]])], rows_there[at])
        places[at] = part_rows
        block_index[at] = len(origins) + (0 if part_index is None else part_index)
        origins += parts
    return origins, places, block_index


def _selected_by_row(
    blocks: Sequence[Any], rows: list[int], block_index: list[int]
) -> tuple[list[Any], Any, Any] | None:
    # Return what `_selected` does, found for each row by itself; None if a row has several origins.
    numbers: dict[int, int] = {}
    origins: list[Any] = []
    places, index = [], []
    for row, block in zip(rows, block_index, strict=True):
        origin: Any = blocks[block]
        while type(origin) is SelectedOrigins:
            place = 0 if origin.block_index is None else origin.block_index[row]
            origin, row = origin.origins[place], origin.rows[row]
        if type(origin) is not Origin:
            return None
        number = numbers.setdefault(id(origin), len(origins))
        if number == len(origins):
            origins.append(origin)
        places.append(row)
        index.append(number)
    return origins, np.array(places, np.intp), np.array(index, np.intp)


def _at(values: Any, rows: Any) -> Any:
    # Keep ranges, which take no memory for each row.
    if isinstance(rows, range):
        return values[rows.start : rows.stop : rows.step]
    return np.asarray(values)[rows]
