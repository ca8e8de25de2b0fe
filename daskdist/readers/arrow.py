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
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    columns
        Which columns, and how they make up an element: None for all and a list of names for some, as a dict
        by name; or any structure of names, in which a list stands for one array of its columns side by side:
        ``{"x": ["f0", "f1"], "y": "label"}``.
    missing
        What stands for a null, by column: ``{"count": -1}``; within structs a dict by field. Without, nulls are NaN
        in floats, NaT in times and an error in other columns. Of a column of lists it stands for a null within them,
        and ``[]`` for one in the place of a list.
    partitioned
        Whether directories named ``name=value`` make columns, wherever in the path they are: integers
        where all values are, else text.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        An element a row. The unit of reading is a record batch, some small ones, or a part of a large one.

    Raises
    ------
    FileError
        No file matches, or the first is not Arrow. While iterating: a file is damaged, or has another schema.
    ArgumentError
        There is no such column.

    Notes
    -----
    Local files are mapped into memory: numbers without nulls, of what is not compressed, are read from there when
    they are used, without a copy. A file must not be shortened or written over while it is in use. The batches of
    a stream are found by going through it once, from one to the next.

    A file that stops within a message is an error. A stream may end between two messages without an end-of-stream
    marker, as the format allows; a warning is logged then, for a file that was cut off there looks the same.
    """
    storage = Storage(storage_options)
    found = storage.expand(paths, Arrow.suffixes)
    partitions = Partitions.of(found) if partitioned else Partitions()
    return Dataset(read_node(Arrow(columns, missing, partitions, storage), found))
