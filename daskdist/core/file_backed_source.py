"""Sources that read files, which can be divided among workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daskdist.core.node import Source
from daskdist.core.primitive import Split


@dataclass(frozen=True)
class FileShare:
    """The files that one worker reads if files are divided by size.

    Parameters
    ----------
    files
        The numbers of the files, in order.
    parts
        File number -> the numbers of its splits to read, in order, for files that several workers share.
    are_cut
        Whether any workers share a file, so that the files of all depend on its splits.
    """

    files: Sequence[int]
    parts: Mapping[int, Sequence[int]]
    are_cut: bool = False


@dataclass(frozen=True, eq=False)
class FileBackedSource(Source):
    """A source that reads files, which can be divided among workers."""

    paths: tuple[str, ...]

    @property
    def is_splittable(self) -> bool:
        """Return whether a file can be read in several splits."""
        raise NotImplementedError

    def file_bytes(self) -> Sequence[int]:
        """Return the size of each file: on disk, or in memory if an element of ``paths`` is not a single file."""
        raise NotImplementedError

    def splits_of_file(self, file: int) -> Sequence[Split]:
        """Return the splits of a file by its number; listed once and cached."""
        raise NotImplementedError

    def valid_splits_of_file(self, file: int) -> Sequence[Split]:
        """Return the splits of a file, or if it cannot be listed, one split whose reading fails."""
        raise NotImplementedError

    def valid_splits(self) -> Sequence[Split]:
        """Return the splits of all files, as `valid_splits_of_file` does."""
        raise NotImplementedError

    def shard_of_files(self, index: int, num_shards: int, *, by_split: bool) -> FileBackedSource:
        """Return a worker's share: every ``num_shards``-th file, or split if ``by_split``, from number ``index`` on."""
        raise NotImplementedError

    def share_of_files(self, index: int, num_shards: int, share: FileShare) -> FileBackedSource:
        """Return the share of a worker that reads the files of ``share``."""
        raise NotImplementedError
