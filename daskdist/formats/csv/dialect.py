"""Options of delimited text, and the header and types of columns from the beginning of a file."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, Final

from daskdist.config import in_bytes
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.csv.fields import NULLS, TEXT_NULLS, Fields, fields_in
from daskdist.formats.csv.quotes import BYTE_ORDER_MARK, Quotes
from daskdist.storage.byte_ranges import BrokenRecord, ByteRanges
from daskdist.storage.compression import has_suffix
from daskdist.storage.failures import damage
from daskdist.storage.filesystem import Version
from daskdist.storage.first_bytes import is_erased

TABS: Final = (".tsv", ".tab")

# The number of bytes to search for a header at first.
_HEAD_BYTES: Final = 2**12
_LINE_END: Final = re.compile(rb"[\r\n]")


@dataclass(frozen=True)
class Dialect:
    """The options of rows and fields.

    Parameters
    ----------
    delimiter
        The character between fields; None for a tab in files whose names end in ``.tsv`` or ``.tab``, else a comma.
    quote
        The quote character, or None.
    newlines_in_values
        Whether a quoted field may contain newlines.
    encoding
        The encoding of the text.
    has_header
        Whether a file begins with the names of its columns.
    names
        The names of columns, which override a header; ``()`` for ``c0``, ``c1`` and so on; None for those of the
        header, or without one like ``()``.
    null_values, text_null_values, quoted_nulls
        The texts of missing values: see `Fields`.
    keeps_blank
        Whether a blank line is a row with one empty field rather than skipped.
    comment
        The beginning of lines to skip before the header or the first row; None for none.
    """

    delimiter: str | None = None
    quote: str | None = '"'
    newlines_in_values: bool = True
    encoding: str = "utf-8"
    has_header: bool = True
    names: tuple[str, ...] | None = None
    null_values: tuple[str, ...] = NULLS
    text_null_values: tuple[str, ...] = TEXT_NULLS
    quoted_nulls: bool = False
    keeps_blank: bool = False
    comment: str | None = None

    def __post_init__(self) -> None:
        if self.comment is not None and not (isinstance(self.comment, str) and self.comment.strip()):
            raise ArgumentError(f"comment is {self.comment!r}; give the beginning of comment lines, such as '#'")
        for option, mark in (("delimiter", self.delimiter), ("quote", self.quote)):
            if mark is None:
                continue
            if not isinstance(mark, str) or len(mark) != 1 or not mark.isascii() or mark in "\r\n\0":
                raise ArgumentError(f"{option} is {mark!r}; give one ASCII character, or None")
        if self.delimiter is not None and self.delimiter == self.quote:
            raise ArgumentError(f"delimiter and quote are both {self.quote!r}; give quote=None if there are no quotes")
        twice = _twice(self.names or ())
        if twice is not None:
            raise ArgumentError(f"header: two columns are called {twice!r}; give each a different name")
        self._check_encoding()

    def _check_encoding(self) -> None:
        try:
            if self.is_utf8:
                return
            marks = "".join(["\r\n", self.delimiter or ",\t", self.quote or ""])
            is_plain = marks.encode(self.encoding) == marks.encode()
            non_ascii = "".join(map(chr, range(0x80, 0xD800))).encode(self.encoding, "ignore") if is_plain else b""
        # Some of Python's codecs are not for text, and raise other errors.
        except (LookupError, TypeError, ValueError):
            raise ArgumentError(f"encoding is {self.encoding!r}, which Python does not know for text") from None
        if not is_plain or any(mark in non_ascii for mark in marks.encode()):
            raise ArgumentError(
                f"encoding is {self.encoding!r}, in which a newline, delimiter or quote is not a unique single "
                "byte; rewrite the files in UTF-8"
            )

    @property
    def is_utf8(self) -> bool:
        """True if the text is UTF-8, Arrow's encoding."""
        return codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")

    def in_utf8(self, data: bytes) -> bytes:
        """Return text as UTF-8, with replacement characters for undecodable bytes."""
        return data if self.is_utf8 else data.decode(self.encoding, "replace").encode()

    @property
    def of_fields(self) -> dict[str, Any]:
        """The options of `Fields`."""
        return {
            "delimiter": self.delimiter or ",",
            "quote": self.quote or "",
            "null_values": self.null_values,
            "text_null_values": self.text_null_values,
            "quoted_nulls": self.quoted_nulls,
            "keeps_blank": self.keeps_blank,
        }

    def of(self, path: str) -> Dialect:
        """Return the dialect of one file, with its delimiter."""
        if self.delimiter is not None:
            return self
        return replace(self, delimiter="\t" if has_suffix(path, TABS) else ",")

    @property
    def framing(self) -> Quotes:
        """The framing of rows."""
        return replace(self.exact_framing, newlines=self.newlines_in_values)

    @property
    def exact_framing(self) -> Quotes:
        """The framing of rows with newlines allowed in values, for reading from the beginning."""
        return Quotes((self.delimiter or ",").encode(), (self.quote or "").encode())


