"""Streams and events of GPUs, those of PyTorch among them, and CuPy itself, imported when it is first needed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

logger: Final = logging.getLogger("daskdist")


@functools.cache
def cupy_module() -> Any:
    """Return CuPy, imported at the first call."""
    import cupy

    _use_pool_of_rmm(cupy)
    return cupy


def _use_pool_of_rmm(cupy: Any) -> None:
    # Workers of dask-cuda may have given most of the memory to a pool of RMM: CuPy's own pool would have only the rest.
    rmm = sys.modules.get("rmm")
    if rmm is None or type(rmm.mr.get_current_device_resource()).__name__ == "CudaMemoryResource":
        return
    pool = cupy.get_default_memory_pool()
    # An allocator that somebody chose stays.
    if getattr(cupy.cuda.get_allocator(), "__self__", None) is pool:
        from rmm.allocators.cupy import rmm_cupy_allocator

        cupy.cuda.set_allocator(rmm_cupy_allocator)
        logger.info("CuPy allocates from the memory resource of RMM in this process")


# Events that are not in use, by device and whether they have times: creating one takes longer than recording it.
_free_events: Final[defaultdict[tuple[int, bool], list[Any]]] = defaultdict(list)
# The stream that is another one in each thread, and modes of capture for `cuThreadExchangeStreamCaptureMode`.
PER_THREAD_STREAM: Final = 2
_RELAXED: Final = 2


class CupyEvent:
    """An event in a stream of a GPU."""

    def __init__(self, event: Any, key: tuple[int, bool]) -> None:
        self.event = event
        self._key = key

    def __del__(self, free: Any = _free_events) -> None:
        free[self._key].append(self.event)

    @property
    def is_over(self) -> bool:
        with beside_captures():
            return bool(self.event.done)

    def synchronize(self) -> None:
        with beside_captures():
            self.event.synchronize()

    def seconds_since(self, earlier: CupyEvent) -> float:
        return float(cupy_module().cuda.get_elapsed_time(earlier.event, self.event)) / 1e3


class CupyStream:
    """A stream of a GPU."""

    def __init__(self, stream: Any, index: int) -> None:
        self.stream = stream
        # The default stream belongs to the current device, and events to the device that was current at their creation.
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CupyStream) and (self.stream.ptr, self.index) == (other.stream.ptr, other.index)

    def __hash__(self) -> int:
        return hash((self.stream.ptr, self.index))

    @property
    def is_capturing(self) -> bool:
        # The default stream cannot be captured, and must not be asked during a capture.
        if self.stream.ptr <= PER_THREAD_STREAM:
            return False
        try:
            return bool(self.stream.is_capturing())
        except RuntimeError as error:
            # Errors of CUDA have a status; the other one is raised for a capture that an error has invalidated, which
            # lasts until it is ended.
            if hasattr(error, "status"):
                raise
            return True

    def record(self, *, is_timed: bool = False) -> CupyEvent:
        key = self.index, is_timed
        with selected(self.index):
            try:
                event = _free_events[key].pop()
            except IndexError:
                # With block=True a waiting thread yields the processor.
                event = cupy_module().cuda.Event(block=True, disable_timing=not is_timed)
            self.stream.record(event)
        return CupyEvent(event, key)

    def wait(self, event: Any) -> None:
        with selected(self.index):
            self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        with selected(self.index), beside_captures():
            self.stream.synchronize()

    def await_queued(self) -> None:
        pass


@dataclass(frozen=True)
class _OfTorch:
    # A PyTorch stream with the protocol that CuPy uses, which older versions of PyTorch lack; keeps the stream alive.
    stream: Any

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.cuda_stream


def torch_stream(index: int) -> CupyStream | None:
    """Return the stream in which PyTorch computes on a GPU in this thread; None before its first use of GPUs."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.current_stream(index)
    return CupyStream(_of_torch(stream.cuda_stream, _OfTorch(stream)), index)


@functools.lru_cache(maxsize=256)
def _of_torch(address: int, stream: _OfTorch) -> Any:
    return cupy_module().cuda.Stream.from_external(stream)


@functools.lru_cache(maxsize=256)
def _external(address: int, index: int) -> Any:
    return sys.modules["torch"].cuda.ExternalStream(address, device=index)


def torch_in(stream: CupyStream) -> AbstractContextManager[Any]:
    """Make PyTorch use a stream: memory shared by DLPack is then reused only after both libraries are done with it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _torch_before_the_end_of(stream)
    if not hasattr(torch, "cuda") or not torch.cuda.is_available():
        return contextlib.nullcontext()
    outer: AbstractContextManager[Any] = torch.cuda.stream(_external(stream.stream.ptr, stream.index))
    return outer


@contextlib.contextmanager
def _torch_before_the_end_of(stream: CupyStream) -> Iterator[None]:
    # If PyTorch is imported inside, it computes in its own stream: work queued afterwards waits for that.
    try:
        yield
    finally:
        theirs = torch_stream(stream.index)
        if theirs is not None and theirs != stream:
            stream.wait(theirs.record())


def selected(index: int) -> AbstractContextManager[Any]:
    """Select a device, unless it is selected already."""
    cuda = cupy_module().cuda
    return contextlib.nullcontext() if cuda.runtime.getDevice() == index else cuda.Device(index)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let other threads capture graphs: otherwise allocations and queries of this thread would invalidate these."""
    exchange = _capture_mode()
    if exchange is None:
        yield
        return
    before = exchange(_RELAXED)
    try:
        yield
    finally:
        exchange(before)


@functools.cache
def _capture_mode() -> Callable[[int], int] | None:
    # Return a function that sets this thread's mode of capture and returns the one before; None without a CUDA driver.
    if is_rocm():
        return None
    try:
        function = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None

    def exchange(mode: int) -> int:
        value = ctypes.c_int(mode)
        function(ctypes.byref(value))
        return value.value

    return exchange


def is_rocm() -> bool:
    """Return whether CuPy is for AMD's GPUs."""
    return bool(cupy_module().cuda.runtime.is_hip)
