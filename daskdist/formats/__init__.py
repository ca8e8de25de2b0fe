"""File formats: what a reader has to offer, and which there are.

A format is one sibling file with one class. It lists the splits of a file, says what spec its elements have,
and reads one split as a block. Paths are anything fsspec opens. Formats of others register under the entry-point
group ``daskdist.formats``, by the name they are called.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import IO, Final, Protocol, runtime_checkable

from daskdist.core.block import Block, Bundle, Rows
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError
from daskdist.storage.schema_check import FirstFile

GROUP: Final = "daskdist.formats"


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """The import path of a format, and the extra it needs.

    Parameters
    ----------
    where
        ``"import.path:Class"``.
    extra
        The extra of this package that has what it needs; empty where nothing is missing.
    """

    where: str
    extra: str = ""


FORMATS: Final = {
    "arrow": FormatEntry("daskdist.formats.arrow.arrow_format:Arrow"),
    "csv": FormatEntry("daskdist.formats.csv.csv_format:Csv"),
    "hdf5": FormatEntry("daskdist.formats.hdf5:Hdf5", extra="hdf5"),
    "images": FormatEntry("daskdist.formats.images:Images", extra="images"),
    "json": FormatEntry("daskdist.formats.json.json_format:Json"),
    "npy": FormatEntry("daskdist.formats.npy:Npy"),
    "parquet": FormatEntry("daskdist.formats.parquet:Parquet"),
    "saved": FormatEntry("daskdist.formats.saved.saved_format:Saved"),
    "sql": FormatEntry("daskdist.formats.sql.sql_format:Sql", extra="sql"),
    "text": FormatEntry("daskdist.formats.text:Text"),
    "tfrecord": FormatEntry("daskdist.formats.tfrecord.tfrecord_format:TFRecord", extra="tfrecord"),
    "webdataset": FormatEntry("daskdist.formats.webdataset.webdataset_format:WebDataset", extra="images"),
    "zarr": FormatEntry("daskdist.formats.zarr:Zarr", extra="zarr"),
}


class Format(Protocol):
    """A reader of one kind of file. Implementations are frozen dataclasses of the reader's options."""

    # The name of the format.
    name: str
    # True if a file has splits below it, so that fewer files than workers still give each its share.
    is_splittable: bool

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The endings of file names without those of compression; the usual one first."""
        ...

    def guess(self, path: str, head: bytes) -> bool:
        """Return whether a file is of this format, by its name and its first bytes (64 where it has as many)."""
        ...

    def spec(self, path: str) -> ElementSpec:
        """Return the spec of the elements of a file.

        Raises
        ------
        FileError
            It is not of this format, or lacks what the options name.
        """
        ...

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        """List the splits of the ``file``-th file, which together are its elements in order, each once.

        Raises
        ------
        FileError
            It is not of this format, is damaged, or its elements are known to be unlike those of the first file.
        """
        ...

    def read(self, split: Split) -> Block | Bundle:
        """Read the rows of a split, in order; the same every time.

        Raises
        ------
        FileError
            The data is damaged; the message names file and split.
        """
        ...


@runtime_checkable
class ReadsValidRows(Protocol):
    """A format with units smaller than a split that can be broken by themselves."""

    def read_valid_rows(self, split: Split) -> Block | Bundle:
        """Read the rows of a split that are readable; list each unit left out in ``skipped``.

        Raises
        ------
        FileError
            Nothing of it can be read.
        """
        ...


@runtime_checkable
class GroupsFiles(Protocol):
    """A format of files so small that several of them are read together."""

    # At most so many splits, of neighbouring files.
    num_grouped: int


@runtime_checkable
class DirectoryFormat(Protocol):
    """A format of directories, each of which is read as a file of others is."""

    # Names of files of which such a directory has one at least. `Format.guess` is asked about that file.
    marks: tuple[str, ...]


@runtime_checkable
class WritableFormat(Protocol):
    """A format that is written too, a file for each of the blocks of a dataset."""

    name: str

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The endings of file names; the usual one first."""
        ...

    def check(self, spec: ElementSpec) -> None:
        """See whether such elements can be written.

        Raises
        ------
        ArgumentError
            They cannot; the message says which leaf, and what to do.
        """
        ...

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        """Write elements as one file.

        Parameters
        ----------
        rows
            The elements.
        file
            Where their bytes go; it is not closed here.
        """
        ...


def format_named(name: str) -> type[Format]:
    """Return the class of a format, one of ours or an installed one.

    Raises
    ------
    ArgumentError
        There is none of that name, or what it needs is not installed.
    """
    found = installed()
    if name not in found:
        close = difflib.get_close_matches(name, found, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"no format {name!r}; there are {', '.join(map(repr, sorted(found)))}{hint}")
    module, _, attribute = found[name].where.partition(":")
    made: type[Format] = getattr(importlib.import_module(module), attribute)
    return made


def installed() -> dict[str, FormatEntry]:
    """Return all formats by name: ours, and those registered as entry points, which cannot replace ours."""
    others = {point.name: FormatEntry(point.value) for point in entry_points(group=GROUP)}
    return {**others, **FORMATS}
