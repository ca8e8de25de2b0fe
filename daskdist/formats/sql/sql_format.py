"""Tables and queries of databases, read by SQLAlchemy; a split is a range of an index column.

A path is the URL of a database without its secrets, or that of an SQLite file. The data alone determines the order of
rows, so that reading is pure: by the index, then by columns that distinguish rows of one key. Each split is a separate
query on a separate connection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.arguments import whole_number
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.sql.column_types import POSTGRESQL, Column, array_of, column_of, reflected_kind, sampled_kind
from daskdist.formats.sql.login import Login, connected, sa
from daskdist.formats.table_files import valid_rows
from daskdist.storage.failures import DamagedPart
from daskdist.storage.first_file import FirstFile, differs_from_first
from daskdist.storage.libraries import pa
from daskdist.tables.from_arrow import TableReader

# The number of rows to sample for the types of columns and the size of rows.
_SAMPLED: Final = 1000
# The most rows to fetch from a driver at a time: Python objects take several times the memory of arrays. From a server
# each fetch is a round trip; from a file, few are best, as they are still in the processor's cache.
_FETCHED: Final = 4096
_FETCHED_OF_FILE: Final = 512
_COMMENT: Final = r"--[^\n]*|/\*(?:/\*.*?\*/|[^*/]|\*(?!/)|/(?!\*))*\*/|/\*.*?\*/"
_QUERY: Final = re.compile(rf"(?:[\s(]|{_COMMENT})*(select|with|values)\b", re.IGNORECASE | re.DOTALL)
# A part of a query: a group for what may follow its end; else text, a quoted name, or a single character.
_PART: Final = re.compile(rf"""(\s+|;|{_COMMENT})|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|(\$\w*\$).*?\2|.""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Relation:
    """The description of a table or query.

    Parameters
    ----------
    name
        The name of the table; for a query, its name in messages.
    schema
        The schema of the table, if it was given.
    query
        The text of the query; None for a table.
    columns
        The columns that are read, in the order of the table.
    positions
        Their positions in the table.
    index
        The column whose ranges are splits; None if there is none.
    order
        The columns that rows are ordered by; empty if the query has its own order.
    row_bytes
        The approximate size of a row.
    """

    name: str
    schema: str | None
    query: str | None
    columns: tuple[Column, ...] = ()
    positions: tuple[int, ...] = ()
    index: str | None = None
    order: tuple[tuple[str, str], ...] = ()
    row_bytes: int = 1

    @property
    def label(self) -> str:
        """The name of the table or query for messages."""
        if self.query is not None:
            return f"query {self.name!r}"
        return f"table {self.name!r}" if self.schema is None else f"table {self.schema + '.' + self.name!r}"

    def source(self) -> Any:
        """Return the table or subquery that rows are selected from."""
        if self.query is None:
            return sa.table(self.name, schema=self.schema)
        # The newline ends a comment.
        return _text(f"{self.query}\n").columns().subquery("rows_of_query")


@dataclass(frozen=True, slots=True)
class SqlSplit:
    """The rows that a split reads, as a range of the index column.

    Parameters
    ----------
    low
        The smallest value; None for no limit.
    high
        The upper limit; None for no limit.
    is_closed
        Whether ``high`` is included.
    is_null
        Whether the split has the rows with a null index.
    """

    low: Any = None
    high: Any = None
    is_closed: bool = False
    is_null: bool = False

    def where(self, column: Any) -> list[Any]:
        """Return the range as conditions on a column."""
        if self.is_null:
            return [column.is_(None)]
        conditions = []
        if self.low is not None:
            conditions.append(column >= _bound(self.low))
        if self.high is not None:
            conditions.append(column <= _bound(self.high) if self.is_closed else column < _bound(self.high))
        return conditions or [column.isnot(None)]

    def label(self, name: str) -> str:
        """Return the name of the range for messages."""
        if self.is_null:
            return f"{name} null"
        if self.low is None and self.high is None:
            return f"{name} of any value"
        low = "" if self.low is None else f"from {self.low} "
        high = "" if self.high is None else f"{'to' if self.is_closed else 'below'} {self.high}"
        return f"{name} {low}{high}".rstrip()


