"""Datasets of images in folders."""

from __future__ import annotations

import os
from collections.abc import Sequence

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.decoding import pillow
from daskdist.formats.images import Images, class_of, root_of, within
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
        ``(height, width)`` of all images, by Pillow's bilinear filter; None to leave each its own, and then elements
        differ in shape.
    mode
        ``"RGB"``, ``"L"`` (gray) or ``"RGBA"``, to which images are converted; None to leave each the channels it has.
    labels
        ``"folder"``: an image's class is the folder directly below ``path`` that it lies in; None for images alone.
    class_names
        The folders in the order of their classes; those of which there is no image count too. None for all that
        have one, sorted: see `class_names_of`.
    extensions
        How the names of images end, in letters of any size. Other files are left out, and so is what is hidden.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        A pair an image: uint8, shape ``(height, width, channels)``, and the class, int64; or the image alone. Up to
        64 files are the unit of reading.

    Raises
    ------
    FileError
        There is no image. While iterating: one cannot be decoded.
    ArgumentError
        An image lies in no folder of a class, an option is out of range, or Pillow is not installed.

    Notes
    -----
    Orientations that cameras note beside an image are not applied. Alpha is dropped by ``"RGB"``, palettes become
    colors, and of several frames the first is taken. Images of more than 8 bits are an error. Resizing smooths
    where images become smaller, as torchvision's does and ``tf.image.resize`` does not.
    """
    pillow()
    storage = Storage(storage_options)
    root, found = _found(path, extensions, storage)
    if labels is None:
        if class_names is not None:
            raise ArgumentError("class_names is of no use with labels=None; leave one of them out")
        return Dataset(read_node(Images(resize, mode, storage=storage), found))
    if labels != "folder":
        raise ArgumentError(f"labels is {labels!r:.80}; give 'folder' or None")
    names = _classes(found, root)
    if class_names is not None:
        given = [class_names] if isinstance(class_names, str) else list(class_names)
        if len(set(given)) < len(given):
            raise ArgumentError(f"class_names has a name twice: {given}")
        unnamed = [name for name in names if name not in given]
        if unnamed:
            raise ArgumentError(f"class_names is {given}, and below {root} there are images in {unnamed} too")
        names = given
    return Dataset(read_node(Images(resize, mode, root, tuple(names), storage), found))


def class_names_of(
    path: str | os.PathLike[str],
    *,
    extensions: Sequence[str] = _EXTENSIONS,
    storage_options: StorageOptions = None,
) -> list[str]:
    """Return the class names of the folders that `read_images` takes classes from: a class indexes this list.

    Parameters
    ----------
    path, extensions, storage_options
        As `read_images` takes them.

    Raises
    ------
    FileError
        There is no image.
    ArgumentError
        An image lies in no folder of a class.
    """
    root, found = _found(path, extensions, Storage(storage_options))
    return _classes(found, root)


def _found(path: str | os.PathLike[str], extensions: Sequence[str], storage: Storage) -> tuple[str, tuple[str, ...]]:
    # The root, and the images below it.
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"expected a directory, got {type(path).__name__}")
    ends = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if not ends or not all(isinstance(end, str) and end.startswith(".") for end in ends):
        raise ArgumentError(f"extensions is {extensions!r:.80}; give ends of names with their dots: ['.png', '.jpg']")
    ends = tuple(end.lower() for end in ends)
    path = os.fspath(path)
    root = root_of(path, storage)
    found = []
    for file in storage.expand(path, ("",)):
        inside = within(file, root)
        if inside is None:
            raise FileError(f"{path!r} is no directory; give the one that images lie below")
        if file.partition("::")[0].lower().endswith(ends) and not any(name.startswith(".") for name in inside):
            found.append(file)
    if not found:
        raise FileError(f"no image below {path!r}: no name ends in {' or '.join(map(repr, ends))}")
    return root, tuple(found)


def _classes(found: Sequence[str], root: str) -> list[str]:
    classes = {file: class_of(file, root) for file in found}
    loose = [file for file, name in classes.items() if name is None]
    if loose:
        raise ArgumentError(
            f"{len(loose)} images lie in no folder below {root}, {loose[0]} the first, and so have no class; "
            "give labels=None to have images alone"
        )
    return sorted({name for name in classes.values() if name is not None})
