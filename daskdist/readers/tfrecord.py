"""Datasets of TFRecord files."""

from __future__ import annotations

from collections.abc import Mapping

from daskdist.dataset import Dataset
from daskdist.formats import endings
from daskdist.formats.tfrecord.example import Feature
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.ops.read_files import read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions
from daskdist.tensorflow_dataset import TensorFlowDataset


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
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    features
        The features to read from ``tf.train.Example`` records, by name: `FixedLenFeature`, `VarLenFeature` or
        `FixedLenSequenceFeature`. None for the records as bytes.
    check_crc
        Whether to verify checksums. Otherwise damage is noticed only if it breaks a record or an example.
    index
        Whether to scan files once for the offsets of their records. Then the number of elements is known, and workers
        skip to their own records. Compressed files have no index.
    compression
        ``"infer"`` to decide by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``,
        ``"bz2"`` or ``"xz"``; or None.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each record: bytes, or a dict of arrays by name. A `VarLenFeature` has varying length: batch it
        with ``padded_batch`` or ``ragged_batch``. Python numbers that functions return are int32 and float32, as in
        ``daskdist.data.Dataset``. The unit of reading is a byte range.

    Raises
    ------
    FileError
        No file matches. While iterating: a file is damaged, or an example lacks a feature.
    ArgumentError
        A feature is invalid.
    MissingPackageError
        google-crc32c is not installed: ``pip install 'daskdist[tfrecord]'``.

    Notes
    -----
    Without an index, the beginning of a range is known only from the records before it: workers that read some ranges
    of a file scan the others too. Examples are decoded one by one, as in ``tf.io.parse_example``.
    """
    storage = Storage(storage_options)
    form = TFRecord(features, check_crc, index, compression_of(compression), storage)
    return TensorFlowDataset(read_node(form, storage.expand(paths, endings(form))))
