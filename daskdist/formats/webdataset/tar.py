"""Members of tar archives, found by their headers.

A header states the length of its member, so that members are skipped without being read. A block that is not a header
is skipped alone: after a damaged one, members are found again at the next header.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

# Returns the bytes between two offsets, fewer at the end.
Read = Callable[[int, int], bytes]

_BLOCK: Final = 512
_ZEROS: Final = bytes(_BLOCK)
# The limit on extended headers, which hold names, as they are read into memory.
_MOST_EXTENDED: Final = 2**20

# The kinds of members: with content, without content, and headers of the next member.
_FILES: Final = "0\x007"
_EMPTY: Final = {
    "1": "a hard link",
    "2": "a symbolic link",
    "3": "a device",
    "4": "a device",
    "5": "a directory",
    "6": "a pipe",
}
_DIRECTORY: Final = "5"
_SPARSE: Final = "S"
_PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK = "xX", "g", "L", "K"
_DRIVE: Final = re.compile(r"[A-Za-z]:")


class TarEntry(NamedTuple):
    """A member, or a block that is not a member.

    Parameters
    ----------
    begin, end
        The range of bytes from its first header to the next entry.
    name
        The name of a member; None for a block of zeros or one that is not a header.
    kind
        The type in its header, one character.
    start, stop
        The range of bytes of its content.
    broken
        The problem of a block.
    """

    begin: int
    end: int
    name: str | None = None
    kind: str = ""
    start: int = 0
    stop: int = 0
    broken: str = ""


def reader_of(data: bytes) -> Read:
    """Return a function that reads from bytes."""
    return lambda start, stop: data[start:stop]


def why_refused(step: TarEntry) -> str:
    """Return why a member is refused (it is not a plain file, or its name leads elsewhere); empty if it is accepted."""
    name = step.name or ""
    why = ""
    if name.startswith(("/", "\\")) or _DRIVE.match(name):
        why = "has an absolute name"
    elif ".." in re.split(r"[/\\]", name):
        why = "has a name that points outside the archive"
    elif "\0" in name:
        why = "has a name that contains a NUL"
    elif not is_text(name):
        why = "has a name that is not UTF-8"
    elif step.kind == _SPARSE:
        why = "is a sparse file; write it as a plain file"
    elif step.kind != _DIRECTORY and step.kind not in _FILES:
        why = f"is {_EMPTY.get(step.kind) or f'of the type {step.kind!r}'}; only plain files are read"
    return f"the member {name!r} {why}" if why else ""


def is_text(name: str) -> bool:
    """Return whether a name was UTF-8, without surrogates in place of other bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def steps(read: Read, at: int) -> Iterator[TarEntry]:
    """Yield the members and other blocks from an offset on, up to the last one with complete headers."""
    while True:
        step = _step(read, at)
        if step is None:
            return
        yield step
        at = step.end


def _step(read: Read, begin: int) -> TarEntry | None:
    at, name, size, kind = begin, None, None, ""
    while True:
        block = read(at, at + _BLOCK)
        if len(block) < _BLOCK:
            return None
        if block == _ZEROS and at == begin:
            return TarEntry(begin, at + _BLOCK)
        header = _header(block)
        if header is None:
            problem = "extended headers are not followed by a member" if at > begin else "a member has no valid header"
            return TarEntry(begin, at + _BLOCK, broken=f"{problem}: the checksum does not match")
        header_name, length, typeflag = header
        start = at + _BLOCK
        if typeflag not in _PAX + _PAX_OF_ALL + _LONG_NAME + _LONG_LINK:
            break
        if length > _MOST_EXTENDED:
            return TarEntry(begin, start, broken=f"an extended header has an invalid length of {length} bytes")
        content = read(start, start + length)
        if len(content) < length:
            return None
        at = start + _padded(length)
        if typeflag == _LONG_NAME:
            name = _text(content.rstrip(b"\0"))
        elif typeflag != _LONG_LINK:
            records = _records(content)
            if records is None or (typeflag == _PAX_OF_ALL and not records.keys().isdisjoint(("path", "size"))):
                return TarEntry(begin, at, broken="an extended header is malformed")
            if typeflag == _PAX_OF_ALL:
                continue
            name = records.get("path", name)
            kind = _SPARSE if any(key.startswith("GNU.sparse.") for key in records) else kind
            digits = records.get("size", "")
            size = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else size
    size = 0 if typeflag in _EMPTY else length if size is None else size
    return TarEntry(
        begin, start + _padded(size), header_name if name is None else name, kind or typeflag, start, start + size
    )


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _header(block: bytes) -> tuple[str, int, str] | None:
    # Return name, size and type; None if the checksum is wrong. The library accepts all spellings of numbers, but takes
    # six times as long, so it is used only for unusual ones.
    try:
        is_whole = sum(block) - sum(block[148:156]) + 256 == int(block[148:156].partition(b"\0")[0], 8)
        size = int(block[124:136].partition(b"\0")[0], 8)
    except ValueError:
        is_whole = False
    if not is_whole:
        try:
            known = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            return None
        return (known.name, known.size, known.type.decode("latin-1")) if known.size >= 0 else None
    if size < 0:
        return None
    name, kind = _text(block[:100].partition(b"\0")[0]), chr(block[156])
    if block[345] and kind not in _LONG_NAME + _LONG_LINK + _SPARSE:
        name = f"{_text(block[345:500].partition(bytes(1))[0])}/{name}"
    # Old archives mark directories by the name only.
    return name, size, _DIRECTORY if kind == "\0" and name.endswith("/") else kind


def _records(content: bytes) -> dict[str, str] | None:
    # Return the records of a pax header, such as "27 path=some/long/name\n"; None if it is not one.
    records, at = {}, 0
    while at < len(content) and content[at]:
        digits, space, _ = content[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = content[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if not space or not equals or at + length > len(content) or not value.endswith(b"\n"):
            return None
        records[_text(key)] = _text(value[:-1])
        at += length
    return records


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
