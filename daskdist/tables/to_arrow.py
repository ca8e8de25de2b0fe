"""Conversion of elements to Arrow tables, the inverse of `from_arrow`.

====================================  =============================================
a leaf of                             becomes a column of
====================================  =============================================
bools, integers, floats to 64 bits    the type of that name
text                                  text; NumPy's ``str_`` too
bytes                                 bytes; NumPy's ``bytes_`` too
``datetime64``                        dates if the unit is days, else timestamps
``timedelta64``                       durations
arrays of one shape                   nested fixed-size lists
arrays of varying length              lists
`Ragged`                              lists of lists
====================================  =============================================

A dict has a column for each name, and a tuple has one for each place, named by its number; nested dicts and tuples are
structs. The column of an element that is a single leaf is called ``value``. NaT becomes a null.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import optree

from daskdist.core.block import Batches, Block, Rows
from daskdist.core.ragged import Ragged
from daskdist.core.spec import AnyRankSpec, DatasetSpec, ElementSpec, RaggedTensorSpec, Shape, TensorSpec
from daskdist.core.structure import TEXT
from daskdist.errors import ArgumentError, MissingPackageError
from daskdist.storage.libraries import pa

# The name of the column of an element that is a single leaf.
LONE_NAME: Final = "value"

_UNITS: Final = {"M": ("D", "s", "ms", "us", "ns"), "m": ("s", "ms", "us", "ns")}
# Kinds of dtype that share a type of column.
_TOGETHER: Final = ("TU", "OS")


def columns_of(rows: Rows) -> list[Any]:
    """Return each leaf as an array or `Ragged`, shape ``(num_rows, ...)``; for a bundle, as a list of values."""
    if isinstance(rows, Block):
        return list(rows.leaves)
    if isinstance(rows, Batches) and rows.inners is None and isinstance(rows.rows, Block):
        leaves = rows.rows.leaves
        if not any(isinstance(leaf, Ragged) for leaf in leaves):
            return [_cuts(leaf, np.asarray(rows.bounds, np.int64)) for leaf in leaves]
    items = [rows.item(index) for index in range(len(rows))]
    return [[item[leaf] for item in items] for leaf in range(rows.structure.num_leaves)]


def _cuts(rows: Any, bounds: Any) -> Any:
    # Return batches of rows of one array as a view.
    chunks = Ragged(rows[bounds[0] : bounds[-1]], bounds - bounds[0])
    lengths = chunks.row_lengths
    return chunks.dense() if (lengths == lengths[:1]).all() else chunks


def no_rows(spec: ElementSpec) -> Block:
    """Return an empty block of a spec; leaves of varying length are `Ragged`."""
    return Block(spec.structure, [_no_rows(_axes(leaf), leaf.dtype) for leaf in spec.leaves])


def _no_rows(axes: Shape, dtype: np.dtype[Any]) -> Any:
    if axes and axes[0] is None:
        return Ragged(_no_rows(axes[1:], dtype), np.zeros(1, np.int64))
    return np.ndarray((0, *(size or 0 for size in axes)), dtype)


def _axes(leaf: TensorSpec) -> Shape:
    # Return the axes of a leaf in a column, where `Ragged` rows are lists of any length.
    return (None, *leaf.shape[1:]) if isinstance(leaf, RaggedTensorSpec) else leaf.shape


# --- what makes a column ---


def check_columns(spec: ElementSpec) -> None:
    """Check that elements can become columns.

    Raises
    ------
    ArgumentError
        A leaf or a structure cannot; the message says which, and what to do.
    """
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        reason = _refused(leaf)
        if reason:
            raise ArgumentError(f"{called(path)} is {leaf}: {reason}")
    _check_names(spec.structure.treespec)


def called(path: str) -> str:
    """Return the name of a leaf for messages."""
    return f"leaf {path}" if path else "the element"


def _refused(leaf: TensorSpec) -> str:
    # Return the reason why a leaf cannot become a column; empty if it can.
    if isinstance(leaf, AnyRankSpec):
        return "the number of its axes is unknown; give its shape in output_signature"
    dtype, axes = leaf.dtype, _axes(leaf)
    if isinstance(leaf, DatasetSpec):
        return "columns hold arrays; convert it to arrays first, with flat_map(lambda window: window.batch(...))"
    if dtype.kind == "c":
        return "columns cannot hold complex numbers; split it into two leaves with map, x.real and x.imag"
    if dtype.kind in _UNITS and not _has_unit(dtype):
        units = ", ".join(_UNITS[dtype.kind])
        return f"columns count time in {units}; change it with map, such as x.astype('{dtype.kind}8[s]')"
    if dtype.kind == "T" and dtype != TEXT:
        return "a column cannot hold text with a missing value; fill it in with map"
    if dtype.kind not in "biufMmSUTO" or (dtype.kind == "f" and dtype.itemsize > 8):
        return "columns hold bools, numbers of up to 64 bits, times, text and bytes; convert it to these with map"
    if None in axes[_num_lists(axes) :] or (_num_lists(axes) > 1 and not isinstance(leaf, RaggedTensorSpec)):
        return (
            "only the length of its first axis may vary; flatten it with map, x.reshape(-1), and keep "
            "np.array(x.shape) in another leaf"
        )
    if 0 in axes:
        return "empty arrays cannot become a column; leave it out with map"
    return ""


def _has_unit(dtype: np.dtype[Any]) -> bool:
    unit, count = np.datetime_data(dtype)
    return unit in _UNITS[dtype.kind] and count == 1


def _num_lists(axes: Shape) -> int:
    # Count the leading axes of unknown length.
    return next((place for place, size in enumerate(axes) if size is not None), len(axes))


def _check_names(treespec: Any) -> None:
    if not treespec.is_leaf():
        fields(treespec)
        for child in treespec.children():
            _check_names(child)


def fields(treespec: Any) -> list[tuple[str, int]]:
    """Return the names of a nest's columns in the user's order, each with the index of its child.

    Raises
    ------
    ArgumentError
        The nest is empty, neither a dict nor a tuple, or two of its names are the same as text.
    """
    kind = treespec.type
    if kind is tuple:
        named = [(str(place), place) for place in range(treespec.num_children)]
    elif treespec.kind == optree.PyTreeKind.NAMEDTUPLE:
        named = list(zip(kind._fields, range(treespec.num_children), strict=True))
    elif isinstance(kind, type) and issubclass(kind, dict):
        places = {name: place for place, name in enumerate(treespec.entries())}
        # Children are sorted; only a rebuilt dict has the user's order.
        named = [(str(name), places[name]) for name in treespec.unflatten(range(treespec.num_leaves))]
    else:
        raise ArgumentError(f"columns need dicts and tuples, not {kind.__name__}; convert it with map")
    if not named:
        raise ArgumentError(f"an empty {kind.__name__} cannot become a column; leave it out with map")
    names = [name for name, _ in named]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ArgumentError(f"two columns would be called {twice!r}; rename one with map")
    return named


# --- tables ---


def table_of(rows: Rows, spec: ElementSpec | None = None) -> Any:
    """Convert elements to an Arrow table with a row for each.

    Parameters
    ----------
    rows
        The elements.
    spec
        The spec they must have, so that tables of other elements have the same columns; None for their own.

    Raises
    ------
    ArgumentError
        The elements cannot become columns, or do not match the spec; the message names the leaf and the element.
    """
    if rows.is_all_failed:
        # Their structure is unknown: raise the error of the first.
        rows.item(0)
    if spec is None:
        spec = _spec_of(rows)
        check_columns(spec)
    if rows.structure != spec.structure:
        raise ArgumentError(f"elements are {rows.structure}, but {spec.structure} is expected; convert them with map")
    arrays = []
    for path, leaf, column in zip(spec.structure.paths, spec.leaves, columns_of(rows), strict=True):
        try:
            arrays.append(_arrow(_fitted(_whole(column, leaf), _axes(leaf), leaf)))
        except _ConversionError as error:
            raise ArgumentError(
                f"{called(path)} of {rows.where(error.place)} is {error}, but {leaf} is expected; "
                "convert all of them to one kind with map"
            ) from None
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise ArgumentError(f"{called(path)}, {leaf}, cannot become a column: {error}") from None
    return pa.table(_named(spec.structure.treespec, iter(arrays)))


def frame_of(parts: Iterable[Rows], spec: ElementSpec) -> Any:
    """Return elements as a pandas ``DataFrame`` with a row for each."""
    if importlib.util.find_spec("pandas") is None:
        raise MissingPackageError("to_pandas needs pandas: pip install pandas")
    tables = [table_of(rows, spec) for rows in parts if len(rows)] or [table_of(no_rows(spec), spec)]
    return pa.concat_tables(tables).to_pandas()


def _named(treespec: Any, leaves: Iterator[Any]) -> dict[str, Any]:
    if treespec.is_leaf():
        return {LONE_NAME: next(leaves)}
    children = [_column(child, leaves) for child in treespec.children()]
    return {name: children[place] for name, place in fields(treespec)}


def _column(treespec: Any, leaves: Iterator[Any]) -> Any:
    if treespec.is_leaf():
        return next(leaves)
    by_name = _named(treespec, leaves)
    return pa.StructArray.from_arrays(list(by_name.values()), list(by_name))


class _ConversionError(Exception):
    # A value that does not conform to the spec, and the number of its element.
    def __init__(self, problem: str, place: int = 0) -> None:
        super().__init__(problem)
        self.place = place


def _spec_of(rows: Rows) -> ElementSpec:
    # Return the narrowest spec that holds all elements.
    leaves = []
    for path, column in zip(rows.structure.paths, columns_of(rows), strict=True):
        specs = list(map(_spec_of_value, column)) if isinstance(column, list) else [_spec_of_column(column)]
        common: TensorSpec | None = specs[0]
        for spec in specs[1:]:
            common = common and common.most_general_common_spec(spec)
        if common is None:
            raise ArgumentError(f"{called(path)} comes in several dtypes or ranks; convert all of them to one with map")
        leaves.append(common)
    return ElementSpec(rows.structure, tuple(leaves))


def _spec_of_value(value: Any) -> TensorSpec:
    spec = TensorSpec.of(value)
    # NumPy's fixed-width words of different lengths differ in dtype, so one dtype stands for all.
    words: dict[str, np.dtype[Any]] = {"U": TEXT, "S": np.dtype(object)}
    return TensorSpec(spec.shape, words[spec.dtype.kind]) if spec.dtype.kind in words else spec


def _spec_of_column(column: Any) -> TensorSpec:
    is_nested = isinstance(column, Ragged) and isinstance(column.values, Ragged)
    return (RaggedTensorSpec if is_nested else TensorSpec)(column.shape[1:], column.dtype)


def _whole(column: Any, leaf: TensorSpec) -> Any:
    # Return a column, which may be a list of values, as one array or `Ragged`.
    if not isinstance(column, list):
        _check_dtype(column, leaf, 0)
        return column
    if not column:
        return _no_rows(_axes(leaf), leaf.dtype)
    kinds: dict[Any, int] = {}
    for place, value in enumerate(column):
        kinds.setdefault((type(value), getattr(value, "dtype", None), getattr(value, "shape", ())), place)
    for place in kinds.values():
        _check_dtype(column[place], leaf, place)
        _check_shape(column[place], leaf, place)
    if isinstance(column[0], (np.str_, np.bytes_)):
        # A fixed-width array would lose trailing zeros.
        values = np.empty(len(column), TEXT if isinstance(column[0], np.str_) else object)
        values[:] = [str(value) if isinstance(value, np.str_) else bytes(value) for value in column]
        return values
    return Ragged.of(column) if _axes(leaf)[:1] == (None,) else np.stack(column)


def _check_dtype(value: Any, leaf: TensorSpec, place: int) -> None:
    if not isinstance(value, (np.ndarray, np.generic, Ragged)):
        raise _ConversionError(f"{type(value).__name__}, which is not an array in host memory", place)
    actual, expected = _native(value.dtype), _native(leaf.dtype)
    if actual != expected and not any(actual.kind in kinds and expected.kind in kinds for kinds in _TOGETHER):
        raise _ConversionError(_kind(value), place)


def _check_shape(value: Any, leaf: TensorSpec, place: int) -> None:
    axes = _axes(leaf)
    is_ragged = isinstance(value, Ragged)
    fits = len(value.shape) == len(axes) and all(b in (None, a) for a, b in zip(value.shape, axes, strict=True))
    if is_ragged != isinstance(leaf, RaggedTensorSpec) or not fits:
        raise _ConversionError(_kind(value), place)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _fitted(column: Any, axes: Shape, leaf: TensorSpec) -> Any:
    # Return lists where the spec lets a length vary, even if it does not here, and arrays elsewhere.
    if axes and axes[0] is None:
        if isinstance(column, Ragged):
            return Ragged(_fitted(column.values, axes[1:], leaf), column.row_splits)
        if column.ndim < 2:
            raise _ConversionError(f"{column.dtype}[]")
        num_rows, length = column.shape[:2]
        values = column.reshape(num_rows * length, *column.shape[2:])
        return Ragged(_fitted(values, axes[1:], leaf), np.arange(num_rows + 1) * length)
    if isinstance(column, Ragged):
        lengths = column.row_lengths
        odd = np.flatnonzero(lengths != axes[0]) if axes else np.zeros(1, np.intp)
        if len(odd) or isinstance(column.values, Ragged):
            place = int(odd[0]) if len(odd) else 0
            raise _ConversionError(_kind(column[place]), place)
        column = column.dense()
    if column.shape[1:] != axes:
        raise _ConversionError(f"{column.dtype}{list(column.shape[1:])}")
    return column


# --- arrays ---


def _arrow(column: Any) -> Any:
    if isinstance(column, Ragged):
        splits = pa.array(column.row_splits.astype(np.int64, copy=False))
        return pa.LargeListArray.from_arrays(splits, _arrow(column.values))
    array = _flat(column.reshape(-1))
    for size in reversed(column.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _flat(values: np.ndarray[Any, Any]) -> Any:
    kind = values.dtype.kind
    if kind == "O":
        return pa.array(_only_bytes(values.tolist()), pa.large_binary())
    if kind in "SU":
        return pa.array(values.tolist(), pa.large_binary() if kind == "S" else pa.large_string())
    if kind == "T":
        try:
            return pa.array(values, pa.large_string())
        # Older versions of pyarrow do not know NumPy's text.
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
            return pa.array(values.tolist(), pa.large_string())
    if values.dtype == "M8[D]":
        # Arrow counts days in 32 bits, and would silently truncate 64.
        days = values.astype(np.int64)[~np.isnat(values)]
        if len(days) and not -(2**31) <= days.min() <= days.max() < 2**31:
            raise ValueError(f"dates from {values.min()} to {values.max()} are not all in the range of a date column")
    return pa.array(values if values.dtype.isnative else values.astype(_native(values.dtype)))


def _only_bytes(values: Sequence[Any]) -> Sequence[Any]:
    # Arrow would encode text as bytes, and take None for a null.
    for kind in set(map(type, values)):
        if not issubclass(kind, bytes):
            raise ValueError(f"an array of objects holds {kind.__name__}, and only bytes are written")
    return values
