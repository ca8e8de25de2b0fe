"""Fixed-length records, between a header and a footer that are skipped; a split is a range of records.

A compressed file is split into parts, or if it has a header or a footer, read as one split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.block import Block
from daskdist.core.cardinality import counted
from daskdist.core.failing.origin import origin_from
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.core.to_numpy import native
from daskdist.errors import ArgumentError, DamagedFileError
from daskdist.storage.byte_ranges import BrokenRecord, ByteRange, ByteRanges
from daskdist.storage.compression import decompressed, has_suffix
from daskdist.storage.failures import DamagedPart, damage
from daskdist.storage.filesystem import Storage, Version
from daskdist.storage.first_file import FirstFile
from daskdist.tables.byte_rows import objects_at

_BYTES: Final = np.dtype(object)
# The kinds of numbers for which any bytes are valid.
_NUMBERS: Final = "iufcmM"


@dataclass(frozen=True)
class RecordRange:
    """The records of a file that a split reads.

    Parameters
    ----------
    version
        The file, as it was listed.
    start, stop
        The range of numbers of its records.
    compression
        The compression of a file that is one split; its records are not counted.
    """

    version: Version
    start: int
    stop: int
    compression: str | None = None


@dataclass(frozen=True)
class FixedLengthRecords:
    """The framing of fixed-length records."""

    record_bytes: int

    is_local = False

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        end = -(-at_least // self.record_bytes) * self.record_bytes
        if end <= len(data):
            return end
        if not is_end:
            return None
        rest = len(data) % self.record_bytes
        raise BrokenRecord(
            len(data) - rest, f"{counted(rest, 'byte')} at its end, but a record has {self.record_bytes}"
        )


@dataclass(frozen=True)
class FixedLength:
    """The reader, with its options.

    Parameters
    ----------
    record_bytes
        The length of a record in bytes.
    dtype
        The type of a record: None for bytes; a dtype of that size, structured for a dict of its fields; or one whose
        size divides it, for an array.
    header_bytes, footer_bytes
        The number of bytes before the first record and after the last.
    compression
        The compression of the files: ``"infer"``, a name, or None.
    storage
        Opens the files.
    """

    record_bytes: int
    dtype: Any = None
    header_bytes: int = 0
    footer_bytes: int = 0
    compression: str | None = "infer"
    storage: Storage = field(default_factory=Storage)

    name = "fixed_length"
    suffixes = (".bin", ".dat", ".raw")
    is_splittable = True

    def __post_init__(self) -> None:
        for name, least in (("record_bytes", 1), ("header_bytes", 0), ("footer_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ArgumentError(f"{name} is {value!r}; give a whole number of bytes, {least} or more")
            object.__setattr__(self, name, int(value))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _dtype_of(self.dtype, self.record_bytes))

    def guess(self, path: str, head: bytes) -> bool:
        return has_suffix(path, self.suffixes)

    def spec(self, path: str) -> ElementSpec:
        self.storage.version(path)
        leaves, structure = self._columns(b"")
        return ElementSpec(structure, tuple(TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in leaves))

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        version, compression = self.storage.version(path), self._ranges.compression_of(path)
        around = self.header_bytes + self.footer_bytes
        if compression is not None and not around:
            return self._ranges.list(path, file)
        if compression is not None:
            whole = RecordRange(version, 0, 0, compression)
            return [Split(f"{path} decompressed", whole, None, version.num_bytes, file, path)]
        body = version.num_bytes - around
        self._check(body, path)
        step = max(in_bytes("split-bytes") // self.record_bytes, 1)
        number = body // self.record_bytes
        return [
            Split(
                f"{path} records {start} to {min(start + step, number)}",
                RecordRange(version, start, min(start + step, number)),
                min(step, number - start),
                min(step, number - start) * self.record_bytes,
                file,
                path,
            )
            for start in range(0, number, step)
        ]

    def read(self, split: Split) -> Block:
        if isinstance(split.payload, ByteRange):
            return self._block(split, self._ranges.read(split).data)
        block = self._block(split, self._body(split))
        block.origin = origin_from(split.path, split.payload.start, len(block))
        return block

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        if not isinstance(split.payload, ByteRange):
            return self.read(split), []
        piece = self._ranges.read(split, is_lenient=True)
        block = self._block(split, piece.data)
        return block, piece.with_rest([], len(block), split)

    @property
    def _ranges(self) -> ByteRanges:
        return ByteRanges(FixedLengthRecords(self.record_bytes), self.storage, self.compression)

    def _body(self, split: Split) -> bytes:
        rows: RecordRange = split.payload
        path, size = rows.version.path, self.record_bytes
        self.storage.check_unchanged(rows.version, split.label)
        if rows.compression is None:
            start, stop = self.header_bytes + rows.start * size, self.header_bytes + rows.stop * size
            data = self.storage.read(path, start, stop)
            if len(data) != stop - start:
                raise DamagedFileError(
                    f"{split.label}: {counted(len(data), 'byte')}, but {stop - start} are expected: cut short"
                )
            return data
        with self.storage.open(path) as file, damage(split.label):
            data = decompressed(file, rows.compression).read()
        self._check(len(data) - self.header_bytes - self.footer_bytes, split.label)
        return data[self.header_bytes : len(data) - self.footer_bytes]

    def _check(self, body: int, where: str) -> None:
        if body >= 0 and body % self.record_bytes == 0:
            return
        around = f"without its header of {self.header_bytes} and its footer of {self.footer_bytes} bytes it has {body}"
        raise DamagedFileError(
            f"{where}: {around}, which is not a multiple of the record size {self.record_bytes}; "
            "it is truncated, or record_bytes, header_bytes or footer_bytes is wrong"
        )

    def _columns(self, data: bytes) -> tuple[list[Any], Structure]:
        number = len(data) // self.record_bytes
        if self.dtype is None:
            starts = np.arange(number) * self.record_bytes
            columns: Any = objects_at(data, starts, np.full(number, self.record_bytes))
        elif self.dtype.names is not None:
            records = np.frombuffer(data, self.dtype)
            columns = {name: native(records[name]) for name in self.dtype.names}
        else:
            columns = native(np.frombuffer(data, self.dtype))
        leaves, structure = Structure.of(columns)
        return list(leaves), structure

    def _block(self, split: Split, data: bytes) -> Block:
        leaves, structure = self._columns(data)
        return Block(structure, leaves, split.label)


def _dtype_of(user_dtype: Any, record_bytes: int) -> np.dtype[Any]:
    try:
        dtype = np.dtype(user_dtype)
    except TypeError as error:
        raise ArgumentError(f"dtype is {user_dtype!r}, which NumPy does not know: {error}") from None
    fields = [dtype] if dtype.names is None else [dtype.fields[name][0] for name in dtype.names]
    for field_dtype in fields:
        if field_dtype.base.kind not in _NUMBERS:
            raise ArgumentError(
                f"dtype is {user_dtype!r}: not every {field_dtype.base} is any bytes; give numbers, or None for bytes"
            )
    size = dtype.itemsize
    if size != record_bytes and (dtype.names is not None or not size or record_bytes % size):
        raise ArgumentError(f"dtype is {user_dtype!r}, of {size} bytes, but a record has {record_bytes}")
    return dtype if size == record_bytes else np.dtype((dtype, (record_bytes // size,)))
