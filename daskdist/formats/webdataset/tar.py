"""Tar archives by their headers: members, and the samples of consecutive members.

A header states the length of its member, so that members are skipped without being read. A block that is not a header
is skipped alone: after a damaged one, members are found again at the next header.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from daskdist.storage.byte_ranges import BrokenRecord

# Returns the bytes between two offsets, fewer at the end.
Read = Callable[[int, int], bytes]

# The name of the field with the key.
KEY: Final = "__key__"

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


@dataclass
class Sample:
    """Consecutive members of one key.

    Parameters
    ----------
    key
        The common beginning of their names; empty for a member or block that is in no sample.
    begin, end
        The range of bytes up to the next sample.
    members
        The members by the name of the field.
    broken
        The problem of the sample.
    """

    key: str
    begin: int
    end: int
    members: dict[str, TarEntry] = field(default_factory=dict)
    broken: str = ""


@dataclass(frozen=True)
class Samples:
    """The framing of archives: a record is a sample, or a block that is not a member."""

    is_local = False

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        return _boundary(reader_of(data), 0, at_least, len(data), is_end=is_end)

    def hop(self, read: Read, at: int, at_least: int, num_bytes: int) -> int:
        boundary = _boundary(read, at, at_least, num_bytes, is_end=True)
        return num_bytes if boundary is None else boundary


def reader_of(data: bytes) -> Read:
    """Return a function that reads from bytes."""
    return lambda start, stop: data[start:stop]


def samples_of(data: bytes) -> list[Sample]:
    """Return the samples, including damaged ones, in bytes that begin and end at samples."""
    samples: list[Sample] = []
    current: Sample | None = None
    is_apart = True
    for step, is_first in _grouped(steps(reader_of(data), 0)):
        is_apart = is_apart or is_first
        if step.name is None:
            if step.broken and samples and not samples[-1].key and samples[-1].end == step.begin:
                # Record consecutive damaged blocks once.
                samples[-1].end = step.end
            elif step.broken:
                samples.append(Sample("", step.begin, step.end, broken=step.broken))
            continue
        parts, refused = parts_of(step.name), why_refused(step)
        if parts is None or not _is_text(step.name):
            if refused:
                samples.append(Sample("", step.begin, step.end, broken=refused))
            continue
        key, name = parts
        if current is None or is_apart or current.key != key:
            current, is_apart = Sample(key, step.begin, step.end), False
            samples.append(current)
        current.end = step.end
        if name in current.members or name == KEY:
            refused = refused or f"the member {step.name!r} is a second one for the field {name!r}"
        current.broken = current.broken or refused
        current.members[name] = step
    return samples


def parts_of(name: str) -> tuple[str, str] | None:
    """Split the name of a member into key and field; None if it belongs to no sample.

    >>> parts_of("train/00.1/cat.seg.PNG"), parts_of("README"), parts_of(".hidden.png")
    (('train/00.1/cat', 'seg.png'), None, None)
    """
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    top = name.partition("/")[0]
    if not stem or not suffix or (slash and top.startswith("__") and top.endswith("__")):
        return None
    return folder + slash + stem, suffix.lower()


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
    elif not _is_text(name):
        why = "has a name that is not UTF-8"
    elif step.kind == _SPARSE:
        why = "is a sparse file; write it as a plain file"
    elif step.kind != _DIRECTORY and step.kind not in _FILES:
        why = f"is {_EMPTY.get(step.kind) or f'of the type {step.kind!r}'}; only plain files are read"
    return f"the member {name!r} {why}" if why else ""


def why_no_key(key: str) -> str:
    """Return why a key is invalid; empty if it is valid."""
    if parts_of(f"{key}.x") != (key, "x"):
        return "it is empty or has a dot after the last slash, or begins with a folder named __...__"
    return why_refused(TarEntry(0, 0, f"{key}.x", "0"))


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _boundary(read: Read, at: int, at_least: int, num_bytes: int, *, is_end: bool) -> int | None:
    # Return the first boundary from `at_least` on, starting at the boundary `at`; see Framing.boundary.
    if at_least <= at:
        return at
    record = end = at
    was_zeros = at == num_bytes
    name = None
    for step, is_first in _grouped(steps(read, at)):
        if is_first:
            if step.begin >= at_least:
                return step.begin
            record = step.begin
        end, name = step.end, step.name
        was_zeros = name is None and not step.broken
        if end > num_bytes:
            break
    if not is_end:
        return None
    if end > num_bytes:
        raise BrokenRecord(record, f"the member {name!r} extends {end - num_bytes} bytes beyond the end of the file")
    if end < num_bytes and not (was_zeros and not read(end, num_bytes).strip(b"\0")):
        raise BrokenRecord(end, f"the header of a member is cut off after {num_bytes - end} bytes")
    if not was_zeros:
        raise BrokenRecord(num_bytes, "the file is cut short: it lacks the zeros at the end of an archive")
    return num_bytes


def _grouped(entries: Iterator[TarEntry]) -> Iterator[tuple[TarEntry, bool]]:
    # Yield each entry, and whether a record begins with it. Entries in no sample go with the previous record.
    key: str | None = None
    is_apart = False
    for step in entries:
        if step.name is None:
            yield step, True
            key, is_apart = None, True
            continue
        parts = parts_of(step.name)
        is_other = parts is not None and key is not None and parts[0] != key
        yield step, is_apart or is_other
        is_apart = False
        if parts is not None:
            key = parts[0]


def steps(read: Read, at: int) -> Iterator[TarEntry]:
    """Yield the members and other blocks from an offset on, up to the last one with complete headers.

    Parameters
    ----------
    read
        Returns the bytes between two offsets.
    at
        The offset of a header to start at.
    """
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
            what = "extended headers are not followed by a member" if at > begin else "a member has no valid header"
            return TarEntry(begin, at + _BLOCK, broken=f"{what}: the checksum does not match")
        said, length, typeflag = header
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
    return TarEntry(begin, start + _padded(size), said if name is None else name, kind or typeflag, start, start + size)


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
