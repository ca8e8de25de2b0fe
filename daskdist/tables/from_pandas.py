"""Columns of dataframes as elements: as those of Arrow tables, whatever kind of column pandas has them in.

Columns of NumPy's numbers, bools and times are taken as they are. All others (nullable and categorical ones, text,
times with a zone, those of Arrow) become Arrow arrays, so that `from_arrow` tells their dtypes and nulls. What
a column of objects holds is known only by its values; so is what categories are that are not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Bundle
from daskdist.core.spec import ElementSpec, SpecUnknown, TensorSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError, FileError
from daskdist.tables.columns import Columns
from daskdist.tables.from_arrow import leaves_of, spec_of

# Dask's placeholder for categories that only the partitions know.
_UNKNOWN: Final = "__UNKNOWN_CATEGORIES__"


@dataclass(frozen=True)
class FrameReader:
    """Options for converting dataframes to elements.

    Parameters
    ----------
    columns
        Which columns make up which leaf.
    labels
        What the dataframe calls each of them, where that is no text; by name.
    missing
        What stands for a null, by name.
    """

    columns: Columns
    labels: Mapping[str, Any]
    missing: Mapping[str, Any]

    @classmethod
    def of(cls, frame: Any, columns: Any, missing: Mapping[str, Any] | None) -> FrameReader:
        """Create a reader for a dataframe, Dask's or pandas'.

        Raises
        ------
        ArgumentError
            There is no such column, or two have one name.
        """
        labels = {str(label): label for label in frame.columns}
        if len(labels) < len(frame.columns):
            names = [str(label) for label in frame.columns]
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"from_dask: two columns are called {twice!r}; rename one of them")
        for name in missing or ():
            if name not in labels:
                raise ArgumentError(f"missing: no column {name!r}; there are {', '.join(map(repr, labels))}")
        made = Columns.of(columns, list(labels))
        return cls(made, {name: labels[name] for name in made.names}, dict(missing or {}))

    def spec(self, frame: Any) -> ElementSpec:
        """Return the spec of an element, given a dataframe without rows.

        Raises
        ------
        SpecUnknown
            A column is of objects, or of categories that are not known yet.
        ArgumentError
            No array holds what a column has.
        """
        return self.columns.spec(lambda name: self._column_spec(name, frame[self.labels[name]]))

    def block(self, frame: Any, label: str) -> Block | Bundle:
        """Convert a partition to a block.

        Raises
        ------
        ArgumentError
            A column has nulls and nothing that stands for them, or what no array holds.
        """
        if not len(frame):
            return Bundle(self.columns.structure, [], label)
        arrays = {name: self._array(name, frame[self.labels[name]], label) for name in self.columns.names}
        try:
            leaves = self.columns.arrays(lambda name: self._leaves(name, arrays[name], label))
            structure = self.columns.structure
            if any(not isinstance(array, np.ndarray) and _is_struct(array.type) for array in arrays.values()):
                structure = self.columns.spec(lambda name: self._spec_of(name, arrays[name], label)).structure
        except FileError as error:
            raise ArgumentError(f"from_dask: {error}") from None
        return Block(structure, leaves, label)

    def _column_spec(self, name: str, column: Any) -> ElementSpec:
        dtype = column.dtype
        if _is_plain(dtype) and name not in self.missing:
            return ElementSpec(LONE, (TensorSpec((), dtype),))
        if isinstance(dtype, np.dtype) and dtype.kind == "O":
            raise SpecUnknown(f"what the column {name!r} of objects holds is known only when it is computed")
        categories = getattr(dtype, "categories", None)
        if categories is not None and _UNKNOWN in categories:
            raise SpecUnknown(f"what the categories of {name!r} are is known only when they are computed")
        return self._spec_of(name, self._array(name, column, "the dataframe"), "the dataframe")

    def _spec_of(self, name: str, array: Any, label: str) -> ElementSpec:
        if isinstance(array, np.ndarray):
            return ElementSpec(LONE, (TensorSpec((), array.dtype),))
        try:
            return spec_of(array.type, f"{label}: column {name!r}", self.missing.get(name))
        except FileError as error:
            raise ArgumentError(f"from_dask: {error}") from None

    def _array(self, name: str, column: Any, label: str) -> Any:
        if _is_plain(column.dtype) and name not in self.missing:
            return column.to_numpy()
        import pyarrow as pa

        try:
            made = pa.array(column, from_pandas=True)
        except (pa.ArrowException, ValueError, TypeError, NotImplementedError, OverflowError) as error:
            raise ArgumentError(
                f"from_dask: {label}: column {name!r} of {column.dtype} makes no array: {error}; leave it out, or make "
                "its values alike"
            ) from None
        return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made

    def _leaves(self, name: str, array: Any, label: str) -> Sequence[Any]:
        if isinstance(array, np.ndarray):
            return [array]
        return leaves_of(array, f"{label}: column {name!r}", self.missing.get(name))


def _is_plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "biufcmM"


def _is_struct(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))
