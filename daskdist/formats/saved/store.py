"""Parts of saved datasets: elements in Arrow IPC files, which any Arrow reader can open.

A leaf is a column, named by its path, in one of four layouts:

* ``rows``: arrays of one dtype that are rows of an array or of a `Ragged`. Axes are fixed-size lists, rows of different
  lengths are lists, and text and bytes are Arrow's. Bools are bytes, times int64, complex numbers pairs.
* ``shaped``: arrays of one dtype and number of axes that differ in more than their length, such as pictures: the shape
  of each, and its values.
* ``words``: scalars of ``str_`` or ``bytes_`` of different lengths.
* ``each``: anything else; every element is a separate small Arrow stream.

An uncompressed local file is mapped into memory: numbers are used in place, and only accessed data is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from daskdist.core.block import Block, Bundle, Rows
from daskdist.core.json_codec import dtype_from_json, dtype_to_json, no_dataset
from daskdist.core.ragged import Ragged
from daskdist.core.structure import TEXT, Leaves, Nested, Structure, as_array
from daskdist.core.to_numpy import native
from daskdist.errors import ArgumentError, FileError, StackError
from daskdist.formats.saved.manifest import KEY, SavedPart, codec
from daskdist.storage.atomic_file import is_on_disk, located, writing
from daskdist.storage.failures import damage
from daskdist.storage.filesystem import opened_remote
from daskdist.storage.libraries import pa
from daskdist.tables.to_arrow import columns_of
from daskdist.url_secrets import shown_cause


@dataclass(frozen=True, slots=True)
class _Layout:
    # The layout of one leaf's elements in their column; `dtype` and `shape` are those of the innermost rows, and
    # `splits` the dtypes of the row splits around them, outermost first.
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    splits: tuple[str, ...] = ()

    def to_json(self) -> Any:
        return [self.kind, dtype_to_json(self.dtype), list(self.shape), list(self.splits)]

    @staticmethod
    def from_json(content: Any) -> _Layout:
        kind, dtype, shape, splits = content
        return _Layout(kind, dtype_from_json(dtype), tuple(shape), tuple(splits))

    @property
    def inner(self) -> _Layout:
        """The layout of the contents of the outermost rows."""
        return _Layout(self.kind, self.dtype, self.shape, self.splits[1:])

    @property
    def is_strings(self) -> bool:
        return self.dtype in (TEXT, object)

    @property
    def width(self) -> int:
        """The number of values of an innermost row; also 0 if they have no bytes."""
        return prod(self.shape) if self.dtype.itemsize else 0

    def empty(self) -> Any:
        """Return a column without rows."""
        column: Any = _valueless(0, self)
        for dtype in reversed(self.splits):
            column = Ragged(column, np.zeros(1, dtype))
        return column


def _valueless(num_rows: int, layout: _Layout) -> Any:
    # Not np.zeros, which widens text without characters.
    return np.ndarray((num_rows, *layout.shape), layout.dtype)


# --- writing ---


def write_part(rows: Rows, directory: str, name: str, compression: str | None = None) -> SavedPart:
    """Write elements to a file, which gets its name when it is complete.

    Parameters
    ----------
    rows
        The elements, one for each row.
    directory
        A local path or an fsspec URL; created if it does not exist.
    name
        The name of the file, without its ``.arrow``.
    compression
        ``"lz4"``, ``"zstd"``, ``"AUTO"``, which is lz4, or None.

    Raises
    ------
    ArgumentError
        An element has a leaf that cannot be saved, or an argument is out of range.
    FileError
        The file cannot be written.

    Notes
    -----
    Numbers are restored in native byte order, and arrays without axes as scalars.
    """
    options = pa.ipc.IpcWriteOptions(compression=codec(compression), use_threads=False)
    batch = _record_batch(rows)
    part = SavedPart(f"{name}.arrow", len(rows), int(batch.nbytes))
    with writing(directory, part.name) as file, pa.ipc.new_file(file, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return part


def _record_batch(rows: Rows) -> Any:
    paths = rows.structure.paths
    columns = [_checked(column, path) for column, path in zip(columns_of(rows), paths, strict=True)]
    layouts, arrays = [], []
    for column, path in zip(columns, paths, strict=True):
        try:
            layout, array = _lay_out(column)
        except ArgumentError as error:
            raise ArgumentError(f"{error} (leaf {path or 'that is the element'})") from None
        layouts.append(layout)
        arrays.append(array)
    # Rows of a block of text are strings, those of a bundle arrays, so the two must be distinguished.
    is_block = isinstance(rows, Block) or (bool(columns) and all(map(_gives_rows, columns)))
    schema = pa.schema([pa.field(path, array.type) for path, array in zip(paths, arrays, strict=True)])
    content = {"num_rows": len(rows), "is_block": is_block, "layouts": [layout.to_json() for layout in layouts]}
    return pa.record_batch(arrays, schema=_with_metadata(schema, **content))


def _with_metadata(schema: Any, **content: Any) -> Any:
    known = json.loads(schema.metadata[KEY]) if schema.metadata else {}
    return schema.with_metadata({KEY: json.dumps(known | content)})


def _gives_rows(column: Any) -> bool:
    return not isinstance(column, list) and (column.ndim > 1 or column.dtype not in (TEXT, object))


def _checked(column: Any, path: str) -> Any:
    # Return a column in native byte order, as one array or `Ragged` if that restores each element exactly.
    if isinstance(column, list):
        return _gathered([_checked(leaf, path) for leaf in column])
    if isinstance(column, Nested):
        raise ArgumentError(no_dataset(path))
    if isinstance(column, Ragged):
        values = _checked(column.values, path)
        return column if values is column.values else Ragged(values, column.row_splits)
    if not isinstance(column, (np.ndarray, np.generic)):
        raise ArgumentError(
            f"save: leaf {path or '(the element)'} is {type(column).__module__}.{type(column).__name__}; "
            "only arrays in host memory can be saved"
        )
    return native(column)


def _gathered(leaves: list[Any]) -> Any:
    if not leaves or len({_likeness(leaf) for leaf in leaves}) > 1 or _is_word(leaves[0]):
        return leaves
    if isinstance(leaves[0], Ragged):
        return Ragged.of(leaves)
    shapes = {leaf.shape for leaf in leaves}
    if len(shapes) == 1:
        return np.stack(leaves)
    return Ragged.of(leaves) if len({shape[1:] for shape in shapes}) == 1 else leaves


def _likeness(leaf: Any) -> Any:
    # Return a key that is equal for leaves that one column can hold, as rows or shaped.
    if isinstance(leaf, Ragged):
        return leaf.row_splits.dtype, _row_likeness(leaf.values)
    return leaf.ndim, leaf.dtype, type(leaf) if _is_word(leaf) else None


def _row_likeness(values: Any) -> Any:
    if isinstance(values, Ragged):
        return values.row_splits.dtype, _row_likeness(values.values)
    return values.shape[1:], values.dtype


def _is_word(leaf: Any) -> bool:
    # An array of text scalars would drop trailing zeros.
    return isinstance(leaf, (np.str_, np.bytes_))


def _lay_out(column: Any) -> tuple[_Layout, Any]:
    if not isinstance(column, list):
        return _layout_of(column), _to_arrow(column)
    if len({_likeness(leaf) for leaf in column}) == 1:
        first = column[0]
        if _is_word(first):
            words = [leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else bytes(leaf) for leaf in column]
            return _Layout("words", np.dtype(type(first))), pa.array(words, pa.large_binary())
        if isinstance(first, np.ndarray) and first.dtype.itemsize:
            shapes = _to_arrow(np.array([leaf.shape for leaf in column], np.int64))
            values = _to_arrow(Ragged.of([leaf.reshape(-1) for leaf in column]))
            return (
                _Layout("shaped", first.dtype, (first.ndim,)),
                pa.StructArray.from_arrays([shapes, values], ["shape", "values"]),
            )
    return _Layout("each", np.dtype(object)), pa.array(map(_stream, column), pa.large_binary())


def _layout_of(column: Any) -> _Layout:
    splits = []
    while isinstance(column, Ragged):
        splits.append(column.row_splits.dtype.str)
        column = column.values
    return _Layout("rows", column.dtype, column.shape[1:], tuple(splits))


def _to_arrow(column: Any) -> Any:
    if isinstance(column, Ragged):
        kind = pa.ListArray if column.row_splits.dtype == np.int32 else pa.LargeListArray
        return kind.from_arrays(pa.array(column.row_splits), _to_arrow(column.values))
    layout = _layout_of(column)
    if not (width := layout.width):
        return pa.nulls(len(column))
    if layout.is_strings:
        flat = _strings(column)
    else:
        kind, per_value = _storage(layout.dtype)
        width *= per_value
        buffer = pa.py_buffer(np.ascontiguousarray(column).reshape(-1).view(np.uint8))
        flat = pa.Array.from_buffers(kind, len(column) * width, [None, buffer])
    if width == 1 and column.ndim == 1:
        return flat
    if width >= 2**31:
        raise ArgumentError(f"save: an element of {width} values is too large; split it into rows first")
    return pa.FixedSizeListArray.from_arrays(flat, width)


def _strings(column: Any) -> Any:
    values = column.reshape(-1).tolist()
    if column.dtype == TEXT:
        return pa.array(values, pa.large_string())
    odd = next((value for value in values if type(value) is not bytes), None)
    if odd is not None or None in values:
        raise ArgumentError(f"save: an array of objects holds {type(odd).__name__}, but only bytes can be saved")
    return pa.array(values, pa.large_binary())


def _storage(dtype: np.dtype[Any]) -> tuple[Any, int]:
    # Return the Arrow type of a value's numbers, and the number of them in a value.
    dtype_to_json(dtype)
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return pa.from_numpy_dtype(dtype), 1
    if dtype.kind == "c" and dtype.itemsize <= 16:
        return (pa.float32() if dtype.itemsize == 8 else pa.float64()), 2
    if dtype.kind in "mM":
        return pa.int64(), 1
    return (pa.uint8() if dtype.kind == "b" else pa.binary(dtype.itemsize)), 1


def _stream(leaf: Any) -> bytes:
    # Return one leaf as a file of one row, so that it may be anything that a column can hold.
    if isinstance(leaf, Ragged):
        layout, array = _lay_out(Ragged(leaf, np.array([0, len(leaf)])))
    else:
        layout, array = _lay_out([leaf] if _is_word(leaf) else leaf[None])
    schema = _with_metadata(pa.schema([pa.field("", array.type)]), layout=layout.to_json())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([array], schema=schema))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


# --- reading ---


def read_part(directory: str, part: SavedPart, structure: Structure) -> Block | Bundle:
    """Read the elements of a part.

    Parameters
    ----------
    directory
        The directory of the part: a local path or an fsspec URL.
    part, structure
        The structure and specs in the manifest.

    Returns
    -------
    Block or Bundle
        A block if a block was written, or its rows equal the elements; otherwise a bundle.

    Raises
    ------
    FileError
        The file is missing, damaged, or does not have this structure.

    Notes
    -----
    Values are not checked: altered numbers are not noticed. An uncompressed local file must not change while its
    elements are in use; it may be deleted.
    """
    with _opened(directory, part.name) as (path, reader):
        content = json.loads(reader.schema.metadata[KEY])
        if content["num_rows"] != part.num_rows:
            raise FileError(f"{path}: has {content['num_rows']} rows, but {part.num_rows} in the manifest")
        if tuple(reader.schema.names) != structure.paths:
            raise FileError(f"{path}: its leaves are {reader.schema.names}, but {structure.paths} are expected")
        layouts = [_Layout.from_json(layout) for layout in content["layouts"]]
        columns = _columns(reader, layouts, part.num_rows)
        leaves = [_finished(column, layout) for column, layout in zip(columns, layouts, strict=True)]
        if content["is_block"]:
            return Block(structure, leaves, path)
        items: list[Leaves] = (
            list(zip(*[map(as_array, leaf) for leaf in leaves], strict=True)) if leaves else [()] * part.num_rows
        )
        return Bundle(structure, items, path)


@contextmanager
def _opened(directory: str, name: str) -> Iterator[tuple[str, Any]]:
    fs, root = located(directory)
    path = f"{root}/{name}"
    with damage(path):
        # Arrays keep a file mapped after it is closed.
        try:
            source = pa.memory_map(os.fsencode(path)) if is_on_disk(fs) else opened_remote(fs, path)
        except FileNotFoundError as error:
            raise FileError(
                f"{path}: not found: deleted since it was saved, or on a disk that this machine cannot access"
            ) from shown_cause(error)
        with source, pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            if KEY not in (reader.schema.metadata or {}):
                raise FileError(f"{path}: an Arrow file, but not of a saved dataset")
            try:
                yield path, reader
            # A layout, shape or dtype that is impossible.
            except (ArgumentError, StackError) as error:
                raise ValueError(error) from shown_cause(error)


def _columns(reader: Any, layouts: Sequence[_Layout], num_rows: int) -> list[Any]:
    try:
        batch = reader.get_batch(0)
        if reader.num_record_batches > 1:
            # Earlier versions cut compressed parts into several batches.
            (batch,) = reader.read_all().combine_chunks().to_batches()
    except MemoryError as error:
        # The length is invalid, since any part fits into memory.
        raise ValueError(error) from None
    if layouts and batch.num_rows != num_rows:
        raise ValueError(f"there are {batch.num_rows} rows, not {num_rows}")
    return [_laid(array, layout) for array, layout in zip(batch.columns, layouts, strict=True)]


def _laid(array: Any, layout: _Layout) -> Any:
    """Return the values of a column without copying: arrays, and for text `Ragged` bytes."""
    if layout.kind == "rows":
        expected = _to_arrow(layout.empty()).type
        if array.type != expected:
            raise ValueError(f"a column of {array.type}, but its layout says {expected}")
        return _from_arrow(array, layout)
    if layout.kind == "shaped" and pa.types.is_struct(array.type) and not array.null_count:
        shapes, values = _shaped(layout)
        return _laid(array.field("shape"), shapes), _laid(array.field("values"), values)
    if layout.kind not in ("words", "each") or array.type != pa.large_binary():
        raise ValueError(f"a column of {array.type} with layout {layout.kind!r}")
    return _bytes_from_arrow(array)


def _from_arrow(array: Any, layout: _Layout) -> Any:
    if layout.splits:
        return Ragged(_from_arrow(array.values, layout.inner), _offsets(array, np.dtype(layout.splits[0])))
    if not layout.width:
        return _valueless(len(array), layout)
    flat = array.values if hasattr(array.type, "list_size") else array
    if array.null_count or flat.null_count:
        raise ValueError(f"{array.null_count or flat.null_count} values are null")
    if layout.is_strings:
        return Ragged(_bytes_from_arrow(flat), np.arange(len(array) + 1) * layout.width)
    numbers = np.frombuffer(flat.buffers()[1] or b"", layout.dtype, len(array) * layout.width)
    return numbers.reshape(len(array), *layout.shape)


def _bytes_from_arrow(array: Any) -> Ragged:
    splits = _offsets(array, np.dtype(np.int64))
    return Ragged(np.frombuffer(array.buffers()[2] or b"", np.uint8, int(splits[-1])), splits)


def _offsets(array: Any, dtype: np.dtype[Any]) -> Any:
    if array.null_count:
        raise ValueError(f"{array.null_count} rows are null")
    # Without rows, Arrow may omit the single offset.
    return np.frombuffer(array.buffers()[1], dtype, len(array) + 1) if len(array) else np.zeros(1, dtype)


def _finished(column: Any, layout: _Layout) -> Any:
    """Return the leaf of all rows: an array or `Ragged`, or a list of the values of each element."""
    if layout.kind == "rows":
        return _decoded(column, layout)
    if layout.kind == "shaped":
        shapes, flat = column[0].tolist(), _decoded(column[1], _shaped(layout)[1])
        return [values.reshape(shape) for values, shape in zip(flat, shapes, strict=True)]
    if layout.kind == "words":
        if layout.dtype.kind == "U":
            return [np.str_(text.decode("utf-8", "surrogatepass")) for text in _cut(column)]
        return [np.bytes_(text) for text in _cut(column)]
    return [_from_stream(text) for text in _cut(column)]


def _shaped(layout: _Layout) -> tuple[_Layout, _Layout]:
    # Return the layouts of the shapes and of the values; the shape of a shaped layout is the number of axes.
    int64 = np.dtype(np.int64)
    return _Layout("rows", int64, layout.shape), _Layout("rows", layout.dtype, (), (int64.str,))


def _decoded(column: Any, layout: _Layout) -> Any:
    if layout.splits:
        return Ragged(_decoded(column.values, layout.inner), column.row_splits)
    if not (layout.is_strings and layout.width):
        return column
    array: np.ndarray[Any, Any]
    if layout.dtype == TEXT:
        array = np.array([text.decode() for text in _cut(column.values)], layout.dtype)
    else:
        array = np.empty(len(column.values), object)
        array[:] = list(_cut(column.values))
    return array.reshape(len(column), *layout.shape)


def _cut(strings: Ragged) -> Iterator[bytes]:
    # One copy of all, as slices of bytes are much cheaper than those of arrays.
    data, splits = strings.values.tobytes(), strings.row_splits.tolist()
    return map(data.__getitem__, map(slice, splits[:-1], splits[1:]))


def _from_stream(data: bytes) -> Any:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        batch = reader.read_next_batch()
        layout = _Layout.from_json(json.loads(reader.schema.metadata[KEY])["layout"])
    return as_array(_finished(_laid(batch.column(0), layout), layout)[0])
