"""Parquet, read by pyarrow; a row group is a split. `tables.from_arrow` lists the conversion of types and nulls."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import IO, Any, Final

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.config import in_bytes
from daskdist.core.block import Block, Rows
from daskdist.core.cardinality import counted
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.bisection import first_invalid
from daskdist.formats.parquet_filters import clauses_of, filtered, may_hold
from daskdist.formats.table_files import TableFiles, converted, valid_rows
from daskdist.storage.failures import DamagedPart, damage
from daskdist.storage.filesystem import Storage, Version, is_remote
from daskdist.storage.first_file import FirstFile
from daskdist.storage.hive_partitions import Partitions
from daskdist.storage.libraries import pa, pc, pq
from daskdist.tables.arrow_text import is_text
from daskdist.tables.to_arrow import check_columns, table_of

# The compressions for writing.
CODECS: Final = (None, "snappy", "zstd", "lz4", "gzip", "brotli")
# Text with fewer bytes per row in the file consists of a few repeated texts.
_REPEATED_BYTES: Final = 3
# The encodings that Arrow reads as a dictionary and indices.
_OF_DICTIONARIES: Final = frozenset({"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"})
# The largest error of Arrow's conversion of decimals to floats, relative to the value.
_DECIMAL_ERROR: Final = Decimal("1e-15")
_LEAST: Final = np.float32(-np.inf)
# The number of bytes to read from a local file at a time.
_BUFFER_BYTES: Final = 2**16
# The length of the end of a file: that of the footer, and the magic number.
_END_BYTES: Final = 8
# The length of the signature of a footer that is not encrypted, in a file with encrypted columns.
_SIGNATURE_BYTES: Final = 28
# The unit of timestamps of the type INT96, whose range is that of dates: Spark writes microseconds.
_INT96_UNIT: Final = "us"


@dataclass(frozen=True)
class Parquet(TableFiles):
    """The reader, with its options, and the writer.

    Parameters
    ----------
    columns
        The columns and their structure; see `Columns.of`.
    filters
        A filter of rows: ``(column, operator, value)`` conditions that must all hold, or a list of such lists, one of
        which must hold. Row groups without such rows by their statistics are not read.
    missing
        The replacement of nulls, by column.
    partitions
        The columns encoded in the names of directories.
    storage
        Opens the files.
    compression
        The compression for writing: one of `CODECS`.
    element_spec
        The spec of elements to write, so that all files have one schema; None for that of the rows.
    """

    columns: Any = None
    filters: Any = None
    missing: Mapping[str, Any] | None = None
    partitions: Partitions = field(default_factory=Partitions)
    storage: Storage = field(default_factory=Storage)
    compression: str | None = "snappy"
    element_spec: ElementSpec | None = None

    name = "parquet"
    suffixes = (".parquet", ".parq", ".pq")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    def schema(self, path: str) -> Any:
        return self._footer_of(self.storage.version(path)).schema

    def selected(self, names: Sequence[str]) -> list[str]:
        return [*super().selected(names), *self._filtered_by(names)]

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        version = self.storage.version(path)
        footer = self._footer_of(version)
        if not (_known.first is first and _known.schema.equals(footer.schema)):
            _known.types = self.types(footer.schema, path, first)
            if self.filters is not None and not self._filtered_by(footer.schema.names):
                # Filters on partition columns only, which no schema of a file has.
                self._check_filters(footer.schema, path)
            _known.first, _known.schema = first, footer.schema
        types, row_bytes = _known.types, first.spec.num_bytes
        splits = []
        for group in self._groups(path, footer):
            known = footer.metadata.row_group(group)
            num_bytes = known.total_byte_size if row_bytes is None else known.num_rows * row_bytes
            num_rows = known.num_rows if self.filters is None else None
            splits.append(Split(f"{path} row group {group}", (version, group, types), num_rows, num_bytes, file, path))
        return splits

    def read(self, split: Split) -> Block:
        return self._block(self._table(split), split)

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        table = self._table(split)

        def block_of(start: int, stop: int) -> Block:
            return self._block(_rows_of(table, start, stop), split)

        return valid_rows(table.num_rows, block_of, split.label)

    def _block(self, table: Any, split: Split) -> Block:
        with damage(split.label):
            for name, column in zip(table.column_names, table.columns, strict=True):
                if _has_text(column.type):
                    _check_text(column, f"{split.label}: column {name!r}")
            return self.tables.block(table, split.label, split.payload[0].path)

    def _table(self, split: Split) -> Any:
        version, group, types = split.payload
        path = version.path
        self.storage.check_unchanged(version, split.label)
        # Not with filters, which compare the values.
        repeated = [] if self.filters is not None or is_remote(path) else _footer_of(version).repeated_texts(group)
        with self._opened(version, repeated) as (file, footer), damage(split.label):
            names = footer.schema.names
            needed = set(self.selected(names))
            columns = None if len(needed) == len(names) else [name for name in names if name in needed]
            # Splits are read in parallel already; threads within one would only contend.
            table = file.read_row_group(group, columns=columns, use_threads=False)
            self._check_int96(table, footer, version, split)
            table = converted(table, types)
            if self.filters is not None:
                table = self._filtered(table, path)
            return _with_plain_text(table, repeated)

    def check(self, spec: ElementSpec) -> None:
        if self.compression not in CODECS:
            raise ArgumentError(f"compression is {self.compression!r}; give one of {', '.join(map(repr, CODECS))}")
        check_columns(spec)

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        table = table_of(rows, self.element_spec)
        num_groups = max(1, round(table.nbytes / in_bytes("split-bytes")))
        pq.write_table(
            table,
            file,
            row_group_size=max(1, -(-table.num_rows // num_groups)),
            compression=self.compression or "none",
            # Floats seldom repeat, and searching for repetitions takes longer than everything else.
            use_dictionary=[path for field in table.schema for path in _other_than_floats(field.name, field.type)],
            write_page_checksum=True,
        )

    def spec_of_schema(self, schema: Any, path: str) -> ElementSpec:
        if self._filtered_by(schema.names):
            self._check_filters(schema, path)
        return self.tables.spec(schema, path)

    def _filtered_by(self, names: Sequence[str]) -> list[str]:
        # Return the columns of a file that the filters use.
        filtered = [name for clause in clauses_of(self.filters) for name, _, _ in clause]
        for name in filtered:
            if name not in names and name not in self.partitions.names:
                raise ArgumentError(f"filters: no column {name!r}; there are {', '.join(map(repr, names))}")
        return [name for name in filtered if name in names]

    def _check_filters(self, schema: Any, path: str) -> None:
        # Arrow refuses some values only where there are rows.
        nulls = {name: pa.nulls(1, schema.field(name).type) for name in self._filtered_by(schema.names)}
        self._filtered(pa.table(nulls or {"": pa.nulls(1)}), path)

    def _groups(self, path: str, footer: Footer) -> list[int]:
        # Return the row groups that may have matching rows.
        groups = range(footer.metadata.num_row_groups)
        clauses = clauses_of(self.filters)
        if not clauses:
            return list(groups)
        partition_values = {name: self.partitions.value(name, path) for name in self.partitions.names}
        fixed = {
            name: (value, value)
            for name, value in partition_values.items()
            if name not in footer.schema.names and value is not None
        }
        kept, selected = [], {name for clause in clauses for name, _, _ in clause}
        for group in groups:
            bounds = {**footer.bounds(group, selected), **fixed}
            if any(all(may_hold(condition, bounds) for condition in clause) for clause in clauses):
                kept.append(group)
        return kept

    def _filtered(self, table: Any, path: str) -> Any:
        # The partition columns that are not in the file itself.
        added = [name for name in self.partitions.names if name not in table.column_names]
        for name in added:
            value = pa.scalar(self.partitions.value(name, path), self.partitions.arrow_type(name))
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        return filtered(table, self.filters).drop_columns(added)

    def _footer_of(self, version: Version) -> Footer:
        try:
            if not is_remote(version.path):
                return _footer_of(version)
            with self.storage.open(version.path) as stream:
                return Footer.of(stream)
        except Exception:
            with self._failures(version):
                raise

    @contextmanager
    def _opened(
        self, version: Version, repeated: Sequence[str] = (), footer: Footer | None = None, unit: str = _INT96_UNIT
    ) -> Iterator[tuple[Any, Footer]]:
        # Yield an open file and its footer, if that is known; `repeated` columns of text are read as dictionaries, and
        # old timestamps in a unit.
        path = version.path
        with self._failures(version):
            options: dict[str, Any] = {"coerce_int96_timestamp_unit": unit}
            if not is_remote(path):
                footer = _footer_of(version)
                # Read small pieces, which are decoded while they are in the cache, instead of whole row groups.
                options |= {"pre_buffer": False, "buffer_size": _BUFFER_BYTES, "read_dictionary": repeated}
            if footer is not None:
                options["metadata"] = footer.metadata
            # Verify checksums if the file has them.
            with (
                self.storage.open(path) if is_remote(path) else pa.OSFile(os.fsencode(path)) as stream,
                pq.ParquetFile(stream, page_checksum_verification=True, **options) as file,
            ):
                yield file, footer or Footer(file.metadata, file.schema_arrow)

    def _check_int96(self, table: Any, footer: Footer, version: Version, split: Split) -> None:
        # Arrow leaves out what a unit cannot hold, and makes other times of what is out of the range of nanoseconds.
        columns = [name for name in footer.int96 if name in table.column_names]
        if not columns:
            return
        with self._opened(version, footer=footer, unit="ns") as (file, _):
            exact = file.read_row_group(split.payload[1], columns=columns, use_threads=False)
        for name in columns:
            for times, nanoseconds in zip(_times(table[name]), _times(exact[name]), strict=True):
                is_lost = times.view(np.int64) * 1000 != nanoseconds.view(np.int64)
                if is_lost.any():
                    raise FileError(
                        f"{split.label}: column {name!r} has the time {times[is_lost][0]} and nanoseconds, but its "
                        "type, INT96, is read as microseconds; leave it out, or write it as timestamp[ns]"
                    )

    def _failures(self, version: Version) -> Any:
        return damage(version.path, f"not a Parquet file, or a truncated one, of {counted(version.num_bytes, 'byte')}")


def _has_text(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_text(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _has_text(kind.value_type)
    return is_text(kind) or any(_has_text(kind.field(number).type) for number in range(kind.num_fields))


def _with_plain_text(table: Any, names: Sequence[str]) -> Any:
    # Decode columns that were read as dictionaries, except those that are faster as they are. Invalid text in a
    # dictionary would be reported for every row.
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if name not in names or not pa.types.is_dictionary(column.type):
            continue
        if column.num_chunks != 1 or column.null_count or not _is_valid(column):
            table = table.set_column(place, name, column.cast(column.type.value_type))
    return table


def _is_valid(column: Any) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _rows_of(data: Any, start: int, stop: int) -> Any:
    # Copy rather than slice, as a slice keeps the nested values of all rows.
    return data.take(np.arange(start, stop))


def _check_text(column: Any, where: str) -> None:
    # Neither pyarrow nor NumPy checks that text is valid.
    if _is_valid(column):
        return
    start = first_invalid(len(column), lambda start, stop: _is_valid(_rows_of(column, start, stop)))
    try:
        value = repr(column.slice(start, 1).cast(pa.binary())[0].as_py())
    except pa.ArrowException:
        value = f"of type {column.type}"
    raise DamagedFileError(
        f"{where}: its row {start}, {value:.80}, is not UTF-8, as text in Parquet must be; leave the column out, "
        'or leave such rows out with Options(on_error="skip")'
    )


@dataclass(frozen=True)
class Footer:
    """The index of a file."""

    metadata: Any
    schema: Any

    @cached_property
    def int96(self) -> list[str]:
        """The columns that hold timestamps of the old type INT96, of which the unit is chosen."""
        known = self.metadata.schema
        if not any(known.column(number).physical_type == "INT96" for number in range(self.metadata.num_columns)):
            return []
        others = known.to_arrow_schema()
        return [column.name for column, other in zip(self.schema, others, strict=True) if column.type != other.type]

    def bounds(self, group: int, selected: Container[str]) -> dict[str, tuple[Any, Any]]:
        """Return the smallest and largest values of some columns of a row group, if its statistics have them."""
        known = self.metadata.row_group(group)
        bounds = {}
        for number in range(known.num_columns):
            column = known.column(number)
            name = column.path_in_schema
            # A field of a struct may have the path of a column whose name has a dot.
            is_field = name in selected and self.metadata.schema.column(number).name != name
            if name in selected and not is_field and column.is_stats_set and column.statistics.has_min_max:
                # Python's dates have a smaller range, and its times a lower resolution, than Parquet's.
                with suppress(ValueError, OverflowError):
                    bounds[name] = _widened(column.statistics.min, column.statistics.max, column.physical_type)
        return bounds

    def repeated_texts(self, group: int) -> list[str]:
        """Return the text columns of a row group that repeat a few texts, to read as a dictionary and indices."""
        known, schema = self.metadata.row_group(group), self.schema
        texts = {name: place for place, name in enumerate(schema.names) if schema.field(place).type == pa.string()}
        # Only without nested columns does a field have the same index in the file. Others are skipped, as many take
        # long.
        is_flat = known.num_columns == len(schema.names)
        columns = map(known.column, texts.values() if is_flat else range(known.num_columns) if texts else ())
        # A separate text takes four bytes for its length alone, unless lengths are encoded, too.
        return [
            column.path_in_schema
            for column in columns
            if column.path_in_schema in texts
            and column.total_uncompressed_size < _REPEATED_BYTES * column.num_values
            and _OF_DICTIONARIES.issuperset(column.encodings)
        ]

    @classmethod
    def of(cls, file: Any) -> Footer:
        """Return the footer of an open file."""
        opened = pq.ParquetFile(file, coerce_int96_timestamp_unit=_INT96_UNIT)
        file.seek(-_END_BYTES, os.SEEK_END)
        if int.from_bytes(file.read(4), "little") - opened.metadata.serialized_size == _SIGNATURE_BYTES:
            # pyarrow ends the process if something asks for the metadata of an encrypted column.
            raise NotImplementedError("it is encrypted, which is not supported; decrypt it")
        return cls(opened.metadata, opened.schema_arrow)


def _widened(least: Any, greatest: Any, physical_type: str) -> tuple[Any, Any]:
    # Arrow compares decimals with floats as floats, and looks for values in a column of float32 as float32.
    if isinstance(least, Decimal):
        return least - abs(least) * _DECIMAL_ERROR, greatest + abs(greatest) * _DECIMAL_ERROR
    if physical_type == "FLOAT":
        return float(np.nextafter(np.float32(least), _LEAST)), float(np.nextafter(np.float32(greatest), -_LEAST))
    return least, greatest


class _FooterCache(threading.local):
    # The last schema that was found to have the spec of the first file: most files have it and need no other check.
    first: FirstFile | None = None
    schema: Any = None
    types: Any = None


_known: Final = _FooterCache()


@lru_cache(maxsize=64)
def _footer_of(version: Version) -> Footer:
    # Cached: parsing it takes as long as reading a small row group, and a file has many of them.
    with pa.OSFile(os.fsencode(version.path)) as file:
        return Footer.of(file)


def _times(column: Any) -> Iterator[np.ndarray[Any, Any]]:
    # Yield the timestamps of a column, also those within its structs and lists.
    kind = column.type
    if pa.types.is_timestamp(kind):
        yield column.drop_null().to_numpy()
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _times(part)
    elif kind.num_fields == 1:
        yield from _times(pc.list_flatten(column))


def _other_than_floats(path: str, kind: Any) -> Iterator[str]:
    # Yield the Parquet columns of an Arrow column, except those of floats.
    types = pa.types
    if types.is_struct(kind):
        for subfield in kind:
            yield from _other_than_floats(f"{path}.{subfield.name}", subfield.type)
    elif types.is_fixed_size_list(kind) or types.is_large_list(kind):
        yield from _other_than_floats(f"{path}.list.element", kind.value_type)
    elif not types.is_floating(kind):
        yield path
