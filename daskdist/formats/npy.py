"""NumPy's files: ``.npy`` with one array, and ``.npz`` with arrays by name; a split is a range of rows.

Uncompressed local files are mapped: a block is a view of the file, and only accessed data is read, except for the
checksums of archives, which each process verifies once. Python objects are never unpickled.
"""

from __future__ import annotations

import ast
import struct
import threading
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import IO, Any, Final

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.failing.origin import origin_from
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import FIXED_SIZE_KINDS, LONE
from daskdist.errors import ArgumentError, DamagedFileError
from daskdist.formats import WritableFormat
from daskdist.formats.stored_arrays import (
    LONE_NAME,
    StoredArray,
    StoredArrays,
    array_names,
    check_alike,
    check_rows,
    check_writable,
    chosen,
    columns_of,
)
from daskdist.storage.failures import damage
from daskdist.storage.filesystem import Storage, Version, is_remote, local
from daskdist.storage.first_file import FirstFile
from daskdist.storage.mapped_arrays import mapped_array

_MAGIC: Final = b"\x93NUMPY"
_ZIP: Final = b"PK"
_ADVICE: Final = "convert it to numbers or fixed-size text ('U20') with map(...), or use to_parquet or save"
# The header of an archive's member up to its name; it ends with the lengths of the name and of the extra field.
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
# The number of bytes to checksum at a time.
_AT_ONCE: Final = 2**24
# NumPy's limit on the size of headers.
_MOST_HEADER_BYTES: Final = 10_000


