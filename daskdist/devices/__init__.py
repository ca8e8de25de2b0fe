"""Devices, which hold a replica's arrays and compute with them.

A device kind is one file with one class. Names are a kind and a number, such as ``"CPU:0"``; TensorFlow's longer
spellings (``"/gpu:1"``, ``"/device:CPU:0"``) are accepted too.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np

from daskdist.config import setting
from daskdist.core.selection.permutation import Permutation
from daskdist.devices.device_names import kind_and_index
from daskdist.errors import ArgumentError, UnknownDeviceError

logger: Final = logging.getLogger("daskdist")
# Kind -> import path, and the library of its arrays.
KINDS: Final = {
    "CPU": ("daskdist.devices.cpu:CpuDevice", "numpy"),
    "GPU": ("daskdist.devices.cupy:CupyDevice", "cupy"),
}
# DLPack's number of a device type -> kind: CUDA, ROCm, and CUDA's managed memory.
OF_DLPACK: Final = {2: "GPU", 10: "GPU", 13: "GPU"}


class Event(Protocol):
    """A point in the work of a stream."""

    @property
    def is_over(self) -> bool:
        """True if the stream has reached the event."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has reached the event."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier event of the device to this one; both must be over."""
        ...


class DeviceStream(Protocol):
    """An ordered queue of work on a device; work in two streams may run at the same time.

    Objects for the same stream are equal.
    """

    @property
    def is_capturing(self) -> bool:
        """True while the work queued in it is captured as a graph instead of done; it cannot be waited for then."""
        ...

    def record(self, *, is_timed: bool = False) -> Event:
        """Record an event that is over when all work queued so far is done; `Event.seconds_since` needs timed ones."""
        ...

    def wait(self, event: Event) -> None:
        """Make all work queued from now on wait for an event."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        ...

    def await_queued(self) -> None:
        """Wait for queued work if the device computes in the host's threads; a GPU computes in the stream, after it."""
        ...


class Connection(Protocol):
    """One device's connection to those of other processes."""

    def all_reduce(self, reduction: str, array: Any) -> Any:
        """Return the reduction of the arrays of all devices, with the same bits on each, in the current stream.

        ``reduction`` is ``"SUM"``, ``"PROD"``, ``"MIN"`` or ``"MAX"``.
        """
        ...

    def abort(self) -> None:
        """End the connection, and work that waits for others."""
        ...


class Links(Protocol):
    """A library that connects devices of several processes."""

    def suits(self, reduction: str, dtype: np.dtype[Any]) -> bool:
        """Return whether it reduces arrays of a dtype to what NumPy would give, but for the order of additions."""
        ...

    def new_id(self) -> bytes:
        """Return the id of a new connection, which all processes need."""
        ...

    def connect(self, index: int, new_id: bytes, num_ranks: int, rank: int) -> Connection:
        """Wait for all processes, and connect a device; raises the library's error if that is impossible."""
        ...


