"""Runs: sequences of elements in row arithmetic.

The two kinds have the same methods (``len``, slicing, ``take``, ``concat``), so that an operation need not distinguish
them: a `Selection`, whose elements are rows of blocks, and `Groups`, whose elements are batches of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.rows import Selection
from daskdist.core.structure import Structure

Run = Selection | Groups


class Zipped:
    """Elements that combine one element of each of several runs, before gathering.

    Parameters
    ----------
    parts
        Runs of equal length.
    structure
        The nesting of their elements; it has a leaf for each run.
    """

    __slots__ = ("parts", "structure")

    def __init__(self, parts: tuple[Run, ...], structure: Structure) -> None:
        self.parts = parts
        self.structure = structure

    def __len__(self) -> int:
        return len(self.parts[0])

    @property
    def element_bytes(self) -> float:
        """The bytes of an element, as far as they are known."""
        return sum(part.element_bytes for part in self.parts)

    def __getitem__(self, part: slice) -> Zipped:
        return Zipped(tuple(run[part] for run in self.parts), self.structure)

    @staticmethod
    def concat(runs: Sequence[Zipped]) -> Zipped:
        columns = zip(*[run.parts for run in runs], strict=True)
        return Zipped(tuple(map(concat, columns)), runs[0].structure)


class RunQueue:
    """A queue of runs of one kind.

    Only elements that are taken are concatenated, so that a long contiguous run stays one, and its views stay views.
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
        """Add runs from ``pull`` until there are ``num_elements`` elements; its exceptions propagate."""
        while self.num_elements < num_elements:
            self.push(pull())

    def pop(self, num_elements: int) -> Run:
        """Remove and return the first elements, at most ``num_elements``; there must be at least one."""
        locate = []
        missing = min(num_elements, self.num_elements)
        self.num_elements -= missing
        while missing:
            run = self.runs.popleft()
            if len(run) > missing:
                self.runs.appendleft(run[missing:])
                run = run[:missing]
            locate.append(run)
            missing -= len(run)
        return concat(locate)


def concat(runs: Sequence[Run]) -> Run:
    """Return the elements of all runs, which have one kind, in order."""
    if len(runs) == 1:
        return runs[0]
    kind = type(runs[0])
    return kind.concat(runs)  # type: ignore[arg-type]


def group(run: Run, bounds: Index) -> Groups:
    """Return batches of the elements between consecutive ``bounds``, which begin with 0.

    Raises
    ------
    StackError
        The elements are batches, and some in one batch differ in their number of rows.
    """
    return run.group(bounds) if isinstance(run, Groups) else Groups(run[: bounds[-1]], bounds)
