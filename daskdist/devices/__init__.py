"""Devices: where a replica's arrays live and what computes on them.

A device kind is one sibling file with one class. Names are a kind and a number, ``"CPU:0"``; TensorFlow's
longer spellings (``"/gpu:1"``, ``"/device:CPU:0"``) are taken too.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

from daskdist.errors import UnknownDeviceError

# Kind -> import path, and what provides it.
KINDS: Final = {
    "CPU": ("daskdist.devices.cpu:CpuDevice", "NumPy"),
}


class Device(Protocol):
    """One device.

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
    def namespace(self) -> Any:
        """The array namespace of its arrays, such as ``numpy``."""
        ...

    def put(self, array: Any) -> Any:
        """An array of the host as one of this device."""
        ...

    def get(self, array: Any) -> Any:
        """An array of this device as a NumPy array."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array of this device whose values are not set."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and bytes in all."""
        ...


def device(name: str) -> Device:
    """The device of a name.

    Raises
    ------
    UnknownDeviceError
        There is no such kind, or no such device here.
    """
    match = re.fullmatch(r"(?:/?(?:job|replica|task):[^/]*)*/?(?:device:)?([A-Za-z]+):(\d+)", str(name))
    if match is None:
        raise UnknownDeviceError(f"{name!r} is not the name of a device; write a kind and a number, such as 'CPU:0'")
    kind, index = match[1].upper(), int(match[2])
    if kind not in KINDS:
        raise UnknownDeviceError(f"{name!r}: no device of kind {kind} can be used here; there are {', '.join(KINDS)}")
    module, _, attribute = KINDS[kind][0].partition(":")
    made: Device = getattr(importlib.import_module(module), attribute)(index)
    return made


def devices(names: Sequence[str]) -> tuple[Device, ...]:
    """The devices of several names, no two of which may be one device."""
    if isinstance(names, str):
        names = [names]
    found = tuple(map(device, names))
    seen: dict[tuple[str, int], str] = {}
    for name, each in zip(names, found, strict=True):
        if (each.kind, each.index) in seen:
            raise UnknownDeviceError(f"{name!r} and {seen[each.kind, each.index]!r} are one device; name each once")
        seen[each.kind, each.index] = name
    return found


def name_of(device: Device) -> str:
    """The canonical name, such as ``"CPU:0"``."""
    return f"{device.kind}:{device.index}"
