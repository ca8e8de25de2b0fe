"""Compressed files: which compression a file has, and its bytes without it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Sequence
from typing import IO, Any, Final

from daskdist.errors import ArgumentError, DamagedFileError
from daskdist.storage.filesystem import Storage, is_remote
from daskdist.storage.http_files import without_query
from daskdist.storage.libraries import pa

# Compression -> the suffixes of names, and the first bytes of content (zlib has too many different ones).
_ENDS: Final[dict[str, tuple[str, ...]]] = {
    "gzip": (".gz", ".gzip"),
    "zlib": (".zz", ".zlib"),
    "bz2": (".bz2",),
    "xz": (".xz",),
    "zstd": (".zst", ".zstd"),
}
# Writers in several threads put a frame first that zstd skips; it has one of 16 numbers.
_SKIPPED: Final = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))
_MAGIC: Final[dict[str, tuple[bytes, ...]]] = {
    "gzip": (b"\x1f\x8b\x08",),
    "bz2": (b"BZh",),
    "xz": (b"\xfd7zXZ\x00",),
    "zstd": (b"\x28\xb5\x2f\xfd", *_SKIPPED),
}

# Other spellings that users write: TensorFlow's names, and Arrow's.
_SPELLINGS: Final = {"": None, "GZIP": "gzip", "gz": "gzip", "ZLIB": "zlib", "zst": "zstd"}

SUFFIXES: Final = tuple(end for ends in _ENDS.values() for end in ends)


def compression_of(name: str | None) -> str | None:
    """Return the compression that a user's name stands for; ``"infer"`` stays.

    Raises
    ------
    ArgumentError
        The name is unknown.
    """
    name = _SPELLINGS.get(name or "", name)
    if name is not None and name != "infer" and name not in _ENDS:
        raise ArgumentError(f"compression is {name!r}; give 'infer', None, or one of {', '.join(map(repr, _ENDS))}")
    return name


def inferred(path: str, head: bytes) -> str | None:
    """Return the compression of a file by its first bytes and its name.

    Raises
    ------
    FileError
        The content is not compressed as the name says.
    """
    by_head = next((name for name, magic in _MAGIC.items() if head.startswith(magic)), None)
    by_name = next((name for name, ends in _ENDS.items() if without_query(path).lower().endswith(ends)), None)
    if by_head is None and by_name in _MAGIC and head:
        raise DamagedFileError(
            f"{path}: its name says {by_name}, but its content does not begin like that; "
            "give compression=None to read it as it is"
        )
    # Content decides: a name may be wrong, and no text begins with such bytes.
    return by_head or by_name


def has_suffix(path: str, suffixes: Sequence[str]) -> bool:
    """Return whether the name of a file ends in one of some suffixes, in upper or lower case, compressed or not.

    >>> has_suffix("B.CSV.GZ", (".csv",)), has_suffix("https://host/a.csv?key=1", (".csv",)), has_suffix("a", (".csv",))
    (True, True, False)
    """
    name = without_query(path).lower()
    end = next((end for end in SUFFIXES if name.endswith(end)), "")
    return name.removesuffix(end).endswith(tuple(map(str.lower, suffixes)))


def decompressed(file: Any, compression: str | None) -> IO[bytes]:
    """Open the decompressed content of a file, to be read sequentially.

    Reading raises ``EOFError``, ``OSError``, ``zlib.error`` or ``lzma.LZMAError`` if the file is damaged.
    """
    if compression is None:
        return file  # type: ignore[no-any-return]
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]
    if compression == "bz2":
        return io.BufferedReader(_SuccessiveStreams(file, bz2.BZ2Decompressor))
    if compression == "xz":
        return io.BufferedReader(_SuccessiveStreams(file, lzma.LZMADecompressor))
    if compression == "zlib":
        return io.BufferedReader(_SuccessiveStreams(file, _ZlibDecompressor))
    return pa.CompressedInputStream(pa.PythonFile(file, "r"), compression)  # type: ignore[no-any-return]


def suffix_of(compression: str) -> str:
    """Return the usual suffix of files with a compression."""
    return _ENDS[compression][0]


def compressed(data: bytes, compression: str | None) -> bytes:
    """Compress some bytes into the content of a file."""
    if compression is None:
        return data
    if compression == "zstd":
        return pa.Codec("zstd").compress(data, asbytes=True)  # type: ignore[no-any-return]
    if compression == "gzip":
        # Without the time, so that the same data gives the same file.
        return gzip.compress(data, mtime=0)
    if compression == "zlib":
        return zlib.compress(data)
    return bz2.compress(data) if compression == "bz2" else lzma.compress(data)


class _ZlibDecompressor:
    # The decompressor of `zlib` with the methods of the others.
    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, most)


class _SuccessiveStreams(io.RawIOBase):
    """The content of compressed streams that follow each other, as writers in several threads leave them.

    Zeros after a stream are padding. Anything else is damage; `bz2.BZ2File` and `lzma.LZMAFile` end there in silence.
    """

    def __init__(self, file: Any, new_stream: Callable[[], Any]) -> None:
        self._file = file
        self._new_stream = new_stream
        self._stream = new_stream()
        # Whether what is read may be no stream at all: it follows one, and has no content so far.
        self._is_doubtful = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = self._file.read(io.DEFAULT_BUFFER_SIZE) if self._stream.needs_input and not self._stream.eof else b""
            if self._stream.eof:
                data = self._stream.unused_data.lstrip(b"\0")
                while not data:
                    if not (more := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                        return 0
                    data = more.lstrip(b"\0")
                self._stream, self._is_doubtful = self._new_stream(), True
            elif not data and self._stream.needs_input:
                raise EOFError("the file ends before the compressed stream does")
            try:
                content = self._stream.decompress(data, len(buffer))
            except (OSError, lzma.LZMAError, zlib.error) as error:
                if self._is_doubtful:
                    raise OSError("what follows a compressed stream is not another one") from error
                raise
            if content:
                self._is_doubtful = False
                buffer[: len(content)] = content
                return len(content)


class Reopened(io.RawIOBase):
    """A file that is open only during each read, so that it can be kept for long."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self.position = 0
        self._num_bytes = 2**22 if is_remote(path) else 2**18
        self._ahead = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer."""
        if not self._ahead:
            self._ahead = self._storage.read(self._path, self.position, self.position + self._num_bytes)
            self.position += len(self._ahead)
        content, self._ahead = self._ahead[: len(buffer)], self._ahead[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)
