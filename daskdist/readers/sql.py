"""Datasets of the tables and queries of databases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.formats.sql.login import path_of
from daskdist.formats.sql.sql_format import Sql
from daskdist.ops.read_files import read_node


def read_sql(
    table_or_query: str,
    connection: str | os.PathLike[str],
    index: str | None = None,
    columns: Any = None,
    *,
    num_splits: int | None = None,
    rows_per_split: int | None = None,
    limits: tuple[Any, Any] | None = None,
    missing: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Read the rows of a table or query of a database, in the order of an index column.

    Parameters
    ----------
    table_or_query
        The name of a table or view, optionally as ``"schema.table"``; or a query that begins with ``SELECT`` or
        ``WITH``.
    connection
        An SQLAlchemy URL, ``"postgresql+psycopg://user:password@host/database"``, or the path of an SQLite file.
        Its secrets are pickled with the pipeline and never shown.
    index
        The column whose ranges are splits: numbers, times, text, or anything else the database can sort. The default is
        the first column of the primary key, or the row id of an SQLite table without one. Without an index, as for a
        query, all rows are one split.
    columns
        The columns of an element, as in `read_parquet`.
    num_splits
        The largest number of ranges; by default as many as give splits of the setting ``split-bytes``.
    rows_per_split
        The approximate number of rows of a range, in place of ``num_splits``.
    limits
        The smallest and the largest index of the rows to read, both inclusive.
    missing
        The replacement of nulls, by column: ``{"count": -1}``. Without it, nulls are NaN in floats, NaT in times and an
        error in other columns.
    dtypes
        Types of columns that override those of the database or of the first rows:
        ``{"day": "datetime64[D]", "price": "float32"}``.
    engine_options
        Further arguments of ``sqlalchemy.create_engine``, which must be picklable: ``{"connect_args": {...}}``.

    Returns
    -------
    Dataset
        An element for each row.

    Raises
    ------
    ArgumentError
        A column does not exist, or an option is invalid.
    MissingPackageError
        SQLAlchemy (``pip install 'daskdist[sql]'``) or the driver is not installed.
    FileError
        The table does not exist, or the database cannot be reached. While iterating: the server is gone, or a value
        does not have its column's type.

    Notes
    -----
    Numbers and times are cut into ranges of equal width between the smallest and the largest value, other types after
    equal numbers of rows in the database's order. Rows with a null index are a separate last split; with ``limits``
    they are left out. Within a split rows are ordered by the index, then by the primary key, or without one by all
    columns that are read, so that each pass has the same order. A query without an index runs unchanged: its order is
    fixed only if it has an ``ORDER BY`` without ties.

    Each split is read in its own transaction on its own connection: if a table changes in the meantime, splits may be
    from different times. The columns of queries, and untyped columns of SQLite, have the types of their first 1,000
    rows; PostgreSQL also knows the types of queries.

    >>> import sqlite3, tempfile
    >>> path = tempfile.mkdtemp() + "/a.sqlite"
    >>> with sqlite3.connect(path) as db:
    ...     _ = db.execute("CREATE TABLE words (word TEXT)"), db.execute("INSERT INTO words VALUES ('one'), ('two')")
    >>> db.close(), [str(row["word"]) for row in read_sql("words", path)]
    (None, ['one', 'two'])
    """
    if not isinstance(table_or_query, str) or not table_or_query.strip():
        raise ArgumentError(
            f"read_sql: table_or_query is {table_or_query!r:.80}; give the name of a table, or a query as text"
        )
    path, login = path_of(connection, engine_options)
    limits = tuple(limits) if isinstance(limits, list) else limits
    form = Sql(table_or_query, index, columns, num_splits, rows_per_split, limits, missing, dtypes, login)
    return Dataset(read_node(form, (path,)))
