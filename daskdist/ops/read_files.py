"""Sources that read files: the elements of each file, in the order of the files."""

from __future__ import annotations

import threading
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final

from daskdist.cached_property import cached_property
from daskdist.config import num_threads
from daskdist.core.block import Block, Bundle, PartlyFailed, Rows
from daskdist.core.failing.error_copy import copied_error
from daskdist.core.failing.failed_element import FailedElement
from daskdist.core.failing.origin import Origin
from daskdist.core.file_backed_source import FileBackedSource, FileShare
from daskdist.core.node import Facts, Node, Pieces
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure
from daskdist.errors import DamagedFileError, FileError
from daskdist.formats import (
    ChoosesColumns,
    DirectoryFormat,
    Format,
    GroupsFiles,
    LearnsFirst,
    OpensFiles,
    ReadsValidRows,
    ReplacesNulls,
)
from daskdist.formats.saved.manifest import MANIFEST
from daskdist.long_work import shown
from daskdist.ops.skip import Skip
from daskdist.ops.take import Take
from daskdist.storage.failures import DamagedPart, damage
from daskdist.storage.filesystem import Storage, is_remote
from daskdist.storage.first_bytes import recognised
from daskdist.storage.first_file import FirstFile, readable_files
from daskdist.storage.grouped_splits import GroupSplits, ReadGroup
from daskdist.tables.replacements import NullsKept
from daskdist.url_secrets import without_secrets