class Device(Protocol):
    """One device. It is a value, compared, hashed and pickled by its kind and number.

    Parameters
    ----------
    kind
        The first part of its name, such as ``"GPU"``.
    index
        The number in its name.
    """

    kind: str
    index: int

    @property
    def is_host(self) -> bool:
        """True if its arrays are NumPy arrays in this process's memory, so that nothing needs copying."""
        ...

    @property
    def namespace(self) -> Any:
        """The array namespace of its arrays, such as ``numpy``."""
        ...

    @property
    def uuid(self) -> str:
        """An identifier of the physical device, independent of its name in a process."""
        ...

    @property
    def description(self) -> str:
        """A description for people, such as a GPU's model."""
        ...

    @property
    def out_of_memory(self) -> type[Exception]:
        """The exception raised when its memory is exhausted."""
        ...

    @staticmethod
    def num_present() -> int:
        """Return the number of devices of this kind that are visible to this process, numbered from 0."""
        ...

    def missing(self) -> str | None:
        """Return why the device cannot be used in this process, with a remedy; None if it can."""
        ...

    @staticmethod
    def holds(array: Any) -> bool:
        """Return whether an object is an array of devices of this kind."""
        ...

    @staticmethod
    def index_of(array: Any) -> int:
        """Return the index of the device that an array of this kind is on."""
        ...

    @staticmethod
    def lacks(dtype: Any) -> bool:
        """Return whether it cannot hold arrays of a dtype, such as text, objects, times and long doubles on GPUs."""
        ...

    def put(self, array: Any) -> Any:
        """Copy an array from the host, or from another device of this kind, to this device.

        The source array may be changed after the return.

        Raises
        ------
        ArgumentError
            The device lacks the dtype.
        """
        ...

    def get(self, array: Any) -> Any:
        """Wait until an array of this device is computed, and copy it to a NumPy array."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new, uninitialized array of this device."""
        ...

    def allocate(self, num_bytes: int, on_release: Callable[[Any], None]) -> Any:
        """Return new bytes for users that compute in their own streams.

        ``on_release`` is called with the memory when the last reference to any of the bytes is dropped, in that thread
        and before the memory can be allocated again. While it keeps the memory, it cannot be allocated.
        """
        ...

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return bytes from ``offset`` on as an array in C order, which shares the memory and keeps it alive."""
        ...

    def pinned(self, num_bytes: int, *, is_pooled: bool = True) -> Any:
        """Return page-locked host memory, which the device accesses directly, as a NumPy array of bytes.

        Allocating it is slow, and so a pool keeps what is dropped, in sizes that are powers of two. With ``is_pooled``
        false it has just this size, and is returned to the system when it is dropped.
        """
        ...

    def is_pinned(self, array: Any) -> bool:
        """Return whether a NumPy array is in pinned memory."""
        ...

    def lock(self, array: Any) -> bool:
        """Make the memory of a NumPy array pinned until the array is dropped; return whether it is.

        An array that it is a view of is pinned as a whole. This takes about as long as copying it once.
        """
        ...

    def copy(self, source: Any, target: Any, stream: DeviceStream) -> None:
        """Copy pinned bytes of the host to the same number on the device, in a stream; keep them unchanged until then.

        Raises
        ------
        ArgumentError
            The sizes differ.
        """
        ...

    def permuted(self, order: Permutation, start: int, stop: int) -> Any:
        """Return part of a random order, from index ``start`` to ``stop``, computed in the current stream.

        The result is an array of this device, int64, shape ``(stop - start,)``; do not change it.
        """
        ...

    def stream(self) -> DeviceStream:
        """Return a new stream, which does not wait for the default one."""
        ...

    def current_stream(self) -> DeviceStream:
        """Return the stream in which this thread computes."""
        ...

    def outer_streams(self) -> Sequence[DeviceStream]:
        """Return the streams in which this thread computes, the current one and those of other libraries."""
        ...

    def take(self, source: Any, index: Any, target: Any) -> None:
        """Copy rows of an array of this device to another one, by their numbers, in the current stream."""
        ...

    def using(self, stream: DeviceStream | None = None, *, for_user: bool = True) -> AbstractContextManager[Any]:
        """Select the device, and one of its streams, for this thread in a ``with`` block.

        Other libraries select them too, unless ``for_user`` is false, where no function of a user is called; and then
        threads of users can capture graphs meanwhile.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the work in all streams of the device is done."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes that this process can allocate, including its unused pool memory, and the total bytes."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes of the device that this process holds; if those are unknown, the bytes of all processes."""
        ...

    def free_unused(self) -> None:
        """Release the memory that this process holds but has no arrays in."""
        ...

    def combined(self, reduction: str, arrays: Sequence[Any]) -> Any:
        """Reduce arrays of one shape and dtype on different devices of this kind to one on this device, the first one.

        A library does so from device to device, in the replicas' streams. ``reduction`` is ``"SUM"``, ``"PROD"``,
        ``"MIN"`` or ``"MAX"``. Returns None if there is no such library, or it would not be faster.
        """
        ...

    def sum_rows(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """Return the sum of the rows of a contiguous array with far more rows than columns, computed in a dtype.

        Returns None if the namespace's own sum is as fast.
        """
        ...

    def links(self) -> Links | None:
        """Return the library that connects it to devices of other processes; None if there is none."""
        ...

    def from_dlpack(self, array: Any) -> Any:
        """Return another library's array on this device as an array of the namespace; they share the memory."""
        ...


def device(name: str) -> Device:
    """Return the device of a name, whether it is present or not.

    Raises
    ------
    UnknownDeviceError
        The kind is unknown, or the name is malformed.
    """
    kind, index = kind_and_index(name)
    if kind not in KINDS:
        raise UnknownDeviceError(f"{name!r}: the kind {kind} is unknown; there are {', '.join(KINDS)}")
    return _class_of(kind)(index)  # type: ignore[no-any-return]