@dataclass(frozen=True)
class Sql:
    """The reader, with its options.

    Parameters
    ----------
    table
        The name of a table or view, ``"schema.table"``, or the text of a query; None for the only table.
    index
        The column whose ranges are splits. The default is the first column of the primary key, or the row id of an
        SQLite table without one. A query has no default.
    columns
        The columns and their structure; see `Columns.of`.
    num_splits
        The largest number of ranges; None for splits of the usual size.
    rows_per_split
        The approximate number of rows of a range, in place of ``num_splits``.
    limits
        The smallest and the largest index of the rows to read, both inclusive.
    missing
        The replacement of nulls, by column.
    dtypes
        Types of columns that override those of the database.
    login
        The login of the database; unused for SQLite files.
    """

    table: str | None = None
    index: str | None = None
    columns: Any = None
    num_splits: int | None = None
    rows_per_split: int | None = None
    limits: tuple[Any, Any] | None = None
    missing: Mapping[str, Any] | None = None
    dtypes: Mapping[str, Any] | None = None
    login: Login = field(default_factory=Login)

    name = "sql"
    suffixes = (".sqlite", ".sqlite3", ".db")
    is_splittable = True

    def __post_init__(self) -> None:
        for name in ("num_splits", "rows_per_split"):
            if getattr(self, name) is not None:
                whole_number("read_sql", name, getattr(self, name), at_least=1)
        if self.num_splits is not None and self.rows_per_split is not None:
            raise ArgumentError("read_sql: num_splits and rows_per_split are both given; give one")
        if self.limits is not None and not (isinstance(self.limits, tuple) and len(self.limits) == 2):
            raise ArgumentError(
                f"read_sql: limits is {self.limits!r:.80}; give the smallest and the largest: (low, high)"
            )
        if self.limits is not None and None in self.limits:
            raise ArgumentError(f"read_sql: limits is {self.limits!r:.80}; neither value may be None")

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(b"SQLite format 3\0")

    def spec(self, path: str) -> ElementSpec:
        with connected(self.login, path, path) as connection:
            return self._spec(self._relation(connection, path), path)

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        with connected(self.login, path, path) as connection:
            try:
                relation = self._relation(connection, path)
                spec = self._spec(relation, path)
            except ArgumentError as error:
                raise FileError(f"{path}: {error}; the first one, {first.path}, has it") from None
            if spec != first.spec:
                raise differs_from_first(path, spec, first)
            ranges, num_bytes = self._ranges(connection, relation)
        whole = f"{path} {relation.label}"
        labels = [whole if relation.index is None else f"{whole}, {part.label(relation.index)}" for part in ranges]
        return [
            Split(label, (path, relation, part), None, num_bytes, file, path)
            for label, part in zip(labels, ranges, strict=True)
        ]

    def read(self, split: Split) -> Block:
        return self._tables.block(self._table(split), split.label, split.payload[0])

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        table = self._table(split)

        def block_of(start: int, stop: int) -> Block:
            return self._tables.block(table.slice(start, stop - start), split.label, split.payload[0])

        return valid_rows(table.num_rows, block_of, split.label)

    def _table(self, split: Split) -> Any:
        path, relation, part = split.payload
        fetched = max(1, min(_FETCHED, in_bytes("split-bytes") // relation.row_bytes))
        schema = _schema(relation)
        batches, start = [], 0
        with connected(self.login, path, split.label) as connection:
            positions = relation.positions if relation.index is None and relation.query else range(len(schema))
            for rows in _fetched(connection, _statement(relation, part), fetched):
                values = list(zip(*rows, strict=True))
                arrays = [
                    array_of(values[position], column, split.label, start)
                    for position, column in zip(positions, relation.columns, strict=True)
                ]
                batches.append(pa.record_batch(arrays, schema=schema))
                start += len(rows)
        return pa.Table.from_batches(batches, schema)

    def names(self, path: str) -> list[str]:
        """Return the names of all columns of the table or query."""
        with connected(self.login, path, path) as connection:
            return list(self._described(connection, self._found(connection, path), path))

    @property
    def _tables(self) -> TableReader:
        return TableReader(self.columns, self.missing)

    def _spec(self, relation: Relation, path: str) -> ElementSpec:
        return self._tables.spec(_schema(relation), path)

    # --- tables and columns ---

    def _found(self, connection: Any, path: str) -> Relation:
        # Return the table, with its schema, or the query.
        inspector = sa.inspect(connection)
        if self.table is None:
            names = inspector.get_table_names()
            if len(names) != 1:
                raise FileError(f"{path}: has {_named(names)}; say which with Sql(table)")
            return Relation(names[0], None, None)
        if is_query(self.table):
            query = without_semicolon(self.table).strip()
            return Relation(" ".join(query.split())[:60], None, query)
        named_schema, _, name = self.table.rpartition(".")
        relations = [Relation(self.table, None, None)] + ([Relation(name, named_schema, None)] if named_schema else [])
        for candidate in relations:
            if inspector.has_table(candidate.name, candidate.schema):
                return candidate
        raise FileError(
            f"{path}: no table {self.table!r}; there are {_named(inspector.get_table_names())}. Give the name of one, "
            "with its schema before a dot where it is in another, or a query that begins with SELECT or WITH"
        )

    def _described(self, connection: Any, relation: Relation, path: str) -> dict[str, str | None]:
        # Return the kind of each column by name, as far as the database reports it without reading rows.
        nothing = sa.select(sa.literal_column("*")).select_from(relation.source()).where(sa.false())
        with connection.execute(nothing) as result:
            described = result.cursor.description
        names = [description[0] for description in described]
        for name in names:
            if names.count(name) > 1:
                raise FileError(f"{path}: {relation.label} has two columns called {name!r}; rename one with AS")
        if connection.dialect.name == "postgresql":
            return {description[0]: POSTGRESQL.get(description[1]) for description in described}
        if relation.query is not None:
            return dict.fromkeys(names)
        reflected = {
            description["name"]: reflected_kind(description["type"])
            for description in sa.inspect(connection).get_columns(relation.name, relation.schema)
        }
        return {name: reflected.get(name) for name in names}

    def _relation(self, connection: Any, path: str) -> Relation:
        relation = self._found(connection, path)
        kinds = self._described(connection, relation, path)
        names = list(kinds)
        for name in self.dtypes or ():
            if name not in names:
                raise ArgumentError(f"dtypes: no column {name!r}; there are {', '.join(map(repr, names))}")
        if self.index is not None and self.index not in names and self.index != _ROW:
            raise ArgumentError(f"read_sql: no index column {self.index!r}; there are {', '.join(map(repr, names))}")
        read = self._tables.read_from(names)
        index, key, is_unique = self._index(connection, relation, kinds)
        if index is None:
            for option in ("num_splits", "rows_per_split", "limits"):
                if getattr(self, option) is not None:
                    raise ArgumentError(f"read_sql: {option} needs an index column; give index=")
        dtypes = self.dtypes or {}
        columns = [column_of(name, kinds[name] or "null", dtypes.get(name)) for name in read]
        row_bytes = 8 * len(columns)
        if any(not column.is_sized or column.arrow == "null" for column in columns):
            sample, row_bytes = self._sample(connection, relation, read)
            for place, column in enumerate(columns):
                if kinds[column.name] is None and column.name not in dtypes:
                    kind = sampled_kind(column.name, sample[column.name], f"{path} {relation.label}")
                    columns[place] = column_of(column.name, kind)
        # Rows that agree in all of these are equal elements, or differ in the key.
        by = [index] if index is not None and is_unique else [index, *(key or read)]
        order = [(name, kinds.get(name) or "") for name in dict.fromkeys(by) if name is not None]
        if relation.query is not None and index is None:
            order = []
        return Relation(
            relation.name,
            relation.schema,
            relation.query,
            tuple(columns),
            tuple(names.index(name) for name in read),
            index,
            tuple(order),
            max(1, row_bytes),
        )

    def _index(
        self, connection: Any, relation: Relation, kinds: Mapping[str, Any]
    ) -> tuple[str | None, list[str], bool]:
        # Return the index column, the primary key, and whether index values are unique.
        if relation.query is not None:
            return self.index, [], False
        inspector = sa.inspect(connection)
        key = inspector.get_pk_constraint(relation.name, relation.schema)["constrained_columns"]
        index = self.index
        if index is None and key:
            index = key[0]
        if index in (None, _ROW) and _ROW not in kinds:
            is_view = relation.name in inspector.get_view_names(relation.schema)
            has_rows = connection.dialect.name == "sqlite" and not is_view
            if index == _ROW and not has_rows:
                raise ArgumentError(f"read_sql: {relation.label} has no {_ROW}; only tables of SQLite do")
            index = _ROW if has_rows else None
        return index, key, index == _ROW or key == [index]

    def _sample(self, connection: Any, relation: Relation, read: Sequence[str]) -> tuple[dict[str, list[Any]], int]:
        # Return some rows by column, and their average size.
        statement = sa.select(*[sa.column(name) for name in read]).select_from(relation.source()).limit(_SAMPLED)
        rows: list[Any] = []
        num_bytes = 0
        for part in _fetched(connection, statement, 100):
            rows.extend(part)
            num_bytes += sum(_size(value) for row in part for value in row)
            if num_bytes > in_bytes("split-bytes"):
                break
        columns = [list(values) for values in zip(*rows, strict=True)] if rows else [[] for _ in read]
        return dict(zip(read, columns, strict=True)), num_bytes // max(1, len(rows))

    # --- ranges ---

    def _ranges(self, connection: Any, relation: Relation) -> tuple[list[SqlSplit], int | None]:
        """Return ranges that together have all rows, each once, and the number of rows of one if known."""
        if relation.index is None:
            return [SqlSplit()], None
        low, high = (None, None) if self.limits is None else self.limits
        whole = SqlSplit(low, high, is_closed=True)
        column = _column(relation.index)
        values = [sa.func.min(column), sa.func.max(column)] if _is_ordered(relation) else []
        asked = sa.select(sa.func.count(), sa.func.count(column), *values).select_from(relation.source())
        if self.limits is not None:
            asked = asked.where(*whole.where(column))
        num_rows, num_present, *ends = connection.execute(asked).one()
        number = self._number(num_present, relation.row_bytes)
        bounds = _even(ends[0], ends[1], number) if len(ends) == 2 and num_present else None
        if bounds is None:
            bounds = self._ranked(connection, relation, whole, max(1, math.ceil(num_present / number)))
        edges = [low, *bounds, high]
        ranges = [SqlSplit(edges[k], edges[k + 1]) for k in range(len(edges) - 1)] if num_present else []
        if ranges and high is not None:
            ranges[-1] = SqlSplit(ranges[-1].low, high, is_closed=True)
        if self.limits is None and num_rows > num_present:
            ranges.append(SqlSplit(is_null=True))
        return ranges, relation.row_bytes * num_rows // max(1, len(ranges))

    def _number(self, num_rows: int, row_bytes: int) -> int:
        if self.num_splits is not None:
            return min(self.num_splits, max(1, num_rows))
        rows = self.rows_per_split or max(1, in_bytes("split-bytes") // row_bytes)
        return max(1, math.ceil(num_rows / rows))

    def _ranked(self, connection: Any, relation: Relation, whole: SqlSplit, step: int) -> list[Any]:
        # Return every ``step``-th value in the database's order, for types without arithmetic, such as text.
        column = _column(relation.index or "")
        place = sa.func.row_number().over(order_by=column).label("place")
        inner = sa.select(column.label("edge"), place).select_from(relation.source()).where(*whole.where(column))
        ranked = inner.subquery("ranked")
        every = sa.select(ranked.c.edge).where((ranked.c.place - 1) % step == 0, ranked.c.place > 1)
        return list(dict.fromkeys(connection.execute(every.order_by(ranked.c.place)).scalars()))


# SQLite's name for the row id.
_ROW: Final = "rowid"


def nothing_of(dtype: Any) -> Any:
    """Return TensorFlow's replacement of nulls: a zero or empty value of a type."""
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype.kind in "SO":
        return b""
    return "" if numpy_dtype.kind in "UT" else numpy_dtype.type(0).item()


def is_query(text: str) -> bool:
    """Return whether a text is a query rather than the name of a table."""
    return _QUERY.match(text) is not None


def without_semicolon(query: str) -> str:
    """Return a query without a semicolon at its end, and without comments that follow it.

    >>> without_semicolon("SELECT ';' FROM t; -- all; rows"), without_semicolon("SELECT 1 -- one; row")
    ("SELECT ';' FROM t", 'SELECT 1 -- one; row')
    """
    end, has_semicolon = 0, False
    for part in _PART.finditer(query):
        if part[1] is None:
            end, has_semicolon = part.end(), False
        elif part[1] == ";":
            has_semicolon = True
    return query[:end] if has_semicolon else query


def _named(names: Sequence[str]) -> str:
    return f"the tables {', '.join(map(repr, names[:20]))}{' ...' if len(names) > 20 else ''}" if names else "no tables"


def _text(query: str) -> Any:
    # Escape colons, which would begin the name of a parameter.
    return sa.text(re.sub(r":(?=\w)", r"\\:", query))


def _column(name: str) -> Any:
    return sa.literal_column(_ROW) if name == _ROW else sa.column(name)


def _schema(relation: Relation) -> Any:
    return pa.schema([(column.name, column.arrow) for column in relation.columns])


def _fetched(connection: Any, statement: Any, number: int) -> Iterator[list[Any]]:
    # For SQLite use the driver's rows: SQLAlchemy's processing of each takes longer than everything else.
    is_plain = connection.dialect.name == "sqlite"
    options = {} if is_plain else {"stream_results": True, "max_row_buffer": number}
    with connection.execute(statement, execution_options=options) as result:
        fetch = result.cursor.fetchmany if is_plain else result.fetchmany
        number = min(number, _FETCHED_OF_FILE) if is_plain else number
        while rows := fetch(number):
            yield rows


def _statement(relation: Relation, part: SqlSplit) -> Any:
    if relation.query is not None and relation.index is None:
        # Unchanged, as a subquery would lose its order.
        return _text(relation.query)
    statement = sa.select(*[sa.column(column.name) for column in relation.columns]).select_from(relation.source())
    if relation.index is not None:
        statement = statement.where(*part.where(_column(relation.index)))
    return statement.order_by(*[_sortable(name, kind) for name, kind in relation.order])


def _sortable(name: str, kind: str) -> Any:
    # JSON documents can only be ordered by their text.
    return sa.cast(sa.column(name), sa.Text) if kind == "json" else _column(name)


def _bound(value: Any) -> Any:
    # With an explicit type where SQLAlchemy's default is too small or has no zone.
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool):
        return sa.bindparam(None, value, sa.BigInteger())
    if isinstance(value, datetime):
        return sa.bindparam(None, value, sa.DateTime(timezone=value.tzinfo is not None))
    return value


def _is_ordered(relation: Relation) -> bool:
    # Databases do not support min and max for every sortable type.
    kind = next((kind for name, kind in relation.order if name == relation.index), "")
    return kind not in ("uuid", "bool", "json", "bytes") and not kind.endswith("[]")


def _even(low: Any, high: Any, number: int) -> list[Any] | None:
    """Return the edges that cut values from ``low`` to ``high`` into parts of equal width; None if not possible."""
    kinds = (int, float, Decimal, date, timedelta)
    if not all(isinstance(value, kinds) and not isinstance(value, bool) for value in (low, high)):
        return None
    try:
        span: Any = high - low
        if isinstance(span, (float, Decimal)):
            if not math.isfinite(span):
                return None
            edges = [low + span * k / number for k in range(1, number)]
        else:
            edges = [low + span * k // number for k in range(1, number)]
    # For example a float and a Decimal, or times with a zone and without.
    except (TypeError, ArithmeticError):
        return None
    return [edge for edge in dict.fromkeys(edges) if edge > low]


def _size(value: Any) -> int:
    return len(value) + 16 if isinstance(value, (str, bytes, memoryview, list)) else 8
