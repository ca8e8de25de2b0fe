"""File formats: the interfaces of readers and writers, and the registry.

A format is one file with one class. It lists the splits of a file, returns the spec of its elements, and reads a split
as a block. Paths are anything that fsspec opens. Formats of other packages register under the entry-point group
``daskdist.formats``, by their names.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import IO, Any, Final, Protocol, runtime_checkable

from daskdist.core.block import Block, Bundle, Rows
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError
from daskdist.storage.compression import SUFFIXES
from daskdist.storage.failures import DamagedPart
from daskdist.storage.filesystem import Storage
from daskdist.storage.first_file import FirstFile

GROUP: Final = "daskdist.formats"


# Name -> import path.
FORMATS: Final = {
    "arrow": "daskdist.formats.arrow.arrow_format:Arrow",
    "csv": "daskdist.formats.csv.csv_format:Csv",
    "hdf5": "daskdist.formats.hdf5:Hdf5",
    "images": "daskdist.formats.images:Images",
    "json": "daskdist.formats.json.json_format:Json",
    "npy": "daskdist.formats.npy:Npy",
    "parquet": "daskdist.formats.parquet:Parquet",
    "saved": "daskdist.formats.saved.saved_format:Saved",
    "sql": "daskdist.formats.sql.sql_format:Sql",
    "text": "daskdist.formats.text:Text",
    "tfrecord": "daskdist.formats.tfrecord.tfrecord_format:TFRecord",
    "webdataset": "daskdist.formats.webdataset.webdataset_format:WebDataset",
    "zarr": "daskdist.formats.zarr:Zarr",
}


class Format(Protocol):
    """A reader of one kind of file. Implementations are frozen dataclasses of the reader's options."""

    # The name of the format.
    name: str
    # True if a file may have several splits, so that fewer files than workers can still be shared.
    is_splittable: bool

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of file names without those of compression; the usual one first."""
        ...

    def guess(self, path: str, head: bytes) -> bool:
        """Return whether a file has this format, by its name and its first 64 bytes."""
        ...

    def spec(self, path: str) -> ElementSpec:
        """Return the spec of the elements of a file.

        Raises
        ------
        DamagedFileError
            The file does not have this format, or is damaged.
        FileError
            It lacks something that the options name, or cannot be read for any other reason.
        """
        ...

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        """List the splits of file number ``file``, which together have its elements in order, each once.

        Raises
        ------
        DamagedFileError
            The file is damaged.
        FileError
            Its elements are known to differ from those of the first, or it cannot be read for any other reason.
        """
        ...

    def read(self, split: Split) -> Block | Bundle:
        """Read the rows of a split, in order; the same every time.

        Raises
        ------
        DamagedFileError
            The data is damaged; the message names file and split. Users can have that left out.
        FileError
            It cannot be read for any other reason.
        """
        ...


@runtime_checkable
class OpensFiles(Protocol):
    """A format that opens its files with options of the file system."""

    storage: Storage


@runtime_checkable
class LearnsFirst(Protocol):
    """A format that learns from other files too what the elements of the first are."""

    def first(self, paths: Sequence[str]) -> FirstFile:
        """Return the first readable file."""
        ...


@runtime_checkable
class ChoosesColumns(Protocol):
    """A format that can read only some columns of its files, for ``select``."""

    can_choose_columns: bool
    # Which columns, in what structure: see `daskdist.tables.columns.Columns.of`.
    columns: Any


@runtime_checkable
class ReadsValidRows(Protocol):
    """A format with units smaller than a split that can be damaged independently."""

    def read_valid_rows(self, split: Split) -> tuple[Block | Bundle, list[DamagedPart]]:
        """Return the valid rows of a split, and its damaged parts.

        Raises
        ------
        DamagedFileError
            The data is damaged so that nothing can be read.
        FileError
            It cannot be read for any other reason.
        """
        ...


@runtime_checkable
class ReplacesNulls(Protocol):
    """A format of tables, which may have nulls."""

    # The replacements by column.
    missing: Mapping[str, Any] | None


@runtime_checkable
class GroupsFiles(Protocol):
    """A format of small files, several of which are read together."""

    # The largest number of splits to group.
    num_grouped: int


@runtime_checkable
class DirectoryFormat(Protocol):
    """A format of directories, each of which is read like a file of other formats."""

    # The names of files of which such a directory has at least one; `Format.guess` is called for that file.
    marks: tuple[str, ...]


@runtime_checkable
class WritableFormat(Protocol):
    """A format that can also be written, with one file for each block of a dataset."""

    name: str

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of file names; the usual one first."""
        ...

    def check(self, spec: ElementSpec) -> None:
        """Check that elements of a spec can be written.

        Raises
        ------
        ArgumentError
            Elements of this spec cannot be written; the message names the leaf and a remedy.
        """
        ...

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        """Write elements as one file.

        Parameters
        ----------
        rows
            The elements.
        file
            The file to write to; it is not closed.
        """
        ...


def format_named(name: str) -> type[Format]:
    """Return the class of a built-in or registered format.

    Raises
    ------
    ArgumentError
        The name is unknown, or a requirement is not installed.
    """
    formats_by_name = FORMATS if name in FORMATS else installed()
    if name not in formats_by_name:
        close = difflib.get_close_matches(name, formats_by_name, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"no format {name!r}; there are {', '.join(map(repr, sorted(formats_by_name)))}{hint}")
    module, _, attribute = formats_by_name[name].partition(":")
    format_class: type[Format] = getattr(importlib.import_module(module), attribute)
    return format_class


def endings(form: Format) -> tuple[str, ...]:
    """Return the suffixes of a format's files in a directory, compressed or not."""
    return tuple(end + more for end in form.suffixes for more in ("", *SUFFIXES)) or ("",)


def installed() -> dict[str, str]:
    """Return all formats by name: the built-in ones, and registered ones, which cannot replace them."""
    return {**_registered(tuple((place, _changed_at(place)) for place in sys.path)), **FORMATS}


@functools.lru_cache(maxsize=1)
def _registered(places: tuple[tuple[str, int | None], ...]) -> dict[str, str]:
    # Python itself lists a place of packages again if the time of its last change is another one.
    return {point.name: point.value for point in entry_points(group=GROUP)}


def _changed_at(place: str) -> int | None:
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return None
