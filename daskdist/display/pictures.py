"""Images in elements, converted to PNG for notebooks."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

# Channels -> the colour type of PNG.
_COLOUR_TYPES: Final = {1: 0, 3: 2, 4: 6}
_FEWEST_PIXELS: Final = 4
# Larger images lose rows and columns of pixels, smaller ones are enlarged by the browser.
_MOST_PIXELS: Final = 160
_SHOWN_PIXELS: Final = 64
# The most images of a batch to show.
_MOST_OF_BATCH: Final = 4


@dataclass(frozen=True)
class Picture:
    """An image for a page."""

    source: str
    width: int


def pictures_of(value: Any) -> list[Picture]:
    """Return the pictures in a uint8 array of shape ([batch,] height, width, channels) with 1, 3 or 4 channels.

    Only the first images of a batch are returned. The list is empty for arrays of other shapes and dtypes.
    """
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (3, 4):
        return []
    if value.shape[-1] not in _COLOUR_TYPES or min(value.shape[-3:-1]) < _FEWEST_PIXELS:
        return []
    return list(map(_picture, value[:_MOST_OF_BATCH] if value.ndim == 4 else [value]))


def _picture(image: np.ndarray[Any, Any]) -> Picture:
    step = -(-max(image.shape[:2]) // _MOST_PIXELS)
    image = image[::step, ::step]
    source = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    return Picture(source, max(image.shape[1], _SHOWN_PIXELS))


def png(image: np.ndarray[Any, Any]) -> bytes:
    """Return an image, shape ``(height, width, channels)`` of uint8, as a PNG file."""
    height, width, channels = image.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    # Each row begins with the number of its filter, 0 for none.
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks: Sequence[tuple[bytes, bytes]] = (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(rows.tobytes())),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
