"""File formats: what a reader has to offer, and which there are.

A format is one sibling file with one class. It lists the splits of a file, says what spec its elements have,
and reads one split as a block. Paths are anything fsspec opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from daskdist.core.block import Block, Bundle
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec

# Name -> import path.
FORMATS: Final = {
    "parquet": "daskdist.formats.parquet:Parquet",
    "saved": "daskdist.formats.saved:Saved",
}


class Format(Protocol):
    """How one kind of file is read. Implementations are frozen dataclasses of the reader's options."""

    name: str
    # Whether a file has splits below it, so that fewer files than workers still give each its share.
    is_splittable: bool

    def spec(self, path: str) -> ElementSpec:
        """The spec of the elements of a file.

        Raises
        ------
        FileError
            It is not of this format, or lacks what the options name.
        """
        ...

    def list_splits(self, path: str, file: int, like: str) -> Sequence[Split]:
        """The splits of the ``file``-th file, which together are its elements in order, each once.

        Raises
        ------
        FileError
            It is not of this format, is damaged, or differs in schema from the file ``like``.
        """
        ...

    def read(self, split: Split) -> Block | Bundle:
        """The rows of a split, in order; the same every time.

        Raises
        ------
        FileError
            The data is damaged; the message names file and split.
        """
        ...

    def __dask_tokenize__(self) -> Any: ...
