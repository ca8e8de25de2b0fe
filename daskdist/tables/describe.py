"""Statistics of columns, combined from the statistics of their parts."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.ragged import Ragged
from daskdist.core.randomness.hashes import NUMBERS, as_shares, hash_words, mixed
from daskdist.core.spec import DatasetSpec, ElementSpec
from daskdist.core.structure import Nested

Array = np.ndarray[Any, Any]

# Quantiles of up to this many values are exact; of more values, this many are kept, each with a weight.
_MOST_VALUES: Final = 2**14
# Up to this many distinct values are counted exactly; larger numbers are estimated from the smallest hashes.
_MOST_HASHES: Final = 2**12
MOST_COUNTED: Final = _MOST_HASHES - 1
QUANTILES: Final = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of the values of a leaf.

    Parameters
    ----------
    count, num_nulls
        The number of values, and the number of missing values (NaN and NaT), which are not among them.
    mean, squares
        The mean, and the sum of squared differences from it; NaN if the values are not numbers.
    least, greatest
        The smallest and the largest value; None if there are no values, or they have no order.
    points, weights
        Sorted values that represent all values, and how many values each represents; empty if they are not numbers.
    hashes
        The smallest distinct hashes of values, sorted.
    """

    count: int
    num_nulls: int
    mean: float
    squares: float
    least: Any
    greatest: Any
    points: Array
    weights: Array
    hashes: Array

    @classmethod
    def of(cls, column: Array) -> ColumnStatistics:
        """Compute the statistics of some values, shape ``(num_values,)``."""
        total = len(column)
        if column.dtype.kind == "O":
            # Missing values of files are NaN.
            values = [value for value in column.tolist() if value == value]
            if values and not isinstance(values[0], (str, bytes)):
                column = np.array(values)
            elif len(values) < total:
                column = np.fromiter(values, object, len(values))
        if column.dtype.kind in "fcmM":
            column = column[~np.isnan(column) if column.dtype.kind in "fc" else ~np.isnat(column)]
        hashes = _smallest(mixed(hash_words(column), np.uint64(0)))
        least = greatest = None
        if len(column) and column.dtype.kind != "c":
            known: Any = set(column.tolist()) if column.dtype.kind not in NUMBERS else column
            least, greatest = (min(known), max(known)) if isinstance(known, set) else (known.min(), known.max())
        mean = squares = float("nan")
        points = weights = np.zeros(0)
        if column.dtype.kind in "biuf" and len(column):
            floats = column.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                mean = float(floats.mean())
                squares = float(np.square(floats - mean).sum())
            points, weights = _fewer(np.sort(floats), np.ones(len(floats)))
        return cls(len(column), total - len(column), mean, squares, least, greatest, points, weights, hashes)

    def with_other(self, other: ColumnStatistics) -> ColumnStatistics:
        """Return the statistics of these values and others together."""
        if not self.count or not other.count:
            kept, empty = (self, other) if self.count else (other, self)
            return replace(kept, num_nulls=kept.num_nulls + empty.num_nulls)
        count = self.count + other.count
        with np.errstate(invalid="ignore", over="ignore"):
            step = other.mean - self.mean
            if np.isfinite(step):
                mean = self.mean + step * other.count / count
            else:
                mean = self.mean * (self.count / count) + other.mean * (other.count / count)
            squares = self.squares + other.squares + step * step * self.count * other.count / count
        points = np.concatenate([self.points, other.points])
        order = np.argsort(points, kind="stable")
        weights = np.concatenate([self.weights, other.weights])
        return ColumnStatistics(
            count,
            self.num_nulls + other.num_nulls,
            mean,
            squares,
            min(self.least, other.least) if self.least is not None else None,
            max(self.greatest, other.greatest) if self.greatest is not None else None,
            *_fewer(points[order], weights[order]),
            _smallest(np.concatenate([self.hashes, other.hashes])),
        )

    @property
    def std(self) -> float:
        """The standard deviation of a sample, as in pandas; NaN for fewer than two values."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else float("nan")

    @property
    def num_distinct(self) -> int:
        """The number of distinct values; estimated to about 2 % if there are more than a few thousand."""
        if len(self.hashes) < _MOST_HASHES:
            return len(self.hashes)
        estimate = round(MOST_COUNTED / float(as_shares(self.hashes[-1:])[0]))
        return min(max(estimate, _MOST_HASHES), self.count)

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all are: interpolated between neighbours, as in NumPy."""
        if not len(self.points):
            return float("nan")
        # A point of weight w stands for w neighbouring values; its rank is the middle of theirs.
        ranks = np.cumsum(self.weights) - (self.weights + 1) / 2
        return float(np.interp(share * (self.count - 1), ranks, self.points))

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics by name, as Python's own values."""
        values = {"count": self.count, "nulls": self.num_nulls, "mean": self.mean, "std": self.std}
        values["min"] = _plain(self.least)
        values |= {f"{share:.0%}": self.quantile(share) for share in QUANTILES}
        return values | {"max": _plain(self.greatest), "distinct": self.num_distinct}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value


