"""Rows that only the calls that need some of them read, in local processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Rows
from daskdist.core.primitive import Split, same
from daskdist.execute.callers.process_pool import function_of
from daskdist.execute.stream.gather import Joins, Picks, gather
from daskdist.storage.grouped_splits import joined_split


@dataclass(frozen=True)
class UnreadRows:
    """A description of rows, each of a split of its own.

    Parameters
    ----------
    function
        The file of the pickled function that reads them.
    parts
        The split of each row.
    """

    function: str
    parts: tuple[Split, ...]


def with_needed(blocks: Sequence[Rows | UnreadRows], picks: Picks | Joins) -> tuple[list[Rows | UnreadRows], Any]:
    """Return blocks of only the needed rows, and the picks of these rows; nothing is read."""
    if isinstance(picks, Picks):
        return _with_needed(blocks, picks)
    needed, new_picks, num_blocks, start = [], [], [], 0
    for part, number in zip(picks.picks, picks.num_blocks, strict=True):
        part_blocks, part_picks = _with_needed(blocks[start : start + number], part)
        needed += part_blocks
        new_picks.append(part_picks)
        num_blocks.append(len(part_blocks))
        start += number
    return needed, replace(picks, picks=tuple(new_picks), num_blocks=tuple(num_blocks))


def _with_needed(blocks: Sequence[Rows | UnreadRows], picks: Picks) -> tuple[list[Rows | UnreadRows], Picks]:
    rows, block_index = picks.by_row()
    if not len(rows):
        return list(blocks[:1]), replace(picks, rows=range(0), block_index=None)
    rows = np.asarray(rows)
    block_index = np.zeros(len(rows), np.intp) if block_index is None else np.asarray(block_index)
    new_rows, new_index = np.empty((2, len(rows)), np.intp)
    needed: list[Rows | UnreadRows] = []
    # Blocks with rows go together, and so do those of each function.
    kinds = [block.function if isinstance(block, UnreadRows) else "" for block in blocks]
    for kind in dict.fromkeys(kinds):
        at = np.flatnonzero(np.array([kind == other for other in kinds])[block_index])
        if not len(at):
            continue
        new_index[at] = len(needed)
        if kind:
            places_to_read = list(zip(block_index[at].tolist(), rows[at].tolist(), strict=True))
            numbers = {place: number for number, place in enumerate(dict.fromkeys(places_to_read))}
            parts: list[Any] = [blocks[block].parts[row] for block, row in numbers]
            new_rows[at] = [numbers[place] for place in places_to_read]
            needed.append(UnreadRows(kind, tuple(parts)))
        else:
            there = [number for number, other in enumerate(kinds) if not other]
            places = np.searchsorted(there, block_index[at])
            chosen: list[Any] = [blocks[number] for number in there]
            needed.append(gather(chosen, Picks(rows[at], places, None, None), same, empty=pooled_empty))
            new_rows[at] = range(len(at))
    if len(needed) == 1 and np.array_equal(new_rows, np.arange(len(rows))):
        return needed, replace(picks, rows=range(len(rows)), block_index=None)
    return needed, replace(picks, rows=new_rows, block_index=new_index)


def gather_read(blocks: Sequence[Rows | UnreadRows], picks: Picks | Joins, function: str, unstacked: bool) -> Any:
    """Read rows, and call the pickled function of a file with the picked ones; without a file, return them."""
    read = [
        function_of(block.function)(joined_split(block.parts)) if isinstance(block, UnreadRows) else block
        for block in blocks
    ]
    if not function:
        return gather(read, picks, None, unstacked)
    return function_of(function)(gather(read, picks, same, unstacked))
