"""Named columns combined into elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import optree

from daskdist.cached_property import cached_property
from daskdist.core.array_pool import pooled_empty
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.core.to_numpy import loss_in
from daskdist.errors import ArgumentError, FileError

# The largest number of columns that are written to an array one by one.
_FEW_COLUMNS: Final = 8


@dataclass(frozen=True)
class Columns:
    """The assignment of columns to leaves of an element.

    Parameters
    ----------
    structure
        The nest of an element.
    leaves
        For each leaf the name of its column, or the tuple of names of the columns that are its last axis.
    """

    structure: Structure
    leaves: tuple[str | tuple[str, ...], ...]

    @classmethod
    def of(cls, columns: Any, available: Sequence[str], kind: str = "column") -> Columns:
        """Create the assignment from a user's ``columns`` argument.

        Parameters
        ----------
        columns
            None for all, a list of names (elements are then dicts by name), or a structure of names in which
            a list stands for one array of all its columns.
        available
            The names of the columns.
        kind
            The word for a column in messages.

        Raises
        ------
        ArgumentError
            A name is unknown or not a string, or there is no column.
        """
        if columns is None:
            return _all_of(tuple(available), kind)
        if isinstance(columns, list) and all(isinstance(name, str) for name in columns):
            columns = {name: name for name in columns}
        # None is a leaf, as in Structure: otherwise equal structures would not compare equal.
        names, treespec = optree.tree_flatten(columns, is_leaf=lambda node: isinstance(node, list), none_is_leaf=True)
        leaves = tuple(tuple(leaf) if isinstance(leaf, list) else leaf for leaf in names)
        if not leaves or () in leaves:
            raise ArgumentError(f"{kind}s: an array of no {kind}s; there are {', '.join(map(repr, available))}")
        known = frozenset(available)
        for name in (name for leaf in leaves for name in (leaf if isinstance(leaf, tuple) else (leaf,))):
            if not isinstance(name, str):
                raise ArgumentError(f"{kind}s: {name!r} is not a name; give names, or a structure of them")
            if name not in known:
                raise ArgumentError(f"no {kind} {name!r}; there are {', '.join(map(repr, available))}")
        return cls(Structure(treespec), leaves)

    @cached_property
    def names(self) -> list[str]:
        """The names of all columns used, without repetition."""
        return list(
            dict.fromkeys(name for leaf in self.leaves for name in (leaf if isinstance(leaf, tuple) else (leaf,)))
        )

    def spec(self, column: Callable[[str], ElementSpec]) -> ElementSpec:
        """Return the spec of an element, from the spec of a row of each column."""
        specs = []
        for leaf in self.leaves:
            if isinstance(leaf, str):
                specs.append(column(leaf))
                continue
            parts = [_scalar(name, column(name)) for name in leaf]
            try:
                dtype = np.result_type(*[part.dtype for part in parts])
            except TypeError:
                kinds = ", ".join(f"{name!r} ({part.dtype})" for name, part in zip(leaf, parts, strict=True))
                raise ArgumentError(f"columns {kinds} have no common dtype, so they cannot form an array") from None
            specs.append(ElementSpec(LONE, (TensorSpec((len(parts),), dtype),)))
        return ElementSpec.nest(self.structure, specs)

    def arrays(self, column: Callable[[str], Sequence[Any]], label: str) -> list[Any]:
        """Return the leaves, shape ``(num_rows, ...)``, from those of each column; ``label`` names the rows.

        Raises
        ------
        FileError
            Integers would be rounded to floats.
        """
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, str):
                leaves.extend(column(leaf))
            else:
                leaves.append(_side_by_side(leaf, [column(name)[0] for name in leaf], label))
        return leaves


@lru_cache(maxsize=64)
def _all_of(names: tuple[str, ...], kind: str) -> Columns:
    # Cached by names, as it is called for each split; a structure does not contain the order of the names.
    return Columns.of(list(names), names, kind)


def _scalar(name: str, spec: ElementSpec) -> TensorSpec:
    if spec.structure != LONE or spec.leaves[0].shape:
        raise ArgumentError(f"column {name!r} holds arrays and cannot be combined with other columns into one array")
    return spec.leaves[0]


def _side_by_side(names: Sequence[str], columns: list[np.ndarray[Any, Any]], label: str) -> np.ndarray[Any, Any]:
    dtype = np.result_type(*[column.dtype for column in columns])
    for name, column in zip(names, columns, strict=True):
        if loss := loss_in(column, dtype):
            raise FileError(
                f"{label}: the {loss[0]} of column {name!r} {loss[1]} in one array of {dtype} with other columns; "
                "leave it out of the list"
            )
    array: np.ndarray[Any, Any] = pooled_empty((len(columns[0]), len(columns)), dtype)
    if len(columns) <= _FEW_COLUMNS:
        return np.stack(columns, axis=1, out=array)
    # Two passes over whole cache lines are faster than one that writes every 16th number.
    np.copyto(array, np.array(columns).T)
    return array
