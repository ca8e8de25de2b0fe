"""``split`` and ``kfold``: each element in one of several parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from typing import Any, ClassVar, Final

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.core.arguments import numbers, whole_number
from daskdist.core.block import Block, Rows
from daskdist.core.cardinality import INFINITE, counted
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts, Node, Transformation, check_numbered, counting, walk
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    Opener,
    Primitive,
    gathered,
)
from daskdist.core.randomness.hashes import NUMBERS, as_shares, hash_words, mixed
from daskdist.core.randomness.seed import generator
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.permutation import Permutation
from daskdist.core.selection.runs import Run
from daskdist.core.spec import known_spec
from daskdist.core.vectorize.apply import Vectorised
from daskdist.errors import ArgumentError, CardinalityError, UserFunctionError
from daskdist.ops.map import MapColumns, MapRows
from daskdist.ops.map_with_rng import MapWithRng
from daskdist.ops.rejection_resample import RejectionResample
from daskdist.ops.repeat import Repeat
from daskdist.ops.select import RegroupRows, picked, regrouped

logger: Final = logging.getLogger("daskdist")

# The most elements whose whole order is kept in memory; it does not affect the part of an element.
_MOST_DRAWN: Final = 2**16
# The most elements of a label that are divided among the parts together; fewer suffice if they divide evenly.
_MOST_IN_TURN: Final = 1000
# Fewer different numbers in a block may be classes.
_FEW_CLASSES: Final = 20
# Random words that are drawn for turns at a time.
_MOST_WORDS: Final = 2**22
# The pass in which the elements before a split always are: else they could change parts from one pass to the next.
_FIRST_PASS: Final[Epoch] = (0,)


def shares_of(fractions: Any) -> tuple[float, ...]:
    """Return the share of each part, which together are 1.

    Raises
    ------
    ArgumentError
        A share is not between 0 and 1, or they do not sum to 1.

    >>> shares_of(0.75), shares_of([0.5, 0.25, 0.25])
    ((0.75, 0.25), (0.5, 0.25, 0.25))
    """
    several = (fractions, 1 - fractions) if isinstance(fractions, (int, float)) else fractions
    advice = "give one number between 0 and 1, or a list of such that sum to 1"
    shares = numbers("split", "fractions", several, advice=advice)
    if len(shares) < 2 or not all(0 < share < 1 for share in shares):
        raise ArgumentError(f"split: fractions is {fractions!r:.80}; {advice}")
    if not isclose(sum(shares), 1, abs_tol=1e-6):
        raise ArgumentError(f"split: fractions is {fractions!r:.80}, whose sum is {sum(shares):.6g}; {advice}")
    return shares


@dataclass(frozen=True, eq=False)
class SplitNode(Transformation):
    """The elements of some of the parts into which a split shares out all elements.

    Parameters
    ----------
    shares
        The share of each part.
    parts
        The numbers of the parts.
    seed
        Determines, with the number or key of an element, the part that the element is in.
    """

    shares: tuple[float, ...]
    parts: tuple[int, ...]
    seed: int

    name = "split"
    facts = Facts(keeps_spec=True)
    splits_rows = True
    reads_first_pass = True
    # A description of how elements are assigned to parts.
    manner: ClassVar[str] = ""
    why_empty = (
        "it puts each element in a part by chance, so that a part of few elements may get none. Take larger fractions "
        "or another seed"
    )

    def __str__(self) -> str:
        shares = " + ".join(f"{self.shares[part]:.4g}" for part in self.parts)
        label = "" if self.label is None else f", name={self.label!r}"
        return f"{self.name}({shares} of the elements, seed={self.seed}{self.manner}{label})"

    @cached_property
    def bounds(self) -> Index:
        """The share of all elements before each part but the first, shape ``(num_parts - 1,)``."""
        return np.cumsum(self.shares)[:-1]

    def are_kept(self, part_numbers: Index) -> Index:
        """Return the indexes of the elements to keep, given the number of the part of each."""
        is_kept = np.zeros(len(self.shares), bool)
        is_kept[list(self.parts)] = True
        return np.flatnonzero(is_kept[part_numbers])

    def key(self) -> np.uint64:
        """Return a random word that depends on the seed."""
        return np.uint64(generator(self.seed, 0).integers(2**64, dtype=np.uint64))


@dataclass(frozen=True, eq=False)
class SplitByRow(SplitNode):
    """A split by the numbers of the elements.

    Parameters
    ----------
    num_rows
        The number of all elements, so that parts have exact sizes; None if it was not known when the split was created;
        it is not looked up later, so that all parts agree.
    """

    num_rows: int | None = field(default=None, repr=False)

    @cached_property
    def ends(self) -> list[int]:
        """The end of each part in a random order of all elements, the number of which is known."""
        number = self.num_rows or 0
        return [*[int(bound * number + 0.5) for bound in self.bounds], number]

    @property
    def cardinality(self) -> int:
        if self.num_rows is None or self.source.cardinality != self.num_rows:
            return super().cardinality
        sizes = np.diff([0, *self.ends])
        return int(sum(sizes[part] for part in self.parts))

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Arrange(inputs, self, inputs[0].grouped, name=self.name, is_counted=True)

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        """Start a pass, as an `Arrangement` does."""
        number = self.num_rows
        order = None if number is None else Permutation(number, generator(self.seed, 1), _MOST_DRAWN)
        return SplitCursor(inputs[0](_FIRST_PASS), self, order)


@dataclass
class SplitCursor:
    """A cursor of some parts, of whose source ``num_before`` elements have come."""

    source: Cursor
    split: SplitByRow
    order: Permutation | None
    num_before: int = 0
    is_over: bool = False

    def pull(self) -> Run:
        while True:
            try:
                run: Run = self.source.pull()
            except Exhausted:
                self._tell_of_missing()
                raise
            rows = np.arange(self.num_before, self.num_before + len(run))
            self.num_before += len(run)
            kept = self.split.are_kept(self._parts(rows))
            if len(kept):
                return run if len(kept) == len(run) else run.take(kept)

    def _tell_of_missing(self) -> None:
        is_over, self.is_over = self.is_over, True
        if not is_over and self.order is not None and self.num_before < self.order.length:
            logger.warning(
                "split: there were %d elements when the dataset was split, and now %d came: elements after those that "
                "are missing may be in other parts than before; split it again, and do not mix parts of both",
                self.order.length,
                self.num_before,
            )

    def _parts(self, rows: Index) -> Index:
        split, order = self.split, self.order
        if order is None:
            return np.searchsorted(split.bounds, as_shares(mixed(rows.astype(np.uint64), split.key())), "right")
        if rows[-1] >= order.length:
            raise CardinalityError(
                f"split: there were {counted(order.length, 'element')} when the dataset was split, and more come; "
                "split it again"
            )
        return np.searchsorted(split.ends[:-1], order.at(rows), "right")


@dataclass(frozen=True, eq=False)
class SplitByKey(SplitNode):
    """A split by keys: elements of one key are in one part."""

    keys: Callable[[Rows], Rows] = field(repr=False)

    manner = ", by key"
    reads_first_pass = False
    why_empty = (
        "it puts each key in a part by chance, so that with few keys a part may get none. Take another seed, or choose "
        "the keys of each part with filter(...)"
    )

    facts = Facts(compute=True, keeps_spec=True, per_worker=True)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        function = self.keys.by_row.function if isinstance(self.keys, MapColumns) else None
        return Compute(inputs[0], KeepKeys(self), self.name, factor=None, costly=function)


@dataclass(frozen=True)
class KeepKeys:
    """A function that keeps the rows whose keys are in some parts."""

    split: SplitByKey

    def __call__(self, rows: Rows) -> Rows:
        if not len(rows):
            return rows
        split = self.split
        shares = as_shares(mixed(hashes(split.keys(rows), rows), split.key()))
        kept = split.are_kept(np.searchsorted(split.bounds, shares, "right"))
        return rows if len(kept) == len(rows) else rows.take(kept)


@dataclass(frozen=True, eq=False)
class SplitByLabel(SplitNode):
    """A split in which each label has the same share of each part."""

    labels: Callable[[Rows], Rows] = field(repr=False)

    manner = ", stratified"

    @cached_property
    def turn(self) -> int:
        """The number of elements of a label that are shared out among the parts at a time."""
        for number in range(2, _MOST_IN_TURN):
            sizes = np.array(self.shares) * number
            if np.allclose(sizes, sizes.round(), rtol=0, atol=1e-6):
                return number
        return _MOST_IN_TURN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        noted = Fact(gathered(inputs[0]), HashesOf(self.labels), f"{self.name}-labels")
        return Arrange((noted,), self, grouped=0, name=self.name, is_counted=True)

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        """Start a pass, as an `Arrangement` does; the input notes the hash of each element's label."""
        return SplitLabelsCursor(inputs[0](_FIRST_PASS), self)


