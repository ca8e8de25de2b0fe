"""Columns encoded in the names of directories, as in Hive tables: ``day=2024-02-29/part-0.parquet``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import numpy as np

_PART: Final = re.compile(r"(?<=/)([^/=]+)=([^/]*)(?=/)")
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_TEXT: Final = np.dtype(np.dtypes.StringDType())


@dataclass(frozen=True)
class Partitions:
    """The partition columns of a dataset.

    Parameters
    ----------
    names
        Their names, in the order of the path.
    integers
        The columns whose values are integers in all paths; the others are text.
    """

    names: tuple[str, ...] = ()
    integers: frozenset[str] = frozenset()

    @classmethod
    def of(cls, paths: Sequence[str]) -> Partitions:
        """Return the partition columns that all paths have."""
        values: dict[str, set[str]] = {}
        for number, path in enumerate(paths):
            pairs = dict(_PART.findall(path))
            if number == 0:
                values = {name: set() for name in pairs}
            values = {name: known | {pairs[name]} for name, known in values.items() if name in pairs}
        return cls(tuple(values), frozenset(name for name in values if all(map(_INTEGER.fullmatch, values[name]))))

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a partition column."""
        return np.dtype(np.int64) if name in self.integers else _TEXT

    def value(self, name: str, path: str) -> Any:
        """Return the value of a partition column in a path."""
        value = dict(_PART.findall(path))[name]
        return int(value) if name in self.integers else unquote(value)
