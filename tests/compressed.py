"""Kinds of compression, for tests of compressed files."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from pathlib import Path

import pyarrow as pa

# The end of a file's name, and the function that compresses its content.
COMPRESSED = {
    "gz": gzip.compress,
    "zz": zlib.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data).to_pybytes(),
}


def compressed_files(rows_of, suffix, compress):
    """Compress files, whose names get a suffix; take and return their rows by path."""
    compressed = {}
    for path, rows in rows_of.items():
        Path(f"{path}.{suffix}").write_bytes(compress(Path(path).read_bytes()))
        Path(path).unlink()
        compressed[f"{path}.{suffix}"] = rows
    return compressed
