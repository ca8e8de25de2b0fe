"""Image files, decoded by Pillow; a file is a split, and adjacent ones are read together.

The class of an image is its folder directly below the root, however deep the file is. Orientations in the metadata of
cameras are not applied, as in Keras and torchvision.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.image_codec import IMAGES, ImageOptions
from daskdist.storage.failures import failure
from daskdist.storage.filesystem import Storage, is_remote, local
from daskdist.storage.first_file import FirstFile
from daskdist.url_secrets import shown_cause

_MAGIC: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_PAIR: Final = Structure.of((0, 0))[1]
# The approximate ratio of an image's size in memory to its size in the file.
_GROWTH: Final = 8


@dataclass(frozen=True)
class Images:
    """The reader, with its options.

    Parameters
    ----------
    resize
        ``(height, width)`` to resize images to; None to keep their sizes.
    mode
        ``"RGB"``, ``"L"`` or ``"RGBA"``; None to keep the channels of each image.
    root
        The directory whose folders are classes.
    class_names
        The names of these folders: the class of an image is the index of its folder. None for elements that are images
        without labels.
    storage
        Opens the files.
    """

    resize: tuple[int, int] | None = None
    mode: str | None = "RGB"
    root: str = ""
    class_names: tuple[str, ...] | None = None
    storage: Storage = field(default_factory=Storage)

    name = "images"
    suffixes = tuple(f".{end}" for end in IMAGES)
    is_splittable = False
    # The number of files in a unit of reading, if they are not too large together.
    num_grouped = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "resize", self._options.resize)

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(_MAGIC) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")

    def spec(self, path: str) -> ElementSpec:
        self.storage.version(path)
        image = self._options.spec
        if self.class_names is None:
            return ElementSpec(LONE, (image,))
        return ElementSpec(_PAIR, (image, TensorSpec((), np.dtype(np.int64))))

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        shape = self._options.spec.shape
        if None in shape:
            num_bytes = self.storage.version(path).num_bytes * _GROWTH
        else:
            # The size is known from the options, without looking at the file.
            num_bytes = prod(size or 0 for size in shape)
        return [Split(path, path, 1, num_bytes, file, path)]

    def read(self, split: Split) -> Block:
        path: str = split.payload
        data = self.storage.read(path)
        try:
            image = self._options.decode(data)
        # Pillow's errors for damaged images share only Exception as a base.
        except Exception as error:
            problem = f"not an image that Pillow can decode, of {len(data)} bytes: {type(error).__name__}"
            raise failure(path, error, problem) from shown_cause(error)
        if self.class_names is None:
            return Block(LONE, [image[None]], split.label)
        return Block(_PAIR, [image[None], np.array([self._label(path)])], split.label)

    def _label(self, path: str) -> int:
        folder, names = _class_of(path, self.root), self.class_names or ()
        if folder not in names:
            raise FileError(f"{path}: is in no folder of a class; there are {', '.join(map(repr, names))}")
        return names.index(folder)

    @property
    def _options(self) -> ImageOptions:
        return ImageOptions(self.mode, self.resize)


def images_below(
    path: str | os.PathLike[str], extensions: Sequence[str], storage: Storage
) -> tuple[str, tuple[str, ...]]:
    """Return the directory at the beginning of all its files' paths, and the images below it, sorted.

    Raises
    ------
    FileError
        There are no images, or the path is not a directory.
    ArgumentError
        The path or the extensions are invalid.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"expected a directory, got {type(path).__name__}")
    ends = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if not ends or not all(isinstance(end, str) and end.startswith(".") for end in ends):
        raise ArgumentError(f"extensions is {extensions!r:.80}; give suffixes with their dots: ['.png', '.jpg']")
    ends = tuple(end.lower() for end in ends)
    path = os.fspath(path)
    root = _root_of(path, storage)
    files = []
    for file in storage.expand(path, ("",)):
        inside = _within(file, root)
        if inside is None:
            raise FileError(f"{path!r} is not a directory; give the directory that contains the images")
        if file.partition("::")[0].lower().endswith(ends) and not any(name.startswith(".") for name in inside):
            files.append(file)
    if not files:
        raise FileError(f"no image below {path!r}: no name ends in {' or '.join(map(repr, ends))}")
    return root, tuple(files)


def classes_of(files: Sequence[str], root: str) -> list[str]:
    """Return the names of the classes of images, sorted.

    Raises
    ------
    ArgumentError
        An image is in no folder of a class.
    """
    classes = {file: _class_of(file, root) for file in files}
    loose = [file for file, name in classes.items() if name is None]
    if loose:
        raise ArgumentError(
            f"{len(loose)} images, the first {loose[0]}, are in no folder below {root} and so have no class; "
            "give labels=None for images without labels"
        )
    return sorted({name for name in classes.values() if name is not None})


def _root_of(path: str, storage: Storage) -> str:
    """Return a directory as it stands at the beginning of its files' paths."""
    if not is_remote(path):
        return local(path)
    fs, inner = storage.located(path)
    return str(fs.unstrip_protocol(inner)).partition("::")[0].rstrip("/")


def _class_of(path: str, root: str) -> str | None:
    """Return the folder directly below a root that contains a file; None if there is none.

    >>> _class_of("/data/cats/old/1.png", "/data"), _class_of("/data/1.png", "/data")
    ('cats', None)
    """
    inside = _within(path, root)
    return inside[0] if inside is not None and len(inside) > 1 else None


def _within(path: str, root: str) -> list[str] | None:
    """Return the folders and the name on the path from a root to a file; None if it is not below the root."""
    path, root = path.partition("::")[0].replace("\\", "/"), root.replace("\\", "/").rstrip("/") + "/"
    return path[len(root) :].split("/") if path.startswith(root) else None