def devices(names: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices of several names, which must be distinct."""
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, Sequence):
        raise UnknownDeviceError(f"devices is {names!r:.80}; give their names, such as ['CPU:0', 'CPU:1']")
    named_devices = tuple(map(device, names))
    seen: dict[tuple[str, int], str] = {}
    for name, named_device in zip(names, named_devices, strict=True):
        key = named_device.kind, named_device.index
        if key in seen:
            raise UnknownDeviceError(f"{name!r} and {seen[key]!r} are one device; name each once")
        seen[key] = name
    return named_devices


def check_present(devices: Sequence[Device]) -> None:
    """Check that devices can be used in this process.

    Raises
    ------
    UnknownDeviceError
        A device cannot be used; the message gives the reason and a remedy.

    >>> check_present(devices(["CPU:0", "CPU:1"]))
    """
    for device in devices:
        if why := device.missing():
            raise UnknownDeviceError(f"{name_of(device)!r} cannot be used here: {why}")


def usable(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return devices that can be used in this process, with CPUs for missing ones if ``devices.cpu-stand-in`` is set.

    Raises
    ------
    UnknownDeviceError
        A device cannot be used; the message gives the reason and remedies.
    """
    missing = [name_of(device) for device in devices if device.missing()]
    if not missing:
        return tuple(devices)
    taken = {device.index for device in devices if device.is_host}
    numbers = iter(sorted(set(range(len(devices))) - taken))
    chosen = [_class_of("CPU")(next(numbers)) if name_of(device) in missing else device for device in devices]
    names = [name_of(device) for device in chosen]
    if setting("devices.cpu-stand-in"):
        logger.warning("%s cannot be used here; the replicas are on %s", ", ".join(missing), ", ".join(names))
        return tuple(chosen)
    try:
        check_present(devices)
    except UnknownDeviceError as error:
        raise UnknownDeviceError(
            f"{error}. For replicas on CPUs write {names}, or set daskdist.devices.cpu-stand-in to true, which lets "
            "CPUs stand in for missing devices"
        ) from None
    return tuple(devices)


def present() -> tuple[Device, ...]:
    """Return the devices other than the host that are visible to this process, ordered by kind and number."""
    kinds = [_class_of(kind) for kind in KINDS]
    return tuple(kind(index) for kind in kinds if not kind.is_host for index in range(kind.num_present()))


def name_of(device: Device) -> str:
    """Return the canonical name, such as ``"CPU:0"``."""
    return f"{device.kind}:{device.index}"


# Return the device of a canonical name; cached, as replicas need it at each call.
named = functools.lru_cache(maxsize=256)(device)


def stream_of(device: Device) -> DeviceStream:
    """Return the stream in which the replica on a device computes, in this process."""
    with _making:
        return _stream_of(name_of(device))


# A cache alone would let two threads create two streams.
_making: Final = threading.RLock()


@functools.lru_cache(maxsize=256)
def _stream_of(name: str) -> DeviceStream:
    return named(name).stream()


def is_on_device(value: Any) -> bool:
    """Return whether an object is an array on a device other than the host."""
    return _kind_of(value) is not None


def are_loaded() -> bool:
    """Return whether the library of a device is imported; otherwise no arrays of a device exist."""
    for _, library in KINDS.values():  # noqa: SIM110 - asked in every step, and `any` takes twice as long
        if library in sys.modules and library != "numpy":
            return True
    return False


def device_of(value: Any) -> Device | None:
    """Return the device of an array; None for arrays on the host and other objects."""
    kind = _kind_of(value)
    return None if kind is None else named(f"{kind.kind}:{kind.index_of(value)}")


def dtype_of(array: Any) -> np.dtype[Any]:
    """Return the dtype of an array of any device as NumPy's."""
    dtype = array.dtype
    # Namespaces with their own dtypes use NumPy's names.
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])


def on_host(value: Any) -> Any:
    """Return an array of any device as a NumPy array; anything else unchanged."""
    kind = _kind_of(value)
    return value if kind is None else kind(0).get(value)


def adopted(value: Any) -> Any:
    """Return a tensor of another library as an array of this package's devices; anything else unchanged.

    On a device whose library is loaded it becomes an array that shares its memory, ready for the current stream of the
    device. From other devices it is copied to the host. Gradient history is dropped.
    """
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__dlpack_device__") or is_on_device(value):
        return value
    # PyTorch does not share or convert tensors that require gradients.
    value = value.detach() if hasattr(value, "detach") else value
    owner = _device_by_dlpack(value)
    if owner is not None and KINDS[owner.kind][1] in sys.modules and owner.missing() is None:
        return owner.from_dlpack(value)
    return value.cpu() if hasattr(value, "cpu") else value


def others_on_host(value: Any) -> Any:
    """Return a tensor of another library as an array on the host; anything else unchanged.

    Raises
    ------
    ArgumentError
        An array cannot be copied from its device in this process.
    """
    name, array = type(value).__name__, value
    if hasattr(type(value), "__dlpack_device__"):
        try:
            array = on_host(adopted(value))
            owner = _device_by_dlpack(array)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise ArgumentError(f"{name} cannot be copied to the host ({error}); give it as a NumPy array") from None
        if owner is not None:
            why = owner.missing() or "its library is not installed"
            raise ArgumentError(
                f"{name} on {name_of(owner)} cannot be copied from there ({why}); give it as a NumPy array"
            )
    elif hasattr(type(value), "__cuda_array_interface__"):
        raise ArgumentError(f"{name} is on a GPU; give it as cupy.asarray(x), or as a NumPy array")
    return array


def _device_by_dlpack(value: Any) -> Device | None:
    # None for arrays on the host, or on several devices (possible in JAX).
    if isinstance(value, (np.ndarray, np.generic)):
        return None
    try:
        number, index = map(int, value.__dlpack_device__())
    except BufferError:
        return None
    return named(f"{OF_DLPACK[number]}:{index}") if number in OF_DLPACK else None


def _kind_of(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic, int, float, str, bytes)) or value is None:
        return None
    for kind, (_, library) in KINDS.items():
        # There are no arrays of a library that is not loaded.
        if library in sys.modules and library != "numpy" and _class_of(kind).holds(value):
            return _class_of(kind)
    return None


@functools.cache
def _class_of(kind: str) -> Any:
    module, _, attribute = KINDS[kind][0].partition(":")
    return getattr(importlib.import_module(module), attribute)
