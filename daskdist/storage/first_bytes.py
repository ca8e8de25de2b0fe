"""First bytes of files that prove another format, or another encoding of text, than the one that is read."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from daskdist.errors import DamagedFileError, FileError
from daskdist.storage.filesystem import Storage
from daskdist.storage.http_files import without_query

HEAD_BYTES: Final = 8
# The bytes that formats are recognised by.
_GUESS_BYTES: Final = 64
_FORMATS: Final = {
    b"PK\x03\x04": "a ZIP archive",
    b"PAR1": "a Parquet file",
    b"PARE": "an encrypted Parquet file",
    b"ARROW1\0\0": "an Arrow file",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"\x93NUMPY": "a NumPy file",
    b"SQLite f": "an SQLite database",
}
# Byte-order marks; that of UTF-32 begins with that of UTF-16.
_MARKS: Final = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_CONTROL: Final = frozenset(range(32)) - frozenset(b"\t\n\r")


@contextmanager
def recognised(path: str, storage: Storage, is_own: Callable[[str, bytes], bool]) -> Iterator[None]:
    """Raise a `FileError` in place of one of damage if the file is of another format.

    Parameters
    ----------
    path, storage
        The file, and what opens it.
    is_own
        Returns whether a path and first bytes are of the format that is read.
    """
    try:
        yield
    except DamagedFileError:
        head = b""
        # A directory has no first bytes.
        with suppress(FileError):
            head = storage.read(path, 0, _GUESS_BYTES)
        if not is_own(without_query(path), head):
            _refuse_format(path, head)
        raise


def is_unicode(encoding: str) -> bool:
    """Return whether an encoding is one of Unicode's, in which text does not begin with a mark of another."""
    return codecs.lookup(encoding).name.startswith("utf")


def refuse_no_text(path: str, head: bytes) -> None:
    """Raise a `FileError` if a file of text begins like a binary file, or with the mark of UTF-16 or UTF-32."""
    head = head[:HEAD_BYTES]
    mark = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    if mark is not None:
        raise FileError(f"{path}: is text in {mark}, whose newline is not one byte: rewrite it in UTF-8")
    # Text may begin with the letters of a format.
    if not _CONTROL.isdisjoint(head):
        _refuse_format(path, head)


def refuse_other_encoding(label: str, texts: Iterable[bytes], encoding: str, advice: str) -> None:
    """Raise a `FileError` if no text with bytes beyond ASCII has the encoding: that is another encoding, no damage.

    One text may be damaged, so there are at least two; those that are erased do not count.

    Parameters
    ----------
    label
        The name of the texts in messages.
    texts
        The texts, such as lines.
    encoding
        Their expected encoding.
    advice
        What to do, in which ``{}`` stands for an encoding that they have.
    """
    others = []
    for text in texts:
        if not text.isascii() and not is_erased(text):
            if _is_in(text, encoding):
                return
            others.append(text)
    if len(others) > 1:
        other = "utf-8" if all(_is_in(text, "utf-8") for text in others) else "latin-1"
        raise FileError(
            f"{label}: none of {len(others)} texts with bytes beyond ASCII, such as {others[0]!r:.80}, is {encoding}: "
            + advice.format(other)
        )


def is_erased(text: bytes) -> bool:
    """Return whether a text has only bytes of storage that was erased or lost, which are no text in any encoding."""
    return not text.strip(b"\xfe\xff\r\n")


def _is_in(text: bytes, encoding: str) -> bool:
    try:
        text.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _refuse_format(path: str, head: bytes) -> None:
    kind = next((kind for magic, kind in _FORMATS.items() if head.startswith(magic)), None)
    if kind is not None:
        raise FileError(f"{path}: is {kind}, which this reader does not read: leave it out, or convert it")
