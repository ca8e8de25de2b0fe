"""A replacement of NCCL, and of the parts of CuPy used with it, in host memory and as strict as the real ones.

Arrays are NumPy arrays that know their GPU. Calls are executed at the end of their group, on the memory at the given
addresses, and only if all ranks of a communicator have made them; a call for which NCCL would wait for ever or exceed
an array is an error.
"""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace

import numpy as np

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(6, 9)
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
_DTYPES = [np.dtype(item) for item in ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")]
_OPS = [np.add, np.multiply, np.maximum, np.minimum]
available = True
current = SimpleNamespace(devices=[0], streams=[None], calls=None, num_groups=0, made=[])


class NcclError(RuntimeError):
    pass


def groupStart():  # noqa: N802 - as CuPy has it
    if current.calls is not None:
        raise NcclError("a group within another")
    current.calls = []


def groupEnd():  # noqa: N802 - as CuPy has it
    calls, current.calls = current.calls, None
    if calls is None:
        raise NcclError("the end of a group that was not begun")
    current.num_groups += 1
    ranks = [rank for rank, _, _, _ in calls]
    if not calls or sorted(map(id, ranks)) != sorted(map(id, ranks[0].all)):
        raise NcclError("not all ranks have called once: the others wait for ever")
    if len({common for _, _, _, common in calls}) > 1:
        raise NcclError("ranks have called different things")
    count, datatype, op, root = calls[0][-1]
    calls.sort(key=lambda call: call[0].rank)
    total, *others = [_at(source, count, datatype).copy() for _, source, _, _ in calls]
    for other in others:
        total = _OPS[op](total, other)
    target = calls[root][2]
    if not target:
        raise NcclError("the root has nowhere for the result")
    _at(target, count, datatype)[:] = total


def _at(address, count, datatype):
    dtype = _DTYPES[datatype]
    if _EXTENTS.get(address) != count * dtype.itemsize:
        raise NcclError(f"{count} of {dtype} at {address}: there is no array of so many bytes")
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


class NcclCommunicator:
    __slots__ = ("all", "number", "rank")

    @staticmethod
    def initAll(devices):  # noqa: N802 - as CuPy has it
        if type(devices) is not list or len(set(devices)) < len(devices):
            raise NcclError(f"{devices}: a list of GPUs, each once")
        made = [NcclCommunicator() for _ in devices]
        for rank, number in enumerate(devices):
            made[rank].all, made[rank].rank, made[rank].number = made, rank, number
        current.made.append(list(devices))
        return made

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream, /):
        given = (sendbuf, recvbuf, count, datatype, op, root, stream)
        if not all(type(value) is int for value in given):
            raise TypeError("an integer is required")
        if current.calls is None:
            raise NcclError("out of a group one rank waits for the next for ever")
        if current.devices[-1] != self.number or _STREAMS[stream] != self.number:
            raise NcclError(f"the device, or the stream, is not that of GPU {self.number}")
        current.calls.append((self, sendbuf, recvbuf, (count, datatype, op, root)))


# Address -> number of bytes, of the arrays whose addresses were requested.
_EXTENTS = {}


class OnGpu(np.ndarray):
    """An array that is on a GPU."""

    number = None

    @property
    def device(self):
        return SimpleNamespace(id=self.number)

    @property
    def data(self):
        if not self.flags.c_contiguous:
            raise NcclError("an array with gaps has no one address")
        _EXTENTS[self.ctypes.data] = self.nbytes
        return SimpleNamespace(ptr=self.ctypes.data)


def on_gpu(array, number):
    actual = np.asarray(array).view(OnGpu)
    actual.number = number
    return actual


class _Entered:
    def __init__(self, stack, what):
        self._stack, self._what = stack, what

    def __enter__(self):
        self._stack.append(self._what)

    def __exit__(self, *error):
        self._stack.pop()


# Address of a stream -> its GPU.
_STREAMS = {}


class Stream(_Entered):
    def __init__(self, number):
        super().__init__(current.streams, number)
        self.ptr = 1000 + number
        _STREAMS[self.ptr] = number


def _here():
    if current.streams[-1] != current.devices[-1]:
        raise RuntimeError(f"the stream is of GPU {current.streams[-1]}, and the device {current.devices[-1]}")
    return current.devices[-1]


def _ascontiguousarray(array):
    if array.number != _here():
        raise RuntimeError("an array of another GPU")
    return on_gpu(np.ascontiguousarray(array), array.number)


def modules():
    """Return the modules to put in ``sys.modules``."""
    cuda, cupy, nccl = ModuleType("cupy.cuda"), ModuleType("cupy"), ModuleType("cupy.cuda.nccl")
    cuda.Device = lambda number: _Entered(current.devices, number)
    cupy.cuda, cupy.ascontiguousarray = cuda, _ascontiguousarray
    cupy.empty = lambda shape, dtype: on_gpu(np.full(shape, 77, dtype), _here())
    names = [name for name in globals() if name.startswith(("NCCL_", "Nccl", "group"))]
    vars(nccl).update({name: globals()[name] for name in [*names, "available"]})
    cuda.nccl = nccl
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}
