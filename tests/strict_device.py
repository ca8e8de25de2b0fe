"""A device whose arrays only have the methods that the array API standard requires.

Its streams are threads: as on a GPU, a copy is complete only when its stream has reached it, so code that does not wait
for it, or reuses the source before, gets wrong values.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import array_api_strict
import numpy as np

from daskdist import devices
from daskdist.devices.borrowed import Borrowed
from daskdist.errors import ArgumentError

KIND = "STRICT"
# By index, the device of ``array_api_strict`` that holds the arrays: those of different devices cannot be combined, and
# only those of the first, the default device, can be converted to NumPy's by accident.
_PLACES = [array_api_strict.Device(name) for name in ("CPU_DEVICE", "device1", "device2")]
# By index: the bytes that arrays of the device may take, and the bytes they take.
LIMITS: dict[int, int] = {}
TAKEN: dict[int, int] = {}
# The library that connects devices; None if there is none.
LINKS: Any = None
# The ids of arrays whose memory was made pinned.
LOCKED: set[int] = set()
# Returned memory. It is allocated again at once, with its old contents, to the next request of the same size.
_BACK: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}
_TOTAL = 2**30
_lock = threading.RLock()
_current = threading.local()


def register(num_devices: int = 2, uuids: Sequence[str] = (), delay_s: float = 0.0) -> None:
    """Register the kind of device in this process.

    With ``uuids``, the process sees exactly those devices; otherwise none of its devices is listed as visible, so that
    a request without names gets none. Each operation of a stream takes ``delay_s`` seconds longer.
    """
    devices.KINDS[KIND] = ("strict_device:StrictDevice", "array_api_strict")
    StrictDevice.num_devices = len(uuids) or num_devices
    StrictDevice.uuids = tuple(uuids)
    StrictStream.delay_s = delay_s


def unregister() -> None:
    """Forget the kind of device, its delays and its limits."""
    devices.KINDS.pop(KIND, None)
    StrictDevice.num_devices, StrictDevice.uuids = 2, ()
    StrictStream.delay_s = 0.0
    LIMITS.clear()
    _BACK.clear()


class StrictMemoryError(MemoryError):
    """An error for exhausted memory."""


def reads_late(array: Any, found: list[bytes], begin: Any = None, stream: Any = None) -> None:
    """Let a stream read an array's memory later, as a GPU does, whatever uses that memory by then.

    The stream is this thread's if none is given. Before it reads, it waits for the event ``begin``.
    """
    memory = array._array
    address, num_bytes = memory.ctypes.data, memory.nbytes

    def kernel() -> None:
        if begin is not None and not begin.wait(30):
            raise TimeoutError("a kernel was not allowed to begin")
        found.append(ctypes.string_at(address, num_bytes))

    (stream or StrictDevice(index=StrictDevice.index_of(array)).current_stream()).give(kernel)


class StrictEvent:
    def __init__(self, *, is_timed: bool = False) -> None:
        self._over = threading.Event()
        self._is_timed = is_timed
        self.at_s = 0.0

    def set(self) -> None:
        self.at_s = time.perf_counter()
        self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        if not self._over.wait(30):
            raise TimeoutError("a stream does not reach an event")

    def seconds_since(self, earlier: StrictEvent) -> float:
        if not (self._is_timed and earlier._is_timed):
            raise ValueError("events without times")
        return self.at_s - earlier.at_s


class StrictStream:
    """A thread that copies. Computations run in the calling thread, which waits here for their inputs."""

    # The delay of the thread before each copy.
    delay_s = 0.0

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._tasks,), name="strict stream", daemon=True)
        thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def give(self, task: Any) -> None:
        self._tasks.put(task)

    # Tests set this: work is captured as a graph, and waiting for it is an error.
    is_captured = False
    # Tests set this: the library that created the stream has destroyed it.
    is_destroyed = False

    @property
    def is_capturing(self) -> bool:
        if self.is_destroyed:
            raise RuntimeError("a destroyed stream cannot be asked")
        return self.is_captured

    def record(self, *, is_timed: bool = False) -> StrictEvent:
        if self.is_captured or self.is_destroyed:
            raise RuntimeError("no event can be recorded in this stream")
        event = StrictEvent(is_timed=is_timed)
        self.give(event.set)
        return event

    def wait(self, event: Any) -> None:
        self.give(event.synchronize)
        # Releasing memory computes nothing with it.
        if not getattr(_current, "is_letting_go", False):
            event.synchronize()

    def synchronize(self) -> None:
        self.record().synchronize()

    def await_queued(self) -> None:
        self.synchronize()


def _work(tasks: Any) -> None:
    while (task := tasks.get()) is not None:
        task()


@dataclass(frozen=True)
class StrictDevice:
    """Arrays of ``array_api_strict``."""

    index: int
    kind: ClassVar[str] = KIND
    is_host: ClassVar[bool] = False
    out_of_memory: ClassVar[type[Exception]] = StrictMemoryError
    num_devices: ClassVar[int] = 2
    uuids: ClassVar[tuple[str, ...]] = ()

    @property
    def namespace(self) -> Any:
        return array_api_strict

    @property
    def uuid(self) -> str:
        return self.uuids[self.index] if self.index < len(self.uuids) else f"STRICT-{self.index}"

    @property
    def description(self) -> str:
        return "arrays of array_api_strict"

    @staticmethod
    def num_present() -> int:
        return len(StrictDevice.uuids)

    def missing(self) -> str | None:
        return None if self.index < self.num_devices else f"there are {self.num_devices}; register more"

    @staticmethod
    def holds(array: Any) -> bool:
        return isinstance(array, type(array_api_strict.asarray(0)))

    @staticmethod
    def lacks(dtype: Any) -> bool:
        dtype = np.dtype(dtype)
        return dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8) or dtype == np.float16

    @staticmethod
    def index_of(array: Any) -> int:
        return _PLACES.index(array.device)

    @property
    def _place(self) -> Any:
        return _PLACES[self.index % len(_PLACES)]

    def put(self, array: Any) -> Any:
        if self.holds(array):
            if array.device == self._place:
                return array
            array = array._array
        array = np.asarray(array)
        if self.lacks(array.dtype):
            raise ArgumentError(f"an array of {array.dtype} cannot be on {KIND}:{self.index}; such stay on the host")
        actual = self._new(array.shape, array.dtype)
        actual[...] = array
        return array_api_strict.asarray(actual, device=self._place, copy=None)

    def get(self, array: Any) -> Any:
        return np.array(array._array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return array_api_strict.asarray(self._new(shape, dtype), device=self._place, copy=None)

    def _new(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        actual = np.empty(shape, dtype)
        _take(self.index, actual.nbytes)
        weakref.finalize(actual, _given_back, self.index, actual.nbytes)
        # Overwrite the old contents, which no caller should see.
        np.ndarray((actual.nbytes,), np.uint8, actual)[...] = 0xA5
        return actual

    def allocate(self, num_bytes: int, back: Any) -> Any:
        memory = _Memory(self.index, num_bytes)

        def came_back(memory: Any) -> None:
            _current.is_letting_go = True
            try:
                back(memory)
            finally:
                _current.is_letting_go = False

        return array_api_strict.asarray(np.asarray(Borrowed(memory, came_back)), device=self._place, copy=None)

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        whole = np.ndarray(shape, dtype, buffer._array, offset)
        return array_api_strict.asarray(whole, device=buffer.device, copy=None)

    def pinned(self, num_bytes: int, *, is_pooled: bool = True) -> Any:
        return np.frombuffer(_Pinned(num_bytes), np.uint8, num_bytes)

    def is_pinned(self, array: Any) -> bool:
        while isinstance(array, np.ndarray):
            if id(array) in LOCKED:
                return True
            array = array.base
        return isinstance(getattr(array, "obj", array), _Pinned)

    def lock(self, array: Any) -> bool:
        while isinstance(array.base, np.ndarray):
            array = array.base
        if id(array) not in LOCKED:
            LOCKED.add(id(array))
            weakref.finalize(array, LOCKED.discard, id(array))
        return True

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        if not self.is_pinned(source):
            raise TypeError("only pinned memory can be copied in a stream")
        if source.nbytes != target._array.nbytes:
            raise ArgumentError(f"{source.nbytes} bytes cannot be copied to {target._array.nbytes}")

        def copied() -> None:
            if StrictStream.delay_s:
                time.sleep(StrictStream.delay_s)
            target._array[...] = source

        stream.give(copied)

    def permuted(self, order: Any, start: int, stop: int) -> Any:
        return self.put(order.between(start, stop))

    def stream(self) -> StrictStream:
        return StrictStream()

    def current_stream(self) -> Any:
        # Each thread has one current stream for each device, as for GPUs.
        streams = _current.__dict__.setdefault("streams", {})
        if self.index not in streams:
            streams[self.index] = StrictStream()
        return streams[self.index]

    @contextlib.contextmanager
    def _using(self, stream: Any) -> Any:
        before = getattr(_current, "device", None), self.current_stream()
        _current.device, _current.streams[self.index] = self, stream or before[1]
        try:
            yield
        finally:
            _current.device, _current.streams[self.index] = before

    def outer_streams(self) -> list[Any]:
        return [self.current_stream(), *_current.__dict__.get("outer_streams", ())]

    def take(self, source: Any, index: Any, target: Any) -> None:
        target[...] = array_api_strict.take(source, index, axis=0)

    def using(self, stream: Any = None, *, for_user: bool = True) -> AbstractContextManager[Any]:
        return self._using(stream)

    def synchronize(self) -> None:
        self.current_stream().synchronize()

    def memory_info(self) -> tuple[int, int]:
        total = LIMITS.get(self.index, _TOTAL)
        return total - TAKEN.get(self.index, 0), total

    def held_bytes(self) -> int:
        return TAKEN.get(self.index, 0)

    def free_unused(self) -> None:
        pass

    def sum_rows(self, array: Any, dtype: Any) -> Any:
        return None

    def combined(self, how: str, arrays: Any) -> Any:
        return None

    def links(self) -> Any:
        return LINKS

    def from_dlpack(self, array: Any) -> Any:
        return array_api_strict.from_dlpack(array)


class _Memory:
    """Allocated memory that is allocated again once nothing refers to it, even if a stream still uses it."""

    def __init__(self, index: int, num_bytes: int) -> None:
        self._key = index, num_bytes
        with _lock:
            _take(*self._key)
            known = _BACK.get(self._key)
            self.array = known.pop() if known else np.full(num_bytes, 0xA5, np.uint8)

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__

    def __del__(self) -> None:
        if hasattr(self, "array"):
            with _lock:
                _BACK.setdefault(self._key, []).append(self.array)
                _given_back(*self._key)


class _Pinned(bytearray):
    """Pinned memory."""


def _take(index: int, num_bytes: int) -> None:
    with _lock:
        if TAKEN.get(index, 0) + num_bytes > LIMITS.get(index, _TOTAL):
            raise StrictMemoryError(f"{num_bytes} bytes")
        TAKEN[index] = TAKEN.get(index, 0) + num_bytes


def _given_back(index: int, num_bytes: int) -> None:
    with _lock:
        TAKEN[index] -= num_bytes


def current_device() -> Any:
    """Return the current device of this thread."""
    return getattr(_current, "device", None)
