"""Runs: sequences of elements on their way through arrange operations.

There are two kinds with the same methods (``len``, slicing, ``take``, ``concat``), so that an operation need not know
which it has: a `Selection`, whose elements are rows of blocks, and `Groups`, whose elements are batches of them.
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
        """Remove and return the first elements, at most so many; there must be one."""
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
    """Return the elements of all runs, which are of one kind, one after the other."""
    if len(runs) == 1:
        return runs[0]
    kind = type(runs[0])
    return kind.concat(runs)  # type: ignore[arg-type]


def group(run: Run, bounds: Index) -> Groups:
    """Return a batch of the elements between each two consecutive ``bounds``, which begin with 0.

    Raises
    ------
    StackError
        The elements are batches, and those that are to be one differ in their number of rows.
    """
    return run.group(bounds) if isinstance(run, Groups) else Groups(run[: bounds[-1]], bounds)
