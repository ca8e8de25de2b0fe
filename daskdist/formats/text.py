r"""Lines of text; a byte range is a split.

Lines end with ``\n`` or ``\r\n``, which are removed; the last may lack it. Blank lines count.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, AnyStr, Final

import numpy as np

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, TEXT
from daskdist.errors import ArgumentError, DamagedFileError
from daskdist.storage.byte_ranges import GROWTH, ByteRanges, RangeRecords
from daskdist.storage.compression import has_suffix
from daskdist.storage.failures import DamagedPart
from daskdist.storage.filesystem import Storage
from daskdist.storage.first_bytes import is_unicode, refuse_other_encoding
from daskdist.storage.first_file import FirstFile

_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Lines:
    """The framing of records that end with a newline and contain no other."""

    is_local = True

    def boundary(self, data: bytes, at_least: int, *, is_end: bool) -> int | None:
        newline = data.find(b"\n", at_least - 1) if at_least else -1
        if newline >= 0 or not at_least:
            return newline + 1
        return len(data) if is_end else None


@dataclass(frozen=True)
class Text:
    """The reader, with its options.

    Parameters
    ----------
    encoding
        The encoding of the text; None for lines as bytes.
    compression
        The compression of the files: ``"infer"``, a name, or None.
    storage
        Opens the files.
    """

    encoding: str | None = "utf-8"
    compression: str | None = "infer"
    storage: Storage = field(default_factory=Storage)

    name = "text"
    suffixes = (".txt", ".text", ".log")
    is_splittable = True

    def __post_init__(self) -> None:
        if self.encoding is not None:
            try:
                if codecs.lookup(self.encoding).name == "utf-8-sig":
                    # Equivalent, as a byte-order mark at the beginning is skipped anyway, and is text elsewhere.
                    object.__setattr__(self, "encoding", "utf-8")
                is_plain = "\n".encode(self.encoding) == b"\n"
            except (LookupError, TypeError, ValueError):
                raise ArgumentError(f"encoding is {self.encoding!r}, which Python does not know for text") from None
            if not is_plain:
                raise ArgumentError(f"encoding is {self.encoding!r}, whose newline is not one byte; rewrite the files")

    def guess(self, path: str, head: bytes) -> bool:
        return has_suffix(path, self.suffixes)

    def spec(self, path: str) -> ElementSpec:
        self.storage.version(path)
        return ElementSpec(LONE, (TensorSpec((), np.dtype(object) if self.encoding is None else TEXT),))

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        return self._ranges.list(path, file, GROWTH)

    def read(self, split: Split) -> Block:
        piece = self._ranges.read(split)
        data = self._unmarked(piece)
        if self.encoding is None:
            return self._block(split, lines_of(data))
        try:
            text = data.decode(self.encoding)
        except UnicodeDecodeError as error:
            number = data.count(b"\n", 0, error.start)
            line = data[data.rfind(b"\n", 0, error.start) + 1 :].partition(b"\n")[0]
            raise DamagedFileError(
                f"{split.label}: its line {number}, {line[:80]!r}, is not {self.encoding}: {error.reason}; "
                "give the right encoding, or encoding=None for bytes"
            ) from None
        return self._block(split, lines_of(text))

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        piece = self._ranges.read(split, is_lenient=True)
        kept: list[Any] = []
        damaged: list[DamagedPart] = []
        for number, line in enumerate(lines_of(self._unmarked(piece))):
            try:
                kept.append(line if self.encoding is None else line.decode(self.encoding))
            except UnicodeDecodeError as error:
                damaged.append(DamagedPart(number, f"the line {line!r:.80} of {split.label}", str(error)))
        if damaged:
            advice = "give encoding={!r}, or None for bytes"
            refuse_other_encoding(split.label, lines_of(self._unmarked(piece)), self.encoding or "", advice)
        return self._block(split, kept), piece.with_rest(damaged, len(kept), split)

    @property
    def _ranges(self) -> ByteRanges:
        is_text = self.encoding is not None and is_unicode(self.encoding)
        return ByteRanges(Lines(), self.storage, self.compression, is_text=is_text)

    def _unmarked(self, piece: RangeRecords) -> bytes:
        is_marked = piece.offset == 0 and self.encoding is not None
        return piece.data.removeprefix(_MARK) if is_marked else piece.data

    def _block(self, split: Split, lines: Sequence[Any]) -> Block:
        column: np.ndarray[Any, Any] = np.empty(len(lines), object if self.encoding is None else TEXT)
        column[:] = lines
        return Block(LONE, [column], split.label)


def lines_of(data: AnyStr) -> list[AnyStr]:
    """Split text or bytes into lines, without their ends."""
    carriage, newline = ("\r", "\n") if isinstance(data, str) else (b"\r", b"\n")
    if data.endswith(carriage):
        # The last line ends with CR, and its LF is missing.
        data += newline
    if carriage in data:
        data = data.replace(carriage + newline, newline)
    lines = data.split(newline)
    # A newline at the end does not begin an empty line.
    if not lines[-1]:
        lines.pop()
    return lines
