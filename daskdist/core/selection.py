"""Which rows of which blocks, in what order: all that arranging ever handles.

A **run** is a sequence of elements on their way through arrange operations. There are two kinds, with the
same methods (``len``, slicing, ``take``, ``concat``, ``group``), so that an operation need not know which it
has: a `Selection`, whose elements are rows of blocks, and `Groups`, whose elements are the batches that
``batch`` makes of them. Where rows come in long stretches, as they do unless they are shuffled, a Selection is
`Stretches`: a few numbers for each stretch, and none for each row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.stretched import Stretched
from daskdist.core.structure import Structure
from daskdist.errors import StackError

Index = np.ndarray[Any, Any]

# With fewer rows than so many in a stretch, on the average, a number for each row is no more.
_MANY_ROWS: Final = 8


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
        The address of the worker that was asked to make it; None in this process, or where any worker may have it.
    on_release
        Called with ``nbytes`` when nothing refers to the block any more.
    recipe
        How it can be made again.
    is_kept
        Whether it is there and stays, whoever refers to it.
    """

    __slots__ = ("__weakref__", "handle", "is_kept", "nbytes", "num_rows", "on_release", "recipe", "worker")

    def __init__(
        self,
        handle: Any,
        num_rows: int,
        nbytes: int = 0,
        worker: str | None = None,
        on_release: Callable[[int], None] | None = None,
        recipe: Any = None,
        *,
        is_kept: bool = False,
    ) -> None:
        self.handle = handle
        self.is_kept = is_kept
        self.num_rows = num_rows
        self.nbytes = nbytes
        self.worker = worker
        self.on_release = on_release
        self.recipe = recipe

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release(self.nbytes)

    def keep(self) -> None:
        """Let it no longer count as outstanding: somebody keeps it for later."""
        if self.on_release is not None:
            self.on_release(self.nbytes)
            self.on_release = None

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
    """

    __slots__ = ("blocks", "rows", "which")

    def __init__(self, blocks: tuple[BlockRef, ...], rows: range | Index, which: Index | None = None) -> None:
        self.blocks = blocks
        self.rows = rows
        self.which = which

    @classmethod
    def whole(cls, ref: BlockRef) -> Selection:
        """All rows of a block."""
        return cls((ref,), range(ref.num_rows))

    @staticmethod
    def of(blocks: tuple[BlockRef, ...], stretches: Stretched, *, is_view: bool = True) -> Selection:
        """The rows of some stretches; of just one as a view, if that will do."""
        num_rows, num_stretches = int(stretches.bounds[-1]), len(stretches.which)
        if num_stretches == 1 and is_view:
            start = int(stretches.starts[0])
            return Selection((blocks[stretches.which[0]],), range(start, start + num_rows))
        if num_rows >= _MANY_ROWS * num_stretches:
            return Stretches(blocks, stretches)
        return Selection(blocks, stretches.rows, None if len(blocks) == 1 else stretches.which_rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_range(self) -> bool:
        """Whether they are contiguous, so that they can be had as a view."""
        return isinstance(self.rows, range)

    @property
    def row_numbers(self) -> Index:
        """``rows`` as an array."""
        return np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows

    @property
    def places(self) -> Index:
        """``which`` as an array."""
        return np.zeros(len(self.rows), np.intp) if self.which is None else self.which

    @property
    def element_bytes(self) -> float:
        """The size of an element, as far as known."""
        return max((ref.row_bytes for ref in self.blocks), default=0)

    def __getitem__(self, part: slice) -> Selection:
        return Selection(self.blocks, self.rows[part], None if self.which is None else self.which[part])

    @property
    def stretches(self) -> Stretched | None:
        """What tells the rows without a number for each; None where that takes one for each."""
        if not isinstance(self.rows, range):
            return None
        return Stretched(np.zeros(1, np.intp), np.array([self.rows.start]), np.array([0, len(self.rows)]))

    def by_stretch(self) -> Stretched:
        """The same, of one row each where there is no other way."""
        return self.stretches or Stretched(self.places, self.row_numbers, np.arange(len(self) + 1))

    def of_blocks(self, blocks: tuple[Any, ...]) -> Selection:
        """The same rows of other blocks."""
        return Selection(blocks, self.rows, self.which)

    def spans(self, starts: Index, stops: Index) -> Selection:
        """The elements from each start to its stop, one span after the other."""
        stretches = self.stretches
        if stretches is not None:
            return Selection.of(self.blocks, stretches.spans(starts, stops))
        lengths = stops - starts
        return self.take(np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum()))

    def take(self, index: Index) -> Selection:
        """The elements at these places."""
        rows = index + self.rows.start if isinstance(self.rows, range) else self.rows.take(index)
        return Selection(self.blocks, rows, None if self.which is None else self.which.take(index))

    @staticmethod
    def concat(parts: Sequence[Selection]) -> Selection:
        """The elements of all parts, one after the other."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        joined = _join_ranges(parts)
        if joined is not None:
            return joined
        places: dict[int, int] = {}
        refs: list[BlockRef] = []
        numbers = []
        for part in parts:
            for ref in part.blocks:
                if id(ref) not in places:
                    places[id(ref)] = len(refs)
                    refs.append(ref)
            numbers.append(np.array([places[id(ref)] for ref in part.blocks], np.intp))
        stretches = [part.stretches for part in parts]
        if None not in stretches:
            return Selection.of(tuple(refs), Stretched.concat(stretches, numbers))  # type: ignore[arg-type]
        rows = np.concatenate([part.row_numbers for part in parts])
        which = [to.take(part.places) for part, to in zip(parts, numbers, strict=True)]
        return Selection(tuple(refs), rows, None if len(refs) == 1 else np.concatenate(which))

    def without_unused(self) -> Selection:
        """The same rows, holding on to no block that has none of them."""
        if self.which is None:
            return self if len(self) else Selection((), range(0))
        counts = np.bincount(self.which, minlength=len(self.blocks))
        used = np.flatnonzero(counts)
        if len(used) == len(self.blocks):
            return self
        blocks = tuple(self.blocks[i] for i in used)
        if len(used) <= 1:
            return Selection(blocks, self.rows)
        places = np.zeros(len(self.blocks), np.intp)
        places[used] = np.arange(len(used))
        return Selection(blocks, self.rows, places.take(self.which))

    def keep(self) -> None:
        """Let its blocks no longer count as outstanding."""
        for ref in self.blocks:
            ref.keep()

    def stay(self) -> None:
        """Note that its blocks are there and stay."""
        for ref in self.blocks:
            ref.is_kept = True

    def group(self, bounds: Index) -> Groups:
        """A batch of the rows between each two consecutive ``bounds``, which begin with 0."""
        return Groups(self[: bounds[-1]], bounds)


