"""Splits of small files grouped, so that one call reads several of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Block, Bundle, Rows, merge
from daskdist.core.failing.origin import JoinedOrigin, Origin, SelectedOrigins, Skipped
from daskdist.core.primitive import Split

# Rows are merged as they come up to this multiple of the setting split-bytes.
_TIMES_SPLIT: Final = 4


@dataclass(frozen=True)
class GroupSplits:
    """A function that returns grouped splits.

    Parameters
    ----------
    splits
        Returns the splits to group.
    most
        The largest number of splits in a group.
    place
        Returns the location of a file by its path; splits at different locations are not grouped. None if all may be.
    """

    splits: Callable[[], Sequence[Split]]
    most: int
    place: Callable[[str], Any] | None = None

    def __call__(self) -> Sequence[Split]:
        return self._joined

    @cached_property
    def _joined(self) -> GroupedSplits:
        return GroupedSplits(self.splits(), self.most, self.place)


class GroupedSplits(Sequence[Split]):
    """Groups of adjacent splits, each a split whose payload is a tuple; splits are listed only as far as needed.

    Parameters
    ----------
    splits
        The splits to group.
    most
        The largest number of splits in a group; the setting ``split-bytes`` limits their total size too.
    place
        As in `GroupSplits`.
    """

    def __init__(self, splits: Sequence[Split], most: int, place: Callable[[str], Any] | None = None) -> None:
        self._splits = splits
        self._most = most
        self._place_of = place
        self._most_bytes = in_bytes("split-bytes")
        self._found: list[Split] = []
        self._place = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        self._find(None)
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        self._find(index + 1 if isinstance(index, int) and index >= 0 else None)
        return self._found[index]

    def _find(self, number: int | None) -> None:
        with self._lock:
            while number is None or len(self._found) < number:
                parts: list[Split] = []
                num_bytes = 0
                while len(parts) < self._most:
                    try:
                        split = self._splits[self._place]
                    except IndexError:
                        break
                    num_bytes += split.num_bytes or 0
                    if parts and (num_bytes > self._most_bytes or self._are_apart(parts[-1], split)):
                        break
                    parts.append(split)
                    self._place += 1
                if not parts:
                    return
                self._found.append(_joined(parts))

    def _are_apart(self, split: Split, other: Split) -> bool:
        return self._place_of is not None and self._place_of(split.path) != self._place_of(other.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)


def _joined(parts: list[Split]) -> Split:
    first, rows, sizes = parts[0], [part.num_rows for part in parts], [part.num_bytes for part in parts]
    return Split(
        f"{first.label} to {parts[-1].label}" if len(parts) > 1 else first.label,
        tuple(parts),
        None if None in rows else sum(num_rows or 0 for num_rows in rows),
        None if None in sizes else sum(num_bytes or 0 for num_bytes in sizes),
        first.file,
        first.path,
    )


@dataclass(frozen=True)
class ReadGroup:
    """A function that reads the splits of a group in order.

    Parameters
    ----------
    function
        Reads a single split.
    """

    function: Callable[[Split], Rows]

    def __call__(self, split: Split) -> Rows:
        first, *rest = split.payload
        together = _MergedRows(self.function(first), (split.num_rows or 0) if rest else 0)
        for part in rest:
            together.add(self.function(part))
        rows = together.rows()
        rows.label = split.label
        return rows


class _MergedRows:
    """The rows of several splits merged into one block, if shapes and dtypes agree.

    Rows are copied to their final place as they come. The memory they came in is reused for the next split while it is
    in the processor's cache.

    Parameters
    ----------
    first
        The rows of the first split.
    num_rows
        The number of rows to allocate; with 0 the rows are concatenated at the end.
    """

    def __init__(self, first: Rows, num_rows: int) -> None:
        self._room = num_rows
        # The first block with rows; until one comes, the first block.
        self._like = first
        self._leaves: list[Any] = []
        self._num_rows = 0
        # The blocks from the first on that did not fit, in order.
        self._others: list[Rows] = []
        self._origins: list[Origin | SelectedOrigins | JoinedOrigin] = []
        self._counts: list[int] = []
        self._skipped: list[Skipped] = []
        self.add(first)

    def add(self, rows: Rows) -> None:
        """Add the rows of the next split."""
        self._skipped += rows.skipped
        if not len(rows):
            return
        if not len(self._like):
            self._like = rows
        if isinstance(rows, Block):
            self._origins.append(rows.origin)
            self._counts.append(len(rows))
            if not self._leaves and not self._others:
                self._make_room_for_all_like(rows)
            if self._fits(rows):
                stop = self._num_rows + len(rows)
                for target, leaf in zip(self._leaves, rows.leaves, strict=True):
                    target[self._num_rows : stop] = leaf
                self._num_rows = stop
                return
        self._others.append(rows)

    def _fits(self, rows: Block) -> bool:
        if self._others or not self._leaves or self._num_rows + len(rows) > self._room:
            return False
        return isinstance(self._like, Block) and self._like.is_like(rows)

    def _make_room_for_all_like(self, rows: Block) -> None:
        # The first block may be far larger than the others.
        num_bytes = rows.nbytes // len(rows) * self._room
        is_room = num_bytes <= _TIMES_SPLIT * in_bytes("split-bytes")
        if is_room and all(isinstance(leaf, np.ndarray) for leaf in rows.leaves):
            self._leaves = [pooled_empty((self._room, *leaf.shape[1:]), leaf.dtype) for leaf in rows.leaves]

    def rows(self) -> Block | Bundle:
        """Return the merged rows, in order."""
        like, parts = self._like, self._others
        if self._num_rows:
            leaves = [leaf[: self._num_rows] for leaf in self._leaves]
            blocks = [Block(like.structure, leaves, like.label)]
            if parts:
                # Rows of different shapes become a bundle, each in separate memory: keeping one keeps no other alive.
                blocks = [blocks[0].take([row]) for row in range(self._num_rows)]
            parts = [*blocks, *parts]
        rows = merge(parts, like)
        # The origins of rows in bundles are not known.
        if isinstance(rows, Block) and sum(self._counts) == len(rows):
            which = np.repeat(np.arange(len(self._counts)), self._counts)
            places = np.concatenate([np.arange(count) for count in self._counts])
            rows.origin = SelectedOrigins(self._origins, places, which)
        rows.skipped = tuple(self._skipped)
        return rows