@dataclass(frozen=True)
class HashesOf:
    """The hash of each element's label, uint64, shape ``(num_rows,)``."""

    labels: Callable[[Rows], Rows]

    def __call__(self, rows: Rows) -> Index:
        labels = self.labels(rows)
        _check_classes(labels, rows)
        return hashes(labels, rows)


@dataclass
class SplitLabelsCursor:
    """A cursor of some parts; ``num_before`` has the number of elements of each label that have come."""

    source: Cursor
    split: SplitByLabel
    num_before: dict[int, int] = field(default_factory=dict)

    def pull(self) -> Run:
        while True:
            # An element that failed has no label: all parts have it.
            noted = self.source.pull()
            kept = self.split.are_kept(self._parts(noted.fact))
            if len(kept):
                run: Run = noted.run
                return run if len(kept) == len(run) else run.take(kept)

    def _parts(self, labels: Index) -> Index:
        distinct, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
        before = np.array([self.num_before.get(label, 0) for label in distinct.tolist()])
        self.num_before.update(zip(distinct.tolist(), (before + counts).tolist(), strict=True))
        # Return for each element its number among those of its label.
        order = np.argsort(which, kind="stable")
        places = np.empty(len(labels), np.int64)
        places[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
        return parts_in_turns(self.split, labels, places + before[which])


def parts_in_turns(split: SplitByLabel, labels: Index, places: Index) -> Index:
    """Return the part of each element by its label's hash and its place among the elements of that label."""
    turns, places = np.divmod(places, split.turn)
    seeds, which = np.unique(mixed(mixed(turns.astype(np.uint64), labels), split.key()), return_inverse=True)
    # Sizes are rounded over all turns together, so that rounding errors do not add up.
    sizes = split.bounds * split.turn
    ends = np.floor(sizes * (turns[:, None] + 1) + 0.5) - np.floor(sizes * turns[:, None] + 0.5)
    parts = np.empty(len(labels), np.intp)
    # Each element may be of another turn, which needs random words for a whole turn.
    at_once = max(_MOST_WORDS // split.turn, 1)
    for start in range(0, len(seeds), at_once):
        rows = np.flatnonzero((which >= start) & (which < start + at_once))
        words = mixed(np.arange(split.turn, dtype=np.uint64), seeds[start : start + at_once, None])
        ranks = np.argsort(np.argsort(words, axis=1), axis=1)
        parts[rows] = (ranks[which[rows] - start, places[rows], None] >= ends[rows]).sum(axis=1)
    return parts


# --- keys ---


def hashes(keys: Rows, rows: Rows) -> Index:
    """Return a hash of the key of each row, uint64, shape ``(num_rows,)``; equal keys have equal ones.

    Raises
    ------
    UserFunctionError
        A key is not made of single values.
    """
    total = np.zeros(len(rows), np.uint64)
    for number in range(keys.structure.num_leaves if len(rows) else 0):
        column = keys.leaves[number] if isinstance(keys, Block) else _column(keys, number)
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            raise UserFunctionError(
                f"split: the key of {rows.where(0)} is an array; a key is a number or text, or several of these"
            )
        total = mixed(hash_words(column), total)
    return total


def _check_classes(labels: Rows, rows: Rows) -> None:
    # Refuse numbers that hardly ever repeat: elements that are alone in their class cannot be spread.
    for column in labels.leaves if isinstance(labels, Block) else ():
        if isinstance(column, np.ndarray) and column.dtype.kind == "f" and column.ndim == 1:
            number = len(np.unique(column))
            if number > max(_FEW_CLASSES, len(column) // 2):
                raise UserFunctionError(
                    f"split: stratify gives {number} different numbers for {len(column)} rows from {rows.where(0)} on, "
                    "so that nearly every row would be a class of its own. Stratify by bins of the number, such as "
                    'stratify=lambda row: int(row["price"] // 10)'
                )


def _column(keys: Rows, number: int) -> Any:
    values = [keys.item(row)[number] for row in range(len(keys))]
    if not all(np.shape(value) == () for value in values):
        return None
    if np.asarray(values[0]).dtype.kind in NUMBERS:
        return np.stack(values)
    column = np.empty(len(values), object)
    column[:] = [np.asarray(value).item() if isinstance(value, (np.ndarray, np.generic)) else value for value in values]
    return column


# --- parts ---


def splitter(
    node: Node,
    operation: str,
    shares: tuple[float, ...],
    seed: int,
    by: Any,
    stratify: Any,
    make: Callable[[Any, str], UserFunction],
    label: str | None,
) -> Callable[[Sequence[int]], SplitNode]:
    """Return the function that gives the pipeline of some of the parts, by their numbers.

    Parameters
    ----------
    node
        The pipeline of all elements.
    operation
        The method that is called, for messages.
    shares, seed
        As in `SplitNode`.
    by, stratify
        The name of a column, a list of such, or a function of an element: what elements of one value stay together, or
        are spread by.
    make
        Wraps a user's function.
    label
        As in `Node`.

    Raises
    ------
    ArgumentError
        An argument is none of these, a part would be empty, elements are endless or repeated, or there is no such
        column; the last not where columns are known only when data is read.
    """
    if operation == "split" and isinstance(seed, float):
        raise ArgumentError(f"split: seed is {seed}; give the fractions of several parts as a list, split([0.8, 0.2])")
    whole_number(operation, "seed", seed, at_most=None)
    if by is not None and stratify is not None:
        raise ArgumentError(f"{operation}: by keeps elements together that stratify spreads; give one of them")
    if by is not None:
        keys = _keys_of(node, operation, "by", by, make)
        return lambda parts: SplitByKey(node, shares, tuple(parts), seed, keys, label=label)
    _check_countable(operation, node)
    if stratify is not None:
        labels = _keys_of(node, operation, "stratify", stratify, make)
        return lambda parts: SplitByLabel(node, shares, tuple(parts), seed, labels, label=label)
    num_rows = None if node.cardinality < 0 else node.cardinality
    by_row = SplitByRow(node, shares, (0,), seed, num_rows, label=label)
    if num_rows is not None and not np.diff([0, *by_row.ends]).all():
        advice = f"Give at most {num_rows} folds" if operation == "kfold" else "Give larger fractions to small parts"
        if num_rows < 2:
            advice = "Look at what the dataset reads: it should have more elements"
        raise ArgumentError(
            f"{operation}: {counted(num_rows, 'element')} cannot be split in {len(shares)} parts: a part would be "
            f"empty. {advice}"
        )
    return lambda parts: replace(by_row, parts=tuple(parts))


def _check_countable(operation: str, node: Node) -> None:
    # Check that elements can be distinguished by their numbers, in every iteration.
    if any(isinstance(upstream, Repeat) for upstream in walk(node)):
        raise ArgumentError(
            f"{operation}: the dataset is repeated, so that an element would be in several parts; split it first, and "
            "repeat the parts"
        )
    if node.cardinality == INFINITE:
        raise ArgumentError(f"{operation}: the dataset is endless; use take(n) first")
    check_numbered(operation, node)
    drawing = next((operation_.name for operation_ in counting(node) if _draws_new_numbers(operation_)), None)
    if drawing is not None:
        logger.warning(
            "%s: %s before the split draws the same in every iteration, so that elements stay in their parts; apply it "
            "to the parts instead for other draws in each iteration",
            operation,
            drawing,
        )


def _draws_new_numbers(node: Any) -> bool:
    for option in ("reshuffle_each_iteration", "rerandomize_each_iteration"):
        if hasattr(node, option):
            return bool(getattr(node, option))
    return isinstance(node, (MapWithRng, RejectionResample))


def _keys_of(
    node: Node, operation: str, argument: str, by: Any, make: Callable[[Any, str], UserFunction]
) -> Callable[[Rows], Rows]:
    # Return the function that computes keys of rows: from columns, or by a user's function.
    if callable(by):
        function = make(by, operation)
        return MapColumns(MapRows(function), Vectorised(function))
    columns = tuple(by) if isinstance(by, list) else (by,)
    if not columns or not all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in columns):
        raise ArgumentError(f"{operation}: {argument} is {by!r:.80}; give the name of a column, or a function")
    regroup = partial(picked, operation, columns)
    spec = known_spec(node)
    if spec is not None:
        places, _ = regrouped(spec.structure, regroup)
        several = next((place for place in places if getattr(spec.leaves[place], "shape", None) != ()), None)
        if several is not None:
            raise ArgumentError(
                f"{operation}: {argument} is {by!r:.80}, which holds {spec.leaves[several]}; a key is a number or "
                "text, or several of these"
            )
    return RegroupRows(regroup)