class Stretches(Selection):
    """A selection whose rows come in long stretches.

    Parameters
    ----------
    blocks
        The blocks the rows are of.
    stretches
        Which rows.
    """

    __slots__ = ("_num_rows", "_stretches")

    def __init__(self, blocks: tuple[BlockRef, ...], stretches: Stretched) -> None:
        self.blocks = blocks
        self._stretches = stretches
        self._num_rows = int(stretches.bounds[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Stretches, (self.blocks, self._stretches)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rows(self) -> Index:  # type: ignore[override]
        return self._stretches.rows

    @property
    def which(self) -> Index | None:  # type: ignore[override]
        return self._stretches.which_rows if len(self.blocks) > 1 else None

    is_range = False

    @property
    def stretches(self) -> Stretched:
        return self._stretches

    def of_blocks(self, blocks: tuple[Any, ...]) -> Selection:
        return Stretches(blocks, self._stretches)

    def __getitem__(self, part: slice) -> Selection:
        start, stop, _ = part.indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        return self.spans(np.array([start]), np.array([max(stop, start)]))

    def take(self, index: Index) -> Selection:
        rows, which = self._stretches.taken(index)
        return Selection(self.blocks, rows, which if len(self.blocks) > 1 else None)

    def without_unused(self) -> Selection:
        stretches = self._stretches
        if len(self.blocks) == 1 and len(self):
            return self
        is_used = np.bincount(stretches.which, minlength=len(self.blocks)) > 0
        if is_used.all():
            return self
        blocks = tuple([self.blocks[place] for place in np.flatnonzero(is_used).tolist()])
        which = (np.cumsum(is_used) - 1).take(stretches.which)
        return Stretches(blocks, Stretched(which, stretches.starts, stretches.bounds))


def _join_ranges(parts: Sequence[Selection]) -> Selection | None:
    # Contiguous rows that follow on in one block stay a range, and so a view.
    first = parts[0]
    if not all(part.is_range for part in parts):
        return None
    start = stop = first.rows.start  # type: ignore[union-attr]
    for part in parts:
        if part.rows.start != stop or part.blocks != first.blocks:  # type: ignore[union-attr]
            return None
        stop = part.rows.stop  # type: ignore[union-attr]
    return Selection(first.blocks, range(start, stop))


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
    """Batches that are not gathered yet, each one element.

    Parameters
    ----------
    flat
        The rows of all batches, one batch after the other.
    bounds
        Where in ``flat`` each batch begins and the last ends, shape ``(num_batches + 1,)``.
    inners
        Of each batch the shape of its elements in rows: ``(2,)`` for a batch of batches of 2. None where the
        elements of all are rows.
    """

    __slots__ = ("bounds", "flat", "inners")

    def __init__(self, flat: Selection, bounds: Index, inners: tuple[tuple[int, ...], ...] | None = None) -> None:
        self.flat = flat
        self.bounds = bounds
        self.inners = inners

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Index:
        """The number of elements of each batch."""
        num_rows = np.diff(self.bounds)
        return num_rows if self.inners is None else num_rows // np.array([prod(inner) for inner in self.inners])

    @property
    def element_bytes(self) -> float:
        """The size of the first batch, as far as known."""
        return self.flat.element_bytes * float(self.bounds[1] - self.bounds[0])

    def __getitem__(self, part: slice) -> Groups:
        start, stop, _ = part.indices(len(self))
        bounds = self.bounds[start : max(stop, start) + 1]
        inners = None if self.inners is None else self.inners[start:stop]
        return Groups(self.flat[bounds[0] : bounds[-1]], bounds - bounds[0], inners)

    def take(self, index: Index) -> Groups:
        starts, stops = self.bounds[index], self.bounds[index + 1]
        bounds = np.concatenate([[0], np.cumsum(stops - starts)])
        inners = None if self.inners is None else tuple(self.inners[i] for i in index.tolist())
        return Groups(self.flat.spans(starts, stops), bounds, inners)

    @staticmethod
    def concat(parts: Sequence[Groups]) -> Groups:
        offsets = np.cumsum([0, *(part.bounds[-1] for part in parts)])
        bounds = [part.bounds[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
        nested = [part.inners for part in parts if part.inners is not None]
        inners = tuple(inner for inners in nested for inner in inners) if nested else None
        return Groups(Selection.concat([part.flat for part in parts]), np.concatenate([*bounds, offsets[-1:]]), inners)

    def keep(self) -> None:
        """Let its blocks no longer count as outstanding."""
        self.flat.keep()

    def stay(self) -> None:
        """Note that its blocks are there and stay."""
        self.flat.stay()

    def without_unused(self) -> Groups:
        # Batches without rows are made after some block, too.
        flat = self.flat.without_unused() if len(self.flat) else Selection(self.flat.blocks[:1], range(0))
        if flat is self.flat:
            return self
        return Groups(flat, self.bounds, self.inners)

    def group(self, bounds: Index) -> Groups:
        """A batch of the batches between each two consecutive ``bounds``, which begin with 0.

        Raises
        ------
        StackError
            Batches that are to be one differ in their number of rows.
        """
        lengths = self.lengths.tolist()
        shapes = [(length, *inner) for length, inner in zip(lengths, self.inners or [()] * len(self), strict=True)]
        inners = []
        for start, stop in pairwise(bounds.tolist()):
            found = set(shapes[start:stop])
            if len(found) > 1:
                sizes = ", ".join("x".join(map(str, shape)) for shape in sorted(found))
                raise StackError(
                    f"batch: batches of {sizes} rows do not stack; use drop_remainder=True on the inner batch"
                )
            inners.append(next(iter(found), ()))
        stops = self.bounds[bounds]
        return Groups(self.flat[: stops[-1]], stops, tuple(inners))

    def ungroup(self) -> Run:
        """What the batches are made of: rows, or where they are batches of batches, those."""
        flat = self.flat[int(self.bounds[0]) : int(self.bounds[-1])]
        if self.inners is None:
            return flat
        sizes = np.array([prod(inner) for inner in self.inners])
        lengths = self.lengths
        bounds = np.concatenate([[0], np.cumsum(np.repeat(sizes, lengths))])
        inners = tuple(
            inner[1:] for inner, number in zip(self.inners, lengths.tolist(), strict=True) for _ in range(number)
        )
        return Groups(flat, bounds, inners if any(inners) else None)

    def cut(self, num_pieces: int) -> Groups:
        """Each batch as ``num_pieces`` ones, of as many elements each until they run out."""
        lengths, starts = self.lengths[:, None], self.bounds[:-1, None]
        ends = np.minimum(np.arange(1, num_pieces + 1) * -(-lengths // num_pieces), lengths)
        inners = None
        if self.inners is not None:
            ends = ends * np.array([[prod(inner)] for inner in self.inners])
            inners = tuple(inner for inner in self.inners for _ in range(num_pieces))
        return Groups(self.flat, np.concatenate([[0], (starts + ends).ravel()]), inners)


Run = Selection | Groups


class Zipped:
    """Elements made of an element of each of several runs, on their way to be gathered.

    Parameters
    ----------
    parts
        Runs of one length.
    structure
        How elements of theirs nest in one; it has a leaf for each run.
    """

    __slots__ = ("parts", "structure")

    def __init__(self, parts: tuple[Run, ...], structure: Structure) -> None:
        self.parts = parts
        self.structure = structure

    def __len__(self) -> int:
        return len(self.parts[0])

    @property
    def element_bytes(self) -> float:
        """The size of an element, as far as known."""
        return sum(part.element_bytes for part in self.parts)

    def __getitem__(self, part: slice) -> Zipped:
        return Zipped(tuple(each[part] for each in self.parts), self.structure)

    @staticmethod
    def concat(runs: Sequence[Zipped]) -> Zipped:
        columns = zip(*[run.parts for run in runs], strict=True)
        return Zipped(tuple(map(concat, columns)), runs[0].structure)


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
