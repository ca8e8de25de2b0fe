"""Datasets of delimited text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daskdist.dataset import Dataset
from daskdist.display.missing_arguments import advises
from daskdist.errors import ArgumentError
from daskdist.formats import endings
from daskdist.formats.csv.csv_format import Csv
from daskdist.formats.csv.dialect import Dialect
from daskdist.formats.csv.fields import NULLS, TEXT_NULLS
from daskdist.ops.read_files import read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Paths, Storage, StorageOptions
from daskdist.storage.hive_partitions import Partitions


@advises("read_csv")
def read_csv(
    paths: Paths,
    columns: Any = None,
    *,
    delimiter: str | None = None,
    header: bool | Sequence[str] = True,
    new_names: Sequence[str] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    missing: Mapping[str, Any] | None = None,
    null_values: Sequence[str] | None = None,
    quote: str | None = '"',
    newlines_in_values: bool = True,
    comment: str | None = None,
    encoding: str = "utf-8",
    sample_bytes: int = 2**20,
    compression: str | None = "infer",
    partitioned: bool = True,
    storage_options: StorageOptions = None,
) -> Dataset:
    r"""Read the rows of CSV or TSV files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    columns
        The columns of an element: None for all, or a list of names for some, as a dict by name; or any structure of
        names, in which a list stands for one array of these columns side by side: ``{"x": ["f0", "f1"], "y":
        "label"}``.
    delimiter
        The character between fields; None for a tab in files whose names end in ``.tsv`` or ``.tab``, else a comma.
    header
        Whether files begin with the names of their columns. For files that do not, give False to call the columns
        ``c0``, ``c1`` and so on, or a list of names.
    new_names
        The names of all columns, in place of those with which files begin.
    dtypes
        The types of some columns: a dtype, ``"str"`` or ``"bytes"``. Other types are inferred: int64, bool,
        ``datetime64`` (in days, seconds or nanoseconds), ``timedelta64`` for times of day, float64, else text. A column
        with leading zeros (``01234``), a plus sign (``+15551234567``) or hexadecimal numbers (``0x1F``) is text. Bools
        are words; ``1`` and ``0`` are bools in a column of the given type bool.
    missing
        The replacement of missing values, by column: ``{"count": -1, "word": ""}``. Without it, they are NaN in floats,
        NaT in times and an error in integers, bools and text, as in JSON and Parquet. `Dataset.describe` counts them.
    null_values
        The texts of missing values. By default, that is an empty field, and in columns of numbers, bools and times also
        ``NA``, ``N/A``, ``#N/A``, ``NaN``, ``nan``, ``n/a``, ``NULL`` and ``null``, which are text in columns of text.
        In these a quoted value is never missing: ``""`` is empty text.
    quote
        The quote character around fields, which is doubled inside; None to treat quotes as text.
    newlines_in_values
        Whether quoted fields may contain newlines. With False, a range of a large file is read without scanning the
        data before it.
    comment
        The beginning of lines to skip before the header or the first row, such as ``"#"``.
    encoding
        The encoding of the text.
    sample_bytes
        The number of bytes of the first file with rows from which types are inferred.
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
        An element for each row; blank lines are skipped. The unit of reading is a byte range; the parts of a compressed
        file are read in sequence.

    Raises
    ------
    FileError
        No file matches, or none has a header. While iterating: a file has missing or additional columns, a row has too
        many or too few fields, a value does not have its column's type, or a quote is not closed. The message names the
        row, the column and the value, and suggests a remedy.
    ArgumentError
        A column, type or encoding does not exist.

    Notes
    -----
    An inferred type applies to all files, but later values may not have it: give ``dtypes`` if that matters. For
    example, ``01234`` is an error in a column whose sample has only numbers, and 1234 with
    ``dtypes={"column": "int64"}``. A column of integers is float64 if a value is missing in the sample, and one of true
    and false is text. Integers beyond int64 are uint64, if there is neither a larger nor a negative nor a missing one.
    A column of floats in whose sample an integer would be rounded to other digits is text, as identifiers could become
    equal; in later values that is an error. Times with a zone are converted to UTC. Columns are found by name in each
    file, in any order.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
    >>> _ = path.write_text('n,word\n1,"one\ntwo"\n2,three\n')
    >>> list(read_csv(path))
    [{'n': np.int64(1), 'word': 'one\ntwo'}, {'n': np.int64(2), 'word': 'three'}]
    """
    names = tuple(header) if isinstance(header, Sequence) and not isinstance(header, str) else None
    if not isinstance(header, bool) and not (names and all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"header is {header!r:.80}; give True, False, or a list of names")
    if new_names is not None:
        if header is not True:
            raise ArgumentError("read_csv: new_names replaces the names in a header; give header=[...] without one")
        if isinstance(new_names, str) or not (new_names and all(isinstance(name, str) for name in new_names)):
            raise ArgumentError(f"new_names is {new_names!r:.80}; give a list of names")
        names = tuple(new_names)
    if isinstance(null_values, str):
        raise ArgumentError(f"null_values is {null_values!r}; give a list: [{null_values!r}]")
    if null_values is not None and not (
        isinstance(null_values, Sequence) and all(isinstance(value, str) for value in null_values)
    ):
        raise ArgumentError(f"null_values is {null_values!r:.80}; give a list of text")
    storage = Storage(storage_options)
    dialect = Dialect(
        delimiter,
        quote,
        newlines_in_values,
        encoding,
        header is True,
        names,
        NULLS if null_values is None else tuple(null_values),
        TEXT_NULLS if null_values is None else tuple(null_values),
        comment=comment,
    )
    files = storage.expand(paths, endings(Csv()))
    partitions = Partitions.of(files) if partitioned else Partitions()
    form = Csv(
        columns,
        dtypes,
        missing,
        dialect=dialect,
        sample_bytes=sample_bytes,
        compression=compression_of(compression),
        partitions=partitions,
        storage=storage,
    )
    return Dataset(read_node(form.learned(files), files))
