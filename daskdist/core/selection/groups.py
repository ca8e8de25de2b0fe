"""Ungathered batches: groups of rows, each of which is one element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.rows import Selection, WindowSelection
from daskdist.core.selection.windows import BlockWindows, RowWindows
from daskdist.errors import StackError


class Groups:
    """Ungathered batches, each of which is one element.

    Parameters
    ----------
    flat
        The rows of all batches, in order.
    bounds
        The index in ``flat`` of the beginning of each batch, and of the end of the last, shape ``(num_batches + 1,)``.
    inners
        For each batch the shape of its elements in rows: ``(2,)`` for a batch of batches of 2. None if all elements
        are rows.
    """

    __slots__ = ("bounds", "flat", "inners")

    def __init__(self, flat: Selection, bounds: Index, inners: tuple[tuple[int, ...], ...] | None = None) -> None:
        self.flat = flat
        self.bounds = bounds
        self.inners = inners

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Index:
        """The number of elements of each batch."""
        num_rows = np.diff(self.bounds)
        return num_rows if self.inners is None else num_rows // np.array([prod(inner) for inner in self.inners])

    @property
    def element_bytes(self) -> float:
        """The bytes of the first batch, as far as they are known."""
        return self.flat.element_bytes * float(self.bounds[1] - self.bounds[0])

    def __getitem__(self, part: slice) -> Groups:
        start, stop, _ = part.indices(len(self))
        bounds = self.bounds[start : max(stop, start) + 1]
        inners = None if self.inners is None else self.inners[start:stop]
        return Groups(self.flat[bounds[0] : bounds[-1]], bounds - bounds[0], inners)

    def take(self, index: Index) -> Groups:
        starts, stops = self.bounds[index], self.bounds[index + 1]
        bounds = np.concatenate([[0], np.cumsum(stops - starts)])
        inners = None if self.inners is None else tuple(self.inners[i] for i in index.tolist())
        return Groups(self.flat.spans(starts, stops), bounds, inners)

    @staticmethod
    def concat(parts: Sequence[Groups]) -> Groups:
        offsets = np.cumsum([0, *(part.bounds[-1] for part in parts)])
        bounds = [part.bounds[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
        nested = [part.inners for part in parts if part.inners is not None]
        inners = tuple(inner for inners in nested for inner in inners) if nested else None
        return Groups(Selection.concat([part.flat for part in parts]), np.concatenate([*bounds, offsets[-1:]]), inners)

    def keep(self) -> None:
        """Stop counting its blocks as outstanding."""
        self.flat.keep()

    def stay(self) -> None:
        """Record that its blocks exist and stay."""
        self.flat.stay()

    def without_unused(self) -> Groups:
        # Empty batches need a block too, for shapes and dtypes.
        flat = self.flat.without_unused() if len(self.flat) else Selection(self.flat.blocks[:1], range(0))
        if flat is self.flat:
            return self
        return Groups(flat, self.bounds, self.inners)

    def group(self, bounds: Index) -> Groups:
        """Return batches of the batches between consecutive ``bounds``, which begin with 0.

        Raises
        ------
        StackError
            Batches in one batch differ in their number of rows.
        """
        stops = self.bounds[bounds]
        if self.inners is None and len(self) and (np.diff(bounds) > 0).all():
            row_counts = np.diff(self.bounds)
            if (row_counts == row_counts[0]).all():
                inners = ((int(row_counts[0]),),) * (len(bounds) - 1)
                return Groups(self.flat[: stops[-1]], stops, inners)
        lengths = self.lengths.tolist()
        shapes = [(length, *inner) for length, inner in zip(lengths, self.inners or [()] * len(self), strict=True)]
        inner_shapes = []
        for start, stop in pairwise(bounds.tolist()):
            distinct = set(shapes[start:stop])
            if len(distinct) > 1:
                sizes = ", ".join("x".join(map(str, shape)) for shape in sorted(distinct))
                raise StackError(
                    f"batch: batches of {sizes} rows do not stack; use drop_remainder=True on the inner batch"
                )
            inner_shapes.append(next(iter(distinct), ()))
        return Groups(self.flat[: stops[-1]], stops, tuple(inner_shapes))

    def ungroup(self) -> Selection | Groups:
        """Return the elements of the batches: rows, or for batches of batches, batches."""
        flat = self.flat[int(self.bounds[0]) : int(self.bounds[-1])]
        if self.inners is None:
            return flat
        sizes = np.array([prod(inner) for inner in self.inners])
        lengths = self.lengths
        bounds = np.concatenate([[0], np.cumsum(np.repeat(sizes, lengths))])
        inners = tuple(
            inner[1:] for inner, number in zip(self.inners, lengths.tolist(), strict=True) for _ in range(number)
        )
        return Groups(flat, bounds, inners if any(inners) else None)

    def cut(self, num_pieces: int) -> Groups:
        """Return each batch as ``num_pieces`` batches of equal size; the last ones may be shorter or empty."""
        lengths, starts = self.lengths[:, None], self.bounds[:-1, None]
        ends = np.minimum(np.arange(1, num_pieces + 1) * -(-lengths // num_pieces), lengths)
        inners = None
        if self.inners is not None:
            ends = ends * np.array([[prod(inner)] for inner in self.inners])
            inners = tuple(inner for inner in self.inners for _ in range(num_pieces))
        return Groups(self.flat, np.concatenate([[0], (starts + ends).ravel()]), inners)


class WindowGroups(Groups):
    """Windows of a block, each of which is one element."""

    __slots__ = ("ref", "windows")

    inners = None

    def __init__(self, ref: BlockRef, windows: BlockWindows) -> None:
        self.ref = ref
        self.windows = windows

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowGroups, (self.ref, self.windows)

    def __len__(self) -> int:
        return self.windows.number

    @property
    def flat(self) -> Selection:  # type: ignore[override]
        """The rows of all windows, in order."""
        windows = self.windows
        if windows.shift == windows.size or windows.number < 2:
            return Selection((self.ref,), range(windows.first, windows.first + windows.num_rows))
        return WindowSelection((self.ref,), RowWindows((windows,)))

    @property
    def bounds(self) -> Index:  # type: ignore[override]
        """The index in ``flat`` of the beginning of each window, and of the end of the last."""
        return self.windows.bounds

    @property
    def element_bytes(self) -> float:
        return self.ref.row_bytes * self.windows.size

    def __getitem__(self, part: slice) -> Groups:
        start, stop, _ = part.indices(len(self))
        return WindowGroups(self.ref, self.windows.part(start, stop))

    def take(self, index: Index) -> Groups:
        intervals = self.windows.take(index)
        return Groups(Selection.of((self.ref,), intervals), intervals.bounds)

    def without_unused(self) -> Groups:
        return self

    def group(self, bounds: Index) -> Groups:
        if not (np.diff(bounds) > 0).all():
            return super().group(bounds)
        stops = bounds * self.windows.size
        return Groups(self.flat[: stops[-1]], stops, ((self.windows.size,),) * (len(bounds) - 1))
