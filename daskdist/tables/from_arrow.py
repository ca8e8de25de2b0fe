"""Conversion of Arrow tables to elements, by type, and of nulls.

==============================  ===============================================================
a column of                     becomes, in an element
==============================  ===============================================================
integers, floats, bools         the dtype of that name
decimals                        float64, the nearest
dates, timestamps               ``datetime64``: days, or the timestamp's own unit; in UTC if it has a zone
times of day, durations         ``timedelta64``: since midnight, in the type's own unit
text                            NumPy's ``StringDType``
bytes, of any or a fixed size   Python's ``bytes`` as an object
dictionaries, run ends          their decoded values
fixed-shape tensors             an array of their shape
bool8                           bools
uuid, JSON                      ``bytes``, and text, as they are stored; so are other extension types of text or bytes
fixed-size lists                an array with an axis more
lists, list views               an array of varying length; lists of lists are `daskdist.Ragged`
structs                         a dict by name
nulls only                      float64, NaN
==============================  ===============================================================

A null is NaN in a float column and NaT in a time column. In any other column it is an error that names the column,
unless ``missing`` gives a replacement; NaN for a column of integers makes it float64. In a column of lists the
replacement is for nulls within the lists, and null lists are empty; ``[]`` is for null lists alone. For a null list of
a fixed size it is for each value. In a null struct all fields are null; the replacement is a dict by field.
Other extension types are errors, as their stored values are not what they stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, RaggedTensorSpec, TensorSpec
from daskdist.core.structure import LONE, TEXT, Structure
from daskdist.core.to_numpy import is_rounded
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.storage.hive_partitions import Partitions
from daskdist.storage.libraries import pa, pc
from daskdist.tables.arrow_text import is_bytes, is_text, repeated_texts, texts_of
from daskdist.tables.columns import Columns
from daskdist.tables.decimals import nearest_floats
from daskdist.tables.extension_types import (
    is_tensor,
    refuse_unknown,
    stored_as,
    stored_values,
    tensor_shape,
    tensors_of,
)
from daskdist.tables.replacements import KEPT, Place, fill_times, of_field, scalar_of

_BYTES: Final = np.dtype(object)


@dataclass(frozen=True)
class TableReader:
    """Options for converting tables to elements."""

    columns: Any = None
    missing: Mapping[str, Any] | None = None
    partitions: Partitions = field(default_factory=Partitions)

    def chosen(self, names: Sequence[str]) -> Columns:
        """Return the columns of an element, given the columns of a file.

        Raises
        ------
        ArgumentError
            A column does not exist.
        """
        return Columns.of(self.columns, [*names, *(name for name in self.partitions.names if name not in names)])

    def read_from(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a file to read, in the order of the file."""
        chosen = set(self.chosen(names).names)
        return [name for name in names if name in chosen]

    def spec(self, schema: Any, path: str) -> ElementSpec:
        """Return the spec of an element of a file.

        Raises
        ------
        FileError
            No array can hold the type of a column.
        ArgumentError
            A column does not exist, or a replacement does not fit its column.
        """
        if self.missing is not None and not isinstance(self.missing, Mapping):
            raise ArgumentError(f"missing is {self.missing!r:.80}; give a dict by column: {{'count': -1}}")
        names = [*schema.names, *self.partitions.names]
        for name in self.missing or ():
            if name not in names:
                raise ArgumentError(f"missing: no column {name!r}; there are {', '.join(map(repr, names))}")
        kinds = _by_name(schema.names, schema.types)
        spec = self.chosen(schema.names).spec(lambda name: self._column_spec(kinds, schema, name, path))
        for name, value in (self.missing or {}).items():
            kind = schema.field(name).type if name in schema.names else self.partitions.arrow_type(name)
            check_replacement(value, kind, Place(path, (name,)))
        return spec

    def block(self, table: Any, label: str, path: str) -> Block:
        """Convert a table to a block.

        Parameters
        ----------
        table
            An Arrow table or record batch that has the columns to read.
        label
            The origin of the rows, for messages.
        path
            The path of the file, which has the values of partition columns.
        """
        schema = table.schema
        columns = self.chosen(schema.names)
        # Most tables have one piece, whose columns are arrays rather than chunks.
        pieces = table.to_batches() if hasattr(table, "to_batches") else []
        piece = pieces[0] if len(pieces) == 1 else table
        by_name = _by_name(schema.names, piece.columns)
        arrays = columns.arrays(lambda name: self._leaves(by_name, piece.num_rows, name, label, path), label)
        return Block(self._structure(columns, schema, path), arrays, label)

    def _structure(self, columns: Columns, schema: Any, path: str) -> Structure:
        if not any(is_struct(kind) for kind in schema.types if kind.id not in _numbers()):
            return columns.structure
        kinds = _by_name(schema.names, schema.types)
        return columns.spec(lambda name: self._column_spec(kinds, schema, name, path)).structure

    def _column_spec(self, kinds: Mapping[str, Any], schema: Any, name: str, path: str) -> ElementSpec:
        if name not in kinds and len(schema.get_all_field_indices(name)) > 1:
            raise FileError(f"{path}: two columns are called {name!r}; leave them out, or rename one")
        missing = (self.missing or {}).get(name)
        missing = None if missing is KEPT else missing
        if name not in kinds:
            return spec_of(self.partitions.arrow_type(name), Place(path, (name,)), missing)
        column = schema.field(name)
        if missing is None and not column.metadata and column.type.id in _numbers():
            return _number_spec(column.type.id)
        return _field_spec(column, Place(path, (name,)), missing)

    def _leaves(self, columns: Mapping[str, Any], num_rows: int, name: str, label: str, path: str) -> Sequence[Any]:
        column, missing = columns.get(name), (self.missing or {}).get(name)
        if column is None:
            kind, value = self.partitions.arrow_type(name), self.partitions.value(name, path)
            if value is None:
                return leaves_of(pa.nulls(num_rows, kind), Place(label, (name,)), missing)
            return [np.full(num_rows, value, _dtype(kind, Place(label, (name,)), missing))]
        if missing is None and not column.null_count and column.type.id in _numbers() and hasattr(column, "buffers"):
            # Fast path for many small columns: composing the label for messages would take longer than the conversion.
            return [_number_array(column)]
        return leaves_of(_whole(column), Place(label, (name,)), missing)


