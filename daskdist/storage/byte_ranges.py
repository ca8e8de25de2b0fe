"""Files of records one after the other, cut into byte ranges at the ends of records.

A range is stated by its size only, so that a file of any size is listed at once. The beginning of its first record is
found when the range is read. If that depends on the record before it (a quoted newline, a length), the search starts at
the nearest boundary this process knows, which is the end of the previous range when files are read in order.

A compressed file cannot be entered in the middle. It is read in parts, each continuing where the one before it ended,
with the same decompressor. A part that is read by another process or out of order is decompressed from the beginning
of the file.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, runtime_checkable

from daskdist.config import in_bytes, num_threads
from daskdist.core.primitive import Split
from daskdist.errors import DamagedFileError, FileError
from daskdist.storage.compression import Reopened, decompressed, inferred
from daskdist.storage.failures import DamagedPart, damage, proves_damage
from daskdist.storage.filesystem import Storage, Version
from daskdist.storage.first_bytes import HEAD_BYTES, refuse_no_text
from daskdist.waiting import wait_intervals

# Bytes first read beyond a range for the end of its last record.
_MARGIN: Final = 2**16
# Bytes decompressed at a time.
_CHUNK: Final = 2**18
# The assumed ratio of decompressed to compressed bytes; a split is sized by its decompressed bytes.
_RATIO: Final = 8
# The growth assumed for text that is parsed. Parsing is slow, so smaller ranges let the first rows come soon and keep
# all threads busy.
GROWTH: Final = 4
# The number of files whose range boundaries are remembered, and of decompressors that are kept.
_NUM_FILES: Final = 256
_NUM_PARKED: Final = 16


class BrokenRecord(Exception):  # noqa: N818 - a signal from a framing to its reader
    """A record so damaged that the beginning of the next one is unknown.

    Parameters
    ----------
    offset
        The byte where the broken record begins.
    reason
        A description of the damage and of the expected content.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


class Framing(Protocol):
    """A rule for finding record boundaries. Implementations are frozen dataclasses."""

    @property
    def is_local(self) -> bool:
        """True if the beginning of a record can be found from any byte; False if only from an earlier record."""
        ...

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        """Return the first offset from ``at_least`` on where a record begins; None if it is beyond the data.

        Parameters
        ----------
        data
            Bytes of the file; they begin with a record unless the framing is local.
        at_least
            An offset in the data: at least 0, or 1 if the data may begin inside a record.
        is_end
            Whether the file ends with the data; the end then counts as a boundary.

        Raises
        ------
        BrokenRecord
            A record before the boundary is broken.
        """
        ...


