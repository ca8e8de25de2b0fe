"""Rows that only the calls that need some of them read, in local processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Rows
from daskdist.core.primitive import Split, same
from daskdist.execute.stream.gather import Joins, Picks, gather
from daskdist.storage.grouped_splits import joined_split


@dataclass(frozen=True)
class UnreadRows:
    """A description of rows, each of a split of its own.

    Parameters
    ----------
    function
        The function that reads them in a local process, and a `LocalFunction` elsewhere.
    parts
        The split of each row.
    """

    function: Any
    parts: tuple[Split, ...]


def with_needed(blocks: Sequence[Rows | UnreadRows], picks: Picks | Joins) -> tuple[list[Rows | UnreadRows], Any]:
    """Return blocks of only the needed rows, and the picks of these rows; nothing is read."""
    if isinstance(picks, Picks):
        return _with_needed(blocks, picks)
    parts, start = [], 0
    for part, number in zip(picks.picks, picks.num_blocks, strict=True):
        parts.append(_with_needed(blocks[start : start + number], part))
        start += number
    needed, new_picks = zip(*parts, strict=True)
    return list(chain(*needed)), replace(picks, picks=new_picks, num_blocks=tuple(map(len, needed)))


def _with_needed(blocks: Sequence[Any], picks: Picks) -> tuple[list[Rows | UnreadRows], Picks]:
    rows, block_index = picks.by_row()
    if not len(rows):
        return list(blocks[:1]), replace(picks, rows=range(0), block_index=None)
    places = list(zip([0] * len(rows) if block_index is None else map(int, block_index), map(int, rows), strict=True))
    needed: list[Rows | UnreadRows] = []
    # The block and the row of each place among the needed ones.
    new_places: dict[tuple[int, int], tuple[int, int]] = {}
    # Blocks with rows go together, and so do those of each function.
    kinds = [block.function if isinstance(block, UnreadRows) else None for block in blocks]
    for kind in dict.fromkeys([kinds[block] for block, _ in places]):
        chosen = [place for place in dict.fromkeys(places) if kinds[place[0]] is kind]
        new_places.update({place: (len(needed), number) for number, place in enumerate(chosen)})
        if kind is not None:
            needed.append(UnreadRows(kind, tuple([blocks[block].parts[row] for block, row in chosen])))
            continue
        index, chosen_rows = np.array(chosen).T
        used, index = np.unique(index, return_inverse=True)
        chosen_picks = Picks(chosen_rows, index, None, None)
        needed.append(gather([blocks[block] for block in used], chosen_picks, same, empty=pooled_empty))
    new_index, new_rows = np.array([new_places[place] for place in places]).T
    if len(needed) == 1 and np.array_equal(new_rows, np.arange(len(rows))):
        return needed, replace(picks, rows=range(len(rows)), block_index=None)
    return needed, replace(picks, rows=new_rows, block_index=new_index)


def gather_read(
    blocks: Sequence[Rows | UnreadRows], picks: Picks | Joins, function: Callable[[Rows], Any] | None, unstacked: bool
) -> Any:
    """Read rows, and call a function with the picked ones; without one, return them."""
    read = [block.function(joined_split(block.parts)) if isinstance(block, UnreadRows) else block for block in blocks]
    return gather(read, picks, function, unstacked)
