"""Conversion of rows of delimited fields to Arrow tables: the types of columns, and invalid values.

pyarrow decodes. A type has the name of the dtype it becomes: ``"int64"``, ``"str"``, ``"datetime64[s]"``, with ``"
UTC"`` appended if times have a zone.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError
from daskdist.formats.bisection import valid_parts
from daskdist.formats.csv.number_text import (
    FIRST_ROUNDED,
    is_number_text,
    is_rounded,
    may_hold_number_text,
    number_texts,
    rounded_integers,
)
from daskdist.formats.csv.quotes import BYTE_ORDER_MARK
from daskdist.storage.libraries import arrow_csv, pa, pc

NULLS: Final = ("", "#N/A", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null")
# In columns of text, the words above are text.
TEXT_NULLS: Final = ("",)

_NUMBERS: Final = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float32",
    "float64",
    "bool",
)
_TIMES: Final = {
    "datetime64[D]": "date32",
    **{f"datetime64[{unit}]": f"timestamp[{unit}]" for unit in ("s", "ms", "us", "ns")},
    **{f"timedelta64[{unit}]": f"time32[{unit}]" for unit in ("s", "ms")},
    **{f"timedelta64[{unit}]": f"time64[{unit}]" for unit in ("us", "ns")},
}
_TEXTS: Final = ("str", "bytes")
_TRUE: Final = ("true", "True", "TRUE")
_FALSE: Final = ("false", "False", "FALSE")
ZONED: Final = " UTC"
# The first number that int64 does not have.
_LONG: Final = 2.0**63
# A translation of non-ASCII bytes to question marks.
_MASKED: Final = bytes(range(128)) + b"?" * 128
# The largest block that Arrow can parse.
_MOST_BYTES: Final = 2**31 - 2**16


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """A value that does not have its column's type.

    Parameters
    ----------
    row
        The number of its row.
    column
        The name of its column.
    value
        The text of the value; None if it is missing and has no replacement.
    """

    row: int
    column: str
    value: bytes | None


@dataclass(frozen=True)
class Fields:
    """Options for converting rows to columns.

    Parameters
    ----------
    names
        The names of all columns of a file, in its order.
    kinds
        The names and types of the columns to read.
    delimiter, quote
        The character between fields, and the quote character; an empty quote for none.
    null_values, text_null_values
        The texts of missing values, in columns of text and bytes and in the others.
    quoted_nulls
        Whether they may be quoted in columns of text too; if not, a quoted one is text.
    required
        The columns in which a missing value is an error.
    keeps_blank
        Whether a blank line is a row with one empty field rather than skipped.
    inferred
        Columns of numbers and bools whose type was inferred: text of digits that is not a number (see `number_text`),
        and 0 and 1 among words such as true, are errors in them.
    """

    names: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]
    delimiter: str = ","
    quote: str = '"'
    null_values: tuple[str, ...] = NULLS
    text_null_values: tuple[str, ...] = TEXT_NULLS
    quoted_nulls: bool = False
    required: frozenset[str] = frozenset()
    keeps_blank: bool = False
    inferred: frozenset[str] = frozenset()

    def table(self, data: bytes) -> Any:
        """Convert complete rows to a table.

        Raises
        ------
        pyarrow.ArrowInvalid
            A row has too many or too few fields, a value does not have its type, or a required value is missing.
        """
        table = self._parsed(data, dict(self.kinds))
        for name, is_missing in self._missing_texts(data, table).items():
            table = table.set_column(table.schema.get_field_index(name), name, _nulled(table.column(name), is_missing))
        for name in self.required:
            if table.column(name).null_count:
                raise pa.ArrowInvalid(f"a value is missing in {name!r}")
        for name, is_text in self._number_texts(data, self._inferred_numbers).items():
            if is_text.any():
                raise pa.ArrowInvalid(f"a value in {name!r} is not written like a number")
        for name, is_text in self._rounded(data, table, self._inferred_floats).items():
            if is_text.any():
                raise pa.ArrowInvalid(f"an integer in {name!r} has no float")
        return table

    def texts(self, data: bytes) -> Any:
        """Convert complete rows to a table of bytes."""
        return self._parsed(data, dict.fromkeys(dict(self.kinds), "bytes"))

    def unequal(self, data: bytes) -> dict[int, int]:
        """Return the numbers of the rows with too many or too few fields, each with its number of fields."""
        counts: dict[int, int] = {}

        def note(row: Any) -> str:
            counts[row.number - 1] = row.actual_columns
            return "skip"

        # ASCII bytes are enough to count fields, and pyarrow must be able to decode the rows that it reports.
        masked = data.removeprefix(BYTE_ORDER_MARK).translate(_MASKED)
        if masked:
            self._read(masked, on_invalid=note, include_columns=[self.names[0]])
        return counts

    def without_invalid(self, data: bytes) -> tuple[Any, list[InvalidValue]]:
        """Return the rows whose values are valid, and for each other row its first invalid value."""
        texts = self.texts(data)
        missing_texts = self._missing_texts(data, texts)
        invalid_values: dict[int, InvalidValue] = {}
        columns: list[Any] = []
        for name, kind in self.kinds:
            column = _one_chunk(texts.column(name))
            try:
                columns.append(_one_chunk(self._parsed(data, {name: kind}).column(0)))
            except pa.ArrowInvalid:
                columns.append(None)
                for row in self._unfit(column, name, kind).tolist():
                    invalid_values.setdefault(row, InvalidValue(row, name, column[row].as_py()))
            if name in self.required:
                is_missing = missing_texts.get(name, False) if kind in _TEXTS else self._missing(column)
                for row in np.flatnonzero(is_missing).tolist():
                    invalid_values.setdefault(row, InvalidValue(row, name, None))
        is_text_by_name = self._number_texts(data, self._inferred_numbers)
        for name in self._inferred_floats:
            is_text_by_name[name] = self._is_rounded(texts.column(name)) | is_text_by_name.get(name, False)
        for name, is_text in is_text_by_name.items():
            for row in np.flatnonzero(is_text).tolist():
                invalid_values.setdefault(row, InvalidValue(row, name, texts.column(name)[row].as_py()))
        is_kept = np.ones(texts.num_rows, bool)
        is_kept[list(invalid_values)] = False
        kept = pa.array(is_kept)
        for place, (name, kind) in enumerate(self.kinds):
            if columns[place] is None:
                columns[place] = self._converted(texts.column(name).filter(kept).to_pylist(), name, kind)
            else:
                columns[place] = columns[place].filter(kept)
            if name in missing_texts:
                columns[place] = _nulled(columns[place], missing_texts[name][is_kept])
        table = pa.table(columns, names=[name for name, _ in self.kinds])
        return table, [invalid_values[row] for row in sorted(invalid_values)]

    def of_other_type(self, data: bytes, names: Collection[str]) -> tuple[InvalidValue, str, int] | None:
        """Return the first column whose values are all of another type: its first value, that type, and their number.

        One value may be damaged, so there are at least two.

        Parameters
        ----------
        data
            Complete rows.
        names
            The names of the columns to examine.
        """
        kinds = {name: kind for name, kind in self.kinds if name in names and kind not in _TEXTS}
        if not data or not kinds:
            return None
        texts, inferred = self.texts(data), dict(zip(self.names, self.infer(data), strict=True))
        for name, kind in kinds.items():
            _, other = inferred[name]
            num_values = int((~self._missing(texts.column(name))).sum())
            if num_values < 2 or other in (kind, "null"):
                continue
            _, invalid_values = replace(self, kinds=((name, kind),), required=frozenset()).without_invalid(data)
            if len(invalid_values) == num_values:
                return invalid_values[0], other, num_values
        return None

    def guessed(self, data: bytes, name: str) -> str:
        """Return the name of the type that fits all values of a column."""
        column = self._read(data, include_columns=[name]).column(0)
        return self._of_long_integers(data, name, column) or _kind_of(column)

    def infer(self, data: bytes) -> tuple[tuple[str, str], ...]:
        """Return the type of each column in some rows, and its type if missing values are replaced.

        With missing values, integers become float64 and bools text. A column of missing values only is float64, and
        ``"null"`` if they are replaced. A
        column of numbers is text if one of them is not written like a number, or is an integer that a column of floats
        does not keep: see `number_text`. Integers beyond int64 are uint64, or text where that does not have all.
        """
        table = self._read(data)
        types = pa.types
        # Quoted empty fields are text in columns without other values.
        empty = [col.name for col in table.schema if types.is_null(col.type)]
        if empty and not self.quoted_nulls:
            unquoted = self._read(data, self.null_values, include_columns=empty)
            for name in empty:
                table = table.set_column(table.schema.get_field_index(name), name, unquoted.column(name))
        numbers = [col.name for col in table.schema if types.is_integer(col.type) or types.is_floating(col.type)]
        texts = {name for name, is_text in self._number_texts(data, numbers).items() if is_text.any()}
        floats = [
            name for name in numbers if types.is_floating(table.field(name).type) or table.column(name).null_count
        ]
        rounded = {name for name, is_text in self._rounded(data, table, floats).items() if is_text.any()}
        kinds = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            kind = "str" if name in texts else self._of_long_integers(data, name, column)
            kind, full = (kind, kind) if kind else (_kind_of(column), _kind_of(column, is_full=True))
            if kind == "float64" and name in rounded:
                kind, full = "str", "str" if full == kind else full
            kinds.append((kind, full))
        return tuple(kinds)

    def _of_long_integers(self, data: bytes, name: str, column: Any) -> str | None:
        # Return the type of a column of integers beyond int64, which pyarrow reads as floats: different integers, such
        # as identifiers, would become the same float. None for other columns.
        if not pa.types.is_floating(column.type) or not pc.any(pc.greater_equal(pc.abs(column), _LONG)).as_py():
            return None
        texts = _one_chunk(self._parsed(data, {name: "bytes"}).column(0))
        texts = texts.filter(pa.array(~self._missing(texts)))
        if not pc.all(pc.match_substring_regex(texts, r"^[ \t]*-?[0-9]+[ \t]*$")).as_py():
            return None
        try:
            self._parsed(data, {name: "uint64"})
        except pa.ArrowInvalid:
            return "str"
        return "str" if column.null_count else "uint64"

    def _unfit(self, texts: Any, name: str, kind: str) -> Any:
        # Return the rows of values that do not have a type. pyarrow decides, and reports only one of many, so halves of
        # the distinct values are tried.
        known = texts.dictionary_encode()
        values = known.dictionary.to_pylist()
        nulls = {value.encode() for value in self.null_values}
        # A cheap test excludes most values.
        looks_like = _looks_like(kind)
        unfit = [place for place, value in enumerate(values) if not looks_like(value) and value not in nulls]
        places = sorted(set(range(len(values))).difference(unfit))

        def convert(start: int, stop: int) -> Any:
            return self._converted([values[place] for place in places[start:stop]], name, kind)

        parts = valid_parts(len(places), convert, (pa.ArrowInvalid,))
        unfit += [places[number] for number, _, error in parts if error is not None]
        return np.flatnonzero(np.isin(known.indices.to_numpy(), unfit))

    def _converted(self, values: Sequence[bytes], name: str, kind: str) -> Any:
        inferred = frozenset({_ALONE} if name in self.inferred else ())
        alone = Fields((_ALONE,), ((_ALONE, kind),), null_values=self.null_values, inferred=inferred)
        return _one_chunk(alone._parsed(_as_rows(values), {_ALONE: kind}).column(0))

    def _missing(self, column: Any) -> Any:
        # Return for each value of a column of another type than text whether it is missing. It may be given as bytes.
        column = _one_chunk(column)
        if pa.types.is_binary(column.type):
            return _is_in(column, self.null_values)
        return column.is_null().to_numpy(zero_copy_only=False) if column.null_count else np.zeros(len(column), bool)

    def _number_texts(self, data: bytes, names: Collection[str]) -> dict[str, Any]:
        # Return for each column of numbers which values are text of digits rather than numbers, such as 007.
        if not names or not may_hold_number_text(data, self.delimiter, self.quote):
            return {}
        texts = self._parsed(data, dict.fromkeys(names, "bytes"))
        masks = {}
        for name in names:
            column = _one_chunk(texts.column(name))
            is_text = number_texts(column)
            masks[name] = is_text & ~self._missing(column) if is_text.any() else is_text
        return masks

    @property
    def _inferred_numbers(self) -> list[str]:
        return [name for name, kind in self.kinds if kind != "bool" and name in self.inferred]

    @property
    def _inferred_floats(self) -> list[str]:
        return [name for name, kind in self.kinds if kind == "float64" and name in self.inferred]

    def is_text(self, value: bytes, kind: str) -> bool:
        """Return whether digits in a column of numbers of inferred type are text: see `number_text`."""
        return bool(is_number_text(value)) or (kind == "float64" and is_rounded(value))

    def _rounded(self, data: bytes, table: Any, names: Collection[str]) -> dict[str, Any]:
        # Return which values are integers that floats do not keep, for the columns in which one may be.
        large = []
        for name in names:
            numbers = pc.abs(table.column(name).cast(pa.float64(), safe=False))
            if pc.any(pc.greater_equal(numbers, FIRST_ROUNDED)).as_py():
                large.append(name)
        if not large:
            return {}
        texts = self._parsed(data, dict.fromkeys(large, "bytes"))
        return {name: self._is_rounded(texts.column(name)) for name in large}

    def _is_rounded(self, texts: Any) -> Any:
        return rounded_integers(_one_chunk(texts)) & ~self._missing(texts)

    def _missing_texts(self, data: bytes, table: Any) -> dict[str, Any]:
        # Return which values are missing, for the columns of text and bytes that lack any. They are read without nulls.
        columns = {name: table.column(name) for name, kind in self.kinds if kind in _TEXTS}
        missing = {
            name: _is_in(column, self.text_null_values)
            for name, column in columns.items()
            if self.text_null_values != TEXT_NULLS or pc.min(pc.binary_length(column)).as_py() == 0
        }
        missing = {name: is_missing for name, is_missing in missing.items() if is_missing.any()}
        quoted = [f"{self.quote}{value}{self.quote}".encode() for value in self.text_null_values]
        if not missing or self.quoted_nulls or not self.quote or not any(text in data for text in quoted):
            return missing
        # pyarrow tells quoted values from others only by their nulls.
        unquoted = self._read(data, self.text_null_values, column_types=dict.fromkeys(missing, arrow_type("bytes")))
        missing = {name: unquoted.column(name).is_null().to_numpy() for name in missing}
        return {name: is_missing for name, is_missing in missing.items() if is_missing.any()}

    def _parsed(self, data: bytes, kinds: Mapping[str, str]) -> Any:
        types = {name: arrow_type(kind) for name, kind in kinds.items()}
        if not data or data == BYTE_ORDER_MARK:
            return pa.table({name: pa.array([], kind) for name, kind in types.items()})
        bools = [name for name, kind in kinds.items() if kind == "bool"]
        stated = [name for name in bools if name not in self.inferred]
        if not 0 < len(stated) < len(bools):
            return self._read(data, digits_are_bools=bool(stated), column_types=types, include_columns=list(types))
        # Arrow reads the bools of all columns alike.
        others = self._read(data, column_types=types, include_columns=[name for name in types if name not in stated])
        tables = others, self._read(data, digits_are_bools=True, column_types=types, include_columns=stated)
        return pa.table({name: tables[name in stated].column(name) for name in types})

    def _read(
        self,
        data: bytes,
        text_null_values: Sequence[str] | None = None,
        *,
        on_invalid: Callable[[Any], str] | None = None,
        digits_are_bools: bool = False,
        **conversion: Any,
    ) -> Any:
        # With `text_null_values`, columns of text have nulls for these, unless they are quoted.
        if len(data) > _MOST_BYTES:
            raise ValueError(f"rows of {len(data)} bytes; give a smaller split-bytes, or newlines_in_values=False")
        quote = self.quote if self.quote and self.quote.encode() in data else False
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            # In one block, so that no row is cut, and without threads, as splits are read in parallel already.
            arrow_csv.ReadOptions(
                use_threads=False,
                block_size=len(data) + 1,
                column_names=list(self.names),
            ),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=quote,
                newlines_in_values=bool(quote),
                ignore_empty_lines=not self.keeps_blank,
                invalid_row_handler=on_invalid,
            ),
            arrow_csv.ConvertOptions(
                null_values=list(self.null_values if text_null_values is None else text_null_values),
                strings_can_be_null=text_null_values is not None,
                quoted_strings_can_be_null=text_null_values is None,
                true_values=[*_TRUE, *(["1"] if digits_are_bools else ())],
                false_values=[*_FALSE, *(["0"] if digits_are_bools else ())],
                **conversion,
            ),
        )


# The name of a column that is parsed alone.
_ALONE: Final = "value"


def fields_in(row: bytes, delimiter: str, quote: str, errors: str = "strict") -> list[str]:
    """Return the fields of one row, as text.

    Parameters
    ----------
    row
        The row.
    delimiter, quote
        The character between fields, and the quote character; an empty quote for none.
    errors
        The handling of bytes that are not UTF-8, as in `bytes.decode`.

    Raises
    ------
    ValueError
        The text is not UTF-8.
    """
    if len(row) > csv.field_size_limit():
        # Python's reader refuses fields of so many characters, by a limit that holds for the whole process.
        num_fields = Fields(("0",), (), delimiter, quote).unequal(row).get(0, 1)
        names = tuple(map(str, range(num_fields)))
        table = Fields(names, tuple((name, "bytes") for name in names), delimiter, quote).texts(row)
        return [column[0].as_py().decode(errors=errors) for column in table.columns]
    text = io.StringIO(row.removeprefix(BYTE_ORDER_MARK).decode(errors=errors), newline="")
    # Python's reader takes a fiftieth of pyarrow's time for many columns, and treats quotes in the same way.
    try:
        if quote:
            return next(csv.reader(text, delimiter=delimiter, quotechar=quote), [])
        return next(csv.reader(text, delimiter=delimiter, quoting=csv.QUOTE_NONE), [])
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _kind_of(column: Any, *, is_full: bool = False) -> str:
    types, kind = pa.types, column.type
    if types.is_null(kind):
        return "null" if is_full else "float64"
    if types.is_floating(kind):
        return "float64"
    if types.is_integer(kind):
        return "float64" if column.null_count and not is_full else "int64"
    if types.is_boolean(kind):
        return "str" if column.null_count and not is_full else "bool"
    if types.is_date(kind):
        return "datetime64[D]"
    if types.is_timestamp(kind):
        return f"datetime64[{kind.unit}]" + (ZONED if kind.tz else "")
    if types.is_time(kind):
        return f"timedelta64[{kind.unit}]"
    return "bytes" if types.is_binary(kind) else "str"


def kind_named(dtype: Any, column: str) -> str:
    """Return the name of a user's type for a column.

    Raises
    ------
    ArgumentError
        The type cannot be read.
    """
    try:
        parsed = np.dtype({"str": str, "bytes": bytes}.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        parsed = np.dtype("V")
    name = {"T": "str", "U": "str", "S": "bytes", "O": "bytes"}.get(parsed.kind) or str(parsed.newbyteorder("="))
    if name not in (*_NUMBERS, *_TIMES, "str", "bytes"):
        known = ", ".join(["str", "bytes", *_NUMBERS, "datetime64[D, s, ms, us or ns]", "timedelta64[s, ms, us or ns]"])
        raise ArgumentError(f"dtypes: {column!r} cannot be {dtype!r}; there are {known}")
    return name


@cache
def arrow_type(kind: str) -> Any:
    """Return the Arrow type of a type's name."""
    name = kind.removesuffix(ZONED)
    if name in _TIMES:
        maker, _, unit = _TIMES[name].rstrip("]").partition("[")
        zone = ("UTC",) if kind.endswith(ZONED) else ()
        return getattr(pa, maker)(*((unit,) if unit else ()), *zone)
    return {"str": pa.string(), "bytes": pa.binary()}.get(name) or pa.from_numpy_dtype(np.dtype(name))


