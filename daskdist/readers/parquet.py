"""Datasets of Parquet files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats.parquet import Parquet
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Paths, Storage, StorageOptions
from daskdist.storage.hive_partitions import Partitions


def read_parquet(
    paths: Paths,
    columns: Any = None,
    filters: Any = None,
    *,
    missing: Mapping[str, Any] | None = None,
    partitioned: bool = True,
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read the rows of Parquet files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    columns
        The columns of an element: None for all, or a list of names for some, as a dict by name; or any structure of
        names, in which a list stands for one array of these columns side by side: ``{"x": ["f0", "f1"], "y":
        "label"}``.
    filters
        A filter of rows: ``[("day", ">=", 3), ("kind", "in", {"a", "b"})]`` for rows that meet all conditions, or a
        list of such lists for rows that meet all conditions of at least one. Row groups without such rows by their
        statistics are not read.
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
        An element for each row. The unit of reading is a row group.

    Raises
    ------
    FileError
        No file matches, or the first is not Parquet. While iterating: a file is damaged, or has another schema.
    ArgumentError
        A column does not exist.

    Notes
    -----
    Lists become arrays of varying length, structs dicts, decimals the nearest float64, dates and times NumPy's.
    Timestamps of the old type INT96, which Spark writes, are microseconds; nanoseconds in them are an error. Columns of
    Arrow's fixed-shape tensors are arrays of that shape.

    A column of nulls that has no type, as pandas writes it, has the type that it has in other files.
    """
    storage = Storage(storage_options)
    files = storage.expand(paths, Parquet.suffixes)
    partitions = Partitions.of(files) if partitioned else Partitions()
    return Dataset(read_node(Parquet(columns, filters or None, missing, partitions, storage), files))
