"""Rows of different lengths as an array of their values and the bounds of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from daskdist.core.cardinality import counted
from daskdist.core.to_numpy import to_numpy
from daskdist.errors import ArgumentError, StackError

Array = np.ndarray[Any, Any]


class Ragged:
    """Rows of different lengths, shape ``(num_rows, None, ...)``.

    Parameters
    ----------
    values
        The values of all rows in order, shape ``(num_values, ...)``; itself ragged if rows contain rows of different
        lengths.
    row_splits
        The index in ``values`` of the beginning of each row, and of the end of the last: integers, shape
        ``(num_rows + 1,)``.

    >>> rows = Ragged(np.array([1, 2, 3]), [0, 2, 2, 3])
    >>> [row.tolist() for row in rows]
    [[1, 2], [], [3]]
    >>> rows[:2]
    Ragged(values=array([1, 2]), row_splits=array([0, 2, 2]))
    """

    __slots__ = ("row_splits", "values")
    # Disable NumPy's functions, which would try to make an array of rows of different lengths.
    __array_ufunc__ = None

    def __init__(self, values: Any, row_splits: Any) -> None:
        self.values: Any = values if isinstance(values, Ragged) else to_numpy(values)
        splits = to_numpy(row_splits)
        if splits.ndim != 1 or splits.dtype.kind not in "iu" or not len(splits):
            raise ArgumentError(
                f"Ragged: row_splits is {splits.dtype}{list(splits.shape)}; give integers, [num_rows + 1]"
            )
        if splits[0] != 0 or splits[-1] != len(self.values) or (len(splits) > 1 and np.diff(splits).min() < 0):
            raise ArgumentError(
                f"Ragged: row_splits go from {splits[0]} to {splits[-1]} of {len(self.values)} values; "
                "they start at 0, never fall, and end at the number of values"
            )
        self.row_splits: Array = splits if splits.dtype in (np.int32, np.int64) else splits.astype(np.int64)

    @classmethod
    def of(cls, rows: Sequence[Any], row_splits_dtype: Any = np.int64) -> Ragged:
        """Create an object from rows: arrays of one dtype that may differ in length along axis 0.

        >>> Ragged.of([np.array([1, 2]), np.array([3])])
        Ragged(values=array([1, 2, 3]), row_splits=array([0, 2, 3]))
        """
        rows = [row if type(row) is np.ndarray or isinstance(row, Ragged) else to_numpy(row) for row in rows]
        splits = np.zeros(len(rows) + 1, row_splits_dtype)
        np.cumsum([len(row) for row in rows], out=splits[1:])
        if len({np.shape(row)[1:] for row in rows}) > 1:
            return unchecked_ragged(cls.of([values for row in rows for values in row], row_splits_dtype), splits)
        if isinstance(rows[0], Ragged):
            return unchecked_ragged(cls.concat(rows), splits)
        return unchecked_ragged(np.concatenate(rows), splits)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``(num_rows, None, ...)``."""
        return (len(self), None, *self.values.shape[1:])

    @property
    def ndim(self) -> int:
        return 1 + int(self.values.ndim)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + self.row_splits.nbytes

    @property
    def row_lengths(self) -> Array:
        """The length of each row."""
        return np.diff(self.row_splits)

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __iter__(self) -> Iterator[Any]:
        splits = self.row_splits.tolist()
        values = self.values
        for start, stop in pairwise(splits):
            yield values[start:stop]

    def __getitem__(self, part: Any) -> Any:
        """Return a row, or for a slice some rows, as views."""
        if isinstance(part, slice):
            start, stop, step = part.indices(len(self))
            if step != 1:
                return self.take(np.arange(start, stop, step))
            splits = self.row_splits[start : max(stop, start) + 1]
            return unchecked_ragged(self.values[int(splits[0]) : int(splits[-1])], splits - splits[0])
        row = range(len(self))[part]
        return self.values[int(self.row_splits[row]) : int(self.row_splits[row + 1])]

    def with_splits(self, dtype: Any) -> Ragged:
        """Return the same rows with row splits of another dtype."""
        return unchecked_ragged(self.values, self.row_splits.astype(dtype, copy=False))

    def take(self, rows: Any, axis: int = 0) -> Ragged:
        """Return the rows at some indices, in that order, as one copy."""
        rows = np.asarray(rows, np.intp)
        lengths = self.row_lengths.take(rows)
        splits = np.zeros(len(rows) + 1, self.row_splits.dtype)
        np.cumsum(lengths, out=splits[1:])
        # For each value: the start of its row here, minus the start in the result, plus its index in the result.
        index = np.repeat(self.row_splits.take(rows) - splits[:-1], lengths) + np.arange(splits[-1])
        return unchecked_ragged(self.values.take(index, axis=0), splits)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts in order, as one copy."""
        offsets = np.cumsum([0, *(part.row_splits[-1] for part in parts)])
        splits = [part.row_splits[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
        dtype = parts[0].row_splits.dtype
        return unchecked_ragged(
            concat([part.values for part in parts]), np.concatenate([*splits, offsets[-1:]], dtype=dtype)
        )

    def dense(self) -> Array:
        """Return a view of the rows as one array, shape ``(num_rows, length, ...)``.

        Raises
        ------
        StackError
            Their lengths differ.
        """
        lengths = self.row_lengths
        if isinstance(self.values, Ragged) or (len(lengths) and (lengths != lengths[0]).any()):
            raise StackError(f"rows of {', '.join(map(str, sorted(set(lengths.tolist()))[:4]))} values do not stack")
        return self.values.reshape(len(self), int(lengths[0]) if len(lengths) else 0, *self.values.shape[1:])  # type: ignore[no-any-return]

    def padded(self, length: int, value: Any = 0) -> Array:
        """Return the rows as one array, shape ``(num_rows, length, ...)``, padded with a value.

        Raises
        ------
        StackError
            A row is longer.

        >>> Ragged(np.array([1, 2, 3]), [0, 2, 3]).padded(3, -1)
        array([[ 1,  2, -1],
               [ 3, -1, -1]])
        """
        lengths = self.row_lengths
        if len(lengths) and lengths.max() > length:
            row = int(np.argmax(lengths > length))
            raise StackError(f"row {row} has {counted(lengths[row], 'value')}, more than {length}")
        out = np.full((len(self), length, *self.values.shape[1:]), value, self.dtype)
        out[np.arange(length) < lengths[:, None]] = self.values
        return out

    def tolist(self) -> list[Any]:
        """Return the rows as lists."""
        return [row.tolist() for row in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return unchecked_ragged, (self.values, self.row_splits)

    def __dask_tokenize__(self) -> object:
        from dask.tokenize import normalize_token

        return "Ragged", normalize_token(self.values), normalize_token(self.row_splits)

    def __repr__(self) -> str:
        return f"Ragged(values={self.values!r}, row_splits={self.row_splits!r})"


def unchecked_ragged(values: Any, row_splits: Array) -> Ragged:
    """Return a `Ragged` of parts that are known to be valid, without checks."""
    ragged = object.__new__(Ragged)
    ragged.values, ragged.row_splits = values, row_splits
    return ragged


def ragged_of_dense(array: Array, row_splits_dtype: Any = np.int64) -> Ragged:
    """Return the rows of an array, shape ``(num_rows, length, ...)``, without copying a contiguous one.

    >>> ragged_of_dense(np.array([[1, 2], [3, 4]]))
    Ragged(values=array([1, 2, 3, 4]), row_splits=array([0, 2, 4]))
    """
    num_rows, length = array.shape[:2]
    splits = np.arange(num_rows + 1, dtype=row_splits_dtype) * length
    return unchecked_ragged(array.reshape(num_rows * length, *array.shape[2:]), splits)


def concat(columns: Sequence[Any]) -> Any:
    """Concatenate columns of one dtype, either all ragged or none."""
    return Ragged.concat(columns) if isinstance(columns[0], Ragged) else np.concatenate(columns)