@dataclass(frozen=True, eq=False)
class ReadFiles(FileBackedSource):
    """The elements of files of one format.

    Parameters
    ----------
    paths
        The files, in order.
    format
        The format that reads them.
    shard
        ``(index, num_shards)`` to read only every ``num_shards``-th file, or split if ``by_split``, from number
        ``index`` on; None for all.
    by_split
        Whether shards consist of splits, because there are too few files.
    file_share
        The files of the shard if files are divided by size.
    span
        The range ``(first, stop)`` of splits to read; None for all.
    whole
        The source that this is a shard or span of, whose listing is reused.
    """

    format: Format
    shard: tuple[int, int] | None = None
    by_split: bool = False
    file_share: FileShare | None = field(default=None, repr=False)
    span: tuple[int, int] | None = None
    whole: ReadFiles | None = field(default=None, repr=False)

    facts = Facts(per_worker=True)
    background = True
    is_cheap = False
    reads_files = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"read_{self.format.name}"

    @property
    def is_splittable(self) -> bool:
        return self.format.is_splittable

    @property
    def may_have_ragged_rows(self) -> bool:
        return isinstance(self.format, DirectoryFormat) and MANIFEST in self.format.marks

    @property
    def spec(self) -> ElementSpec:
        return self._first.spec

    def splits(self) -> Sequence[Split]:
        """Return the splits to read, from the files' indexes (such as a Parquet footer); cached.

        Raises
        ------
        FileError
            A file cannot be listed.
        """
        splits = self.valid_splits()[:]
        for split in splits:
            if isinstance(split.payload, Unlisted):
                raise copied_error(split.payload.error)
        return splits

    @property
    def is_cheap_to_list(self) -> bool:
        listed = self.__dict__.get("_listed")
        if listed is not None and (not isinstance(listed, FileSplits) or listed.is_complete):
            return True
        if self.whole is not None and self.whole.is_cheap_to_list:
            return True
        # Indexes of files, such as Parquet footers.
        return len(self.files) <= _MOST_CHEAP_FILES and not is_remote(self.paths[0])

    def valid_splits(self) -> Sequence[Split]:
        """Return `splits`, with a split also for each file that cannot be listed."""
        if self.span is not None:
            return self._uncut.valid_splits()[slice(*self.span)]
        if self.shard is not None and self.by_split:
            return self._uncut.valid_splits()[self.shard[0] :: self.shard[1]]
        return self._listed

    @cached_property
    def _uncut(self) -> ReadFiles:
        return self.whole or replace(self, span=None, shard=self.shard if self.span is not None else None)

    @cached_property
    def _listed(self) -> Sequence[Split]:
        # Listing remote files is mostly waiting, so threads help; for local files they do not.
        number = 8 * num_threads() if is_remote(self.paths[0]) else 1
        return FileSplits(partial(self._list_or_unreadable, self._list_shard), self.files, number)

    @property
    def depends_on_splits(self) -> bool:
        """True if splits of another size would give it other rows."""
        is_cut = self.file_share is not None and self.file_share.are_cut
        return is_cut or self.span is not None or (self.shard is not None and self.by_split)

    @property
    def files(self) -> Sequence[int]:
        """The numbers of the files to read, in order."""
        if self.file_share is not None:
            return self.file_share.files
        index, num_shards = (0, 1) if self.shard is None or self.by_split else self.shard
        return range(index, len(self.paths), num_shards)

    def _list_shard(self, file: int) -> Sequence[Split]:
        splits = self.splits_of_file(file)
        part = self.file_share.parts.get(file) if self.file_share is not None else None
        return splits if part is None else [splits[number] for number in part]

    def list_file(self, file: int) -> Sequence[Split]:
        """List the splits of one file."""
        with self._recognised(self.paths[file]), damage(self.paths[file]):
            return self.format.list_splits(self.paths[file], file, self._first)

    @cached_property
    def _first(self) -> FirstFile:
        if self.whole is not None:
            return self.whole._first
        if isinstance(self.format, LearnsFirst):
            return self.format.first(self.paths)
        path, spec = next(readable_files(self.paths, self._spec_of))
        return FirstFile(path, spec)

    def _spec_of(self, path: str) -> ElementSpec:
        with self._recognised(path), damage(path):
            return self.format.spec(path)

    def _recognised(self, path: str) -> AbstractContextManager[None]:
        form = self.format
        return recognised(path, form.storage, form.guess) if isinstance(form, OpensFiles) else nullcontext()

    def splits_of_file(self, file: int) -> Sequence[Split]:
        """List the splits of one file; cached."""
        if self.whole is not None:
            # Listed once for all shares, so that a file that changes later is noticed.
            return self.whole.splits_of_file(file)
        if file not in self._known:
            self._known[file] = self.list_file(file)
        return self._known[file]

    def valid_splits_of_file(self, file: int) -> Sequence[Split]:
        """Return the splits of one file; of a damaged file, a single split whose reading fails."""
        return self._list_or_unreadable(self.splits_of_file, file)

    def _list_or_unreadable(self, list_file: Callable[[int], Sequence[Split]], file: int) -> Sequence[Split]:
        try:
            return list_file(file)
        except FileError as error:
            # The next pass tries to list it again.
            self.__dict__.pop("_listed", None)
            path = self.paths[file]
            return [Split(path, Unlisted(error), None, 0, file, path)]

    @cached_property
    def _known(self) -> dict[int, Sequence[Split]]:
        # The splits of files that are listed already.
        return {}

    def file_bytes(self) -> Sequence[int]:
        """Return the size of each file: in storage, or in memory if it is not a single file."""
        if isinstance(self.format, OpensFiles) and not isinstance(self.format, DirectoryFormat):
            return self.format.storage.sizes(self.paths)
        listed = map(self.valid_splits_of_file, range(len(self.paths)))
        return [sum(split.num_bytes or 0 for split in splits) for splits in listed]

    def state(self) -> Any:
        storage = self.format.storage if isinstance(self.format, OpensFiles) else Storage()
        return storage.states(self.paths)

    def shard_of_files(self, index: int, num_shards: int, *, by_split: bool) -> ReadFiles:
        """Return a worker's share; files already listed are not listed again."""
        return replace(self, shard=(index, num_shards), by_split=by_split, whole=self)

    def share_of_files(self, index: int, num_shards: int, share: FileShare) -> ReadFiles:
        """Return the share of a worker that reads the given files."""
        return replace(self, shard=(index, num_shards), file_share=share, whole=self)

    def reading(self, regroup: Callable[[Any], Any]) -> Node | None:
        if not isinstance(self.format, ChoosesColumns):
            return None
        form: Any = self.format
        nest = form.columns
        if nest is None:
            nest = list(self.spec.packed)
        if isinstance(nest, list):
            nest = {name: name for name in nest}
        columns = regroup(nest)
        # A lone list would be names of a dict, and not of an array of these columns.
        return None if isinstance(columns, list) else replace(self, format=replace(form, columns=columns))

    def with_nulls(self) -> Node:
        if not isinstance(self.format, ReplacesNulls):
            return self
        form: Any = self.format
        return replace(self, format=replace(form, missing=NullsKept(form.missing or {})), whole=None)

    def pieces(self) -> Pieces:
        counts = [split.num_rows for split in self.splits()]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return Pieces(len(counts), self._cut_splits, is_exact=False)
        num_rows = sum(known)
        return Pieces(num_rows, self._cut_rows, -(-num_rows // max(len(known), 1)))

    def _cut_splits(self, first: int, stop: int) -> Node:
        return replace(self, span=(first, stop), whole=self)

    def _cut_rows(self, first: int, stop: int) -> Node:
        bounds = self._bounds
        begin = bisect_right(bounds, first) - 1
        span = self._cut_splits(begin, max(bisect_left(bounds, stop), begin))
        return Take(Skip(span, first - bounds[begin]), stop - first)

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(split.num_rows or 0 for split in self.splits())]

    def __getstate__(self) -> dict[str, Any]:
        # The listing of other files is of no use in another process.
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def __str__(self) -> str:
        shard = "" if self.span is None else f", splits {self.span[0]} to {self.span[1]}"
        if self.shard is not None and self.file_share is not None:
            shard = f", {len(self.file_share.files)} files by size, {self.shard[0]} of {self.shard[1]}"
        elif self.shard is not None:
            shard = f", {'splits' if self.by_split else 'files'} {self.shard[0]} mod {self.shard[1]}"
        first = self.paths[0] if len(self.paths) == 1 else f"{len(self.paths)} files: {self.paths[0]} ..."
        return without_secrets(f"{self.name}({first}{shard})")

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        reader = ReadRows(self.format)
        if isinstance(self.format, GroupsFiles):
            groups = GroupSplits(self.valid_splits, self.format.num_grouped)
            return Read(groups, ReadGroup(reader), self.name, is_of_rows=True)
        return Read(self.valid_splits, ReadLikeFirst(reader, self.spec.structure), self.name)


# The number of local files whose indexes may be read for a display.
_MOST_CHEAP_FILES: Final = 32
# The number of files to list at a time when splits are accessed in order.
_LISTED_AT_ONCE: Final = 64


class FileSplits(Sequence[Split]):
    """The splits of files, which are listed only as far as splits are accessed.

    Parameters
    ----------
    list_file
        Returns the splits of a file by its number.
    files
        The numbers of the files, in order.
    num_threads
        The number of files to list at the same time.
    """

    def __init__(self, list_file: Callable[[int], Sequence[Split]], files: Sequence[int], num_threads: int) -> None:
        self._list_file = list_file
        self._files = files
        self._num_threads = num_threads
        self._found: list[Split] = []
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """True if all files are listed."""
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
                    listed = _shown(pool.map(self._list_file, files), len(files))
            else:
                listed = _shown(map(self._list_file, files), len(files))
            self._found.extend(split for splits in listed for split in splits)
            self._files = rest

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)


