"""One module for each format: its files, and the bare loop of a decoding library that its reader is compared with."""

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
        Writes the file: ``write(path, num_rows)``.
    ours
        Returns the dataset of the file.
    bare
        Reads the file once with the library alone, and returns the number of rows.
    num_rows
        The number of rows to write in benchmarks of full size.
    batch_rows
        The number of rows of a batch in our loop.
    releases_gil
        Whether the library lets other threads run, so that two threads have to be faster than its loop.
    least
        The least speed of reading with one thread, relative to the bare loop; None if the bare loop does less than we
        do, or for information only.
    rows_per_s
        The least rows a second, if there is such a target.
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
