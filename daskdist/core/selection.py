"""Which rows of which blocks, in what order: all that arranging ever handles.

A **run** is a sequence of elements on their way through arrange operations. There are two kinds, with the
same four methods (``len``, slicing, ``take``, ``concat``), so that an operation need not know which it has:
a `Selection`, whose elements are rows of blocks, and `Groups`, whose elements are selections (what ``batch``
makes of rows).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import Any

import numpy as np

from daskdist.errors import StackError

Index = np.ndarray[Any, Any]


class BlockRef:
    """A block that lies somewhere: asked for, perhaps not there yet.

    Parameters
    ----------
    handle
        What the caller that makes the block gave for it.
    num_rows
        Its length.
    nbytes
        Its size in memory, as far as known.
    worker
        The address of the worker that was asked to make it; None in this process.
    on_release
        Called with ``nbytes`` when nothing refers to the block any more.
    """

    __slots__ = ("handle", "nbytes", "num_rows", "on_release", "worker")

    def __init__(
        self,
        handle: Any,
        num_rows: int,
        nbytes: int = 0,
        worker: str | None = None,
        on_release: Callable[[int], None] | None = None,
    ) -> None:
        self.handle = handle
        self.num_rows = num_rows
        self.nbytes = nbytes
        self.worker = worker
        self.on_release = on_release

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release(self.nbytes)

    @property
    def row_bytes(self) -> float:
        return self.nbytes / max(self.num_rows, 1)


class Selection:
    """Rows of blocks, in order.

    Either contiguous (``rows`` is a range, within the one block there is) or scattered (``rows`` is an
    integer array; ``which`` gives each row's block by its place in ``blocks``, or is None for just one).

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    rows
        Row numbers within their blocks.
    which
        One integer a row, an index into ``blocks``.
    inner
        The shape of one element in rows: ``()`` where an element is a row, ``(2,)`` where it is a batch of 2.
    """

    __slots__ = ("blocks", "inner", "rows", "which")

    def __init__(
        self,
        blocks: tuple[BlockRef, ...],
        rows: range | Index,
        which: Index | None = None,
        inner: tuple[int, ...] = (),
    ) -> None:
        self.blocks = blocks
        self.rows = rows
        self.which = which
        self.inner = inner

    @classmethod
    def whole(cls, ref: BlockRef) -> Selection:
        """All rows of a block."""
        return cls((ref,), range(ref.num_rows))

    def __len__(self) -> int:
        return len(self.rows) // prod(self.inner) if self.inner else len(self.rows)

    @property
    def row_numbers(self) -> Index:
        """``rows`` as an array."""
        return np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows

    @property
    def nbytes(self) -> float:
        """Bytes of the rows chosen, as far as known."""
        per_row = max((ref.row_bytes for ref in self.blocks), default=0)
        return per_row * len(self.rows)

    def __getitem__(self, part: slice) -> Selection:
        if self.inner:
            size = prod(self.inner)
            start, stop, _ = part.indices(len(self))
            part = slice(start * size, stop * size)
        return Selection(self.blocks, self.rows[part], None if self.which is None else self.which[part], self.inner)

    def take(self, index: Index) -> Selection:
        """The elements at these places."""
        if self.inner:
            size = prod(self.inner)
            index = (index[:, None] * size + np.arange(size)).ravel()
        rows = index + self.rows.start if isinstance(self.rows, range) else self.rows.take(index)
        return Selection(self.blocks, rows, None if self.which is None else self.which.take(index), self.inner)

    @staticmethod
    def concat(parts: Sequence[Selection]) -> Selection:
        """The elements of all parts, one after the other."""
        parts = [part for part in parts if len(part.rows)] or list(parts[:1])
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(part.inner != first.inner for part in parts):
            raise StackError("batches of different sizes meet in one; use drop_remainder=True on the inner batch")
        joined = _join_ranges(parts)
        if joined is not None:
            return joined
        rows = np.concatenate([part.row_numbers for part in parts])
        places: dict[int, int] = {}
        refs: list[BlockRef] = []
        which = []
        # Cuts of one run share its blocks, and are one stretch here.
        for _, stretch in groupby(parts, key=lambda part: id(part.blocks)):
            same = list(stretch)
            for ref in same[0].blocks:
                if id(ref) not in places:
                    places[id(ref)] = len(refs)
                    refs.append(ref)
            to = np.array([places[id(ref)] for ref in same[0].blocks], np.intp)
            if same[0].which is None:
                which.append(np.full(sum(len(part.rows) for part in same), to[0]))
            else:
                which.append(to.take(np.concatenate([part.which for part in same])))
        return Selection(tuple(refs), rows, None if len(refs) == 1 else np.concatenate(which), first.inner)

    def without_unused(self) -> Selection:
        """The same rows, holding on to no block that has none of them."""
        if self.which is None:
            return self if len(self.rows) else Selection((), range(0), None, self.inner)
        counts = np.bincount(self.which, minlength=len(self.blocks))
        used = np.flatnonzero(counts)
        if len(used) == len(self.blocks):
            return self
        blocks = tuple(self.blocks[i] for i in used)
        if len(used) <= 1:
            return Selection(blocks, self.rows, None, self.inner)
        places = np.zeros(len(self.blocks), np.intp)
        places[used] = np.arange(len(used))
        return Selection(blocks, self.rows, places.take(self.which), self.inner)

    def group(self, bounds: Sequence[int]) -> Groups:
        """The selections between consecutive ``bounds``."""
        if self.which is None and isinstance(self.rows, range) and not self.inner:
            blocks, first = self.blocks, self.rows.start
            return Groups([Selection(blocks, range(first + start, first + stop)) for start, stop in pairwise(bounds)])
        return Groups([self[start:stop] for start, stop in pairwise(bounds)])


def _join_ranges(parts: Sequence[Selection]) -> Selection | None:
    # Contiguous rows that follow on in one block stay a range, and so a view.
    first = parts[0]
    if first.inner or not isinstance(first.rows, range):
        return None
    stop = first.rows.start
    for part in parts:
        if not isinstance(part.rows, range) or part.rows.start != stop or part.blocks != first.blocks:
            return None
        stop = part.rows.stop
    return Selection(first.blocks, range(first.rows.start, stop))


def places_by_value(values: Index) -> Iterator[tuple[int, Index]]:
    """Each value of a small non-negative integer array, and where it stands.

    >>> [(value, at.tolist()) for value, at in places_by_value(np.array([2, 0, 2]))]
    [(0, [1]), (2, [0, 2])]
    """
    counts = np.bincount(values)
    # A stable sort of 16-bit integers is a radix sort: linear.
    order = np.argsort(values.astype(np.uint16) if len(counts) <= 2**16 else values, kind="stable")
    stops = np.cumsum(counts)
    for value in np.flatnonzero(counts).tolist():
        yield value, order[stops[value] - counts[value] : stops[value]]


class Groups:
    """Selections, each one element: batches that are not gathered yet."""

    __slots__ = ("selections",)

    def __init__(self, selections: list[Selection]) -> None:
        self.selections = selections

    def __len__(self) -> int:
        return len(self.selections)

    def __getitem__(self, part: slice) -> Groups:
        return Groups(self.selections[part])

    def take(self, index: Index) -> Groups:
        selections = self.selections
        return Groups([selections[i] for i in index.tolist()])

    @staticmethod
    def concat(parts: Sequence[Groups]) -> Groups:
        return Groups([selection for part in parts for selection in part.selections])

    def without_unused(self) -> Groups:
        return self

    def group(self, bounds: Sequence[int]) -> Groups:
        """One selection for each stretch between consecutive ``bounds``: a batch of batches."""
        return Groups([_stack(self.selections[a:b]) for a, b in pairwise(bounds)])


Run = Selection | Groups


class RunQueue:
    """Runs of one kind in a row, from whose front elements are taken.

    Only what is taken is put together, so that a long contiguous run stays one, and views of it views.
    """

    def __init__(self) -> None:
        self.runs: deque[Run] = deque()
        self.num_elements = 0

    def __len__(self) -> int:
        return self.num_elements

    def push(self, run: Run) -> None:
        """Add a run at the end."""
        self.runs.append(run)
        self.num_elements += len(run)

    def fill(self, pull: Callable[[], Run], num_elements: int) -> None:
        """Add what ``pull`` gives until there are so many elements; what it raises passes through."""
        while self.num_elements < num_elements:
            self.push(pull())

    def pop(self, num_elements: int) -> Run:
        """The first elements, at most so many; there must be one."""
        taken = []
        missing = min(num_elements, self.num_elements)
        self.num_elements -= missing
        while missing:
            run = self.runs.popleft()
            if len(run) > missing:
                self.runs.appendleft(run[missing:])
                run = run[:missing]
            taken.append(run)
            missing -= len(run)
        return concat(taken)


def concat(runs: Sequence[Run]) -> Run:
    """The elements of all runs, which are of one kind, one after the other."""
    if len(runs) == 1:
        return runs[0]
    kind = type(runs[0])
    return kind.concat(runs)  # type: ignore[arg-type]


def _stack(batches: list[Selection]) -> Selection:
    sizes = {len(batch) for batch in batches}
    if len(sizes) > 1:
        raise StackError(
            f"batch: batches of {', '.join(map(str, sorted(sizes)))} rows do not stack; "
            "use drop_remainder=True on the inner batch"
        )
    joined = Selection.concat(batches)
    return Selection(joined.blocks, joined.rows, joined.which, (sizes.pop(), *batches[0].inner))