@dataclass(frozen=True, slots=True)
class NpyMember:
    """An array in a file.

    Parameters
    ----------
    name
        Its name; empty in a ``.npy`` file.
    dtype, shape
        The dtype and shape of the array.
    is_fortran
        Whether it is in Fortran order.
    offset
        The offset of its values in the file; None if they are compressed.
    header_bytes
        The number of bytes of the header, which precedes the values.
    crc
        The CRC-32 of header and values; None if the file has none, or the library verifies it.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int | None
    header_bytes: int = 0
    crc: int | None = None

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_by_column(self) -> bool:
        """True if the rows of the array are interleaved in memory (Fortran order)."""
        return self.is_fortran and len(self.shape) > 1


@dataclass(frozen=True, slots=True)
class NpySplit:
    """The rows of a file that a split reads."""

    version: Version
    start: int
    stop: int
    arrays: StoredArrays
    members: tuple[NpyMember, ...]


@dataclass(frozen=True)
class Npy:
    """The reader, with its options.

    Parameters
    ----------
    columns
        The arrays of an archive and their structure; see `Columns.of`.
    storage
        Opens the files.
    check_crc
        Whether to verify the checksums of arrays in archives.
    """

    columns: Any = None
    storage: Storage = field(default_factory=Storage)
    check_crc: bool = True

    name = "npy"
    suffixes = (".npy", ".npz")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(_MAGIC) or (head.startswith(_ZIP) and path.lower().endswith(".npz"))

    def spec(self, path: str) -> ElementSpec:
        return self._found(path, None)[1].spec

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        version, arrays, members = self._found(path, first)
        check_alike(arrays, path, first)
        # One split for arrays that must be decoded sequentially, or whose rows are interleaved in a remote file.
        is_whole = any(member.offset is None or (member.is_by_column and is_remote(path)) for member in members)
        cuts = [(0, arrays.num_rows)] if is_whole and arrays.num_rows else None
        return arrays.splits(path, file, lambda start, stop: NpySplit(version, start, stop, arrays, members), cuts)

    def read(self, split: Split) -> Block:
        part: NpySplit = split.payload
        # Access to a mapped file that was truncated kills the process: check first that it is unchanged.
        self.storage.check_unchanged(part.version, split.label)
        members = {member.name: member for member in part.members}
        with damage(split.label):
            block = part.arrays.block(lambda stored: self._rows(part, members[stored.name]), split.label)
        block.origin = origin_from(split.path, part.start, len(block))
        return block

    def check(self, spec: ElementSpec) -> None:
        if check_writable(spec, ".npy", FIXED_SIZE_KINDS, _ADVICE) != [LONE_NAME]:
            raise ArgumentError(f".npy takes a single array, but elements are {spec.structure}; write .npz")

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        (leaf,) = columns_of(rows)
        np.lib.format.write_array(file, leaf, allow_pickle=False)

    def _found(self, path: str, first: FirstFile | None) -> tuple[Version, StoredArrays, tuple[NpyMember, ...]]:
        version = self.storage.version(path)
        with self.storage.open(path) as file, damage(path):
            head = file.read(len(_MAGIC))
            file.seek(0)
            if head == _MAGIC:
                members = {LONE_NAME: _member(LONE_NAME, file, path, version.num_bytes)}
                columns = chosen(self.columns, [LONE_NAME], path, first, "column")
                arrays = StoredArrays.of(columns, lambda name: _stored(members[name], path), path)
            elif head.startswith(_ZIP):
                with zipfile.ZipFile(file) as archive:
                    infos = {info.filename[: -len(".npy")]: info for info in archive.infolist() if _is_array(info)}
                    columns = chosen(self.columns, list(infos), path, first, "column")
                    members = {name: _archived(archive, infos[name], file, path) for name in columns.names}
                    arrays = StoredArrays.of(columns, lambda name: _stored(members[name], path), path)
            else:
                raise DamagedFileError(
                    f"{path}: not a NumPy file: it begins with {head!r}, but .npy files begin with {_MAGIC!r}, .npz "
                    f"files with {_ZIP!r}"
                )
        return version, arrays, tuple(members[stored.name] for stored in arrays.stored)

    def _rows(self, part: NpySplit, member: NpyMember) -> Any:
        shape = (part.stop - part.start, *member.shape[1:])
        if not member.num_bytes:
            return np.empty(shape, member.dtype)
        if member.offset is None:
            return self._decoded(part.version.path, member)
        if is_remote(part.version.path):
            return self._fetched(part, member, shape)
        path, row_bytes = local(part.version.path), member.num_bytes // member.shape[0]
        if self.check_crc and member.crc is not None:
            _checksum(part.version, member).compare()
        if member.is_by_column:
            whole = mapped_array(path, member.dtype, member.offset, member.shape, "F")
            mapped = whole[part.start : part.stop]
        else:
            mapped = mapped_array(path, member.dtype, member.offset + part.start * row_bytes, shape)
        # Members of archives may be unaligned, which not all libraries support.
        return mapped if mapped.flags.aligned or mapped.dtype.names else mapped.copy()

    def _fetched(self, part: NpySplit, member: NpyMember, shape: tuple[int, ...]) -> Any:
        row_bytes, begin = member.num_bytes // member.shape[0], member.offset or 0
        start, stop = begin + part.start * row_bytes, begin + part.stop * row_bytes
        is_whole = stop - start == member.num_bytes
        header_bytes = member.header_bytes if is_whole and self.check_crc and member.crc is not None else 0
        data = self.storage.read(part.version.path, start - header_bytes, stop)
        if len(data) != header_bytes + stop - start:
            raise EOFError(f"bytes {start} to {stop} are needed, but there are {len(data) - header_bytes}")
        if header_bytes:
            _compare(member, zlib.crc32(data))
            data = data[header_bytes:]
        # In Fortran order the split is the whole array.
        return np.frombuffer(data, member.dtype).reshape(shape, order="F" if member.is_by_column else "C")

    def _decoded(self, path: str, member: NpyMember) -> Any:
        with (
            self.storage.open(path) as file,
            zipfile.ZipFile(file) as archive,
            archive.open(f"{member.name}.npy") as stream,
        ):
            # Read to the end, where zipfile verifies the checksum.
            return np.lib.format.read_array(stream, allow_pickle=False)


@dataclass(frozen=True)
class Npz(Npy):
    """The same reader as `Npy`, but writing archives, for elements that are dicts of arrays."""

    suffixes = (".npz", ".npy")

    def check(self, spec: ElementSpec) -> None:
        if check_writable(spec, ".npz", FIXED_SIZE_KINDS, _ADVICE) == [LONE_NAME]:
            raise ArgumentError(".npz takes a dict of arrays, but elements are single arrays; write .npy")

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        names = array_names(rows.structure, ".npz")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, leaf in zip(names, columns_of(rows), strict=True):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, leaf, allow_pickle=False)


def npy_writer(spec: ElementSpec) -> WritableFormat:
    """Return the format for elements of a spec: ``.npy`` for single arrays, ``.npz`` for dicts of them.

    Raises
    ------
    ArgumentError
        The elements are neither; the message names the leaf and a remedy.
    """
    form = Npy() if spec.structure == LONE else Npz()
    form.check(spec)
    return form


class _Checksum:
    # The verification of a mapped array's checksum, which is computed once.
    def __init__(self, version: Version, member: NpyMember) -> None:
        self._lock = threading.Lock()
        self._version, self._member = version, member
        self._found: int | None = None

    def compare(self) -> None:
        with self._lock:
            if self._found is None:
                member = self._member
                start = (member.offset or 0) - member.header_bytes
                num_bytes = member.header_bytes + member.num_bytes
                mapped = np.memmap(local(self._version.path), np.uint8, "r", start, (num_bytes,))
                crc = 0
                for begin in range(0, num_bytes, _AT_ONCE):
                    crc = zlib.crc32(mapped[begin : begin + _AT_ONCE].data, crc)
                self._found = crc
        _compare(self._member, self._found)


@lru_cache(maxsize=4096)
def _checksum(version: Version, member: NpyMember) -> _Checksum:
    return _Checksum(version, member)


def _compare(member: NpyMember, crc: int) -> None:
    if crc != member.crc:
        raise ValueError(
            f"the checksum of array {member.name!r} is {crc:#010x}, but {member.crc:#010x} in the archive; write it "
            "again, or give check_crc=False to read it anyway"
        )


def _stored(member: NpyMember, path: str) -> StoredArray:
    return StoredArray.of(member.name, member.shape, member.dtype, path)


def _is_array(info: zipfile.ZipInfo) -> bool:
    return info.filename.endswith(".npy")


def _archived(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: IO[bytes], path: str) -> NpyMember:
    name = info.filename[: -len(".npy")]
    with archive.open(info) as stream:
        member = _member(name, stream, path, info.file_size)
    if info.compress_type != zipfile.ZIP_STORED:
        return replace(member, offset=None)
    file.seek(info.header_offset)
    lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    header_bytes = member.offset or 0
    offset = info.header_offset + _LOCAL_HEADER.size + sum(lengths) + header_bytes
    return replace(member, offset=offset, header_bytes=header_bytes, crc=info.CRC)


def _member(name: str, stream: IO[bytes], path: str, num_bytes: int) -> NpyMember:
    # Read the header at the beginning of a stream with that many bytes.
    shape, is_fortran, dtype = header_of(stream)
    member = NpyMember(name, dtype, shape, is_fortran, stream.tell())
    check_rows(name, shape, path)
    array = f"array {name!r}" if name else "its array"
    expected = stream.tell() + member.num_bytes
    if expected > num_bytes:
        raise DamagedFileError(
            f"{path}: cut short: {array} of shape {shape} and {dtype} takes {expected} bytes, but there are {num_bytes}"
        )
    if expected < num_bytes and not dtype.hasobject:
        raise DamagedFileError(
            f"{path}: {num_bytes - expected} bytes more than the {expected} in the header of {array}: damaged, "
            "or several arrays in one file, for which there is .npz"
        )
    return member


def header_of(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a stream: the shape, whether in Fortran order, and the dtype; the values follow.

    Raises
    ------
    ValueError
        There is no header, or its version is unknown.
    """
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    if version != (3, 0):
        raise ValueError(f"version {version} of the format is unknown")
    # Version 3 is version 2 in UTF-8; NumPy has no public function for it.
    length = int.from_bytes(stream.read(4), "little")
    if length > _MOST_HEADER_BYTES:
        raise ValueError(f"its header states a size of {length} bytes")
    header = ast.literal_eval(stream.read(length).decode())
    shape, is_fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ValueError(f"its header states the shape {shape!r}")
    return shape, bool(is_fortran), np.lib.format.descr_to_dtype(header["descr"])