def marked_again(data: bytes, offset: int) -> bytes:
    """Double a byte-order mark that is text, as readers drop one at the beginning.

    Parameters
    ----------
    data
        Rows in UTF-8.
    offset
        Their offset in the file, at whose beginning the mark is no text.
    """
    return BYTE_ORDER_MARK + data if offset and data.startswith(BYTE_ORDER_MARK) else data


def without_unequal(data: bytes, fields: Fields, dialect: Dialect) -> tuple[bytes, list[tuple[int, int, str]]]:
    """Return the rows with the right number of fields, and the number, number of fields and text of each other row."""
    unequal = fields.unequal(data)
    if not unequal:
        return data, []
    begins, ends = dialect.exact_framing.rows(data, with_blank=dialect.keeps_blank)
    kept, notes, at = [], [], 0
    for row in sorted(unequal):
        notes.append((row, unequal[row], data[begins[row] : ends[row]].decode("utf-8", "replace")))
        kept.append(data[at : begins[row]])
        at = int(begins[row + 1]) if row + 1 < len(begins) else len(data)
    return b"".join([*kept, data[at:]]), notes


def _twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


@dataclass(frozen=True)
class Sampled:
    """The columns of a file.

    Parameters
    ----------
    names
        The names of the columns.
    kinds
        The type of each column, and its type if missing values are replaced.
    has_rows
        Whether there are rows from which types were inferred.
    undecodable
        The number of the first row whose value is not text in the encoding, by column.
    """

    names: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]
    has_rows: bool
    undecodable: Mapping[str, int] = field(default_factory=dict)


@lru_cache(maxsize=64)
def sampled(ranges: ByteRanges, dialect: Dialect, version: Version, sample_bytes: int) -> Sampled | None:
    """Infer the columns of a file from its first rows; None if it is empty and there are no names.

    Raises
    ------
    FileError
        The header or the first row is invalid.
    """
    path, framing = version.path, dialect.exact_framing
    header = header_of(path, ranges, dialect)
    names, begin = header or (dialect.names or (), 0)
    without_rows = Sampled(names, (("str", "str"),) * len(names), False) if names else None
    if header is None:
        return without_rows
    while True:
        sample, is_all = _rows_from(path, ranges, framing, begin, sample_bytes)
        data = dialect.in_utf8(sample)
        first = _first_row(data, framing, is_end=True)
        if first is None:
            return without_rows
        if dialect.has_header and dialect.names is None and dialect.comment is None:
            _refuse_comment(path, names[0], len(names), data, dialect)
        with damage(path, "its first row cannot be read"):
            num_fields = _num_fields(first[0], dialect)
        names = names or _numbered(num_fields)
        fields = Fields(names, (), **dialect.of_fields)
        with damage(path):
            rows, _ = without_unequal(data, fields, dialect)
        if rows.strip(BYTE_ORDER_MARK):
            break
        if is_all or sample_bytes >= in_bytes("max-record-bytes"):
            raise _no_row_fits(path, names, first[0], num_fields, dialect)
        sample_bytes *= 16
    with damage(path):
        kinds = fields.infer(rows)
        binary = tuple((name, "str") for name, (kind, _) in zip(names, kinds, strict=True) if kind == "bytes")
        undecodable: dict[str, int] = {}
        if binary and rows == data:
            for invalid in replace(fields, kinds=binary).without_invalid(data)[1]:
                undecodable.setdefault(invalid.column, invalid.row)
        return Sampled(names, kinds, True, undecodable)


def _no_row_fits(path: str, names: Sequence[str], row: bytes, num_fields: int, dialect: Dialect) -> FileError:
    # Return the error for a file whose rows all have another number of fields than there are names.
    text = row.decode("utf-8", "replace")
    if dialect.names is not None:
        advice = f"give {num_fields} names, or the right delimiter"
    else:
        every = [*names, *_numbered(num_fields)[len(names) :]][:num_fields]
        advice = (
            f"if rows are right, give new_names={_shown(every)}; if the line with {names[0]!r:.40} is no header, skip "
            f"it by comment={names[0][:40]!r}; or give the right delimiter"
        )
    return FileError(
        f"{path}: no row has the {len(names)} fields of its {'names' if dialect.names else 'header'}: the first, "
        f"{text.rstrip()!r:.80}, has {num_fields}; {advice}"
    )


def _different(names: Sequence[str]) -> list[str]:
    # Return the names with a number after each that occurred before.
    different: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in count(2))
        different.append(
            name if name not in different else next(other for other in others if other not in {*names, *different})
        )
    return different


def _shown(names: Sequence[str]) -> str:
    return repr(list(names)) if len(names) <= _MOST_SHOWN else f"{list(names[:2])!r}"[:-1] + ", ...]"


# The most columns whose names an error lists.
_MOST_SHOWN: Final = 20


def _num_fields(row: bytes, dialect: Dialect) -> int:
    return len(fields_in(row, dialect.delimiter or ",", dialect.quote or "", "replace"))


