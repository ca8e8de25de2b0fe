"""Uploads of whole blocks to a device."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np

from daskdist.devices import Device, DeviceStream, Event, device_of
from daskdist.execute.transfer.layout import PinnedSlot
from daskdist.tables.device_column import DeviceColumn
from daskdist.tables.memory_copy import copy_memory

# Columns of a bundle or segment share one allocation; each begins at a multiple of this.
ALIGNED_BYTES: Final = 256
# Blocks are uploaded through slots of pinned memory: one is filled while others are copied from.
_SLOT_BYTES: Final = 4 * 2**20
_NUM_SLOTS: Final = 4


class Uploads:
    """Copies to a device in a stream: from the host through pinned memory, and from other memory of devices."""

    def __init__(self, device: Device, stream: DeviceStream) -> None:
        self._device = device
        self._stream = stream
        self._slots = [PinnedSlot() for _ in range(_NUM_SLOTS)]
        self._slot = self._used = 0
        # Arrays that are copied directly are kept until the copy is over.
        self._sources: deque[tuple[Event, Any]] = deque()

    def copy(self, array: Any, buffer: Any, offset: int) -> None:
        """Copy a host array, which must not change, to a device buffer at ``offset``."""
        device, data = self._device, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._drop_sources()
        if data.nbytes and device.is_pinned(data):
            device.copy(data, device.view(buffer, offset, data.shape, np.uint8), self._stream)
            self._sources.append((self._stream.record(), data))
            return
        done = 0
        while done < len(data):
            slot = self._slots[self._slot]
            if self._used == _SLOT_BYTES:
                slot.release(self._stream.record())
                self._slot, self._used = (self._slot + 1) % len(self._slots), 0
                slot = self._slots[self._slot]
                slot.take()
            if slot.memory is None:
                slot.memory = device.pinned(_SLOT_BYTES, is_pooled=False)
            number = min(len(data) - done, _SLOT_BYTES - self._used)
            pinned = slot.memory[self._used : self._used + number]
            copy_memory(data[done : done + number], pinned)
            device.copy(pinned, device.view(buffer, offset + done, (number,), np.uint8), self._stream)
            done += number
            self._used = min(-(-(self._used + number) // ALIGNED_BYTES) * ALIGNED_BYTES, _SLOT_BYTES)

    def copy_on_device(self, column: DeviceColumn, target: Any) -> None:
        """Copy a column on a device to an array of this device."""
        array = column.array
        self._drop_sources()
        if device_of(array) == self._device:
            self._stream.wait(column.ready)
        else:
            column.ready.synchronize()
            array = self._device.put(array)
        target[...] = array
        # Otherwise its memory could be allocated again, and written in another stream, before it is read.
        self._sources.append((self._stream.record(), array))

    def _drop_sources(self) -> None:
        while self._sources and self._sources[0][0].is_over:
            self._sources.popleft()
