"""Datasets of Arrow IPC and Feather files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats.arrow.arrow_format import Arrow
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Paths, Storage, StorageOptions
from daskdist.storage.hive_partitions import Partitions


def read_arrow(
    paths: Paths,
    columns: Any = None,
    *,
    missing: Mapping[str, Any] | None = None,
    partitioned: bool = True,
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read the rows of Arrow IPC files and streams, and of Feather files of version 2, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    columns
        The columns of an element: None for all, or a list of names for some, as a dict by name; or any structure of
        names, in which a list stands for one array of these columns side by side: ``{"x": ["f0", "f1"], "y":
        "label"}``.
    missing
        The replacement of nulls, by column: ``{"count": -1}``; for structs a dict by field. Without it, nulls are NaN
        in floats, NaT in times and an error in other columns. In a column of lists it is for nulls within the lists,
        and null lists are empty; ``[]`` is for null lists alone. For a null list of a fixed size it is for each value.
    partitioned
        Whether directories named ``name=value`` anywhere in the path become columns: of integers if all
        values are integers, else of text. Characters may be encoded by percents, and ``__HIVE_DEFAULT_PARTITION__`` is
        a null.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each row. The unit of reading is a record batch, a few small ones, or a part of a large one.

    Raises
    ------
    FileError
        No file matches, or the first is not Arrow. While iterating: a file is damaged, or has another schema.
    ArgumentError
        A column does not exist.

    Notes
    -----
    Local files are mapped into memory: uncompressed numbers without nulls are read when they are used, without a
    copy. Do not shorten or overwrite a file while it is in use. The batches of a stream are located by one scan
    through it.

    A file that stops within a message is an error. A stream may end between two messages without an end-of-stream
    marker, as the format allows; a warning is logged then, because a truncated file looks the same.
    """
    storage = Storage(storage_options)
    files = storage.expand(paths, Arrow.suffixes)
    partitions = Partitions.of(files) if partitioned else Partitions()
    return Dataset(read_node(Arrow(columns, missing, partitions, storage), files))
