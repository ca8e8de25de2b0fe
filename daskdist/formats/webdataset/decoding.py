"""Decoding and encoding of the members of WebDataset archives, by the suffixes of their names.

==================================================  ==============================================================
a name that ends in                                 becomes
==================================================  ==============================================================
png, jpg, jpeg, webp, bmp, gif, tif, tiff,          an image: uint8, shape ``(height, width, channels)``
ppm, pgm, pbm, pnm
cls, cls2, class, count, index, inx, id             an integer: int64
txt, text, transcript                               text, UTF-8
json, jsn                                           a nest by the conversion of `daskdist.tables.from_arrow`
npy                                                 an array, but not of Python objects
anything else                                       bytes
==================================================  ==============================================================

Nothing is unpickled: pickles stay bytes.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, TEXT
from daskdist.core.to_numpy import native
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.image_codec import IMAGES, ImageOptions, encoded_image, why_no_image
from daskdist.formats.npy import header_of

_KINDS: Final = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "npy",
}
_NAMES: Final = ("image", "int", "text", "json", "npy", "raw")


@dataclass(frozen=True)
class Decoding:
    """Options for decoding and encoding fields.

    Parameters
    ----------
    kinds
        True to decode by the suffix, False for bytes only; or overrides by field or suffix: ``"image"``, ``"int"``,
        ``"text"``, ``"json"``, ``"npy"`` or ``"raw"``.
    images
        The options for images.
    """

    kinds: bool | Mapping[str, str] = True
    images: ImageOptions = field(default_factory=ImageOptions)

    def __post_init__(self) -> None:
        if isinstance(self.kinds, bool):
            return
        if not isinstance(self.kinds, Mapping):
            raise ArgumentError(f"decode is {self.kinds!r:.80}; give True, False, or a dict by field: {{'jpg': 'raw'}}")
        for name, kind in self.kinds.items():
            if kind not in _NAMES:
                close = difflib.get_close_matches(str(kind), _NAMES, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ArgumentError(f"decode: {name!r} is {kind!r:.40}; there are {', '.join(map(repr, _NAMES))}{hint}")

    def kind(self, name: str) -> str:
        """Return the kind of a field."""
        if self.kinds is False:
            return "raw"
        end = name.rpartition(".")[2]
        kinds = {} if self.kinds is True else self.kinds
        return kinds.get(name) or kinds.get(end) or _KINDS.get(end, "raw")

    def spec(self, name: str) -> ElementSpec | None:
        """Return the spec of a field; None if it depends on the content."""
        leaf = {
            "image": self.images.spec,
            "int": TensorSpec((), np.dtype(np.int64)),
            "text": TensorSpec((), TEXT),
            "raw": TensorSpec((), np.dtype(object)),
        }.get(self.kind(name))
        return None if leaf is None else ElementSpec(LONE, (leaf,))

    def decode(self, name: str, data: bytes) -> Any:
        """Decode a field to an array, an int, text, bytes, or a JSON value. Errors of libraries propagate."""
        match self.kind(name):
            case "image":
                return self.images.decode(data)
            case "int":
                return _int64(int(data))
            case "text":
                return data.decode("utf-8")
            case "json":
                return json.loads(data)
            case "npy":
                return array_of(data)
            case _:
                return data

    def other_text(self, name: str, data: bytes) -> str:
        """Return the text of a field that cannot be decoded; empty if it can, or if it is no text either."""
        try:
            self.decode(name, data)
        except ValueError:
            text = data.decode("utf-8", "replace").strip()
            return text if text.isprintable() and "\ufffd" not in text else ""
        return ""

    def why_not(self, name: str, spec: ElementSpec) -> str:
        """Return why a value cannot be written as a field, with a remedy; empty if it can."""
        kind = self.kind(name)
        if kind == "json":
            return ""
        if spec.structure != LONE:
            return f"is a nest; call it {name + '.json'!r}"
        leaf = spec.leaves[0]
        if type(leaf) is not TensorSpec:
            return f"is {leaf}, which no field can hold; convert it to an array"
        fits = {
            "int": leaf.dtype.kind in "iu" and not leaf.shape,
            "text": leaf.dtype == TEXT and not leaf.shape,
            "npy": leaf.dtype.kind in "biufcmM",
            "raw": leaf.dtype == object and not leaf.shape,
        }
        if kind == "image":
            return why_no_image(name, leaf)
        if fits[kind]:
            return ""
        expected = {"int": "a whole number", "text": "text", "npy": "an array of numbers", "raw": "bytes"}[kind]
        other = next((end for end, kind in (("cls", "int"), ("txt", "text"), ("npy", "npy")) if fits[kind]), None)
        hint = f"; call it {f'{name}.{other}'!r}" if other is not None else ""
        return f"is {leaf}, but a field of that name is {expected}{hint}"

    def encode(self, name: str, value: Any) -> bytes:
        """Encode a value, a leaf or a nest of leaves."""
        match self.kind(name):
            case "image":
                return encoded_image(name, np.asarray(value))
            case "int":
                return str(_int64(int(value))).encode()
            case "text":
                return str(value).encode("utf-8")
            case "json":
                return json.dumps(_plain(value)).encode()
            case "npy":
                file = io.BytesIO()
                np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
                return file.getvalue()
            case _:
                data = value[()] if isinstance(value, np.ndarray) else value
                if not isinstance(data, (bytes, bytearray, memoryview)):
                    # bytes(number) would give that many zeros.
                    raise ValueError(f"field {name!r} holds bytes, but a value is {data!r:.80}; give bytes")
                return bytes(data)


def array_of(data: bytes) -> np.ndarray[Any, Any]:
    """Return the array of a ``.npy`` file as a view of its bytes, except for text.

    Raises
    ------
    ValueError
        The content is not an array.
    FileError
        It is an array of Python objects.
    """
    if not data.startswith(b"\x93NUMPY") or len(data) < 12:
        raise ValueError("it does not begin like a NumPy array")
    width = 2 if data[6] == 1 else 4
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    shape, in_columns, dtype = _header(data[:start])
    count = prod(shape)
    if len(data) - start != count * dtype.itemsize:
        raise ValueError(
            f"an array of {dtype}{list(shape)} has {count * dtype.itemsize} bytes, but there are {len(data) - start}"
        )
    array = np.frombuffer(data, dtype, count, start) if count else np.empty(0, dtype)
    array = array.reshape(shape, order="F" if in_columns else "C")
    if dtype.kind == "U":
        return array.astype(TEXT)
    converted: np.ndarray[Any, Any] = native(array)
    return converted


@lru_cache(maxsize=64)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    # Cached: headers of one dataset are mostly equal, and parsing one can take as long as reading an array.
    shape, in_columns, dtype = header_of(io.BytesIO(data))
    if dtype.hasobject:
        raise FileError("an array of Python objects, which may run any code when it is unpickled; save it as numbers")
    return shape, in_columns, dtype


def _int64(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{number} does not fit into 64 bits")
    return number


def _plain(value: Any) -> Any:
    # Convert a nest of leaves to JSON values.
    if isinstance(value, Mapping):
        items = {str(key): _plain(item) for key, item in value.items()}
        if len(items) < len(value):
            raise ValueError(f"two of the keys {', '.join(map(repr, value))} are the same as text")
        return items
    if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):
        # NumPy makes integers of some of its times.
        raise ValueError(f"JSON has no times, and {value!r:.80} is one; make text of it, or save it as npy")
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
