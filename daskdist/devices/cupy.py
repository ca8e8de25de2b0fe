"""GPU devices: CuPy arrays on NVIDIA and AMD GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from daskdist.core.selection.permutation import Permutation
from daskdist.devices import nccl, nvidia
from daskdist.devices.borrowed import Borrowed
from daskdist.errors import ArgumentError

logger: Final = logging.getLogger("daskdist")

# The size in bytes of the pieces in which arrays are copied to the host: pinned memory is scarce, and CuPy keeps it.
_PIECE_BYTES: Final = 8 * 2**20
# `daskdist.core.selection.permutation.Permutation` for one index, as an elementwise kernel that sets `found`.
PERMUTED_ARGS: Final = (
    "int64 start, int64 length, int32 low_bits, uint32 num_high, "
    "uint32 key0, uint32 key1, uint32 key2, uint32 key3, uint32 key4, uint32 key5"
)
PERMUTED_BEFORE: Final = """
__device__ inline unsigned int daskdist_mixed(unsigned int number) {
    number = (number ^ (number >> 16)) * 0x7FEB352Du;
    number = (number ^ (number >> 15)) * 0x846CA68Bu;
    return number ^ (number >> 16);
}
"""
PERMUTED: Final = """
const unsigned int keys[6] = {key0, key1, key2, key3, key4, key5};
const unsigned int mask = (1u << low_bits) - 1u;
long long number = start + i;
do {
    unsigned int high = (unsigned int)(number >> low_bits);
    unsigned int low = (unsigned int)number & mask;
    for (int turn = 0; turn < 6; turn += 2) {
        low ^= daskdist_mixed(high ^ keys[turn]) & mask;
        high += (unsigned int)(((unsigned long long)daskdist_mixed(low ^ keys[turn + 1]) * num_high) >> 32);
        if (high >= num_high) high -= num_high;
    }
    number = ((long long)high << low_bits) | low;
} while (number >= length);
found = number;
"""
# The device file of the AMD driver.
_OF_AMD: Final = "/dev/kfd"
_EITHER: Final = "pip install 'daskdist[cuda13]' if the driver supports CUDA 13, 'daskdist[cuda12]' for CUDA 12"


@functools.cache
def _cupy() -> Any:
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
_PER_THREAD_STREAM: Final = 2
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
        return bool(self.event.done)

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: CupyEvent) -> float:
        return float(_cupy().cuda.get_elapsed_time(earlier.event, self.event)) / 1e3


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
        return self.stream.ptr > _PER_THREAD_STREAM and bool(self.stream.is_capturing())

    def record(self, *, is_timed: bool = False) -> CupyEvent:
        key = self.index, is_timed
        with _on(self.index):
            try:
                event = _free_events[key].pop()
            except IndexError:
                # With block=True a waiting thread yields the processor.
                event = _cupy().cuda.Event(block=True, disable_timing=not is_timed)
            self.stream.record(event)
        return CupyEvent(event, key)

    def wait(self, event: Any) -> None:
        with _on(self.index):
            self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        with _on(self.index):
            self.stream.synchronize()

    def await_queued(self) -> None:
        pass


@dataclass(frozen=True)
class CupyDevice:
    """A GPU that is visible to this process, used through CuPy."""

    index: int
    kind: ClassVar[str] = "GPU"
    is_host: ClassVar[bool] = False
    # The errors of CuPy and RMM derive from it.
    out_of_memory: ClassVar[type[Exception]] = MemoryError

    @property
    def namespace(self) -> Any:
        return _cupy()

    @property
    def uuid(self) -> str:
        uuid = None if _is_rocm() else nvidia.uuid_of(self.index)
        return uuid or f"GPU-{os.uname().nodename}-{_cupy().cuda.runtime.deviceGetPCIBusId(self.index)}"

    @property
    def description(self) -> str:
        return str(_cupy().cuda.runtime.getDeviceProperties(self.index)["name"].decode(errors="replace"))

    @staticmethod
    def num_present() -> int:
        # Importing CuPy takes a second: do so only if there may be a GPU.
        return _present()[0] if nvidia.driver_version() or os.path.exists(_OF_AMD) else 0

    def missing(self) -> str | None:
        count, why = _present()
        if self.index < count:
            return _no_compiler() or _per_thread_streams()
        if not count:
            return why
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        said = "" if visible is None else f", as CUDA_VISIBLE_DEVICES={visible} has it"
        if count == 1:
            return f"this process sees only GPU:0{said}"
        return f"this process sees {count}, GPU:0 to GPU:{count - 1}{said}"

    @staticmethod
    def holds(array: Any) -> bool:
        return isinstance(array, _cupy().ndarray)

    @staticmethod
    def index_of(array: Any) -> int:
        return int(array.device.id)

    @staticmethod
    def lacks(dtype: Any) -> bool:
        dtype = np.dtype(dtype)
        return dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8)

    def put(self, array: Any) -> Any:
        cupy = _cupy()
        before = None
        if self.holds(array):
            if array.device.id != self.index:
                # The copy runs in a stream of this device; its source is computed in one of the other device.
                source = CupyDevice(array.device.id)
                with source.using():
                    if not (array.flags.c_contiguous or array.flags.f_contiguous):
                        # CuPy can copy only contiguous arrays between devices.
                        array = cupy.ascontiguousarray(array)
                before = source.current_stream().record()
        else:
            array = np.asarray(array)
            if self.lacks(array.dtype):
                raise ArgumentError(
                    f"an array of {array.dtype} cannot be on GPU:{self.index}, which holds bools and numbers of up to "
                    "64 bits (complex ones of 128); such arrays stay on the host"
                )
        with self.using():
            stream = cupy.cuda.get_current_stream()
            if before is not None:
                stream.wait_event(before.event)
            if self.holds(array):
                copied = cupy.asarray(array)
            else:
                # CuPy itself copies the array to pinned memory first, unless it is pinned already.
                copied = cupy.array(array)
                if not array.nbytes or not cupy.cuda.pinned_memory.is_memory_pinned(array.ctypes.data):
                    return copied
            # Wait, as the caller may change the array after the return.
            stream.synchronize()
        return copied

    def get(self, array: Any) -> Any:
        cupy = _cupy()
        with cupy.cuda.Device(array.device.id):
            stream = cupy.cuda.get_current_stream()
            array = cupy.ascontiguousarray(array).reshape(array.shape)
            copied = np.empty(array.shape, array.dtype)
            self._fetch(array.data, copied.reshape(-1).view(np.uint8), stream)
        return copied

    def _fetch(self, data: Any, target: Any, stream: Any) -> None:
        # While one piece is transferred, the previous one is copied out of pinned memory.
        num_bytes = len(target)
        slots = [self.pinned(min(num_bytes, _PIECE_BYTES)) for _ in range(min(2, -(-num_bytes // _PIECE_BYTES)))]
        on_its_way: tuple[Any, Any, int] | None = None
        for number, start in enumerate(range(0, num_bytes, _PIECE_BYTES)):
            slot = slots[number % 2][: num_bytes - start]
            (data + start).copy_to_host_async(slot.ctypes.data, slot.nbytes, stream)
            event = stream.record()
            if on_its_way is not None:
                _take(target, *on_its_way)
            on_its_way = event, slot, start
        if on_its_way is not None:
            _take(target, *on_its_way)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        with self.using():
            return _cupy().empty(shape, dtype)

    def lend(self, num_bytes: int, back: Callable[[Any], None]) -> Any:
        cuda = _cupy().cuda
        with self.using():
            # All arrays that use part of it keep its memory object, even those that do not know their base array.
            memory = _cupy().empty(max(num_bytes, 1), np.uint8)
            lent = cuda.UnownedMemory(memory.data.ptr, memory.nbytes, Borrowed(memory, back), self.index)
            return _cupy().ndarray((num_bytes,), np.uint8, cuda.MemoryPointer(lent, 0))

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return _cupy().ndarray(shape, dtype, buffer.data + offset)

    def pinned(self, num_bytes: int, *, is_pooled: bool = True) -> Any:
        cuda = _cupy().cuda
        # Otherwise a context would be created on GPU:0.
        with self.using(for_user=False):
            if is_pooled:
                memory = cuda.alloc_pinned_memory(max(num_bytes, 1))
            else:
                memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(num_bytes, 1)), 0)
        return np.frombuffer(memory, np.uint8, num_bytes)

    def is_pinned(self, array: Any) -> bool:
        # NumPy keeps a view of the owner of its memory.
        while isinstance(array, (np.ndarray, memoryview)):
            array = array.base if isinstance(array, np.ndarray) else array.obj
        return isinstance(array, _cupy().cuda.PinnedMemoryPointer)

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        if source.nbytes != target.nbytes or not source.flags.c_contiguous or not target.flags.c_contiguous:
            raise ArgumentError(
                f"{source.nbytes} bytes cannot be copied to {target.nbytes} of GPU:{self.index}: both need the same "
                "size, without gaps"
            )
        with self.using():
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, stream.stream)

    def permuted(self, order: Permutation, start: int, stop: int) -> Any:
        if order.table is not None:
            return self.put(order.between(start, stop))
        with self.using():
            numbers = _cupy().empty(stop - start, np.int64)
            _permute()(start, order.length, order.low_bits, np.uint32(order.num_high), *order.keys, numbers)
        return numbers

    def stream(self) -> CupyStream:
        with self.using():
            return CupyStream(_cupy().cuda.Stream(non_blocking=True), self.index)

    def current_stream(self) -> CupyStream:
        stream = _cupy().cuda.get_current_stream(self.index)
        if stream.ptr == _PER_THREAD_STREAM:
            raise ArgumentError(
                f"GPU:{self.index}: this thread computes in the per-thread default stream, for which other threads "
                "cannot wait; use cupy.cuda.Stream(non_blocking=True), or none"
            )
        return CupyStream(stream, self.index)

    def outer_streams(self) -> list[CupyStream]:
        current, of_torch = self.current_stream(), torch_stream(self.index)
        return [current] if of_torch is None or of_torch == current else [current, of_torch]

    def take(self, source: Any, index: Any, target: Any) -> None:
        _cupy().take(source, index, axis=0, out=target)

    @contextlib.contextmanager
    def using(self, stream: Any = None, *, for_user: bool = True) -> Iterator[None]:
        if stream is None:
            with _on(self.index):
                yield
        elif for_user:
            with _cupy().cuda.Device(self.index), stream.stream, _torch_in(stream):
                yield
        else:
            with _cupy().cuda.Device(self.index), stream.stream, _beside_captures():
                yield

    def synchronize(self) -> None:
        _cupy().cuda.Device(self.index).synchronize()

    def memory_info(self) -> tuple[int, int]:
        told = None if _is_rocm() or nvidia.is_in_use(self.index) else nvidia.memory_of(self.uuid)
        if told is not None:
            return told
        with self.using():
            free, total = map(int, _cupy().cuda.runtime.memGetInfo())
            pool = _pool()
            if pool is not None:
                # The pool uses its free memory first, and has a limit.
                free += pool.free_bytes()
                if limit := pool.get_limit():
                    free = min(free, max(limit - pool.used_bytes(), 0))
        return min(free, total), total

    def held_bytes(self) -> int:
        with self.using():
            pool = _pool()
            held = _held_by_rmm(self.index) if pool is None else int(pool.total_bytes())
            if held is None:
                # The memory of this process is unknown: count all memory in use on the device.
                free, total = _cupy().cuda.runtime.memGetInfo()
                held = int(total - free)
        return held

    def free_unused(self) -> None:
        with self.using():
            pool = _pool()
            if pool is not None:
                pool.free_all_blocks()
        _cupy().get_default_pinned_memory_pool().free_all_blocks()

    def combined(self, how: str, arrays: Sequence[Any]) -> Any:
        return nccl.combined(how, arrays)

    def from_dlpack(self, array: Any) -> Any:
        with self.using():
            return _cupy().from_dlpack(array)


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
    return _cupy().cuda.Stream.from_external(stream)


@functools.lru_cache(maxsize=256)
def _external(address: int, index: int) -> Any:
    return sys.modules["torch"].cuda.ExternalStream(address, device=index)


def _torch_in(stream: CupyStream) -> AbstractContextManager[Any]:
    # Make PyTorch use this stream: memory shared by DLPack is then reused only after both libraries are done with it.
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


def _on(index: int) -> AbstractContextManager[Any]:
    # Select a device, unless it is selected already.
    cuda = _cupy().cuda
    return contextlib.nullcontext() if cuda.runtime.getDevice() == index else cuda.Device(index)


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    # Without this, allocations and queries of this thread would invalidate a capture of a graph in any other thread.
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
    if _is_rocm():
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


def _per_thread_streams() -> str | None:
    # CuPy reads the variable when it is imported.
    name = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
    if os.environ.get(name, "0") in ("", "0"):
        return None
    return f"{name} is set, and then each thread has a default stream for which others cannot wait; unset it"


@functools.cache
def _permute() -> Any:
    return _cupy().ElementwiseKernel(
        PERMUTED_ARGS, "int64 found", PERMUTED, "daskdist_permuted", preamble=PERMUTED_BEFORE
    )


def _take(target: Any, event: Any, slot: Any, start: int) -> None:
    event.synchronize()
    target[start : start + len(slot)] = slot


def _is_rocm() -> bool:
    return bool(_cupy().cuda.runtime.is_hip)


def _pool() -> Any:
    # Return the pool that CuPy currently allocates from; None if it is RMM or another allocator.
    owner = getattr(_cupy().cuda.get_allocator(), "__self__", None)
    return owner if hasattr(owner, "free_all_blocks") else None


def _held_by_rmm(index: int) -> int | None:
    # Return the bytes of the pool in a stack of RMM resources, from the outside in; otherwise those of the first
    # counter.
    rmm = sys.modules.get("rmm")
    resource = rmm and rmm.mr.get_per_device_resource(index)
    counted: int | None = None
    while resource is not None:
        if hasattr(resource, "pool_size"):
            return int(resource.pool_size())
        if counted is None and hasattr(resource, "get_allocated_bytes"):
            counted = int(resource.get_allocated_bytes())
        resource = getattr(resource, "upstream_mr", None)
    return counted


@functools.cache
def _present() -> tuple[int, str]:
    # Return the number of GPUs that CuPy sees in this process; if 0, also the reason and a remedy.
    speaks = nvidia.driver_version()
    install = f"pip install 'daskdist[cuda{speaks // 1000}]'" if speaks // 1000 in (12, 13) else _EITHER
    try:
        runtime = _cupy().cuda.runtime
    except ImportError as error:
        if error.name == "cupy":
            return 0, f"CuPy is not installed; {install}"
        return 0, f"CuPy cannot be imported ({' '.join(str(error).split()):.300}); {install}"
    try:
        if count := int(runtime.getDeviceCount()):
            return count, ""
        why = "there are none"
    except runtime.CUDARuntimeError as error:
        why = str(error)
    cupy_is = f"CuPy {_cupy().__version__} is installed"
    if _is_rocm():
        return 0, f"{cupy_is}, for ROCm, but no GPU is visible ({why}); check that rocm-smi lists one"
    built_for = runtime.runtimeGetVersion()
    if not speaks:
        return 0, (
            f"{cupy_is}, built for CUDA {_version(built_for)}, but no NVIDIA driver is installed ({why}); check that "
            f"nvidia-smi lists a GPU, and then {install}"
        )
    if speaks < built_for // 1000 * 1000:
        return 0, (
            f"{cupy_is}, built for CUDA {_version(built_for)}, but the driver supports CUDA {_version(speaks)} "
            f"({why}); update the driver, or {install} in place of this CuPy"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = "is not set" if visible is None else f"is {visible!r}"
    return 0, (
        f"{cupy_is}, built for CUDA {_version(built_for)}, but it finds no GPU ({why}); the driver supports CUDA "
        f"{_version(speaks)}, and CUDA_VISIBLE_DEVICES {said}; check that nvidia-smi lists a GPU. CuPy for it: "
        f"{install}"
    )


@functools.cache
def _no_compiler() -> str | None:
    # Return the reason why CuPy cannot compile kernels, which it would report only at the first one; None if it can.
    if _is_rocm():
        return None
    cuda = _cupy().cuda
    try:
        cuda.nvrtc.getVersion()
    except Exception as error:
        # The error may be a failed import or a missing library.
        built_for = cuda.runtime.runtimeGetVersion()
        return (
            f"CuPy {_cupy().__version__} is installed, built for CUDA {_version(built_for)}, but its compiler, "
            f"NVRTC, is missing ({' '.join(str(error).split()):.300}); pip install 'daskdist[cuda{built_for // 1000}]'"
        )
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
