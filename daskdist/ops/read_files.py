"""Sources that are files: the elements of each file, files in listed order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from daskdist.config import num_threads
from daskdist.core.block import Rows
from daskdist.core.node import Facts, Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec
from daskdist.core.tolerant import TolerantRead
from daskdist.errors import FileError
from daskdist.files.first import First
from daskdist.files.joined import Joined, ReadJoined
from daskdist.files.storage import is_remote
from daskdist.formats import Format, Joins, Salvages


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
    def _splits(self) -> Sequence[Split]:
        return self._shared(self.list_file)

    def _shared(self, list_file: Callable[[int], Sequence[Split]]) -> Sequence[Split]:
        index, num_shards = self.shard or (0, 1)
        if self.known is None:
            by_file = (0, 1) if self.by_split else (index, num_shards)
            files = range(by_file[0], len(self.paths), by_file[1])
            # What is far away is waited for most of the time; here, threads would only be in each other's way.
            listed = FileSplits(list_file, files, 8 * num_threads() if is_remote(self.paths[0]) else 1)
            return tuple(listed)[index::num_shards] if self.by_split else listed
        if self.by_split:
            return self.known[index::num_shards]
        return tuple(split for split in self.known if (split.file or 0) % num_shards == index)

    def list_file(self, file: int) -> Sequence[Split]:
        """The splits of one file."""
        return self.format.list_splits(self.paths[file], file, First(self.paths[0], self.spec))

    def list_file_leniently(self, file: int) -> Sequence[Split]:
        """The same; of a file that has none, because it is damaged say, one that cannot be read."""
        try:
            return self.list_file(file)
        except FileError as error:
            path = self.paths[file]
            return [Split(path, Unlisted(str(error)), None, 0, file, path)]

    def lenient_splits(self) -> Sequence[Split]:
        """As `splits`, where files that cannot be listed have a split all the same."""
        return self._lenient_splits

    @cached_property
    def _lenient_splits(self) -> Sequence[Split]:
        return self._shared(self.list_file_leniently)

    def state(self) -> Any:
        # Of remote files it would take a question each.
        local = [path for path in self.paths if not is_remote(path)]
        return [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, local)]

    def sharded(self, index: int, num_shards: int, *, by_split: bool) -> ReadFiles:
        """One worker's share; files already listed are not listed again."""
        known = self.__dict__.get("_splits") if self.shard is None else None
        if isinstance(known, FileSplits) and not known.is_complete:
            known = None
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
        salvage = Salvage(self.format)
        if isinstance(self.format, Joins):
            most = self.format.num_joined
            # Of what is read together, a file that cannot be is left out by itself.
            lenient = Read(Joined(self.lenient_splits, most), ReadJoined(TolerantRead(salvage)), self.name)
            return Read(Joined(self.splits, most), ReadJoined(self.format.read), self.name, lenient=lenient)
        lenient = Read(self.lenient_splits, salvage, self.name)
        return Read(self.splits, self.format.read, self.name, lenient=lenient)


# Files that are listed at a time, where splits are looked at one after the other.
_LISTED_AT_ONCE: Final = 64


class FileSplits(Sequence[Split]):
    """The splits of files, which are listed as far as splits are looked at.

    Parameters
    ----------
    list_file
        Gives the splits of a file by its number.
    files
        The numbers of the files, in order.
    num_threads
        How many are listed at the same time.
    """

    def __init__(self, list_file: Callable[[int], Sequence[Split]], files: range, num_threads: int) -> None:
        self._list_file = list_file
        self._files = files
        self._num_threads = num_threads
        self._found: list[Split] = []
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether all files are listed."""
        return not self._files

    def __len__(self) -> int:
        self._list(None)
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or index < 0:
            self._list(None)
        while index >= len(self._found) if isinstance(index, int) else False:
            if not self._files:
                raise IndexError(index)
            self._list(_LISTED_AT_ONCE)
        return self._found[index]

    def _list(self, number: int | None) -> None:
        with self._lock:
            files, rest = self._files[:number], self._files[len(self._files[:number]) :]
            num_threads = min(len(files), self._num_threads)
            if num_threads > 1:
                with ThreadPoolExecutor(num_threads) as pool:
                    found = list(pool.map(self._list_file, files))
            else:
                found = list(map(self._list_file, files))
            self._found.extend(split for splits in found for split in splits)
            self._files = rest

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)


@dataclass(frozen=True)
class Unlisted:
    """What a split holds of a file that could not be listed."""

    reason: str


@dataclass(frozen=True)
class Salvage:
    """The reading of what can be read of a split; what cannot is noted.

    Parameters
    ----------
    format
        How it is read.
    """

    format: Format

    def __call__(self, split: Split) -> Rows:
        if isinstance(split.payload, Unlisted):
            raise FileError(split.payload.reason)
        try:
            return self.format.read(split)
        except Exception:
            if not isinstance(self.format, Salvages):
                raise
            rows = self.format.salvage(split)
            rows.skipped = tuple(replace(note, file=note.file or split.path) for note in rows.skipped)
            return rows
