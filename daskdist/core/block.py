"""Rows in memory: columnar blocks, batches that are slices of a block, and bundles, which are lists.

They have the same methods; a row of any of them is an element. Some elements may have failed, see `PartlyFailed`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from daskdist.core.cardinality import counted
from daskdist.core.columns import agree, stack, stacked, with_empty_alike
from daskdist.core.failing.failed_element import FailedElement
from daskdist.core.failing.origin import JoinedOrigin, Origin, SelectedOrigins, Skipped
from daskdist.core.ragged import Ragged, concat, unchecked_ragged
from daskdist.core.structure import LONE, Leaves, Structure, as_array
from daskdist.errors import StackError


class Block:
    """Elements of one shape, as one array for each leaf, shape ``(num_rows, ...)``.

    A leaf with rows of different lengths is `Ragged`.

    Parameters
    ----------
    structure
        The nesting of the leaves.
    leaves
        One array for each leaf, all of the same length along axis 0.
    label
        The origin of the rows for messages, such as a file and a row group.
    origin
        The origin of each row, if its number differs from that in the source that the label names.
    is_exclusive
        Whether the arrays belong to a single consumer, who may write into them; otherwise they become read-only views.
    """

    __slots__ = ("__weakref__", "label", "leaves", "origin", "skipped", "structure")
    # Whether some or all elements failed; see `PartlyFailed`.
    has_failed: bool = False
    is_all_failed: bool = False

    def __init__(
        self,
        structure: Structure,
        leaves: Sequence[Any],
        label: str = "",
        origin: Origin | SelectedOrigins | JoinedOrigin | None = None,
        *,
        is_exclusive: bool = False,
    ) -> None:
        self.structure = structure
        self.leaves = tuple(leaves) if is_exclusive else tuple(map(read_only, leaves))
        self.label = label
        self.origin = Origin(label) if origin is None else origin
        # The elements that were left out upstream of these rows, for the log.
        self.skipped: tuple[Skipped, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickled arrays are usually writable: constructors make them read-only again.
        return Block, (self.structure, self.leaves, self.label, self.origin), (None, {"skipped": self.skipped})

    def __len__(self) -> int:
        return len(self.leaves[0]) if self.leaves else 0

    @property
    def nbytes(self) -> int:
        """The bytes of the rows themselves, not of the arrays that they are views of."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def __sizeof__(self) -> int:
        # Dask uses it: workers decide when to spill, and the scheduler what is worth moving.
        return object.__sizeof__(self) + self.nbytes

    def item(self, index: int) -> Leaves:
        """Return the leaves of one element."""
        return tuple([as_array(leaf[index]) for leaf in self.leaves])

    def raw(self, index: int) -> Any:
        """Return the leaves of one element, or its `FailedElement` if it failed."""
        return self.item(index)

    def failed_at(self, index: int) -> FailedElement | None:
        """Return an element if it failed, else None."""
        return None

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the elements from ``start`` to ``stop``, in order."""
        if self.structure == LONE:
            return iter(self.leaves[0][start:stop])
        return map(self.structure.packer, zip(*[leaf[start:stop] for leaf in self.leaves], strict=True))

    def take(self, rows: Any) -> Block:
        """Return the rows at some indices, in that order, as one copy."""
        leaves = [leaf.take(rows, axis=0) for leaf in self.leaves]
        return Block(self.structure, leaves, self.label, SelectedOrigins([self.origin], rows))

    def slice(self, start: int, stop: int) -> Block:
        """Return rows ``start`` to ``stop`` as views."""
        leaves = [leaf[start:stop] for leaf in self.leaves]
        return Block(self.structure, leaves, self.label, SelectedOrigins([self.origin], range(start, stop)))

    @staticmethod
    def concat(blocks: Sequence[Block], label: str = "") -> Block:
        """Return the rows of all blocks in order, as one copy.

        Raises
        ------
        StackError
            Their rows differ in shape or dtype.
        """
        first = blocks[0]
        if not all(map(first.is_like, blocks)):
            raise StackError(f"blocks of different shapes or dtypes do not concatenate: {', '.join(map(repr, blocks))}")
        leaves = [concat(column) for column in zip(*[block.leaves for block in blocks], strict=True)]
        # Their rows have no common numbers.
        return Block(first.structure, leaves, label, Origin(label, is_exact=False))

    def is_like(self, other: Block) -> bool:
        """Return whether the rows of both have the same structure, shapes and dtypes."""
        return self.structure == other.structure and all(
            a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in zip(self.leaves, other.leaves, strict=True)
        )

    def where(self, index: int) -> str:
        """Return the name of one row for messages."""
        return self.origin.where(index)

    def __repr__(self) -> str:
        shapes = self.structure.pack([f"{leaf.dtype}{list(leaf.shape)}" for leaf in self.leaves])
        return f"<Block of {counted(len(self), 'row')}: {shapes}{' from ' + self.label if self.label else ''}>"


class Bundle:
    """Elements whose shapes may differ, such as the chunks that one task builds: a tuple of leaves for each."""

    __slots__ = ("__weakref__", "_items", "label", "skipped", "structure")
    has_failed: bool = False

    @property
    def is_all_failed(self) -> bool:
        """Return whether every element failed, so that their structure is unknown."""
        return False

    def __init__(
        self, structure: Structure, items: Sequence[Leaves], label: str = "", *, is_exclusive: bool = False
    ) -> None:
        self.structure = structure
        self._items = list(items) if is_exclusive else [tuple(map(read_only, item)) for item in items]
        self.label = label
        self.skipped: tuple[Skipped, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Bundle, (self.structure, self._items, self.label), (None, {"skipped": self.skipped})

    def __len__(self) -> int:
        return len(self._items)

    @property
    def nbytes(self) -> int:
        return sum(getattr(leaf, "nbytes", 0) for item in self._items for leaf in item)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def item(self, index: int) -> Leaves:
        """Return the leaves of one element."""
        return self._items[index]

    def raw(self, index: int) -> Any:
        """Return the leaves of one element, or its `FailedElement` if it failed."""
        return self.item(index)

    def failed_at(self, index: int) -> FailedElement | None:
        """Return an element if it failed, else None."""
        return None

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the elements from ``start`` to ``stop``, in order."""
        return map(self.structure.pack, self._items[start:stop])

    def take(self, rows: Any) -> Bundle:
        return Bundle(self.structure, [self._items[row] for row in rows], self.label)

    def slice(self, start: int, stop: int) -> Bundle:
        """Return elements ``start`` to ``stop``."""
        return Bundle(self.structure, self._items[start:stop], self.label)

    def where(self, index: int) -> str:
        """Return the name of one element for messages."""
        return f"an element made of {self.label or 'this data'}"

    def __repr__(self) -> str:
        return f"<Bundle of {counted(len(self), 'element')}{' from ' + self.label if self.label else ''}>"


