"""Lines of text against Python's own loop."""

from __future__ import annotations

import gzip
from pathlib import Path

import daskdist

from . import Case


def _lines(num_rows: int) -> bytes:
    return "".join(f"line number {k} of some text\n" for k in range(num_rows)).encode()


def bare(path: Path) -> int:
    with path.open() as file:
        return sum(1 for _ in file)


def bare_gzip(path: Path) -> int:
    with gzip.open(path, "rt") as file:
        return sum(1 for _ in file)


CASES = [
    Case(
        "lines of text",
        lambda path, num_rows: path.write_bytes(_lines(num_rows)) and None,
        lambda path: daskdist.read_text(str(path)),
        bare,
        2_000_000,
        # There is no target, since the loop makes no arrays and decodes nothing.
        least=None,
    ),
    Case(
        "lines of text, gzip",
        lambda path, num_rows: path.write_bytes(gzip.compress(_lines(num_rows), 1)) and None,
        lambda path: daskdist.read_text(str(path)),
        bare_gzip,
        2_000_000,
        least=None,
    ),
]
