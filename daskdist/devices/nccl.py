"""NCCL between NVIDIA GPUs, if CuPy has it; for AMD GPUs RCCL, under the same name in CuPy."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Final

from daskdist.devices import named, stream_of

logger: Final = logging.getLogger("daskdist")

# For fewer bytes, plain copies are as fast.
_LEAST_BYTES: Final = 2**20
# NumPy's name of a dtype -> NCCL's.
_DTYPES: Final = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}
# Calls of one communicator from two threads must not interleave.
_lock: Final = threading.Lock()


def combined(reduction: str, arrays: Sequence[Any]) -> Any:
    """Reduce arrays of one shape and dtype on different GPUs to one on the first GPU; None if NCCL is unsuitable.

    It is a reduction to the first rank rather than NCCL's all-reduce: NCCL does not promise the same bits on all ranks
    of an all-reduce, but copies of one result have them. The order of additions depends on the GPUs and their
    connections, so the same GPUs give the same bits in every run, while others may differ.
    """
    import cupy

    first = arrays[0]
    if len(arrays) < 2 or first.nbytes < _LEAST_BYTES or not LINKS.suits(reduction, first.dtype):
        return None
    numbers = tuple([int(array.device.id) for array in arrays])
    if len(set(numbers)) < len(numbers):
        return None
    with _lock:
        nccl = _library()
        ranks = None if nccl is None else _ranks(numbers)
        if ranks is None:
            return None
        dtype, op = getattr(nccl, _DTYPES[first.dtype.name]), getattr(nccl, f"NCCL_{reduction}")
        streams = [stream_of(named(f"GPU:{number}")) for number in numbers]
        contiguous = []
        for number, stream, array in zip(numbers, streams, arrays, strict=True):
            with cupy.cuda.Device(number), stream.stream:  # type: ignore[attr-defined]
                contiguous.append(cupy.ascontiguousarray(array))
        with cupy.cuda.Device(numbers[0]), streams[0].stream:  # type: ignore[attr-defined]
            result = cupy.empty(first.shape, first.dtype)
        nccl.groupStart()
        try:
            for number, stream, array, rank in zip(numbers, streams, contiguous, ranks, strict=True):
                # Only the first device needs the result.
                target = result.data.ptr if array is contiguous[0] else 0
                with cupy.cuda.Device(number):
                    rank.reduce(array.data.ptr, target, array.size, dtype, op, 0, stream.stream.ptr)  # type: ignore[attr-defined]
        finally:
            nccl.groupEnd()
    return result


class NcclConnection:
    """A GPU's connection to GPUs of other processes, each of which has a rank."""

    def __init__(self, index: int, new_id: bytes, num_ranks: int, rank: int) -> None:
        import cupy

        with cupy.cuda.Device(index):
            self._communicator = _library().NcclCommunicator(num_ranks, new_id, rank)

    def all_reduce(self, reduction: str, array: Any) -> Any:
        # Not NCCL's all-reduce, for the reason given in `combined`.
        import cupy

        nccl, stream = _library(), cupy.cuda.get_current_stream().ptr
        source = cupy.ascontiguousarray(array)
        result = cupy.empty(array.shape, array.dtype)
        dtype, op = getattr(nccl, _DTYPES[array.dtype.name]), getattr(nccl, f"NCCL_{reduction}")
        self._communicator.reduce(source.data.ptr, result.data.ptr, source.size, dtype, op, 0, stream)
        self._communicator.broadcast(result.data.ptr, result.data.ptr, source.size, dtype, 0, stream)
        return result

    def abort(self) -> None:
        self._communicator.abort()


class NcclLinks:
    """NCCL between processes."""

    def suits(self, reduction: str, dtype: Any) -> bool:
        # NCCL's minimum and maximum ignore NaN, while NumPy's propagate it.
        return str(dtype) in _DTYPES and not (reduction in ("MIN", "MAX") and dtype.kind == "f")

    def new_id(self) -> bytes:
        return bytes(_library().get_unique_id())

    def connect(self, index: int, new_id: bytes, num_ranks: int, rank: int) -> NcclConnection:
        return NcclConnection(index, new_id, num_ranks, rank)


LINKS: Final = NcclLinks()


def is_available() -> bool:
    """Return whether CuPy finds NCCL."""
    return _library() is not None


@functools.cache
def _library() -> Any:
    with warnings.catch_warnings():
        # CuPy warns at length if NCCL is missing, which is not a problem here.
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl if nccl.available else None


@functools.lru_cache(maxsize=16)
def _ranks(numbers: tuple[int, ...]) -> Any:
    nccl = _library()
    try:
        return nccl.NcclCommunicator.initAll(list(numbers))
    except nccl.NcclError as error:
        logger.warning("NCCL does not connect GPUs %s (%s); arrays are copied from them one by one", numbers, error)
        return None
