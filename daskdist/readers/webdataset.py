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
# A typing error in a range must not exhaust memory.
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
        The fields of an element: None for all, or a list of names for some, as a dict by name; or any structure of
        names: ``("png", "cls")``. The key of a sample is ``"__key__"``.
    decode
        True to decode by the suffix: images, ``cls`` as int64, ``json`` as a nest of arrays, ``npy``, ``txt`` as text,
        everything else as bytes; False for bytes only. A dict overrides the decoding by field or suffix,
        ``{"id": "text", "jpg": "raw"}``, with ``"image"``, ``"int"``, ``"text"``, ``"json"``, ``"npy"`` or ``"raw"``.
    image_mode
        ``"RGB"``, ``"L"`` (gray) or ``"RGBA"`` to convert images to; None to keep their channels.
    resize
        ``(height, width)`` to resize images to, by Pillow's bilinear filter; None to keep their sizes.
    missing
        The replacement of members that a sample lacks, by field: ``{"cls": -1}``. Without it, that is an error.
    compression
        ``"infer"`` to decide by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``,
        ``"bz2"`` or ``"xz"``; or None.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each sample. The unit of reading is a byte range; the parts of a compressed file are read in
        sequence.

    Raises
    ------
    FileError
        No file matches, or the first is not an archive. While iterating: an archive or a member is damaged, the path of
        a member leaves the archive, a member is not a regular file, or the fields of a sample differ from those of the
        first ones.
    ArgumentError
        A field does not exist, or an option is out of range.
    MissingPackageError
        Pillow is not installed: ``pip install 'daskdist[images]'``.

    Notes
    -----
    Fields, the dtypes of ``npy`` and the types in ``json`` are taken from the first samples of the first file. Axes of
    images and arrays are None in the spec unless ``resize`` is given, as samples may differ in shape; without it,
    elements of a batch must have one shape. The first sample of a range is found by following the headers from the
    beginning. Nothing is unpacked to a disk, and pickled objects stay bytes.
    """
    storage = Storage(storage_options)
    form = WebDataset(columns, decode, image_mode, resize, missing, compression_of(compression), storage)
    return Dataset(read_node(form, storage.expand(_named(paths), endings(form))))


def _named(paths: Paths) -> Paths:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    # Paths of other types raise when they are expanded.
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        return paths
    names: list[str] = []
    for path in map(os.fspath, paths):
        names.extend([path] if os.path.exists(local(path)) else _without_braces(path))
    return names


def _without_braces(path: str) -> Iterator[str]:
    # Expand "a-{08..10}.tar" and "{x,y}.tar" like a shell.
    match = _BRACES.search(path)
    if match is None:
        yield path
        return
    first, last, words = match.groups()
    if words is None:
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) and len(first) + len(last) > 2 else 0
        start, stop = int(first), int(last)
        numbers = range(start, stop + 1) if start <= stop else range(start, stop - 1, -1)
        if len(numbers) > _MOST_NAMES:
            raise ArgumentError(f"{path!r} stands for {len(numbers):,} files; the limit is {_MOST_NAMES:,}")
        choices: Iterator[str] = (str(number).zfill(width) for number in numbers)
    else:
        choices = iter(words.split(","))
    for choice in choices:
        yield from _without_braces(path[: match.start()] + choice + path[match.end() :])
