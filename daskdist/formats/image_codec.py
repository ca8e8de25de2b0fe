"""Images decoded and encoded by Pillow."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.spec import TensorSpec
from daskdist.errors import ArgumentError, MissingPackageError

# The suffixes of names of images.
IMAGES: Final = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm")

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


def pillow() -> Any:
    """Import the library that decodes images.

    Raises
    ------
    MissingPackageError
        Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError("images need Pillow: pip install 'daskdist[images]'") from None
    return Image


def why_no_image(name: str, leaf: TensorSpec) -> str:
    """Return why values cannot be written as images under a name, with a remedy; empty if they can."""
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


def encoded_image(name: str, array: np.ndarray[Any, Any]) -> bytes:
    """Encode an image by the suffix of its name.

    Raises
    ------
    ValueError
        The format of the suffix has no images of as many channels.
    """
    library, (form, allowed, options) = pillow(), _WRITTEN[name.rpartition(".")[2]]
    channels = array.shape[2] if array.ndim == 3 else 1
    if channels not in allowed:
        raise ValueError(f"an image of {channels} channels, but such an image has {' or '.join(map(str, allowed))}")
    file = io.BytesIO()
    library.fromarray(array[:, :, 0] if array.ndim == 3 and channels == 1 else array).save(file, form, **options)
    return file.getvalue()
