"""The options that formats of text share whose columns have the types of a sample of the first file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from daskdist.errors import ArgumentError
from daskdist.storage.compression import without_suffix
from daskdist.storage.filesystem import Storage
from daskdist.storage.hive_partitions import Partitions
from daskdist.tables.from_arrow import TableReader


@dataclass(frozen=True)
class SampledFormat:
    """Options of a reader of text.

    Parameters
    ----------
    columns
        Which columns, in what structure: see `Columns.of`.
    dtypes
        The types of columns that are not to be inferred.
    missing
        What stands for a missing value, by column.
    sample_bytes
        How much of the first file is looked at for the types of columns.
    compression
        How files are compressed: ``"infer"``, a name, or None.
    partitions
        The columns that the names of directories make.
    storage
        How files are opened.
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
        return without_suffix(path).endswith(self.suffixes)

    @property
    def tables(self) -> TableReader:
        """The conversion of tables to elements."""
        return TableReader(self.columns, self.missing, self.partitions)
