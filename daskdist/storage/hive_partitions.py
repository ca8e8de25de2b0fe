"""Columns encoded in the names of directories, as in Hive tables: ``day=2024-02-29/part-0.parquet``.

The value ``__HIVE_DEFAULT_PARTITION__`` is a null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from daskdist.storage.http_files import without_query

_PART: Final = re.compile(r"(?<=/)([^/=]+)=([^/]*)(?=/)")
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


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
            pairs = dict(_PART.findall(without_query(path)))
            if number == 0:
                values = {name: set() for name in pairs}
            values = {name: known | {pairs[name]} for name, known in values.items() if name in pairs}
        known = {name: texts - {_NULL} for name, texts in values.items()}
        integers = (name for name, texts in known.items() if texts and all(map(_INTEGER.fullmatch, texts)))
        return cls(tuple(values), frozenset(integers))

    def arrow_type(self, name: str) -> Any:
        """Return the Arrow type of a partition column."""
        import pyarrow as pa

        return pa.int64() if name in self.integers else pa.string()

    def value(self, name: str, path: str) -> Any:
        """Return the value of a partition column in a path; None for a null."""
        value = dict(_PART.findall(without_query(path)))[name]
        if value == _NULL:
            return None
        return int(value) if name in self.integers else unquote(value)
