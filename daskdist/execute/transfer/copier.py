"""Copies of some steps to the devices of replicas, in streams of their own."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Final

import numpy as np

from daskdist.devices import Device, DeviceStream, Event, name_of, named, stream_of
from daskdist.errors import DeviceMemoryError
from daskdist.execute.stream.gather import Empty
from daskdist.execute.transfer.copy_stats import Times
from daskdist.execute.transfer.deferred_release import DeferredRelease
from daskdist.execute.transfer.layout import CopyLayout, PinnedRing, PlacedLeaf

# Streams of consumers that the copies to a device mind.
_MOST_STREAMS: Final = 8
# Less than this is not worth pinned memory of its own: it is packed with other leaves.
_LEAST_PINNED_BYTES: Final = 2**16
_making: Final = RLock()


def pinned_empty(device: Device) -> Empty:
    """As `numpy.empty`, in memory from which a device copies without another copy on the host."""

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if num_bytes < _LEAST_PINNED_BYTES or device.lacks(dtype):
            return np.empty(shape, dtype)
        return device.pinned(num_bytes).view(dtype).reshape(shape)

    return empty


class Channel:
    """What all copies to a device share in this process: the stream they are in, and those they may not overtake."""

    def __init__(self, device: Device) -> None:
        self.stream = device.stream()
        # Replaced as a whole, never changed: several threads read it. The first stays.
        self.consumers: tuple[DeviceStream, ...] = (stream_of(device),)
        # Streams that write to memory before consumers have it, and after they had it.
        self._lenders: tuple[DeviceStream, ...] = ()
        # What somebody had whose stream is not known.
        self._holding: DeferredRelease | None = None
        # None is lost where two threads add theirs.
        self._turn = RLock()

    def mind(self, stream: DeviceStream) -> None:
        """Have copies wait for a stream in which somebody computes with what was copied."""
        if len(self.consumers) > 1 and self.consumers[-1] == stream:
            return
        with self._turn:
            first, *others = self.consumers
            others = [each for each in others if each != stream]
            while len(others) > _MOST_STREAMS - 2:
                # Forgotten, but for what it has been given so far.
                over = others.pop(0).record()
                for each in self._lenders:
                    each.wait(over)
            self.consumers = (first, *others, stream)

    def add_unknown_consumers(self, wait: Callable[[], None]) -> None:
        """Have copies not write to what somebody computes with whose stream is not known.

        ``wait``, called in a thread of its own, waits until all that they have been given by then is done.
        """
        if self._holding is None:
            with self._turn:
                self._holding = self._holding or DeferredRelease(wait)

    def wait_for_unknown_consumers(self) -> None:
        """Wait until they are done with what was let go of."""
        if self._holding is not None:
            self._holding.await_room(0)

    def lend(self, device: Device, stream: DeviceStream, num_bytes: int) -> Any:
        """New bytes for consumers, which a stream writes to; raises what the device does where it has no room.

        What the host has let go of can be had again at once, though a kernel that reads it may not have run yet: memory
        that is allocated in a stream goes back to that stream, whoever computes with it. So when consumers let go of
        it, that stream waits for what they have been given to do by then. Not for what they are given later, such as
        the step that is computed while the one after the next is copied.
        """
        if stream not in self._lenders:
            with self._turn:
                self._lenders = (*self._lenders, stream)
        if self._holding is not None:
            self._holding.await_room()
        with device.using(stream):
            return device.lend(num_bytes, functools.partial(self._follow, stream))

    def _follow(self, stream: DeviceStream, memory: Any) -> None:
        for each in self.consumers:
            stream.wait(each.record())
        if self._holding is not None:
            self._holding.hold(memory)


def channel_of(name: str) -> Channel:
    """The channel of a device, by its name."""
    # Of two threads that are the first to ask, neither may have one of its own.
    with _making:
        return _channel_of(name)


@functools.lru_cache(maxsize=256)
def _channel_of(name: str) -> Channel:
    return Channel(named(name))


class UnitLifetime:
    """Whether anybody still has a view of a unit, as far as the views that were cut tell."""

    def __init__(self, alive: set[UnitLifetime]) -> None:
        self._alive = alive
        # By their ids: a reference to what cannot be hashed cannot be hashed either.
        self._refs: dict[int, Any] = {}
        alive.add(self)

    def add(self, view: Any) -> None:
        """Note a view."""
        ref = weakref.ref(view, self._gone)
        self._refs[id(ref)] = ref

    def _gone(self, ref: Any) -> None:
        self._refs.pop(id(ref), None)
        if not self._refs:
            self._alive.discard(self)


class ReplicaPart:
    """One replica's part of a unit: on its device, or as it is where that is the host."""

    def __init__(self, steps: list[Any], device: Device | None = None, life: UnitLifetime | None = None) -> None:
        self.steps = steps
        self.num_bytes = 0
        self._device = device
        self._life = life
        self._buffer: Any = None
        self._begun: Event | None = None
        self._over: Event | None = None
        self._is_over = False
        if life is not None:
            life.add(self)

    def hold(self, buffer: Any, num_bytes: int, begun: Event, over: Event) -> None:
        """Note where it is copied to, and the moments between which that is done."""
        self._buffer, self.num_bytes, self._begun, self._over = buffer, num_bytes, begun, over

    def leaves(self, number: int) -> Any:
        """The leaves of a step; whoever computes with them waits on the device until they are there."""
        device, over = self._device, self._over
        if device is None or over is None:
            return self.steps[number]
        channel = channel_of(name_of(device))
        current = device.current_stream()
        channel.mind(current)
        self._is_over = self._is_over or over.is_over
        if not self._is_over:
            for stream in (channel.consumers[0], current):
                stream.wait(over)
        return [self._cut(leaf) if type(leaf) is PlacedLeaf else leaf for leaf in self.steps[number]]

    def _cut(self, leaf: PlacedLeaf) -> Any:
        view = self._device.view(self._buffer, leaf.offset, leaf.shape, leaf.dtype)  # type: ignore[union-attr]
        self._life.add(view)  # type: ignore[union-attr]
        return view

    def ask(self, events: list[Event]) -> Times:
        """What tells its bytes, how long copying them took, and how long of that somebody waited; None until then."""
        begun, over, num_bytes = self._begun, self._over, self.num_bytes

        def times() -> tuple[int, float, float] | None:
            if begun is None or over is None or not all(each.is_over for each in (over, *events)):
                return None
            copy_s = over.seconds_since(begun)
            waited_s = min((over.seconds_since(each) for each in events), default=0.0)
            return num_bytes, copy_s, min(max(waited_s, 0.0), copy_s)

        return times


