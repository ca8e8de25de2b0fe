"""Datasets of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats import endings
from daskdist.formats.json.json_format import Json
from daskdist.ops.read_files import read_node
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
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    columns
        The fields of an element: None for all, or a list of names for some, as a dict by name; or any structure of
        names, in which a list stands for one array of these fields side by side: ``{"x": ["f0", "f1"], "y": "label"}``.
    lines
        Whether files have one object per line. If False, they are an array of objects, or objects that span lines. None
        decides by the beginning of each file.
    dtypes
        The types of some fields: a dtype, ``["float32"]`` for lists of a dtype, a dict by field for objects, or an
        Arrow type. Other types are inferred from the sample: ``bool``, ``int64`` (``uint64`` if necessary), ``float64``
        if some numbers are not integers, text.
    missing
        The replacement of nulls and of fields that an object lacks, by column: ``{"count": -1}``; for nested objects a
        dict by field. Without it, nulls are NaN in floats, NaT in times and an error in other columns.
    sample_bytes
        The number of bytes of the first file from which types are inferred.
    compression
        ``"infer"`` to decide by the first bytes and the name of each file; ``"gzip"``, ``"zlib"``, ``"zstd"``,
        ``"bz2"`` or ``"xz"``; or None.
    partitioned
        Whether directories named ``name=value`` anywhere in the path become columns: of integers if all
        values are integers, else of text. Characters may be encoded by percents, and ``__HIVE_DEFAULT_PARTITION__`` is
        a null.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each object; nested objects are dicts, and lists are arrays of varying length. The unit of
        reading is a byte range for lines, else a file.

    Raises
    ------
    FileError
        No file matches, or none has an object from which types could be inferred. While iterating: the content is not
        JSON, a value does not have the type in the sample, or a field is not in the sample. The message names the line
        and the field, and suggests a remedy.
    ArgumentError
        A field or a type does not exist.

    Notes
    -----
    Text that looks like a time stays text; ``dtypes={"when": "datetime64[s]"}`` converts it, to UTC if it has a zone.
    With ``columns``, other fields are ignored, except within nested objects that are read: there a field that the
    sample lacks is an error. Numbers in a column of floats are rounded to the nearest float; one beyond all floats,
    such as 1e400, is an invalid value, while `read_csv` reads it as infinite. Files that are not lines
    are read as a whole, into memory.
    """
    storage = Storage(storage_options)
    form = Json(columns, dtypes, missing, sample_bytes, compression_of(compression), storage=storage, lines=lines)
    files = storage.expand(paths, endings(form))
    partitions = Partitions.of(files) if partitioned else Partitions()
    return Dataset(read_node(replace(form, partitions=partitions).learned(files), files))
