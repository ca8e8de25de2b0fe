"""Decoding of small files and of members of archives, by the suffixes of their names.

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

Pillow decodes images. Nothing is unpickled: pickles stay bytes.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError
from daskdist.formats.npy import header_of

IMAGES: Final = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm")

_KINDS: Final = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "npy",
}
_NAMES: Final = ("image", "int", "text", "json", "npy", "raw")
_TEXT: Final = np.dtype(np.dtypes.StringDType())

# The formats that Pillow may try, whatever the name: not all of its decoders are safe for untrusted files.
_TRIED: Final = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Suffix -> Pillow's format for writing, the numbers of channels that it stores losslessly, and options.
_WRITTEN: Final[dict[str, tuple[str, tuple[int, ...], dict[str, Any]]]] = {
    "png": ("PNG", (1, 2, 3, 4), {}),
    "jpg": ("JPEG", (1, 3), {"quality": 95}),
    "jpeg": ("JPEG", (1, 3), {"quality": 95}),
    "webp": ("WEBP", (3, 4), {"lossless": True}),
    "bmp": ("BMP", (1, 3), {}),
    "tif": ("TIFF", (1, 3, 4), {}),
    "tiff": ("TIFF", (1, 3, 4), {}),
    "ppm": ("PPM", (3,), {}),
    "pgm": ("PPM", (1,), {}),
    "pnm": ("PPM", (1, 3), {}),
}
# Pillow's mode -> the number of channels; images of most other modes become RGB.
_CHANNELS: Final = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_DEEP: Final = ("I", "F")


@dataclass(frozen=True)
class ImageOptions:
    """Options for decoding images.

    Parameters
    ----------
    mode
        ``"RGB"``, ``"L"`` or ``"RGBA"`` to convert images to; None to keep their channels.
    resize
        ``(height, width)`` to resize images to; None to keep their sizes.
    """

    mode: str | None = "RGB"
    resize: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("RGB", "L", "RGBA", None):
            raise ArgumentError(f"the mode of images is {self.mode!r}; give 'RGB', 'L', 'RGBA' or None")
        if self.resize is not None:
            sizes = tuple(self.resize) if isinstance(self.resize, (tuple, list)) else ()
            if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ArgumentError(f"resize is {self.resize!r}; give (height, width), two whole numbers above 0")
            object.__setattr__(self, "resize", sizes)

    @property
    def spec(self) -> TensorSpec:
        """The spec of an image; axes that may vary are None."""
        channels = None if self.mode is None else _CHANNELS[self.mode]
        return TensorSpec((*(self.resize or (None, None)), channels), np.dtype(np.uint8))

    def decode(self, data: bytes) -> np.ndarray[Any, Any]:
        """Decode an image to uint8 ``(height, width, channels)``. Pillow's errors for damaged images propagate."""
        library = pillow()
        with library.open(io.BytesIO(data), formats=_TRIED) as image:
            if image.mode.startswith(_DEEP):
                raise ValueError(f"an image of mode {image.mode}, whose values do not fit into 8 bits")
            if image.mode in ("P", "PA") and ("transparency" in image.info or image.mode == "PA"):
                # Pillow needs two steps.
                image = image.convert("RGBA")
            kept = {"1": "L"}.get(image.mode, image.mode if image.mode in _CHANNELS else "RGB")
            target_mode = self.mode or kept
            if image.mode != target_mode:
                image = image.convert(target_mode)
            if self.resize is not None and image.size != self.resize[::-1]:
                image = image.resize(self.resize[::-1], library.Resampling.BILINEAR)
            array = np.asarray(image)
        return array if array.ndim == 3 else array[:, :, None]


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
    images: ImageOptions = ImageOptions()

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
            "text": TensorSpec((), _TEXT),
            "raw": TensorSpec((), np.dtype(object)),
        }.get(self.kind(name))
        return None if leaf is None else ElementSpec(LONE, (leaf,))

    def decode(self, name: str, data: bytes) -> Any:
        """Decode a field to an array, an int, text, bytes, or a JSON value. Errors of libraries propagate."""
        match self.kind(name):
            case "image":
                return self.images.decode(data)
            case "int":
                number = int(data)
                if not -(2**63) <= number < 2**63:
                    raise ValueError(f"{number} does not fit into 64 bits")
                return number
            case "text":
                return data.decode("utf-8")
            case "json":
                return json.loads(data)
            case "npy":
                return array_of(data)
            case _:
                return data

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
            "text": leaf.dtype == _TEXT and not leaf.shape,
            "npy": leaf.dtype.kind in "biufcmM",
            "raw": leaf.dtype == object and not leaf.shape,
        }
        if kind == "image":
            return _why_no_image(name, leaf)
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
                return _encoded_image(name, np.asarray(value))
            case "int":
                return str(int(value)).encode()
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
        The content is not an array, or an array of Python objects.
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
        return array.astype(np.dtypes.StringDType())
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


@lru_cache(maxsize=64)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    # Cached: headers of one dataset are mostly equal, and parsing one can take as long as reading an array.
    shape, in_columns, dtype = header_of(io.BytesIO(data))
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which may run any code when it is unpickled; save it as numbers")
    return shape, in_columns, dtype


def pillow() -> Any:
    """Import the library that decodes images.

    Raises
    ------
    ArgumentError
        Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ArgumentError("images need Pillow: pip install 'daskdist[images]'") from None
    return Image


def _why_no_image(name: str, leaf: TensorSpec) -> str:
    end = name.rpartition(".")[2]
    if end not in _WRITTEN:
        return f"is an image, which can be written as {', '.join(_WRITTEN)}; call it {name + '.png'!r}"
    if leaf.dtype != np.uint8 or len(leaf.shape) not in (2, 3):
        return f"is {leaf}, but an image is uint8 of shape (height, width, channels); call it {name + '.npy'!r}"
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    allowed = _WRITTEN[end][1]
    if channels is not None and channels not in allowed:
        return f"is {leaf}, but such an image has {' or '.join(map(str, allowed))} channels"
    return ""


def _encoded_image(name: str, array: np.ndarray[Any, Any]) -> bytes:
    library, (form, allowed, options) = pillow(), _WRITTEN[name.rpartition(".")[2]]
    channels = array.shape[2] if array.ndim == 3 else 1
    if channels not in allowed:
        raise ValueError(f"an image of {channels} channels, but such an image has {' or '.join(map(str, allowed))}")
    file = io.BytesIO()
    library.fromarray(array[:, :, 0] if array.ndim == 3 and channels == 1 else array).save(file, form, **options)
    return file.getvalue()


def _plain(value: Any) -> Any:
    # Convert a nest of leaves to JSON values.
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
