"""A stand-in for CuPy in host memory, to run tests and benchmarks of GPUs where there is none.

Values are computed at once, but streams, events, devices, pools and captures of graphs are as strict as CuPy's: work
takes time in its stream, arrays of another device than the current one are refused, and calls that would invalidate a
capture do so. It shows that programs call CuPy as its sources have it, and nothing about speed.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np

__version__ = "14.2.0"
is_stand_in = True
_NUM_DEVICES = int(os.environ.get("CUPY_STAND_IN_DEVICES", "2"))
_TOTAL = 2**34
_BYTES_PER_S = 50e9
_lock = threading.RLock()
_local = threading.local()
# The streams that are being captured in the strictest mode.
_captures = set()
_pinned = {}


class CUDARuntimeError(RuntimeError):
    status = 1


def _unsafe(name):
    if _captures and getattr(_local, "mode", 0) != 2:
        for stream in list(_captures):
            stream.invalid = True
        raise CUDARuntimeError(f"{name}: cudaErrorStreamCaptureUnsafe")


def _device():
    return getattr(_local, "device", 0)


class Device:
    def __init__(self, device=None):
        self.id = _device() if device is None else int(device)
        self._before = []

    def __int__(self):
        return self.id

    def __enter__(self):
        self._before.append(_device())
        _local.device = self.id
        return self

    def __exit__(self, *error):
        _local.device = self._before.pop()

    def use(self):
        _local.device = self.id
        return self

    def synchronize(self):
        _unsafe("cudaDeviceSynchronize")
        _sleep_until(max(stream.busy_until for stream in list(_streams) if stream.number() == self.id))


def _sleep_until(at):
    if (rest := at - time.perf_counter()) > 0:
        time.sleep(rest)


_streams = []


class Stream:
    null = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        with _lock:
            _streams.append(self)
            self.ptr = 0 if null else 2 if ptds else 1000 + len(_streams)
        self.device_id = -1 if null or ptds else _device()
        self.is_non_blocking = non_blocking
        self.busy_until = 0.0
        self.recorded = None
        self.invalid = False

    @classmethod
    def from_external(cls, obj):
        version, pointer = obj.__cuda_stream__()
        assert version == 0
        return next(stream for stream in _streams if stream.ptr == pointer)

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def __cuda_stream__(self):
        return 0, self.ptr

    def number(self):
        return _device() if self.device_id == -1 else self.device_id

    def __enter__(self):
        if self.number() != _device():
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match {_device()}"
            )
        _stack(self.number()).append(self)
        _entered().append(self.number())
        return self

    def __exit__(self, *error):
        _stack(_entered().pop()).pop()

    def add(self, seconds):
        if self.recorded is not None:
            raise RuntimeError("only functions with out= are captured here")
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds

    def record(self, event=None):
        if self.recorded is not None or self.number() != _device():
            raise CUDARuntimeError("an event of a stream that is captured, or of another device")
        event = event or Event()
        if event.device != self.number():
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle")
        event.over_at = max(self.busy_until, time.perf_counter())
        return event

    def wait_event(self, event):
        self.busy_until = max(self.busy_until, event.over_at)

    def synchronize(self):
        _unsafe("cudaStreamSynchronize")
        _sleep_until(self.busy_until)

    @property
    def done(self):
        _unsafe("cudaStreamQuery")
        return time.perf_counter() >= self.busy_until

    def begin_capture(self, mode=None):
        if self.ptr < 2:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self.recorded, self.invalid = [], False
        if mode == 0:
            _captures.add(self)

    def end_capture(self):
        recorded, self.recorded = self.recorded, None
        _captures.discard(self)
        if self.invalid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return SimpleNamespace(launch=lambda stream=None: [call() for call in recorded])

    def is_capturing(self):
        if self.recorded is not None and self.invalid:
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
        return self.recorded is not None


Stream.null = Stream(null=True)


def _entered():
    return _local.__dict__.setdefault("entered", [])


def _stack(device):
    return _local.__dict__.setdefault("stacks", {}).setdefault(device, [Stream.null])


def get_current_stream(device_id=-1):
    return _stack(_device() if device_id == -1 else device_id)[-1]


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.device, self.is_timed, self.over_at = _device(), not disable_timing, 0.0
        self.ptr = id(self)

    @property
    def done(self):
        _unsafe("cudaEventQuery")
        return time.perf_counter() >= self.over_at

    def record(self, stream=None):
        (stream or get_current_stream()).record(self)

    def synchronize(self):
        _unsafe("cudaEventSynchronize")
        _sleep_until(self.over_at)


def get_elapsed_time(start_event, end_event):
    if not (start_event.is_timed and end_event.is_timed):
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event without times")
    return max(end_event.over_at - start_event.over_at, 1e-6) * 1e3


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner = ptr, size, owner
        self.device_id = _device() if device_id < 0 else device_id


class _Block:
    def __init__(self, size, pool):
        self.size, self.pool, self.device_id = size, pool, _device()
        self.bytes = pool.taken(self)
        self.ptr = self.bytes.ctypes.data

    def __del__(self):
        if hasattr(self, "bytes"):
            self.pool.came_back(self)


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    @property
    def device_id(self):
        return self.mem.device_id

    def copy_from_host_async(self, mem, size, stream=None):
        self._copied(stream, self.ptr, mem, size)

    def copy_to_host_async(self, mem, size, stream=None):
        self._copied(stream, mem, self.ptr, size)

    def _copied(self, stream, target, source, size):
        stream = stream or get_current_stream()
        if stream.is_capturing():
            raise RuntimeError("the current stream is capturing, so transfers are disallowed")
        if stream.number() != _device() or not isinstance(target, int) or not isinstance(source, int):
            raise CUDARuntimeError("cudaErrorInvalidValue")
        stream.add(size / _BYTES_PER_S)
        ctypes.memmove(target, source, size)


class MemoryPool:
    def __init__(self, allocator=None):
        self._free, self._used = {}, dict.fromkeys(range(_NUM_DEVICES), 0)

    def malloc(self, size):
        return MemoryPointer(_Block(-(-max(size, 1) // 512) * 512, self), 0)

    def taken(self, block):
        with _lock:
            self._used[block.device_id] += block.size
            free = self._free.get((block.device_id, block.size))
            if free:
                return free.pop()
            if block.size > _TOTAL - self.total_bytes():
                self._used[block.device_id] -= block.size
                raise OutOfMemoryError(f"out of memory allocating {block.size} bytes")
        _unsafe("cudaMalloc")
        return np.empty(block.size, np.uint8)

    def came_back(self, block):
        with _lock:
            self._used[block.device_id] -= block.size
            self._free.setdefault((block.device_id, block.size), []).append(block.bytes)

    def used_bytes(self):
        return self._used[_device()]

    def free_bytes(self):
        return sum(size * len(free) for (device, size), free in self._free.items() if device == _device())

    def total_bytes(self):
        return self.used_bytes() + self.free_bytes()

    def free_all_blocks(self, stream=None):
        with _lock:
            for key in [key for key in self._free if key[0] == _device()]:
                del self._free[key]

    def get_limit(self):
        return 0


class OutOfMemoryError(MemoryError):
    pass


_pool = MemoryPool()
_allocators = [_pool.malloc]


def get_default_memory_pool():
    return _pool


def get_default_pinned_memory_pool():
    return SimpleNamespace(n_free_blocks=lambda: 0, free_all_blocks=lambda: None)


@contextlib.contextmanager
def _using_allocator(allocator):
    _allocators.append(allocator)
    try:
        yield
    finally:
        _allocators.pop()


class PinnedMemory:
    def __init__(self, size, flags=0):
        _unsafe("cudaHostAlloc")
        self.size = size


class PinnedMemoryPointer(bytearray):
    def __init__(self, mem, offset):
        super().__init__(mem.size)
        self.mem = mem
        self.ptr = ctypes.addressof((ctypes.c_char * max(mem.size, 1)).from_buffer(self)) if mem.size else 0
        _pinned[self.ptr] = mem.size

    def __del__(self):
        _pinned.pop(self.ptr, None)


def alloc_pinned_memory(size):
    return PinnedMemoryPointer(PinnedMemory(size), 0)


def _is_memory_pinned(pointer):
    return any(start <= pointer < start + size for start, size in list(_pinned.items()))


def _host_register(pointer, size, flags):
    _unsafe("cudaHostRegister")
    if pointer in _pinned:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    _pinned[pointer] = size


def _host_unregister(pointer):
    _unsafe("cudaHostUnregister")
    del _pinned[pointer]


def _mem_get_info():
    return _TOTAL - _pool.total_bytes(), _TOTAL


class ndarray:  # noqa: N801 - as CuPy has it
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.data = _allocators[-1](num_bytes) if memptr is None else memptr
        memory = (ctypes.c_char * max(num_bytes, 1)).from_address(self.data.ptr)
        self.host = np.ndarray(shape, dtype, memory, 0, strides, order)

    @classmethod
    def of(cls, host, data):
        actual = cls.__new__(cls)
        actual.host, actual.data = host, data
        return actual

    def __getattr__(self, name):
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides"):
            return getattr(self.host, name)
        if name.startswith("__") or name not in dir(np.ndarray):
            raise AttributeError(name)
        return lambda *args, **kwargs: _called(getattr(np.ndarray, name), self, *args, **kwargs)

    @property
    def flags(self):
        flags = self.host.flags
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous)

    @property
    def device(self):
        return Device(self.data.device_id)

    @property
    def T(self):  # noqa: N802 - as CuPy has it
        return _view(self, self.host.T)

    def get(self, stream=None, order="C", out=None, blocking=True):
        (stream or get_current_stream()).synchronize()
        return self.host.copy()

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __getitem__(self, index):
        actual = self.host[_host(index)]
        return _view(self, np.asarray(actual)) if np.shares_memory(actual, self.host) else _new(actual)

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        _check((self, value))
        get_current_stream().add(self.nbytes / 1e12)
        self.host[_host(index)] = _host(value)

    def __len__(self):
        return len(self.host)

    def __float__(self):
        return float(self.get())

    def __int__(self):
        return int(self.get())

    def __bool__(self):
        return bool(self.get())

    def __dlpack_device__(self):
        return 2, self.data.device_id

    def __dlpack__(self, **options):
        raise BufferError("the stand-in shares with itself only")

    def __repr__(self):
        return repr(self.host)

    def __reduce__(self):
        return array, (self.get(),)


def _binary(name):
    def method(self, *others):
        return _called(getattr(np.ndarray, name), self, *others)

    return method


_COMPARISONS = ["lt", "le", "eq", "ne", "gt", "ge"]
_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
for _name in [*_COMPARISONS, *_OPERATORS, *(f"r{name}" for name in _OPERATORS)]:
    setattr(ndarray, f"__{_name}__", _binary(f"__{_name}__"))
for _name in ("neg", "invert", "abs"):
    setattr(ndarray, f"__{_name}__", _binary(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv"):

    def _in_place(self, other, _name=_name):
        self[...] = getattr(self, f"__{_name}__")(other)
        return self

    setattr(ndarray, f"__i{_name}__", _in_place)
ndarray.__hash__ = None


def _host(value):
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, (tuple, list)):
        return type(value)(map(_host, value))
    return value


def _view(source, host):
    return ndarray.of(host, MemoryPointer(source.data.mem, host.__array_interface__["data"][0] - source.data.mem.ptr))


def _new(host):
    host = np.asarray(host)
    actual = ndarray(host.shape, host.dtype)
    actual.host[...] = host
    return actual


def _check(values):
    for value in values:
        if isinstance(value, (tuple, list)):
            _check(value)
        elif isinstance(value, ndarray) and value.data.device_id != _device():
            raise ValueError(f"an array of device {value.data.device_id} on device {_device()}")


def _called(function, *args, out=None, **kwargs):
    _check((*args, out))
    stream = get_current_stream()

    def call():
        actual = function(*map(_host, args), **{name: _host(value) for name, value in kwargs.items()})
        if out is not None:
            if out.host.shape != np.shape(actual) or out.host.dtype != actual.dtype:
                raise ValueError("out has another shape or dtype")
            out.host[...] = actual
        return actual

    if stream.recorded is not None and out is not None:
        stream.recorded.append(call)
        return out
    stream.add(1e-6)
    actual = call()
    if out is not None:
        return out
    if not isinstance(actual, (np.ndarray, np.generic)):
        return actual
    source = args[0] if args and isinstance(args[0], ndarray) else None
    if source is not None and np.shares_memory(actual, source.host):
        return _view(source, actual)
    return _new(actual)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if isinstance(obj, ndarray):
        stream, found = get_current_stream(), ndarray(obj.shape, dtype or obj.dtype)
        stream.add(obj.nbytes / _BYTES_PER_S)
        found.host[...] = obj.host
        return found
    host = np.asarray(obj, dtype)
    get_current_stream().add(host.nbytes / _BYTES_PER_S)
    found = ndarray(host.shape, host.dtype.newbyteorder("="))
    found.host[...] = host
    return found


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    is_here = isinstance(a, ndarray) and a.data.device_id == _device() and dtype in (None, a.dtype)
    return a if is_here and not copy else array(a, dtype)


def ascontiguousarray(a, dtype=None):
    _check((a,))
    return a if a.host.flags.c_contiguous and a.ndim else _new(np.ascontiguousarray(a.host))


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype)


def empty_like(a, dtype=None):
    return ndarray(a.shape, dtype or a.dtype)


def copyto(dst, src):
    dst[...] = src


def from_dlpack(array, *, device=None, copy=None):
    if not isinstance(array, ndarray):
        raise TypeError("the stand-in shares with itself only")
    return _view(array, array.host)


class ElementwiseKernel:
    """The kernels that compute a permutation and sums, with NumPy."""

    def __new__(cls, in_params, out_params, operation, name="kernel", preamble=""):
        return {"daskdist_permuted": _permute, "daskdist_sum": _sum}[name]


def _sum(x, length, step, total):
    def summed(x):
        numbers = x.reshape(-1).astype(total.dtype)
        return np.pad(numbers, (0, -length % step)).reshape(-1, step).sum(axis=0)

    assert x.size == length
    _called(summed, x, out=total)


def _permute(start, length, low_bits, num_high, *keys_and_out):
    *keys, out = keys_and_out
    num_high, mask = np.uint64(num_high), np.uint32((1 << low_bits) - 1)
    number = np.arange(start, start + out.size, dtype=np.int64)
    todo = np.ones(len(number), bool)
    while todo.any():
        high, low = (number[todo] >> low_bits).astype(np.uint32), number[todo].astype(np.uint32) & mask
        for turn in (0, 2, 4):
            low ^= _mixed(high ^ np.uint32(keys[turn])) & mask
            high += ((_mixed(low ^ np.uint32(keys[turn + 1])).astype(np.uint64) * num_high) >> 32).astype(np.uint32)
            high[high >= num_high] -= np.uint32(num_high)
        number[todo] = (high.astype(np.int64) << low_bits) | low
        todo[todo] = number[todo] >= length
    out.host[...] = number


def _mixed(number):
    number = (number ^ (number >> 16)) * np.uint32(0x7FEB352D)
    number = (number ^ (number >> 15)) * np.uint32(0x846CA68B)
    return number ^ (number >> 16)


class RawKernel:
    """A kernel that takes a number of nanoseconds, or of cycles of a clock of 2 GHz."""

    def __init__(self, code, name, options=()):
        self._per_s = 1e9 if "globaltimer" in code else 2e9

    def __call__(self, grid, block, args):
        get_current_stream().add(int(args[0]) / self._per_s)


random = SimpleNamespace(
    random=lambda shape, dtype=float: _new(np.random.default_rng(0).random(shape, dtype)),
    permutation=lambda number: _new(np.random.default_rng(0).permutation(number)),
)
linalg = SimpleNamespace(norm=lambda x, axis=None: _called(np.linalg.norm, x, axis=axis))
cuda = SimpleNamespace(
    Device=Device,
    Stream=Stream,
    Event=Event,
    get_current_stream=get_current_stream,
    get_elapsed_time=get_elapsed_time,
    UnownedMemory=UnownedMemory,
    MemoryPointer=MemoryPointer,
    MemoryPool=MemoryPool,
    PinnedMemory=PinnedMemory,
    PinnedMemoryPointer=PinnedMemoryPointer,
    alloc_pinned_memory=alloc_pinned_memory,
    pinned_memory=SimpleNamespace(is_memory_pinned=_is_memory_pinned),
    get_allocator=lambda: _allocators[-1],
    using_allocator=_using_allocator,
    nvrtc=SimpleNamespace(getVersion=lambda: (13, 2)),
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: _NUM_DEVICES,
        getDevice=_device,
        getDeviceProperties=lambda number: {"name": b"a stand-in", "uuid": bytes([number] * 16)},
        deviceGetPCIBusId=lambda number: f"0000:0{number}:00.0",
        memGetInfo=_mem_get_info,
        runtimeGetVersion=lambda: 13020,
        hostAllocPortable=1,
        hostRegister=_host_register,
        hostUnregister=_host_unregister,
        is_hip=False,
    ),
    nccl=SimpleNamespace(available=False),
)
sys.modules["cupy.cuda"], sys.modules["cupy.cuda.nccl"] = cuda, cuda.nccl


def __getattr__(name):
    actual = getattr(np, name)
    if isinstance(actual, type) or not callable(actual):
        return actual
    return lambda *args, **kwargs: _called(actual, *args, **kwargs)


def _exchange(mode):
    before, _local.mode = getattr(_local, "mode", 0), mode
    return before


def _be_driver():
    # The package calls the driver's library directly, so these functions are replaced too.
    from daskdist.devices import cuda_streams, nvidia

    cuda_streams._capture_mode = lambda: _exchange
    nvidia.driver_version = lambda: 13000
    nvidia.uuid_of = lambda index: nvidia.spelled(bytes([index] * 16))


_be_driver()
