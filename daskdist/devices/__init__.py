"""Devices: where a replica's arrays live and what computes on them.

A device kind is one sibling file with one class. Names are a kind and a number, ``"CPU:0"``; TensorFlow's
longer spellings (``"/gpu:1"``, ``"/device:CPU:0"``) are taken too.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np

from daskdist.core.selection.permutation import Permutation
from daskdist.errors import ArgumentError, UnknownDeviceError

# Kind -> import path, and the library whose arrays it has.
KINDS: Final = {
    "CPU": ("daskdist.devices.cpu:CpuDevice", "numpy"),
    "GPU": ("daskdist.devices.cupy:CupyDevice", "cupy"),
}
# Kinds by the numbers that DLPack has for them: CUDA, ROCm, and CUDA's managed memory.
OF_DLPACK: Final = {2: "GPU", 10: "GPU", 13: "GPU"}


class Event(Protocol):
    """A moment in what a stream does."""

    @property
    def is_over(self) -> bool:
        """True if the stream has reached the event."""
        ...

    def synchronize(self) -> None:
        """Wait here until it has."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds between another event of the device and this one; both are over."""
        ...


class DeviceStream(Protocol):
    """An ordered queue of work on a device; work in two streams may run at the same time.

    Two that stand for the same one are equal.
    """

    def record(self) -> Event:
        """Record an event that is over when all work given so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """Make all work given from now on wait for an event."""
        ...

    def synchronize(self) -> None:
        """Wait here until all is done."""
        ...


class Device(Protocol):
    """One device. It is a value: equal to another of its kind and number, hashed and pickled by those.

    Parameters
    ----------
    kind
        The first part of its name.
    index
        The second.
    """

    kind: str
    index: int

    @property
    def is_host(self) -> bool:
        """True if its arrays are NumPy's, in this process's memory: there is nothing to copy to it."""
        ...

    @property
    def namespace(self) -> Any:
        """The array namespace of its arrays, such as ``numpy``."""
        ...

    @property
    def uuid(self) -> str:
        """An identifier of the physical device, the same under whatever name a process has for it."""
        ...

    @property
    def description(self) -> str:
        """The name of the device for people: a GPU's model."""
        ...

    @property
    def out_of_memory(self) -> type[Exception]:
        """The exceptions raised where it has no memory left."""
        ...

    @staticmethod
    def num_present() -> int:
        """Return the number of devices of the kind that this process sees; they are numbered from 0 on."""
        ...

    def missing(self) -> str | None:
        """Return why it cannot be used in this process, and what to do; None if it can."""
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
        """Return whether it has no arrays of a dtype: text, objects, times and long doubles on GPUs."""
        ...

    def put(self, array: Any) -> Any:
        """Copy an array of the host, or of another device of this kind, to this device.

        The host's array may be changed once it has returned.

        Raises
        ------
        ArgumentError
            The device lacks the dtype.
        """
        ...

    def get(self, array: Any) -> Any:
        """Copy an array of this device to a NumPy array, once it has been computed."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new, uninitialized array of this device."""
        ...

    def lend(self, num_bytes: int, back: Callable[[Any], None]) -> Any:
        """Return new bytes for others to compute with in streams of their own.

        ``back`` is called with their memory when nobody has any of them any more, before that can be had again, in
        whatever thread lets go of the last. As long as it is kept from there on it cannot be had.
        """
        ...

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Part of an array of bytes, from ``offset`` on, as an array in order of C; it shares and keeps the memory."""
        ...

    def pinned(self, num_bytes: int) -> Any:
        """Memory of the host that the device copies from and to by itself: a NumPy array of bytes."""
        ...

    def is_pinned(self, array: Any) -> bool:
        """Return whether a NumPy array lies in pinned memory."""
        ...

    def copy(self, source: Any, target: Any, stream: DeviceStream) -> None:
        """Copy pinned bytes of the host to as many of the device, in a stream: they must stay as they are until then.

        Raises
        ------
        ArgumentError
            They are not as many.
        """
        ...

    def permuted(self, order: Permutation, start: int, stop: int) -> Any:
        """Return the items from one place to another of a random order, computed in the current stream.

        An array of this device, int64, shape ``(stop - start,)``; not to be changed.
        """
        ...

    def stream(self) -> DeviceStream:
        """Return a new stream, which does not wait for the default one."""
        ...

    def current_stream(self) -> DeviceStream:
        """Return the stream in which this thread computes."""
        ...

    def using(self, stream: DeviceStream | None = None) -> AbstractContextManager[Any]:
        """Make the device, and a stream of its, those of this thread in a ``with`` block."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Bytes that could be given out, with what this process holds and does not use, and bytes in all."""
        ...

    def held_bytes(self) -> int:
        """Bytes of the device that this process holds; where nobody counts those, those that all processes do."""
        ...

    def free_unused(self) -> None:
        """Give back what this process holds of its memory and has no arrays in."""
        ...

    def combined(self, how: str, arrays: Sequence[Any]) -> Any:
        """Arrays of one shape and dtype, each on another device of this kind, made one on this, the first one's.

        By a library that does so from device to device, in the replicas' streams; ``how`` is ``"SUM"``, ``"PROD"``,
        ``"MIN"`` or ``"MAX"``. None where there is none, or nothing is gained by it.
        """
        ...

    def from_dlpack(self, array: Any) -> Any:
        """Somebody else's array on this device as one of the namespace; they share the memory."""
        ...


