"""The framing of TFRecord files.

A record consists of its length in eight bytes, the checksum of the length, its bytes, and their checksum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.cardinality import counted
from daskdist.errors import FileError
from daskdist.formats.tfrecord.checksums import length_checksums, record_checksums, wrong_lengths
from daskdist.storage.byte_ranges import BrokenRecord
from daskdist.storage.compression import inferred
from daskdist.tables.byte_rows import RowPieces, objects_at, rows_at

Array = np.ndarray[Any, Any]

HEADER_BYTES: Final = 12
FOOTER_BYTES: Final = 4
AROUND_BYTES: Final = HEADER_BYTES + FOOTER_BYTES
# The number of equal lengths after which a run is searched for, and of other records between two searches.
_RUN: Final = 16
_HOPS: Final = 256
_LONGEST_RUN: Final = 2**16


@dataclass(frozen=True, slots=True)
class Headers:
    """The positions of the records in bytes that begin with a record.

    Parameters
    ----------
    starts, lengths
        The offset of the content of each record, and its length. The last record may end beyond the bytes.
    stop
        The offset of the next record.
    broken
        The reason why the next record cannot be found, if a header is damaged.
    """

    starts: Array
    lengths: Array
    stop: int
    broken: str | None = None


def headers_of(data: Any, *, check: bool) -> Headers:
    """Find the records in bytes whose headers are complete and, if ``check``, whose lengths have their checksum."""
    offsets, stop = _offsets(data)
    headers = rows_at(data, offsets, HEADER_BYTES)
    lengths = _lengths(headers)
    broken = None
    if check:
        stated = np.ascontiguousarray(headers[:, 8:]).view("<u4").reshape(-1)
        wrong = wrong_lengths(lengths, stated)
        if len(wrong):
            first = int(wrong[0])
            broken = f"a record states a length of {lengths[first]} bytes, whose checksum differs"
            offsets, lengths, stop = offsets[:first], lengths[:first], int(offsets[first])
    return Headers(offsets + HEADER_BYTES, lengths, stop, broken)


def _lengths(headers: Array) -> Array:
    lengths: Array = np.ascontiguousarray(headers[:, :8]).view("<u8").reshape(-1)
    return lengths


def _offsets(data: Any) -> tuple[Array, int]:
    # Return the offsets of records and of the next one. Records of one length are often consecutive: after a few of
    # them, the rest of the run is counted at once.
    last, at, count = len(data) - HEADER_BYTES, 0, 2 * _RUN
    parts: list[Array] = [np.zeros(0, np.int64)]
    length_at = struct.Struct("<Q").unpack_from
    while at <= last:
        offsets: list[int] = []
        for _ in range(count):
            offsets.append(at)
            at += length_at(data, at)[0] + AROUND_BYTES
            if at > last:
                break
        parts.append(np.array(offsets, np.int64))
        count = _HOPS
        step = at - offsets[-1]
        if at <= last and at - offsets[0] >= _RUN * step == at - offsets[max(-_RUN, -len(offsets))]:
            number = _run(data, at, step - AROUND_BYTES, step)
            parts.append(at + step * np.arange(number))
            at += number * step
    return np.concatenate(parts), at


def _run(data: Any, at: int, length: int, step: int) -> int:
    # Count the consecutive records from here on that have this length.
    most = (len(data) - at - HEADER_BYTES) // step + 1
    number, size = 0, _RUN
    while number < most:
        count = min(size, most - number)
        lengths = np.ndarray((count,), "<u8", data, at + number * step, (step,))
        differing = np.flatnonzero(lengths != length)
        if len(differing):
            return number + int(differing[0])
        number, size = number + count, min(4 * size, _LONGEST_RUN)
    return number


@dataclass(frozen=True)
class Records:
    """The framing of records by their lengths.

    Parameters
    ----------
    check
        Whether to verify the checksums of lengths.
    """

    check: bool = True

    is_local = False

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        if not at_least:
            return 0
        headers = headers_of(data, check=self.check)
        begins = headers.starts - HEADER_BYTES
        place = int(np.searchsorted(begins, at_least))
        if place < len(begins):
            return int(begins[place])
        if headers.broken is None and at_least <= headers.stop <= len(data):
            return headers.stop
        if headers.broken is not None:
            if headers.stop >= at_least:
                return headers.stop
            raise BrokenRecord(headers.stop, headers.broken + _hint(data, headers.stop))
        if not is_end:
            return None
        if headers.stop < len(data):
            reason = (
                f"{counted(len(data) - headers.stop, 'byte')} at its end, but a record takes at least {AROUND_BYTES}"
            )
            raise BrokenRecord(headers.stop, reason)
        last = int(begins[-1])
        raise BrokenRecord(
            last,
            f"a record has {headers.lengths[-1]} bytes, but the file ends {headers.stop - len(data)} bytes before that",
        )


def _hint(data: bytes, at: int) -> str:
    # A file of another format fails at its very beginning.
    if at:
        return ""
    try:
        compression = inferred("", data[:8])
    except FileError:
        compression = None
    if compression:
        return f"; it begins like a file compressed by {compression}: give compression={compression!r}"
    return "; is it a TFRecord file, with the compression of its name?"


def framed(data: Array, lengths: Array) -> bytes:
    """Frame records as in a TFRecord file."""
    raw = objects_at(data, np.cumsum(lengths) - lengths, lengths)
    pieces = RowPieces(len(lengths))
    pieces.each(lengths.astype("<u8").view(np.uint8).reshape(-1, 8))
    pieces.each(length_checksums(lengths).astype("<u4").view(np.uint8).reshape(-1, 4))
    pieces.add(data, lengths)
    pieces.each(record_checksums(raw).astype("<u4").view(np.uint8).reshape(-1, 4))
    return pieces.joined().tobytes()


def is_plain(head: bytes) -> bool:
    """Return whether a file begins with the header of a record."""
    if len(head) < HEADER_BYTES:
        return False
    length, stated = np.frombuffer(head, "<u8", 1), np.frombuffer(head, "<u4", 1, 8)
    return not len(wrong_lengths(length, stated))
