"""GPU devices: CuPy arrays on NVIDIA and AMD GPUs."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from daskdist.core.selection.permutation import Permutation
from daskdist.devices import nccl, nvidia
from daskdist.devices.borrowed import Borrowed
from daskdist.devices.cuda_streams import (
    PER_THREAD_STREAM,
    CupyStream,
    beside_captures,
    cupy_module,
    is_rocm,
    selected,
    torch_in,
    torch_stream,
)
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
# A kernel that adds up every `step`-th number of an array. Neighbouring threads read neighbouring numbers; each thread
# adds up four sums, so that it does not wait for one read after the other.
SUMMED: Final = """
long long number = i;
A first = 0, second = 0, third = 0, fourth = 0;
for (; number + 3 * step < length; number += 4 * step) {
    first += (A)x[number];
    second += (A)x[number + step];
    third += (A)x[number + 2 * step];
    fourth += (A)x[number + 3 * step];
}
for (; number < length; number += step) first += (A)x[number];
total = (first + second) + (third + fourth);
"""
# The numbers of threads that add up an array, then their sums.
_NUM_ADDING: Final = (2**18, 2**13, 2**8)
# By the id of each array whose pages were to be locked, whether they are.
_locked: Final[dict[int, bool]] = {}
# The device file of the AMD driver.
_OF_AMD: Final = "/dev/kfd"
_EITHER: Final = "pip install 'daskdist[cuda13]' if the driver supports CUDA 13, 'daskdist[cuda12]' for CUDA 12"


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
        return cupy_module()

    @property
    def uuid(self) -> str:
        uuid = None if is_rocm() else nvidia.uuid_of(self.index)
        return uuid or f"GPU-{os.uname().nodename}-{cupy_module().cuda.runtime.deviceGetPCIBusId(self.index)}"

    @property
    def description(self) -> str:
        return str(cupy_module().cuda.runtime.getDeviceProperties(self.index)["name"].decode(errors="replace"))

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
        visibility = "" if visible is None else f", as CUDA_VISIBLE_DEVICES={visible} has it"
        if count == 1:
            return f"this process sees only GPU:0{visibility}"
        return f"this process sees {count}, GPU:0 to GPU:{count - 1}{visibility}"

    @staticmethod
    def holds(array: Any) -> bool:
        return isinstance(array, cupy_module().ndarray)

    @staticmethod
    def index_of(array: Any) -> int:
        return int(array.device.id)

    @staticmethod
    def lacks(dtype: Any) -> bool:
        dtype = np.dtype(dtype)
        return dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8)

    def put(self, array: Any) -> Any:
        cupy = cupy_module()
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
            stream = self.current_stream()
            if before is not None:
                stream.wait(before)
            if self.holds(array):
                copied = cupy.asarray(array)
            else:
                # CuPy itself copies the array to pinned memory first, unless it is pinned already.
                copied = cupy.array(array)
                if not array.nbytes or not cupy.cuda.pinned_memory.is_memory_pinned(array.ctypes.data):
                    return copied
            # Wait, as the caller may change the array after the return.
            stream.record().synchronize()
        return copied

    def get(self, array: Any) -> Any:
        # Any device of this kind is asked for the arrays of all.
        source = CupyDevice(int(array.device.id))
        with source.using():
            array = cupy_module().ascontiguousarray(array).reshape(array.shape)
            copied = np.empty(array.shape, array.dtype)
            source._fetch(array.data, copied.reshape(-1).view(np.uint8))
        return copied

    def _fetch(self, data: Any, target: Any) -> None:
        # While one piece is transferred, the previous one is copied out of pinned memory.
        num_bytes, stream = len(target), self.current_stream()
        slots = [self.pinned(min(num_bytes, _PIECE_BYTES)) for _ in range(min(2, -(-num_bytes // _PIECE_BYTES)))]
        on_its_way: tuple[Any, Any, int] | None = None
        for number, start in enumerate(range(0, num_bytes, _PIECE_BYTES)):
            slot = slots[number % 2][: num_bytes - start]
            (data + start).copy_to_host_async(slot.ctypes.data, slot.nbytes, stream.stream)
            event = stream.record()
            if on_its_way is not None:
                _take(target, *on_its_way)
            on_its_way = event, slot, start
        if on_its_way is not None:
            _take(target, *on_its_way)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        with self.using():
            return cupy_module().empty(shape, dtype)

    def allocate(self, num_bytes: int, on_release: Callable[[Any], None]) -> Any:
        cuda = cupy_module().cuda
        with self.using():
            # All arrays that use part of it keep its memory object, even those that do not know their base array.
            memory = cupy_module().empty(max(num_bytes, 1), np.uint8)
            owned = cuda.UnownedMemory(memory.data.ptr, memory.nbytes, Borrowed(memory, on_release), self.index)
            return cupy_module().ndarray((num_bytes,), np.uint8, cuda.MemoryPointer(owned, 0))

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return cupy_module().ndarray(shape, dtype, buffer.data + offset)

    def pinned(self, num_bytes: int, *, is_pooled: bool = True) -> Any:
        cuda = cupy_module().cuda
        # Otherwise a context would be created on GPU:0.
        with self.using(for_user=False):
            if is_pooled:
                memory = cuda.alloc_pinned_memory(max(num_bytes, 1))
            else:
                memory = cuda.PinnedMemoryPointer(
                    cuda.PinnedMemory(max(num_bytes, 1), cuda.runtime.hostAllocPortable), 0
                )
        return np.frombuffer(memory, np.uint8, num_bytes)

    def is_pinned(self, array: Any) -> bool:
        # NumPy keeps a view of the owner of its memory.
        while isinstance(array, (np.ndarray, memoryview)):
            if _locked.get(id(array)):
                return True
            array = array.base if isinstance(array, np.ndarray) else array.obj
        return isinstance(array, cupy_module().cuda.PinnedMemoryPointer)

    def lock(self, array: Any) -> bool:
        while isinstance(array.base, np.ndarray):
            array = array.base
        key, address = id(array), array.ctypes.data
        if key not in _locked:
            runtime = cupy_module().cuda.runtime
            with self.using(for_user=False):
                try:
                    # By all contexts of this process, as memory from `pinned`.
                    runtime.hostRegister(address, array.nbytes, runtime.hostAllocPortable)
                    _locked[key] = True
                except runtime.CUDARuntimeError as error:
                    logger.warning("an array of %d bytes is not page-locked: %s", array.nbytes, error)
                    _locked[key] = False
            weakref.finalize(array, _unlock, key, address, self.index).atexit = False
        return _locked[key]

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
            numbers = cupy_module().empty(stop - start, np.int64)
            _permute()(start, order.length, order.low_bits, np.uint32(order.num_high), *order.keys, numbers)
        return numbers

    def stream(self) -> CupyStream:
        with self.using():
            return CupyStream(cupy_module().cuda.Stream(non_blocking=True), self.index)

    def current_stream(self) -> CupyStream:
        stream = cupy_module().cuda.get_current_stream(self.index)
        if stream.ptr == PER_THREAD_STREAM:
            raise ArgumentError(
                f"GPU:{self.index}: this thread computes in the per-thread default stream, for which other threads "
                "cannot wait; use cupy.cuda.Stream(non_blocking=True), or none"
            )
        return CupyStream(stream, self.index)

    def outer_streams(self) -> list[CupyStream]:
        current, of_torch = self.current_stream(), torch_stream(self.index)
        return [current] if of_torch is None or of_torch == current else [current, of_torch]

    def take(self, source: Any, index: Any, target: Any) -> None:
        cupy_module().take(source, index, axis=0, out=target)

    @contextlib.contextmanager
    def using(self, stream: Any = None, *, for_user: bool = True) -> Iterator[None]:
        with selected(self.index), contextlib.nullcontext() if for_user else beside_captures():
            if stream is None:
                yield
                return
            with stream.stream, torch_in(stream) if for_user else contextlib.nullcontext():
                yield

    def synchronize(self) -> None:
        cupy_module().cuda.Device(self.index).synchronize()

    def memory_info(self) -> tuple[int, int]:
        memory = None if is_rocm() or nvidia.is_in_use(self.index) else nvidia.memory_of(self.uuid)
        if memory is not None:
            return memory
        with self.using():
            free, total = map(int, cupy_module().cuda.runtime.memGetInfo())
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
                free, total = cupy_module().cuda.runtime.memGetInfo()
                held = int(total - free)
        return held

    def free_unused(self) -> None:
        with self.using():
            pool = _pool()
            if pool is not None:
                pool.free_all_blocks()
        cupy_module().get_default_pinned_memory_pool().free_all_blocks()

    def combined(self, reduction: str, arrays: Sequence[Any]) -> Any:
        return nccl.combined(reduction, arrays)

    def sum_rows(self, array: Any, dtype: np.dtype[Any]) -> Any:
        # CuPy takes three times as long, mostly to compute indices.
        shape, wide = array.shape[1:], np.dtype(np.float32) if dtype == np.float16 else dtype
        num_columns = math.prod(shape)
        with self.using():
            array = array.reshape(-1)
            for most in (*_NUM_ADDING, 1):
                step = max(most // num_columns, 1) * num_columns
                totals = cupy_module().empty(step, wide)
                _sum()(array, array.size, step, totals)
                array = totals
            return array.reshape(shape).astype(dtype, copy=False)

    def links(self) -> Any:
        return nccl.LINKS if nccl.is_available() else None

    def from_dlpack(self, array: Any) -> Any:
        with self.using():
            return cupy_module().from_dlpack(array)


def _per_thread_streams() -> str | None:
    # CuPy reads the variable when it is imported.
    name = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
    if os.environ.get(name, "0") in ("", "0"):
        return None
    return f"{name} is set, and then each thread has a default stream for which others cannot wait; unset it"


@functools.cache
def _permute() -> Any:
    return cupy_module().ElementwiseKernel(
        PERMUTED_ARGS, "int64 found", PERMUTED, "daskdist_permuted", preamble=PERMUTED_BEFORE
    )


@functools.cache
def _sum() -> Any:
    return cupy_module().ElementwiseKernel("raw T x, int64 length, int64 step", "A total", SUMMED, "daskdist_sum")


def _unlock(key: int, address: int, index: int) -> None:
    if _locked.pop(key):
        with CupyDevice(index).using(for_user=False):
            cupy_module().cuda.runtime.hostUnregister(address)


def _take(target: Any, event: Any, slot: Any, start: int) -> None:
    event.synchronize()
    target[start : start + len(slot)] = slot


def _pool() -> Any:
    # Return the pool that CuPy currently allocates from; None if it is RMM or another allocator.
    owner = getattr(cupy_module().cuda.get_allocator(), "__self__", None)
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
        runtime = cupy_module().cuda.runtime
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
    cupy_is = f"CuPy {cupy_module().__version__} is installed"
    if is_rocm():
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
    visibility = "is not set" if visible is None else f"is {visible!r}"
    return 0, (
        f"{cupy_is}, built for CUDA {_version(built_for)}, but it finds no GPU ({why}); the driver supports CUDA "
        f"{_version(speaks)}, and CUDA_VISIBLE_DEVICES {visibility}; check that nvidia-smi lists a GPU. CuPy for it: "
        f"{install}"
    )


@functools.cache
def _no_compiler() -> str | None:
    # Return the reason why CuPy cannot compile kernels, which it would report only at the first one; None if it can.
    if is_rocm():
        return None
    cuda = cupy_module().cuda
    try:
        cuda.nvrtc.getVersion()
    except Exception as error:
        # The error may be a failed import or a missing library.
        built_for = cuda.runtime.runtimeGetVersion()
        return (
            f"CuPy {cupy_module().__version__} is installed, built for CUDA {_version(built_for)}, but its compiler, "
            f"NVRTC, is missing ({' '.join(str(error).split()):.300}); pip install 'daskdist[cuda{built_for // 1000}]'"
        )
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
