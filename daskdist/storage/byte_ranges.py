"""Files of records one after the other, cut into byte ranges at the ends of records.

A range is stated by its size only, so that a file of any size is listed at once; where its first record begins
is found when it is read. Where that can be told only from the record before it (a quoted newline, a length), it is
found from the nearest place already known in this process, which is the end of the range before where files are
read in order.

What is compressed cannot be entered in the middle. It is read in parts, each from where the one before it ended: the
decompressor is kept for it. Read by another process, or out of order, a part is decompressed from the beginning.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from daskdist.config import in_bytes, num_threads
from daskdist.core.primitive import Split
from daskdist.errors import FileError
from daskdist.storage.compression import Reopened, decompressed, inferred
from daskdist.storage.filesystem import Storage, Version, failures

# Bytes first read beyond a range for the end of its last record.
_MARGIN: Final = 2**16
# Bytes decompressed at a time.
_CHUNK: Final = 2**18
# A part of a compressed file is a split for what it becomes, if that is about so many times as much.
_RATIO: Final = 8
# What text that is taken apart is counted as: that takes so long that smaller ranges let the first rows come soon, and
# keep all threads at work.
GROWTH: Final = 4
# Files whose beginnings of ranges are remembered, and decompressors that are kept.
_NUM_FILES: Final = 256
_NUM_PARKED: Final = 16


class BrokenRecord(Exception):  # noqa: N818 - a signal between a framing and who reads
    """There is no telling where the next record begins.

    Parameters
    ----------
    offset
        Where the record begins that is broken.
    reason
        What is wrong, and what was expected.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


class Framing(Protocol):
    """The way records follow one another. Implementations are frozen dataclasses."""

    @property
    def is_local(self) -> bool:
        """True if the beginning of a record can be found from any byte; False if only from an earlier record."""
        ...

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        """Return the first place from ``at_least`` on where a record begins; None where it is beyond the data.

        Parameters
        ----------
        data
            Bytes that begin with a record, or anywhere where the framing is local.
        at_least
            From 0 up to their number; from 1 where they begin anywhere.
        is_end
            Whether the file ends with them: their end is a beginning then.

        Raises
        ------
        Broken
            There is none, for what is before it is broken.
        """
        ...


