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

from daskdist.core.block import Block
from daskdist.core.node import Facts, Source
from daskdist.core.primitive import Primitive, Read, Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError
from daskdist.formats.columns import Columns

_LONE = Structure.of(0)[1]


@dataclass(frozen=True, eq=False)
class FromDask(Source):
    """One element a row of a Dask array or dataframe.

    Parameters
    ----------
    collection
        The collection; an array in chunks along axis 0 only.
    columns
        How a dataframe's columns make up an element; None for an array.
    """

    collection: Any = field(repr=False)
    columns: Columns | None = None

    name = "from_dask"
    facts = Facts()
    background = True

    @classmethod
    def of(cls, collection: Any, columns: Any = None) -> FromDask:
        """From a Dask array or dataframe; ``columns`` as in ``read_parquet``."""
        if not is_dask_collection(collection):
            raise ArgumentError(f"from_dask: {type(collection).__name__} is not a Dask collection")
        if is_dataframe_like(collection):
            return cls(collection, Columns.of(columns, [str(name) for name in collection.columns]))
        if not is_arraylike(collection):
            raise ArgumentError(f"from_dask: takes Dask arrays and dataframes, not {type(collection).__name__}")
        if columns is not None:
            raise ArgumentError("from_dask: columns= is for dataframes; an array has none")
        if collection.ndim == 0:
            raise ArgumentError("from_dask: the array has no axis 0 to take elements from")
        return cls(collection.rechunk(dict.fromkeys(range(1, collection.ndim), -1)))

    @cached_property
    def spec(self) -> ElementSpec:
        if self.columns is not None:
            dtypes = self.collection.dtypes
            return self.columns.spec(lambda name: TensorSpec((), _numpy_dtype(dtypes[name])))
        shape = [None if math.isnan(size) else size for size in self.collection.shape[1:]]
        return ElementSpec(_LONE, (TensorSpec(tuple(shape), self.collection.dtype),))

    def splits(self) -> Sequence[Split]:
        return self._splits

    @cached_property
    def _splits(self) -> list[Split]:
        if self.columns is not None:
            keys = self._lowered.__dask_keys__()
            counts: list[Any] = [None] * len(keys)
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
        return self.collection.optimize() if self.columns is not None else self.collection

    def graph(self) -> dict[Any, Any]:
        """The collection's tasks by key."""
        return self._graph

    @cached_property
    def _graph(self) -> dict[Any, Any]:
        return dict(self._lowered.__dask_graph__())

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, MakeBlock(self.columns), "from_dask", graph=self.graph)


@dataclass(frozen=True)
class MakeBlock:
    """A partition's value as a block."""

    columns: Columns | None

    def __call__(self, split: Split, value: Any) -> Block:
        if self.columns is None:
            return Block(_LONE, [np.asarray(value)], split.label)
        return Block(self.columns.structure, self.columns.arrays(lambda name: _to_numpy(value[name])), split.label)


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
