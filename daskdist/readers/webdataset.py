"""Datasets of samples in tar archives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.formats.webdataset.webdataset_format import WebDataset
from daskdist.ops.read_files import endings, read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions, local

_BRACES: Final = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
# A slip of the keyboard should not make names until memory is full.
_MOST_NAMES: Final = 1_000_000


def read_webdataset(
    paths: Paths,
    columns: Any = None,
    *,
    decode: bool | Mapping[str, str] = True,
    image_mode: str | None = "RGB",
    resize: tuple[int, int] | None = None,
    missing: Mapping[str, Any] | None = None,
    compression: str | None = "infer",
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read the samples of WebDataset's tar files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them; ``"train-{000..146}.tar"`` stands for 147 of them.
    columns
        Which fields, and how they make up an element: None for all, and a list of names for some, as a dict by
        name; or any structure of names: ``("png", "cls")``. The key is ``"__key__"``.
    decode
        True for what names say: images, ``cls`` as int64, ``json`` as a nest of arrays, ``npy``, ``txt`` as text,
        all else as bytes; False for bytes throughout. Or by field, or the end of its name, what others are:
        ``{"id": "text", "jpg": "raw"}``, of ``"image"``, ``"int"``, ``"text"``, ``"json"``, ``"npy"`` and ``"raw"``.
    image_mode
        ``"RGB"``, ``"L"`` (gray) or ``"RGBA"``, to which images are converted; None to leave each the channels it has.
    resize
        ``(height, width)`` of all images, by Pillow's bilinear filter; None to leave each its own.
    missing
        What stands for a member that a sample lacks, by field: ``{"cls": -1}``. Without, that is an error.
    compression
        ``"infer"``, by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``, ``"bz2"`` or
        ``"xz"``; or None.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        A sample an element. A byte range is the unit of reading, of a compressed file a part after the other.

    Raises
    ------
    FileError
        No file matches, or the first is no archive. While iterating: an archive or a member is damaged, a member is
        named so that it would lie elsewhere or is no plain file, or a sample has other fields than the first ones.
    ArgumentError
        There is no such field, an option is out of range, or Pillow is not installed.

    Notes
    -----
    Fields, the dtype of ``npy`` and the types in ``json`` are those of the first samples of the first file. Axes of
    images and arrays are None in the spec unless ``resize`` tells, for no sample knows the shapes of others; what is
    batched without it must be of one shape. What a range does not begin with is found by going from header to header.
    Nothing is unpacked to a disk, and pickled objects stay bytes.
    """
    storage = Storage(storage_options)
    form = WebDataset(columns, decode, image_mode, resize, missing, compression_of(compression), storage)
    return Dataset(read_node(form, storage.expand(_named(paths), endings(form))))


def _named(paths: Paths) -> Paths:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    # Other types of paths are refused when they are expanded.
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        return paths
    made: list[str] = []
    for path in map(os.fspath, paths):
        made.extend([path] if os.path.exists(local(path)) else _without_braces(path))
    return made


def _without_braces(path: str) -> Iterator[str]:
    # "a-{08..10}.tar" and "{x,y}.tar", as shells have it.
    found = _BRACES.search(path)
    if found is None:
        yield path
        return
    first, last, words = found.groups()
    if words is None:
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) and len(first) + len(last) > 2 else 0
        start, stop = int(first), int(last)
        numbers = range(start, stop + 1) if start <= stop else range(start, stop - 1, -1)
        if len(numbers) > _MOST_NAMES:
            raise ArgumentError(f"{path!r} stands for {len(numbers):,} files, and {_MOST_NAMES:,} are the most")
        choices: Iterator[str] = (str(number).zfill(width) for number in numbers)
    else:
        choices = iter(words.split(","))
    for choice in choices:
        yield from _without_braces(path[: found.start()] + choice + path[found.end() :])
