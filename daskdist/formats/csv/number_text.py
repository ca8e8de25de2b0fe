"""Text of digits that is not a number: with leading zeros, a plus sign, or hexadecimal digits.

``01234`` may be a postal code, ``+15551234567`` a telephone number and ``0x1F`` any code; as a number each would lose
its notation. ``0``, ``0.5``, ``-7`` and ``1e5`` are numbers. In a column of floats, integers are text too if the
nearest float would be written with other digits, as different identifiers would become equal.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

import numpy as np

from daskdist.formats.csv.quotes import BYTE_ORDER_MARK
from daskdist.storage.libraries import pc

# The number of bytes to examine together, so that they stay in the processor's cache.
_AT_ONCE: Final = 2**17
_ZERO, _TEN, _PLUS, _MINUS, _X = np.uint8(48), np.uint8(10), 43, 45, 120
_LOWER: Final = np.uint8(32)

_PATTERN: Final = r"^[ \t]*(\+|-?0[0-9xX])"
is_number_text: Final = re.compile(_PATTERN.encode()).match


def may_hold_number_text(data: bytes, delimiter: str, quote: str) -> bool:
    """Return whether rows of delimited fields may contain such text; False only if they do not.

    Parameters
    ----------
    data
        Complete rows.
    delimiter, quote
        The character between fields, and the quote character; an empty quote for none.
    """
    if is_number_text(data.removeprefix(BYTE_ORDER_MARK)):
        return True
    has_x, has_plus, has_minus = b"x" in data or b"X" in data, b"+" in data, b"-" in data
    # Most characters that may precede a field sort before the digits; false positives do no harm.
    last = np.uint8(44)
    marks = [np.uint8(ord(mark)) for mark in (delimiter, quote) if mark and ord(mark) > last]
    array = np.frombuffer(data, np.uint8)
    for start in range(0, len(array), _AT_ONCE):
        part = array[max(start - 3, 0) : start + _AT_ONCE]
        begins = part <= last
        for mark in marks:
            begins |= part == mark
        if has_minus:
            begins[1:] |= (part[1:] == _MINUS) & begins[:-1]
        is_candidate = part[1:-1] == _ZERO
        is_candidate &= begins[:-2]
        is_continued = (part[2:] - _ZERO) < _TEN
        if has_x:
            is_continued |= (part[2:] | _LOWER) == _X
        is_candidate &= is_continued
        if has_plus:
            is_candidate |= (part[1:-1] == _PLUS) & begins[:-2]
        if is_candidate.any():
            return True
    return False


def number_texts(column: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the values that are such text, shape ``(num_rows,)``.

    Parameters
    ----------
    column
        An Arrow array of bytes without nulls.
    """
    mask = pc.match_substring_regex(column, _PATTERN)
    return mask.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


_LONG_INTEGER: Final = r"^[ \t]*-?[0-9]{16,}[ \t]*$"
# The first number after which integers have no float of their own.
FIRST_ROUNDED: Final = 2.0**53


def is_rounded(text: bytes) -> bool:
    """Return whether text is an integer that a float does not keep.

    >>> is_rounded(b"9007199254740993"), is_rounded(b"9007199254740992"), is_rounded(b"12345678901234567000")
    (True, False, False)
    """
    if not re.match(_LONG_INTEGER.encode(), text):
        return False
    number = float(text)
    return Decimal(text.decode().strip()) not in (Decimal(number), Decimal(repr(number)))


def rounded_integers(column: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the values that are integers that floats do not keep, shape ``(num_rows,)``.

    Parameters
    ----------
    column
        An Arrow array of bytes without nulls.
    """
    mask: Any = pc.match_substring_regex(column, _LONG_INTEGER).to_numpy(zero_copy_only=False).copy()
    rows = np.flatnonzero(mask)
    mask[rows] = [is_rounded(text) for text in column.take(rows).to_pylist()]
    return mask  # type: ignore[no-any-return]
