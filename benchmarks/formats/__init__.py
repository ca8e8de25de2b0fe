"""A file a format: what its reader is held against, which is the bare loop of the library that decodes it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daskdist import Dataset


@dataclass(frozen=True)
class Case:
    """One kind of file.

    Parameters
    ----------
    what
        The data to read.
    write
        ``write(path, num_rows)`` writes it.
    ours
        Returns its dataset.
    bare
        Reads it with the library alone, once, and gives the number of rows.
    num_rows
        The rows to write where benchmarks are of full size.
    batch_rows
        The rows of a batch of ours.
    releases_gil
        Whether the library lets other threads run, so that two threads are to be faster than its loop.
    least
        The least that reading by one thread is to be, of the bare loop; None where the bare loop does less than we do,
        and where it is for information only.
    rows_per_s
        The least rows a second, where a number is asked for.
    """

    what: str
    write: Callable[[Path, int], None]
    ours: Callable[[Path], Dataset]
    bare: Callable[[Path], int]
    num_rows: int
    batch_rows: int = 1024
    releases_gil: bool = False
    least: float | None = 0.7
    rows_per_s: float | None = None


def cases() -> dict[str, list[Case]]:
    """The cases of each format, by its name."""
    found: dict[str, list[Any]] = {}
    for module in pkgutil.iter_modules(__path__):
        found[module.name] = importlib.import_module(f"{__name__}.{module.name}").CASES
    return found
