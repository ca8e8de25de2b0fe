"""Datasets of lines of text."""

from __future__ import annotations

from daskdist.dataset import Dataset
from daskdist.formats import endings
from daskdist.formats.text import Text
from daskdist.ops.read_files import read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


def read_text(
    paths: Paths,
    encoding: str | None = "utf-8",
    *,
    compression: str | None = "infer",
    storage_options: StorageOptions = None,
) -> Dataset:
    r"""Read the lines of text files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    encoding
        The encoding of the text, or None for lines as bytes.
    compression
        ``"infer"`` to decide by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``,
        ``"bz2"`` or ``"xz"``; or None.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each line, without its ``\n`` or ``\r\n``, including blank lines. The unit of reading is a byte
        range; the parts of a compressed file are read in sequence.

    Raises
    ------
    FileError
        No file matches. While iterating: a file is damaged, or does not have the encoding.

    >>> from pathlib import Path
    >>> next(iter(read_text(Path(__file__))))[3:20]
    'Datasets of lines'
    """
    storage = Storage(storage_options)
    form = Text(encoding, compression_of(compression), storage)
    return Dataset(read_node(form, storage.expand(paths, endings(form))))
