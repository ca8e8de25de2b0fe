"""Copies of steps to the devices of replicas, in separate device streams."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.devices import Device, DeviceStream, Event, name_of, named, stream_of
from daskdist.devices.profiling import profiled
from daskdist.errors import ArgumentError, DeviceMemoryError
from daskdist.execute.stream.gather import Empty
from daskdist.execute.transfer.copy_stats import Times
from daskdist.execute.transfer.deferred_release import DeferredRelease
from daskdist.execute.transfer.layout import MIB, BufferLayout, PackedSpan, PinnedRing, PlacedLeaf

logger: Final = logging.getLogger("daskdist")

# While steps are copied ahead, this many buffers that consumers released, and this many bytes of them, are kept at most
# until the consumers' streams are done with them.
_MOST_RETURNING: Final = 2
_MOST_RETURNING_BYTES: Final = 256 * MIB
# The largest number of consumer streams that copies to a device are ordered after.
_MOST_STREAMS: Final = 8
# Smaller arrays are not allocated as pinned memory: they are packed with other leaves.
_LEAST_PINNED_BYTES: Final = 2**16
# Pinned memory to pack in, in spans: one is packed while others are copied from. It is kept, as its allocation takes as
# long as 24 copies.
_MOST_SLOTS: Final = 4


def pinned_empty(device: Device) -> Empty:
    """Return a function like `numpy.empty` that allocates pinned memory, which a device can copy from directly."""

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if num_bytes < _LEAST_PINNED_BYTES or device.lacks(dtype):
            return np.empty(shape, dtype)
        return device.pinned(num_bytes).view(dtype).reshape(shape)

    return empty


class _Returning(NamedTuple):
    # Memory, the stream that writes to it, and events after which consumers are done with it.
    num_bytes: int
    writer: DeviceStream
    memory: Any
    events: list[Event]


class Channel:
    """The state shared by all copies to a device in this process: their stream, and the streams they must wait for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream = device.stream()
        self.slots = PinnedRing(device, _MOST_SLOTS)
        # Replaced as a whole and never modified, because several threads read it. The first stream is never removed.
        self.consumers: tuple[DeviceStream, ...] = (stream_of(device),)
        # Streams that write to memory before and after consumers use it.
        self._writers: tuple[DeviceStream, ...] = ()
        # Memory released by consumers whose streams are not known.
        self.deferred_release: DeferredRelease | None = None
        # Memory released while a consumer's stream was captured, and the streams that write to it.
        self._kept: list[tuple[int, DeviceStream, Any]] = []
        # Memory that consumers released, which may still compute with it.
        self._returning: deque[_Returning] = deque()
        # The number of iterators that copy ahead, and the most buffers in ``_returning``.
        self._num_ahead = self._most_returning = 0
        # Held while a tuple is replaced, so that no addition by another thread is lost.
        self._lock = RLock()

    def add_consumer(self, stream: DeviceStream) -> None:
        """Make copies wait for a stream that computes with copied data."""
        if len(self.consumers) > 1 and self.consumers[-1] == stream:
            return
        with self._lock:
            first, *remaining = self.consumers
            remaining = [other for other in remaining if other != stream]
            while len(remaining) > _MOST_STREAMS - 2:
                # Drop the oldest stream: writers wait once for the work that it has so far.
                oldest = remaining.pop(0)
                for writer in self._writers:
                    self._order(writer, oldest)
            self.consumers = (first, *remaining, stream)

    def add_unknown_consumers(self, wait: Callable[[], None]) -> None:
        """Protect memory from copies while a framework whose streams are not known computes with it.

        ``wait`` is called in a separate thread, and waits until all work that is queued in the framework is done.
        """
        if self.deferred_release is None:
            with self._lock:
                self.deferred_release = self.deferred_release or DeferredRelease(wait)

    def wait_for_unknown_consumers(self) -> None:
        """Wait until consumers with unknown streams are done with all released memory."""
        if self.deferred_release is not None:
            self.deferred_release.await_room(0)

    def allocate(self, device: Device, stream: DeviceStream, num_bytes: int) -> Any:
        """Return new memory for consumers, which ``stream`` writes to; raises the device's error if it has no room.

        Memory that the host releases can be allocated again at once, although a kernel that reads it may not have run
        yet: it returns to the stream in which it was allocated, whichever stream uses it. So when consumers release it,
        that stream waits for the work queued in their streams by then. It does not wait for later work, such as the
        step that is computed while the one after the next is copied. While steps are copied ahead, some memory returns
        only once consumers are done with it, so that copies need not wait where the host is ahead of the device.
        """
        if stream not in self._writers:
            with self._lock:
                self._writers = (*self._writers, stream)
        if self.deferred_release is not None:
            self.deferred_release.await_room()
        if self._kept and not self._is_capturing():
            with self._lock:
                kept, self._kept = self._kept, []
            for each_bytes, writer, memory in kept:
                self._reuse(each_bytes, writer, memory)
        self._return()
        with device.using(stream, for_user=False):
            on_release = functools.partial(self._reuse, num_bytes, stream)
            try:
                return device.allocate(num_bytes, on_release)
            except device.out_of_memory:
                if not self._returning:
                    raise
            # From here on memory returns at once, as a failed allocation waits until the device is idle.
            self._most_returning = 0
            self._return()
            return device.allocate(num_bytes, on_release)

    def begin_ahead(self) -> None:
        """Note that an iterator begins to copy ahead."""
        with self._lock:
            self._num_ahead += 1
            self._most_returning = _MOST_RETURNING

    def end_ahead(self) -> None:
        """Note that an iterator has stopped copying."""
        with self._lock:
            self._num_ahead -= 1
            if not self._num_ahead:
                self._most_returning = 0
        self._return()

    def _return(self) -> None:
        # Return memory that consumers are done with, and the oldest of the rest if it is too much.
        while self._returning:
            try:
                first = self._returning.popleft()
            except IndexError:
                return
            others = list(self._returning)
            num_bytes = first.num_bytes + sum(other.num_bytes for other in others)
            may_stay = len(others) < self._most_returning and num_bytes <= _MOST_RETURNING_BYTES
            if may_stay and not all(event.is_over for event in first.events):
                self._returning.appendleft(first)
                return
            for event in first.events:
                first.writer.wait(event)
            del first

    def _reuse(self, num_bytes: int, stream: DeviceStream, memory: Any) -> None:
        if self._is_capturing():
            # An event of a stream that is captured can be waited for only within the graph.
            with self._lock:
                self._kept.append((num_bytes, stream, memory))
            return
        now = (self._now(consumer) for consumer in self.consumers if consumer != stream)
        events = [event for event in now if event is not None]
        self._returning.append(_Returning(num_bytes, stream, memory, events))
        self._return()
        if self.deferred_release is not None:
            self.deferred_release.hold(memory)

    def _is_capturing(self) -> bool:
        for consumer in self.consumers:
            try:
                if consumer.is_capturing:
                    return True
            except Exception:
                self._forget(consumer)
        return False

    def _order(self, writer: DeviceStream, consumer: DeviceStream) -> None:
        # Make a writer wait for the work that a consumer has so far.
        event = self._now(consumer)
        if event is not None:
            writer.wait(event)

    def _now(self, consumer: DeviceStream) -> Event | None:
        try:
            return consumer.record()
        except Exception:
            self._forget(consumer)
            return None

    def _forget(self, consumer: DeviceStream) -> None:
        # The library that owns a stream destroyed it; each library raises a different error for that.
        logger.warning("a stream of %s was destroyed while its memory was in use", name_of(self._device))
        self._device.synchronize()
        with self._lock:
            first, *remaining = self.consumers
            self.consumers = (first, *(other for other in remaining if other is not consumer))


