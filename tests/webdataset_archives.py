"""Tar archives in the form of WebDataset."""

from __future__ import annotations

import io
import tarfile

import numpy as np
from PIL import Image


def png(array, form="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(np.asarray(array, np.uint8)).save(file, form, **options)
    return file.getvalue()


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def archive(members, form=tarfile.PAX_FORMAT, mode="w"):
    """Return a tar archive of (name, content) pairs or tarfile members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=form) as tar:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    # Padding to whole records would be most of the archive.
    return trimmed(file.getvalue())


def trimmed(data):
    """Return an archive without unnecessary zeros at its end."""
    end = -(-len(data.rstrip(b"\0")) // 512) * 512
    return data[:end] + bytes(1024)


def picture(k, height=3, width=4):
    return np.random.default_rng(k).integers(0, 256, (height, width, 3), np.uint8)


def save(tmp_path, members, name="a.tar", **options):
    path = tmp_path / name
    path.write_bytes(archive(members, **options))
    return str(path)
