"""Arrays in files as elements: the rows of one or of several arrays side by side, cut at the ends of chunks.

===================================  ===================================================
an array of                          becomes
===================================  ===================================================
numbers, bools, times, fixed text    rows of that dtype, in native byte order
fields (a structured dtype)          a dict by field
===================================  ===================================================
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import lcm, prod
from typing import Any, Final

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.block import Block, Rows, from_items
from daskdist.core.failing.origin import Origin, SelectedOrigins, origin_from
from daskdist.core.primitive import Split
from daskdist.core.ragged import Ragged, concat
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import FIXED_SIZE_KINDS, LONE, Structure
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.storage.failures import DamagedPart
from daskdist.storage.first_file import FirstFile, differs_from_first
from daskdist.tables.columns import Columns

# The name of the only array of a file without names.
LONE_NAME: Final = ""
# If chunks of all arrays end together only after more than this multiple of a split's size, splits end at the chunks of
# one array.
_STRETCH: Final = 4
# The size of the cache of chunks that splits share, as a multiple of a split's size.
_KEPT: Final = 4
# The most splits of a file: more come from a damaged header, and their list would fill the memory.
_MOST_SPLITS: Final = 2**20


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file.

    Parameters
    ----------
    name
        Its name in the file; empty for the only array of a file without names.
    num_rows
        Its length along axis 0.
    row
        The spec of a row.
    row_bytes
        The approximate size of a row in memory.
    chunk_rows
        The number of rows that are decoded together; 1 if rows can be read independently.
    """

    name: str
    num_rows: int
    row: ElementSpec
    row_bytes: int
    chunk_rows: int = 1

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: np.dtype[Any], path: str, chunk_rows: int = 1) -> StoredArray:
        """Create the description of an array from its shape, which `check_rows` accepts, and its dtype.

        Raises
        ------
        FileError
            The dtype is not supported in elements.
        """
        row = row_spec(dtype, shape[1:], f"{path}{f': array {name!r}' if name else ''}")
        return cls(name, shape[0], row, prod(shape[1:]) * dtype.itemsize, max(chunk_rows, 1))


def check_rows(name: str, shape: Sequence[int], path: str) -> None:
    """Check that an array has rows.

    Raises
    ------
    FileError
        The array has no axis, or a negative length.
    """
    array = f"array {name!r}" if name else "its array"
    if not shape:
        raise FileError(f"{path}: {array} is a single value, without an axis 0 whose rows could be elements")
    if min(shape) < 0:
        raise DamagedFileError(f"{path}: {array} says its shape is {tuple(shape)}: damaged")


def row_spec(dtype: np.dtype[Any], shape: Sequence[int], where: str) -> ElementSpec:
    """Return the spec of a row, shape ``shape``, of an array of a dtype.

    Raises
    ------
    FileError
        No element can hold the dtype.
    """
    if dtype.subdtype is not None:
        base, inner = dtype.subdtype
        return row_spec(base, (*shape, *inner), where)
    if dtype.names:
        # In the order of the leaves of a structure.
        parts = [row_spec(dtype[name], shape, f"{where}, field {name!r}") for name in sorted(dtype.names)]
        return ElementSpec.nest(Structure.of(dict.fromkeys(dtype.names, 0))[1], parts)
    if dtype.kind in "OV":
        kind = "Python objects" if dtype.kind == "O" else f"raw bytes ({dtype})"
        raise FileError(
            f"{where} holds {kind}, which are not supported; store numbers, times or fixed-size text, or leave it out"
        )
    return ElementSpec(LONE, (TensorSpec(tuple(shape), native(dtype)),))


