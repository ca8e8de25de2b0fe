"""WebDataset against tarfile and Pillow."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

import daskdist

from . import Case


def _write(path: Path, num_rows: int, image: bytes, end: str) -> None:
    with tarfile.open(path, "w") as archive:
        for k in range(num_rows):
            for name, content in ((f"{k:08d}.{end}", image), (f"{k:08d}.cls", str(k % 1000).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def photo() -> bytes:
    """Return a JPEG image of 224 by 224 pixels, with large shapes and some noise."""
    draws = np.random.default_rng(0)
    forms = Image.fromarray(draws.integers(0, 256, (14, 14, 3), np.uint8)).resize((224, 224), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(forms, np.int16) + draws.integers(-12, 13, (224, 224, 3)), 0, 255)
    file = io.BytesIO()
    Image.fromarray(noisy.astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def digit() -> bytes:
    """An image of 8 by 8 pixels: most time is spent on the archive."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)).save(file, "PNG")
    return file.getvalue()


def bare(path: Path) -> int:
    num_rows = 0
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member).read()
            if member.name.endswith(".cls"):
                int(content)
                num_rows += 1
            else:
                with Image.open(io.BytesIO(content)) as image:
                    np.asarray(image.convert("RGB"))
    return num_rows


def bare_bytes(path: Path) -> int:
    num_rows = 0
    with tarfile.open(path) as archive:
        for member in archive:
            archive.extractfile(member).read()
            num_rows += 1
    return num_rows // 2


CASES = [
    Case(
        "WebDataset, JPEG of 224 by 224 and a class",
        lambda path, num_rows: _write(path, num_rows, photo(), "jpg"),
        lambda path: daskdist.read_webdataset(str(path), ("jpg", "cls"), compression=None),
        bare,
        3_000,
        releases_gil=True,
    ),
    Case(
        "WebDataset, PNG of 8 by 8 and a class",
        lambda path, num_rows: _write(path, num_rows, digit(), "png"),
        lambda path: daskdist.read_webdataset(str(path), ("png", "cls"), compression=None),
        bare,
        20_000,
    ),
    Case(
        "WebDataset, bytes",
        lambda path, num_rows: _write(path, num_rows, bytes(2000), "bin"),
        lambda path: daskdist.read_webdataset(str(path), ("bin", "cls"), decode=False, compression=None),
        bare_bytes,
        20_000,
    ),
]