def _by_name(names: Sequence[str], columns: Sequence[Any]) -> dict[str, Any]:
    # Leave out the columns whose name occurs twice.
    by_name = dict(zip(names, columns, strict=True))
    if len(by_name) < len(names):
        counts = Counter(names)
        by_name = {name: column for name, column in by_name.items() if counts[name] == 1}
    return by_name


@cache
def _number_spec(kind_id: int) -> ElementSpec:
    return ElementSpec(LONE, (TensorSpec((), _numbers()[kind_id]),))


def check_replacement(missing: Any, kind: Any, where: Place) -> None:
    """Check a replacement, by replacing a null.

    Raises
    ------
    ArgumentError
        The replacement does not fit the type.
    """
    if (decoded := _decoded(kind)) is not None:
        check_replacement(missing, decoded, where)
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            if (value := of_field(missing, kind, number, where)) is not None:
                check_replacement(value, kind.field(number).type, where.field(kind.field(number).name))
    elif pa.types.is_fixed_size_list(kind) or _is_list(kind):
        within = _within(missing, kind, where)
        if within is not None or missing is None:
            check_replacement(within, kind.value_type, where)
    else:
        try:
            leaves_of(pa.nulls(1, kind), where, missing)
        except FileError:
            raise ArgumentError(
                f"missing: {missing!r:.80} cannot stand for a null of {where}, of type {kind}"
            ) from None


