"""GPU replicas: CuPy arrays on NVIDIA's and AMD's devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from daskdist.errors import ArgumentError


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


class CupyEvent:
    """A moment in what a stream of a GPU does."""

    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def is_over(self) -> bool:
        return bool(self.event.done)

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: CupyEvent) -> float:
        return float(_cupy().cuda.get_elapsed_time(earlier.event, self.event)) / 1e3


class CupyStream:
    """A stream of a GPU."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def record(self) -> CupyEvent:
        return CupyEvent(self.stream.record())

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


@dataclass(frozen=True)
class CupyDevice:
    """One GPU that this process sees, by CuPy."""

    index: int
    kind: ClassVar[str] = "GPU"
    is_host: ClassVar[bool] = False

    @property
    def namespace(self) -> Any:
        return _cupy()

    @property
    def uuid(self) -> str:
        found = _cupy().cuda.runtime.getDeviceProperties(self.index)["uuid"]
        return f"GPU-{bytes(found).hex()}"

    @property
    def out_of_memory(self) -> type[Exception]:
        return _cupy().cuda.memory.OutOfMemoryError  # type: ignore[no-any-return]

    @staticmethod
    def holds(array: Any) -> bool:
        return isinstance(array, _cupy().ndarray)

    @staticmethod
    def lacks(dtype: Any) -> bool:
        dtype = np.dtype(dtype)
        return dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8)

    def put(self, array: Any) -> Any:
        if not self.holds(array) and self.lacks(array.dtype):
            raise ArgumentError(f"an array of {array.dtype} cannot be on GPU:{self.index}; such stay on the host")
        with self.using():
            found = _cupy().asarray(array)
            # It may still be read from.
            _cupy().cuda.get_current_stream().synchronize()
        return found

    def get(self, array: Any) -> Any:
        with _cupy().cuda.Device(array.device.id):
            return array.get()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        with self.using():
            return _cupy().empty(shape, dtype)

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return _cupy().ndarray(shape, dtype, buffer.data + offset)

    def pinned(self, num_bytes: int) -> Any:
        memory = _cupy().cuda.alloc_pinned_memory(max(num_bytes, 1))
        return np.frombuffer(memory, np.uint8, num_bytes)

    def is_pinned(self, array: Any) -> bool:
        while isinstance(array, np.ndarray):
            array = array.base
        return isinstance(array, _cupy().cuda.PinnedMemoryPointer)

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        target.set(source, stream.stream)

    def stream(self) -> CupyStream:
        with self.using():
            return CupyStream(_cupy().cuda.Stream(non_blocking=True))

    def current_stream(self) -> CupyStream:
        with self.using():
            return CupyStream(_cupy().cuda.get_current_stream())

    @contextlib.contextmanager
    def using(self, stream: Any = None) -> Iterator[None]:
        with _cupy().cuda.Device(self.index), contextlib.nullcontext() if stream is None else stream.stream:
            yield

    def memory_info(self) -> tuple[int, int]:
        with self.using():
            free, total = _cupy().cuda.runtime.memGetInfo()
        return int(free), int(total)

    def held_bytes(self) -> int:
        with self.using():
            return int(_cupy().get_default_memory_pool().total_bytes())

    def free_unused(self) -> None:
        with self.using():
            _cupy().get_default_memory_pool().free_all_blocks()

    def from_dlpack(self, array: Any) -> Any:
        with self.using():
            return _cupy().from_dlpack(array)