class PartlyFailed(Bundle):
    """Elements some of which failed; accessing a failed one raises its error.

    Parameters
    ----------
    good
        The elements that did not fail, in order.
    failed
        The others, by their place among all.
    """

    __slots__ = ("_places", "failed", "good")
    has_failed = True

    def __init__(self, good: Any, failed: Mapping[int, FailedElement]) -> None:
        super().__init__(good.structure, [], good.label)
        self.good = good
        self.failed = failed
        self._places = sorted(failed)
        self.skipped = good.skipped

    def __reduce__(self) -> tuple[Any, ...]:
        return PartlyFailed, (self.good, dict(self.failed)), (None, {"skipped": self.skipped})

    def __len__(self) -> int:
        return len(self.good) + len(self.failed)

    @property
    def nbytes(self) -> int:
        return int(self.good.nbytes)

    @property
    def is_all_failed(self) -> bool:
        return not len(self.good)

    def item(self, index: int) -> Leaves:
        """Return the leaves of one element; raise its error if it failed."""
        item = self.raw(index)
        if isinstance(item, FailedElement):
            raise item.again()
        return tuple(item)

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the elements from ``start`` to ``stop``, in order, up to the first failed one."""
        return (self.structure.pack(self.item(k)) for k in range(*slice(start, stop).indices(len(self))))

    def raw(self, index: int) -> Any:
        """Return the leaves of one element, or its `FailedElement`."""
        failed = self.failed.get(index)
        return self.good.item(self._number(index)) if failed is None else failed

    def _number(self, index: int) -> int:
        # Return the number of an element among those that did not fail, or would have there.
        return index - bisect_left(self._places, index)

    def take(self, rows: Any) -> Any:
        """Return the elements at some indices, in that order."""
        failed, numbers = {}, []
        for place, index in enumerate(rows):
            if (item := self.failed.get(index)) is None:
                numbers.append(self._number(index))
            else:
                failed[place] = item
        good = self.good.take(np.array(numbers, np.intp))
        return PartlyFailed(good, failed) if failed else good

    def slice(self, start: int, stop: int) -> Any:
        """Return elements ``start`` to ``stop``."""
        first, last = bisect_left(self._places, start), bisect_left(self._places, stop)
        good = self.good.slice(start - first, stop - last)
        return (
            PartlyFailed(good, {k - start: self.failed[k] for k in self._places[first:last]}) if last > first else good
        )

    def failed_at(self, index: int) -> FailedElement | None:
        """Return an element if it failed, else None."""
        return self.failed.get(index)

    def where(self, index: int) -> str:
        """Return the name of one element for messages."""
        failed = self.failed.get(index)
        return self.good.where(self._number(index)) if failed is None else failed.where


class Batches:
    """Chunks that are slices of the same arrays, as gathering creates them, with one array for each leaf.

    Parameters
    ----------
    rows
        The rows of all chunks, in order.
    bounds
        The index of the first row of each chunk, and the end of the last one.
    inners
        For each chunk the shape of its elements in rows: ``(2,)`` in a batch of batches of 2. None if elements are
        rows.
    """

    __slots__ = ("__weakref__", "_cuts", "bounds", "inners", "rows", "skipped")
    is_all_failed = False

    def __init__(
        self, rows: Block | Bundle, bounds: Sequence[int], inners: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        self.rows = rows
        self.bounds = bounds
        self.inners = inners
        self.skipped: tuple[Skipped, ...] = ()
        # The leaves of all chunks, set at the first access; empty if the chunks differ in length.
        self._cuts: Sequence[Leaves] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Batches, (self.rows, self.bounds, self.inners), (None, {"skipped": self.skipped})

    @property
    def structure(self) -> Structure:
        """The structure of the chunks."""
        return self.rows.structure

    @property
    def label(self) -> str:
        return self.rows.label

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def has_failed(self) -> bool:
        """Return whether some elements of the chunks failed."""
        return self.rows.has_failed

    def raw(self, index: int) -> Any:
        """Return the leaves of one chunk, or its `FailedElement` if one of its elements failed."""
        return self.failed_at(index) or self.item(index)

    def failed_at(self, index: int) -> FailedElement | None:
        """Return the first element of a chunk that failed; None if none did."""
        if not self.has_failed:
            return None
        places = range(self.bounds[index], self.bounds[index + 1])
        return next(filter(None, map(self.rows.failed_at, places)), None)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def item(self, index: int) -> Leaves:
        """Return the leaves of one chunk as views."""
        cuts = self._cuts
        if cuts is None:
            cuts = self._cuts = list(self._even(range(len(self))) or ())
        if cuts:
            return cuts[index]
        start, stop = self.bounds[index], self.bounds[index + 1]
        rows = self.rows
        if start == stop and len(rows):
            leaves = without_rows(rows.item(0))
        elif isinstance(rows, Bundle):
            leaves = stack(self.structure, [rows.item(row) for row in range(start, stop)], self.label)
        else:
            leaves = self._cut(rows, start, stop)
        if self.inners is not None:
            leaves = nested(leaves, self.inners[index])
        return leaves

    def _cut(self, rows: Block, start: int, stop: int) -> Leaves:
        cuts = [leaf[start:stop] for leaf in rows.leaves]
        try:
            return tuple([cut.dense() if isinstance(cut, Ragged) else cut for cut in cuts])
        except StackError:
            # Stack row by row, because its error describes the rows.
            return stack(self.structure, [rows.item(row) for row in range(start, stop)], self.label)

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the chunks from ``start`` to ``stop``, in order."""
        pack, numbers = self.structure.pack, range(*slice(start, stop).indices(len(self)))
        even = self._even(numbers)
        return map(pack, map(self.item, numbers) if even is None else even)

    def _even(self, numbers: range) -> Iterator[Leaves] | None:
        # For chunks of equal length, indexing by a number is faster than by a slice. Only plain arrays may have any
        # number of axes.
        rows = self.rows
        if not numbers or not isinstance(rows, Block):
            return None
        bounds, leaves = self.bounds[numbers.start : numbers.stop + 1], rows.leaves
        first, last, size = bounds[0], bounds[-1], bounds[1] - bounds[0]
        is_even = size and list(bounds) == list(range(first, last + 1, size))
        if not is_even or not leaves or any(type(leaf) is not np.ndarray for leaf in leaves):
            return None
        inners = ((),) if self.inners is None else self.inners[numbers.start : numbers.stop]
        inner = inners[0]
        if inners.count(inner) < len(inners):
            return None
        shape = len(numbers), size // prod(inner), *inner
        return zip(*[leaf[first:last].reshape(*shape, *leaf.shape[1:]) for leaf in leaves], strict=True)

    def take(self, rows: Any) -> Bundle:
        return Bundle(self.structure, [self.item(row) for row in rows], self.label)

    def slice(self, start: int, stop: int) -> Batches:
        """Return chunks ``start`` to ``stop`` as views."""
        bounds = self.bounds[start : stop + 1]
        inners = None if self.inners is None else self.inners[start:stop]
        return Batches(self.rows.slice(bounds[0], bounds[-1]), [bound - bounds[0] for bound in bounds], inners)

    def where(self, index: int) -> str:
        """Return the name of one chunk for messages."""
        return f"a batch of {self.bounds[index + 1] - self.bounds[index]} rows of {self.label or 'this data'}"


