"""Sources that are files: the elements of each file, files in listed order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from daskdist.config import num_threads
from daskdist.core.node import Facts, Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec
from daskdist.formats import Format
from daskdist.formats.paths import is_remote


@dataclass(frozen=True, eq=False)
class ReadFiles(Source):
    """The elements of files of one format.

    Parameters
    ----------
    format
        How they are read.
    paths
        Which, in order.
    shard
        ``(index, num_shards)``: only every ``num_shards``-th file, or split where ``by_split``, from the
        ``index``-th on; None for all.
    by_split
        Whether shards are of splits, for want of files.
    """

    format: Format
    paths: tuple[str, ...]
    shard: tuple[int, int] | None = None
    by_split: bool = False
    known: tuple[Split, ...] | None = field(default=None, repr=False)

    facts = Facts(per_worker=True)
    background = True
    is_light = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"read_{self.format.name}"

    @cached_property
    def spec(self) -> ElementSpec:
        return self.format.spec(self.paths[0])

    def splits(self) -> Sequence[Split]:
        """The splits to read, from the files' own indexes (a Parquet footer, say); kept once found."""
        return self._splits

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        if self.shard is None:
            return self.known or self._list(range(len(self.paths)))
        index, num_shards = self.shard
        if self.by_split:
            return (self.known or self._list(range(len(self.paths))))[index::num_shards]
        if self.known is not None:
            return tuple(split for split in self.known if (split.file or 0) % num_shards == index)
        return self._list(range(index, len(self.paths), num_shards))

    def state(self) -> Any:
        # Of remote files it would take a question each.
        local = [path for path in self.paths if not is_remote(path)]
        return [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, local)]

    def _list(self, files: range) -> tuple[Split, ...]:
        def list_one(file: int) -> Sequence[Split]:
            return self.format.list_splits(self.paths[file], file, self.paths[0])

        if len(files) < 2:
            return tuple(split for file in files for split in list_one(file))
        with ThreadPoolExecutor(min(len(files), 4 * num_threads())) as pool:
            return tuple(split for splits in pool.map(list_one, files) for split in splits)

    def sharded(self, index: int, num_shards: int, *, by_split: bool) -> ReadFiles:
        """One worker's share; files already listed are not listed again."""
        known = self.__dict__.get("_splits") if self.shard is None else None
        return replace(self, shard=(index, num_shards), by_split=by_split, known=known)

    def __str__(self) -> str:
        shard = (
            ""
            if self.shard is None
            else f", {'splits' if self.by_split else 'files'} {self.shard[0]} mod {self.shard[1]}"
        )
        first = self.paths[0] if len(self.paths) == 1 else f"{len(self.paths)} files: {self.paths[0]} ..."
        return f"{self.name}({first}{shard})"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, self.format.read, self.name)
