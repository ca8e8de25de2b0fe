"""Features of ``tf.train.Example`` records, and their parsing.

An example is a protobuf message that maps names to lists of bytes, floats or integers. All records of a block are
parsed at once (`example_walk`); records with an unusual layout, or that do not match the features, are parsed one by
one here, which also gives the error messages.

Features are found and refused as in ``tf.io.parse_example``: a feature is missing if it is absent or holds no list, the
last of duplicate names counts, and other features are ignored. Lists in several parts and unknown fields are read by
the rules of protobuf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.core.cardinality import counted
from daskdist.core.ragged import Ragged, concat
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import TEXT, Structure
from daskdist.errors import ArgumentError
from daskdist.formats.tfrecord.example_walk import PADDING, Malformed, Wanted, integers_of, walk

Array = np.ndarray[Any, Any]

_BYTES: Final = np.dtype(object)
_FLOAT: Final = np.dtype(np.float32)
_INTEGER: Final = np.dtype(np.int64)

# Field of a feature -> the type of its list.
_KINDS: Final = {1: "bytes", 2: "float32", 3: "int64"}
_FIELDS: Final = {_BYTES: 1, TEXT: 1, _FLOAT: 2, _INTEGER: 3}
_DAMAGED: Final = 0
# The number of records to parse at once, so few that intermediate arrays stay in the processor's cache.
_CHUNK_ROWS: Final = 8192


@dataclass(frozen=True)
class FixedLenFeature:
    """A feature with the same number of values in every example.

    Parameters
    ----------
    shape
        The shape of the array of its values.
    dtype
        float32; int64; bytes, also called "string" as in TensorFlow; or str for UTF-8 text.
    default_value
        The replacement if it is missing: an array of that shape, or one value for all of it. None to raise an error.

    >>> FixedLenFeature((), "int64", default_value=-1)
    FixedLenFeature(shape=(), dtype=dtype('int64'), default_value=-1)
    """

    shape: Any
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        _check(self)
        _default_of(self)

    @property
    def spec(self) -> TensorSpec:
        """The spec of its array."""
        return TensorSpec(self.shape, self.dtype)


@dataclass(frozen=True)
class VarLenFeature:
    """A feature with a varying number of values, which may be missing.

    Parameters
    ----------
    dtype
        As in `FixedLenFeature`.
    """

    dtype: Any

    def __post_init__(self) -> None:
        _check(self)

    @property
    def spec(self) -> TensorSpec:
        """The spec of its array of varying length."""
        return TensorSpec((None,), self.dtype)


@dataclass(frozen=True)
class FixedLenSequenceFeature:
    """A feature whose values form a varying number of arrays of one shape.

    Parameters
    ----------
    shape
        The shape of each array.
    dtype
        As in `FixedLenFeature`.
    allow_missing
        Whether it may be missing, which gives no arrays.
    default_value
        Accepted for compatibility: a single example needs no padding. Pass it to `Dataset.padded_batch` as
        ``padding_values``.
    """

    shape: Any
    dtype: Any
    allow_missing: bool = False
    default_value: Any = None

    def __post_init__(self) -> None:
        _check(self)
        if not prod(self.shape):
            raise ArgumentError(f"{self}: an array of shape {self.shape} has no values, so none can be counted")

    @property
    def spec(self) -> TensorSpec:
        """The spec of its array of varying length."""
        return TensorSpec((None, *self.shape), self.dtype)


Feature = FixedLenFeature | VarLenFeature | FixedLenSequenceFeature


def _check(feature: Any) -> None:
    # Check the dtype and the shape, and normalize both and the default.
    kind = type(feature).__name__
    object.__setattr__(feature, "dtype", _dtype_of(feature.dtype, kind))
    if isinstance(feature, VarLenFeature):
        return
    shape = (feature.shape,) if isinstance(feature.shape, int) else feature.shape
    if not (isinstance(shape, Sequence) and all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape)):
        advice = "; a length that differs is a VarLenFeature's or a FixedLenSequenceFeature's"
        raise ArgumentError(f"{kind}: shape is {feature.shape!r}; give whole numbers from 0 on{advice}")
    object.__setattr__(feature, "shape", tuple(map(int, shape)))
    default = feature.default_value
    if isinstance(default, (list, np.ndarray, np.generic)):
        object.__setattr__(feature, "default_value", _frozen(default))


def _frozen(value: Any) -> Any:
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _dtype_of(dtype: Any, kind: str) -> np.dtype[Any]:
    if dtype in (bytes, object, np.bytes_, "bytes", "string"):
        return _BYTES
    if dtype in (str, np.str_, "str"):
        return TEXT
    with contextlib.suppress(TypeError):
        numpy_dtype: np.dtype[Any] = _FLOAT if dtype is float else np.dtype(dtype)
        if numpy_dtype in _FIELDS:
            return numpy_dtype
    raise ArgumentError(
        f"{kind}: dtype is {dtype!r}; an example holds float32, int64 and bytes, so give one of these, or str for "
        "text, and make others of them with map(...)"
    )


def _default_of(feature: FixedLenFeature) -> Array | None:
    default, shape = feature.default_value, feature.shape
    if default is None:
        return None
    try:
        # Do not convert text to bytes, or fractions to integers.
        is_lone = isinstance(default, (str, bytes))
        # NumPy's bytes would lose trailing zeros.
        as_given = object if feature.dtype in (_BYTES, TEXT) else None
        flat = [default] if is_lone else np.asarray(default, as_given).ravel().tolist()
        values = np.empty(len(flat), feature.dtype)
        if not all(isinstance(value, _TYPES[feature.dtype]) for value in flat):
            raise TypeError
        values[:] = flat
        return np.broadcast_to(values[0], shape) if values.size == 1 else values.reshape(shape)
    except (TypeError, ValueError, OverflowError):
        dtype = {_BYTES: "bytes", TEXT: "str"}.get(feature.dtype, feature.dtype)
        raise ArgumentError(
            f"FixedLenFeature: default_value is {default!r:.80}; give {dtype}, one value or an array of shape {shape}"
        ) from None


_TYPES: Final[dict[Any, Any]] = {_BYTES: bytes, TEXT: str, _FLOAT: (int, float), _INTEGER: int}


class RefusedRecord(NamedTuple):
    """A record that is not parsed: its number, and what `Malformed` says of it."""

    row: int
    reason: str
    is_damage: bool


@dataclass(frozen=True)
class Examples:
    """Options for parsing the examples of a dataset.

    Parameters
    ----------
    features
        The features to read, by name.
    """

    features: Mapping[str, Feature]

    def __post_init__(self) -> None:
        features = self.features
        if not isinstance(features, Mapping) or not features:
            raise ArgumentError(f"features is {features!r:.80}; give a dict of at least one feature by its name")
        for name, feature in features.items():
            if not isinstance(name, str):
                raise ArgumentError(f"features: {name!r} is not a name; give text")
            if not isinstance(feature, Feature):
                raise ArgumentError(
                    f"features[{name!r}] is {feature!r:.80}; give a FixedLenFeature, VarLenFeature or "
                    "FixedLenSequenceFeature"
                )

    @cached_property
    def spec(self) -> ElementSpec:
        """The spec of an element: a dict of arrays by name."""
        leaves, structure = Structure.of({name: feature.spec for name, feature in self.features.items()})
        return ElementSpec(structure, leaves)

    def parse(self, data: bytes, starts: Array, lengths: Array) -> tuple[list[Any], Array, list[RefusedRecord]]:
        """Parse records to columns.

        Parameters
        ----------
        data
            A buffer with the records.
        starts, lengths
            The offset of each record, and its number of bytes.

        Returns
        -------
        columns
            A column for each feature, in the order of the leaves of the spec.
        rows
            The numbers of the parsed records, in order.
        refused
            The other records.
        """
        buffer = np.frombuffer(data + bytes(PADDING), np.uint8)
        parts, kept = [], []
        refused: list[RefusedRecord] = []
        for at in range(0, len(starts), _CHUNK_ROWS):
            chunk = slice(at, at + _CHUNK_ROWS)
            columns, rows, bad = self._parsed(data, buffer, starts[chunk], starts[chunk] + lengths[chunk])
            parts.append(columns)
            kept.append(rows + at)
            refused.extend(record._replace(row=record.row + at) for record in bad)
        if not parts:
            return [_empty(feature) for feature in self._features], np.zeros(0, np.int64), []
        columns = [concat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)]
        return columns, np.concatenate(kept), refused

    def _parsed(
        self, data: bytes, buffer: Array, starts: Array, stops: Array
    ) -> tuple[list[Any], Array, list[RefusedRecord]]:
        # Parse one chunk: all records at once, except odd ones.
        found_lists, is_odd = walk(buffer, starts, stops, self._wanted)
        rows, odd = np.flatnonzero(~is_odd), np.flatnonzero(is_odd)
        columns = [
            _column(feature, values, counts[rows], is_there[rows])
            for feature, (values, counts, is_there) in zip(self._features, found_lists, strict=True)
        ]
        if not len(odd):
            return columns, rows, []
        singles, taken, refused = [], [], []
        for row in odd.tolist():
            try:
                singles.append(self.parse_one(data[starts[row] : stops[row]]))
                taken.append(row)
            except Malformed as error:
                refused.append(RefusedRecord(row, error.reason, error.is_damage))
        if singles:
            order = np.argsort(np.concatenate([rows, taken]))
            more = [_stacked(feature, column) for feature, column in zip(self._features, zip(*singles), strict=True)]  # noqa: B905
            columns = [concat([a, b]).take(order, axis=0) for a, b in zip(columns, more, strict=True)]
            rows = np.concatenate([rows, np.array(taken, np.int64)])[order]
        return columns, rows, refused

    @cached_property
    def _names(self) -> Sequence[str]:
        # In the order of the leaves.
        names, _ = Structure.of({name: name for name in self.features})
        return names

    @cached_property
    def _features(self) -> list[Feature]:
        return [self.features[name] for name in self._names]

    @cached_property
    def _wanted(self) -> list[Wanted]:
        return [
            Wanted(
                name.encode(),
                _FIELDS[feature.dtype],
                feature.dtype == TEXT,
                prod(feature.shape) if isinstance(feature, FixedLenFeature) else None,
                prod(feature.shape) if isinstance(feature, FixedLenSequenceFeature) else 1,
                _may_be_missing(feature),
            )
            for name, feature in zip(self._names, self._features, strict=True)
        ]

    def parse_one(self, record: bytes) -> list[Array]:
        """Parse one record to an array for each feature, in the order of the leaves of the spec.

        Raises
        ------
        Malformed
            The record is not an example, or does not match the features.
        """
        parsed = _features_of(record)
        return [_array(name, feature, parsed) for name, feature in zip(self._names, self._features, strict=True)]


def _may_be_missing(feature: Feature) -> bool:
    if isinstance(feature, FixedLenFeature):
        return feature.default_value is not None
    return isinstance(feature, VarLenFeature) or feature.allow_missing


# --- columns ---


def _empty(feature: Feature) -> Any:
    return _column(feature, np.zeros(0, feature.dtype), np.zeros(0, np.int64), np.zeros(0, bool))


def _column(feature: Feature, values: Array, counts: Array, is_there: Array) -> Any:
    # Return the column of all rows, given the number of values of each and which are present.
    if isinstance(feature, FixedLenFeature):
        if is_there.all():
            return values.reshape(len(counts), *feature.shape)
        column: Array = np.empty((len(counts), *feature.shape), feature.dtype)
        column[is_there] = values.reshape(-1, *feature.shape) if prod(feature.shape) else 0
        column[~is_there] = _default_of(feature)
        return column
    splits = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=splits[1:])
    if isinstance(feature, VarLenFeature):
        return Ragged(values, splits)
    return Ragged(values.reshape(-1, *feature.shape), splits // prod(feature.shape))


def _stacked(feature: Feature, arrays: Sequence[Array]) -> Any:
    if isinstance(feature, FixedLenFeature):
        return np.stack(arrays)
    return Ragged.of(arrays)


# --- one record ---


def _array(name: str, feature: Feature, parsed: Mapping[bytes, tuple[int, bytes]]) -> Array:
    dtype = feature.dtype
    if name.encode() not in parsed:
        if not _may_be_missing(feature):
            hint = "allow_missing=True" if isinstance(feature, FixedLenSequenceFeature) else "a default_value"
            names = ", ".join(repr(other.decode(errors="replace")) for other in parsed) or "no features"
            raise Malformed(
                f"feature {name!r} is missing; give it {hint} if examples may lack it; this one has {names:.200}",
                is_damage=False,
            )
        default = _default_of(feature) if isinstance(feature, FixedLenFeature) else None
        return np.zeros((0, *feature.spec.shape[1:]), dtype) if default is None else default
    field, content = parsed[name.encode()]
    if field == _DAMAGED:
        raise Malformed(f"feature {name!r} is not a list of values")
    if field != _FIELDS[dtype]:
        raise Malformed(
            f"feature {name!r} holds {_KINDS[field]}, but {_KINDS[_FIELDS[dtype]]} is expected; give it the dtype "
            f"{_KINDS[field]}, or leave it out of features",
            is_damage=False,
        )
    try:
        values = _values(field, content)
        if dtype == TEXT:
            values = np.array([value.decode() for value in values], TEXT)
    except UnicodeDecodeError as error:
        reason = f"feature {name!r} is not UTF-8: {error.reason}; read it as bytes"
        raise Malformed(reason, is_damage=False) from None
    except Malformed as error:
        raise Malformed(f"feature {name!r}: {error.reason}") from None
    if isinstance(feature, VarLenFeature):
        return values
    size = prod(feature.shape)
    if isinstance(feature, FixedLenSequenceFeature):
        if len(values) % size:
            raise Malformed(
                f"feature {name!r} has {counted(len(values), 'value')}; shape {feature.shape} takes {size} at a time; "
                "give it another shape, or read it as a VarLenFeature",
                is_damage=False,
            )
        return values.reshape(-1, *feature.shape)
    if len(values) != size:
        raise Malformed(
            f"feature {name!r} has {counted(len(values), 'value')}; shape {feature.shape} takes {size}; give it "
            f"another shape, such as ({len(values)},), or read it as a VarLenFeature",
            is_damage=False,
        )
    return values.reshape(feature.shape)


def _features_of(record: bytes) -> dict[bytes, tuple[int, bytes]]:
    # Return name -> the field and the content of its list. The parts of a message are concatenated.
    parsed: dict[bytes, tuple[int, bytes]] = {}
    entries = b"".join(value for field, value in _fields(record) if field == 1 and isinstance(value, bytes))
    for field, entry in _fields(entries):
        if field != 1 or not isinstance(entry, bytes):
            continue
        name, content = b"", b""
        for part, value in _fields(entry):
            if part == 1 and isinstance(value, bytes):
                name = value
            elif part == 2 and isinstance(value, bytes):
                content += value
        feature: tuple[int, bytes] | None = None
        try:
            for part, value in _fields(content):
                if part in _KINDS and isinstance(value, bytes):
                    feature = part, feature[1] + value if feature and feature[0] == part else value
        except Malformed:
            # Damage matters only if the feature is read.
            feature = _DAMAGED, content
        if feature is not None:
            parsed[name] = feature
    return parsed


def _values(field: int, content: bytes) -> Array:
    values: list[Any] = []
    for part, value in _fields(content, {1: 2, 2: 5, 3: 0}[field]):
        if part != 1:
            continue
        if field == 1 and isinstance(value, bytes):
            values.append(value)
        elif field == 2 and isinstance(value, bytes):
            if len(value) % 4:
                raise Malformed(f"{len(value)} bytes of floats, which have four each")
            values.append(np.frombuffer(value, "<f4"))
        elif field == 3:
            values.append(integers_of(value) if isinstance(value, bytes) else np.array([value], np.uint64).view("i8"))
    if field == 1:
        objects = np.empty(len(values), object)
        objects[:] = values
        return objects
    return np.concatenate(values or [np.zeros(0)], dtype=_FLOAT if field == 2 else _INTEGER, casting="unsafe")


def _fields(data: bytes, packed_wire: int = 2) -> Iterator[tuple[int, bytes | int]]:
    """Yield the numbers and contents of the fields of a message; values of wire type ``packed_wire`` as bytes."""
    at, stop = 0, len(data)
    while at < stop:
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise Malformed(f"not an example: a field of wire type {wire}")
        if not field or at + size > stop:
            raise Malformed(
                f"not an example, or a truncated one: a field of {counted(size, 'byte')}, but {stop - at} are left"
            )
        if wire in (2, packed_wire):
            yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at >= len(data):
            raise Malformed("not an example, or a truncated one: it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value & (2**64 - 1), at
    raise Malformed("not an example: a number of more than ten bytes")
