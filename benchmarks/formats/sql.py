"""Tables of a SQLite file against SQLAlchemy's own loop over them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy

import daskdist

from . import Case


def write(path: Path, num_rows: int) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a REAL, b INTEGER, s TEXT)")
        db.executemany(
            "INSERT INTO t VALUES (?, ?, ?, ?)", ((k, k / 3, k * 7, f"row {k} of some text") for k in range(num_rows))
        )
        db.commit()


def bare(path: Path) -> int:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", poolclass=sqlalchemy.pool.NullPool)
    with engine.connect() as connection:
        rows = connection.execution_options(yield_per=4096).execute(sqlalchemy.text("SELECT * FROM t ORDER BY id"))
        return sum(len(part) for part in rows.partitions())


CASES = [
    Case("SQLite by SQLAlchemy, 4 columns", write, lambda path: daskdist.read_sql("t", str(path)), bare, 500_000),
]
