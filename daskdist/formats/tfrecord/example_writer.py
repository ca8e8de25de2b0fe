"""Encoding of elements as ``tf.train.Example`` records, a whole block at once.

Floats become a list of float32 (about seven digits of a float64 remain), integers and bools one of int64, bytes and
text (as UTF-8) one of bytes. Larger numbers are an error. Arrays are written flat in C order; the reader must know
their shape. Features are sorted by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Rows, from_items
from daskdist.core.ragged import Ragged
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec
from daskdist.errors import ArgumentError
from daskdist.tables.byte_rows import RowPieces

Array = np.ndarray[Any, Any]

# Kind of dtype -> tag of its list.
_TAGS: Final = {**dict.fromkeys("f", b"\x12"), **dict.fromkeys("iub", b"\x1a"), **dict.fromkeys("OSTU", b"\x0a")}
_ONE: Final = b"\x0a"
_VARINT_BYTES: Final = 10


def check_example(spec: ElementSpec) -> None:
    """Check that elements can be written as examples.

    Raises
    ------
    ArgumentError
        Elements of this spec cannot be written; the message names the leaf and a remedy.
    """
    names(spec.packed)
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if isinstance(leaf, (DatasetSpec, RaggedTensorSpec)):
            raise ArgumentError(
                f"leaf {path} is {leaf}; an example holds arrays: unbatch() first, or map(...) it to one"
            )
        if leaf.dtype.kind not in _TAGS:
            raise ArgumentError(
                f"leaf {path} is {leaf.dtype}; an example holds numbers, bytes and text: map(...) it to one of these"
            )


def names(element: Any) -> list[str]:
    """Return the names of the features of an element.

    Raises
    ------
    ArgumentError
        An element is not a dict of leaves by name.
    """
    if type(element) is not dict or not element or not all(isinstance(name, str) for name in element):
        raise ArgumentError(
            "elements must be bytes, one for each record, or dicts of arrays, one for each example; "
            "convert them with map(lambda x, y: {'x': x, 'y': y}) before writing"
        )
    for name, leaf in element.items():
        if isinstance(leaf, (dict, tuple)):
            raise ArgumentError(
                f"{name!r} holds a nest; an example is flat: give each array a separate name with map(...)"
            )
    return list(element)


def examples_of(rows: Rows) -> tuple[Array, Array]:
    """Return the examples of rows as consecutive bytes, and the number of bytes of each.

    Raises
    ------
    ArgumentError
        An example cannot hold a value.
    """
    paths = names(rows.structure.pack(range(rows.structure.num_leaves)))
    order = rows.structure.pack(range(rows.structure.num_leaves))
    entries = RowPieces(len(rows))
    for name in sorted(paths):
        values, counts = _flat(rows, name, order[name])
        _check_range(rows, name, values, counts)
        entries.extend(_entry(name, values, counts))
    records = RowPieces(len(rows))
    records.same(_ONE)
    _add_numbers(records, entries.lengths)
    records.extend(entries)
    return records.joined(), records.lengths


def _flat(rows: Rows, name: str, leaf: int) -> tuple[Array, Array]:
    # Return the values of a leaf, row by row, and their number in each row.
    if not isinstance(rows, Block):
        items = [rows.item(index)[leaf] for index in range(len(rows))]
        counts = np.array([np.size(item) for item in items], np.int64)
        values = [np.asarray(item).reshape(-1) for item in items]
        _check_together(name, values)
        return np.concatenate(values) if values else np.zeros(0), counts
    column = rows.leaves[leaf]
    if not isinstance(column, Ragged):
        return column.reshape(-1), np.full(len(column), column[:1].size, np.int64)
    splits, values = column.row_splits, column.values
    while isinstance(values, Ragged):
        splits, values = values.row_splits[splits], values.values
    return values.reshape(-1), np.diff(splits) * values[:1].size


def _check_together(name: str, values: Sequence[Array]) -> None:
    # NumPy would combine int64 with uint64, or integers with floats, to float64, and lose digits.
    dtypes = list(dict.fromkeys(array.dtype for array in values))
    if len(dtypes) > 1 and len({_TAGS.get(dtype.kind) for dtype in (*dtypes, np.result_type(*dtypes))}) > 1:
        raise ArgumentError(
            f"leaf {name!r} occurs as {', '.join(map(str, dtypes))}; give all elements one dtype first with map(...)"
        )


def _check_range(rows: Rows, name: str, values: Array, counts: Array) -> None:
    # Raise for a value that is too large for its list.
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            is_over = np.isinf(values.astype(np.float32)) & ~np.isinf(values)
        held = "float32"
    elif values.dtype == np.uint64:
        is_over, held = values > np.uint64(np.iinfo(np.int64).max), "int64"
    else:
        return
    if is_over.any():
        place = int(np.argmax(is_over))
        row = int(np.searchsorted(np.cumsum(counts), place, side="right"))
        advice = "scale it" if held == "float32" else "make it int64, or text,"
        raise ArgumentError(
            f"leaf {name!r} of {rows.where(row)} has {values[place]}; an example holds {held}, but that is more than "
            f"{np.finfo(held).max if held == 'float32' else np.iinfo(held).max}: {advice} with map(...), or write "
            "another format, such as to_parquet"
        )


def _entry(name: str, values: Array, counts: Array) -> RowPieces:
    # Return the entries of one feature in the map, from the inside out, as lengths precede contents.
    tag, content = _TAGS[values.dtype.kind], RowPieces(len(counts))
    if tag == b"\x12":
        packed = np.ascontiguousarray(values, "<f4").view(np.uint8)
        _add_packed(content, packed, 4 * counts)
    elif tag == b"\x1a":
        packed, sizes = _varints(values.astype(np.int64).view(np.uint64))
        ends = np.concatenate([[0], np.cumsum(sizes)])
        _add_packed(content, packed, np.diff(ends[np.concatenate([[0], np.cumsum(counts)])]))
    else:
        packed, sizes = _strings(name, values)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        content.add(packed, np.diff(ends[np.concatenate([[0], np.cumsum(counts)])]))
    key = name.encode()
    feature = RowPieces(len(counts))
    feature.same(tag)
    _add_numbers(feature, content.lengths)
    feature.extend(content)
    inside = RowPieces(len(counts))
    inside.same(_ONE + _number(len(key)) + key + b"\x12")
    _add_numbers(inside, feature.lengths)
    inside.extend(feature)
    entry = RowPieces(len(counts))
    entry.same(_ONE)
    _add_numbers(entry, inside.lengths)
    entry.extend(inside)
    return entry


def _add_packed(pieces: RowPieces, packed: Array, lengths: Array) -> None:
    # Rows without values have no field.
    is_there = lengths > 0
    if is_there.all():
        pieces.same(_ONE)
        _add_numbers(pieces, lengths)
    elif is_there.any():
        head, sizes = _varints(lengths[is_there].astype(np.uint64))
        marks = RowPieces(int(is_there.sum()))
        marks.same(_ONE)
        marks.add(head, sizes)
        lengths_of_marks = np.zeros(len(lengths), np.int64)
        lengths_of_marks[is_there] = marks.lengths
        pieces.add(marks.joined(), lengths_of_marks)
    pieces.add(packed, lengths)


def _add_numbers(pieces: RowPieces, numbers: Array) -> None:
    pieces.add(*_varints(numbers.astype(np.uint64)))


def _strings(name: str, values: Array) -> tuple[Array, Array]:
    # Return strings, each preceded by its tag and length.
    raw: Sequence[Any] = values.tolist()
    if values.dtype.kind in "TU":
        raw = [value.encode() for value in raw]
    elif not all(isinstance(value, bytes) for value in raw):
        other = next(value for value in raw if not isinstance(value, bytes))
        raise ArgumentError(f"leaf {name!r} has {other!r:.80}; give bytes, or text")
    pieces = RowPieces(len(raw))
    lengths = np.fromiter(map(len, raw), np.int64, len(raw))
    pieces.same(_ONE)
    _add_numbers(pieces, lengths)
    pieces.add(np.frombuffer(b"".join(raw), np.uint8), lengths)
    return pieces.joined(), pieces.lengths


def _varints(numbers: Array) -> tuple[Array, Array]:
    # Return the bytes of numbers, seven bits per byte, lowest first, and the number of bytes of each.
    sizes: Array = np.ones(len(numbers), np.int64)
    for place in range(1, _VARINT_BYTES):
        is_more = numbers >= np.uint64(1 << (7 * place))
        if not is_more.any():
            break
        sizes += is_more
    starts = np.cumsum(sizes) - sizes
    content = np.empty(int(sizes.sum()), np.uint8)
    rows = np.arange(len(numbers))
    for place in range(_VARINT_BYTES):
        rows = rows[sizes[rows] > place] if place else rows
        if not len(rows):
            break
        more = np.where(sizes[rows] > place + 1, 128, 0)
        bits = (numbers[rows] >> np.uint64(7 * place)) & np.uint64(127)
        content[starts[rows] + place] = bits | more.astype(np.uint64)
    return content, sizes


def _number(value: int) -> bytes:
    return _varints(np.array([value], np.uint64))[0].tobytes()


def block_of(rows: Rows) -> Rows:
    """Return the rows as columns, if they fit into columns."""
    if isinstance(rows, Block):
        return rows
    return from_items(rows.structure, [rows.item(index) for index in range(len(rows))], rows.label)
