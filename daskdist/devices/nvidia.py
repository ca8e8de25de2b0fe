"""Facts about GPUs from NVIDIA's driver, without CuPy and without a context, which would take GPU memory."""

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
    # Return the initialised driver, or None.
    driver = _library(_DRIVER)
    return driver if driver is not None and driver.cuInit(0) == 0 else None


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, such as 13000; 0 without a driver."""
    driver, version = _library(_DRIVER), ctypes.c_int()
    return version.value if driver is not None and driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def uuid_of(index: int) -> str | None:
    """Return the UUID of a visible GPU, as in ``nvidia-smi -L``; None if the driver does not report it.

    CuPy returns it as C text, which ends at the first zero byte. For a partition of a GPU (MIG) it is the partition's.
    """
    handle, uuid_bytes = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver = _driver()
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), index):
        return None
    # The v2 function came with CUDA 11.4, as did partitions.
    get = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    return None if get(ctypes.byref(uuid_bytes), handle) else spelled(bytes(uuid_bytes))


def spelled(uuid_bytes: bytes) -> str:
    """Format the sixteen bytes of a UUID like NVIDIA.

    >>> spelled(bytes(range(16)))
    'GPU-00010203-0405-0607-0809-0a0b0c0d0e0f'
    """
    return f"GPU-{uuid.UUID(bytes=uuid_bytes)}"


def is_in_use(index: int) -> bool:
    """Return whether this process has a context on a GPU, so that a memory query creates none; True if unknown."""
    handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    driver = _driver()
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), index):
        return True
    refused = driver.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(is_active))
    return bool(refused or is_active.value)


def memory_of(name: str) -> tuple[int, int] | None:
    """Return the free and total bytes of the GPU with a UUID; None if the driver does not report them."""
    management, handle, memory = _library(_MANAGEMENT), ctypes.c_void_p(), _Memory()
    # Initialisations are counted, so each needs a shutdown.
    if management is None or management.nvmlInit_v2():
        return None
    try:
        if management.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return None
        if management.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return memory.free, memory.total
    finally:
        management.nvmlShutdown()
