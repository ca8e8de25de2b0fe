"""What gather tasks do: rows of blocks put together as chunks. Pure functions, run wherever a caller runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from daskdist.core.block import Batches, Block, Bundle, Rows, stack
from daskdist.core.selection import Index, Run, Selection, places_by_value
from daskdist.core.structure import Leaves
from daskdist.errors import StackError


@dataclass(frozen=True, slots=True)
class Picks:
    """Rows to gather, free of references to where the blocks are.

    Parameters
    ----------
    selection
        The rows of all elements, one after the other; its ``blocks`` are empty, and given apart.
    bounds
        Where in them each chunk begins and the last ends; None where the elements are the rows themselves.
    """

    selection: Selection
    bounds: tuple[int, ...] | None

    def __reduce__(self) -> tuple[Any, ...]:
        # Index arrays travel through the scheduler with their task: four bytes do for any block there can be.
        s = self.selection
        return _unpickle, (_narrow(s.rows), _narrow(s.which), s.inner, self.bounds)


def _unpickle(rows: Any, which: Any, inner: tuple[int, ...], bounds: tuple[int, ...] | None) -> Picks:
    return Picks(Selection((), rows, which, inner), bounds)


def _narrow(index: Any) -> Any:
    return index.astype(np.int32) if isinstance(index, np.ndarray) else index


def picks_of(run: Run) -> tuple[Selection, Picks]:
    """What gathers a run, and the selection whose blocks it needs."""
    if isinstance(run, Selection):
        flat, bounds = run.without_unused(), None
    else:
        flat = Selection.concat(run.selections).without_unused()
        bounds = (0, *np.cumsum([len(selection.rows) for selection in run.selections]).tolist())
    return flat, Picks(Selection((), flat.rows, flat.which, flat.inner), bounds)


def gather(blocks: Sequence[Rows], picks: Picks, function: Callable[[Rows], Rows] | None = None) -> Rows:
    """The rows picked of the blocks, as a block or as batches; then what ``function`` makes of them."""
    selection, bounds = picks.selection, picks.bounds
    label = _joined_label(blocks)
    rows: Rows
    if all(isinstance(block, Block) for block in blocks):
        flat = _gather_columns(blocks, selection, label)  # type: ignore[arg-type]
        rows = flat if bounds is None else Batches(flat, bounds, selection.inner)
    else:
        items = _gather_items(blocks, selection)
        structure = blocks[0].structure
        if bounds is not None:
            items = [_stacked(structure, items[a:b], selection.inner, label) for a, b in pairwise(bounds)]
        rows = Bundle(structure, items, label)
    return rows if function is None else function(rows)


def take_rows(blocks: Sequence[Rows], rows: Index) -> Rows:
    """Some rows of the one block there is."""
    return blocks[0].take(rows)


def _gather_columns(blocks: Sequence[Block], selection: Selection, label: str) -> Block:
    first = blocks[0]
    rows, which = selection.rows, selection.which
    if isinstance(rows, range):
        source_rows = rows if first.source_rows is None else first.source_rows[rows.start : rows.stop]
        return Block(first.structure, [leaf[rows.start : rows.stop] for leaf in first.leaves], label, source_rows)
    if which is None:
        return first.take(rows)
    for block in blocks[1:]:
        _check_alike(first, block)
    parts = [(blocks[place], at, rows[at]) for place, at in places_by_value(which)]
    leaves = []
    for number, leaf in enumerate(first.leaves):
        out = np.empty((len(rows), *leaf.shape[1:]), leaf.dtype)
        for block, at, of_block in parts:
            out[at] = block.leaves[number].take(of_block, axis=0)
        leaves.append(out)
    return Block(first.structure, leaves, label)


def _gather_items(blocks: Sequence[Rows], selection: Selection) -> list[Leaves]:
    rows = selection.rows.tolist() if isinstance(selection.rows, np.ndarray) else selection.rows
    if selection.which is None:
        return [blocks[0].item(row) for row in rows]
    return [blocks[place].item(row) for place, row in zip(selection.which.tolist(), rows, strict=True)]


def _stacked(structure: Any, items: list[Leaves], inner: tuple[int, ...], label: str) -> Leaves:
    leaves = stack(structure, items, label)
    return tuple(leaf.reshape(-1, *inner, *leaf.shape[1:]) for leaf in leaves) if inner else leaves


def _check_alike(first: Block, other: Block) -> None:
    for path, a, b in zip(first.structure.paths, first.leaves, other.leaves, strict=True):
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise StackError(
                f"batch: elements do not stack, leaf {path or '(the element)'} is {a.dtype}{list(a.shape[1:])} in "
                f"{first.label} and {b.dtype}{list(b.shape[1:])} in {other.label}"
            )


def _joined_label(blocks: Sequence[Rows]) -> str:
    labels = list(dict.fromkeys(block.label for block in blocks if block.label))
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
