"""Datasets of files of records of one length."""

from __future__ import annotations

from typing import Any

from daskdist.dataset import Dataset, TensorFlowDataset
from daskdist.formats.fixed_length import FixedLength
from daskdist.ops.read_files import endings, expand_filenames, read_node
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
    """Read files of records of one length, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    record_bytes
        The length of a record.
    dtype
        What a record is. None for bytes. A dtype of numbers: of ``record_bytes`` it is the element, and a smaller
        one is repeated: ``"uint8"`` gives an array of bytes. A structured one gives a dict of its fields:
        ``[("label", "u1"), ("image", "u1", (3, 32, 32))]``.
    header_bytes, footer_bytes
        What there is before the first record of a file and after the last.
    compression
        ``"infer"``, by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``, ``"bz2"`` or
        ``"xz"``; or None.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        A record an element. Of files that are not compressed their number is known, and arrays are views of what
        was read.

    Raises
    ------
    FileError
        No file matches. While iterating: a file is no whole number of records, or is damaged.
    ArgumentError
        A number of bytes is out of range, or the dtype does not go into a record.

    Notes
    -----
    Numbers of the other byte order are copied into this machine's. A file that is compressed and has a header or a
    footer is read as a whole.
    """
    storage = Storage(storage_options)
    form = FixedLength(record_bytes, dtype, header_bytes, footer_bytes, compression_of(compression), storage)
    return Dataset(read_node(form, storage.expand(paths, endings(form))))


class FixedLengthRecordDataset(TensorFlowDataset):
    """The records of files of records of one length as bytes, as TensorFlow's has them.

    Parameters
    ----------
    filenames
        A path or a list of them, or a dataset of paths.
    record_bytes
        The length of a record.
    header_bytes, footer_bytes
        What there is before the first record of a file and after the last; None for nothing.
    buffer_size, num_parallel_reads
        Taken for compatibility: reading ahead is bounded by the setting ``window-bytes``, and in order.
    compression_type
        None, ``""``, ``"ZLIB"`` or ``"GZIP"``.
    """

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        compression = compression_of(compression_type)
        form = FixedLength(record_bytes, None, header_bytes or 0, footer_bytes or 0, compression)
        super().__init__(read_node(form, expand_filenames(filenames, form), name))
