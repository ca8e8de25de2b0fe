"""Origins of rows, for messages: looked up only when there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Rows of one split.

    Parameters
    ----------
    label
        What the split is called: a file and a row group, say.
    is_exact
        Whether a row's number here is its number there.
    """

    label: str
    is_exact: bool = True

    def where(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"{f'row {index}' if self.is_exact else 'a row'} of {self.label or 'a block'}"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something left out because it could not be read, or its computation failed.

    Parameters
    ----------
    where
        What a message calls it.
    reason
        Why.
    file
        The file it is of; empty where it is of none.
    """

    where: str
    reason: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SelectedOrigins:
    """Rows chosen of other rows.

    Parameters
    ----------
    origins
        Where those came from, one for each block.
    rows
        For each row its number in its block.
    block_index
        For each row its block, an index into ``origins``; None where there is one.
    """

    origins: Sequence[Origin | SelectedOrigins | JoinedOrigin]
    rows: Any
    block_index: Any = None

    def where(self, index: int) -> str:
        """Return the name of a row in messages."""
        block = 0 if self.block_index is None else int(self.block_index[index])
        return self.origins[block].where(int(self.rows[index]))


def origin_from(label: str, start: int, num_rows: int) -> SelectedOrigins:
    """Return the origin of rows ``start`` to ``start + num_rows`` of what ``label`` names."""
    return SelectedOrigins([Origin(label)], range(start, start + num_rows))


@dataclass(frozen=True, slots=True)
class JoinedOrigin:
    """Rows each made of a row of several others.

    Parameters
    ----------
    origins
        Where each of those came from.
    """

    origins: Sequence[Origin | SelectedOrigins | JoinedOrigin]

    def where(self, index: int) -> str:
        """Return the name of a row in messages."""
        return ", ".join(dict.fromkeys(origin.where(index) for origin in self.origins))
