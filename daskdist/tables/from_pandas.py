"""Conversion of dataframe columns to elements, as for Arrow tables, whatever pandas stores the columns in.

Columns of NumPy's numbers, bools and times are used as they are. All others (nullable, categorical, text, times with a
zone, Arrow types) become Arrow arrays, so that `from_arrow` decides their dtypes and nulls. The dtype of a column of
objects or of unknown categories is known only from its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Bundle
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec
from daskdist.core.structure import LONE
from daskdist.core.to_numpy import loss_in, native, to_numpy
from daskdist.errors import ArgumentError, FileError
from daskdist.storage.libraries import pa
from daskdist.tables.columns import Columns
from daskdist.tables.device_column import DeviceColumn
from daskdist.tables.from_arrow import is_struct, leaves_of, spec_of
from daskdist.tables.object_columns import check_unchanged
from daskdist.tables.replacements import Place

# Dask's placeholder for categories that only the partitions know.
_UNKNOWN: Final = "__UNKNOWN_CATEGORIES__"


@dataclass(frozen=True)
class FrameReader:
    """Options for converting dataframes to elements.

    Parameters
    ----------
    columns
        The assignment of columns to leaves.
    labels
        The dataframe's label of each column, which may not be text, by name.
    missing
        The replacement of nulls, by name.
    """

    columns: Columns
    labels: Mapping[str, Any]
    missing: Mapping[str, Any]

    @classmethod
    def of(cls, frame: Any, columns: Any, missing: Mapping[str, Any] | None) -> FrameReader:
        """Create a reader for a Dask or pandas dataframe.

        Raises
        ------
        ArgumentError
            A column does not exist, or two have the same name.
        """
        labels = {str(label): label for label in frame.columns}
        if len(labels) < len(frame.columns):
            names = [str(label) for label in frame.columns]
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"from_dask: two columns are called {twice!r}; rename one of them")
        for name in missing or ():
            if name not in labels:
                raise ArgumentError(f"missing: no column {name!r}; there are {', '.join(map(repr, labels))}")
        chosen = Columns.of(columns, list(labels))
        return cls(chosen, {name: labels[name] for name in chosen.names}, dict(missing or {}))

    def spec(self, frame: Any) -> ElementSpec:
        """Return the spec of an element, given a dataframe without rows.

        Raises
        ------
        SpecUnknown
            A column is of objects, or its categories are not known yet.
        ArgumentError
            No array can hold the values of a column.
        """
        return self.columns.spec(lambda name: self._column_spec(name, frame[self.labels[name]]))

    def block(
        self, frame: Any, label: str, device_column: Callable[[Any], DeviceColumn | None] | None = None
    ) -> Block | Bundle:
        """Convert a partition to a block; ``device_column`` makes leaves of arrays that stay on a device.

        Raises
        ------
        ArgumentError
            A column has nulls without a replacement, or values that no array can hold.
        """
        if not len(frame):
            return Bundle(self.columns.structure, [], label)
        arrays = {
            name: self._array(name, frame[self.labels[name]], label, device_column) for name in self.columns.names
        }
        try:
            leaves = self.columns.arrays(lambda name: self._leaves(name, arrays[name], label), label)
            structure = self.columns.structure
            if any(
                not isinstance(array, (np.ndarray, DeviceColumn)) and is_struct(array.type) for array in arrays.values()
            ):
                structure = self.columns.spec(lambda name: self._spec_of(name, arrays[name], label)).structure
        except FileError as error:
            raise ArgumentError(f"from_dask: {error}") from None
        return Block(structure, leaves, label)

    def _column_spec(self, name: str, column: Any) -> ElementSpec:
        dtype = column.dtype
        if _is_plain(dtype) and name not in self.missing:
            return ElementSpec(LONE, (TensorSpec((), dtype),))
        if isinstance(dtype, np.dtype) and dtype.kind == "O":
            raise SpecUnknown(f"the values of the object column {name!r} are known only when it is computed")
        categories = getattr(dtype, "categories", None)
        if categories is not None and _UNKNOWN in categories:
            raise SpecUnknown(f"the categories of {name!r} are known only when they are computed")
        return self._spec_of(name, self._array(name, column, "the dataframe"), "the dataframe")

    def _spec_of(self, name: str, array: Any, label: str) -> ElementSpec:
        if isinstance(array, (np.ndarray, DeviceColumn)):
            return ElementSpec(LONE, (TensorSpec((), array.dtype),))
        try:
            return spec_of(array.type, Place(label, (name,)), self.missing.get(name))
        except FileError as error:
            raise ArgumentError(f"from_dask: {error}") from None

    def _array(
        self, name: str, column: Any, label: str, device_column: Callable[[Any], DeviceColumn | None] | None = None
    ) -> Any:
        # Columns of cuDF have nulls besides NaN, which its arrays lack.
        has_nulls = bool(getattr(column, "has_nulls", False))
        if _is_plain(column.dtype) and name not in self.missing and not has_nulls:
            leaf = None if device_column is None or not hasattr(column, "to_cupy") else device_column(column.to_cupy())
            return native(column.to_numpy()) if leaf is None else leaf
        return _as_arrow(column, f"from_dask: {label}: column {name!r} of {column.dtype}")

    def _leaves(self, name: str, array: Any, label: str) -> Sequence[Any]:
        if isinstance(array, (np.ndarray, DeviceColumn)):
            return [array]
        return leaves_of(array, Place(label, (name,)), self.missing.get(name))


def column_as_leaf(value: Any) -> Any:
    """Return a column of a dataframe (pandas, Polars, cuDF) or an Arrow array as a leaf, and other values unchanged.

    Raises
    ------
    ArgumentError
        Values are missing that neither NaN nor NaT represents, no array can hold the values, or it is a dataframe whose
        columns have no common type of numbers.
    """
    pandas, arrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        # Floats are neither rounded nor missing.
        places = [place for place, dtype in enumerate(value.dtypes) if not (_is_plain(dtype) and dtype.kind in "bfc")]
        columns = [(value.columns[place], value.iloc[:, place]) for place in places]
        return _rows_of(value, columns, "dict(frame)")
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(value, polars.DataFrame):
        value, arrow = value.to_arrow(), sys.modules["pyarrow"]
    if arrow is not None and isinstance(value, (arrow.Table, arrow.RecordBatch)):
        columns = list(zip(value.schema.names, value.columns, strict=True))
        return _rows_of(value, columns, "a dict of its columns")
    is_pandas = pandas is not None and isinstance(
        value, (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)
    )
    is_arrow = arrow is not None and isinstance(value, (arrow.Array, arrow.ChunkedArray))
    dtype = value.type if is_arrow else getattr(value, "dtype", None)
    if _is_plain(dtype) or not (is_pandas or is_arrow or (dtype is not None and hasattr(value, "to_arrow"))):
        return value
    if is_pandas and _is_plain(np.asarray(value).dtype):
        # For example nullable or sparse numbers, which NumPy converts.
        return value
    label, types = f"{type(value).__name__} of {dtype}", pa.types
    array = _as_arrow(value, label)
    may_be_missing = types.is_floating(array.type) or types.is_temporal(array.type)
    if array.null_count and not may_be_missing:
        raise ArgumentError(
            f"{label} with {array.null_count} missing values: fill them first, in pandas with fillna(...), leave their "
            "rows out with dropna(), or convert numbers with astype('float64')"
        )
    if is_struct(array.type):
        raise ArgumentError(f"{label} has several fields, each of which must be a column of its own")
    try:
        spec_of(array.type, Place(label))
        (leaf,) = leaves_of(array, Place(label))
    except FileError as error:
        # Readers of files have an argument for that.
        text, is_of_nulls, _ = str(error).partition("; give a replacement with missing=")
        advice = ": fill them first, or leave their rows out" if is_of_nulls else ""
        raise ArgumentError(text + advice) from None
    return leaf


def _rows_of(frame: Any, columns: Sequence[tuple[Any, Any]], as_dict: str) -> Any:
    # Return a dataframe or table as one array, shape (rows, columns).
    rows, kind = np.asarray(frame), type(frame).__name__
    if not _is_plain(rows.dtype):
        raise ArgumentError(f"a {kind} whose columns are not all numbers: give {as_dict}, so that a row is a dict")
    for name, column in columns:
        try:
            loss = loss_in(to_numpy(column_as_leaf(column)), rows.dtype)
        except ArgumentError as error:
            raise ArgumentError(f"a {kind} with the column {name!r}: {error}") from None
        if loss is not None:
            raise ArgumentError(
                f"a {kind} of which the {loss[0]} of {name!r} {loss[1]} in one array of {rows.dtype}: "
                f"give {as_dict}, so that a row is a dict"
            )
    return rows


def _as_arrow(column: Any, label: str) -> Any:
    try:
        if isinstance(column, (pa.Array, pa.ChunkedArray)):
            array = column
        else:
            array = column.to_arrow() if hasattr(column, "to_arrow") else pa.array(column, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError, OverflowError) as error:
        reason = str(error)
        if isinstance(error, OverflowError):
            large = next((value for value in column if isinstance(value, int) and not -(2**63) <= value < 2**63), "")
            reason = f"the number {large} does not fit into int64"
        raise ArgumentError(
            f"{label} cannot become an array: {reason}; leave it out, or give its values one type"
        ) from None
    if isinstance(dtype := getattr(column, "dtype", None), np.dtype) and dtype.kind == "O":
        check_unchanged(column, array, label)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _is_plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "biufcmM"
