"""``from_dask``: the partitions of a Dask collection, computed when they are needed.

The collection's graph becomes part of the pipeline: no task of it runs before the elements are read. Objects of xarray
are recognised by their interface, and read as their Dask arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from dask.base import is_dask_collection
from dask.utils import is_arraylike, is_dataframe_like, is_series_like

from daskdist.cached_property import cached_property
from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.cardinality import counted
from daskdist.core.node import Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.core.to_numpy import is_masked_array, to_numpy
from daskdist.devices import device_of, dtype_of, is_on_device
from daskdist.errors import ArgumentError, FileError
from daskdist.tables.columns import Columns
from daskdist.tables.device_column import DeviceColumn
from daskdist.tables.from_pandas import FrameReader


@dataclass(frozen=True, eq=False)
class FromDask(Source):
    """Each row or item of a Dask collection as an element.

    Parameters
    ----------
    collection
        The collection: an array has chunks along axis 0 only, delayed values are a tuple, and variables are an array
        whose chunks are tuples of theirs.
    kind
        ``"array"``, ``"frame"``, ``"bag"``, ``"delayed"`` or ``"variables"``.
    frames
        The conversion of a dataframe's rows.
    variables
        The assignment of variables to leaves, and the spec of an element.
    narrow
        Whether Python numbers in bags and delayed values become int32 and float32, as in `as_array`.
    """

    collection: Any = field(repr=False)
    kind: str
    frames: FrameReader | None = field(default=None, repr=False)
    variables: Variables | None = field(default=None, repr=False)
    narrow: bool = field(default=False, repr=False)

    name = "from_dask"
    background = True
    is_cheap = False
    is_repeatable = False

    @classmethod
    def of(
        cls,
        collection: Any,
        columns: Any = None,
        label: str | None = None,
        missing: Mapping[str, Any] | None = None,
        dim: str | None = None,
        *,
        narrow: bool = False,
    ) -> FromDask:
        """Create the source from a Dask array, dataframe, series or bag, a list of delayed values, or from xarray."""
        if _is_xarray(collection):
            if missing is not None:
                raise ArgumentError("from_dask: missing= is for dataframes; use fillna() of xarray")
            return cls._of_xarray(collection, columns, label, dim)
        parts = collection if isinstance(collection, (list, tuple)) else [collection]
        if not parts or not all(map(is_dask_collection, parts)):
            kinds = "an empty list" if not parts else " and ".join(sorted({type(part).__name__ for part in parts}))
            raise ArgumentError(
                f"from_dask: {kinds} is neither a Dask collection nor a list of delayed values; for data in memory use "
                "Dataset.from_tensor_slices, with dict(frame) for a dataframe"
            )
        if dim is not None:
            raise ArgumentError("from_dask: dim= is for xarray; other collections have their elements along axis 0")
        if is_series_like(collection) and columns is None:
            # The elements are the values of the only column.
            columns = _SERIES if collection.name is None else str(collection.name)
            collection = collection.to_frame(name=columns)
        if is_dataframe_like(collection):
            return cls(collection, "frame", FrameReader.of(collection, columns, missing), label=label)
        if columns is not None:
            raise ArgumentError("from_dask: columns= is for dataframes; this has none")
        if missing is not None:
            raise ArgumentError("from_dask: missing= is for dataframes; this has no columns")
        if isinstance(collection, (list, tuple)) or _is_delayed(collection):
            if not all(map(_is_delayed, parts)):
                raise ArgumentError("from_dask: a list must have delayed values only; give one array, dataframe or bag")
            return cls(tuple(parts), "delayed", narrow=narrow, label=label)
        if hasattr(collection, "to_delayed") and hasattr(collection, "npartitions") and not is_arraylike(collection):
            return cls(collection, "bag", narrow=narrow, label=label)
        if not is_arraylike(collection):
            raise ArgumentError(
                f"from_dask: takes Dask arrays, dataframes, bags and delayed values, not {type(collection).__name__}"
            )
        if collection.ndim == 0:
            raise ArgumentError("from_dask: the array has no axis 0 to take elements from")
        _check_unmasked(collection)
        return cls(_rows_whole(collection), "array", label=label)

    @classmethod
    def _of_xarray(cls, labelled: Any, columns: Any, label: str | None, dim: str | None) -> FromDask:
        kind = type(labelled).__name__
        if kind in ("DataArray", "Dataset") and not is_dask_collection(labelled):
            raise ArgumentError(
                f"from_dask: the {kind} has no Dask array; cut it into chunks first: .chunk({{dim: n}})"
            )
        if kind == "DataArray":
            if columns is not None:
                raise ArgumentError("from_dask: columns= is for dataframes and xarray's Datasets; this has none")
            return cls(_along(labelled.variable, dim, f"the array {labelled.name!r}"), "array", label=label)
        if kind != "Dataset":
            raise ArgumentError(f"from_dask: xarray objects can be DataArrays and Datasets, not {kind}")
        available = [str(name) for name in (*labelled.data_vars, *labelled.coords)]
        chosen = [str(name) for name in labelled.data_vars] if columns is None else columns
        columns_of_leaves = Columns.of(chosen, available)
        by_name = {name: labelled[name].variable for name in columns_of_leaves.names}
        if dim is None:
            dim = next((variable.dims[0] for variable in by_name.values() if variable.dims), None)
        arrays = {name: _along(variable, dim, f"the variable {name!r}") for name, variable in by_name.items()}
        specs = {name: ElementSpec(LONE, (_row_spec(array),)) for name, array in arrays.items()}
        variables = Variables(columns_of_leaves, columns_of_leaves.spec(specs.__getitem__))
        return cls(_side_by_side(list(arrays.values())), "variables", variables=variables, label=label)

    @cached_property
    def spec(self) -> ElementSpec:
        if self.frames is not None:
            return self.frames.spec(self.collection._meta)
        if self.variables is not None:
            return self.variables.spec
        if self.kind != "array":
            raise SpecUnknown(f"the elements of a {self.kind} are known only when it is computed")
        return ElementSpec(LONE, (_row_spec(self.collection),))

    @property
    def is_cheap_to_list(self) -> bool:
        return self.kind in ("array", "variables", "delayed")

    def splits(self) -> Sequence[Split]:
        return self._splits

    @cached_property
    def _splits(self) -> list[Split]:
        if self.kind == "delayed":
            keys = [part.key for part in self.collection]
            counts: list[Any] = [None] * len(keys)
        elif self.kind not in ("array", "variables"):
            keys = self._lowered.__dask_keys__()
            counts = [None] * len(keys)
        else:
            keys = [_first(key) for key in self.collection.__dask_keys__()]
            counts = [None if math.isnan(size) else size for size in self.collection.chunks[0]]
        return [
            Split(f"partition {k} of the Dask collection", key, count)
            for k, (key, count) in enumerate(zip(keys, counts, strict=True))
        ]

    @cached_property
    def _lowered(self) -> Any:
        # A query-planned dataframe is planned once, so that its keys and its graph agree.
        return self.collection.optimize() if self.kind == "frame" else self.collection

    def graph(self) -> dict[Any, Any]:
        """Return the collection's tasks by key."""
        return self._graph

    @cached_property
    def _graph(self) -> dict[Any, Any]:
        if self.kind != "delayed":
            return dict(self._lowered.__dask_graph__())
        from dask.highlevelgraph import HighLevelGraph

        # Values created together share one graph, which is written out once.
        return dict(HighLevelGraph.merge(*[part.__dask_graph__() for part in self.collection]))

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        meta = getattr(self.collection, "_meta", None)
        is_there = is_on_device(meta) or type(meta).__module__.partition(".")[0] == "cudf"
        function = MakeBlock(self.kind, self.frames, self.variables, self.narrow, is_on_device=is_there)
        return Read(self.splits, function, "from_dask", graph=self.graph)


