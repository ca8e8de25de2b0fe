"""Permutations computed on a device: no row numbers are computed on the host or sent."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.lazy_shuffle import LazyPermutation
from daskdist.core.selection.numbered_rows import NumberedRows
from daskdist.devices import Device

# The most intervals of a permutation to compute on a device, each by a call of its own.
_MOST_INTERVALS: Final = 64


def is_device_order(rows: Any) -> TypeGuard[LazyPermutation]:
    """Return whether the rows of `Picks` are to be computed on devices: few intervals of a large permutation."""
    if not isinstance(rows, LazyPermutation) or rows.order.table is not None:
        return False
    return 1 <= len(rows.places.starts) <= _MOST_INTERVALS


class OrderOnDevice:
    """A map from places of a permutation to row numbers in columns on a device.

    Parameters
    ----------
    device
        The device.
    blocks
        The blocks whose rows are permuted.
    permuted
        The permutation.
    starts
        For each block the row of the columns at which its rows begin.
    """

    def __init__(
        self, device: Device, blocks: Sequence[Block], permuted: LazyPermutation, starts: Sequence[int]
    ) -> None:
        self._device = device
        self._blocks = [weakref.ref(block) for block in blocks]
        # The row numbers before permuting, in one of three forms: intervals, with the start of each and its offset to
        # the rows of the columns; a single offset, if all blocks are adjacent in the columns; or one number per row.
        self._bounds: Any = None
        self._shifts: Any = 0
        self._rows: Any = None
        rows, block_index = permuted.rows, permuted.block_index
        if isinstance(rows, NumberedRows):
            rows, block_index = rows.locate(slice(None))
        if isinstance(rows, range):
            self._shifts = starts[0] + rows.start
        elif isinstance(rows, RowIntervals):
            shifts = rows.starts - rows.bounds[:-1] + np.array(starts)[rows.block_index]
            is_first = np.append(True, np.diff(shifts) != 0)
            if is_first.sum() == 1:
                self._shifts = int(shifts[0])
            else:
                self._bounds, self._shifts = self._put(rows.bounds[:-1][is_first]), self._put(shifts[is_first])
        else:
            self._rows = self._put(rows + np.array(starts)[0 if block_index is None else block_index])

    def _put(self, numbers: Index) -> Any:
        return self._device.put(np.ascontiguousarray(numbers, np.int64))

    def is_of(self, blocks: Sequence[Rows]) -> bool:
        """Return whether this is a permutation of the rows of exactly these blocks."""
        return len(blocks) == len(self._blocks) and all(
            ref() is block for ref, block in zip(self._blocks, blocks, strict=True)
        )

    def rows(self, permuted: LazyPermutation) -> Any:
        """Return the row numbers in the columns for a part of the permutation, as an array of the device."""
        device = self._device
        parts = [device.permuted(permuted.order, start, stop) for start, stop in permuted.parts]
        places = parts[0] if len(parts) == 1 else device.namespace.concat(parts)
        if self._rows is not None:
            return device.namespace.take(self._rows, places, axis=0)
        if self._bounds is None:
            return places + self._shifts if self._shifts else places
        interval = device.namespace.searchsorted(self._bounds, places, side="right") - 1
        return places + device.namespace.take(self._shifts, interval, axis=0)