def _numbered(num_columns: int) -> tuple[str, ...]:
    return tuple(f"c{number}" for number in range(num_columns))


def header_of(path: str, ranges: ByteRanges, dialect: Dialect) -> tuple[tuple[str, ...], int] | None:
    """Return the names of the columns, ``()`` if nothing says them, and the offset after the header and comments.

    None if the file should have a header and is empty.

    Raises
    ------
    FileError
        The header cannot be read, or has invalid names.
    """
    if not dialect.has_header and dialect.comment is None:
        return dialect.names or (), 0
    first, num_bytes = _first_of(path, ranges, dialect)
    if not dialect.has_header:
        return dialect.names or (), num_bytes if first is None else first[1] - len(first[0])
    if first is None:
        return None
    row = dialect.in_utf8(first[0])
    with damage(path, f"its header, {first[0]!r:.80}, cannot be read; give its encoding"):
        if dialect.names is not None:
            return dialect.names or _numbered(_num_fields(row, dialect)), first[1]
        try:
            names = tuple(fields_in(row, dialect.delimiter or ",", dialect.quote or ""))
        except UnicodeDecodeError as error:
            if is_erased(row):
                raise
            raise FileError(
                f"{path}: its header, {first[0]!r:.80}, is not {dialect.encoding}: {error.reason}; give its encoding"
            ) from None
    twice = _twice(names)
    if twice is not None:
        raise FileError(
            f"{path}: two columns are called {twice!r}; fix it, or give all columns new names: new_names="
            f"{_shown(_different(names))}"
        )
    return names, first[1]


def _first_of(path: str, ranges: ByteRanges, dialect: Dialect) -> tuple[tuple[bytes, int] | None, int]:
    # Return the first row of a file that is neither blank nor a comment, with its end, and the number of bytes read.
    num_bytes = _HEAD_BYTES
    while True:
        data, is_all = ranges.head(path, num_bytes)
        first = _first_row(data, dialect.exact_framing, is_end=is_all, path=path, comment=dialect.comment)
        if first is not None or is_all:
            return first, len(data)
        num_bytes = _more(path, num_bytes)


def _more(path: str, num_bytes: int) -> int:
    # Return how much of a file to read if no row ends in so many bytes.
    if num_bytes >= in_bytes("max-record-bytes"):
        raise DamagedFileError(f"{path}: no row ends in its first {num_bytes} bytes; is it text with this delimiter?")
    return num_bytes * 16


def _refuse_comment(path: str, first_name: str, num_names: int, data: bytes, dialect: Dialect) -> None:
    # Detect a comment taken for the header: the first row that is no comment has another number of fields.
    mark = next((mark for mark in _COMMENTS if first_name.startswith(mark)), None)
    if mark is None:
        return
    for begin, end in list(zip(*dialect.exact_framing.rows(data), strict=True))[:_MOST_COMMENTS]:
        row = data[begin:end]
        if row.startswith(mark.encode()):
            continue
        with damage(path, "its first row cannot be read"):
            num_fields = _num_fields(row, dialect)
        if num_fields != num_names:
            raise FileError(
                f"{path}: its first line begins with {first_name!r:.60}, which looks like a comment rather than the "
                f"header of rows of {num_fields} fields; give comment={mark!r} to skip such lines at the beginning"
            )
        return


# The beginnings of comment lines, and the number of lines to examine.
_COMMENTS: Final = ("#", "//", "%", ";")
_MOST_COMMENTS: Final = 1000


def _rows_from(path: str, ranges: ByteRanges, framing: Quotes, begin: int, sample_bytes: int) -> tuple[bytes, bool]:
    # Return some complete rows, from the beginning of the first, and whether they are all.
    while True:
        data, is_all = ranges.head(path, begin + sample_bytes)
        data = marked_again(data[begin:], begin)
        begins, _ = framing.rows(data)
        if is_all or len(begins) > 1:
            break
        sample_bytes = _more(path, sample_bytes)
    # The last row may be incomplete; if it is damaged, reading it will raise.
    is_whole = is_all and len(framing.quote_positions(data)) % 2 == 0
    return (data if is_whole or not len(begins) else data[: begins[-1]]), is_all


def _first_row(
    data: bytes, framing: Quotes, *, is_end: bool, path: str = "", comment: str | None = None
) -> tuple[bytes, int] | None:
    # Return the first row that is neither blank nor a comment, and its end; None if it is incomplete or missing.
    start = len(data) - len(data.removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n"))
    while comment is not None and data.startswith(comment.encode(), start):
        line_end = _LINE_END.search(data, start)
        if line_end is None:
            return None
        start = len(data) - len(data[line_end.start() :].lstrip(b"\r\n"))
    if start == len(data):
        return None
    try:
        end = framing.boundary(data[start:], 1, is_end=is_end, may_have_mark=True)
    except BrokenRecord as error:
        raise DamagedFileError(f"{path}: {error.reason}") from None
    return None if end is None else (data[start : start + end], start + end)