class CopyUnit:
    """Some consecutive steps, copied together.

    Parameters
    ----------
    parts
        Of each replica.
    num_steps
        How many they are.
    num_bytes
        What the largest part takes, with what was on its device before.
    """

    def __init__(self, parts: list[ReplicaPart], num_steps: int, num_bytes: int) -> None:
        self.parts = parts
        self.num_steps = num_steps
        self.num_bytes = num_bytes
        self.num_handed_out = 0

    def next(self) -> list[Any]:
        """The leaves of the next step, for each replica."""
        number = self.num_handed_out
        self.num_handed_out += 1
        return [part.leaves(number) for part in self.parts]


class NoRoomError(Exception):
    """A device has no room for a unit."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        super().__init__(name_of(device))
        self.device = device
        self.num_bytes = num_bytes

    def as_user_error(self) -> DeviceMemoryError:
        """The error as users get it."""
        device = self.device
        free_bytes, all_bytes = device.memory_info()
        return DeviceMemoryError(
            f"{name_of(device)} has no room for the next step: it takes {self.num_bytes} bytes, of {all_bytes} there "
            f"are {free_bytes} free, and this process holds {device.held_bytes()}, with nothing copied ahead any more. "
            "Make batches smaller, or keep fewer of them"
        )


class Copier:
    """Copies parts of units to one device."""

    def __init__(self, device: Device, num_slots: int, slot_bytes: int) -> None:
        self.device = device
        self._channel = channel_of(name_of(device))
        self._slots = PinnedRing(device, num_slots, slot_bytes)
        self._num_slots = num_slots
        # What is copied from where it lies stays as it is until that is done; as many as slots.
        self._sources: deque[tuple[Event, Any]] = deque()

    def come(self) -> list[Event]:
        """Note that the consumer is here, in each stream in which it may compute."""
        current = self.device.current_stream()
        self._channel.mind(current)
        return [stream.record() for stream in (self._channel.consumers[0], current)]

    def buffer(self, num_bytes: int) -> Any:
        """New memory of the device; raises `NoRoomError`."""
        device, channel = self.device, self._channel
        with contextlib.suppress(device.out_of_memory):
            return channel.lend(device, channel.stream, num_bytes)
        channel.wait_for_unknown_consumers()
        device.free_unused()
        try:
            return channel.lend(device, channel.stream, num_bytes)
        except device.out_of_memory:
            raise NoRoomError(device, num_bytes) from None

    def copy(self, layout: CopyLayout, buffer: Any, part: ReplicaPart, threads: Callable[[], tuple[Any, int]]) -> None:
        """Begin to copy what a layout has to a buffer."""
        device, stream = self.device, self._channel.stream
        while self._sources and (self._sources[0][0].is_over or len(self._sources) >= self._num_slots):
            self._sources.popleft()[0].synchronize()
        slot = None
        if layout.packed_bytes:
            slot = self._slots.take(layout.packed_bytes)
            layout.pack(slot.memory, threads)
        with device.using(stream):
            begun = stream.record()
            try:
                if slot is not None:
                    target = device.view(buffer, 0, (layout.packed_bytes,), np.uint8)
                    device.copy(slot.memory[: layout.packed_bytes], target, stream)
                for piece in layout.direct:
                    device.copy(piece.memory, device.view(buffer, piece.offset, (piece.num_bytes,), np.uint8), stream)
            finally:
                # Of what has been begun the host's memory is in use until then, whatever came after it.
                over = stream.record()
                if slot is not None:
                    slot.event = over
                if layout.direct:
                    self._sources.append((over, layout.direct))
        part.hold(buffer, layout.num_bytes, begun, over)

    def close(self) -> None:
        """Give back the host's memory, once nothing is copied from it any more."""
        self._slots.close()
        while self._sources:
            self._sources.popleft()[0].synchronize()
