"""Plain values as bytes: compressed JSON, followed by arrays. They contain no code."""

from __future__ import annotations

import json
import zlib
from typing import Any, Final

import numpy as np

from daskdist.core.structure import FIXED_SIZE_KINDS

# Lists of at least this many integers are stored as arrays.
_MANY: Final = 8
# The most that packed bytes may unpack to.
_MOST_BYTES: Final = 2**30


def pack(value: Any) -> bytes:
    """Return a value as bytes: None, numbers, text, bytes, arrays, and lists, tuples and dicts of these.

    Raises
    ------
    TypeError
        The value has a part of another type.

    >>> unpack(pack({"a": (1, [2.5, None]), "b": np.arange(3)}))
    {'a': (1, [2.5, None]), 'b': array([0, 1, 2])}
    """
    data: list[bytes] = []
    structure = json.dumps(_encoded(value, data), separators=(",", ":")).encode()
    return zlib.compress(b"".join([len(structure).to_bytes(8, "little"), structure, *data]))


def is_plain(value: Any) -> bool:
    """Return whether `pack` accepts a value."""
    try:
        _encoded(value, [])
    except TypeError:
        return False
    return True


def unpack(packed: bytes) -> Any:
    """Return the value that was packed by `pack`.

    Raises
    ------
    ValueError
        The bytes are not the result of `pack`, or are damaged.
    """
    try:
        reader = zlib.decompressobj()
        content = reader.decompress(packed, _MOST_BYTES)
        if not reader.eof:
            raise ValueError("it is incomplete or too large")
        size = int.from_bytes(content[:8], "little")
        return _decoded(json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :])
    except (zlib.error, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def narrowed(numbers: Any) -> Any:
    """Return an array of integers, of which there is at least one, in the smallest dtype that holds them."""
    low, high = int(numbers.min()), int(numbers.max())
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return numbers.astype(dtype)
    return numbers


def _encoded(value: Any, data: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        if len(value) >= _MANY and all(type(item) is int and -(2**63) <= item < 2**63 for item in value):
            return {"i": _array(narrowed(np.array(value, np.int64)), data)}
        return [_encoded(item, data) for item in value]
    if isinstance(value, tuple):
        return {"t": [_encoded(item, data) for item in value]}
    if kind is dict:
        return {"d": [[_encoded(key, data), _encoded(item, data)] for key, item in value.items()]}
    if kind is bytes:
        return {"b": _array(np.frombuffer(value, np.uint8), data)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in FIXED_SIZE_KINDS:
        return {"a" if isinstance(value, np.ndarray) else "g": _array(np.asarray(value), data)}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    raise TypeError(f"{kind.__name__} {value!r:.80}")


def _array(array: Any, data: list[bytes]) -> list[Any]:
    content = np.ascontiguousarray(array).tobytes()
    data.append(content)
    return [array.dtype.str, list(array.shape), len(content)]


def _decoded(value: Any, data: memoryview) -> Any:
    stop = 0

    def array(dtype: str, shape: list[int], size: int) -> Any:
        nonlocal stop
        start, stop = stop, stop + size
        kind = np.dtype(dtype)
        if kind.kind not in FIXED_SIZE_KINDS:
            raise ValueError(f"no array of a state has the dtype {dtype}")
        if stop > len(data):
            raise ValueError("it is incomplete")
        return np.ndarray(shape, kind, bytes(data[start:stop])).copy()

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        match kind:
            case "t":
                return tuple([visit(item) for item in content])
            case "d":
                return {visit(key): visit(item) for key, item in content}
            case "i":
                return array(*content).tolist()
            case "a":
                return array(*content)
            case "g":
                return array(*content)[()]
            case "b":
                return array(*content).tobytes()
            case "c":
                return complex(*content)
        raise ValueError(f"unknown kind of value {kind!r:.20}")

    return visit(value)