@runtime_checkable
class Hops(Protocol):
    """A framing of records that say how long they are: those before a range are passed over without being read."""

    def hop(self, read: Callable[[int, int], bytes], at: int, at_least: int, num_bytes: int) -> int:
        """Return the first record boundary from ``at_least`` on, going from the one at ``at``, or the end of the file.

        Parameters
        ----------
        read
            Gives the bytes of the file from one place to another.
        at
            Where a record begins.
        at_least
            From there up to the end of the file.
        num_bytes
            The size of the file.

        Raises
        ------
        Broken
            There is none, for what is before it is broken.
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
        How it is compressed, or None.
    index
        The number of the range.
    start, stop
        Where it starts and stops: its records are those that begin there. Of a compressed file, how much of it has
        been read by then.
    """

    version: Version
    compression: str | None
    index: int
    start: int
    stop: int

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
        Their bytes.
    offset
        Where in the file, or in what it becomes when it is decompressed, they begin.
    broken
        Why what comes after them cannot be read, where it cannot.
    is_after
        Whether that is of an earlier range already.
    """

    data: bytes
    offset: int
    broken: str | None = None
    is_after: bool = False


@dataclass(frozen=True)
class ByteRanges:
    """Files cut into ranges.

    Parameters
    ----------
    framing
        How records follow one another.
    storage
        How files are opened.
    compression
        How they are compressed: ``"infer"``, a name, or None.
    """

    framing: Framing
    storage: Storage = field(default_factory=Storage)
    compression: str | None = "infer"

    def list(self, path: str, file: int, growth: int = 1) -> list[Split]:
        """List the splits of a file.

        Parameters
        ----------
        path
            Its path.
        file
            Its number.
        growth
            About how many times as much its records become when they are decoded.

        Raises
        ------
        FileError
            It is missing, or not compressed as its name says.
        """
        version, compression = self.storage.version(path), self.compression_of(path)
        # What grows much when it is decoded was compressed already.
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
        return inferred(path, self.storage.read(path, 0, 8))

    def head(self, path: str, num_bytes: int) -> tuple[bytes, bool]:
        """Return the first bytes of a decompressed file, and whether they are all of it."""
        compression = self.compression_of(path)
        with self.storage.open(path) as file, failures(path):
            stream = decompressed(file, compression)
            parts = list(_chunks(stream, num_bytes + 1))
        data = b"".join(parts)
        return data[:num_bytes], len(data) <= num_bytes

    def read(self, split: Split, *, is_lenient: bool = False) -> RangeRecords:
        """Read the records of a split.

        Parameters
        ----------
        split
            One of those listed.
        is_lenient
            Whether records before one that is broken are given, and the rest noted, instead of an error.

        Raises
        ------
        FileError
            The file is gone, is another by now, or is damaged.
        """
        part: ByteRange = split.payload
        if self.storage.version(part.version.path) != part.version:
            raise FileError(f"{split.label}: the file was changed since it was listed; make the dataset anew")
        with failures(split.label):
            piece = self._from_stream(part) if part.compression else self._from_file(part)
        if piece.broken is not None and not is_lenient:
            raise FileError(f"{split.label}: damaged or cut short: {piece.broken}")
        return piece

    def _from_file(self, part: ByteRange) -> RangeRecords:
        if self.framing.is_local:
            return self._between(part, max(part.start - 1, 0))
        begins, size = _begins((part.version, self.framing, part.size)), part.size
        with begins.lock:
            # They are found one after the other.
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
        # Where the ranges up to a part begin, from the nearest of which that is known.
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
        # The records of a range, and where those of the next begin, for whoever reads that.
        begin = begins.offsets.get(part.index)
        if begin is None:
            # Something before it is broken, and is told of there.
            return RangeRecords(b"", part.start, begins.broken, is_after=True)
        piece = self._between(part, begin)
        if piece.broken is None:
            begins.offsets[part.index + 1] = piece.offset + len(piece.data)
        else:
            begins.broken = piece.broken
        return piece

    def _between(self, part: ByteRange, at: int) -> RangeRecords:
        # From `at` on, which is a beginning unless the framing is local.
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
                    # It is within one record, however far that goes on.
                    return RangeRecords(b"", part.stop)
                if begin is not None and stop is not None:
                    if begin:
                        return RangeRecords(data[begin:stop], at + begin)
                    # Cut off in place: whoever has bytes alone need not copy them for that.
                    held = io.BytesIO(data)
                    del data
                    held.truncate(stop)
                    return RangeRecords(held.getvalue(), at)
                more = file.read(margin)
                if not more and not is_end:
                    raise EOFError(f"the file has {at + len(data)} bytes, {size} when it was listed")
                data, margin = data + more, min(margin * 2, max(_longest(), _MARGIN))

    def _from_stream(self, part: ByteRange) -> RangeRecords:
        key = part.version, part.compression, self.framing, part.size
        found = _streams.taken(key, part.index)
        if isinstance(found, RangeRecords):
            return found
        stream = found
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


_known: OrderedDict[Any, _Begins] = OrderedDict()
_known_lock = threading.Lock()


def _begins(key: Any) -> _Begins:
    with _known_lock:
        found = _known.setdefault(key, _Begins())
        _known.move_to_end(key)
        while len(_known) > _NUM_FILES:
            _known.popitem(last=False)
        return found


@dataclass(eq=False)
class _Stream:
    # A compressed file that has been read up to a part: what is to come of it, and what was read too far.
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
            wanted = _CHUNK
            while end is None:
                # Twice as much each time: to look at all of a long record after each chunk would take for ever.
                parts, more = [data], 0
                while more < wanted and not self.is_end:
                    more += self._more(parts)
                wanted = min(wanted * 2, max(_longest(), _CHUNK))
                data = b"".join(parts)
                _refuse_long_records(framing, data)
                end = framing.boundary(data, length, is_end=self.is_end)
        except BrokenRecord as error:
            data, end = b"".join(parts), error.offset
            self.broken = f"at byte {self.offset + end} when decompressed: {error.reason}"
        # Libraries raise many errors for damaged or short files; zlib.error and LZMAError share only Exception.
        except Exception as error:
            data = b"".join(parts)
            end = _whole(framing, data)
            self.broken = f"after {self.offset + len(data)} bytes when decompressed: {error or type(error).__name__}"
        piece = RangeRecords(data[:end], self.offset, self.broken)
        self.rest, self.offset = data[end:], self.offset + end
        return piece

    def _more(self, parts: list[bytes]) -> int:
        # No more than comes at once: what comes before the place where it is damaged is not lost with that.
        chunk: bytes = getattr(self.stream, "read1", self.stream.read)(_CHUNK)
        self.is_end = not chunk
        parts.append(chunk)
        return len(chunk)


def _longest() -> int:
    return max(in_bytes("max-record-bytes"), 1)


def _refuse_long_records(framing: Framing, data: bytes, at: int = 0) -> None:
    """Raise `BrokenRecord` for the first record that is longer than one may be, from one on that begins at ``at``."""
    longest = _longest()
    while len(data) - at > longest:
        step = _whole(framing, data[at : at + longest])
        if not step:
            raise BrokenRecord(
                at,
                f"{data[at : at + 40]!r} is the beginning of a line or record of more than {longest} bytes, which the "
                "setting daskdist.max-record-bytes does not allow; set it higher if that is what the file is to hold",
            )
        at += step


def _whole(framing: Framing, data: bytes) -> int:
    # The bytes of the records that are whole: the last place where one begins, found by halving.
    low, high, end = 0, len(data), 0
    while low <= high:
        middle = (low + high) // 2
        try:
            found = framing.boundary(data, middle, is_end=False)
        except BrokenRecord as error:
            return error.offset
        if found is None:
            high = middle - 1
        else:
            low, end = found + 1, found
    return end


class _Streams:
    # Compressed files that were read in part, for whoever reads the next part.
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: OrderedDict[tuple[Any, int], list[_Stream]] = OrderedDict()
        # The first and last part of each stream that is being read.
        self._running: list[tuple[Any, int, int]] = []
        # Parts that were come by on the way to others: whoever asks for them was overtaken only.
        self._passed: dict[tuple[Any, int], RangeRecords] = {}
        self._waiting: list[tuple[Any, int]] = []

    def taken(self, key: Any, index: int) -> _Stream | RangeRecords | None:
        """Take the stream closest before a part, or the part itself; wait for one that is on its way there."""
        with self._changed:
            while True:
                if (key, index) in self._passed:
                    return self._passed.pop((key, index))
                here = max((number for each, number in self._parked if each == key and number <= index), default=-1)
                running = [(start, stop) for each, start, stop in self._running if each == key]
                will_pass = any(start <= index < stop for start, stop in running)
                will_come = max((stop + 1 for _, stop in running if stop < index), default=-1) > here
                if not (will_pass or will_come):
                    break
                self._waiting.append((key, index))
                self._changed.wait()
                self._waiting.remove((key, index))
            self._running.append((key, max(here, 0), index))
            if here < 0:
                return None
            streams = self._parked[key, here]
            stream = streams.pop()
            if not streams:
                del self._parked[key, here]
            return stream

    def passed(self, key: Any, index: int, piece: RangeRecords) -> None:
        """Keep a part for whoever was overtaken: there are no more of those than threads."""
        with self._changed:
            self._passed[key, index] = piece
            unasked = [each for each in self._passed if each not in self._waiting]
            for each in unasked[: -num_threads()]:
                del self._passed[each]
            self._changed.notify_all()

    def put_back(self, key: Any, index: int, stream: _Stream | None) -> None:
        """Leave a stream for whoever reads on, once a part has been read; None where there is nothing to read on."""
        with self._changed:
            self._running.remove(next(each for each in self._running if each[0] == key and each[2] == index))
            if stream is not None:
                self._parked.setdefault((key, stream.index), []).append(stream)
                while len(self._parked) > _NUM_PARKED:
                    self._parked.popitem(last=False)
            self._changed.notify_all()


_streams = _Streams()
