"""TFRecord against a plain loop over records that checks them, and what TensorFlow has been measured to do."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

import daskdist
from daskdist.core.block import Block
from daskdist.core.structure import Structure
from daskdist.formats.tfrecord.tfrecord_format import TFRecord

from . import Case

_RECORD_BYTES = 127


def _write(path: Path, columns: Any) -> None:
    leaves, structure = Structure.of(columns)
    with path.open("wb") as file:
        TFRecord().write(Block(structure, leaves), file)


def _write_records(path: Path, num_rows: int) -> None:
    data = np.random.default_rng(0).bytes(num_rows * _RECORD_BYTES)
    column = np.empty(num_rows, object)
    column[:] = [data[k * _RECORD_BYTES : (k + 1) * _RECORD_BYTES] for k in range(num_rows)]
    _write(path, column)


def _write_lengths(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0)
    data, column = draws.bytes(2 * _RECORD_BYTES), np.empty(num_rows, object)
    column[:] = [data[:size] for size in draws.integers(1, 2 * _RECORD_BYTES, num_rows).tolist()]
    _write(path, column)


def _write_alike(path: Path, num_rows: int) -> None:
    # Integers and names have one length, so that all records have.
    draws = np.random.default_rng(0)
    names = np.array([f"row{k:05d}" for k in range(100_000)], np.dtypes.StringDType())
    x = draws.standard_normal((num_rows, 16), np.float32)
    name = names[np.arange(num_rows) % len(names)]
    _write(path, {"x": x, "label": draws.integers(0, 100, num_rows), "name": name})


def _write_unlike(path: Path, num_rows: int) -> None:
    draws = np.random.default_rng(0)
    names = np.array(["n" * size for size in range(30)], np.dtypes.StringDType())
    x = draws.standard_normal((num_rows, 16), np.float32)
    label = draws.integers(-10, 2 ** draws.integers(1, 62, num_rows))
    _write(path, {"x": x, "label": label, "name": names[draws.integers(0, 30, num_rows)]})


_FEATURES = {
    "x": daskdist.FixedLenFeature((16,), "float32"),
    "label": daskdist.FixedLenFeature((), "int64"),
    "name": daskdist.FixedLenFeature((), bytes),
}


def bare(path: Path) -> int:
    num_rows, crc = 0, google_crc32c.value
    with path.open("rb") as file:
        while header := file.read(12):
            (length,) = struct.unpack("<Q", header[:8])
            data = file.read(length)
            (stated,) = struct.unpack("<I", file.read(4))
            found = crc(data)
            if (((found >> 15) | (found << 17)) + 0xA282EAD8) & 0xFFFFFFFF != stated:
                raise ValueError(f"record {num_rows} is damaged")
            num_rows += 1
    return num_rows


def _read(path: Path) -> daskdist.Dataset:
    return daskdist.read_tfrecord(str(path))


def _parse(path: Path) -> daskdist.Dataset:
    return daskdist.read_tfrecord(str(path), _FEATURES)


CASES = [
    Case("records of 127 bytes", _write_records, _read, bare, 1_000_000, least=None, rows_per_s=1_000_000),
    Case("records of 1 to 254 bytes", _write_lengths, _read, bare, 1_000_000, least=None),
    Case("examples laid out alike", _write_alike, _parse, bare, 500_000, least=None, rows_per_s=700_000),
    Case("examples laid out unlike", _write_unlike, _parse, bare, 500_000, least=None, rows_per_s=150_000),
]
