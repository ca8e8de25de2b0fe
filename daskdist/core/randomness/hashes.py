"""Hashes of values: the same in every process, and equal for equal values."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from daskdist.core.selection.intervals import Index

# Kinds of dtypes of numbers and times; others are text and bytes.
NUMBERS: Final = "biufcmM"


def mixed(values: Any, key: Any) -> Index:
    """Return 64 random bits for each number and the key, by the finalizer of SplitMix64."""
    with np.errstate(over="ignore"):
        word = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(word ^ (word >> np.uint64(31)))


def as_shares(words: Index) -> Index:
    """Return random words as numbers from 0 to below 1."""
    return (words >> np.uint64(11)) * 2.0**-53


def hash_words(column: Index) -> Index:
    """Return 64 bits for each value of a column, equal for equal values; those of numbers are not random yet.

    >>> hash_words(np.array([1, 2])), hash_words(np.array([0.0, -0.0]))
    (array([1, 2], dtype=uint64), array([0, 0], dtype=uint64))
    """
    kind = column.dtype.kind
    if kind not in NUMBERS:
        values = column.tolist()
        known = {value: _hash_of_text(value) for value in dict.fromkeys(values)}
        return np.fromiter(map(known.__getitem__, values), np.uint64, len(values))
    if kind == "c":
        return mixed(hash_words(column.real), hash_words(column.imag))
    if kind == "f":
        # The two zeros are equal, and so are all NaN.
        floats = column.astype(np.float64) + 0.0
        floats[np.isnan(floats)] = np.nan
        return floats.view(np.uint64)
    return column.astype(np.int64).view(np.uint64)


def _hash_of_text(value: Any) -> int:
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
