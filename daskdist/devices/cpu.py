"""CPU devices: NumPy arrays in this process's memory."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from daskdist.core.selection.permutation import Permutation
from daskdist.devices.borrowed import Borrowed
from daskdist.errors import ArgumentError


@dataclass(frozen=True)
class CpuEvent:
    """An event of a CPU, which is always over, as CPU work is synchronous."""

    at_s: float
    is_over: ClassVar[bool] = True

    def synchronize(self) -> None:
        pass

    def seconds_since(self, earlier: CpuEvent) -> float:
        return self.at_s - earlier.at_s


@dataclass(frozen=True)
class CpuStream:
    """The stream of a CPU: work is done by the calling thread."""

    is_capturing: ClassVar[bool] = False

    def record(self, *, is_timed: bool = False) -> CpuEvent:
        return CpuEvent(time.perf_counter())

    def wait(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def await_queued(self) -> None:
        pass


@dataclass(frozen=True)
class CpuDevice:
    """A slot on this machine's processors; slots share the processors and the memory."""

    index: int
    kind: ClassVar[str] = "CPU"
    is_host: ClassVar[bool] = True
    out_of_memory: ClassVar[type[Exception]] = MemoryError

    @property
    def namespace(self) -> Any:
        return np

    @property
    def uuid(self) -> str:
        return f"CPU-{os.uname().nodename}-{self.index}"

    @property
    def description(self) -> str:
        return f"{platform.machine()}, {os.cpu_count()} cores"

    @staticmethod
    def num_present() -> int:
        return 1

    def missing(self) -> str | None:
        # A slot is only a thread.
        return None

    @staticmethod
    def holds(array: Any) -> bool:
        return isinstance(array, np.ndarray)

    @staticmethod
    def index_of(array: Any) -> int:
        # All slots share the memory.
        return 0

    @staticmethod
    def lacks(dtype: Any) -> bool:
        return False

    def put(self, array: Any) -> Any:
        return np.asarray(array)

    def get(self, array: Any) -> Any:
        return np.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def allocate(self, num_bytes: int, on_release: Callable[[Any], None]) -> Any:
        return np.asarray(Borrowed(np.empty(num_bytes, np.uint8), on_release))

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.ndarray(shape, dtype, buffer, offset)

    def pinned(self, num_bytes: int, *, is_pooled: bool = True) -> Any:
        return np.empty(num_bytes, np.uint8)

    def is_pinned(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def lock(self, array: Any) -> bool:
        return True

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        if source.nbytes != target.nbytes:
            raise ArgumentError(f"{source.nbytes} bytes cannot be copied to {target.nbytes} of CPU:{self.index}")
        target[...] = source

    def permuted(self, order: Permutation, start: int, stop: int) -> Any:
        return order.between(start, stop)

    def stream(self) -> CpuStream:
        return CpuStream()

    def current_stream(self) -> CpuStream:
        return CpuStream()

    def outer_streams(self) -> Sequence[CpuStream]:
        return ()

    def take(self, source: Any, index: Any, target: Any) -> None:
        source.take(index, axis=0, out=target)

    def using(self, stream: Any = None, *, for_user: bool = True) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def held_bytes(self) -> int:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def free_unused(self) -> None:
        pass

    def combined(self, reduction: str, arrays: Sequence[Any]) -> Any:
        return None

    def sum_rows(self, array: Any, dtype: np.dtype[Any]) -> Any:
        return None

    def links(self) -> None:
        return None

    def from_dlpack(self, array: Any) -> Any:
        return np.from_dlpack(array)
