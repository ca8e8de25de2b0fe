"""The samples of a WebDataset archive: consecutive members whose names have the same beginning, which is the key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from daskdist.core.cardinality import counted
from daskdist.formats.webdataset.tar import Read, TarEntry, is_text, reader_of, steps, why_refused
from daskdist.storage.byte_ranges import BrokenRecord

# The name of the field with the key.
KEY: Final = "__key__"


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
    is_beside_damage
        Whether there is damage right before or after it, which may have taken members of it.
    """

    key: str
    begin: int
    end: int
    members: dict[str, TarEntry] = field(default_factory=dict)
    broken: str = ""
    is_beside_damage: bool = False


@dataclass(frozen=True)
class Samples:
    """The framing of archives: a record is a sample, or a block that is not a member."""

    is_local = False

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        return _boundary(reader_of(data), 0, at_least, len(data), is_end=is_end)

    def hop(self, read: Read, at: int, at_least: int, num_bytes: int) -> int:
        boundary = _boundary(read, at, at_least, num_bytes, is_end=True)
        return num_bytes if boundary is None else boundary


def samples_of(data: bytes) -> list[Sample]:
    """Return the samples, including damaged ones, in bytes that begin and end at samples."""
    samples: list[Sample] = []
    current: Sample | None = None
    is_apart = True
    for step, is_first in _grouped(steps(reader_of(data), 0)):
        is_apart = is_apart or is_first
        if step.name is None:
            is_apart = True
            if step.broken and samples and not samples[-1].key and samples[-1].end == step.begin:
                # Record consecutive damaged blocks once.
                samples[-1].end = step.end
            elif step.broken:
                samples.append(Sample("", step.begin, step.end, broken=step.broken))
            continue
        parts, refused = parts_of(step.name), why_refused(step)
        if parts is None or not is_text(step.name):
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
    for before, after in pairwise(samples):
        before.is_beside_damage |= not after.key
        after.is_beside_damage |= not before.key
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


def why_no_key(key: str) -> str:
    """Return why a key is invalid; empty if it is valid."""
    if parts_of(f"{key}.x") != (key, "x"):
        return "it is empty or has a dot after the last slash, or begins with a folder named __...__"
    return why_refused(TarEntry(0, 0, f"{key}.x", "0"))


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
        raise BrokenRecord(
            record, f"the member {name!r} extends {counted(end - num_bytes, 'byte')} beyond the end of the file"
        )
    if end < num_bytes and not (was_zeros and not read(end, num_bytes).strip(b"\0")):
        raise BrokenRecord(end, f"the header of a member is cut off after {counted(num_bytes - end, 'byte')}")
    if not was_zeros:
        raise BrokenRecord(num_bytes, "the file is cut short: it lacks the zeros at the end of an archive")
    return num_bytes


def _grouped(entries: Iterator[TarEntry]) -> Iterator[tuple[TarEntry, bool]]:
    # Yield each entry, and whether a record begins with it. Entries in no sample go with the previous record. A damaged
    # block goes with the samples beside it, which may lack a member for it, unless another one is in between.
    key: str | None = None
    is_apart = was_broken = False
    for step in entries:
        if step.name is None:
            yield step, was_broken or not step.broken
            was_broken = bool(step.broken)
            key, is_apart = None, not was_broken
            continue
        was_broken = False
        parts = parts_of(step.name)
        is_other = parts is not None and key is not None and parts[0] != key
        yield step, is_apart or is_other
        is_apart = False
        if parts is not None:
            key = parts[0]
