"""NumPy's own files: ``.npy``, one array, and ``.npz``, arrays by name; a range of rows is a split.

What lies in a local file as it is in memory is mapped: a block is a view of the file, and only what is looked at is
read, but for the checksums of archives, which are compared once by each process. Python objects are never unpickled.
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
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError, FileError
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
from daskdist.storage.filesystem import Storage, Version, failures, is_remote, local
from daskdist.storage.schema_check import FirstFile

_MAGIC: Final = b"\x93NUMPY"
_ZIP: Final = b"PK"
_ADVICE: Final = "make it numbers or text of a fixed size ('U20') with map(...), or use to_parquet or save"
# The header of an archive's member up to its name; it ends with the lengths of the name and of the extra field.
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
# Bytes whose checksum is taken together.
_AT_ONCE: Final = 2**24
# NumPy's limit for headers of the other versions.
_MOST_HEADER_BYTES: Final = 10_000


@dataclass(frozen=True, slots=True)
class NpyMember:
    """An array in a file.

    Parameters
    ----------
    name
        Its name; empty in a ``.npy`` file.
    dtype, shape
        Those of the array.
    is_fortran
        Whether its first axis is the one that varies fastest.
    offset
        Where in the file its values begin; None where they are compressed.
    header_bytes
        How many bytes before that its header begins.
    crc
        The CRC-32 of header and values; None where the file has none, or the library compares it.
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
    """The rows of a file that a split reads.

    Parameters
    ----------
    version
        The file, as it was listed.
    start, stop
        Its rows.
    arrays
        The arrays as elements.
    members
        Where they are, in the same order.
    """

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
        Which arrays of an archive, in what structure: see `Columns.of`.
    storage
        How files are opened.
    check_crc
        Whether the checksums of arrays in archives are compared.
    """

    columns: Any = None
    storage: Storage = field(default_factory=Storage)
    check_crc: bool = True

    name = "npy"
    suffixes = (".npy", ".npz")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(_MAGIC) or (head.startswith(_ZIP) and path.endswith(".npz"))

    def spec(self, path: str) -> ElementSpec:
        return self._found(path, None)[1].spec

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        version, arrays, members = self._found(path, first)
        check_alike(arrays, path, first)
        # One split for arrays that are decoded from their beginning, or whose rows are interleaved in a remote file.
        is_whole = any(each.offset is None or (each.is_by_column and is_remote(path)) for each in members)
        cuts = [(0, arrays.num_rows)] if is_whole and arrays.num_rows else None
        return arrays.splits(path, file, lambda start, stop: NpySplit(version, start, stop, arrays, members), cuts)

    def read(self, split: Split) -> Block:
        part: NpySplit = split.payload
        # Reading a mapped file that was cut short kills the process: check first that it is unchanged.
        if self.storage.version(part.version.path) != part.version:
            raise FileError(f"{split.label}: the file was changed since it was listed; create the dataset again")
        members = {each.name: each for each in part.members}
        with failures(split.label, kinds=(Exception,)):
            return part.arrays.block(lambda stored: self._rows(part, members[stored.name]), split.label)

    def check(self, spec: ElementSpec) -> None:
        if check_writable(spec, ".npy", "biufcmMSU", _ADVICE) != [LONE_NAME]:
            raise ArgumentError(f".npy takes a lone array, and elements are {spec.structure}; write .npz")

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        (leaf,) = columns_of(rows)
        np.lib.format.write_array(file, leaf, allow_pickle=False)

    def _found(self, path: str, first: FirstFile | None) -> tuple[Version, StoredArrays, tuple[NpyMember, ...]]:
        version = self.storage.version(path)
        with self.storage.open(path) as file, failures(path, "damaged or cut short", (Exception,)):
            head = file.read(len(_MAGIC))
            file.seek(0)
            if head == _MAGIC:
                found = {LONE_NAME: _member(LONE_NAME, file, path, version.num_bytes)}
                columns = chosen(self.columns, [LONE_NAME], path, first, "column")
                arrays = StoredArrays.of(columns, lambda name: _stored(found[name], path), path)
            elif head.startswith(_ZIP):
                with zipfile.ZipFile(file) as archive:
                    infos = {each.filename[: -len(".npy")]: each for each in archive.infolist() if _is_array(each)}
                    columns = chosen(self.columns, list(infos), path, first, "column")
                    found = {name: _archived(archive, infos[name], file, path) for name in columns.names}
                    arrays = StoredArrays.of(columns, lambda name: _stored(found[name], path), path)
            else:
                raise FileError(
                    f"{path}: not a NumPy file: it begins with {head!r}, and .npy files begin with {_MAGIC!r}, .npz "
                    f"files with {_ZIP!r}"
                )
        return version, arrays, tuple(found[each.name] for each in arrays.stored)

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
            whole = np.memmap(path, member.dtype, "r", member.offset, member.shape, order="F")
            mapped = np.asarray(whole)[part.start : part.stop]
        else:
            mapped = np.asarray(np.memmap(path, member.dtype, "r", member.offset + part.start * row_bytes, shape))
        # Members of archives begin anywhere, and not all who take arrays take such.
        return mapped if mapped.flags.aligned or mapped.dtype.names else mapped.copy()

    def _fetched(self, part: NpySplit, member: NpyMember, shape: tuple[int, ...]) -> Any:
        row_bytes, begin = member.num_bytes // member.shape[0], member.offset or 0
        start, stop = begin + part.start * row_bytes, begin + part.stop * row_bytes
        is_whole = stop - start == member.num_bytes
        header_bytes = member.header_bytes if is_whole and self.check_crc and member.crc is not None else 0
        data = self.storage.read(part.version.path, start - header_bytes, stop)
        if len(data) != header_bytes + stop - start:
            raise EOFError(f"bytes {start} to {stop} were to be read, and there are {len(data) - header_bytes}")
        if header_bytes:
            _compare(member, zlib.crc32(data))
            data = data[header_bytes:]
        # A split is all of it where the order matters.
        return np.frombuffer(data, member.dtype).reshape(shape, order="F" if member.is_by_column else "C")

    def _decoded(self, path: str, member: NpyMember) -> Any:
        with (
            self.storage.open(path) as file,
            zipfile.ZipFile(file) as archive,
            archive.open(f"{member.name}.npy") as stream,
        ):
            # To its end, where its checksum is compared.
            return np.lib.format.read_array(stream, allow_pickle=False)


@dataclass(frozen=True)
class Npz(Npy):
    """The same reader, that writes archives: for elements that are dicts of arrays."""

    suffixes = (".npz", ".npy")

    def check(self, spec: ElementSpec) -> None:
        if check_writable(spec, ".npz", "biufcmMSU", _ADVICE) == [LONE_NAME]:
            raise ArgumentError(".npz takes a dict of arrays by name, and elements are lone arrays; write .npy")

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        names = array_names(rows.structure, ".npz")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, leaf in zip(names, columns_of(rows), strict=True):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, leaf, allow_pickle=False)


def npy_writer(spec: ElementSpec) -> WritableFormat:
    """Return the format for elements of a spec: ``.npy`` for lone arrays, ``.npz`` for dicts of them.

    Raises
    ------
    ArgumentError
        They are neither; the message says which leaf, and what to do.
    """
    form = Npy() if spec.structure == LONE else Npz()
    form.check(spec)
    return form


class _Checksum:
    # The check of a mapped array's checksum, which is computed once.
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
                found = 0
                for begin in range(0, num_bytes, _AT_ONCE):
                    found = zlib.crc32(mapped[begin : begin + _AT_ONCE].data, found)
                self._found = found
        _compare(self._member, self._found)


@lru_cache(maxsize=4096)
def _checksum(version: Version, member: NpyMember) -> _Checksum:
    return _Checksum(version, member)


def _compare(member: NpyMember, found: int) -> None:
    if found != member.crc:
        raise ValueError(
            f"the checksum of array {member.name!r} is {found:#010x}, and {member.crc:#010x} by the archive; write it "
            "again, or give check_crc=False to read it all the same"
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


def _member(name: str, stream: IO[bytes], path: str, found: int) -> NpyMember:
    # From the header that a stream begins with, which has so many bytes.
    shape, is_fortran, dtype = header_of(stream)
    made = NpyMember(name, dtype, shape, is_fortran, stream.tell())
    check_rows(name, shape, path)
    array = f"array {name!r}" if name else "its array"
    expected = stream.tell() + made.num_bytes
    if expected > found:
        raise FileError(
            f"{path}: cut short: {array} of shape {shape} and {dtype} takes {expected} bytes, and there are {found}"
        )
    if expected < found and not dtype.hasobject:
        raise FileError(
            f"{path}: {found - expected} bytes more than the {expected} that the header of {array} tells of: damaged, "
            "or several arrays one after the other, for which there is .npz"
        )
    return made


def header_of(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and dtype of the array that a stream begins with; it is then at its values.

    Raises
    ------
    ValueError
        There is none, or of an unknown version.
    """
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    if version != (3, 0):
        raise ValueError(f"version {version} of the format is not known")
    # Version 3 is version 2 in UTF-8; NumPy has no public function for it.
    length = int.from_bytes(stream.read(4), "little")
    if length > _MOST_HEADER_BYTES:
        raise ValueError(f"its header says it is of {length} bytes")
    header = ast.literal_eval(stream.read(length).decode())
    shape, is_fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ValueError(f"its header says its shape is {shape!r}")
    return shape, bool(is_fortran), np.lib.format.descr_to_dtype(header["descr"])
