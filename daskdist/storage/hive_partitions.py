"""Columns encoded in the names of directories, as in Hive tables: ``day=2024-02-29/part-0.parquet``.

The value ``__HIVE_DEFAULT_PARTITION__`` is a null. Writers encode characters such as spaces, colons and slashes in
names and values by percents: ``start%20time=12%3A30`` is the value ``12:30`` of the column ``start time``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from daskdist.errors import FileError
from daskdist.storage.http_files import is_http, without_query
from daskdist.storage.libraries import pa

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
            pairs = _parts_of(path)
            if number == 0:
                values = {name: set() for name in pairs}
            values = {name: known | {pairs[name]} for name, known in values.items() if name in pairs}
        known = {name: texts - {_NULL} for name, texts in values.items()}
        integers = (name for name, texts in known.items() if texts and all(map(_INTEGER.fullmatch, texts)))
        return cls(tuple(values), frozenset(integers))

    def arrow_type(self, name: str) -> Any:
        """Return the Arrow type of a partition column."""
        return pa.int64() if name in self.integers else pa.string()

    def value(self, name: str, path: str) -> Any:
        """Return the value of a partition column in a path; None for a null."""
        value = _parts_of(path)[name]
        if value == _NULL:
            return None
        return int(value) if name in self.integers else value


def _parts_of(path: str) -> dict[str, str]:
    # Return the values of partition columns by name. In a URL of an HTTP server, names of directories are encoded anew.
    num_decoded = 1 + is_http(path)
    pairs = {}
    try:
        for part in _PART.findall(without_query(path)):
            for _ in range(num_decoded):
                part = [unquote(text, errors="strict") for text in part]
            pairs[part[0]] = part[1]
            "".join(part).encode()
    except UnicodeError:
        raise FileError(
            f"{path}: the name of a directory with = is not UTF-8, which partition columns are; rename it, or give "
            "partitioned=False to read the files without such columns"
        ) from None
    return pairs