@dataclass(frozen=True)
class Variables:
    """The assignment of several arrays to the leaves of an element."""

    columns: Columns
    spec: ElementSpec


@dataclass(frozen=True)
class MakeBlock:
    """A function that converts a partition's value to a block.

    Parameters
    ----------
    kind, frames, variables, narrow
        Those of `FromDask`.
    is_on_device
        Whether partitions are known to be on devices.
    keeps
        Whether arrays and columns of numbers that are on devices stay there, as `DeviceColumn`.
    """

    kind: str
    frames: FrameReader | None = None
    variables: Variables | None = None
    narrow: bool = False
    is_on_device: bool = False
    keeps: bool = False

    def kept_on_device(self) -> MakeBlock:
        """Return the function whose blocks keep columns on devices, for the device gathers of the replicas."""
        return replace(self, keeps=True)

    def __call__(self, split: Split, value: Any) -> Block | Bundle:
        if self.frames is not None:
            return self.frames.block(value, split.label, _device_column if self.keeps else None)
        if self.kind == "bag":
            return _of_items(_items_of(value, split.label), split.label, self.narrow)
        if self.variables is not None:
            columns = self.variables.columns
            parts = dict(zip(columns.names, value, strict=True))
            _check_lengths(list(parts.values()), split)
            arrays = {name: _host_array(part, split.label) for name, part in parts.items()}
            try:
                side_by_side = columns.arrays(lambda name: [arrays[name]], split.label)
            except FileError as error:
                raise ArgumentError(f"from_dask: {error}") from None
            return Block(columns.structure, side_by_side, split.label)
        if self.kind == "delayed":
            try:
                leaves, structure = Structure.flatten(value, narrow=self.narrow)
            except ArgumentError as error:
                raise ArgumentError(f"from_dask: {split.label}: {error}") from None
        else:
            column = _device_column(value) if self.keeps else None
            leaves, structure = (_host_array(value, split.label) if column is None else column,), LONE
        _check_lengths(leaves, split)
        return Block(structure, leaves, split.label)


