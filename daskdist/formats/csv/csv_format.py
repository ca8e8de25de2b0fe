"""Delimited text, CSV and TSV; a split is a byte range that is cut at rows.

The types of columns are inferred from a sample of the first file with rows, or set by the user, and apply to all
splits. pyarrow decodes: see `fields`. `quotes` finds the beginnings of rows if quoted fields may contain newlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.csv.dialect import (
    TABS,
    Dialect,
    Sampled,
    header_of,
    marked_again,
    sampled,
    without_unequal,
)
from daskdist.formats.csv.fields import ZONED, Fields, InvalidValue, arrow_type, kind_named, with_zone
from daskdist.formats.sampled import SampledFormat
from daskdist.storage.byte_ranges import GROWTH, ByteRange, ByteRanges, RangeRecords
from daskdist.storage.failures import DamagedPart, damage
from daskdist.storage.first_bytes import is_unicode, refuse_other_encoding
from daskdist.storage.first_file import FirstFile, differs_from_first, readable_files
from daskdist.storage.libraries import pa

# Files with at least this many columns have splits of the usual size.
_MANY_COLUMNS: Final = 1000
_GIVE_ENCODING: Final = "give encoding={!r}, or its right one"
# The inferred types of columns in which some texts that Arrow converts are errors.
_INFERRED: Final = ("int64", "uint64", "float64", "bool")


@dataclass(frozen=True)
class Schema:
    """The columns of files.

    Parameters
    ----------
    names
        The names of the columns, in the order of the first file.
    kinds
        The names of their types; see `fields`.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CsvSplit:
    """The part of a file that a split reads."""

    range: ByteRange
    names: tuple[str, ...]
    begin: int
    schema: Schema


