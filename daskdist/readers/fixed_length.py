"""Datasets of files of fixed-length records."""

from __future__ import annotations

from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats import endings
from daskdist.formats.fixed_length import FixedLength
from daskdist.ops.read_files import read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


def read_fixed_length(
    paths: Paths,
    record_bytes: int,
    dtype: Any = None,
    *,
    header_bytes: int = 0,
    footer_bytes: int = 0,
    compression: str | None = "infer",
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read files of fixed-length records, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    record_bytes
        The length of a record in bytes.
    dtype
        The type of a record; None for bytes. With a numeric dtype of ``record_bytes`` bytes the element is a scalar,
        and with a smaller one an array: ``"uint8"`` gives an array of bytes. A structured dtype gives a dict of its
        fields: ``[("label", "u1"), ("image", "u1", (3, 32, 32))]``.
    header_bytes, footer_bytes
        The number of bytes before the first record of a file and after the last.
    compression
        ``"infer"`` to decide by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``,
        ``"bz2"`` or ``"xz"``; or None.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each record. For uncompressed files the number of elements is known, and arrays are views of the
        data that was read.

    Raises
    ------
    FileError
        No file matches. While iterating: a file does not consist of complete records, or is damaged.
    ArgumentError
        A number of bytes is out of range, or the dtype does not divide a record.

    Notes
    -----
    Numbers in the other byte order are converted to this machine's. A compressed file with a header or a footer is read
    as a whole.
    """
    storage = Storage(storage_options)
    form = FixedLength(record_bytes, dtype, header_bytes, footer_bytes, compression_of(compression), storage)
    return Dataset(read_node(form, storage.expand(paths, endings(form))))
