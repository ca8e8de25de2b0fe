"""Steps on their way to a device: what of them is copied, from where, and where on the device it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.devices import Device, Event, dtype_of, is_on_device

MIB: Final = 2**20
# What is packed begins at multiples of so many bytes, as what a device allocates does.
_ALIGNED_BYTES: Final = 256
# What lies one after the other on the host is copied as one, if each part of it begins at a multiple of so many:
# devices read up to 16 bytes at a time.
_WITHIN_BYTES: Final = 16
# To begin a copy of its own for less takes longer than to pack it.
_DIRECT_BYTES: Final = 2**14
# One thread copies some 10 GB/s, a device five times as many.
_LARGE_BYTES: Final = 4 * MIB


class PlacedLeaf(NamedTuple):
    """Where in a buffer of bytes a leaf goes, and what it is."""

    offset: int
    shape: tuple[int, ...]
    dtype: Any


@dataclass(slots=True)
class _Contiguous:
    # Leaves that lie one after the other in the memory of one array; or one leaf, wherever it lies.
    first: Any
    num_bytes: int
    # The array in whose memory they lie, and where there the next one would begin; None where none can follow.
    base: Any
    stop: int
    # Of each: its step, its number there, and how many bytes of the run are before it.
    members: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are to be copied as they lie."""
        return bool(self.first.flags.c_contiguous and self.first.dtype.isnative)

    @property
    def memory(self) -> Any:
        """What is copied: bytes, or where those are not as they have to be, the leaf."""
        if not self.is_plain:
            return self.first
        if len(self.members) == 1:
            return self.first.reshape(-1).view(np.uint8)
        stop = self.stop - _address(self.base)
        return self.base.reshape(-1).view(np.uint8)[stop - self.num_bytes : stop]


class MemoryPiece(NamedTuple):
    """Memory of the host, and where on the device it goes."""

    memory: Any
    offset: int
    num_bytes: int


@dataclass(slots=True)
class CopyLayout:
    """One replica's part of some steps in one buffer.

    Parameters
    ----------
    steps
        Of each step the leaves: where they are `PlacedLeaf`, or as they are where they stay on the host.
    packed
        What goes through memory that is packed, which is the beginning of the buffer.
    packed_bytes
        How much that is.
    direct
        What is copied to the device from where it lies.
    num_bytes
        The size of the buffer.
    """

    steps: list[list[Any]]
    packed: list[MemoryPiece]
    packed_bytes: int
    direct: list[MemoryPiece]
    num_bytes: int

    def pack(self, memory: Any, threads: Callable[[], tuple[Executor, int]]) -> None:
        """Write what is packed; large pieces by several threads, of which ``threads`` gives a pool and the number."""
        for piece in self.packed:
            target = memory[piece.offset : piece.offset + piece.num_bytes]
            source = piece.memory
            if source.dtype != np.uint8 or source.ndim != 1:
                target = target.view(source.dtype.newbyteorder("=")).reshape(source.shape)
            if piece.num_bytes < _LARGE_BYTES or len(source) == 1:
                np.copyto(target, source)
                continue
            pool, number = threads()
            num_rows = -(-len(source) // number)
            stretches = [slice(start, start + num_rows) for start in range(0, len(source), num_rows)]
            # NumPy lets other threads run while it copies.
            list(pool.map(np.copyto, [target[each] for each in stretches], [source[each] for each in stretches]))


def is_copied(device: Device, leaf: Any) -> bool:
    """Whether a leaf goes to a device: numbers that it has, and that are not there yet."""
    return isinstance(leaf, (np.ndarray, np.generic)) and not device.lacks(leaf.dtype)


def copied_bytes(device: Device, leaves: Sequence[Any]) -> int:
    """Bytes of a step's leaves that go to a device."""
    return sum(leaf.nbytes for leaf in leaves if is_copied(device, leaf))


def bytes_of(leaves: Sequence[Any]) -> int:
    """Bytes of a step's leaves, wherever they are and go: also those that are on a device already take its memory."""
    return sum(map(_bytes_of, leaves))


def _bytes_of(leaf: Any) -> int:
    if type(leaf) is np.ndarray or hasattr(leaf, "nbytes"):
        return int(leaf.nbytes)
    # The array API has none.
    return math.prod(leaf.shape) * int(dtype_of(leaf).itemsize) if is_on_device(leaf) else 0


def layout_of(device: Device, steps: Sequence[Sequence[Any]]) -> CopyLayout:
    """Where the leaves of some steps go."""
    runs = _runs_of(device, steps)
    packed: list[_Contiguous] = []
    direct: list[_Contiguous] = []
    for run in runs:
        is_direct = run.num_bytes >= _DIRECT_BYTES and run.is_plain and device.is_pinned(run.first)
        (direct if is_direct else packed).append(run)
    found = CopyLayout([list(step) for step in steps], [], 0, [], 0)
    for is_direct, part in ((False, packed), (True, direct)):
        pieces = found.direct if is_direct else found.packed
        for run in part:
            for step, number, before in run.members:
                leaf = steps[step][number]
                found.steps[step][number] = PlacedLeaf(
                    found.num_bytes + before, leaf.shape, leaf.dtype.newbyteorder("=")
                )
            if run.num_bytes:
                pieces.append(MemoryPiece(run.memory, found.num_bytes, run.num_bytes))
            found.num_bytes += -(-run.num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if not is_direct:
            found.packed_bytes = found.num_bytes
    return found


def _runs_of(device: Device, steps: Sequence[Sequence[Any]]) -> list[_Contiguous]:
    # Leaf by leaf: the chunks that one bundle was cut into lie one after the other.
    runs: list[_Contiguous] = []
    for number in range(len(steps[0])):
        run: _Contiguous | None = None
        for place, step in enumerate(steps):
            leaf = step[number]
            if run is not None and run.base is not None and getattr(leaf, "base", None) is run.base:
                # Much of what there is comes so, and is not looked at closely.
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
    """Pinned memory to copy from.

    Parameters
    ----------
    memory
        An array of bytes.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        # When the last copy from it is over.
        self.event: Event | None = None

    @property
    def is_free(self) -> bool:
        """Whether it can be written to."""
        return self.event is None or self.event.is_over

    def wait(self) -> None:
        """Wait until it can be written to."""
        if self.event is not None:
            self.event.synchronize()


class PinnedRing:
    """A ring of slots, of which one is written to while others are copied from.

    Parameters
    ----------
    device
        Copies from them.
    most
        How many there may be.
    least_bytes
        The least that each has, as units grow from one small step.
    """

    def __init__(self, device: Device, most: int, least_bytes: int) -> None:
        self._device = device
        self._most = most
        self._least_bytes = least_bytes
        self._slots: list[PinnedSlot] = []

    def take(self, num_bytes: int) -> PinnedSlot:
        """One of so many bytes at the least, which nothing is copied from any more."""
        slots = self._slots
        found = next((slot for slot in slots if slot.is_free), None)
        if found is None and len(slots) < self._most:
            found = PinnedSlot(self._new(num_bytes))
        elif found is None:
            found = slots[0]
        # Also before its memory is given back: who gets that writes to it.
        found.wait()
        if len(found.memory) < num_bytes:
            found.memory = None
            found.memory = self._new(num_bytes)
        if found in slots:
            slots.remove(found)
        slots.append(found)
        return found

    def close(self) -> None:
        """Give them back, once nothing is copied from them any more."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.wait()

    def _new(self, num_bytes: int) -> Any:
        return self._device.pinned(-(-max(num_bytes, self._least_bytes) // MIB) * MIB)
