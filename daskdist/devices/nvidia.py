"""Facts about GPUs from NVIDIA's driver, without CuPy and without a context, which takes memory of each GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import uuid
from typing import Any, Final

# The libraries that come with the driver.
_DRIVER: Final = "libcuda.so.1"
_MANAGEMENT: Final = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@functools.cache
def _library(name: str) -> Any:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    return None


def _driver() -> Any:
    # The driver once it has begun, or None.
    driver = _library(_DRIVER)
    return driver if driver is not None and driver.cuInit(0) == 0 else None


def driver_version() -> int:
    """Return the newest CUDA version of the driver, such as 13000; 0 where there is no driver."""
    driver, found = _library(_DRIVER), ctypes.c_int()
    return found.value if driver is not None and driver.cuDriverGetVersion(ctypes.byref(found)) == 0 else 0


def uuid_of(index: int) -> str | None:
    """Return the name by ``nvidia-smi -L`` of a GPU that this process sees; None where the driver does not tell.

    CuPy tells it as text in C, which ends at the first byte that is zero. Of part of a GPU (MIG) it is the part's.
    """
    handle, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver = _driver()
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), index):
        return None
    # It came with CUDA 11.4; before there were no parts.
    get = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    return None if get(ctypes.byref(found), handle) else spelled(bytes(found))


def spelled(found: bytes) -> str:
    """Format the sixteen bytes of a UUID like NVIDIA.

    >>> spelled(bytes(range(16)))
    'GPU-00010203-0405-0607-0809-0a0b0c0d0e0f'
    """
    return f"GPU-{uuid.UUID(bytes=found)}"


def is_in_use(index: int) -> bool:
    """Return whether this process has a context on a GPU, so that asking for its memory makes none; True if unknown."""
    handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    driver = _driver()
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), index):
        return True
    refused = driver.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(is_active))
    return bool(refused or is_active.value)


def memory_of(name: str) -> tuple[int, int] | None:
    """Bytes free and bytes in all of the GPU of a UUID; None where the driver does not tell."""
    management, handle, found = _library(_MANAGEMENT), ctypes.c_void_p(), _Memory()
    # Each beginning is counted, and has an end.
    if management is None or management.nvmlInit_v2():
        return None
    try:
        if management.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return None
        if management.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)):
            return None
        return found.free, found.total
    finally:
        management.nvmlShutdown()
