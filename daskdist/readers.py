"""Datasets of files: a function for each format, with its options.

All take paths as `read_files` does: a path, a glob, a directory or an fsspec URL (``s3://``, ``gs://``, ``http://``,
``memory://``, ``zip://*.csv::archive.zip``), or a list of such. What one pattern matches is sorted. What a split
is, and so what is read at a time and dealt to workers, differs by format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskdist.dataset import Dataset
from daskdist.errors import FileError
from daskdist.formats import Format, format_named, installed
from daskdist.formats.compression import SUFFIXES, compression_of
from daskdist.formats.parquet import Parquet
from daskdist.formats.partitions import Partitions
from daskdist.formats.storage import Paths, Storage
from daskdist.formats.text import Text
from daskdist.ops.read_files import ReadFiles

StorageOptions = Mapping[str, Any] | None

# The first bytes of a file that formats tell themselves by.
_HEAD_BYTES = 64


def read_files(paths: Paths, format: str | Format | None = None, *, storage_options: StorageOptions = None) -> Dataset:
    """The elements of files of any format, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    format
        A format with its options; the name of one, ours or registered under the entry-point group
        ``daskdist.formats``, to have it without any; or None to tell it by the first file.
    storage_options
        What the file system takes: credentials, an endpoint.

    Raises
    ------
    FileError
        No file matches, or the first is not of the format, or of none that is known.
    ArgumentError
        There is no such format.
    """
    storage = Storage(storage_options)
    if format is None:
        path = storage.expand(paths, ("",))[0]
        format = _guessed(path, storage.read(path, 0, _HEAD_BYTES))
    if isinstance(format, str):
        format = format_named(format)()
    return _of_files(format, storage.expand(paths, _endings(format)))


def _guessed(path: str, head: bytes) -> str:
    for name in installed():
        if format_named(name)().guess(path, head):
            return name
    raise FileError(f"{path}: of no format that is known here; give format=, one of {', '.join(sorted(installed()))}")


def read_parquet(
    paths: Paths,
    columns: Any = None,
    filters: Any = None,
    *,
    missing: Mapping[str, Any] | None = None,
    partitioned: bool = True,
    storage_options: StorageOptions = None,
) -> Dataset:
    """The rows of Parquet files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    columns
        Which columns, and how they make up an element: None for all and a list of names for some, as a dict
        by name; or any structure of names, in which a list stands for one array of its columns side by side:
        ``{"x": ["f0", "f1"], "y": "label"}``.
    filters
        Which rows: ``[("day", ">=", 3), ("kind", "in", {"a", "b"})]`` for those of which all holds, a list of such
        lists for those of which one does. Row groups whose statistics tell that they have none are not read.
    missing
        What stands for a null, by column: ``{"count": -1}``. Without, nulls are NaN in floats, NaT in times and an
        error in other columns.
    partitioned
        Whether directories named ``name=value`` make columns: integers where all values are, else text.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        An element a row. A row group is the unit of reading.

    Raises
    ------
    FileError
        No file matches, or the first is not Parquet. While iterating: a file is damaged, or has another schema.
    ArgumentError
        There is no such column.

    Notes
    -----
    Lists become arrays whose length differs, structs dicts, decimals the nearest float64, dates and times NumPy's.
    """
    storage = Storage(storage_options)
    found = storage.expand(paths, Parquet.suffixes)
    partitions = Partitions.of(found) if partitioned else Partitions()
    return _of_files(Parquet(columns, filters, missing, partitions, storage), found)


def read_text(
    paths: Paths,
    encoding: str | None = "utf-8",
    *,
    compression: str | None = "infer",
    storage_options: StorageOptions = None,
) -> Dataset:
    """The lines of text files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    encoding
        That of the text, or None for lines that are bytes.
    compression
        ``"infer"``, by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``, ``"bz2"`` or
        ``"xz"``; or None.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        A line an element, without its end, ``\\n`` or ``\\r\\n``; blank ones too. A byte range is the unit of
        reading, of a compressed file a part after the other.

    Raises
    ------
    FileError
        No file matches. While iterating: a file is damaged, or not of the encoding.

    >>> from pathlib import Path
    >>> next(iter(read_text(Path(__file__))))
    '\"\"\"Datasets of files: a function for each format, with its options.'
    """
    storage = Storage(storage_options)
    form = Text(encoding, compression_of(compression), storage)
    return _of_files(form, storage.expand(paths, _endings(form)))


class TextLineDataset(Dataset):
    """The lines of text files as bytes, as TensorFlow's has them.

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
        form = Text(None, compression_of(compression_type))
        super().__init__(_listed(form, filenames, name))


def _listed(form: Format, filenames: Any, name: str | None) -> ReadFiles:
    if isinstance(filenames, Dataset):
        filenames = [str(each) for each in filenames]
    return ReadFiles(form, Storage().expand(filenames, _endings(form)), label=name)


def _endings(form: Format) -> tuple[str, ...]:
    # Those of its files in a directory, compressed or not.
    return tuple(end + more for end in form.suffixes for more in ("", *SUFFIXES)) or ("",)


def _of_files(form: Format, paths: tuple[str, ...]) -> Dataset:
    node = ReadFiles(form, paths)
    node.spec  # noqa: B018 - a file that is not of the format, or a column that is not there, shows now
    return Dataset(node)