def spec_of(kind: Any, where: Place, missing: Any = None) -> ElementSpec:
    """Return the spec of a value of an Arrow type.

    Raises
    ------
    FileError
        No element can hold the type.
    """
    types = pa.types
    if is_tensor(kind):
        inner = _array_spec(kind.storage_type, where, missing)
        return ElementSpec(LONE, (TensorSpec(tensor_shape(kind, where), inner.dtype),))
    refuse_unknown(None, kind, where)
    if (decoded := _decoded(kind)) is not None:
        return spec_of(decoded, where, missing)
    if types.is_struct(kind):
        fields = {
            kind.field(k).name: _field_spec(
                kind.field(k), where.field(kind.field(k).name), of_field(missing, kind, k, where)
            )
            for k in range(kind.num_fields)
        }
        if len(fields) < max(kind.num_fields, 1):
            problem = "two fields of one name" if fields else "no fields"
            raise FileError(f"{where} holds structs of {problem}; leave it out")
        return ElementSpec.nest(Structure.of(dict.fromkeys(fields, 0))[1], [fields[name] for name in sorted(fields)])
    if types.is_fixed_size_list(kind):
        inner = _array_spec(kind, where, missing)
        return ElementSpec(LONE, (TensorSpec((kind.list_size, *inner.shape), inner.dtype),))
    if _is_list(kind):
        inner = _array_spec(kind, where, missing)
        if None in inner.shape:
            return ElementSpec(LONE, (RaggedTensorSpec((None, *inner.shape), inner.dtype),))
        return ElementSpec(LONE, (TensorSpec((None, *inner.shape), inner.dtype),))
    return ElementSpec(LONE, (TensorSpec((), _dtype(kind, where, missing)),))


def _field_spec(field: Any, where: Place, missing: Any) -> ElementSpec:
    refuse_unknown(field.metadata, field.type, where)
    return spec_of(field.type, where, missing)


def _array_spec(kind: Any, where: Place, missing: Any) -> TensorSpec:
    inner = _field_spec(kind.value_field, where, _within(missing, kind, where))
    if inner.structure != LONE:
        raise FileError(f"{where} holds lists of structs, which cannot form an array; leave it out")
    if None in inner.leaves[0].shape and pa.types.is_fixed_size_list(kind):
        raise FileError(f"{where} holds fixed-size lists of lists of different lengths; leave it out")
    leaf: TensorSpec = inner.leaves[0]
    return leaf


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or _is_view(kind))


def is_struct(kind: Any) -> bool:
    """Return whether values of an Arrow type become a dict by field."""
    while (decoded := _decoded(kind)) is not None:
        kind = decoded
    return bool(pa.types.is_struct(kind))


def _is_view(kind: Any) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _decoded(kind: Any) -> Any:
    # Return the type of the values of a dictionary, run-end or extension type; None for other types.
    if isinstance(kind, pa.BaseExtensionType):
        return stored_as(kind)
    return kind.value_type if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) else None


def _dtype(kind: Any, where: Place, missing: Any) -> np.dtype[Any]:
    types = pa.types
    if types.is_integer(kind) and isinstance(missing, float):
        return np.dtype(np.float64)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    if types.is_decimal(kind) or types.is_null(kind):
        return np.dtype(np.float64)
    if is_text(kind):
        return TEXT
    if is_bytes(kind):
        return _BYTES
    if types.is_date(kind):
        return np.dtype("datetime64[D]")
    if types.is_timestamp(kind):
        return np.dtype(f"datetime64[{kind.unit}]")
    if types.is_time(kind) or types.is_duration(kind):
        return np.dtype(f"timedelta64[{kind.unit}]")
    raise FileError(f"{where} is of type {kind}, which no array can hold; leave it out")


def _whole(column: Any) -> Any:
    # Return a column of a table or of a record batch as one array.
    if not isinstance(column, pa.ChunkedArray):
        return column
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    return array


def leaves_of(array: Any, where: Place, missing: Any = None) -> list[Any]:
    """Convert an Arrow array to leaves, shape ``(num_rows, ...)``: an array or `Ragged`, one a field for structs.

    Raises
    ------
    FileError
        There is a null without a replacement.
    ArgumentError
        The replacement does not fit the type.
    """
    types, kind = pa.types, array.type
    if kind.id in _numbers() and missing is None and not array.null_count:
        # Most columns are numbers without nulls.
        return [_number_array(array)]
    if is_tensor(kind):
        return [tensors_of(_lone(array.storage, where, missing), kind)]
    if isinstance(kind, pa.BaseExtensionType):
        return leaves_of(stored_values(array, where), where, missing)
    if types.is_run_end_encoded(kind):
        return leaves_of(pc.run_end_decode(_runs_without_views(array)), where, missing)
    if types.is_dictionary(kind):
        if str(kind.value_type) in _VIEWS:
            values = _without_views(array.dictionary)
            array = pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)
            kind = array.type
        if (texts := repeated_texts(array)) is not None:
            return [texts]
        return leaves_of(array.dictionary_decode(), where, missing)
    if types.is_struct(kind):
        # flatten() merges the nulls of the structs into their fields.
        parts = array.flatten()
        order = sorted(range(kind.num_fields), key=lambda k: kind.field(k).name)
        return [
            leaf
            for k in order
            for leaf in leaves_of(parts[k], where.field(kind.field(k).name), of_field(missing, kind, k, where))
        ]
    if types.is_fixed_size_list(kind):
        if missing is KEPT and array.null_count:
            return [_ragged(array.cast(pa.list_(kind.value_type)), where, missing)]
        if missing is None:
            _refuse_nulls(array, where)
        splits = np.arange(len(array) + 1) * kind.list_size
        inner = _of_lists(_fixed_values(array), splits, where, _within(missing, kind, where))
        return [inner.reshape(len(array), kind.list_size, *inner.shape[1:])]
    if _is_list(kind):
        return [_ragged(array, where, missing)]
    return [_flat(array, where, missing)]


