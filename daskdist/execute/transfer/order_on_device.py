"""Rows of a device in an order that it works out itself: nothing is made or sent for each row."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.selection.intervals import Index, RowIntervals
from daskdist.core.selection.lazy_shuffle import LazyPermutation
from daskdist.devices import Device

# Parts of an order that are worked out by a call each.
_FEW: Final = 64


def is_device_order(rows: Any) -> TypeGuard[LazyPermutation]:
    """Whether rows, as `Picks` has them, are for devices to work out: those of an order of many, in a few stretches."""
    return isinstance(rows, LazyPermutation) and rows.order.table is None and 1 <= len(rows.places.starts) <= _FEW


class OrderOnDevice:
    """Where in some columns of a device the rows are that stand at places of an order.

    Parameters
    ----------
    device
        The device.
    blocks
        The blocks that the order is of rows of.
    permuted
        The order.
    starts
        Of each block where in the columns its rows begin.
    """

    def __init__(
        self, device: Device, blocks: Sequence[Block], permuted: LazyPermutation, starts: Sequence[int]
    ) -> None:
        self._device = device
        self._blocks = [weakref.ref(block) for block in blocks]
        # The rows before they are put in order: of some stretches, where each begins and how far off the columns' rows
        # are; of just one, which may be of several blocks that lie there one after the other, how far; else each.
        self._bounds: Any = None
        self._shifts: Any = 0
        self._rows: Any = None
        rows, block_index = permuted.rows, permuted.block_index
        if isinstance(rows, range):
            self._shifts = starts[0] + rows.start
        elif isinstance(rows, RowIntervals):
            shifts = rows.starts - rows.bounds[:-1] + np.array(starts)[rows.block_index]
            is_first = np.append(True, np.diff(shifts) != 0)
            if is_first.sum() == 1:
                self._shifts = int(shifts[0])
            else:
                self._bounds, self._shifts = self._there(rows.bounds[:-1][is_first]), self._there(shifts[is_first])
        else:
            self._rows = self._there(rows + np.array(starts)[0 if block_index is None else block_index])

    def _there(self, numbers: Index) -> Any:
        return self._device.put(np.ascontiguousarray(numbers, np.int64))

    def is_of(self, blocks: Sequence[Rows]) -> bool:
        """Whether it is of rows of these blocks."""
        return len(blocks) == len(self._blocks) and all(
            ref() is block for ref, block in zip(self._blocks, blocks, strict=True)
        )

    def rows(self, permuted: LazyPermutation) -> Any:
        """The numbers of the columns' rows of a part of the order: an array of the device."""
        device = self._device
        parts = [device.permuted(permuted.order, start, stop) for start, stop in permuted.parts]
        places = parts[0] if len(parts) == 1 else device.namespace.concat(parts)
        if self._rows is not None:
            return device.namespace.take(self._rows, places, axis=0)
        if self._bounds is None:
            return places + self._shifts if self._shifts else places
        stretch = device.namespace.searchsorted(self._bounds, places, side="right") - 1
        return places + device.namespace.take(self._shifts, stretch, axis=0)