Rows = Block | Bundle | Batches


def join(parts: Sequence[Rows], structure: Structure) -> Rows:
    """Return elements that nest one element of each part by ``structure``, which has a leaf for each part."""
    nest = structure.nest([part.structure for part in parts])
    label = ", ".join(dict.fromkeys(part.label for part in parts if part.label))
    blocks = [part for part in parts if isinstance(part, Block)]
    if len(blocks) == len(parts):
        origins = [block.origin for block in blocks if block.label] or [blocks[0].origin]
        origin = origins[0] if len(origins) == 1 else JoinedOrigin(origins)
        return Block(nest, [leaf for block in blocks for leaf in block.leaves], label, origin)
    cuts = [part for part in parts if isinstance(part, Batches) and isinstance(part.rows, Block)]
    first = cuts[0] if cuts else None
    if first and len(cuts) == len(parts) and all((c.bounds, c.inners) == (first.bounds, first.inners) for c in cuts):
        rows = Block(nest, [leaf for cut in cuts for leaf in cut.rows.leaves], label)  # type: ignore[union-attr]
        return Batches(rows, first.bounds, first.inners)
    items: list[Any] = []
    for index in range(len(parts[0])):
        # An element fails if one of its parts has failed.
        failed = next(filter(None, [part.failed_at(index) for part in parts]), None)
        items.append(failed or tuple(leaf for part in parts for leaf in part.item(index)))
    return bundle(nest, items, label)