@dataclass(frozen=True)
class Csv(SampledFormat):
    """The reader, with its options.

    Parameters
    ----------
    dialect
        The options of rows and fields.
    is_strict
        Whether a missing value without a replacement is an error in any column.
    schema
        The columns of all files; None to infer them from the first.
    """

    dialect: Dialect = field(default_factory=Dialect)
    is_strict: bool = False
    schema: Schema | None = None

    name = "csv"
    suffixes = (".csv", *TABS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.missing is not None and not isinstance(self.missing, Mapping):
            raise ArgumentError(f"missing is {self.missing!r:.80}; give a dict by column: {{'count': -1}}")
        if self.dtypes is not None and not isinstance(self.dtypes, Mapping):
            raise ArgumentError(f"dtypes is {self.dtypes!r:.80}; give a dict by column: {{'size': 'float64'}}")
        for column, dtype in (self.dtypes or {}).items():
            kind_named(dtype, column)

    def learned(self, paths: Sequence[str]) -> Csv:
        """Return this reader with the columns of the first file that has rows.

        Raises
        ------
        FileError
            No file has valid rows, or none has a header.
        """
        path, sampled_columns = paths[0], None
        for place, seen in readable_files(paths, self._sampled):
            if seen is not None and seen.has_rows:
                path, sampled_columns = place, seen
                break
            sampled_columns = sampled_columns or seen
        if sampled_columns is None:
            raise FileError(f"{paths[0]}: empty, so its columns are unknown; give header=[...] and dtypes={{...}}")
        return replace(self, schema=self._schema(sampled_columns, path))

    def spec(self, path: str) -> ElementSpec:
        self.storage.version(path)
        return self._spec(self._known(path), path)

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        schema = self._known(first.path)
        spec = self._spec(schema, first.path)
        if spec != first.spec:
            raise differs_from_first(path, spec, first)
        # Each column of a split has a fixed cost, however few rows there are.
        splits = self._ranges(path).list(path, file, 1 if len(schema.names) >= _MANY_COLUMNS else GROWTH)
        if not splits:
            return splits
        header = header_of(path, self._ranges(path), self.dialect.of(path))
        if header is None:
            return []
        names, begin = header
        if self.dialect.has_header and self.dialect.names is None:
            self._check_header(path, names, schema, first)
        else:
            names = schema.names
        return [replace(split, payload=CsvSplit(split.payload, names, begin, schema)) for split in splits]

    def read(self, split: Split) -> Block:
        part: CsvSplit = split.payload
        path = split.path or ""
        piece, fields = self._piece(split, part), self._fields(part, path)
        data = self._text(piece, split)
        with damage(split.label):
            try:
                table = fields.table(data)
            except pa.ArrowInvalid as error:
                raise self._conversion_error(split, fields, data, piece.offset, error) from error
            return self.tables.block(table, split.label, path)

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        part: CsvSplit = split.payload
        path = split.path or ""
        piece, fields = self._piece(split, part, is_lenient=True), self._fields(part, path)
        damaged: list[DamagedPart] = []
        data = self._text(piece, split, damaged)
        among_decoded = _numbers_without([row for row, *_ in damaged])
        with damage(split.label):
            data, unequal = without_unequal(data, fields, self.dialect.of(path))
            for number, num_fields, text in unequal:
                reason, row = f"{num_fields} fields, not {len(fields.names)}: {text!r:.80}", among_decoded(number)
                damaged.append(DamagedPart(row, f"row {row} of {split.label}", reason))
            table, invalid_values = fields.without_invalid(data)
            if invalid_values:
                _refuse_undecodable(split, fields, data, invalid_values)
                _refuse_other_type(split, fields, data, table)
            kinds = dict(fields.kinds)
            among_equal = _numbers_without([number for number, *_ in unequal])
            for invalid in invalid_values:
                row, reason = (
                    among_decoded(among_equal(invalid.row)),
                    f"column {invalid.column!r}: {_what(invalid, kinds)}",
                )
                damaged.append(DamagedPart(row, f"row {row} of {split.label}", reason))
            block = self.tables.block(table, split.label, path)
        return block, piece.with_rest(damaged, len(block), split)

    # --- columns ---

    def _known(self, path: str) -> Schema:
        if self.schema is not None:
            return self.schema
        sampled_columns = self._sampled(path)
        if sampled_columns is None:
            raise DamagedFileError(f"{path}: empty, so its columns are unknown; give header=[...] and dtypes={{...}}")
        return self._schema(sampled_columns, path)

    def _sampled(self, path: str) -> Sampled | None:
        dialect = self.dialect.of(path)
        return sampled(self._ranges(path), dialect, self.storage.version(path), self.sample_bytes)

    def _schema(self, sampled_columns: Sampled, path: str) -> Schema:
        names = sampled_columns.names
        for name in self.dtypes or {}:
            if name not in names:
                raise ArgumentError(f"dtypes: no column {name!r}; there are {', '.join(map(repr, names))}")
        kinds = []
        for name, (kind, full) in zip(names, sampled_columns.kinds, strict=True):
            if self.dtypes and name in self.dtypes:
                kinds.append(with_zone(kind_named(self.dtypes[name], name), full))
            else:
                # With a replacement for missing values, a column of integers need not become float.
                if full == "null":
                    full = "str" if isinstance((self.missing or {}).get(name), str) else kind
                kinds.append(full if name in (self.missing or ()) else kind)
        selected = self.tables.read_from(names)
        for name, kind in zip(names, kinds, strict=True):
            if kind == "bytes" and name in selected and name not in (self.dtypes or ()):
                row = sampled_columns.undecodable.get(name)
                where = "" if row is None else f", in row {row}"
                raise FileError(
                    f"{path}: column {name!r} is not {self.dialect.encoding}{where}; give its encoding, or "
                    f'dtypes={{{name!r}: "bytes"}}'
                )
        return Schema(names, tuple(kinds))

    def _spec(self, schema: Schema, path: str) -> ElementSpec:
        types = pa.schema([(name, arrow_type(kind)) for name, kind in zip(schema.names, schema.kinds, strict=True)])
        return self.tables.spec(types, path)

    def _fields(self, part: CsvSplit, path: str) -> Fields:
        kinds = dict(zip(part.schema.names, part.schema.kinds, strict=True))
        selected = self.tables.read_from(part.schema.names)
        # Read at least one column, as without any there would be no rows.
        replacements = self.missing or {}
        if not selected:
            selected = [part.schema.names[0]]
            kinds[selected[0]] = "bytes"
        has_null = {kind: kind.startswith(("float", "datetime", "timedelta")) for kind in set(kinds.values())}
        lacks_null = [name for name in selected if not has_null[kinds[name]]]
        required = selected if self.is_strict else lacks_null
        return Fields(
            part.names,
            tuple((name, kinds[name]) for name in selected),
            required=frozenset(name for name in required if replacements.get(name) is None),
            inferred=frozenset(
                name for name in selected if kinds[name] in _INFERRED and name not in (self.dtypes or ())
            ),
            **self.dialect.of(path).of_fields,
        )

    def _check_header(self, path: str, names: tuple[str, ...], schema: Schema, first: FirstFile) -> None:
        # Columns may come in another order, and there may be more if only some are selected.
        selected = schema.names if self.columns is None else self.tables.read_from(schema.names)
        have, known = frozenset(names), frozenset(schema.names)
        lacking = [name for name in selected if name not in have]
        extra = [name for name in names if name not in known] if self.columns is None else []
        if lacking or extra:
            problems = [f"lacks {', '.join(map(repr, lacking))}"] if lacking else []
            problems += [f"has {', '.join(map(repr, extra))} besides"] if extra else []
            raise FileError(
                f"{path}: of the columns of {first.path}, the first file, it {' and '.join(problems)}; leave the file "
                "out, or name the columns that all files have with columns=[...]"
            )

    # --- rows ---

    def _ranges(self, path: str) -> ByteRanges:
        dialect = self.dialect.of(path)
        is_text = is_unicode(dialect.encoding)
        return ByteRanges(dialect.framing, self.storage, self.compression, is_text=is_text)

    def _piece(self, split: Split, part: CsvSplit, *, is_lenient: bool = False) -> RangeRecords:
        piece = self._ranges(split.path or "").read(replace(split, payload=part.range), is_lenient=is_lenient)
        if piece.offset >= part.begin:
            return piece
        # The piece begins with the header, or with blank lines before it.
        length = min(part.begin - piece.offset, len(piece.data))
        return replace(piece, data=piece.data[length:], offset=piece.offset + length)

    def _text(self, piece: RangeRecords, split: Split, damaged: list[DamagedPart] | None = None) -> bytes:
        # Return the rows of a piece in UTF-8; with `damaged`, undecodable rows are added to it instead.
        dialect, data = self.dialect.of(split.path or ""), piece.data
        framing = dialect.exact_framing
        if framing.quote and not dialect.newlines_in_values and framing.has_quoted_newline(data):
            raise FileError(
                f"{split.label}: there is a newline in quotes, or a quote that is not closed; give "
                "newlines_in_values=True, or quote=None if quotes are just text here"
            )
        if dialect.is_utf8:
            return marked_again(data, piece.offset)
        try:
            return marked_again(data.decode(dialect.encoding).encode(), piece.offset)
        except UnicodeDecodeError as error:
            if damaged is None:
                begins, _ = framing.rows(data)
                row = int((begins <= error.start).sum()) - 1
                raise DamagedFileError(
                    f"{split.label}: its row {row} is not {dialect.encoding}: {error.reason}; give the right encoding"
                ) from None
        kept = []
        for row, (begin, end) in enumerate(zip(*framing.rows(data), strict=True)):
            row_bytes = data[begin:end]
            try:
                kept.append(row_bytes.decode(dialect.encoding).encode() + b"\n")
            except UnicodeDecodeError as error:
                damaged.append(DamagedPart(row, f"the row {row_bytes!r:.80} of {split.label}", str(error)))
        rows = (data[begin:end] for begin, end in zip(*framing.rows(data), strict=True))
        refuse_other_encoding(split.label, rows, dialect.encoding, _GIVE_ENCODING)
        return marked_again(b"".join(kept), piece.offset)

    # --- errors ---

    def _conversion_error(
        self, split: Split, fields: Fields, data: bytes, offset: int, error: Exception
    ) -> DamagedFileError:
        # Return the error for rows that are known to be invalid.
        dialect = self.dialect.of(split.path or "")
        begins, ends = dialect.exact_framing.rows(data, with_blank=dialect.keeps_blank)

        def where(row: int) -> str:
            # After a conversion from another encoding, positions in the file are unknown.
            place = f", at byte {offset + int(begins[row])}" if dialect.is_utf8 else ""
            return f"{split.label}: its row {row}{place}, "

        unequal = fields.unequal(data)
        if unequal:
            row = min(unequal)
            text = data[begins[row] : ends[row]].decode("utf-8", "replace")
            return DamagedFileError(
                f"{where(row)}has {unequal[row]} fields, not {len(fields.names)}: {text!r:.120}; fix it, or leave "
                'such rows out with Options(on_error="skip")'
            )
        _, invalid_values = fields.without_invalid(data)
        if not invalid_values:
            return DamagedFileError(f"{split.label}: {error}")
        invalid, kinds = invalid_values[0], dict(fields.kinds)
        name, kind = invalid.column, kinds[invalid.column]
        if invalid.value is None:
            stands = {"bytes": "b''", "str": "''", "bool": "False"}.get(kind, "0")
            advice = f"missing={{{name!r}: {stands}}} as its replacement"
            if kind not in ("str", "bytes", "bool"):
                advice += f", or dtypes={{{name!r}: 'float64'}}"
        elif kind == "str":
            advice = f'the right encoding, or dtypes={{{name!r}: "bytes"}}'
        elif name in fields.inferred and fields.is_text(invalid.value, kind):
            advice = f"dtypes={{{name!r}: 'str'}} to keep it as it is written, or {{{name!r}: {kind!r}}} for the number"
        elif kind == "bool" and name in fields.inferred and invalid.value.strip() in (b"0", b"1"):
            advice = f"dtypes={{{name!r}: 'bool'}} to read 0 and 1 as false and true, or {{{name!r}: 'str'}}"
        else:
            guessed = fields.guessed(data, name).removesuffix(" UTC")
            advice = f"dtypes={{{name!r}: {'str' if guessed in (kind, 'bytes') else guessed!r}}}"
        return DamagedFileError(f"{where(invalid.row)}column {name!r}: {_what(invalid, kinds)}; give {advice}")


def _refuse_undecodable(split: Split, fields: Fields, data: bytes, invalid_values: Sequence[InvalidValue]) -> None:
    # Raise an error if the text of a column has another encoding.
    kinds, undecodable = dict(fields.kinds), {invalid.column for invalid in invalid_values if invalid.value}
    for name in sorted(name for name in undecodable if kinds[name] == "str"):
        values = fields.texts(data).column(name).to_pylist()
        refuse_other_encoding(f"{split.label}: column {name!r}", values, "utf-8", _GIVE_ENCODING)


def _refuse_other_type(split: Split, fields: Fields, data: bytes, valid: Any) -> None:
    # Raise an error if all values of a column have another type, so that none is in the valid rows: that is another
    # schema, or a wrong type from the user, rather than damage.
    names = [name for name in valid.column_names if valid.column(name).null_count == valid.num_rows]
    column_of_other_type = fields.of_other_type(data, names) if names else None
    if column_of_other_type is None:
        return
    first, other, number = column_of_other_type
    name, kind, other = first.column, dict(fields.kinds)[first.column], other.removesuffix(ZONED)
    text = (first.value or b"").decode("utf-8", "replace")
    advice = "str" if other == kind.removesuffix(ZONED) else other
    raise FileError(
        f"{split.label}: column {name!r}: its {number} values, such as {text!r:.80}, are {other}, not {kind}; give "
        f"dtypes={{{name!r}: {advice!r}}}"
    )


def _numbers_without(left_out: list[int]) -> Callable[[int], int]:
    # Return a function from the number of a row to its number before rows were left out.
    shift = np.array(left_out, np.intp) - np.arange(len(left_out))
    return lambda row: row + int(np.searchsorted(shift, row, side="right"))


def _what(invalid: InvalidValue, kinds: Mapping[str, str]) -> str:
    kind = kinds[invalid.column]
    if invalid.value is None:
        return f"its value is missing, which {kind} cannot represent"
    text = repr(invalid.value) if kind == "str" else repr(invalid.value.decode("utf-8", "replace"))
    return f"{text:.80} is not {'UTF-8' if kind == 'str' else kind}"
