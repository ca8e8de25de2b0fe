"""Files of tables of one schema, except that columns of nulls alone may have no type.

Writers that take types from values, such as pandas, give a column without values the type of nulls. It gets the type
that it has in the other files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Final

from daskdist.core.block import Block
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.bisection import valid_parts
from daskdist.storage.failures import DamagedPart
from daskdist.storage.filesystem import Storage
from daskdist.storage.first_bytes import recognised
from daskdist.storage.first_file import FirstFile, differs_from_first, readable_files
from daskdist.storage.hive_partitions import Partitions
from daskdist.storage.libraries import pa
from daskdist.tables.from_arrow import TableReader
from daskdist.url_secrets import shown_cause

# The number of files to look into for the type of a column.
_MOST_FILES: Final = 64
# The most rows of a table to leave out; with more, something else is wrong.
_MOST_LEFT_OUT: Final = 10_000


class ReadsTables:
    """The part of a format that converts Arrow tables to elements."""

    columns: Any
    missing: Mapping[str, Any] | None
    partitions: Partitions

    can_choose_columns: ClassVar[bool] = True

    @property
    def tables(self) -> TableReader:
        """The conversion of tables to elements."""
        return TableReader(self.columns, self.missing, self.partitions)


class TableFiles(ReadsTables, ABC):
    """The part of a format that compares the schemas of files with that of the first."""

    storage: Storage

    @abstractmethod
    def guess(self, path: str, head: bytes) -> bool:
        """Return whether first bytes are those of a file of the format."""

    @abstractmethod
    def schema(self, path: str) -> Any:
        """Return the Arrow schema of a file."""

    @abstractmethod
    def spec_of_schema(self, schema: Any, path: str) -> ElementSpec:
        """Return the spec of the elements of a file with a schema."""

    def selected(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read of those of a file."""
        return self.tables.read_from(names)

    def spec(self, path: str) -> ElementSpec:
        return self.first([path]).spec

    def first(self, paths: Sequence[str]) -> FirstFile:
        """Return the first readable file, with the types that its columns of nulls have in others."""

        def schema_of(path: str) -> Any:
            with recognised(path, self.storage, self.guess):
                return self.schema(path)

        files = readable_files(paths, schema_of)
        path, schema = next(files)
        names = set(self.selected(schema.names))
        for _, other in islice(files, _MOST_FILES):
            if not any(_has_nulls(column.type) for column in schema if column.name in names):
                break
            schema = _typed(schema, other)
        schema = typed_by_replacements(schema, self.missing)
        return FirstFile(path, self.spec_of_schema(schema, path), schema.remove_metadata())

    def types(self, schema: Any, path: str, first: FirstFile) -> Any:
        """Return the schema of a file with the types of the first where it has none; None if it has all.

        Raises
        ------
        FileError
            Its elements differ from those of the first.
        """
        typed = schema if first.schema is None else _typed(schema, first.schema)
        try:
            spec = self.spec_of_schema(typed, path)
        except ArgumentError as error:
            raise FileError(f"{path}: {error}; the first file, {first.path}, has it") from None
        if spec != first.spec:
            raise differs_from_first(path, spec, first)
        return None if typed is schema else typed


def valid_rows(
    num_rows: int, block_of: Callable[[int, int], Block], label: str, first: int = 0
) -> tuple[Block, list[DamagedPart]]:
    """Return the rows of a table that can be converted, and the others, such as those with a null.

    Parameters
    ----------
    num_rows
        The number of rows of the table.
    block_of
        Converts the rows from one number to before another.
    label
        The name of the split that has the table.
    first
        The number of the table's first row among those of the split.

    Raises
    ------
    FileError
        Too many rows cannot be converted.
    """
    kept, damaged = list[Block](), list[DamagedPart]()
    for row, block, error in valid_parts(num_rows, block_of, (DamagedFileError,)):
        if error is None:
            kept.append(block)
            continue
        damaged.append(DamagedPart(first + row, f"row {first + row} of {label}", str(error)))
        if len(damaged) > _MOST_LEFT_OUT:
            raise FileError(f"{label}: more than {_MOST_LEFT_OUT} of its rows are invalid") from shown_cause(error)
    return Block.concat(kept, label) if kept else block_of(0, 0), damaged


def converted(table: Any, types: Any) -> Any:
    """Return a table or a record batch with the types of a schema that has its columns; None leaves it as it is."""
    for place, column in enumerate(table.schema):
        kind = column.type if types is None else types.field(column.name).type
        if kind != column.type:
            values = table.column(place)
            is_null = _typed_as(column.type, kind) == kind and not column.type.num_fields
            table = table.set_column(place, column.name, pa.nulls(len(values), kind) if is_null else values.cast(kind))
    return table


def typed_by_replacements(schema: Any, missing: Mapping[str, Any] | None) -> Any:
    """Return a schema with the types of replacements, other than numbers, instead of those of nulls."""
    kinds = {name: value for name, value in (missing or {}).items() if isinstance(value, (str, bytes, Mapping))}
    return _typed(schema, pa.schema([pa.field(name, pa.scalar(value).type) for name, value in kinds.items()]))


def _has_nulls(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_nulls(kind.value_type)
    return bool(pa.types.is_null(kind)) or any(_has_nulls(kind.field(k).type) for k in range(kind.num_fields))


def _typed(schema: Any, other: Any) -> Any:
    # Return a schema with the types of another instead of those of nulls; the same object if none is replaced.
    for place, column in enumerate(schema):
        if _has_nulls(column.type) and (number := other.get_field_index(column.name)) >= 0:
            kind = _typed_as(column.type, other.field(number).type)
            schema = schema if kind == column.type else schema.set(place, column.with_type(kind))
    return schema


def _typed_as(kind: Any, other: Any) -> Any:
    types = pa.types
    if types.is_null(kind) or (types.is_dictionary(kind) and types.is_null(kind.value_type)):
        return other
    if types.is_struct(kind) and types.is_struct(other):
        known = {other.field(k).name: other.field(k).type for k in range(other.num_fields)}
        fields = [kind.field(k) for k in range(kind.num_fields)]
        return pa.struct([item.with_type(_typed_as(item.type, known.get(item.name, item.type))) for item in fields])
    if not (_has_nulls(kind) and hasattr(kind, "value_field") and hasattr(other, "value_field")):
        return kind
    inner = kind.value_field.with_type(_typed_as(kind.value_type, other.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(inner, kind.list_size)
    return pa.large_list(inner) if types.is_large_list(kind) else pa.list_(inner)
