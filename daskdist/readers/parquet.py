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
        error in other columns. Of a column of lists it stands for a null within them, and ``[]`` for one in the place
        of a list.
    partitioned
        Whether directories named ``name=value`` make columns, wherever in the path they are: integers
        where all values are, else text.
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
    return Dataset(read_node(Parquet(columns, filters or None, missing, partitions, storage), found))
