"""Checksums of TFRecord files: computed, and compared with those that a file states.

They are CRC-32C, rotated and shifted so that checksums of checksums are not weaker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from daskdist.errors import MissingPackageError

Array = np.ndarray[Any, Any]

_DELTA: Final = np.uint32(0xA282EAD8)
# Castagnoli's polynomial with reversed bits.
_POLYNOMIAL: Final = 0x82F63B78
_LENGTH_BYTES: Final = 8


def crc32c() -> Callable[[bytes], int]:
    """Return the function that computes the CRC-32C of bytes.

    Raises
    ------
    MissingPackageError
        google-crc32c is not installed.
    """
    try:
        import google_crc32c
    except ImportError:
        raise MissingPackageError(
            "google-crc32c, which computes the checksums of TFRecord files, is not installed: "
            "pip install 'daskdist[tfrecord]', or give check_crc=False to read them unchecked"
        ) from None
    function: Callable[[bytes], int] = google_crc32c.value
    return function


def record_checksums(records: Array) -> Array:
    """Return the checksums of records, given as an array of bytes objects."""
    return _masked(np.fromiter(map(crc32c(), records.tolist()), np.uint32, len(records)))


def length_checksums(lengths: Array) -> Array:
    """Return the checksums of lengths, encoded in eight bytes as in a file."""
    tables, initial = _tables()
    lengths = lengths.astype(np.uint64, copy=False)
    crcs: Array = np.full(len(lengths), initial, np.uint32)
    for place, table in enumerate(tables):
        if place and not (lengths >> np.uint64(8 * place)).any():
            break
        crcs ^= table[((lengths >> np.uint64(8 * place)) & np.uint64(255)).astype(np.intp)]
    return _masked(crcs)


def wrong_lengths(lengths: Array, stated: Array) -> Array:
    """Return the indexes of the lengths whose checksums are not the stated ones."""
    return np.flatnonzero(length_checksums(lengths) != stated)


def _masked(crcs: Array) -> Array:
    rotated: Array = (crcs >> np.uint32(15)) | (crcs << np.uint32(17))
    return rotated + _DELTA


@cache
def _tables() -> tuple[list[Array], int]:
    # A checksum is linear: return that of eight zeros, and the change by each value of each byte.
    step = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        step = np.where(step & 1, (step >> 1) ^ np.uint32(_POLYNOMIAL), step >> 1).astype(np.uint32)
    tables = [step]
    for _ in range(_LENGTH_BYTES - 1):
        last = tables[0]
        tables.insert(0, step[last & 255] ^ (last >> 8))
    crc = np.uint32(0xFFFFFFFF)
    for _ in range(_LENGTH_BYTES):
        crc = step[crc & 255] ^ (crc >> 8)
    return tables, int(crc ^ np.uint32(0xFFFFFFFF))
