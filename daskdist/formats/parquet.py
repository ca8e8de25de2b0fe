"""Parquet, read by pyarrow; a row group is a split. What types and nulls become is said in `tables`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, FileError
from daskdist.formats import First, unlike
from daskdist.formats.partitions import Partitions
from daskdist.formats.storage import Storage, Version, failures, is_remote
from daskdist.formats.tables import Tables


@dataclass(frozen=True)
class Parquet:
    """The reader, with its options.

    Parameters
    ----------
    columns
        Which columns, in what structure: see `Columns.of`.
    filters
        Which rows: ``(column, operator, value)`` tuples, all of which hold, or a list of lists of such, one of
        which holds. Row groups whose statistics say that no row is wanted are not read.
    missing
        What stands for a null, by column.
    partitions
        The columns that the names of directories make.
    storage
        How files are opened.
    """

    columns: Any = None
    filters: Any = None
    missing: Mapping[str, Any] | None = None
    partitions: Partitions = field(default_factory=Partitions)
    storage: Storage = field(default_factory=Storage)

    name = "parquet"
    suffixes = (".parquet", ".parq", ".pq")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    def spec(self, path: str) -> ElementSpec:
        with self._opened(path) as file:
            return self._spec(file.schema_arrow, path)

    def list_splits(self, path: str, file: int, first: First) -> Sequence[Split]:
        with self._opened(path) as opened:
            metadata = opened.metadata
            try:
                spec = self._spec(opened.schema_arrow, path)
            except ArgumentError as error:
                raise FileError(f"{path}: {error}; the first file, {first.path}, has what is asked for") from None
            if spec != first.spec:
                raise unlike(path, spec, first)
            groups = self._groups(path, opened)
        row_bytes = _row_bytes(spec)
        splits = []
        for group in groups:
            known = metadata.row_group(group)
            num_bytes = known.total_byte_size if row_bytes is None else known.num_rows * row_bytes
            num_rows = known.num_rows if self.filters is None else None
            splits.append(Split(f"{path} row group {group}", (path, group), num_rows, num_bytes, file, path))
        return splits

    def read(self, split: Split) -> Block:
        path, group = split.payload
        with self._opened(path) as file, failures(split.label):
            names = file.schema_arrow.names
            wanted = {*self._tables.read_from(names), *self._filtered_by(names)}
            # Splits are read side by side already; threads within one would only contend.
            table = file.read_row_group(group, columns=[name for name in names if name in wanted], use_threads=False)
            if self.filters is not None:
                table = self._filtered(table, path)
            return self._tables.block(table, split.label, path)

    @property
    def _tables(self) -> Tables:
        return Tables(self.columns, self.missing, self.partitions)

    def _spec(self, schema: Any, path: str) -> ElementSpec:
        self._filtered_by(schema.names)
        return self._tables.spec(schema, path)

    def _filtered_by(self, names: Sequence[str]) -> list[str]:
        # The columns of a file that the filters look at.
        if self.filters is None:
            return []
        clauses = [each for clause in self.filters for each in (clause if isinstance(clause, list) else [clause])]
        for clause in clauses:
            if not (isinstance(clause, tuple) and len(clause) == 3):
                raise ArgumentError(f"filters: {clause!r} is no condition; give tuples (column, operator, value)")
            if clause[0] not in names and clause[0] not in self.partitions.names:
                raise ArgumentError(f"filters: no column {clause[0]!r}; there are {', '.join(map(repr, names))}")
        return [name for name, _, _ in clauses if name not in self.partitions.names]

    def _expression(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.filters_to_expression(self.filters)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise ArgumentError(f"filters: {self.filters!r}: {error}") from None

    def _groups(self, path: str, file: Any) -> list[int]:
        # The row groups that may have rows which are wanted.
        groups = list(range(file.metadata.num_row_groups))
        if self.filters is None:
            return groups
        import pyarrow.dataset as ds

        here = ds.scalar(True)
        for name in self.partitions.names:
            here = here & (ds.field(name) == ds.scalar(self.partitions.value(name, path)))
        with self.storage.open(path) as stream:
            fragment = ds.ParquetFileFormat().make_fragment(stream, partition_expression=here)
            schema = fragment.physical_schema
            for name in self.partitions.names:
                schema = schema.append(self._partition_field(name))
            return [group.id for group in fragment.subset(filter=self._expression(), schema=schema).row_groups]

    def _filtered(self, table: Any, path: str) -> Any:
        import pyarrow as pa

        for name in self.partitions.names:
            made = self._partition_field(name)
            value = pa.scalar(self.partitions.value(name, path), made.type)
            table = table.append_column(made, pa.repeat(value, table.num_rows))
        return table.filter(self._expression()).drop_columns(list(self.partitions.names))

    def _partition_field(self, name: str) -> Any:
        import pyarrow as pa

        return pa.field(name, pa.int64() if name in self.partitions.integers else pa.string())

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        import pyarrow.parquet as pq

        version = self.storage.version(path)
        with failures(path, f"not a Parquet file, or one cut short, of {version.num_bytes} bytes"):
            # Checksums are compared where the file has them.
            if is_remote(path):
                with self.storage.open(path) as stream, pq.ParquetFile(stream, page_checksum_verification=True) as file:
                    yield file
            else:
                with pq.ParquetFile(path, metadata=_metadata(version), page_checksum_verification=True) as file:
                    yield file


@lru_cache(maxsize=64)
def _metadata(version: Version) -> Any:
    # A file's index takes as long to parse as a small row group takes to read, and a file has many of them.
    import pyarrow.parquet as pq

    return pq.read_metadata(version.path)


def _row_bytes(spec: ElementSpec) -> int | None:
    # The bytes of a row; None where rows differ.
    if any(None in leaf.shape for leaf in spec.leaves):
        return None
    return sum(prod(size or 0 for size in leaf.shape) * leaf.dtype.itemsize for leaf in spec.leaves)