# Arrow's view types, which few functions support -> types that they do; by name, as old versions of pyarrow lack some.
_VIEWS: Final = {"string_view": "large_string", "binary_view": "large_binary"}


def _without_views(array: Any) -> Any:
    # Cast to a type that Arrow's functions support.
    return array.cast(_VIEWS[str(array.type)]) if str(array.type) in _VIEWS else array


def _runs_without_views(array: Any) -> Any:
    if str(array.type.value_type) not in _VIEWS:
        return array
    values = _without_views(array.values)
    kind = pa.run_end_encoded(array.run_ends.type, values.type)
    return pa.Array.from_buffers(kind, len(array), [None], 0, array.offset, [array.run_ends, values])


@cache
def _numbers() -> dict[int, np.dtype[Any]]:
    # Return the dtypes of the number types that Arrow and NumPy share, by the ids of the types in Arrow.
    integers = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
    return {kind.id: np.dtype(kind.to_pandas_dtype()) for kind in (*integers, pa.float16(), pa.float32(), pa.float64())}


def _number_array(array: Any) -> np.ndarray[Any, Any]:
    # There are no nulls. Arrow's `to_numpy` would import pandas, which takes longer than reading most files.
    dtype = _numbers()[array.type.id]
    if not len(array):
        return np.empty(0, dtype)
    numbers = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    numbers.flags.writeable = False
    return numbers


def _lone(array: Any, where: Place, missing: Any) -> Any:
    (leaf,) = leaves_of(array, where, missing)
    return leaf


def _within(missing: Any, kind: Any, where: Place) -> Any:
    # Return the replacement of a null within lists. A list, which is empty, replaces null lists and not nulls in lists.
    if not isinstance(missing, (list, tuple)):
        return missing
    if missing or not _is_list(kind):
        fitting = "[] can stand for a null list" if _is_list(kind) else "one value can stand for all of a null list"
        raise ArgumentError(f"missing: {missing!r:.80} cannot stand for a null of {where}, of type {kind}: {fitting}")
    return missing if _is_list(kind.value_type) else None


def _fixed_values(array: Any) -> Any:
    # Return the values of lists of one size, where those of a null list are null.
    values = array.flatten()
    if not array.null_count:
        return values
    values = _without_views(values)
    valid = np.repeat(array.is_valid().to_numpy(zero_copy_only=False), array.type.list_size)
    return values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _ragged(array: Any, where: Place, missing: Any) -> Ragged:
    within = _within(missing, array.type, where)
    if missing is None:
        _refuse_nulls(array, where)
    if not array.null_count and not _is_view(array.type):
        splits = array.offsets.to_numpy(zero_copy_only=False)
        splits = splits - splits[0] if len(splits) and splits[0] else splits
    else:
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        splits = np.concatenate([[0], np.cumsum(lengths)])
    splits = splits if len(splits) else np.zeros(1, np.int64)
    return Ragged(_of_lists(array.flatten(), splits, where, within), splits)