def merge(parts: Sequence[Rows], like: Rows) -> Block | Bundle:
    """Return the elements of all parts in order; if there are none, an empty result with the structure of ``like``."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return Bundle(like.structure, [])
    blocks = [part for part in parts if isinstance(part, Block)]
    if len(blocks) == len(parts) and all(map(blocks[0].is_like, blocks)):
        return blocks[0] if len(blocks) == 1 else Block.concat(blocks, blocks[0].label)
    items = [part.raw(index) for part in parts for index in range(len(part))]
    if any(part.has_failed for part in parts):
        return bundle(structure_of(parts), items, parts[0].label)
    return from_items(parts[0].structure, items, parts[0].label, Origin(parts[0].label, is_exact=False))


def bundle(structure: Structure, items: Sequence[Any], label: str = "", *, is_exclusive: bool = False) -> Bundle:
    """Return elements as a bundle; some may have failed."""
    failed = {place: item for place, item in enumerate(items) if type(item) is FailedElement}
    if failed:
        items = [item for item in items if type(item) is not FailedElement]
    good = Bundle(structure, items, label, is_exclusive=is_exclusive)
    return PartlyFailed(good, failed) if failed else good


def structure_of(parts: Sequence[Rows]) -> Structure:
    """Return the structure of the elements, by the first part with an element that did not fail."""
    return next((part for part in parts if not part.is_all_failed), parts[0]).structure


def without_rows(like: Leaves) -> Leaves:
    """Return the leaves of an empty chunk, by those of another chunk."""
    return tuple(
        [
            unchecked_ragged(leaf[:0], np.zeros(1, leaf.row_splits.dtype))
            if isinstance(leaf, Ragged)
            else np.zeros((0, *leaf.shape), leaf.dtype)
            for leaf in like
        ]
    )


def nested(leaves: Leaves, inner: tuple[int, ...]) -> Leaves:
    """Return the leaves of a chunk whose elements have the shape ``inner`` in rows."""
    return tuple([_nested(leaf, inner) for leaf in leaves])


def _nested(leaf: Any, inner: tuple[int, ...]) -> Any:
    if not isinstance(leaf, Ragged):
        return leaf.reshape(len(leaf) // prod(inner), *inner, *leaf.shape[1:])
    for size in reversed(inner):
        leaf = unchecked_ragged(leaf, np.arange(0, len(leaf) + 1, size, dtype=leaf.row_splits.dtype))
    return leaf


def read_only(array: Any) -> Any:
    """Return a read-only view, so that writing into a chunk cannot change its block."""
    if isinstance(array, np.ndarray):
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        return array
    return _changed(array, read_only)


def writable(leaf: Any) -> Any:
    """Return a leaf itself if it is writable, else a copy."""
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.flags.writeable else leaf.copy("K")
    return _changed(leaf, writable)


def _changed(leaf: Any, change: Callable[[Any], Any]) -> Any:
    # Return a ragged leaf with changed parts, and any other leaf itself.
    if isinstance(leaf, Ragged):
        values, row_splits = change(leaf.values), change(leaf.row_splits)
        if values is not leaf.values or row_splits is not leaf.row_splits:
            return unchecked_ragged(values, row_splits)
    return leaf


def writable_element(element: Any) -> Any:
    """Return an element with its read-only arrays replaced by copies."""
    leaves, structure = Structure.of(element)
    return structure.pack(list(map(writable, leaves)))


def from_items(
    structure: Structure,
    items: Sequence[Leaves],
    label: str = "",
    origin: Origin | SelectedOrigins | JoinedOrigin | None = None,
) -> Block | Bundle:
    """Return elements as a block if their shapes and dtypes agree except for their lengths, else as a bundle."""
    leaves: list[Any] = []
    for column in zip(*items, strict=True):
        leaf = _in_one(column)
        if leaf is None:
            leaf = _in_one(with_empty_alike(column))
        if leaf is None:
            return Bundle(structure, items, label)
        leaves.append(leaf)
    return Block(structure, leaves, label, origin) if leaves else Bundle(structure, items, label)


def _in_one(column: Sequence[Any]) -> Any:
    # Return the leaves of elements as one array, `Ragged` if they differ in length only; None if they differ more.
    if agree(column):
        return stacked(column)
    return Ragged.of(column) if agree(column, but_for_length=True) else None