# Name of a device -> its channel in this process.
_channels: Final[dict[str, Channel]] = {}


def channel_of(name: str) -> Channel:
    """Return the channel of a device, by its name."""
    channel = _channels.get(name)
    # Of two threads that ask first at the same time, both get the channel of one.
    return _channels.setdefault(name, Channel(named(name))) if channel is None else channel


class UnitLifetime:
    """The lifetime of a unit: it is over when no view of it is referenced any more."""

    def __init__(self, alive: set[UnitLifetime]) -> None:
        self._alive = alive
        # Keyed by id: a weak reference to an unhashable object is not hashable either.
        self._refs: dict[int, Any] = {}
        alive.add(self)

    def add(self, view: Any) -> None:
        """Track a view."""
        ref = weakref.ref(view, self._discard)
        self._refs[id(ref)] = ref

    def _discard(self, ref: Any) -> None:
        self._refs.pop(id(ref), None)
        if not self._refs:
            self._alive.discard(self)


class ReplicaPart:
    """One replica's part of a unit: on its device, or unchanged if that is the host."""

    def __init__(self, steps: list[Any], device: Device | None = None, lifetime: UnitLifetime | None = None) -> None:
        self.steps = steps
        self.num_bytes = 0
        self._device = device
        self._channel = None if device is None else channel_of(name_of(device))
        self._lifetime = lifetime
        self._buffer: Any = None
        self._start: Event | None = None
        self._end: Event | None = None
        # The streams that wait for the copy.
        self._ordered: list[DeviceStream] = []
        if lifetime is not None:
            lifetime.add(self)

    def hold(self, buffer: Any, num_bytes: int, start: Event, end: Event) -> None:
        """Record the buffer that it is copied to, and the events at the start and end of the copy."""
        self._buffer, self.num_bytes, self._start, self._end = buffer, num_bytes, start, end

    def leaves(self, number: int) -> Any:
        """Return the leaves of a step; the current stream and the replica's stream wait until they are copied."""
        channel, end = self._channel, self._end
        if channel is None or end is None:
            return self.steps[number]
        current = self._device.current_stream()  # type: ignore[union-attr]
        channel.add_consumer(current)
        for stream in _distinct(channel.consumers[0], current):
            # Wait also if the copy is over, so that tools that look for races find the streams ordered.
            if stream not in self._ordered:
                _check_not_captured(stream, self._device)
                stream.wait(end)
                self._ordered.append(stream)
        return [self._view(leaf) if type(leaf) is PlacedLeaf else leaf for leaf in self.steps[number]]

    def _view(self, leaf: PlacedLeaf) -> Any:
        view = self._device.view(self._buffer, leaf.offset, leaf.shape, leaf.dtype)  # type: ignore[union-attr]
        self._lifetime.add(view)  # type: ignore[union-attr]
        return view

    def times(self, arrivals: list[Event]) -> Times:
        """Return the `Times` of the copy, given the events recorded when the consumer arrived."""
        start, end, num_bytes = self._start, self._end, self.num_bytes

        def times() -> tuple[int, float, float] | None:
            if start is None or end is None or not all(event.is_over for event in (end, *arrivals)):
                return None
            copy_s = end.seconds_since(start)
            waited_s = min((end.seconds_since(arrival) for arrival in arrivals), default=0.0)
            return num_bytes, copy_s, min(max(waited_s, 0.0), copy_s)

        return times


