"""Datasets of TFRecord files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskdist.dataset import Dataset, TensorFlowDataset
from daskdist.formats.tfrecord.example import Feature, FixedLenFeature, FixedLenSequenceFeature, VarLenFeature
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.ops.read_files import endings, expand_filenames, read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions

__all__ = ["FixedLenFeature", "FixedLenSequenceFeature", "TFRecordDataset", "VarLenFeature", "read_tfrecord"]


def read_tfrecord(
    paths: Paths,
    features: Mapping[str, Feature] | None = None,
    *,
    check_crc: bool = True,
    index: bool = False,
    compression: str | None = "infer",
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read the records of TFRecord files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    features
        What is read of records that are ``tf.train.Example``, by name: `FixedLenFeature`, `VarLenFeature` or
        `FixedLenSequenceFeature`. None for the records themselves.
    check_crc
        Whether checksums are compared. Without, what is damaged shows only where it is no record or no example.
    index
        Whether files are gone through once for where their records are. Then the number of elements is known, and
        every worker goes straight to its own. Compressed files have none.
    compression
        ``"infer"``, by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``, ``"bz2"`` or
        ``"xz"``; or None.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        A record an element: bytes, or a dict of arrays by name. A `VarLenFeature` is one whose length differs:
        batch it by ``padded_batch`` or ``ragged_batch``. A byte range, or with an index a range of records, is the
        unit of reading.

    Raises
    ------
    FileError
        No file matches. While iterating: a file is damaged, or an example has not what is asked for.
    ArgumentError
        The features are none, or google-crc32c is not installed.

    Notes
    -----
    Without an index, where a range begins is told only by the records before it: workers that read some ranges of
    a file go through the others too. Examples are read as ``tf.io.parse_example`` does it, one by one.
    """
    storage = Storage(storage_options)
    form = TFRecord(features, check_crc, index, compression_of(compression), storage)
    return Dataset(read_node(form, storage.expand(paths, endings(form))))


class TFRecordDataset(TensorFlowDataset):
    """The records of TFRecord files as bytes, as TensorFlow's has them.

    Parameters
    ----------
    filenames
        A path or a list of them, or a dataset of paths.
    compression_type
        None, ``""``, ``"ZLIB"`` or ``"GZIP"``.
    buffer_size, num_parallel_reads
        Taken for compatibility: reading ahead is bounded by the setting ``window-bytes``, and in order.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        form = TFRecord(compression=compression_of(compression_type))
        super().__init__(read_node(form, expand_filenames(filenames, form), name))
