r"""The beginnings of rows of delimited fields if quoted fields may contain newlines.

A quote counts only at the beginning of a field; inside quotes a doubled quote stands for one, and after the closing
quote the rest of the field is plain, including quotes. Python's and Arrow's readers do the same, so cutting here does
not change their result. A row ends with ``\n``, ``\r\n`` or ``\r``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.storage.byte_ranges import BrokenRecord

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = 10, 13

# A longer field is taken for one without a closing quote, so that a file is not read to its end for it.
_LONGEST_BYTES: Final = 2**28

Positions = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True)
class Quotes:
    """The framing of rows of delimited text.

    Parameters
    ----------
    delimiter
        The byte between fields.
    quote
        The quote byte; empty for none.
    newlines
        Whether a quoted field may contain newlines.
    """

    delimiter: bytes = b","
    quote: bytes = b'"'
    newlines: bool = True

    @property
    def is_local(self) -> bool:
        return not (self.quote and self.newlines)

    def boundary(self, data: bytes, at_least: int, *, is_end: bool, may_have_mark: bool = False) -> int | None:
        # With `may_have_mark`, the row may begin with a byte-order mark, which is then text.
        if not at_least:
            return 0
        quotes = _NONE if self.is_local else self.quote_positions(data)
        at: int | None = at_least - 1
        while at is not None:
            place = _line_end(data, at, is_end)
            if place is None:
                break
            last, begin = place
            if np.searchsorted(quotes, last) % 2:
                # Continue after the closing quote.
                closing = data.find(self.quote, last)
                at = None if closing < 0 else closing
            elif may_have_mark or not _may_begin_with_mark(data, begin, is_end):
                return begin
            else:
                # Readers take a byte-order mark at the beginning for that of the encoding, so no part may begin with
                # one.
                at = begin
        if len(quotes) % 2:
            self._check_closed(data, quotes, is_end)
        return len(data) if is_end else None

    def _check_closed(self, data: bytes, quotes: Positions, is_end: bool) -> None:
        opened = int(quotes[-1])
        if is_end:
            where = "before the end of the file"
        elif len(data) - opened > _LONGEST_BYTES:
            where = f"within {_LONGEST_BYTES} bytes"
        else:
            return
        begin = self._begin_of_row(data, opened, quotes)
        raise BrokenRecord(
            begin,
            f"the row {data[begin : begin + 60]!r} has a quote, at byte {opened - begin} of it, that is not closed "
            f"{where}; give quote=None if quotes are just text here",
        )

    def _begin_of_row(self, data: bytes, at: int, quotes: Positions) -> int:
        while True:
            last = max(data.rfind(b"\n", 0, at), data.rfind(b"\r", 0, at))
            number = int(np.searchsorted(quotes, last))
            if last < 0 or number % 2 == 0:
                return last + 1
            at = int(quotes[number - 1])

    def rows(self, data: bytes, *, with_blank: bool = False) -> tuple[Positions, Positions]:
        """Return the begin and end of each complete row, without its newline; blank lines only if ``with_blank``."""
        array, ends = np.frombuffer(data, np.uint8), _line_ends(data)
        quotes = self.quote_positions(data)
        if len(quotes):
            ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
        begins = np.concatenate([[3 if data.startswith(BYTE_ORDER_MARK) else 0], ends + 1])
        ends = np.append(ends, len(data))
        is_row = begins < ends
        if with_blank:
            # There is no line between \r and \n, and none after the last newline.
            is_last = begins == len(data)
            first, before = array[begins - is_last], array[begins - 1]
            is_row |= ~is_last & ~((first == _NEWLINE) & (before == _RETURN))
        return begins[is_row], ends[is_row]

    def has_quoted_newline(self, data: bytes) -> bool:
        """Return whether a newline is in quotes, or a quote is not closed."""
        quotes = self.quote_positions(data)
        return bool(len(quotes) % 2 or (np.searchsorted(quotes, _line_ends(data)) % 2).any())

    def quote_positions(self, data: bytes) -> Positions:
        """Return the positions of opening and closing quotes in turn; a doubled quote counts as closing and opening."""
        if not self.quote or self.quote not in data:
            return _NONE
        array = np.frombuffer(data, np.uint8)
        positions = np.flatnonzero(array == self.quote[0])
        # The alternation is right if every other quote begins a field or is the second of a doubled quote.
        opening = positions[::2]
        is_well = self._opens(data, opening)
        is_well[1:] |= opening[1:] == positions[1:-1:2] + 1
        if is_well.all():
            return positions
        first = 2 * int(np.argmin(is_well))
        rest = positions[first:]
        return np.concatenate([positions[:first], _walked(rest, self._opens(data, rest), _follows(positions)[first:])])

    def _opens(self, data: bytes, positions: Positions) -> Any:
        # Return for each quote whether it begins a field.
        before = np.frombuffer(data, np.uint8).take(positions - 1, mode="wrap")
        opens = self._ends_field.take(before)
        if len(positions) and positions[0] == (3 if data.startswith(BYTE_ORDER_MARK) else 0):
            opens[0] = True
        return opens

    @cached_property
    def _ends_field(self) -> Any:
        # Return for each byte value whether a field begins after it.
        ends_field = np.zeros(256, bool)
        ends_field[[self.delimiter[0], _NEWLINE, _RETURN]] = True
        return ends_field


def _line_ends(data: bytes) -> Positions:
    # Return the positions of line ends, of which a carriage return and a newline are two.
    array = np.frombuffer(data, np.uint8)
    is_end = array == _NEWLINE
    if b"\r" in data:
        is_end |= array == _RETURN
    return np.flatnonzero(is_end)


def _follows(positions: Positions) -> Any:
    # Return for each quote whether it directly follows the previous one.
    follows = np.zeros(len(positions), bool)
    np.equal(positions[1:], positions[:-1] + 1, out=follows[1:])
    return follows


_NONE: Final[Positions] = np.zeros(0, np.intp)


def _walked(positions: Positions, opens: Any, is_second: Any) -> Positions:
    # Return the quotes that count, found sequentially: quotes inside an unquoted field do not count.
    kept = []
    is_open, closed = False, -1
    for at, can_open, follows in zip(positions.tolist(), opens.tolist(), is_second.tolist(), strict=True):
        if is_open:
            kept.append(at)
            is_open, closed = False, at
        elif can_open or (follows and closed == at - 1):
            kept.append(at)
            is_open = True
    return np.array(kept, np.intp)


def _line_end(data: bytes, at: int, is_end: bool) -> tuple[int, int] | None:
    # Return the position of the first newline from `at` on, and of the byte after it.
    newline = data.find(b"\n", at)
    carriage = data.find(b"\r", at, len(data) if newline < 0 else newline)
    if carriage < 0:
        return None if newline < 0 else (newline, newline + 1)
    if newline == carriage + 1:
        return carriage, newline + 1
    if carriage + 1 == len(data) and not is_end:
        return None
    return carriage, carriage + 1


def _may_begin_with_mark(data: bytes, begin: int, is_end: bool) -> bool:
    head = data[begin : begin + 3]
    return head == BYTE_ORDER_MARK or (not is_end and len(head) < 3 and BYTE_ORDER_MARK.startswith(head))