def _device_column(value: Any) -> DeviceColumn | None:
    device = device_of(value)
    if device is None or device.lacks(dtype_of(value)):
        return None
    # Tasks of Dask compute in the current stream of their thread, which for CuPy and cuDF is one for all threads.
    return DeviceColumn(value, dtype_of(value), device.current_stream().record())


def _host_array(value: Any, label: str) -> Any:
    try:
        return to_numpy(value)
    except ArgumentError as error:
        raise ArgumentError(f"from_dask: {label}: {error}") from None


def _check_unmasked(array: Any) -> None:
    # Decide by Dask's empty array of the same type, so that nothing is computed.
    if is_masked_array(getattr(array, "_meta", None)):
        raise ArgumentError(
            "from_dask: the Dask array is masked, but elements have no mask; fill it with "
            "dask.array.ma.filled(array, fill_value=...), and keep dask.array.ma.getmaskarray(array) if the mask "
            "is needed"
        )


def _check_lengths(leaves: Sequence[Any], split: Split) -> None:
    lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
    if len(lengths) > 1 or None in lengths:
        raise ArgumentError(f"from_dask: {split.label} is a nest of arrays of {lengths} rows; they need equal lengths")
    # Dask does not compare the lengths of chunks with those that the array states.
    num_rows = len(leaves[0]) if leaves else 0
    if split.num_rows is not None and num_rows != split.num_rows:
        raise ArgumentError(
            f"from_dask: {split.label} has {counted(num_rows, 'row')}, but the array says {split.num_rows}; state the "
            "lengths where chunks change them, as in map_blocks(..., chunks=...), with nan for unknown ones"
        )


def _items_of(value: Any, label: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise ArgumentError(
            f"from_dask: {label} is {type(value).__name__}, which has no items; give a collection of elements"
        ) from None


def _of_items(items: list[Any], label: str, narrow: bool) -> Block | Bundle:
    if not items:
        return Bundle(LONE, [], label)
    try:
        flat = [Structure.flatten(item, narrow=narrow) for item in items]
    except ArgumentError as error:
        raise ArgumentError(f"from_dask: {label}: {error}") from None
    structure = flat[0][1]
    for place, (_, item_structure) in enumerate(flat):
        if item_structure != structure:
            raise ArgumentError(
                f"from_dask: item {place} of {label} is {item_structure}, but earlier ones are {structure}"
            )
    return from_items(structure, [leaves for leaves, _ in flat], label)


def _is_delayed(value: Any) -> bool:
    from dask.delayed import Delayed

    return isinstance(value, Delayed)


def _first(keys: Any) -> Any:
    # The keys of an array nest one list per axis; there is one key along each axis but the first.
    while isinstance(keys, list):
        (keys,) = keys
    return keys


# The name of the column of a series without a name.
_SERIES = "values"


def _row_spec(array: Any) -> TensorSpec:
    shape = [None if math.isnan(size) else size for size in array.shape[1:]]
    return TensorSpec(tuple(shape), array.dtype)


def _rows_whole(array: Any) -> Any:
    return array.rechunk(dict.fromkeys(range(1, array.ndim), -1))


def _is_xarray(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "xarray" and hasattr(value, "dims")


def _along(variable: Any, dim: str | None, label: str) -> Any:
    # Return a variable of xarray as a Dask array whose axis 0 is the dimension.
    dims = tuple(variable.dims)
    if not dims:
        raise ArgumentError(
            f"from_dask: {label} has no dimension to take elements from; leave it out, or expand_dims()"
        )
    dim = dims[0] if dim is None else dim
    if dim not in dims:
        raise ArgumentError(
            f"from_dask: {label} has no dimension {dim!r}, only {', '.join(map(repr, dims))}; leave it out, name "
            f"another with dim=, or give it that one by expand_dims({{{dim!r}: n}})"
        )
    import dask.array as da

    # A variable without chunks has its values in memory, or in a file that is read now.
    data = variable.data if is_dask_collection(variable.data) else da.from_array(variable.values)
    _check_unmasked(data)
    return _rows_whole(da.moveaxis(data, dims.index(dim), 0))


def _side_by_side(arrays: Sequence[Any]) -> Any:
    # Return one array whose chunks are tuples of a chunk of each array, after aligning chunks along axis 0.
    import dask.array as da

    places = iter(range(1, sum(array.ndim for array in arrays) + 1))
    pairs = [argument for array in arrays for argument in (array, (0, *[next(places) for _ in range(array.ndim - 1)]))]
    return da.blockwise(_together, (0,), *pairs, dtype=object, concatenate=True, meta=np.empty(0, object))


def _together(*chunks: Any) -> tuple[Any, ...]:
    return chunks
