"""Zarr against zarr-python, chunk after chunk."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

import daskdist

from . import Case

_CHUNK_ROWS = 25_000


def write(path: Path, num_rows: int, **options: object) -> None:
    import zarr

    group = zarr.open_group(path, mode="w")
    x = np.round(np.random.default_rng(0).standard_normal((num_rows, 32), np.float32), 2)
    for name, array in (("x", x), ("y", np.arange(num_rows))):
        chunks = (min(_CHUNK_ROWS, num_rows), *array.shape[1:])
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, **options)[:] = array


def write_plain(path: Path, num_rows: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(path, num_rows, compressors=None)


def bare(path: Path) -> int:
    import zarr

    group = zarr.open_group(path, mode="r")
    x, y = group["x"], group["y"]
    num_rows = 0
    for start in range(0, x.shape[0], x.chunks[0]):
        stop = start + x.chunks[0]
        num_rows += len(x[start:stop])
        _ = y[start:stop]
    return num_rows


def ours(path: Path) -> daskdist.Dataset:
    return daskdist.read_zarr(str(path))


CASES = [
    Case("Zarr, zstd", write, ours, bare, 1_000_000, releases_gil=True),
    # The bare loop reads all chunks into the same few megabytes, which stay in the cache of the processor.
    Case("Zarr, not compressed", write_plain, ours, bare, 1_000_000, releases_gil=True, least=None),
]
