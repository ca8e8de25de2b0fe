"""Kinds of compression, for tests of compressed files."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib

import pyarrow as pa

# The end of a file's name, and the function that compresses its content.
COMPRESSED = {
    "gz": gzip.compress,
    "zz": zlib.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data).to_pybytes(),
}
