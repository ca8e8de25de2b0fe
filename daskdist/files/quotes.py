"""Rows of delimited fields: where they begin, where a field in quotes may hold newlines.

A quote counts only where a field begins; inside of quotes two of them are one that is meant, and after the one that
closes the rest of the field is as it is, quotes too. That is how Python's and Arrow's readers have it, so that what
is cut here is read there as if it had never been cut. A row ends with ``\\n``, ``\\r\\n`` or ``\\r``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from daskdist.files.ranges import Broken

MARK: Final = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = 10, 13

# A field longer than that is taken for one whose closing quote is missing, lest all of a file be read for it.
_LONGEST_BYTES: Final = 2**28

Positions = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True)
class Quotes:
    """How rows follow one another.

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
        marks = _NONE if self.is_local else self.marks(data)
        at: int | None = at_least - 1
        while at is not None:
            place = _line_end(data, at, is_end)
            if place is None:
                break
            last, begin = place
            number = int(np.searchsorted(marks, last))
            if number % 2:
                # In quotes: on with where they are closed.
                at = int(marks[number]) if number < len(marks) else None
            elif not _may_be_marked(data, begin, is_end):
                return begin
            else:
                # What reads a part would take a mark at its beginning for one of the encoding, so none begins so.
                at = begin
        if len(marks) % 2:
            self._see_that_it_closes(data, marks, is_end)
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
        raise Broken(
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
        """Where each row of some whole rows begins and ends, its newline left out; blank lines only if asked for."""
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
        """Whether a newline is in quotes, or a quote is not closed."""
        marks = self.marks(data)
        if not len(marks):
            return False
        array = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero((array == _NEWLINE) | (array == _RETURN))
        return bool(len(marks) % 2 or (np.searchsorted(marks, ends) % 2).any())

    def marks(self, data: bytes) -> Positions:
        """Where quotes open and close in data that begins with a row, in turns; of two for one both are there."""
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
        # Whether a field begins with each of some quotes.
        before = np.frombuffer(data, np.uint8).take(found - 1, mode="wrap")
        opens = self._ends_field.take(before)
        if len(found) and found[0] == (3 if data.startswith(MARK) else 0):
            opens[0] = True
        return opens

    @cached_property
    def _ends_field(self) -> Any:
        # Of each byte, whether a field begins after it.
        found = np.zeros(256, bool)
        found[[self.delimiter[0], _NEWLINE, _RETURN]] = True
        return found


def _follows(found: Positions) -> Any:
    # Whether each of some quotes comes right after the one before it.
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