def device(name: str) -> Device:
    """Return the device of a name, present here or not.

    Raises
    ------
    UnknownDeviceError
        There is no such kind, or the name is none.
    """
    match = re.fullmatch(r"(?:/?(?:job|replica|task):[^/]*)*/?(?:device:)?([A-Za-z]+):(\d+)", str(name))
    if match is None:
        raise UnknownDeviceError(f"{name!r} is not the name of a device; write a kind and a number, such as 'CPU:0'")
    kind, index = match[1].upper(), int(match[2])
    if kind not in KINDS:
        raise UnknownDeviceError(f"{name!r}: no device of kind {kind} can be used here; there are {', '.join(KINDS)}")
    return _class_of(kind)(index)  # type: ignore[no-any-return]


def devices(names: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices of several names, no two of which may be one device."""
    if isinstance(names, str):
        names = [names]
    found = tuple(map(device, names))
    seen: dict[tuple[str, int], str] = {}
    for name, each in zip(names, found, strict=True):
        if (each.kind, each.index) in seen:
            raise UnknownDeviceError(f"{name!r} and {seen[each.kind, each.index]!r} are one device; name each once")
        seen[each.kind, each.index] = name
    return found


def check_present(found: Sequence[Device]) -> None:
    """See that devices can be used in this process.

    Raises
    ------
    UnknownDeviceError
        One cannot; the message says why, and what to do.

    >>> check_present(devices(["CPU:0", "CPU:1"]))
    """
    for each in found:
        if why := each.missing():
            raise UnknownDeviceError(f"{name_of(each)!r} cannot be used here: {why}")


def present() -> tuple[Device, ...]:
    """Return the devices that this process sees and that are not the host, in order of kinds and numbers."""
    kinds = [_class_of(kind) for kind in KINDS]
    return tuple(kind(index) for kind in kinds if not kind.is_host for index in range(kind.num_present()))


def name_of(device: Device) -> str:
    """Return the canonical name, such as ``"CPU:0"``."""
    return f"{device.kind}:{device.index}"


# The device of a canonical name; a replica asks at each call.
named = functools.lru_cache(maxsize=256)(device)


def stream_of(device: Device) -> DeviceStream:
    """Return the stream in which the replica on a device computes, in this process."""
    with _making:
        return _stream_of(name_of(device))


# A cache does not keep two threads from making two.
_making: Final = threading.RLock()


@functools.lru_cache(maxsize=256)
def _stream_of(name: str) -> DeviceStream:
    return named(name).stream()


def is_on_device(value: Any) -> bool:
    """Return whether an object is an array of a device that is not the host."""
    return _kind_of(value) is not None


def are_loaded() -> bool:
    """Return whether the library of a device is imported: without it there can be no arrays of the device."""
    for _, library in KINDS.values():  # noqa: SIM110 - asked in every step, and `any` takes twice as long
        if library in sys.modules and library != "numpy":
            return True
    return False


def device_of(value: Any) -> Device | None:
    """Return the device that an array is on; None for an array of the host, and for anything else."""
    kind = _kind_of(value)
    return None if kind is None else named(f"{kind.kind}:{kind.index_of(value)}")


def dtype_of(array: Any) -> np.dtype[Any]:
    """Return the dtype of an array of any device as NumPy's."""
    dtype = array.dtype
    # Namespaces that have dtypes of their own call them as NumPy does.
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])


def on_host(value: Any) -> Any:
    """Return an array of any device as a NumPy array; anything else unchanged."""
    kind = _kind_of(value)
    return value if kind is None else kind(0).get(value)


def adopted(value: Any) -> Any:
    """Return a tensor of another library as an array that operates with those here; anything else unchanged.

    Where it is on a device whose arrays are loaded it becomes one of those, which shares its memory, and is there for
    the current stream of the device. Of another device it becomes one of the host. What it was computed from, for
    gradients, is left behind.
    """
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__dlpack_device__") or is_on_device(value):
        return value
    # PyTorch neither shares nor makes NumPy's what it is to have gradients of.
    value = value.detach() if hasattr(value, "detach") else value
    there = _device_by_dlpack(value)
    if there is not None and KINDS[there.kind][1] in sys.modules and there.missing() is None:
        return there.from_dlpack(value)
    return value.cpu() if hasattr(value, "cpu") else value


def others_on_host(value: Any) -> Any:
    """Return a tensor of another library as an array of the host; anything else unchanged.

    Raises
    ------
    ArgumentError
        It cannot be had from its device here.
    """
    name, found = type(value).__name__, value
    if hasattr(type(value), "__dlpack_device__"):
        try:
            found = on_host(adopted(value))
            there = _device_by_dlpack(found)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise ArgumentError(f"{name} cannot be copied to the host ({error}); give it as a NumPy array") from None
        if there is not None:
            why = there.missing() or "its library is not here"
            raise ArgumentError(
                f"{name} on {name_of(there)} cannot be copied from there ({why}); give it as a NumPy array"
            )
    elif hasattr(type(value), "__cuda_array_interface__"):
        raise ArgumentError(f"{name} is on a GPU; give it as cupy.asarray(x), or as a NumPy array")
    return found


def _device_by_dlpack(value: Any) -> Device | None:
    # None of what is on the host, or on several devices, as an array of JAX may be.
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
        # Nobody has arrays of a library that nobody has loaded.
        if library in sys.modules and library != "numpy" and _class_of(kind).holds(value):
            return _class_of(kind)
    return None


@functools.cache
def _class_of(kind: str) -> Any:
    module, _, attribute = KINDS[kind][0].partition(":")
    return getattr(importlib.import_module(module), attribute)