class CopyUnit:
    """Consecutive steps that are copied together.

    Parameters
    ----------
    parts
        The part of each replica.
    num_steps
        The number of steps.
    num_bytes
        The size of the largest part, including leaves that were on its device before.
    """

    def __init__(self, parts: list[ReplicaPart], num_steps: int, num_bytes: int) -> None:
        self.parts = parts
        self.num_steps = num_steps
        self.num_bytes = num_bytes
        self.num_handed_out = 0

    def next(self) -> list[Any]:
        """Return the leaves of the next step, for each replica."""
        leaves = [part.leaves(self.num_handed_out) for part in self.parts]
        self.num_handed_out += 1
        return leaves


class NoRoomError(Exception):
    """A device has no room for a unit."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        super().__init__(name_of(device))
        self.device = device
        self.num_bytes = num_bytes

    def as_user_error(self) -> DeviceMemoryError:
        """Return the error that users see."""
        device = self.device
        free_bytes, all_bytes = device.memory_info()
        return DeviceMemoryError(
            f"{name_of(device)} has no room for the next step: it takes {self.num_bytes} bytes, and of {all_bytes} "
            f"bytes {free_bytes} are free. This process holds {device.held_bytes()}, with nothing copied ahead any "
            "more. Make batches smaller, or keep fewer of them"
        )


def _check_not_captured(stream: DeviceStream, device: Any) -> None:
    if stream.is_capturing:
        raise ArgumentError(
            f"a step was requested while the work on {name_of(device)} is captured as a graph; take the step before, "
            "and copy it to the arrays that the graph reads"
        )


def _distinct(first: DeviceStream, second: DeviceStream) -> tuple[DeviceStream, ...]:
    return (first,) if first == second else (first, second)


class Copier:
    """The copier of replicas' parts of units to one device."""

    def __init__(self, device: Device, num_sources: int) -> None:
        self.device = device
        self._channel = channel_of(name_of(device))
        self._most_sources = num_sources
        # Host memory that is copied directly is kept until the copy is over; of this many copies at most.
        self._sources: deque[tuple[Event, Any]] = deque()
        # The event at the end of the last copy.
        self._end: Event | None = None

    def record_arrival(self) -> list[Event]:
        """Record an event in each stream in which the consumer may compute, as it arrives for the next unit.

        Raises
        ------
        ArgumentError
            The consumer's work is captured as a graph.
        """
        current = self.device.current_stream()
        streams = _distinct(self._channel.consumers[0], current)
        for stream in streams:
            _check_not_captured(stream, self.device)
        self._channel.add_consumer(current)
        return [stream.record(is_timed=True) for stream in streams]

    def buffer(self, num_bytes: int) -> Any:
        """Allocate memory of the device; raises `NoRoomError`."""
        device, channel = self.device, self._channel
        with contextlib.suppress(device.out_of_memory):
            return channel.allocate(device, channel.stream, num_bytes)
        channel.wait_for_unknown_consumers()
        device.free_unused()
        try:
            return channel.allocate(device, channel.stream, num_bytes)
        except device.out_of_memory:
            raise NoRoomError(device, num_bytes) from None

    def copy(self, layout: BufferLayout, buffer: Any, part: ReplicaPart) -> None:
        """Start copying the pieces of a layout to a buffer."""
        device, stream = self.device, self._channel.stream
        with device.using(stream, for_user=False), profiled("copy"):
            while self._sources and (self._sources[0][0].is_over or len(self._sources) >= self._most_sources):
                self._sources.popleft()[0].synchronize()
            start = stream.record(is_timed=True)
            try:
                for span in layout.spans():
                    self._copy_span(span, buffer)
                for piece in layout.direct:
                    device.copy(piece.memory, device.view(buffer, piece.offset, (piece.num_bytes,), np.uint8), stream)
            finally:
                # Even after an error, copies that were started use the host's memory until this event.
                end = self._end = stream.record(is_timed=True)
                if layout.direct:
                    self._sources.append((end, layout.direct))
        part.hold(buffer, layout.num_bytes, start, end)

    def _copy_span(self, span: PackedSpan, buffer: Any) -> None:
        device, stream, slots = self.device, self._channel.stream, self._channel.slots
        slot, event = slots.take(span.num_bytes), None
        try:
            span.pack(slot.memory)
            target = device.view(buffer, span.offset, (span.num_bytes,), np.uint8)
            device.copy(slot.memory[: span.num_bytes], target, stream)
            event = stream.record()
        finally:
            if event is None:
                # After an error the end of a copy may not be known. Pinned memory is released when copies are over.
                slot.memory = None
            slots.give_back(slot, event)

    def begin_ahead(self) -> None:
        """Note that steps are copied ahead of use from now on, until it is closed."""
        self._channel.begin_ahead()

    def close(self) -> None:
        """End copying ahead, and release the host's memory once the copies from it are over."""
        self._channel.end_ahead()
        if self._end is not None:
            with self.device.using(for_user=False):
                self._end.synchronize()
        self._sources.clear()
