"""Splits of small files grouped, so that one call reads several of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.block import Block, Rows, merge
from daskdist.core.failing.origin import SelectedOrigins
from daskdist.core.failing.try_each import not_read
from daskdist.core.primitive import Split


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
        # Grouped anew if the files were listed anew.
        splits, grouped = self.splits(), self.__dict__.get("_grouped")
        if not isinstance(grouped, GroupedSplits) or grouped.splits is not splits:
            grouped = self.__dict__["_grouped"] = GroupedSplits(splits, self.most, self.place)
        return grouped


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
        self.splits = splits
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
                        split = self.splits[self._place]
                    except IndexError:
                        break
                    num_bytes += split.num_bytes or 0
                    if parts and (num_bytes > self._most_bytes or self._are_apart(parts[-1], split)):
                        break
                    parts.append(split)
                    self._place += 1
                if not parts:
                    return
                self._found.append(joined_split(parts))

    def _are_apart(self, split: Split, other: Split) -> bool:
        return self._place_of is not None and self._place_of(split.path) != self._place_of(other.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)


def joined_split(parts: Sequence[Split]) -> Split:
    """Return the split of a group, whose payload are its parts."""
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
    """A function that reads the splits of a group in order; one that cannot be read fails by itself."""

    function: Callable[[Split], Rows]

    def __call__(self, split: Split) -> Rows:
        parts: list[Rows] = []
        for part in split.payload:
            try:
                parts.append(self.function(part))
            except Exception as error:
                if len(split.payload) == 1:
                    raise
                parts.append(not_read(part, error))
        rows = merge(parts, parts[0])
        blocks = [part for part in parts if isinstance(part, Block)]
        if isinstance(rows, Block) and len(blocks) == len(parts):
            # The origins of rows in bundles are not known.
            counts = list(map(len, blocks))
            places = np.concatenate([np.arange(count) for count in counts])
            rows.origin = SelectedOrigins(
                [block.origin for block in blocks], places, np.repeat(range(len(blocks)), counts)
            )
        rows.label = split.label
        return rows