@runtime_checkable
class Hops(Protocol):
    """A framing of records that state their length, so that those before a range are skipped without being read."""

    def hop(self, read: Callable[[int, int], bytes], at: int, at_least: int, num_bytes: int) -> int:
        """Return the first record boundary from ``at_least`` on, going from the one at ``at``, or the end of the file.

        Parameters
        ----------
        read
            Returns the bytes of the file between two offsets.
        at
            The offset of a record.
        at_least
            The smallest offset to return, from ``at`` to the size of the file.
        num_bytes
            The size of the file.

        Raises
        ------
        BrokenRecord
            A record before the boundary is broken.
        """
        ...


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The part of a file that a split reads.

    Parameters
    ----------
    version
        The file, as it was listed.
    compression
        The name of its compression, or None.
    index
        The number of the range.
    start, stop
        The bytes of the file; the range has the records that begin in them. For a compressed file these are compressed
        bytes, read before the part starts and when it stops.
    begin
        The offset of its first record; None if unknown.
    """

    version: Version
    compression: str | None
    index: int
    start: int
    stop: int
    begin: int | None = None

    @property
    def is_last(self) -> bool:
        """True if the range reaches the end of the file."""
        return self.stop >= self.version.num_bytes

    @property
    def size(self) -> int:
        """The number of bytes of each range of the file except the last."""
        return self.start // self.index if self.index else self.stop - self.start


@dataclass(frozen=True, slots=True)
class RangeRecords:
    """The records of a range.

    Parameters
    ----------
    data
        The bytes of the records.
    offset
        Their offset in the decompressed file.
    broken
        The reason why the rest of the file cannot be read; None if it can.
    is_after
        Whether the damage is in an earlier range.
    """

    data: bytes
    offset: int
    broken: str | None = None
    is_after: bool = False

    def with_rest(self, damaged: Sequence[DamagedPart], num_valid: int, split: Split) -> list[DamagedPart]:
        """Return the damaged records with the rest of the file, if that cannot be read and begins here.

        Parameters
        ----------
        damaged
            The damaged records.
        num_valid
            The number of the others.
        split
            The range.
        """
        if self.broken is None or self.is_after:
            return list(damaged)
        return [*damaged, DamagedPart(num_valid + len(damaged), split.label, self.broken, None)]


@dataclass(frozen=True)
class ByteRanges:
    """Files cut into ranges.

    Parameters
    ----------
    framing
        The rule for record boundaries.
    storage
        Opens the files.
    compression
        The compression of the files: ``"infer"``, a name, or None.
    is_text
        Whether they are text, so that first bytes which no text has are an error.
    """

    framing: Framing
    storage: Storage = field(default_factory=Storage)
    compression: str | None = "infer"
    is_text: bool = False

    def list(self, path: str, file: int, growth: int = 1) -> list[Split]:
        """List the splits of a file.

        Parameters
        ----------
        path
            Its path or URL.
        file
            Its number in the dataset.
        growth
            The approximate ratio of the decoded size of its records to their size in the file.

        Raises
        ------
        FileError
            The file is missing, or not compressed as its name says.
        """
        version, compression = self.storage.version(path), self.compression_of(path)
        # Not the product: records that grow when they are decoded are compact, so compression gains little.
        ratio = max(_RATIO if compression else 1, growth)
        size = max(in_bytes("split-bytes") // ratio, 1)
        kind = "compressed bytes" if compression else "bytes"
        starts = range(0, version.num_bytes, size)
        return [
            Split(
                f"{path} {kind} {start} to {min(start + size, version.num_bytes)}",
                ByteRange(version, compression, index, start, min(start + size, version.num_bytes)),
                None,
                min(size, version.num_bytes - start) * ratio,
                file,
                path,
            )
            for index, start in enumerate(starts)
        ]

    def compression_of(self, path: str) -> str | None:
        """Return the compression of a file."""
        if self.compression != "infer":
            return self.compression
        head = self.storage.read(path, 0, HEAD_BYTES)
        compression = inferred(path, head)
        if self.is_text and compression is None:
            refuse_no_text(path, head)
        return compression

    def head(self, path: str, num_bytes: int) -> tuple[bytes, bool]:
        """Return the first bytes of a decompressed file, and whether they are the whole file."""
        compression = self.compression_of(path)
        with self.storage.open(path) as file, damage(path):
            stream = decompressed(file, compression)
            parts = list(_chunks(stream, num_bytes + 1))
        data = b"".join(parts)
        if self.is_text:
            refuse_no_text(path, data)
        return data[:num_bytes], len(data) <= num_bytes

    def read(self, split: Split, *, is_lenient: bool = False) -> RangeRecords:
        """Read the records of a split.

        Parameters
        ----------
        split
            A split that `list` returned.
        is_lenient
            Whether to return the records before a broken one with the reason, rather than raise.

        Raises
        ------
        FileError
            The file is missing, has changed since it was listed, or is damaged.
        """
        part: ByteRange = split.payload
        self.storage.check_unchanged(part.version, split.label)
        with damage(split.label):
            piece = self._from_stream(part) if part.compression else self._from_file(part)
        if piece.broken is not None and not is_lenient:
            raise DamagedFileError(f"{split.label}: damaged or cut short: {piece.broken}")
        return piece

    def _from_file(self, part: ByteRange) -> RangeRecords:
        if self.framing.is_local:
            return self._between(part, max(part.start - 1, 0))
        if part.begin is not None:
            return self._between(part, part.begin)
        begins, size = _begins((part.version, self.framing, part.size)), part.size
        with begins.lock:
            # Boundaries are found in order.
            nearest = min(part.index, len(begins.offsets) - 1)
            if nearest < part.index and isinstance(self.framing, Hops):
                self._hopped(part, nearest, begins, self.framing)
                nearest = part.index
            for index in range(nearest, part.index):
                self._noted(ByteRange(part.version, None, index, index * size, (index + 1) * size), begins)
                if begins.broken is not None:
                    break
            return self._noted(part, begins)

    def _hopped(self, part: ByteRange, nearest: int, begins: _Begins, framing: Hops) -> None:
        # Find the boundaries of the ranges up to a part, starting from the nearest known one.
        with self.storage.open(part.version.path) as file:

            def read(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            for index in range(nearest, part.index):
                at, stop = begins.offsets[index], (index + 1) * part.size
                try:
                    begins.offsets[index + 1] = framing.hop(read, at, max(at, stop), part.version.num_bytes)
                except BrokenRecord as error:
                    begins.broken = f"at byte {error.offset}: {error.reason}"
                    return

    def _noted(self, part: ByteRange, begins: _Begins) -> RangeRecords:
        # Return the records of a range, and note the boundary of the next one.
        begin = begins.offsets.get(part.index)
        if begin is None:
            # The reader of the damaged range reports the damage.
            return RangeRecords(b"", part.start, begins.broken, is_after=True)
        piece = self._between(part, begin)
        if piece.broken is None:
            begins.offsets[part.index + 1] = piece.offset + len(piece.data)
        else:
            begins.broken = piece.broken
        return piece

    def _between(self, part: ByteRange, at: int) -> RangeRecords:
        # Read from `at` on, which is a record boundary unless the framing is local.
        size, framing = part.version.num_bytes, self.framing
        margin = _MARGIN
        if at >= part.stop:
            return RangeRecords(b"", at)
        with self.storage.open(part.version.path) as file:
            file.seek(at)
            data = file.read(min(part.stop + margin, size) - at)
            while True:
                is_end, begin = at + len(data) >= size, None
                try:
                    begin = framing.boundary(data, part.start - at, is_end=is_end) if at < part.start else 0
                    stop = None if begin is None else framing.boundary(data, max(part.stop - at, begin), is_end=is_end)
                    if begin is not None or not framing.is_local:
                        _refuse_long_records(framing, data, begin or 0)
                except BrokenRecord as error:
                    first = begin or 0
                    return RangeRecords(
                        data[first : error.offset], at + first, f"at byte {at + error.offset}: {error.reason}"
                    )
                if begin is None and at + len(data) >= part.stop + _MARGIN:
                    # No record begins in the range.
                    return RangeRecords(b"", part.stop)
                if begin is not None and stop is not None:
                    if begin:
                        return RangeRecords(data[begin:stop], at + begin)
                    # Truncate in place: bytes with no other owner are not copied for that.
                    held = io.BytesIO(data)
                    del data
                    held.truncate(stop)
                    return RangeRecords(held.getvalue(), at)
                more = file.read(margin)
                if not more and not is_end:
                    raise FileError(
                        f"{part.version.path}: has {at + len(data)} bytes, but {size} when it was listed; create the "
                        "dataset again"
                    )
                data, margin = data + more, min(margin * 2, max(_longest(), _MARGIN))

    def _from_stream(self, part: ByteRange) -> RangeRecords:
        key = part.version, part.compression, self.framing, part.size
        parked = _streams.taken(key, part.index)
        if isinstance(parked, RangeRecords):
            return parked
        stream = parked
        try:
            if stream is None:
                raw = Reopened(self.storage, part.version.path)
                stream = _Stream(raw, decompressed(raw, part.compression))
            while stream.index < part.index:
                index = stream.index
                _streams.passed(key, index, stream.next(self.framing, (index + 1) * part.size))
            return stream.next(self.framing, None if part.is_last else part.stop)
        finally:
            _streams.put_back(key, part.index, None if part.is_last else stream)


def _chunks(stream: Any, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (chunk := stream.read(min(num_bytes, _CHUNK))):
        yield chunk
        num_bytes -= len(chunk)


@dataclass(eq=False)
class _Begins:
    # The beginning of the first record in each range of a file, by the number of the range, as far as known.
    lock: Any = field(default_factory=threading.Lock)
    offsets: dict[int, int] = field(default_factory=lambda: {0: 0})
    broken: str | None = None


@lru_cache(maxsize=_NUM_FILES)
def _begins(key: Any) -> _Begins:
    return _Begins()


@dataclass(eq=False)
class _Stream:
    # A compressed file that has been read up to a part: the rest of the stream, and bytes read beyond the part.
    raw: Reopened
    stream: Any
    index: int = 0
    rest: bytes = b""
    offset: int = 0
    is_end: bool = False
    broken: str | None = None

    def next(self, framing: Framing, stop: int | None) -> RangeRecords:
        """Read the records of the next part: decompress until ``stop`` bytes of the file are read."""
        self.index += 1
        if self.broken is not None:
            return RangeRecords(b"", self.offset, self.broken, is_after=True)
        parts, length, looked_at = [self.rest], len(self.rest), 0
        try:
            while not self.is_end and (stop is None or self.raw.position < stop):
                length += self._more(parts)
                if length - looked_at > max(_longest(), _CHUNK):
                    parts, looked_at = [b"".join(parts)], length
                    _refuse_long_records(framing, parts[0])
            data = b"".join(parts)
            _refuse_long_records(framing, data)
            end = framing.boundary(data, len(data), is_end=self.is_end)
            target = _CHUNK
            while end is None:
                # Double the amount each time: scanning a long record again after each chunk takes quadratic time.
                parts, more = [data], 0
                while more < target and not self.is_end:
                    more += self._more(parts)
                target = min(target * 2, max(_longest(), _CHUNK))
                data = b"".join(parts)
                _refuse_long_records(framing, data)
                end = framing.boundary(data, length, is_end=self.is_end)
        except BrokenRecord as error:
            data, end = b"".join(parts), error.offset
            self.broken = f"at byte {self.offset + end} when decompressed: {error.reason}"
        except Exception as error:
            if not proves_damage(error):
                raise
            data = b"".join(parts)
            end = _whole(framing, data)
            self.broken = f"after {self.offset + len(data)} bytes when decompressed: {error or type(error).__name__}"
        piece = RangeRecords(data[:end], self.offset, self.broken)
        self.rest, self.offset = data[end:], self.offset + end
        return piece

    def _more(self, parts: list[bytes]) -> int:
        # Read in small pieces, so that the data before a damaged place is not lost.
        chunk: bytes = getattr(self.stream, "read1", self.stream.read)(_CHUNK)
        self.is_end = not chunk
        parts.append(chunk)
        return len(chunk)


def _longest() -> int:
    return max(in_bytes("max-record-bytes"), 1)


def _refuse_long_records(framing: Framing, data: bytes, at: int = 0) -> None:
    """Raise `BrokenRecord` for the first record from offset ``at`` on that is longer than the setting allows."""
    longest = _longest()
    while len(data) - at > longest:
        step = _whole(framing, data[at : at + longest])
        if not step:
            raise BrokenRecord(
                at,
                f"{data[at : at + 40]!r} is the beginning of a line or record of more than {longest} bytes, which the "
                "setting daskdist.max-record-bytes does not allow; set it higher if such records are expected",
            )
        at += step


def _whole(framing: Framing, data: bytes) -> int:
    # Return the number of bytes of complete records: the last boundary, found by bisection.
    low, high, end = 0, len(data), 0
    while low <= high:
        middle = (low + high) // 2
        try:
            boundary = framing.boundary(data, middle, is_end=False)
        except BrokenRecord as error:
            return error.offset
        if boundary is None:
            high = middle - 1
        else:
            low, end = boundary + 1, boundary
    return end


class _Streams:
    # Partly read streams of compressed files, kept for the readers of their next parts.
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: OrderedDict[tuple[Any, int], list[_Stream]] = OrderedDict()
        # The first and last part of each stream that is being read.
        self._running: list[tuple[Any, int, int]] = []
        # Parts that were read on the way to later parts, kept for their slower readers.
        self._passed: dict[tuple[Any, int], RangeRecords] = {}
        self._waiting: list[tuple[Any, int]] = []

    def taken(self, key: Any, index: int) -> _Stream | RangeRecords | None:
        """Take the part, or the stream closest before it; wait for a stream that will reach it."""
        waiting = wait_intervals("an earlier part of a compressed file, which another thread reads", "timeouts.data")
        with self._changed:
            while True:
                if (key, index) in self._passed:
                    return self._passed.pop((key, index))
                nearest = max(
                    (number for parked_key, number in self._parked if parked_key == key and number <= index), default=-1
                )
                running = [(start, stop) for running_key, start, stop in self._running if running_key == key]
                will_pass = any(start <= index < stop for start, stop in running)
                will_come = max((stop + 1 for _, stop in running if stop < index), default=-1) > nearest
                if not (will_pass or will_come):
                    break
                self._waiting.append((key, index))
                try:
                    self._changed.wait(next(waiting))
                finally:
                    self._waiting.remove((key, index))
            self._running.append((key, max(nearest, 0), index))
            if nearest < 0:
                return None
            streams = self._parked[key, nearest]
            stream = streams.pop()
            if not streams:
                del self._parked[key, nearest]
            return stream

    def passed(self, key: Any, index: int, piece: RangeRecords) -> None:
        """Keep a part for its slower reader; at most one part for each thread is kept."""
        with self._changed:
            self._passed[key, index] = piece
            unasked = [part for part in self._passed if part not in self._waiting]
            for part in unasked[: -num_threads()]:
                del self._passed[part]
            self._changed.notify_all()

    def put_back(self, key: Any, index: int, stream: _Stream | None) -> None:
        """Keep a stream, read up to a part, for the reader of the next part; None if the file has ended."""
        with self._changed:
            self._running.remove(
                next(running for running in self._running if running[0] == key and running[2] == index)
            )
            if stream is not None:
                self._parked.setdefault((key, stream.index), []).append(stream)
                while len(self._parked) > _NUM_PARKED:
                    self._parked.popitem(last=False)
            self._changed.notify_all()


_streams = _Streams()