def _smallest(hashes: Array) -> Array:
    # The smallest distinct ones. `numpy.unique` takes ten times as long for many distinct ones.
    hashes = np.sort(hashes)
    is_first = np.ones(len(hashes), bool)
    np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
    return hashes[is_first][:_MOST_HASHES]


def _fewer(points: Array, weights: Array) -> tuple[Array, Array]:
    # If there are too many points, keep as many as allowed, each of which stands for equally many of the sorted values.
    if len(points) <= _MOST_VALUES:
        return points, weights
    total = weights.sum()
    middles = (np.arange(_MOST_VALUES) + 0.5) * (total / _MOST_VALUES)
    kept = points[np.searchsorted(np.cumsum(weights), middles)]
    # The ends are exact.
    kept[0], kept[-1] = points[0], points[-1]
    return kept, np.full(_MOST_VALUES, total / _MOST_VALUES)


@dataclass(frozen=True)
class PartStatistics:
    """Statistics of some elements: of each leaf, by its path."""

    num_elements: int
    num_bytes: int
    columns: dict[str, ColumnStatistics]

    def with_other(self, other: PartStatistics) -> PartStatistics:
        """Return the statistics of these elements and others together."""
        columns = dict(self.columns)
        for name, column in other.columns.items():
            columns[name] = columns[name].with_other(column) if name in columns else column
        return PartStatistics(self.num_elements + other.num_elements, self.num_bytes + other.num_bytes, columns)


def count_rows(number: int, rows: Rows) -> PartStatistics:
    """Return the number of the elements of a call, without looking at them but for one that failed: it is raised."""
    if rows.has_failed:
        for index in range(len(rows)):
            rows.item(index)
    return PartStatistics(len(rows), rows.nbytes, {})


def describe_rows(number: int, rows: Rows) -> PartStatistics:
    """Return the statistics of the elements of a call."""
    columns = {}
    for path, place in rows.structure.in_order(range(rows.structure.num_leaves)):
        values = _values(rows, place)
        if values is not None:
            columns[column_name(path)] = ColumnStatistics.of(values)
    return PartStatistics(len(rows), rows.nbytes, columns)


def describe_nothing(spec: ElementSpec) -> PartStatistics:
    """Return the statistics of no elements of a spec."""
    columns = {
        column_name(path): ColumnStatistics.of(np.empty(0, leaf.dtype))
        for path, leaf in spec.structure.in_order(spec.leaves)
        if not isinstance(leaf, DatasetSpec)
    }
    return PartStatistics(0, 0, columns)


def column_name(path: str) -> str:
    """Return the name of a leaf: its key if it is in a dict, else its path.

    >>> column_name("['a']"), column_name("['a'][0]"), column_name("")
    ('a', "['a'][0]", 'value')
    """
    # The path of a key, such as ['a'], is also Python's text of a list of one string.
    with suppress(SyntaxError, ValueError):
        match ast.literal_eval(path or "''"):
            case [str(key)]:
                return key
    return path or "value"


def _values(rows: Rows, place: int) -> Array | None:
    # Return all values of a leaf as one flat array, or None if they are datasets.
    if isinstance(rows, Block):
        leaf = rows.leaves[place]
        values: Array = leaf.values if isinstance(leaf, Ragged) else leaf
        return values.ravel()
    leaves = [rows.item(row)[place] for row in range(len(rows))]
    if not leaves or isinstance(leaves[0], Nested):
        return None
    if isinstance(leaves[0], Ragged):
        return np.concatenate([leaf.values.ravel() for leaf in leaves])
    kinds = {np.asarray(leaf).dtype.kind for leaf in leaves}
    if len(kinds) == 1 and kinds.issubset(NUMBERS):
        return np.concatenate([np.ravel(leaf) for leaf in leaves])
    column = np.empty(len(leaves), object)
    column[:] = [leaf.tolist() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    flat = [value for leaf in column for value in (leaf if isinstance(leaf, list) else [leaf])]
    texts = np.empty(len(flat), object)
    texts[:] = flat
    return texts
