"""Images in folders against Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import daskdist

from . import Case
from .webdataset import photo


def write(path: Path, num_rows: int) -> None:
    content = photo()
    for k in range(num_rows):
        folder = path / f"class {k % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k:06d}.jpg").write_bytes(content)


def bare(path: Path) -> int:
    num_rows = 0
    for file in sorted(path.rglob("*.jpg")):
        with Image.open(file) as image:
            np.asarray(image.convert("RGB"))
        num_rows += 1
    return num_rows


def bare_resized(path: Path) -> int:
    num_rows = 0
    for file in sorted(path.rglob("*.jpg")):
        with Image.open(file) as image:
            np.asarray(image.convert("RGB").resize((96, 96), Image.Resampling.BILINEAR))
        num_rows += 1
    return num_rows


CASES = [
    Case(
        "images in folders, JPEG of 224 by 224",
        write,
        lambda path: daskdist.read_images(path),
        bare,
        3_000,
        releases_gil=True,
    ),
    # A batch of 1,024 images has 150 MB, which a virtual machine may first have to get from its host.
    Case(
        "images in folders, the same in batches of 64",
        write,
        lambda path: daskdist.read_images(path),
        bare,
        3_000,
        batch_rows=64,
        least=None,
    ),
    Case(
        "images in folders, resized to 96 by 96",
        write,
        lambda path: daskdist.read_images(path, resize=(96, 96)),
        bare_resized,
        3_000,
        releases_gil=True,
    ),
]