def with_zone(kind: str, inferred: str) -> str:
    """Return the user's type of a column, with a time zone if its values have one."""
    return kind + ZONED if kind.startswith("datetime64") and inferred.endswith(ZONED) else kind


# Beginning of the type's name -> a necessary, but not sufficient, pattern of values.
_LOOKS: Final = {
    ("int", "uint"): rb"[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)",
    ("float",): rb"[+-]?([0-9.]+([eE][+-]?[0-9]+)?|[iInN][a-zA-Z0-9_()]*)",
    ("bool",): rb"[01]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]",
    ("datetime", "timedelta"): rb"[0-9][-+.:0-9TZ ]*",
}


def _looks_like(kind: str) -> Callable[[bytes], object]:
    look = next((look for names, look in _LOOKS.items() if kind.startswith(names)), rb"[\x00-\xff]*")
    return re.compile(rb"[ \t]*(" + look + rb")[ \t]*").fullmatch


def _is_in(column: Any, values: Sequence[str]) -> Any:
    # Return which texts are among some values.
    is_in = pc.is_in(column, pa.array([value.encode() for value in values], pa.binary()).cast(column.type))
    return _one_chunk(is_in).to_numpy(zero_copy_only=False)


def _nulled(column: Any, is_null: Any) -> Any:
    return pc.if_else(pa.array(is_null), pa.scalar(None, column.type), column)


def _as_rows(values: Sequence[bytes]) -> bytes:
    return b"".join(b'"' + value.replace(b'"', b'""') + b'"\n' for value in values)


def _one_chunk(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    array = column.combine_chunks()
    return array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks or [pa.array([], array.type)])
