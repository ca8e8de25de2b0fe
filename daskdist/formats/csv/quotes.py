r"""Rows of delimited fields: where they begin, where a field in quotes may hold newlines.

A quote counts only where a field begins; inside of quotes two of them are one that is meant, and after the one that
closes the rest of the field is as it is, quotes too. That is how Python's and Arrow's readers have it, so that what
is cut here is read there as if it had never been cut. A row ends with ``\n``, ``\r\n`` or ``\r``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from daskdist.storage.byte_ranges import BrokenRecord

MARK: Final = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = 10, 13

# A field longer than that is taken for one whose closing quote is missing, lest all of a file be read for it.
_LONGEST_BYTES: Final = 2**28

Positions = np.ndarray[Any, np.dtype[np.intp]]
Bits = np.ndarray[Any, np.dtype[np.uint64]]

_ONE, _LAST = np.uint64(1), np.uint64(63)
# Bytes looked at together.
_AT_ONCE: Final = 2**17


@dataclass(frozen=True)
class Quotes:
    """The framing of rows of delimited text.

    Parameters
    ----------
    delimiter
        What is between fields, one byte.
    quote
        What fields are put in, one byte; empty where nothing is.
    newlines
        Whether a field in quotes may hold newlines.
    """

    delimiter: bytes = b","
    quote: bytes = b'"'
    newlines: bool = True

    @property
    def is_local(self) -> bool:
        return not (self.quote and self.newlines)

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        if not at_least:
            return 0
        quoted = _Quoted.of(self, data) if not self.is_local and self.quote in data else None
        at: int | None = at_least - 1
        while at is not None:
            place = _line_end(data, at, is_end)
            if place is None:
                break
            last, begin = place
            if quoted is not None and quoted.has(last):
                # On with where they are closed.
                closing = data.find(self.quote, last)
                at = None if closing < 0 else closing
            elif not _may_be_marked(data, begin, is_end):
                return begin
            else:
                # A reader would take a mark at the beginning of a part for that of the encoding: no part begins so.
                at = begin
        if quoted is not None and quoted.is_open:
            self._see_that_it_closes(data, self.marks(data), is_end)
        return len(data) if is_end else None

    def _see_that_it_closes(self, data: bytes, marks: Positions, is_end: bool) -> None:
        opened = int(marks[-1])
        if is_end:
            where = "before the end of the file"
        elif len(data) - opened > _LONGEST_BYTES:
            where = f"within {_LONGEST_BYTES} bytes"
        else:
            return
        begin = self._begin_of_row(data, opened, marks)
        raise BrokenRecord(
            begin,
            f"the row {data[begin : begin + 60]!r} has a quote, at byte {opened - begin} of it, that is not closed "
            f"{where}; give quote=None if quotes are no more than text here",
        )

    def _begin_of_row(self, data: bytes, at: int, marks: Positions) -> int:
        while True:
            last = max(data.rfind(b"\n", 0, at), data.rfind(b"\r", 0, at))
            number = int(np.searchsorted(marks, last))
            if last < 0 or number % 2 == 0:
                return last + 1
            at = int(marks[number - 1])

    def rows(self, data: bytes, *, with_blank: bool = False) -> tuple[Positions, Positions]:
        """Return where each of some whole rows begins and ends, without its newline; blank lines only if asked for."""
        array = np.frombuffer(data, np.uint8)
        is_end = array == _NEWLINE
        if b"\r" in data:
            is_end |= array == _RETURN
        ends = np.flatnonzero(is_end)
        marks = self.marks(data)
        if len(marks):
            ends = ends[np.searchsorted(marks, ends) % 2 == 0]
        begins = np.concatenate([[3 if data.startswith(MARK) else 0], ends + 1])
        ends = np.append(ends, len(data))
        is_row = begins < ends
        if with_blank:
            # Between \r and \n there is no line, and none after the last newline.
            is_last = begins == len(data)
            first, before = array[begins - is_last], array[begins - 1]
            is_row |= ~is_last & ~((first == _NEWLINE) & (before == _RETURN))
        return begins[is_row], ends[is_row]

    def has_quoted_newline(self, data: bytes) -> bool:
        """Return whether a newline is in quotes, or a quote is not closed."""
        if not self.quote or self.quote not in data:
            return False
        quoted = _Quoted.of(self, data)
        return quoted.is_open or quoted.has_newline()

    def marks(self, data: bytes) -> Positions:
        """Return where quotes open and close, in turns, in data that begins with a row; doubled quotes give both."""
        if not self.quote or self.quote not in data:
            return _NONE
        array = np.frombuffer(data, np.uint8)
        found = np.flatnonzero(array == self.quote[0])
        # All is well where every other one, from the first on, begins a field or is the second of two for one.
        opening = found[::2]
        is_well = self._opens(data, opening)
        is_well[1:] |= opening[1:] == found[1:-1:2] + 1
        if is_well.all():
            return found
        first = 2 * int(np.argmin(is_well))
        rest = found[first:]
        return np.concatenate([found[:first], _walked(rest, self._opens(data, rest), _follows(found)[first:])])

    def _opens(self, data: bytes, found: Positions) -> Any:
        # Return for each quote whether a field begins with it.
        before = np.frombuffer(data, np.uint8).take(found - 1, mode="wrap")
        opens = self._ends_field.take(before)
        if len(found) and found[0] == (3 if data.startswith(MARK) else 0):
            opens[0] = True
        return opens

    @cached_property
    def _ends_field(self) -> Any:
        # For each byte, whether a field begins after it.
        found = np.zeros(256, bool)
        found[[self.delimiter[0], _NEWLINE, _RETURN]] = True
        return found


@dataclass(frozen=True)
class _Quoted:
    # Which bytes of some data, which begins with a row, are in quotes.
    data: bytes
    # A bit a byte: from a quote that opens on, up to the one that closes.
    bits: Bits

    @classmethod
    def of(cls, quotes: Quotes, data: bytes) -> _Quoted:
        delimiter, quote = quotes.delimiter[0], quotes.quote[0]
        marks = _packed(data, lambda part: part == quote)
        bits = _toggled(marks)
        # All is well where each that opens begins a field, or comes right after another, two for one.
        ends_line = _ends_line if b"\r" in data else _is_newline
        before = marks | _packed(data, lambda part: ends_line(part) | (part == delimiter))
        may_open = before << _ONE
        may_open[1:] |= before[:-1] >> _LAST
        may_open[0] |= np.uint64(1 << (3 if data.startswith(MARK) else 0))
        if (marks & bits & ~may_open).any():
            counts = np.zeros(len(data), bool)
            counts[quotes.marks(data)] = True
            bits = _toggled(_packed(counts, lambda part: part))
        return cls(data, bits)

    @property
    def is_open(self) -> bool:
        return self.has(len(self.data) - 1)

    def has(self, at: int) -> bool:
        return bool(int(self.bits[at // 64]) >> at % 64 & 1)

    def has_newline(self) -> bool:
        return bool((self.bits & _packed(self.data, _ends_line)).any())


def _packed(data: Any, is_one: Callable[[Any], Any]) -> Bits:
    # A bit a byte, 64 in each number, the first the lowest; made a little at a time, which stays in the cache.
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    found = np.zeros(-(-len(array) // 64) * 8, np.uint8)
    for start in range(0, len(array), _AT_ONCE):
        packed = np.packbits(is_one(array[start : start + _AT_ONCE]), bitorder="little")
        found[start // 8 : start // 8 + len(packed)] = packed
    return found.view("<u8")


def _toggled(marks: Bits) -> Bits:
    # For each bit whether an odd number of bits up to it is set: within a word by doubling, then across words.
    bits = marks.copy()
    for distance in (1, 2, 4, 8, 16, 32):
        bits ^= bits << np.uint64(distance)
    odd = np.bitwise_xor.accumulate(bits >> _LAST)
    bits[1:] ^= np.uint64(0) - odd[:-1]
    return bits


def _is_newline(array: Any) -> Any:
    return array == _NEWLINE


def _ends_line(array: Any) -> Any:
    return (array == _NEWLINE) | (array == _RETURN)


def _follows(found: Positions) -> Any:
    # Return for each quote whether it comes right after the one before it.
    follows = np.zeros(len(found), bool)
    np.equal(found[1:], found[:-1] + 1, out=follows[1:])
    return follows


_NONE: Final[Positions] = np.zeros(0, np.intp)


def _walked(found: Positions, opens: Any, is_second: Any) -> Positions:
    # The quotes that count, one after the other: those inside a field that is in none do not.
    kept = []
    is_open, closed = False, -1
    for at, can_open, follows in zip(found.tolist(), opens.tolist(), is_second.tolist(), strict=True):
        if is_open:
            kept.append(at)
            is_open, closed = False, at
        elif can_open or (follows and closed == at - 1):
            kept.append(at)
            is_open = True
    return np.array(kept, np.intp)


def _line_end(data: bytes, at: int, is_end: bool) -> tuple[int, int] | None:
    # The first newline from there on: where it is, and what comes after it begins.
    newline = data.find(b"\n", at)
    carriage = data.find(b"\r", at, len(data) if newline < 0 else newline)
    if carriage < 0:
        return None if newline < 0 else (newline, newline + 1)
    if newline == carriage + 1:
        return carriage, newline + 1
    if carriage + 1 == len(data) and not is_end:
        return None
    return carriage, carriage + 1


def _may_be_marked(data: bytes, begin: int, is_end: bool) -> bool:
    head = data[begin : begin + 3]
    return head == MARK or (not is_end and len(head) < 3 and MARK.startswith(head))
