"""NumPy's files against `numpy.load`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import daskdist

from . import Case


def _array(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_rows, 32), np.float32)


def write(path: Path, num_rows: int) -> None:
    with path.open("wb") as file:
        np.save(file, _array(num_rows))


def write_archive(path: Path, num_rows: int) -> None:
    with path.open("wb") as file:
        np.savez(file, x=_array(num_rows), y=np.arange(num_rows))


def write_compressed(path: Path, num_rows: int) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, x=np.round(_array(num_rows), 1), y=np.arange(num_rows))


def bare(path: Path) -> int:
    return len(np.load(path))


def bare_archive(path: Path) -> int:
    with np.load(path) as archive:
        return min(len(archive[name]) for name in archive.files)


def ours(path: Path) -> daskdist.Dataset:
    return daskdist.read_npy(str(path))


CASES = [
    Case("npy, 32 floats a row", write, ours, bare, 2_000_000, releases_gil=True),
    Case("npz, 32 floats and a number a row", write_archive, ours, bare_archive, 1_000_000, releases_gil=True),
    # A compressed member is one split, so a second thread has nothing to do.
    Case("npz, compressed", write_compressed, ours, bare_archive, 300_000),
]
