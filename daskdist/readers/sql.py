"""Datasets of tables and queries of databases."""

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
        The name of a table or view, with its schema as ``"schema.table"``; or a query, beginning with ``SELECT``
        or ``WITH``.
    connection
        A URL of SQLAlchemy, ``"postgresql+psycopg://user:password@host/database"``, or the path of a SQLite file.
        Its secrets are pickled with the pipeline and never shown.
    index
        The column whose ranges are splits: numbers, times, text, or anything else the database can sort. By
        default the first column of the primary key; of a SQLite table without one, the number of the row. Where
        there is none, as with a query, all rows are one split.
    columns
        Which columns, and how they make up an element, as in `read_parquet`.
    num_splits
        How many ranges there are to be at most. By default as many as make splits of the usual size.
    rows_per_split
        About how many rows a range is to have, instead.
    limits
        The least and the greatest value of the index of the rows that are read, both included.
    missing
        What stands for a null, by column: ``{"count": -1}``. Without, nulls are NaN in floats, NaT in times and an
        error in other columns.
    dtypes
        What columns are read as, where that is to be something else than what the database says or the first rows
        tell: ``{"day": "datetime64[D]", "price": "float32"}``.
    engine_options
        What ``sqlalchemy.create_engine`` takes besides, all of it to be pickled: ``{"connect_args": {...}}``.

    Returns
    -------
    Dataset
        An element a row.

    Raises
    ------
    ArgumentError
        There is no such column, an option is none, or SQLAlchemy or the driver is not installed.
    FileError
        There is no such table, or the database cannot be reached. While iterating: the server is gone, or a value
        is not of its column's type.

    Notes
    -----
    Numbers and times are cut into ranges of one width between the least and the greatest value, all else where
    so many rows of the database's own order are over. Rows whose index is null are a split of their own, the last; with
    ``limits`` they are left out. Within a split rows are ordered by the index, then by the primary key, or where
    there is none by all columns that are read, so that each pass gives them in one order. A query without an index
    runs as it stands: it comes in one order if it has an ``ORDER BY`` that leaves no ties.

    Each split is a transaction of its own on a connection of its own: of a table that changes while it is read,
    splits may be of different times. Queries and SQLite's own columns without a type have the types of their first
    1,000 rows; PostgreSQL tells those of queries too.

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
