"""Datasets of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats.json.json_format import Json
from daskdist.ops.read_files import endings, read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions
from daskdist.storage.hive_partitions import Partitions


def read_json(
    paths: Paths,
    columns: Any = None,
    *,
    lines: bool | None = None,
    dtypes: Mapping[str, Any] | None = None,
    missing: Mapping[str, Any] | None = None,
    sample_bytes: int = 2**20,
    compression: str | None = "infer",
    partitioned: bool = True,
    storage_options: StorageOptions = None,
) -> Dataset:
    """Read the objects of JSON files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    columns
        Which fields, and how they make up an element: None for all and a list of names for some, as a dict
        by name; or any structure of names, in which a list stands for one array of its fields side by side:
        ``{"x": ["f0", "f1"], "y": "label"}``.
    lines
        Whether files have an object a line. If not, they are an array of objects, or objects that go over lines.
        None tells it by how each file begins.
    dtypes
        The types of some fields: a dtype, ``["float32"]`` for lists of such, a dict by field for objects, or an Arrow
        type. The others are as the sample has them: ``bool``, ``int64`` (``uint64`` where it has to be), ``float64``
        where some are not whole, text.
    missing
        What stands for a null and for a field that an object lacks, by column: ``{"count": -1}``; within objects
        a dict by field. Without, nulls are NaN in floats, NaT in times and an error in other columns.
    sample_bytes
        How much of the first file is looked at for the types of fields.
    compression
        ``"infer"``, by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``, ``"bz2"`` or
        ``"xz"``; or None.
    partitioned
        Whether directories named ``name=value`` make columns, wherever in the path they are: integers
        where all values are, else text.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        An element an object; objects within it are dicts, lists arrays whose length differs. A byte range is the
        unit of reading of lines, of anything else a file.

    Raises
    ------
    FileError
        No file matches, or none has an object to tell the types by. While iterating: what is there is not JSON, a
        value is of another type than those of the sample, or there is a field that none of those has. The message
        names line and field, and says what to write.
    ArgumentError
        There is no such field, or no such type.

    Notes
    -----
    Text is text, also where it looks like a time; ``dtypes={"when": "datetime64[s]"}`` makes it one, UTC where it has
    a zone. With ``columns``, other fields of an object are not looked at, but for what is within objects that are
    asked for: with those, a field that the sample lacks is an error anywhere. Numbers in a column of floats are the
    nearest float. A file that is not lines is read whole, into memory.
    """
    storage = Storage(storage_options)
    form = Json(columns, dtypes, missing, sample_bytes, compression_of(compression), storage=storage, lines=lines)
    found = storage.expand(paths, endings(form))
    partitions = Partitions.of(found) if partitioned else Partitions()
    return Dataset(read_node(replace(form, partitions=partitions).learned(found), found))
