"""Names of devices, such as ``"GPU:0"``, also as TensorFlow writes them."""

from __future__ import annotations

import re

from daskdist.errors import UnknownDeviceError


def kind_and_index(name: object) -> tuple[str, int]:
    """Return the kind, in capitals, and the number in a device's name.

    Raises
    ------
    UnknownDeviceError
        The name is malformed.

    >>> kind_and_index("/job:worker/replica:0/task:0/device:gpu:1"), kind_and_index("CPU:0")
    (('GPU', 1), ('CPU', 0))
    """
    match = re.fullmatch(r"(?:/?(?:job|replica|task):[^/]*)*/?(?:device:)?([A-Za-z]+):(\d+)", str(name))
    if match is None:
        raise UnknownDeviceError(f"{name!r} is not the name of a device; write a kind and a number, such as 'CPU:0'")
    return match[1].upper(), int(match[2])