def _shown(listed: Iterator[Sequence[Split]], number: int) -> list[Sequence[Split]]:
    if number <= _LISTED_AT_ONCE:
        return list(listed)
    return list(shown(listed, "list files", lambda: number, lambda _: 1, "files"))


@dataclass(frozen=True)
class Unlisted:
    """The payload of a split that stands for a file that cannot be listed."""

    error: FileError


@dataclass(frozen=True)
class ReadRows:
    """A function that reads a split; damaged rows are failed elements in their places.

    Any error of the reader or its library names the split.
    """

    format: Format

    def __call__(self, split: Split) -> Rows:
        if isinstance(split.payload, Unlisted):
            raise copied_error(split.payload.error)
        try:
            with damage(split.label):
                return self.format.read(split)
        except DamagedFileError as error:
            if not isinstance(self.format, ReadsValidRows):
                raise
            try:
                with damage(split.label):
                    rows, parts = self.format.read_valid_rows(split)
            except DamagedFileError:
                raise error from None
            except FileError as other:
                raise FileError(f"{error}; its valid rows cannot be read alone: {other}") from other
            if isinstance(rows, Block) and parts and rows.origin == Origin(split.label):
                # Rows after a damaged one have other numbers here than in the split.
                rows.origin = Origin(split.label, is_exact=False)
            return with_damage(rows, parts, split, error)


def with_damage(rows: Rows, parts: Sequence[DamagedPart], split: Split, first: DamagedFileError) -> Rows:
    """Return the elements of a split, with its damaged parts in their places.

    ``first`` is the error of reading them all together, which the first damaged part caused: it says more.

    Raises
    ------
    DamagedFileError
        They are more or fewer than the split has.
    """
    failed: dict[int, FailedElement] = {}
    for place, where, reason, num_rows in sorted(parts, key=itemgetter(0)):
        error = DamagedFileError(f"{where}: {reason}") if failed else first
        item = FailedElement(error, where, split.path, f"{where} {uuid.uuid4().hex}", stands_for_many=num_rows is None)
        failed.update(dict.fromkeys(range(place, place + (1 if num_rows is None else num_rows)), item))
    if split.num_rows is not None and len(rows) + len(failed) != split.num_rows:
        raise DamagedFileError(f"{split.label}: {len(rows) + len(failed)} rows, and not {split.num_rows}")
    return PartlyFailed(rows, failed) if failed else rows


@dataclass(frozen=True)
class ReadLikeFirst:
    """A function that reads a split and gives its elements the order of columns of the first file.

    Parameters
    ----------
    read
        Reads a split.
    structure
        The structure of the elements of the first file, whose dicts may have another order than an equal one.
    """

    read: Callable[[Split], Rows]
    structure: Structure

    def __call__(self, split: Split) -> Rows:
        rows = self.read(split)
        if isinstance(rows, (Block, Bundle)) and rows.structure == self.structure:
            rows.structure = self.structure
            if isinstance(rows, PartlyFailed):
                rows.good.structure = self.structure
        return rows


def read_node(form: Format, paths: tuple[str, ...], name: str | None = None) -> ReadFiles:
    """Return the node of a dataset of files, for dataset classes of their own."""
    node = ReadFiles(paths, form, label=name)
    node.spec  # noqa: B018 - a file that is not of the format, or a column that is not there, shows now
    return node