def names_in(asked: Any) -> list[str]:
    """Return the names in a user's structure of names."""
    leaves = [name for leaf in Structure.of(asked)[0] for name in (leaf if isinstance(leaf, list) else [leaf])]
    return [name for name in leaves if isinstance(name, str)]


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype in native byte order, without metadata."""
    return np.dtype(dtype.newbyteorder("=").str) if dtype.kind in FIXED_SIZE_KINDS else dtype


def leaves_of(rows: Any) -> list[Any]:
    """Return the leaves of an array's rows, shape ``(num_rows, ...)``: the array, or one leaf for each field."""
    if isinstance(rows, Ragged):
        return [Ragged(rows.values.astype(native(rows.dtype), copy=False), rows.row_splits)]
    if rows.dtype.names:
        # Copy each field, as fields are interleaved and may be unaligned.
        return [np.ascontiguousarray(leaf) for name in sorted(rows.dtype.names) for leaf in leaves_of(rows[name])]
    native_dtype = native(rows.dtype)
    # A view drops the metadata that a library attached to the dtype.
    has_metadata = rows.dtype == native_dtype and rows.dtype.metadata
    return [rows.view(native_dtype) if has_metadata else rows.astype(native_dtype, copy=False)]


@dataclass(frozen=True)
class StoredArrays:
    """Arrays whose k-th rows together are the k-th element."""

    columns: Columns
    stored: tuple[StoredArray, ...]

    @classmethod
    def of(cls, columns: Columns, describe: Callable[[str], StoredArray], path: str) -> StoredArrays:
        """Return the arrays of a file.

        Raises
        ------
        FileError
            Their lengths differ, or one has no rows.
        """
        stored = tuple(map(describe, columns.names))
        lengths = {array.num_rows for array in stored}
        if len(lengths) > 1:
            sizes = ", ".join(f"{array.name!r} has {array.num_rows}" for array in stored)
            raise FileError(f"{path}: elements need arrays of equal length, but {sizes} rows; name some of them")
        return cls(columns, stored)

    @property
    def num_rows(self) -> int:
        return self.stored[0].num_rows

    @property
    def row_bytes(self) -> int:
        """The size of a row of all arrays."""
        return sum(array.row_bytes for array in self.stored)

    @property
    def spec(self) -> ElementSpec:
        """The spec of an element."""
        rows = {array.name: array.row for array in self.stored}
        return self.columns.spec(rows.__getitem__)

    def cuts(self, path: str) -> list[tuple[int, int]]:
        """Return the rows of each split, between places where chunks of all arrays end.

        If there are too few such places, splits end at the chunks of the array that takes longest to decode.

        Raises
        ------
        FileError
            The number of rows is impossible.
        """
        size = max(in_bytes("split-bytes"), 1)
        step = lcm(*[array.chunk_rows for array in self.stored])
        chunks = [array for array in self.stored if array.chunk_rows > 1]
        if chunks and min(step, self.num_rows) * self.row_bytes > _STRETCH * size:
            step = max(chunks, key=lambda array: array.chunk_rows * array.row_bytes).chunk_rows
        rows = step * max(size // (step * self.row_bytes), 1) if self.row_bytes else max(self.num_rows, 1)
        if self.num_rows > _MOST_SPLITS * rows:
            raise FileError(
                f"{path}: states {self.num_rows} rows, more than {_MOST_SPLITS} splits of {rows}: damaged, or to "
                "be read with a larger daskdist.split-bytes"
            )
        return [(start, min(start + rows, self.num_rows)) for start in range(0, self.num_rows, rows)]

    def splits(
        self,
        path: str,
        file: int,
        payload: Callable[[int, int], Any],
        cuts: Sequence[tuple[int, int]] | None = None,
    ) -> list[Split]:
        """Return the splits of file number ``file``.

        Parameters
        ----------
        path, file
            The file.
        payload
            ``payload(start, stop)`` returns the payload of the split with these rows.
        cuts
            The rows of each split; None for those of the method `cuts`.
        """
        return [
            Split(
                rows_label(path, start, stop),
                payload(start, stop),
                stop - start,
                (stop - start) * self.row_bytes,
                file,
                path,
            )
            for start, stop in (self.cuts(path) if cuts is None else cuts)
        ]

    def block(self, rows: Callable[[StoredArray], Any], label: str) -> Block:
        """Return the elements of some rows of each array."""
        arrays = {array.name: leaves_of(rows(array)) for array in self.stored}
        return Block(self.spec.structure, self.columns.arrays(arrays.__getitem__, label), label)


class RangeReader(ABC):
    """Splits that are ranges of rows, read whole, or without the chunks that cannot be read."""

    @abstractmethod
    def rows(self, part: Any, label: str) -> Block:
        """Return the rows of a range; ``label`` is their name in messages."""

    def read(self, split: Split) -> Block:
        block = self.rows(split.payload, split.label)
        block.origin = origin_from(split.path, split.payload.start, len(block))
        return block

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        """Return the valid rows, and the damaged ones: those between two ends of chunks together."""
        part, path = split.payload, split.path or ""
        arrays: StoredArrays = part.arrays
        ends = {
            row
            for array in arrays.stored
            if array.chunk_rows > 1
            for row in range(part.start - part.start % array.chunk_rows, part.stop, array.chunk_rows)
            if row > part.start
        }
        kept: list[Block] = []
        numbers: list[int] = []
        damaged: list[DamagedPart] = []
        for start, stop in pairwise([part.start, *sorted(ends), part.stop]):
            label = rows_label(path, start, stop)
            try:
                kept.append(self.rows(replace(part, start=start, stop=stop), label))
                numbers += range(start, stop)
            except DamagedFileError as error:
                if not kept and stop == part.stop:
                    raise
                damaged.append(DamagedPart(start - part.start, label, str(error), stop - start))
        block = Block.concat(kept, split.label) if len(kept) > 1 else kept[0]
        block.origin = SelectedOrigins([Origin(path)], numbers)
        return block, damaged


def chosen(asked: Any, names: Sequence[str], path: str, first: FirstFile | None, kind: str = "array") -> Columns:
    """Return the selected arrays of a file.

    Parameters
    ----------
    asked
        The user's selection; see `Columns.of`.
    names
        The names of the file's arrays; `LONE_NAME` for a single one.
    path
        The path of the file, for messages.
    first
        The first file, if this is another one.
    kind
        The word for an array in messages.

    Raises
    ------
    ArgumentError
        An array does not exist.
    FileError
        An array exists only in the first file; or there are no arrays.
    """
    if asked is None and not names:
        raise FileError(f"{path}: has no arrays")
    try:
        if names == [LONE_NAME] and asked is not None:
            raise ArgumentError(f"it is one array without a name, but {kind}s is {asked!r}; leave {kind}s out")
        return Columns.of(LONE_NAME if names == [LONE_NAME] else asked, names, kind)
    except ArgumentError as error:
        if first is None or first.path == path:
            raise ArgumentError(f"{path}: {error}") from None
        raise FileError(f"{path}: {error}; the first file, {first.path}, has it") from None


def check_alike(arrays: StoredArrays, path: str, first: FirstFile) -> None:
    """Check that the elements of a file have the spec of those of the first, but for the width of text and bytes.

    Raises
    ------
    FileError
        The specs differ.
    """
    spec = arrays.spec
    common = spec.most_general_common_spec(first.spec)
    if common is None or [leaf.shape for leaf in common.leaves] != [leaf.shape for leaf in first.spec.leaves]:
        raise differs_from_first(path, spec, first)


def rows_label(path: str, start: int, stop: int) -> str:
    """Return the name of a split of some rows for messages."""
    return f"{path} rows {start} to {stop}"


# --- chunks that splits share ---


@dataclass(eq=False)
class _Chunk:
    # Rows that were decoded together, and the number of them that were not read yet.
    num_left: int
    lock: Any = field(default_factory=threading.Lock)
    rows: Any = None


class _SharedChunks:
    # A cache that keeps a chunk until each of its rows was read once, as in a pass over the file.
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Any, _Chunk] = OrderedDict()

    def rows(self, key: Any, start: int, stop: int, num_rows: int, decode: Callable[[], Any]) -> Any:
        """Return rows ``start`` to ``stop`` of a chunk, which one caller decodes while others wait."""
        with self._lock:
            chunk = self._chunks.setdefault(key, _Chunk(num_rows))
            self._chunks.move_to_end(key)
        try:
            with chunk.lock:
                if chunk.rows is None:
                    chunk.rows = decode()
        except BaseException:
            with self._lock:
                self._drop(key, chunk)
            raise
        with self._lock:
            chunk.num_left -= stop - start
            if chunk.num_left <= 0:
                self._drop(key, chunk)
            limit = _KEPT * in_bytes("split-bytes")
            while len(self._chunks) > 1 and sum(_size(chunk) for chunk in self._chunks.values()) > limit:
                self._chunks.popitem(last=False)
        return chunk.rows[start:stop]

    def _drop(self, key: Any, chunk: _Chunk) -> None:
        if self._chunks.get(key) is chunk:
            del self._chunks[key]


