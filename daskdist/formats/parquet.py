"""Parquet, read by pyarrow; a row group is a split.

Types become NumPy dtypes so: integers, floats and bools their own; dates and timestamps ``datetime64``; text
NumPy's ``StringDType``; fixed-size lists an axis more. A null is NaN in a float column, NaT in a time column
and an error, which names the column, in any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.errors import ArgumentError, DaskdistError, FileError
from daskdist.formats.columns import Columns
from daskdist.formats.paths import is_remote


@dataclass(frozen=True)
class Parquet:
    """The reader, with its options.

    Parameters
    ----------
    columns
        Which columns, in what structure: see `Columns.of`.
    """

    columns: Any = None

    name = "parquet"
    is_splittable = True

    def spec(self, path: str) -> ElementSpec:
        with _opened(path) as file:
            return self._spec(file.schema_arrow, path)

    def list_splits(self, path: str, file: int, like: str) -> Sequence[Split]:
        with _opened(path) as opened:
            metadata = opened.metadata
            try:
                spec = self._spec(opened.schema_arrow, path)
            except ArgumentError as error:
                raise FileError(f"{path}: {error}; {like} has what is asked for") from None
        expected = self.spec(like) if path != like else spec
        if spec != expected:
            raise FileError(f"{path}: its elements are {spec.packed}, those of {like} are {expected.packed}")
        num_bytes = sum(_row_bytes(leaf) for leaf in spec.leaves)
        num_rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [
            Split(f"{path} row group {group}", (path, group), rows, rows * num_bytes, file)
            for group, rows in enumerate(num_rows)
        ]

    def read(self, split: Split) -> Block:
        path, group = split.payload
        with _opened(path) as file:
            columns = Columns.of(self.columns, file.schema_arrow.names)
            try:
                # Splits are read side by side already; threads within one would only contend.
                table = file.read_row_group(group, columns=columns.names, use_threads=False)
                arrays = columns.arrays(lambda name: _to_numpy(table.column(name), name, split.label))
            except DaskdistError:
                raise
            # KeyError and ArrowNotImplementedError (a NotImplementedError): of names and types that are garbage.
            except (OSError, ValueError, KeyError, NotImplementedError) as error:
                raise FileError(f"{split.label}: damaged or cut short: {error}") from error
        return Block(columns.structure, arrays, split.label)

    def _spec(self, schema: Any, path: str) -> ElementSpec:
        columns = Columns.of(self.columns, schema.names)
        return columns.spec(lambda name: _column_spec(schema.field(name), path))

    def __dask_tokenize__(self) -> Any:
        return "Parquet", repr(self.columns)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    try:
        # Checksums are compared where the file has them.
        if is_remote(path):
            import fsspec

            with (
                fsspec.open(path, "rb") as stream,
                pq.ParquetFile(stream, page_checksum_verification=True) as file,
            ):
                yield file
        else:
            known = os.stat(path)
            metadata = _metadata(path, known.st_mtime_ns, known.st_size)
            with pq.ParquetFile(path, metadata=metadata, page_checksum_verification=True) as file:
                yield file
    except DaskdistError:
        raise
    except FileNotFoundError as error:
        raise FileError(
            f"{path}: not found: gone since it was listed, or on a disk that this machine does not see"
        ) from error
    except PermissionError as error:
        raise FileError(f"{path}: may not be read: {error}") from error
    # What pyarrow raises for an index that is garbage depends on where the garbage is.
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        size = "" if is_remote(path) else f" of {os.path.getsize(path)} bytes"
        raise FileError(f"{path}: not a Parquet file, or one cut short{size}: {error}") from error


@lru_cache(maxsize=64)
def _metadata(path: str, mtime_ns: int, size: int) -> Any:
    # A file's index takes as long to parse as a small row group takes to read, and a file has many of them.
    import pyarrow.parquet as pq

    return pq.read_metadata(path)


def _column_spec(field: Any, path: str) -> TensorSpec:
    import pyarrow as pa

    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_list(kind):
        inner = _column_spec(pa.field(field.name, kind.value_type), path)
        return TensorSpec((kind.list_size, *inner.shape), inner.dtype)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return TensorSpec((), np.dtypes.StringDType())
    if pa.types.is_date(kind):
        return TensorSpec((), np.dtype("datetime64[D]"))
    if pa.types.is_timestamp(kind):
        return TensorSpec((), np.dtype(f"datetime64[{kind.unit}]"))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return TensorSpec((), np.dtype(kind.to_pandas_dtype()))
    raise FileError(f"{path}: column {field.name!r} is of type {field.type}, which has no fixed shape; leave it out")


def _to_numpy(column: Any, name: str, label: str) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if array.null_count and not (pa.types.is_floating(kind) or pa.types.is_temporal(kind)):
        raise FileError(
            f"{label}: column {name!r} of type {kind} has {array.null_count} nulls, and only floats have NaN"
        )
    if pa.types.is_fixed_size_list(kind):
        inner = _to_numpy(pa.chunked_array([array.flatten()]), name, label)
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(array.to_pylist(), np.dtypes.StringDType())
    found: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return found.astype("datetime64[D]") if pa.types.is_date(kind) else found


def _row_bytes(spec: TensorSpec) -> int:
    return prod(size or 0 for size in spec.shape) * spec.dtype.itemsize
