"""The layout of steps in a device buffer: which arrays are copied, from where, and to which offsets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.devices import Device, Event, dtype_of, is_on_device
from daskdist.tables.memory_copy import copy_memory

MIB: Final = 2**20
# Pieces begin at multiples of this many bytes, as do allocations of a device.
_ALIGNED_BYTES: Final = 256
# Adjacent arrays on the host are copied together if each begins at a multiple of this many bytes, because devices read
# up to 16 bytes at a time.
_WITHIN_BYTES: Final = 16
# Arrays smaller than this are packed: starting a copy for each would take longer.
_DIRECT_BYTES: Final = 2**14
# Smaller arrays are not made pinned memory themselves: they may share pages with others.
_LEAST_LOCKED_BYTES: Final = 32 * MIB
# Steps are packed in spans of this size, and each is copied to the device once it is packed. Starting a copy of a span
# takes as long as packing some megabytes.
SPAN_BYTES: Final = 16 * MIB
# Steps are copied together, up to these limits: starting a copy takes as long as packing some megabytes.
UNIT_BYTES: Final = SPAN_BYTES
MOST_UNIT_STEPS: Final = 64


class PlacedLeaf(NamedTuple):
    """The place of a leaf in a buffer of bytes, and its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: Any


@dataclass(slots=True)
class _Contiguous:
    # Leaves that are adjacent in the memory of one array, or a single leaf.
    first: Any
    num_bytes: int
    # The array whose memory they share, None if no leaf can follow; and the address at which the next would begin.
    base: Any
    stop: int
    # For each leaf: its step, its number in the step, and its offset in bytes.
    members: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """True if the bytes can be copied unchanged."""
        return bool(self.first.flags.c_contiguous and self.first.dtype.isnative)

    @property
    def memory(self) -> Any:
        """The array to copy: bytes, or the leaf itself if it has to be converted."""
        if not self.is_plain:
            return self.first
        if len(self.members) == 1:
            return self.first.reshape(-1).view(np.uint8)
        stop = self.stop - _address(self.base)
        return self.base.reshape(-1).view(np.uint8)[stop - self.num_bytes : stop]


class MemoryPiece(NamedTuple):
    """Memory of the host, and its place in the device's buffer."""

    memory: Any
    offset: int
    num_bytes: int


@dataclass(slots=True)
class BufferLayout:
    """The layout of one replica's part of some steps in one buffer.

    Parameters
    ----------
    steps
        For each step its leaves: a `PlacedLeaf` for each that is copied, or the leaf itself if it stays on the host.
    packed
        The pieces that are first packed in pinned memory; they form the beginning of the buffer.
    direct
        The pieces that are copied to the device directly.
    num_bytes
        The size of the buffer.
    """

    steps: list[list[Any]]
    packed: list[MemoryPiece]
    direct: list[MemoryPiece]
    num_bytes: int

    def spans(self) -> list[PackedSpan]:
        """Return the packed pieces in spans of about the size of a slot, which are packed and copied one by one."""
        spans: list[PackedSpan] = []
        for piece in self.packed:
            for offset, source in _cut(piece.memory, piece.offset):
                stop = offset + source.nbytes
                if not spans or stop - spans[-1].offset > SPAN_BYTES:
                    spans.append(PackedSpan(offset, 0, []))
                span = spans[-1]
                span.pieces.append((offset - span.offset, source))
                span.num_bytes = stop - span.offset
        return spans


@dataclass(slots=True)
class PackedSpan:
    """Part of a buffer that is packed in a slot of pinned memory and then copied.

    Parameters
    ----------
    offset, num_bytes
        Its place in the buffer.
    pieces
        For each array that is packed, its offset in the span, and the array.
    """

    offset: int
    num_bytes: int
    pieces: list[tuple[int, Any]]

    def pack(self, memory: Any) -> None:
        """Copy the arrays to the beginning of pinned memory. The GIL is released meanwhile."""
        for offset, source in self.pieces:
            target = memory[offset : offset + source.nbytes]
            if source.dtype == np.uint8 and source.ndim == 1 and source.flags.c_contiguous:
                copy_memory(source, target)
                continue
            np.copyto(target.view(source.dtype.newbyteorder("=")).reshape(source.shape), source)


def _cut(source: Any, offset: int) -> Iterator[tuple[int, Any]]:
    # Yield parts of an array that are no larger than a span, and their offsets in the buffer.
    if source.nbytes <= SPAN_BYTES:
        yield offset, source
        return
    row_bytes = source.nbytes // len(source)
    num_rows = SPAN_BYTES // row_bytes
    for start in range(0, len(source), num_rows or 1):
        at = offset + start * row_bytes
        if num_rows:
            yield at, source[start : start + num_rows]
        else:
            yield from _cut(source[start], at)


def is_copied(device: Device, leaf: Any) -> bool:
    """Return whether a leaf is copied to a device: a host array of a dtype that the device supports."""
    return isinstance(leaf, (np.ndarray, np.generic)) and not device.lacks(leaf.dtype)


def copied_bytes(device: Device, leaves: Sequence[Any]) -> int:
    """Return the bytes of a step's leaves that are copied to a device."""
    return sum(leaf.nbytes for leaf in leaves if is_copied(device, leaf))


def bytes_of(leaves: Sequence[Any]) -> int:
    """Return the bytes of all leaves of a step; those already on a device count too, because they take its memory."""
    return sum(map(_bytes_of, leaves))


