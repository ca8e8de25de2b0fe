"""Datasets of images in folders."""

from __future__ import annotations

import os
from collections.abc import Sequence

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.formats.image_codec import pillow
from daskdist.formats.images import Images, classes_of, images_below
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Storage, StorageOptions

_EXTENSIONS = Images.suffixes


def read_images(
    path: str | os.PathLike[str],
    *,
    resize: tuple[int, int] | None = None,
    mode: str | None = "RGB",
    labels: str | None = "folder",
    class_names: Sequence[str] | None = None,
    extensions: Sequence[str] = _EXTENSIONS,
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read the images below a directory with their classes, sorted by path.

    Parameters
    ----------
    path
        A directory or the fsspec URL of one.
    resize
        ``(height, width)`` to resize images to, by Pillow's bilinear filter; None to keep their sizes, so that elements
        may differ in shape.
    mode
        ``"RGB"``, ``"L"`` (gray) or ``"RGBA"`` to convert images to; None to keep their channels.
    labels
        ``"folder"`` to take an image's class from its folder directly below ``path``; None for images without labels.
    class_names
        The folders in the order of their class numbers, including folders without images. None for all folders with
        images, sorted: see `class_names_of`.
    extensions
        The suffixes of image files, in upper or lower case. Other files and hidden ones are skipped.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        For each image a pair of the image, uint8, shape ``(height, width, channels)``, and its class, int64; or the
        image alone. The unit of reading is up to 64 files.

    Raises
    ------
    FileError
        There are no images. While iterating: an image cannot be decoded.
    ArgumentError
        An image is in no folder of a class, or an option is out of range.
    MissingPackageError
        Pillow is not installed: ``pip install 'daskdist[images]'``.

    Notes
    -----
    Orientations in the metadata of cameras are not applied. ``"RGB"`` drops alpha, palettes become colors, and only the
    first of several frames is used. Images of more than 8 bits per channel are an error. Downsizing smooths, as in
    torchvision and unlike ``tf.image.resize``.
    """
    pillow()
    storage = Storage(storage_options)
    root, files = images_below(path, extensions, storage)
    if labels is None:
        if class_names is not None:
            raise ArgumentError("class_names has no effect with labels=None; leave one of them out")
        return Dataset(read_node(Images(resize, mode, storage=storage), files))
    if labels != "folder":
        raise ArgumentError(f"labels is {labels!r:.80}; give 'folder' or None")
    names = classes_of(files, root)
    if class_names is not None:
        class_list = [class_names] if isinstance(class_names, str) else list(class_names)
        if len(set(class_list)) < len(class_list):
            raise ArgumentError(f"class_names has a name twice: {class_list}")
        unnamed = [name for name in names if name not in class_list]
        if unnamed:
            raise ArgumentError(f"class_names is {class_list}, but below {root} there are also images in {unnamed}")
        names = class_list
    return Dataset(read_node(Images(resize, mode, root, tuple(names), storage), files))


def class_names_of(
    path: str | os.PathLike[str],
    *,
    extensions: Sequence[str] = _EXTENSIONS,
    storage_options: StorageOptions = None,
) -> list[str]:
    """Return the names of the classes of `read_images`: a class is an index into this list.

    Parameters
    ----------
    path, extensions, storage_options
        As in `read_images`.

    Raises
    ------
    FileError
        There are no images.
    ArgumentError
        An image is in no folder of a class.
    """
    root, files = images_below(path, extensions, Storage(storage_options))
    return classes_of(files, root)
