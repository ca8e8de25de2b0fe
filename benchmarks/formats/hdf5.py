"""HDF5 against h5py, chunk after chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import daskdist

from . import Case

_CHUNK_ROWS = 25_000


def _write(path: Path, num_rows: int, **options: object) -> None:
    import h5py

    x = np.round(np.random.default_rng(0).standard_normal((num_rows, 32), np.float32), 2)
    with h5py.File(path, "w") as file:
        for name, array in (("x", x), ("y", np.arange(num_rows))):
            chunks = (min(_CHUNK_ROWS, num_rows), *array.shape[1:]) if options else None
            file.create_dataset(name, data=array, chunks=chunks, **options)


def write(path: Path, num_rows: int) -> None:
    _write(path, num_rows)


def write_compressed(path: Path, num_rows: int) -> None:
    _write(path, num_rows, compression="gzip", compression_opts=1, shuffle=True)


def bare(path: Path) -> int:
    import h5py

    num_rows = 0
    with h5py.File(path, "r") as file:
        x, y = file["x"], file["y"]
        for start in range(0, len(x), _CHUNK_ROWS):
            num_rows += len(x[start : start + _CHUNK_ROWS])
            _ = y[start : start + _CHUNK_ROWS]
    return num_rows


def ours(path: Path) -> daskdist.Dataset:
    return daskdist.read_hdf5(str(path))


# The library serves one thread at a time; a second thread only does our own work meanwhile.
CASES = [
    Case("HDF5, contiguous", write, ours, bare, 1_000_000),
    Case("HDF5, gzip", write_compressed, ours, bare, 500_000),
]