def _bytes_of(leaf: Any) -> int:
    if type(leaf) is np.ndarray or hasattr(leaf, "nbytes"):
        return int(leaf.nbytes)
    # The array API standard has no ``nbytes``.
    return math.prod(leaf.shape) * int(dtype_of(leaf).itemsize) if is_on_device(leaf) else 0


def layout_of(device: Device, steps: Sequence[Sequence[Any]], *, locks: bool = False) -> BufferLayout:
    """Return the layout of some steps; with ``locks``, large arrays that leaves are views of become pinned memory."""
    runs = _runs_of(device, steps)
    packed: list[_Contiguous] = []
    direct: list[_Contiguous] = []
    for run in runs:
        is_direct = run.num_bytes >= _DIRECT_BYTES and run.is_plain
        is_direct = is_direct and (device.is_pinned(run.first) or (locks and _is_locked(device, run.first)))
        (direct if is_direct else packed).append(run)
    layout = BufferLayout([list(step) for step in steps], [], [], 0)
    for part, pieces in ((packed, layout.packed), (direct, layout.direct)):
        for run in part:
            for step, number, before in run.members:
                leaf = steps[step][number]
                layout.steps[step][number] = PlacedLeaf(
                    layout.num_bytes + before, leaf.shape, leaf.dtype.newbyteorder("=")
                )
            if run.num_bytes:
                pieces.append(MemoryPiece(run.memory, layout.num_bytes, run.num_bytes))
            layout.num_bytes += -(-run.num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return layout


def _is_locked(device: Device, array: Any) -> bool:
    base = array.base
    return isinstance(base, np.ndarray) and base.nbytes >= _LEAST_LOCKED_BYTES and device.lock(base)


def _runs_of(device: Device, steps: Sequence[Sequence[Any]]) -> list[_Contiguous]:
    # Go through the steps for each leaf in turn: chunks that were cut from one bundle are adjacent in memory.
    runs: list[_Contiguous] = []
    for number in range(len(steps[0])):
        run: _Contiguous | None = None
        for place, step in enumerate(steps):
            leaf = step[number]
            if run is not None and run.base is not None and getattr(leaf, "base", None) is run.base:
                # Most leaves take this path, so it makes few checks.
                is_like = leaf.dtype == run.first.dtype and leaf.flags.c_contiguous
                if is_like and run.num_bytes % _WITHIN_BYTES == 0 and _address(leaf) == run.stop:
                    run.members.append((place, number, run.num_bytes))
                    run.num_bytes += leaf.nbytes
                    run.stop += leaf.nbytes
                    continue
            if not is_copied(device, leaf):
                run = None
                continue
            array = np.asarray(leaf)
            base = array.base if _can_be_followed(array) else None
            run = _Contiguous(array, array.nbytes, base, 0 if base is None else _address(array) + array.nbytes)
            run.members.append((place, number, 0))
            runs.append(run)
    return runs


def _can_be_followed(array: Any) -> bool:
    base, flags = array.base, array.flags
    is_plain = flags.c_contiguous and array.dtype.isnative and array.nbytes
    return bool(is_plain and isinstance(base, np.ndarray) and base.flags.c_contiguous and base.dtype.kind in "biufc")


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class PinnedSlot:
    """A slot of pinned memory to copy from."""

    def __init__(self) -> None:
        # Allocated by its users, at the first use.
        self.memory: Any = None
        # True from when it is taken until it is released.
        self.is_taken = True
        # The event at the end of the last copy from it.
        self._event: Event | None = None

    @property
    def is_free(self) -> bool:
        """True if it can be taken and written to."""
        if self.is_taken:
            return False
        if self._event is not None and self._event.is_over:
            self._event = None
        return self._event is None

    def take(self) -> None:
        """Take the slot, and wait until it can be written to."""
        self.is_taken = True
        self.wait()

    def release(self, event: Event | None = None) -> None:
        """Release the slot; it can be written to after an event, if one is given."""
        self.is_taken, self._event = False, event or self._event

    def wait(self) -> None:
        """Wait until the copies from it are over."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class PinnedRing:
    """A ring of slots, for any number of threads: some are written to while others are copied from."""

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._most = most
        self._slots: list[PinnedSlot] = []
        self._changed = Condition()

    def take(self, num_bytes: int) -> PinnedSlot:
        """Return a slot of at least this size, which the caller returns later; wait for one if necessary."""
        with self._changed:
            while (slot := self._oldest()) is None:
                self._changed.wait()
            slot.is_taken = True
        try:
            # Wait also before too small memory is released, because its next owner writes to it.
            slot.wait()
            if slot.memory is None or len(slot.memory) < num_bytes:
                slot.memory = None
                # The first units are small, and a slot that is too small later is allocated again.
                slot.memory = self._device.pinned(-(-num_bytes // MIB) * MIB, is_pooled=False)
        except BaseException:
            self.give_back(slot)
            raise
        return slot

    def give_back(self, slot: PinnedSlot, event: Event | None = None) -> None:
        """Return a slot to the ring; it is written to after an event, if one is given."""
        with self._changed:
            slot.release(event)
            self._changed.notify()

    def _oldest(self) -> PinnedSlot | None:
        slots = self._slots
        slot = next((slot for slot in slots if slot.is_free), None)
        if slot is None and len(slots) < self._most:
            slots.append(PinnedSlot())
            return slots[-1]
        if slot is None:
            slot = next((slot for slot in slots if not slot.is_taken), None)
        if slot is not None:
            slots.remove(slot)
            slots.append(slot)
        return slot