def _of_lists(values: Any, splits: np.ndarray[Any, Any], where: Place, missing: Any) -> Any:
    # Convert the values of lists that end at the given places.
    if values.null_count and missing is None and _lacks_null(values.type):
        row = int(np.searchsorted(splits, _first_null(values), "right")) - 1
        raise DamagedFileError(
            f"{where}: the list in its row {row} has a null, and {values.type} has no value for that, as floats have "
            f"NaN and times NaT; give a replacement with {_advice(values, where)}, or leave the column out"
        )
    return _lone(values, where.within_lists(), missing)


def _lacks_null(kind: Any) -> bool:
    # Only plain values are checked here: nested ones report their own nulls.
    if pa.types.is_nested(kind) or _decoded(kind) is not None:
        return False
    return _dtype(kind, Place(""), None).kind not in "fmM"


def _first_null(array: Any) -> int:
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])


def _flat(array: Any, where: Place, missing: Any) -> np.ndarray[Any, Any]:
    kind = array.type
    dtype = _dtype(kind, where, missing)
    if missing is KEPT:
        if array.null_count and dtype.kind not in "fmM":
            return _objects(array, np.nan)
        missing = None
    if pa.types.is_decimal(kind):
        array = nearest_floats(array)
    is_numpy_time = isinstance(missing, np.datetime64 | np.timedelta64) and dtype.kind in "mM"
    if array.null_count and missing is not None and not is_numpy_time:
        array = _filled(array, where, missing, dtype)
    elif dtype.kind not in "fmM":
        _refuse_nulls(array, where)
    if dtype == TEXT:
        return texts_of(array)
    if dtype == _BYTES:
        return _objects(array)
    if pa.types.is_null(array.type):
        return np.full(len(array), np.nan)
    if pa.types.is_time(kind):
        # Arrow casts times of day to durations only by way of integers.
        numbers = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
        array = numbers.cast(pa.int64()).cast(pa.duration(kind.unit))
    values: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    if values.dtype != dtype:
        if is_rounded(values, dtype):
            raise FileError(
                f"{where}: missing={missing!r} makes it {dtype}, which rounds its integers; give an integer"
            )
        values = values.astype(dtype)
    return fill_times(values, missing, where) if is_numpy_time and array.null_count else values


def _objects(array: Any, null: Any = None) -> np.ndarray[Any, Any]:
    objects = np.empty(len(array), object)
    objects[:] = [null if value is None else value for value in array.to_pylist()]
    return objects


def _filled(array: Any, where: Place, missing: Any, dtype: np.dtype[Any]) -> Any:
    try:
        kind = pa.float64() if dtype == np.float64 else pa.large_string() if dtype == TEXT else array.type
        array = _without_views(array)
        kind = array.type if str(kind) in _VIEWS else kind
        return array.cast(kind).fill_null(scalar_of(missing, kind))
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise ArgumentError(f"missing: {missing!r} cannot stand for a null of {where}: {error}") from None


def _refuse_nulls(array: Any, where: Place) -> None:
    if array.null_count:
        nulls = "1 null" if array.null_count == 1 else f"{array.null_count} nulls"
        raise DamagedFileError(
            f"{where} of type {array.type} has {nulls}, the first in row {_first_null(array)}, but only floats have "
            f"NaN and times NaT; give a replacement with {_advice(array, where)}, or leave it out"
        )


def _advice(array: Any, where: Place) -> str:
    # Return an argument that replaces the nulls of an array.
    types, kind = pa.types, array.type
    if _is_list(kind):
        return f"{where.replaced_by('[]')} for lists without values"
    if types.is_fixed_size_list(kind):
        return f"{_advice(array.flatten(), where)}, for all values of a null list"
    if types.is_integer(kind):
        if is_rounded(array.drop_null().to_numpy(), np.dtype(np.float64)):
            return f"{where.replaced_by('0')}, or another integer"
        return f"{where.replaced_by('numpy.nan')}, which makes the column floats, or another value"
    if types.is_fixed_size_binary(kind):
        return where.replaced_by(repr(bytes(kind.byte_width)))
    kind = kind if (decoded := _decoded(kind)) is None else decoded
    nothing = {
        "f": "numpy.nan",
        "b": "False",
        "T": "''",
        "O": "b''",
        "M": "numpy.datetime64('NaT')",
        "m": "numpy.timedelta64('NaT')",
    }
    return where.replaced_by(nothing.get(_dtype(kind, where, None).kind, "0"))
