"""Parsing of the wire format of ``tf.train.Example`` in all records of a block at once.

Each step reads the same item of every record with one NumPy call, at a separate position in each. So records need no
common layout; only records with a layout that no writer produces are left to be parsed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.structure import TEXT
from daskdist.tables.byte_rows import objects_at, rows_at, spans

Array = np.ndarray[Any, Any]

# The number of zeros needed after the records, as wide reads reach beyond the last one.
PADDING: Final = 16
# With fewer records, a step for all costs more than one for each.
_FEW: Final = 24
# A length with a longer encoding would exceed any memory.
_LENGTH_BYTES: Final = 5
_TOO_LONG: Final = 2**62
_VARINT_BYTES: Final = 10

# The tags of length-delimited fields 1 and 2.
_ONE, _TWO = 0x0A, 0x12


class Malformed(Exception):  # noqa: N818 - a signal from the parser to the reader of the file
    """A record is not an example, or does not match the features.

    Parameters
    ----------
    reason
        The problem.
    is_damage
        Whether its bytes cannot be parsed, rather than hold other features than those to read.
    """

    def __init__(self, reason: str, *, is_damage: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_damage = is_damage


@dataclass(frozen=True, slots=True)
class Wanted:
    """A feature to look for.

    Parameters
    ----------
    key
        Its name.
    field
        The number of its list: 1 for bytes, 2 for floats, 3 for integers.
    is_text
        Whether bytes are decoded as text.
    size
        The number of its values; None for any number.
    multiple
        The number of values must be a multiple of this.
    may_be_missing
        Whether records may lack it.
    """

    key: bytes
    field: int
    is_text: bool
    size: int | None
    multiple: int
    may_be_missing: bool


# The values of all rows, the number of values of each row, and a mask of the rows with the feature.
Found = tuple[Array, Array, Array]


def walk(data: Array, starts: Array, stops: Array, features: Sequence[Wanted]) -> tuple[list[Found], Array]:
    """Find the values of features in records.

    Parameters
    ----------
    data
        Bytes, with `PADDING` after the last record.
    starts, stops
        The range of bytes of each record.
    features
        The features to find.

    Returns
    -------
    found
        For each feature the values of the records that are not odd.
    is_odd
        A mask of the records to parse one by one.
    """
    num_rows = len(starts)
    is_odd = np.full(num_rows, num_rows < _FEW)
    lists = [_Lists(num_rows) for _ in features]
    if not is_odd.all():
        _find(data, starts, stops, [feature.key for feature in features], lists, is_odd)
    columns: list[tuple[_Bytes | _Floats | _Integers, Array]] = []
    for feature, places in zip(features, lists, strict=True):
        is_odd |= (places.field != 0) & (places.field != feature.field)
        if not feature.may_be_missing:
            is_odd |= places.field == 0
        column = _READERS[feature.field](data, places, is_odd, feature)
        is_there = places.field != 0
        if feature.size is not None:
            is_odd |= is_there & (column.counts != feature.size)
        elif feature.multiple > 1:
            is_odd |= column.counts % feature.multiple != 0
        columns.append((column, is_there))
    rows = np.flatnonzero(~is_odd)
    return [(column.values(rows), column.counts, is_there) for column, is_there in columns], is_odd


class _Lists:
    # For one feature, the number of its list in each record (0 if absent), and the position of the list.
    def __init__(self, num_rows: int) -> None:
        self.field = np.zeros(num_rows, np.uint8)
        self.start = np.zeros(num_rows, np.int64)
        self.stop = np.zeros(num_rows, np.int64)


def _find(
    data: Array, starts: Array, stops: Array, keys: Sequence[bytes], lists: Sequence[_Lists], is_odd: Array
) -> None:
    # An example is a field of features, these are entries of a key and a feature, and a feature is one list.
    length, at = _lengths(data, starts + 1)
    is_good = (_byte(data, starts) == _ONE) & (at + length == stops)
    is_odd[~is_good] = True
    rows = np.flatnonzero(is_good & (at < stops))
    at, stop = at[rows], stops[rows]
    while len(rows):
        if len(rows) < _FEW:
            is_odd[rows] = True
            return
        length, key_tag = _lengths(data, at + 1)
        end = key_tag + length
        key_length, key = _lengths(data, key_tag + 1)
        value_tag = key + key_length
        value_length, tag = _lengths(data, value_tag + 1)
        field = _byte(data, tag)
        list_length, start = _lengths(data, tag + 1)
        is_empty = value_length == 0
        is_good = (
            (_byte(data, at) == _ONE)
            & (_byte(data, key_tag) == _ONE)
            & (_byte(data, value_tag) == _TWO)
            & (tag + value_length == end)
            & (end <= stop)
            & (is_empty | ((start + list_length == end) & ((field == 0x0A) | (field == 0x12) | (field == 0x1A))))
        )
        if not is_good.all():
            is_odd[rows[~is_good]] = True
            rows, stop, end, key, key_length = (column[is_good] for column in (rows, stop, end, key, key_length))
            field, start, is_empty = field[is_good], start[is_good], is_empty[is_good]
        # A feature without a list overrides an earlier one of its name.
        field = np.where(is_empty, 0, field >> 3)
        for which, is_here in _match_keys(data, key, key_length, keys):
            is_here = is_here & ~is_empty
            kept = rows[is_here]
            places = lists[which]
            places.field[kept], places.start[kept], places.stop[kept] = field[is_here], start[is_here], end[is_here]
        if (end == stop).any():
            is_more = end < stop
            rows, stop, end = rows[is_more], stop[is_more], end[is_more]
        at = end


def _match_keys(data: Array, key: Array, length: Array, keys: Sequence[bytes]) -> list[tuple[int, Array]]:
    # Return the entries of each key; mostly all have the same one, which is tried first.
    if not len(key):
        return []
    first = data[key[0] : key[0] + length[0]].tobytes()
    matches = []
    for which in sorted(range(len(keys)), key=lambda which: keys[which] != first):
        is_here = length == len(keys[which])
        if not is_here.any():
            continue
        for place in range(0, len(keys[which]), 8):
            part = keys[which][place : place + 8]
            mask = np.uint64(2 ** (8 * len(part)) - 1)
            is_here &= (_words(data, key + place) & mask) == np.uint64(int.from_bytes(part, "little"))
        matches.append((which, is_here))
        if is_here.all():
            break
    return matches


def _words(data: Array, at: Array) -> Array:
    words: Array = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))[np.minimum(at, len(data) - 8)]
    return words


def _byte(data: Array, at: Array) -> Array:
    # Positions beyond the end belong to records that turn out to be odd.
    return data.take(at, mode="clip")


def _lengths(data: Array, at: Array) -> tuple[Array, Array]:
    # Return the numbers at some positions, and the positions after them.
    first = _byte(data, at)
    value, following = first.astype(np.int64), at + 1
    if (first < 128).all():
        return value, following
    rows = np.flatnonzero(first >= 128)
    part, place = value[rows] & 127, following[rows]
    for shift in range(7, 7 * _LENGTH_BYTES, 7):
        byte = _byte(data, place).astype(np.int64)
        part |= (byte & 127) << shift
        place = place + 1
        value[rows], following[rows] = part, place
        is_more = byte >= 128
        rows, part, place = rows[is_more], part[is_more], place[is_more]
        if not len(rows):
            return value, following
    value[rows] = _TOO_LONG
    return value, following


def _packed(data: Array, places: _Lists, is_odd: Array) -> tuple[Array, Array]:
    # Return the start and the number of bytes of the values of lists, each of which must be one packed field.
    length, start = _lengths(data, places.start + 1)
    is_good = (_byte(data, places.start) == _ONE) & (start + length == places.stop)
    is_empty = places.start == places.stop
    is_odd |= ~(is_good | is_empty)
    return start, np.where(is_good & ~is_empty & ~is_odd, length, 0)


class _Floats:
    def __init__(self, data: Array, places: _Lists, is_odd: Array, feature: Wanted) -> None:
        self._data = data
        self._start, length = _packed(data, places, is_odd)
        is_odd |= length % 4 != 0
        self.counts = length // 4

    def values(self, rows: Array) -> Array:
        """Return the values of some rows."""
        start, counts = self._start[rows], self.counts[rows]
        if len(rows) and (counts == counts[0]).all():
            return rows_at(self._data, start, 4 * int(counts[0])).view("<f4").reshape(-1)
        places = np.repeat(start - 4 * (np.cumsum(counts) - counts), counts) + 4 * np.arange(counts.sum())
        values: Array = rows_at(self._data, places, 4).view("<f4").reshape(-1)
        return values


class _Integers:
    _values: Array
    counts: Array

    def __init__(self, data: Array, places: _Lists, is_odd: Array, feature: Wanted) -> None:
        start, length = _packed(data, places, is_odd)
        if not len(length):
            content = np.zeros(0, np.uint8)
        elif (length == length[0]).all():
            content = rows_at(data, start, int(length[0])).reshape(-1)
        else:
            content = data[spans(start, length)]
        stops = np.cumsum(length)
        ends = np.flatnonzero(content < 128)
        if len(ends) == len(content):
            self._values, self.counts = content.astype(np.int64), length
            return
        # A row that ends within a number, or has one that is too long, must not affect others: set an end.
        row_ends = stops[length > 0] - 1
        is_cut = content[row_ends] >= 128
        if is_cut.any():
            is_odd[np.flatnonzero(length > 0)[is_cut]] = True
            ends = np.union1d(ends, row_ends)
        sizes = np.diff(ends, prepend=-1)
        if sizes.max() > _VARINT_BYTES:
            is_odd[np.searchsorted(stops, ends[sizes > _VARINT_BYTES], "right")] = True
        self._values = _decoded(content, ends, sizes)
        edges = np.searchsorted(ends, stops)
        self.counts = np.diff(edges, prepend=0)

    def values(self, rows: Array) -> Array:
        """Return the values of some rows."""
        if len(rows) == len(self.counts):
            return self._values
        is_kept = np.zeros(len(self.counts), bool)
        is_kept[rows] = True
        kept: Array = self._values[np.repeat(is_kept, self.counts)]
        return kept


def _decoded(content: Array, ends: Array, sizes: Array) -> Array:
    # Decode numbers of seven bits per byte, lowest first, given their ends and sizes.
    starts = ends - sizes + 1
    values = (content[starts] & 127).astype(np.uint64)
    rows = np.flatnonzero(sizes > 1)
    for place in range(1, _VARINT_BYTES):
        if not len(rows):
            break
        values[rows] |= (content[starts[rows] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
        rows = rows[sizes[rows] > place + 1]
    signed: Array = values.view(np.int64)
    return signed


def integers_of(content: bytes) -> Array:
    """Decode packed integers.

    Raises
    ------
    Malformed
        The content ends within an integer, or one is too long.
    """
    data = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(data < 128)
    sizes = np.diff(ends, prepend=-1)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise Malformed("its integers end within one")
    if len(sizes) and sizes.max() > _VARINT_BYTES:
        raise Malformed(f"an integer of {sizes.max()} bytes; the limit is {_VARINT_BYTES}")
    return _decoded(data, ends, sizes)


class _Bytes:
    counts: Array

    def __init__(self, data: Array, places: _Lists, is_odd: Array, feature: Wanted) -> None:
        self._data = data
        start, length, row = self._strings(data, places, is_odd)
        self._start, self._length, self._row = start, length, row
        self.counts = np.bincount(row, minlength=len(is_odd))
        self._text = self._decoded(is_odd) if feature.is_text else None

    @staticmethod
    def _strings(data: Array, places: _Lists, is_odd: Array) -> tuple[Array, Array, Array]:
        # Return each string of each row, row by row. A step reads the next one of every row that has one.
        rows = np.flatnonzero((places.start < places.stop) & ~is_odd)
        at, stop = places.start[rows], places.stop[rows]
        parts: list[tuple[Array, Array, Array]] = []
        while len(rows):
            if parts and len(rows) < _FEW:
                is_odd[rows] = True
                break
            length, start = _lengths(data, at + 1)
            end = start + length
            is_good = (_byte(data, at) == _ONE) & (end <= stop)
            if not is_good.all():
                is_odd[rows[~is_good]] = True
                rows, stop, start, length, end = (column[is_good] for column in (rows, stop, start, length, end))
            parts.append((start, length, rows))
            is_more = end < stop
            rows, at, stop = rows[is_more], end[is_more], stop[is_more]
        if not parts:
            return rows, rows, rows
        if len(parts) == 1:
            return parts[0]
        starts, lengths, owners = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(owners, kind="stable")
        return starts[order], lengths[order], owners[order]

    def _decoded(self, is_odd: Array) -> Array:
        raw = objects_at(self._data, self._start, self._length).tolist()
        text: Array = np.empty(len(raw), TEXT)
        try:
            text[:] = list(map(bytes.decode, raw))
        except UnicodeDecodeError:
            for place, value in enumerate(raw):
                try:
                    text[place] = value.decode()
                except UnicodeDecodeError:
                    is_odd[self._row[place]] = True
        return text

    def values(self, rows: Array) -> Array:
        """Return the values of some rows."""
        is_all = len(rows) == len(self.counts)
        kept: Any = slice(None)
        if not is_all:
            is_kept = np.zeros(len(self.counts), bool)
            is_kept[rows] = True
            kept = is_kept[self._row]
        if self._text is not None:
            text: Array = self._text[kept]
            return text
        return objects_at(self._data, self._start[kept], self._length[kept])


# Number of the list -> reader.
_READERS: Final[dict[int, type[_Bytes | _Floats | _Integers]]] = {1: _Bytes, 2: _Floats, 3: _Integers}