def _size(chunk: _Chunk) -> int:
    return 0 if chunk.rows is None else int(chunk.rows.nbytes)


_shared = _SharedChunks()


def by_chunks(stored: StoredArray, start: int, stop: int, key: Any, fetch: Callable[[int, int], Any]) -> Any:
    """Return rows ``start`` to ``stop`` of an array; consecutive splits decode each chunk once.

    Parameters
    ----------
    stored
        The array.
    start, stop
        The rows.
    key
        Identifies the array and its current version.
    fetch
        ``fetch(start, stop)`` decodes rows.
    """
    size = stored.chunk_rows
    parts = []
    while start < stop:
        chunk = start - start % size
        whole = stop if stop == stored.num_rows else stop - stop % size
        if start == chunk and whole > start:
            parts.append(fetch(start, whole))
            start = whole
            continue
        end = min(chunk + size, stored.num_rows)
        part = _shared.rows(
            (key, chunk), start - chunk, min(stop, end) - chunk, end - chunk, partial(fetch, chunk, end)
        )
        parts.append(part)
        start = min(stop, end)
    return parts[0] if len(parts) == 1 else concat(parts)


# --- writing ---


def columns_of(rows: Rows) -> list[Any]:
    """Return the leaves of elements for writing, shape ``(num_rows, ...)``.

    Raises
    ------
    ArgumentError
        Their shapes or dtypes differ, so that they cannot form an array.
    """
    whole: Rows = rows
    if not isinstance(rows, Block):
        whole = from_items(rows.structure, [rows.item(index) for index in range(len(rows))], rows.label)
    if not isinstance(whole, Block):
        reason = "their shapes or dtypes differ" if len(whole) else "there are none, and so no shape"
        raise ArgumentError(f"elements of {rows.label or 'this data'} cannot form arrays: {reason}")
    return list(whole.leaves)


