"""NCCL between the GPUs of one process, where CuPy has it; RCCL, which CuPy calls by the same name, between AMD's."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Final

from daskdist.devices import named, stream_of

logger: Final = logging.getLogger("daskdist")

# Of less the copies that are made without it take no longer.
_LEAST_BYTES: Final = 2**20
# By the names of NumPy's dtypes, what NCCL calls them.
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
# Calls of one communicator from two threads must not mix.
_lock: Final = threading.Lock()


def combined(how: str, arrays: Sequence[Any]) -> Any:
    """Arrays of one shape and dtype, one a GPU, made one on the first one's; None where that is not for NCCL.

    It is a reduction to the first, and not NCCL's own all-reduce: NCCL does not say that all ranks of that are given
    the same bits, and copies of one result have them. The order in which it adds depends on the GPUs and how they are
    connected, so that the same GPUs give the same bits in every run, and others may give others.
    """
    import cupy

    first = arrays[0]
    if len(arrays) < 2 or first.nbytes < _LEAST_BYTES or first.dtype.name not in _DTYPES:
        return None
    if how in ("MIN", "MAX") and first.dtype.kind == "f":
        # Its least and largest leave NaN out, and NumPy's are NaN then.
        return None
    numbers = tuple([int(array.device.id) for array in arrays])
    if len(set(numbers)) < len(numbers):
        return None
    with _lock:
        nccl = _library()
        ranks = None if nccl is None else _ranks(numbers)
        if ranks is None:
            return None
        dtype, op = getattr(nccl, _DTYPES[first.dtype.name]), getattr(nccl, f"NCCL_{how}")
        streams = [stream_of(named(f"GPU:{number}")) for number in numbers]
        given = []
        for number, stream, array in zip(numbers, streams, arrays, strict=True):
            with cupy.cuda.Device(number), stream.stream:  # type: ignore[attr-defined]
                given.append(cupy.ascontiguousarray(array))
        with cupy.cuda.Device(numbers[0]), streams[0].stream:  # type: ignore[attr-defined]
            found = cupy.empty(first.shape, first.dtype)
        nccl.groupStart()
        try:
            for number, stream, array, rank in zip(numbers, streams, given, ranks, strict=True):
                # Only the first device needs the result.
                target = found.data.ptr if array is given[0] else 0
                with cupy.cuda.Device(number):
                    rank.reduce(array.data.ptr, target, array.size, dtype, op, 0, stream.stream.ptr)  # type: ignore[attr-defined]
        finally:
            nccl.groupEnd()
    return found


@functools.cache
def _library() -> Any:
    with warnings.catch_warnings():
        # It is said at length where it is not there; nothing is the matter then.
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl if nccl.available else None


@functools.lru_cache(maxsize=16)
def _ranks(numbers: tuple[int, ...]) -> Any:
    nccl = _library()
    try:
        return nccl.NcclCommunicator.initAll(list(numbers))
    except nccl.NcclError as error:
        logger.warning("NCCL does not connect GPUs %s (%s); they are copied from one by one", numbers, error)
        return None
