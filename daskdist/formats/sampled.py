"""The common options of text formats whose types are inferred from a sample of the first file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from daskdist.errors import ArgumentError
from daskdist.formats.table_files import ReadsTables
from daskdist.storage.compression import has_suffix
from daskdist.storage.filesystem import Storage
from daskdist.storage.hive_partitions import Partitions


@dataclass(frozen=True)
class SampledFormat(ReadsTables):
    """The options of a reader of text.

    Parameters
    ----------
    columns
        The columns and their structure; see `Columns.of`.
    dtypes
        The types of columns that are not inferred.
    missing
        The replacement of missing values, by column.
    sample_bytes
        The number of bytes of the first file from which types are inferred.
    compression
        The compression of the files: ``"infer"``, a name, or None.
    partitions
        The columns encoded in the names of directories.
    storage
        Opens the files.
    """

    columns: Any = None
    dtypes: Mapping[str, Any] | None = None
    missing: Mapping[str, Any] | None = None
    sample_bytes: int = 2**20
    compression: str | None = "infer"
    partitions: Partitions = field(default_factory=Partitions)
    storage: Storage = field(default_factory=Storage)

    suffixes: ClassVar[tuple[str, ...]]
    is_splittable = True

    def __post_init__(self) -> None:
        if not isinstance(self.sample_bytes, int) or self.sample_bytes < 1:
            raise ArgumentError(f"sample_bytes is {self.sample_bytes!r}; give a number of bytes, 1 or more")

    def guess(self, path: str, head: bytes) -> bool:
        return has_suffix(path, self.suffixes)
