"""Datasets of samples in tar archives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats import endings
from daskdist.formats.webdataset.brace_patterns import expand_braces
from daskdist.formats.webdataset.webdataset_format import WebDataset
from daskdist.ops.read_files import read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


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
    return Dataset(read_node(form, storage.expand(expand_braces(paths), endings(form))))
