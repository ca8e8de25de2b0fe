"""Rows in memory: columnar blocks, batches that are slices of a block, and bundles, which are lists.

The three have the same methods; a row of any of them is an element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from daskdist.core.cardinality import counted
from daskdist.core.columns import dtype_of, shape_of, stacked
from daskdist.core.failing.origin import JoinedOrigin, Origin, SelectedOrigins, Skipped
from daskdist.core.ragged import Ragged, concat, unchecked_ragged
from daskdist.core.structure import LONE, ONE_KIND, Leaves, Nested, Structure, as_array
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
        return _block, (self.structure, self.leaves, self.label, self.origin, self.skipped)

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

    def __init__(
        self, structure: Structure, items: Sequence[Leaves], label: str = "", *, is_exclusive: bool = False
    ) -> None:
        self.structure = structure
        self._items = list(items) if is_exclusive else [tuple(map(read_only, item)) for item in items]
        self.label = label
        self.skipped: tuple[Skipped, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _bundle, (self.structure, self._items, self.label, self.skipped)

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
        return _batches, (self.rows, self.bounds, self.inners, self.skipped)

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


# Unpickled arrays are usually writable: these functions make them read-only again.


def _block(
    structure: Structure,
    leaves: Leaves,
    label: str,
    origin: Origin | SelectedOrigins | JoinedOrigin,
    skipped: tuple[Skipped, ...],
) -> Block:
    block = Block(structure, leaves, label, origin)
    block.skipped = skipped
    return block


def _bundle(structure: Structure, items: Sequence[Leaves], label: str, skipped: tuple[Skipped, ...]) -> Bundle:
    bundle_of_items = Bundle(structure, items, label)
    bundle_of_items.skipped = skipped
    return bundle_of_items


def _batches(
    rows: Block | Bundle,
    bounds: Sequence[int],
    inners: tuple[tuple[int, ...], ...] | None,
    skipped: tuple[Skipped, ...],
) -> Batches:
    batches = Batches(rows, bounds, inners)
    batches.skipped = skipped
    return batches


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
    items = [tuple(leaf for part in parts for leaf in part.item(index)) for index in range(len(parts[0]))]
    return Bundle(nest, items, label)


def merge(parts: Sequence[Rows], like: Rows) -> Block | Bundle:
    """Return the elements of all parts in order; if there are none, an empty result with the structure of ``like``."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return Bundle(like.structure, [])
    blocks = [part for part in parts if isinstance(part, Block)]
    if len(blocks) == len(parts) and all(map(blocks[0].is_like, blocks)):
        return blocks[0] if len(blocks) == 1 else Block.concat(blocks, blocks[0].label)
    items = [part.item(index) for part in parts for index in range(len(part))]
    return from_items(parts[0].structure, items, parts[0].label, Origin(parts[0].label, is_exact=False))


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
    elif isinstance(array, Ragged):
        values, row_splits = read_only(array.values), read_only(array.row_splits)
        if values is not array.values or row_splits is not array.row_splits:
            return unchecked_ragged(values, row_splits)
    return array


def writable(leaf: Any) -> Any:
    """Return a leaf itself if it is writable, else a copy."""
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.flags.writeable else leaf.copy("K")
    if isinstance(leaf, Ragged):
        values, row_splits = writable(leaf.values), writable(leaf.row_splits)
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
    if _agree(column):
        return stacked(column)
    return Ragged.of(column) if _agree(column, but_for_length=True) else None


def stack(structure: Structure, items: Sequence[Leaves], label: str = "") -> Leaves:
    """Return the leaves of one chunk: the leaves of its elements stacked along a new axis 0.

    Raises
    ------
    StackError
        The elements' shapes or dtypes differ.
    """
    leaves: list[Any] = []
    for path, column in zip(structure.paths, zip(*items, strict=True), strict=True):
        if _are_ragged(column):
            # Ragged even if all have the same length, as in TensorFlow.
            leaves.append(Ragged.of(column, column[0].row_splits.dtype))
            continue
        if _agree(column):
            leaves.append(stacked(column))
            continue
        alike = with_empty_alike(column)
        if not _agree(alike):
            kinds = dict.fromkeys(map(_kind, column))
            where = f" of {label}" if label else ""
            raise StackError(
                f"elements{where} do not stack to a batch or window, their leaf {path or '(the element)'} occurs as "
                f"{', '.join(list(kinds)[:4])}. {_advice(column)}"
            )
        leaves.append(stacked(alike))
    return tuple(leaves)


def _advice(column: Sequence[Any]) -> str:
    if not all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in column):
        return "Give them one kind first with map(...)"
    if len({leaf.dtype for leaf in column}) > 1:
        return (
            "Give them one dtype first, such as with map(lambda x: x.astype(np.float32)); the datasets that a function "
            "of flat_map or interleave returns, and the results of a function of map, need one dtype too"
        )
    if len({leaf.ndim for leaf in column}) > 1:
        return "Give them one number of axes first with map(...)"
    return "Give them one shape first with map(...), or use padded_batch or ragged_batch"


def _are_ragged(column: Sequence[Any]) -> bool:
    first = column[0]
    return isinstance(first, Ragged) and all(
        isinstance(leaf, Ragged) and leaf.dtype == first.dtype and leaf.ndim == first.ndim for leaf in column
    )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Nested):
        return "a dataset"
    return f"{leaf.dtype}{list(leaf.shape)}"


def with_empty_alike(column: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves of elements, where empty arrays of floats have the dtype of the others, if these have only one.

    NumPy makes an empty list an array of floats, so that it may differ from lists of other numbers or of text.

    >>> with_empty_alike([np.array([]), np.array([1, 2])])
    [array([], dtype=int64), array([1, 2])]
    """
    if not set(map(type, column)) <= {np.ndarray} or len(set(map(dtype_of, column))) == 1:
        return column
    is_open = [not leaf.size and leaf.dtype.kind == "f" for leaf in column]
    dtypes = {leaf.dtype for leaf, may_differ in zip(column, is_open, strict=True) if not may_differ}
    if len(dtypes) != 1:
        return column
    (dtype,) = dtypes
    return [leaf.astype(dtype) if may_differ else leaf for leaf, may_differ in zip(column, is_open, strict=True)]


def _agree(column: Sequence[Any], *, but_for_length: bool = False) -> bool:
    if not all(issubclass(kind, (np.ndarray, np.generic)) for kind in set(map(type, column))):
        return False
    inner = 1 if but_for_length else 0
    shapes, dtypes = set(map(shape_of, column)), set(map(dtype_of, column))
    if min(map(len, shapes)) < inner or len({(len(shape), shape[inner:]) for shape in shapes}) > 1:
        return False
    # Text of different widths differs in dtype, but can be stacked; bytes would become text.
    return len(dtypes) == 1 or {dtype.kind for dtype in dtypes} in ONE_KIND
