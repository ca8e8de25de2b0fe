"""``padded_batch``: consecutive elements of different shapes stacked into one array, padded with a value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core.block import Batches, Block, Bundle
from daskdist.core.primitive import Compute, Primitive, gathered
from daskdist.core.ragged import Ragged
from daskdist.core.spec import AnyRankSpec, ElementSpec, Shape, SpecUnknown, TensorSpec, check_ranks
from daskdist.core.structure import LONE, Leaves, Structure
from daskdist.errors import ArgumentError, StackError
from daskdist.ops.batch import Batch
from daskdist.ops.ragged_batch import columns_of, leaf_of, no_datasets, of_one_kind


@dataclass(frozen=True)
class Padding:
    """The shapes and values that leaves are padded to.

    Parameters
    ----------
    operation
        The name of the operation, for messages.
    shapes
        The padded shape of each leaf, where None is the longest length in the batch; None for this on all axes.
    values
        The fill value of each leaf; None for zero, the empty word, or False.
    """

    operation: str
    shapes: tuple[Shape, ...] | None
    values: tuple[Any, ...]

    @classmethod
    def of(cls, operation: str, spec: ElementSpec | SpecUnknown, shapes: Any, values: Any) -> Padding:
        """Create the padding from a user's nest of shapes, and a nest of values or one value for all leaves.

        Raises
        ------
        ArgumentError
            The shapes or values do not fit the elements.
        """
        if isinstance(spec, SpecUnknown):
            if shapes is None and values is None:
                return cls(operation, None, ())
            raise ArgumentError(f"{operation}: padded_shapes and padding_values need elements of a known spec; {spec}")
        no_datasets(operation, spec)
        if shapes is None:
            check_ranks(operation, spec)
        padded_shapes = (
            None
            if shapes is None
            else tuple(
                _shape(operation, leaf, path, shape)
                for leaf, path, shape in zip(
                    spec.leaves,
                    spec.structure.paths,
                    _nest(operation, "padded_shapes", spec.structure, shapes),
                    strict=True,
                )
            )
        )
        if values is None or not _is_nest(values):
            leaf_values = [values] * spec.structure.num_leaves
        else:
            leaf_values = _nest(operation, "padding_values", spec.structure, values)
        fill_values = [
            _value(operation, leaf, path, value)
            for leaf, path, value in zip(spec.leaves, spec.structure.paths, leaf_values, strict=True)
        ]
        return cls(operation, padded_shapes, tuple(fill_values))

    def spec(self, source: ElementSpec, size: int | None) -> ElementSpec:
        """Return the spec of batches of ``size`` elements."""
        shapes = self.shapes or tuple((None,) * len(leaf.shape) for leaf in source.leaves)
        values = self.values or (None,) * len(source.leaves)
        leaves = [
            # An axis of known length keeps it. Bytes are as wide as the fill word; text may have any width.
            TensorSpec(
                (size, *(a if b is None else b for a, b in zip(leaf.shape or shape, shape, strict=True))),
                _dtype_with(_filler(value, leaf.dtype), leaf.dtype) if leaf.dtype.kind == "S" else leaf.dtype,
            )
            for leaf, shape, value in zip(source.leaves, shapes, values, strict=True)
        ]
        return source.with_leaves(leaves)


def _is_nest(value: Any) -> bool:
    return isinstance(value, (tuple, dict))


def _nest(operation: str, name: str, structure: Structure, nest: Any) -> list[Any]:
    if structure == LONE:
        return [nest]
    try:
        return structure.leaves_of(nest)
    except (ValueError, TypeError):
        raise ArgumentError(
            f"{operation}: {name} is {nest!r}; give it the structure of an element, {structure}"
        ) from None


def _shape(operation: str, leaf: TensorSpec, path: str, lengths: Any) -> Shape:
    where = f"{operation}: padded_shapes of leaf {path or '(the element)'}"
    try:
        shape = tuple(None if size is None or size == -1 else operator.index(size) for size in lengths)
    except (TypeError, ValueError):
        shape = (-1,)
    if any(size is not None and size < 0 for size in shape):
        raise ArgumentError(f"{where} is {lengths!r}; give lengths, with None or -1 for the longest of a batch")
    if isinstance(leaf, AnyRankSpec):
        return shape
    if len(shape) != len(leaf.shape):
        raise ArgumentError(f"{where} is {list(shape)}, of {len(shape)} axes; the leaf has {len(leaf.shape)}, {leaf}")
    for size, known in zip(shape, leaf.shape, strict=True):
        if size is not None and known is not None and size < known:
            raise ArgumentError(f"{where} is {list(shape)}, but the leaf is longer: {leaf}")
    return shape


def _value(operation: str, leaf: TensorSpec, path: str, fill_value: Any) -> Any:
    if fill_value is None:
        return b"" if leaf.dtype == object else np.zeros((), leaf.dtype)[()]
    value = np.asarray(fill_value)
    of_python = not isinstance(fill_value, (np.generic, np.ndarray))
    same_kind = value.dtype.kind == leaf.dtype.kind or (
        of_python and value.dtype.kind in "iu" and leaf.dtype.kind in "iufc"
    )
    words = value.dtype.kind in "SUTO" and leaf.dtype.kind in "SUTO"
    if value.shape or not (words or (same_kind and (of_python or value.dtype == leaf.dtype))):
        raise ArgumentError(
            f"{operation}: padding_values of leaf {path or '(the element)'} is {fill_value!r}, of {value.dtype}"
            f"{list(value.shape)}; the leaf is {leaf.dtype}, so give one value of that dtype"
        )
    if leaf.dtype == object:
        return fill_value.encode() if isinstance(fill_value, str) else fill_value
    # A fill word may be longer than the words of the leaf.
    dtype = np.dtype(leaf.dtype.kind) if leaf.dtype.kind in "SU" else leaf.dtype
    try:
        with np.errstate(over="ignore"):
            filler = np.asarray(fill_value, dtype)[()]
        is_held = dtype.kind not in "fc" or bool(np.isfinite(filler) or not np.isfinite(value))
        is_held = is_held and (value.dtype.kind not in "iu" or int(filler.real) == int(value))
    except OverflowError:
        is_held = False
    if not is_held:
        raise ArgumentError(
            f"{operation}: padding_values of leaf {path or '(the element)'} is {fill_value!r}, but {leaf.dtype} cannot "
            "hold that number"
        )
    return filler


@dataclass(frozen=True, eq=False)
class PaddedBatch(Batch):
    """Batches of ``batch_size`` elements, padded to one shape."""

    padding: Padding = field(repr=False, kw_only=True)

    name = "padded_batch"

    @property
    def spec(self) -> ElementSpec:
        return self.padding.spec(self.source.spec, self.batch_size if self.drop_remainder else None)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        batches = super().lower((gathered(inputs[0]),))
        return Compute(batches, PadRows(self.padding), self.name, factor=1, unstacked=True)


@dataclass(frozen=True)
class PadRows:
    """A function that assembles groups of rows as padded batches.

    Parameters
    ----------
    padding
        The shapes and values to pad to.
    fill_to
        Returns the length of axes of unspecified size, given the first element of a batch and a function that names
        its origin; None for the longest length in the batch.
    """

    padding: Padding
    fill_to: Callable[[Any, Callable[[], str]], int] | None = None

    def __call__(self, batches: Batches) -> Bundle:
        rows = batches.rows
        columns = rows.leaves if isinstance(rows, Block) else columns_of(rows)
        items = [
            self._batch(rows, columns, start, stop)
            for start, stop in zip(batches.bounds[:-1], batches.bounds[1:], strict=True)
        ]
        return Bundle(rows.structure, items, rows.label)

    def _batch(self, rows: Block | Bundle, columns: Sequence[Any], start: int, stop: int) -> Leaves:
        fill_to = None
        if self.fill_to is not None:
            fill_to = self.fill_to(next(iter(rows.elements(start, start + 1))), lambda: rows.where(start))
        leaves = []
        for number, column in enumerate(columns):
            shape = None if self.padding.shapes is None else self.padding.shapes[number]
            value = self.padding.values[number] if self.padding.values else None
            try:
                leaves.append(padded(column[start:stop], shape, value, fill_to))
            except TooLong as error:
                path = rows.structure.paths[number]
                raise StackError(
                    f"{self.padding.operation}: leaf {path or '(the element)'} of {rows.where(start + error.row)} "
                    f"has shape {list(error.shape)}, longer than the padded shape {list(error.padded_shape)}"
                ) from None
            except StackError as error:
                raise StackError(f"{self.padding.operation}: {leaf_of(rows, number)} {error}") from None
        return tuple(leaves)


class TooLong(Exception):  # noqa: N818 - a signal
    """An element that is longer than its padded shape."""

    def __init__(self, row: int, shape: Sequence[int], padded_shape: Sequence[int]) -> None:
        super().__init__(row, shape, padded_shape)
        self.row = row
        self.shape = shape
        self.padded_shape = padded_shape


def padded(column: Any, shape: Shape | None, value: Any, fill_to: int | None = None) -> Any:
    """Return the leaves of the elements of a batch as one padded array.

    Parameters
    ----------
    column
        An array, shape ``(num_rows, ...)``, `Ragged` rows, or a list of arrays.
    shape
        The padded shape of each leaf, where None is the longest length in the batch; None for this on all axes.
    value
        The fill value.
    fill_to
        The length of axes without a given size; None for the longest length.

    Raises
    ------
    TooLong
        An element is longer than its padded shape.

    >>> padded([np.array([1, 2]), np.array([3])], None, 0)
    array([[1, 2],
           [3, 0]])
    """
    if isinstance(column, Ragged) and isinstance(column.values, np.ndarray):
        inner = column.values.shape[1:]
        if (
            shape is None
            or shape[1:] == inner
            or not any(size not in (None, length) for size, length in zip(shape[1:], inner, strict=True))
        ):
            target = shape[0] if shape is not None and shape[0] is not None else fill_to
            lengths = column.row_lengths
            longest = int(lengths.max(initial=0))
            if target is not None and longest > target:
                row = int(np.argmax(lengths > target))
                raise TooLong(row, [int(lengths[row]), *inner], [target, *inner])
            filler = _filler(value, column.dtype)
            values = column.values.astype(_dtype_with(filler, column.dtype), copy=False)
            return Ragged(values, column.row_splits).padded(longest if target is None else target, filler)
    if (
        isinstance(column, np.ndarray)
        and fill_to is None
        and (shape is None or all(a in (None, b) for a, b in zip(shape, column.shape[1:], strict=True)))
    ):
        return column.astype(_dtype_with(_filler(value, column.dtype), column.dtype), copy=False)
    arrays = of_one_kind(column)
    sizes = np.array([array.shape for array in arrays]).reshape(len(arrays), arrays[0].ndim)
    longest_each = sizes.max(axis=0).tolist()
    padded_shape = [
        (fill_to if fill_to is not None else longest) if size is None else size
        for size, longest in zip(shape or (None,) * len(longest_each), longest_each, strict=True)
    ]
    too_long = (sizes > np.array(padded_shape)).any(axis=1)
    if too_long.any():
        row = int(np.argmax(too_long))
        raise TooLong(row, arrays[row].shape, padded_shape)
    dtype = np.result_type(*{array.dtype for array in arrays})
    filler = _filler(value, dtype)
    out = np.full((len(arrays), *padded_shape), filler, _dtype_with(filler, dtype))
    for row, array in enumerate(arrays):
        place: Any = (row, *map(slice, array.shape))
        # [()] extracts a lone object from its 0-d array.
        out[place] = array[()]
    return out


def _dtype_with(filler: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    # Return the dtype of a padded array: words are as wide as the fill word.
    return np.result_type(dtype, filler.dtype) if dtype.kind in "SU" else dtype


def _filler(value: Any, dtype: np.dtype[Any]) -> Any:
    if value is not None:
        return value
    return b"" if dtype.kind == "O" else np.zeros((), dtype)[()]
