"""JSON: each object is an element; a split is a byte range of lines, otherwise a file.

pyarrow decodes lines by a schema, inferred from a sample of the first file and the user's types, which applies to all
splits. In a file that is an array, or whose objects span lines, Python's decoder finds the objects, which are then
decoded in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.bisection import first_invalid, valid_parts
from daskdist.formats.json.json_types import (
    Kind,
    becomes,
    check_dtypes,
    common,
    find_invalid,
    find_other_type,
    has_nulls,
    kind_of,
    refuse_problem,
    schema_of,
    typed,
)
from daskdist.formats.sampled import SampledFormat
from daskdist.formats.table_files import typed_by_replacements
from daskdist.formats.text import Lines
from daskdist.storage.byte_ranges import GROWTH, ByteRange, ByteRanges
from daskdist.storage.failures import DamagedPart, damage
from daskdist.storage.filesystem import Storage, Version
from daskdist.storage.first_bytes import refuse_other_encoding
from daskdist.storage.first_file import FirstFile, differs_from_first, readable_files
from daskdist.storage.libraries import pa, pj

_MARK: Final = b"\xef\xbb\xbf"
# The number of bytes at the beginning of a file that decide whether its objects are lines.
_HEAD_BYTES: Final = 2**12
# The number of bytes to search for a first object if the sample has none.
_MOST_BYTES: Final = 2**28
# The number of files to look into for the type of a field.
_MOST_FILES: Final = 16
# The largest block of the decoder, in bytes.
_BLOCK_BYTES: Final = 2**31 - 1
_SPACE: Final = re.compile(r"[ \t\n\r]*")
# A record that is null: as the first record, and as a later one.
_NOTHING: Final = re.compile(rb"[ \t\n\r]*null")
_NOTHING_AFTER: Final = re.compile(rb"\n[ \t\r]*null")


@dataclass(frozen=True)
class WholeFile:
    """The framing of a file that is a single record."""

    is_local = False

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        return 0 if not at_least else len(data) if is_end else None


@dataclass(frozen=True, slots=True)
class JsonSplit:
    """The part of a file that a split reads.

    Parameters
    ----------
    range
        The byte range.
    are_lines
        Whether its objects are lines.
    schema
        The serialized Arrow schema of all files.
    """

    range: ByteRange
    are_lines: bool
    schema: bytes


@dataclass(frozen=True)
class Json(SampledFormat):
    """The reader, with its options.

    Parameters
    ----------
    dtypes
        The types of some fields: a dtype, ``[dtype]`` for lists, a dict by field for objects, or an Arrow type.
    lines
        Whether files have one object per line; None to decide by the beginning of each.
    schema
        The serialized Arrow schema of all files; None to infer it from the first.
    """

    lines: bool | None = None
    schema: bytes | None = None

    name = "json"
    suffixes = (".json", ".jsonl", ".ndjson", ".jsonlines")

    def __post_init__(self) -> None:
        if self.lines not in (None, True, False):
            raise ArgumentError(f"lines is {self.lines!r}; give True, False, or None to decide by the file")
        super().__post_init__()
        check_dtypes(self.dtypes)

    def learned(self, paths: Sequence[str]) -> Json:
        """Return this reader with the schema of the first file that has an object.

        Fields of which all sampled values are null have the type that they have in the next files.
        """
        user_dtypes = self.dtypes or {}
        first, whole = None, None
        for number, (path, kind) in enumerate(readable_files(paths, self._kind)):
            first = first or path
            if kind.fields:
                whole = kind if whole is None else typed(whole, kind)
                unknown = [name for name, item in whole.fields if has_nulls(item) and name not in user_dtypes]
                if number >= _MOST_FILES or not unknown:
                    break
        if whole is None:
            return replace(self, schema=self._schema_of(first or paths[0]))
        return replace(self, schema=self._serialized(whole))

    def spec(self, path: str) -> ElementSpec:
        return self._spec(self._schema_of(path), path)

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        schema = self._schema_of(first.path)
        spec = self._spec(schema, first.path)
        if spec != first.spec:
            raise differs_from_first(path, spec, first)
        are_lines = self._are_lines(path)
        ranges = self._ranges(are_lines)
        if are_lines:
            splits = ranges.list(path, file, GROWTH)
        else:
            version = self.storage.version(path)
            whole = ByteRange(version, ranges.compression_of(path), 0, 0, version.num_bytes)
            splits = [Split(f"{path} as a whole", whole, None, version.num_bytes, file, path)]
        return [replace(split, payload=JsonSplit(split.payload, are_lines, schema)) for split in splits]

    def read(self, split: Split) -> Block:
        objects = self._objects(split, is_lenient=False)
        try:
            return self._block(objects.data, split)
        except pa.ArrowException as error:
            raise self._complaint(objects, split, error) from None

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        objects = self._objects(split, is_lenient=True)
        kept, damaged = self._valid_objects(objects, split)
        block = Block.concat(kept, split.label) if kept else self._block(b"", split)
        for where, reason in objects.rest:
            damaged.append(DamagedPart(len(block) + len(damaged), where, reason, None))
        return block, damaged

    def _ranges(self, are_lines: bool) -> ByteRanges:
        return ByteRanges(Lines() if are_lines else WholeFile(), self.storage, self.compression, is_text=True)

    # --- the contents of a file ---

    def _are_lines(self, path: str) -> bool:
        if self.lines is not None:
            return self.lines
        head, _ = self._ranges(True).head(path, _HEAD_BYTES)
        head = head.removeprefix(_MARK).lstrip()
        first, newline, rest = head.partition(b"\n")
        if head.startswith(b"[") or not newline:
            return not head.startswith(b"[")
        # An object spans lines if the first line is the beginning of one, and the second is not.
        return not _is_open(first) or rest.lstrip().startswith(b"{")

    def _kind(self, path: str) -> Kind:
        version = self.storage.version(path)
        return _sampled(self.storage, version, self.compression, self._are_lines(path), self.sample_bytes)

    def _schema_of(self, path: str) -> bytes:
        if self.schema is not None:
            self.storage.version(path)
            return self.schema
        kind = self._kind(path)
        if not kind.fields and not self.dtypes:
            head, _ = self._ranges(True).head(path, _HEAD_BYTES)
            raise DamagedFileError(
                f"{path}: there is no object from which types can be inferred: {_likeness(head)}; if objects come "
                "later, give dtypes={field: dtype}"
            )
        return self._serialized(kind)

    def _serialized(self, kind: Kind) -> bytes:
        return bytes(typed_by_replacements(schema_of(kind, self.dtypes), self.missing).serialize())

    def _spec(self, schema: bytes, path: str) -> ElementSpec:
        fields = _parsed(schema)
        for name in self.tables.read_from(fields.names):
            refuse_problem(fields.field(name), path)
        return self.tables.spec(fields, path)

    # --- from bytes to rows ---

    def _objects(self, split: Split, *, is_lenient: bool) -> DecodeObjects:
        part: JsonSplit = split.payload
        piece = self._ranges(part.are_lines).read(replace(split, payload=part.range), is_lenient=is_lenient)
        rest = [(part.where, part.reason) for part in piece.with_rest([], 0, split)]
        data = piece.data.removeprefix(_MARK) if piece.offset == 0 else piece.data
        if part.are_lines:
            return DecodeObjects(data, "line", rest)
        objects, problem = _found(data)
        if problem is not None:
            if not is_lenient:
                raise DamagedFileError(f"{split.label}: object {len(objects)} of it is not JSON: {problem}")
            rest.append((f"object {len(objects)} of {split.label}, and what comes after", problem))
        return DecodeObjects(b"\n".join(objects), "object", rest)

    def _block(self, data: bytes, split: Split) -> Block:
        table = self._decoded(data, _parsed(split.payload.schema))
        with damage(split.label):
            return self.tables.block(table, split.label, split.path or "")

    def _chosen(self, schema: Any) -> tuple[Any, str]:
        # Return the schema for decoding, and the decoder's handling of fields that are not in it.
        names = self.tables.read_from(schema.names)
        if self.columns is None or any(_has_objects(schema.field(name).type) for name in names):
            # "ignore" would silently drop unknown fields within nested objects too.
            return schema, "error"
        # Columns that are not read may have any type. Read at least one, as without any there would be no rows.
        return pa.schema([schema.field(name) for name in names] or [pa.field("", pa.null())]), "ignore"

    def _decoded(self, data: bytes, schema: Any) -> Any:
        schema, unexpected = self._chosen(schema)
        if not data.strip():
            return schema.empty_table()
        if _NOTHING.match(data) or (b"null" in data and _NOTHING_AFTER.search(data)):
            # The decoder takes null for an object of nulls, and crashes if it is the first record.
            raise pa.ArrowInvalid("null is not an object")
        table = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=min(len(data) + 1, _BLOCK_BYTES)),
            pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
        )
        # The decoder does not check that text is UTF-8.
        table.validate(full=True)
        num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if table.num_rows != num_lines and table.num_rows != sum(
            not line.isspace() for line in data.split(b"\n") if line
        ):
            # Objects that span lines are decoded only if no range ends within one, which is not reliable.
            raise pa.ArrowInvalid(f"there are {table.num_rows} objects in {num_lines} lines")
        return table

    def _complaint(self, objects: DecodeObjects, split: Split, error: Exception) -> DamagedFileError:
        # Return the error for the first line that cannot be read.
        schema, lines = _parsed(split.payload.schema), objects.data.split(b"\n")
        start = first_invalid(len(lines), lambda start, stop: self._failure(lines[start:stop], schema) is None)
        where = f"{split.label}: its {objects.unit} {start}, {lines[start][:80]!r}"
        reason = self._reason(lines[start], schema, where) or str(self._failure([lines[start]], schema) or error)
        return DamagedFileError(f"{where}: {reason}")

    def _failure(self, lines: Sequence[bytes], schema: Any) -> Exception | None:
        try:
            self._decoded(b"\n".join(lines), schema)
        except pa.ArrowException as error:
            return error  # type: ignore[no-any-return]
        return None

    def _reason(self, line: bytes, schema: Any, where: str) -> str | None:
        # Return why a line cannot be read, by decoding it with Python, which names the field. A field that no sampled
        # record has is no damage, but an error.
        try:
            value = json.loads(line)
        except RecursionError:
            return "it is nested too deeply"
        except ValueError as error:
            return f"it is not JSON: {error}; for objects that span lines give lines=False"
        if not isinstance(value, dict):
            return "it is not an object"
        schema, unexpected = self._chosen(schema)
        if unexpected == "ignore":
            value = {name: item for name, item in value.items() if name in schema.names}
        try:
            problem = find_invalid(value, pa.struct(list(schema)))
        except FileError as error:
            raise FileError(f"{where}: {error}") from None
        if problem is not None:
            return problem
        for field in schema:
            if not becomes(value.get(field.name), field.type):
                return f"the field {field.name!r} is {value.get(field.name)!r:.60}, which does not become {field.type}"
        return None

    def _refuse_other_schema(self, lines: Sequence[bytes], broken: Collection[int], split: Split) -> None:
        # Raise an error if all text has another encoding, or all values of a field have another type, or all objects
        # lack it: that is another schema, or a wrong type from the user, rather than damage. Other lines than the
        # broken ones are read only as far as they lack the field.
        broken_lines = [lines[number] for number in sorted(broken)]
        others = [line for number, line in enumerate(lines) if number not in broken and line.strip()]
        if all(line.isascii() for line in others):
            refuse_other_encoding(split.label, broken_lines, "utf-8", "rewrite it in UTF-8; it may be {}")
        schema, _ = self._chosen(_parsed(split.payload.schema))
        objects = list(_objects_in(broken_lines))
        for field in schema:
            if not others and len(objects) > 1 and not any(field.name in value for value in objects):
                self._refuse_lacking(field.name, split)
            other_type = find_other_type(objects, field)
            if other_type is None:
                continue
            path, problem = other_type
            if all(_value_at(value, path) is None for value in _objects_in(others)):
                raise FileError(f"{split.label}: {problem}")

    def _refuse_lacking(self, name: str, split: Split) -> None:
        # Raise an error if a field that all objects lack cannot be null.
        try:
            replace(self, columns=[name])._block(b"{}", split)
        except DamagedFileError as error:
            raise FileError(f"{error}; all objects lack it") from None

    def _valid_objects(self, objects: DecodeObjects, split: Split) -> tuple[list[Block], list[DamagedPart]]:
        # Separate the valid objects from the broken ones.
        lines = objects.data.split(b"\n")
        kept, damaged, broken = list[Block](), list[DamagedPart](), set[int]()
        num_kept = 0

        def read(start: int, stop: int) -> Block:
            return self._block(b"\n".join(lines[start:stop]), split)

        for number, block, error in valid_parts(len(lines), read, (pa.ArrowException, DamagedFileError)):
            if error is not None:
                schema = _parsed(split.payload.schema)
                where = f"{objects.unit} {number} of {split.label}"
                reason = None if isinstance(error, DamagedFileError) else self._reason(lines[number], schema, where)
                damaged.append(DamagedPart(num_kept + len(damaged), where, reason or str(error)))
                broken.add(number)
            elif len(block):
                kept.append(block)
                num_kept += len(block)
        if len(broken) > 1:
            self._refuse_other_schema(lines, broken, split)
        return kept, damaged


@dataclass(frozen=True, slots=True)
class DecodeObjects:
    """Objects to decode.

    Parameters
    ----------
    data
        One object per line.
    unit
        The word for an object in messages.
    rest
        The name of what comes after and cannot be read, and the reason, if there is any.
    """

    data: bytes
    unit: str
    rest: Sequence[tuple[str, str]] = ()


@lru_cache(maxsize=64)
def _parsed(schema: bytes) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(schema))


@lru_cache(maxsize=64)
def _sampled(storage: Storage, version: Version, compression: str | None, are_lines: bool, sample_bytes: int) -> Kind:
    # Infer the common kind of the first objects of a file. Broken ones raise when they are read.
    ranges = ByteRanges(Lines(), storage, compression, is_text=True)
    while True:
        data, is_all = ranges.head(version.path, sample_bytes)
        data = data.removeprefix(_MARK)
        if are_lines:
            lines = data[: len(data) if is_all else data.rfind(b"\n") + 1].split(b"\n")
        else:
            lines, _ = _found(data)
        whole = Kind("struct")
        for line in lines:
            whole = common(whole, _kind_of_line(line))
        if whole.fields or is_all or sample_bytes >= _MOST_BYTES:
            return whole
        sample_bytes *= 4


def _kind_of_line(line: bytes) -> Kind:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = {}
    return kind_of(value if isinstance(value, dict) else {})


def _objects_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _value_at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _likeness(head: bytes) -> str:
    # Describe the beginning of a file without objects.
    text = head.removeprefix(_MARK).strip()
    line = text.partition(b"\n")[0].strip()
    if not text:
        return "it is empty"
    begins = f"it begins with {line[:60]!r}"
    if text.startswith(b"<"):
        return f"{begins}, like HTML or XML, such as the error page of a server"
    for part in (line, text):
        with suppress(ValueError, RecursionError):
            value = json.loads(part)
            return f"{begins}, which is JSON, but {'without fields' if isinstance(value, dict) else 'not an object'}"
    if re.match(rb"[{\[]\s*\{?\s*'", text):
        return f"{begins}, like a Python dict, but JSON needs double quotes: write it with json.dumps"
    if not text.startswith((b"{", b"[")) and (b"," in line or b"\t" in line):
        return f"{begins}, like delimited text, which read_csv reads"
    return f"{begins}, which is not JSON"


def _is_open(line: bytes) -> bool:
    # Return whether a line is the beginning of JSON that continues on the next.
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):
        return False
    return False


def _found(data: bytes) -> tuple[list[bytes], str | None]:
    # Return the objects of an array or a sequence, each as a line, and the reason why the rest is invalid.
    text = data.decode("utf-8", "surrogateescape")
    at, decoder, objects = _after_space(text, 0), json.JSONDecoder(), list[bytes]()
    is_array = text.startswith("[", at)
    at = _after_space(text, at + is_array)
    try:
        while at < len(text) and not (is_array and text.startswith("]", at)):
            if is_array and objects:
                if not text.startswith(",", at):
                    return objects, f"at character {at}, ',' or ']' is expected after an object"
                at = _after_space(text, at + 1)
            _, end = decoder.raw_decode(text, at)
            line = text[at:end].replace("\n", " ").replace("\r", " ")
            objects.append(line.encode("utf-8", "surrogateescape"))
            at = _after_space(text, end)
    except (ValueError, RecursionError) as error:
        return objects, f"at character {at}: {error}"
    if is_array and at == len(text):
        return objects, f"the file ends at character {at}, before the end of the array"
    if is_array and _after_space(text, at + 1) < len(text):
        return objects, f"there is data after the end of the array, at character {at + 1}"
    return objects, None


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _has_objects(kind: Any) -> bool:
    if pa.types.is_list(kind):
        return _has_objects(kind.value_type)
    return bool(pa.types.is_struct(kind))
