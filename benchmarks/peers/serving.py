"""The main loop of every peer's script: load the data, then run one case per line of standard input."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH = 256
WINDOW = 16
NUM_KEYS = 4
BOUNDARIES = [16, 32, 48]
# For the data service: the numbers in a batch of 256 KiB, and the size and number of matrix products for a costly
# element.
SERVICE_BATCH = 2**16
COSTLY_SIZE = 160
COSTLY_PRODUCTS = 10


@dataclass(frozen=True)
class ServiceSize:
    """The elements of each pipeline of the data service.

    Parameters
    ----------
    num_batches
        The number of batches of 256 KiB.
    num_rows
        The number of elements of 16 numbers.
    num_costly
        The number of elements that take some milliseconds each.
    """

    num_batches: int
    num_rows: int
    num_costly: int


@dataclass(frozen=True)
class Data:
    """The arrays of all cases.

    Parameters
    ----------
    rows
        float32, shape ``(num_rows, 16)``.
    values, row_splits
        Rows of 0 to 63 int32, as many, one after the other, and where each begins.
    """

    rows: np.ndarray
    values: np.ndarray
    row_splits: np.ndarray

    @classmethod
    def made(cls, num_rows: int) -> Data:
        rng = np.random.default_rng(0)
        lengths = rng.integers(0, 64, num_rows)
        row_splits = np.concatenate([[0], np.cumsum(lengths)])
        values = rng.integers(0, 1000, row_splits[-1], np.int32)
        return cls(rng.random((num_rows, 16), np.float32), values, row_splits)

    @classmethod
    def load(cls, folder: str) -> Data:
        return cls(*[np.load(Path(folder, f"{name}.npy")) for name in cls.__annotations__])

    def save(self, folder: str) -> None:
        for name in self.__annotations__:
            np.save(Path(folder, f"{name}.npy"), getattr(self, name))

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, num_rows: int) -> Data:
        return Data(self.rows[:num_rows], self.values[: self.row_splits[num_rows]], self.row_splits[: num_rows + 1])

    def sequence(self, number: int) -> np.ndarray:
        """Return a row of `values`; rows have different lengths."""
        return self.values[self.row_splits[number] : self.row_splits[number + 1]]


def serve(version: str, cases_of: Callable[[Data], dict[str, Callable[[], Iterable]]]) -> None:
    """Print the names of the cases, and run each case that is requested; a case returns an iterable."""
    # Libraries may print, so keep standard output for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases = cases_of(Data.load(sys.argv[1]))
    print(json.dumps({"version": version, "cases": list(cases)}), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        num_batches = sum(1 for _ in cases[line.strip()]())
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "batches": num_batches}), file=answers, flush=True)