def check_writable(spec: ElementSpec, name: str, kinds: str, advice: str) -> list[str]:
    """Return the names of the arrays to write elements as: those of a dict, or ``""`` for a single leaf.

    Raises
    ------
    ArgumentError
        Elements of this spec cannot be written; the message names the leaf and a remedy.
    """
    names = array_names(spec.structure, name)
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        which = f"leaf {path or '(the element)'} is {leaf}"
        if type(leaf) is not TensorSpec or None in leaf.shape:
            raise ArgumentError(
                f"{name} takes arrays of one shape, but {which}; use padded_batch and unbatch, or save or to_parquet"
            )
        if leaf.dtype.kind not in kinds or (leaf.dtype.kind in "fc" and leaf.dtype.itemsize not in (2, 4, 8, 16)):
            raise ArgumentError(f"{name} takes no {leaf.dtype}, but {which}; {advice}")
    return names


def array_names(structure: Structure, name: str) -> list[str]:
    """Return the name of the array to write each leaf as; ``""`` for a single leaf.

    Raises
    ------
    ArgumentError
        Elements are neither a single leaf nor a dict of leaves.
    """
    if structure == LONE:
        return [""]
    nest = structure.pack(range(structure.num_leaves))
    if isinstance(nest, dict) and all(isinstance(leaf, int) and _ok(key) for key, leaf in nest.items()):
        return sorted(nest, key=nest.__getitem__)
    raise ArgumentError(
        f"{name} takes a single array or a dict of arrays, with names without '/', but elements are {structure}; "
        "convert them to such a dict with map(...)"
    )


def _ok(name: object) -> bool:
    # A name that does not leave the directory.
    if not isinstance(name, str):
        return False
    return bool(name) and "/" not in name and "\\" not in name and "\0" not in name and not name.startswith(".")
