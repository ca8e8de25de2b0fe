"""``from_dask``: the partitions of a Dask collection, computed as they are wanted.

The collection's own graph is part of the pipeline: nothing of it runs before the elements are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from dask.base import is_dask_collection
from dask.utils import is_arraylike, is_dataframe_like

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.node import Facts, Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.errors import ArgumentError
from daskdist.formats.columns import Columns


@dataclass(frozen=True, eq=False)
class FromDask(Source):
    """One element a row or item of a Dask collection.

    Parameters
    ----------
    collection
        The collection; an array in chunks along axis 0 only; delayed values as a tuple.
    kind
        ``"array"``, ``"frame"``, ``"bag"`` or ``"delayed"``.
    columns
        How a dataframe's columns make up an element.
    """

    collection: Any = field(repr=False)
    kind: str
    columns: Columns | None = None

    name = "from_dask"
    facts = Facts()
    background = True
    is_light = False

    @classmethod
    def of(cls, collection: Any, columns: Any = None, label: str | None = None) -> FromDask:
        """From a Dask array, dataframe or bag, or a list of delayed values; ``columns`` as in ``read_parquet``."""
        parts = collection if isinstance(collection, (list, tuple)) else [collection]
        if not parts or not all(map(is_dask_collection, parts)):
            given = "an empty list" if not parts else " and ".join(sorted({type(part).__name__ for part in parts}))
            raise ArgumentError(f"from_dask: {given} is no Dask collection, nor a list of delayed values")
        if is_dataframe_like(collection):
            names = [str(name) for name in collection.columns]
            return cls(collection, "frame", Columns.of(columns, names), label=label)
        if columns is not None:
            raise ArgumentError("from_dask: columns= is for dataframes; this has none")
        if isinstance(collection, (list, tuple)) or _is_delayed(collection):
            if not all(map(_is_delayed, parts)):
                raise ArgumentError("from_dask: a list is to be of delayed values; give one array, dataframe or bag")
            return cls(tuple(parts), "delayed", label=label)
        if hasattr(collection, "to_delayed") and hasattr(collection, "npartitions") and not is_arraylike(collection):
            return cls(collection, "bag", label=label)
        if not is_arraylike(collection):
            raise ArgumentError(
                f"from_dask: takes Dask arrays, dataframes, bags and delayed values, not {type(collection).__name__}"
            )
        if collection.ndim == 0:
            raise ArgumentError("from_dask: the array has no axis 0 to take elements from")
        return cls(collection.rechunk(dict.fromkeys(range(1, collection.ndim), -1)), "array", label=label)

    @cached_property
    def spec(self) -> ElementSpec:
        if self.columns is not None:
            dtypes = self.collection.dtypes
            return self.columns.spec(lambda name: ElementSpec(LONE, (TensorSpec((), _numpy_dtype(dtypes[name])),)))
        if self.kind != "array":
            raise SpecUnknown(f"what a {self.kind} holds is known only when it is computed")
        shape = [None if math.isnan(size) else size for size in self.collection.shape[1:]]
        return ElementSpec(LONE, (TensorSpec(tuple(shape), self.collection.dtype),))

    def splits(self) -> Sequence[Split]:
        return self._splits

    @cached_property
    def _splits(self) -> list[Split]:
        if self.kind == "delayed":
            keys = [part.key for part in self.collection]
            counts: list[Any] = [None] * len(keys)
        elif self.kind != "array":
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
        """The collection's tasks by key."""
        return self._graph

    @cached_property
    def _graph(self) -> dict[Any, Any]:
        parts = self.collection if self.kind == "delayed" else [self._lowered]
        return {key: task for part in parts for key, task in dict(part.__dask_graph__()).items()}

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, MakeBlock(self.kind, self.columns), "from_dask", graph=self.graph)


@dataclass(frozen=True)
class MakeBlock:
    """A partition's value as a block."""

    kind: str
    columns: Columns | None

    def __call__(self, split: Split, value: Any) -> Block | Bundle:
        if self.columns is not None:
            arrays = self.columns.arrays(lambda name: [_to_numpy(value[name])])
            return Block(self.columns.structure, arrays, split.label)
        if self.kind == "bag":
            return _of_items(list(value), split.label)
        leaves, structure = Structure.flatten(value) if self.kind == "delayed" else ([np.asarray(value)], LONE)
        lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
        if len(lengths) > 1 or None in lengths:
            raise ArgumentError(
                f"from_dask: {split.label} is a nest of arrays of {lengths} rows; they need as many rows each"
            )
        return Block(structure, leaves, split.label)


def _of_items(items: list[Any], label: str) -> Block | Bundle:
    if not items:
        return Bundle(LONE, [], label)
    flat = [Structure.flatten(item) for item in items]
    structure = flat[0][1]
    for place, (_, found) in enumerate(flat):
        if found != structure:
            raise ArgumentError(f"from_dask: item {place} of {label} is {found}, and those before {structure}")
    return from_items(structure, [leaves for leaves, _ in flat], label)


def _is_delayed(value: Any) -> bool:
    from dask.delayed import Delayed

    return isinstance(value, Delayed)


def _first(keys: Any) -> Any:
    # The keys of an array nest one list an axis; along all but the first there is just one.
    while isinstance(keys, list):
        (keys,) = keys
    return keys


def _to_numpy(column: Any) -> np.ndarray[Any, Any]:
    return column.to_numpy(dtype=_numpy_dtype(column.dtype))  # type: ignore[no-any-return]


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, np.dtype):
        return dtype
    if dtype.name.startswith(("str", "large_str")):
        return np.dtypes.StringDType()
    if hasattr(dtype, "categories"):
        return _numpy_dtype(dtype.categories.dtype)
    return np.dtype(getattr(dtype, "numpy_dtype", object))
