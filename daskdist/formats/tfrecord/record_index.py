"""The index of a TFRecord file: the positions of its records, so that splits have known numbers of records.

It takes one pass over the file in each program.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from daskdist.formats.tfrecord.record_framing import HEADER_BYTES, headers_of
from daskdist.storage.filesystem import Storage, Version, failures

# The approximate size of a group of records, the unit of the index; no split is smaller.
_GROUP_BYTES: Final = 2**16
# The number of bytes to read at a time.
_CHUNK_BYTES: Final = 2**23


@dataclass(frozen=True, slots=True)
class TFRecordSplit:
    """The records of a file that a split reads.

    Parameters
    ----------
    version
        The file, as it was listed.
    first
        The number of its first record.
    num_rows
        The number of its records; None for the rest of a file from a damaged record on.
    start, stop
        The range of bytes in the file.
    """

    version: Version
    first: int
    num_rows: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RecordIndex:
    """The positions of the records of a file.

    Parameters
    ----------
    version
        The file.
    starts
        The offsets of groups of records, and of the end of the last.
    numbers
        The number of records before each of these offsets.
    """

    version: Version
    starts: tuple[int, ...]
    numbers: tuple[int, ...]

    def parts(self, num_bytes: int) -> list[TFRecordSplit]:
        """Divide the file into parts of about ``num_bytes`` bytes."""
        parts, at = [], 0
        while at < len(self.starts) - 1:
            stop = max(bisect_left(self.starts, self.starts[at] + num_bytes, at), at + 1)
            stop = min(stop, len(self.starts) - 1)
            first, number = self.numbers[at], self.numbers[stop] - self.numbers[at]
            parts.append(TFRecordSplit(self.version, first, number, self.starts[at], self.starts[stop]))
            at = stop
        if self.starts[-1] < self.version.num_bytes:
            parts.append(TFRecordSplit(self.version, self.numbers[-1], None, self.starts[-1], self.version.num_bytes))
        return parts


@lru_cache(maxsize=256)
def index_of(storage: Storage, version: Version, *, check: bool) -> RecordIndex:
    """Return the index of a file, found by a pass over it.

    Parameters
    ----------
    storage
        Opens the file.
    version
        The file.
    check
        Whether to verify the checksums of lengths.

    Raises
    ------
    FileError
        The file cannot be read.
    """
    at, number, size = 0, 0, version.num_bytes
    starts, numbers = [0], [0]
    with storage.open(version.path) as file, failures(version.path):
        while at < size:
            file.seek(at)
            headers = headers_of(file.read(_CHUNK_BYTES), check=check)
            # The end of each record; a record that ends beyond the file does not count.
            ends = at + np.append(headers.starts[1:] - HEADER_BYTES, min(headers.stop, size + 1))[: len(headers.starts)]
            num_whole = int(np.searchsorted(ends, size, "right"))
            groups = ends[:num_whole] // _GROUP_BYTES
            lasts = np.flatnonzero(np.append(groups[1:] != groups[:-1], num_whole > 0))
            starts += ends[lasts].tolist()
            numbers += (number + lasts + 1).tolist()
            number += num_whole
            if headers.broken is not None or num_whole < len(ends) or not num_whole:
                break
            at = starts[-1]
    return RecordIndex(version, tuple(starts), tuple(numbers))
