"""``window``: consecutive elements as nested datasets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Self

import numpy as np

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.block import Batches, Block, Bundle
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Compute, Context, Cursor, Epoch, Exhausted, Opener, Primitive, gathered
from daskdist.core.selection.groups import Groups, WindowGroups
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, concat, group
from daskdist.core.selection.windows import BlockWindows
from daskdist.core.spec import DatasetSpec, ElementSpec, MakeDataset, known_spec
from daskdist.core.structure import LONE

logger: Final = logging.getLogger("daskdist")

# The operations and the lengths of windows about which a warning was logged.
WARNED_OF: Final[set[tuple[str, int]]] = set()
# The most windows of one pull, unless they are in one block.
_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class WindowNode(Transformation):
    """Windows of ``size`` elements, ``stride`` apart; each begins ``shift`` elements after the previous one.

    Parameters
    ----------
    size, shift, stride
        As above.
    drop_remainder
        Whether windows at the end that are not full are left out.
    """

    size: int
    shift: int
    stride: int
    drop_remainder: bool

    name = "window"

    def __post_init__(self) -> None:
        for name in ("size", "shift", "stride"):
            whole_number(self.name, name, getattr(self, name), at_least=1)
        yes_or_no(self.name, "drop_remainder", self.drop_remainder)

    @property
    def drops_remainder(self) -> bool:
        return self.drop_remainder

    @property
    def cardinality(self) -> int:
        number = self.source.cardinality
        if self.drop_remainder and number > 0:
            number = max(number - (self.size - 1) * self.stride, 0)
        return cardinality.divide(number, self.shift, drop_remainder=False)

    def warned(self) -> Self:
        """Return the node; warn if it is known to have no window, once for each size."""
        number, span = self.source.cardinality, (self.size - 1) * self.stride + 1
        # Functions may window the elements of many small datasets.
        if self.drop_remainder and 0 < number < span and (self.name, span) not in WARNED_OF:
            WARNED_OF.add((self.name, span))
            logger.warning(
                "%s: a window spans %d elements, and there are %d, so that no window is full and the result is empty; "
                "take a smaller size, or drop_remainder=False for shorter windows",
                self.name,
                span,
                number,
            )
        return self

    def windows(self, inputs: tuple[Primitive, ...]) -> Primitive:
        """Return the stream of windows that are not gathered yet."""
        rows = WindowRows(self.size, self.shift, self.stride, self.drop_remainder)
        return Arrange((gathered(inputs[0]),), rows, grouped=1, name=self.name)


@dataclass(frozen=True, eq=False)
class Window(WindowNode):
    """Windows as nested datasets, one for each leaf.

    Parameters
    ----------
    make
        Creates a dataset from rows and the spec of its elements.
    """

    make: MakeDataset = field(repr=False)

    # The windows of a worker's share have other elements, and another number if they overlap; and a function may depend
    # on the elements of its window.
    facts = Facts(regroups=True, levels=1)

    @property
    def spec(self) -> ElementSpec:
        spec = self.source.spec
        leaves = [DatasetSpec(element=ElementSpec(LONE, (leaf,)), make=self.make) for leaf in spec.leaves]
        return spec.with_leaves(leaves)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        function = OpenWindows(self.make, known_spec(self.source))
        return Compute(self.windows(inputs), function, self.name, factor=1, unstacked=True)


@dataclass(frozen=True)
class OpenWindows:
    """A function that converts groups of rows to elements whose leaves are datasets."""

    make: MakeDataset
    spec: ElementSpec | None

    def __call__(self, batches: Batches) -> Bundle:
        rows = batches.rows
        items = []
        for start, stop in zip(batches.bounds[:-1], batches.bounds[1:], strict=True):
            part = rows.slice(start, stop)
            items.append(tuple([self._dataset(part, number) for number in range(rows.structure.num_leaves)]))
        return Bundle(rows.structure, items, rows.label)

    def _dataset(self, rows: Block | Bundle, number: int) -> Any:
        spec = None if self.spec is None else ElementSpec(LONE, (self.spec.leaves[number],))
        if isinstance(rows, Block):
            return self.make(Block(LONE, [rows.leaves[number]], rows.label, rows.origin), spec)
        return self.make(Bundle(LONE, [(rows.item(k)[number],) for k in range(len(rows))], rows.label), spec)


@dataclass(frozen=True)
class WindowRows:
    """Row arithmetic of ``window``."""

    size: int
    shift: int
    stride: int
    drop_remainder: bool

    @property
    def reach(self) -> int:
        """The number of elements from the first of a window to its last."""
        return (self.size - 1) * self.stride + 1

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return WindowCursor(inputs[0](epoch), self)


@dataclass
class WindowCursor:
    """A cursor with the elements from the next window's first on, of which ``to_skip`` more are skipped before."""

    source: Cursor
    rows: WindowRows
    waiting: list[Run] = field(default_factory=list)
    num_waiting: int = 0
    to_skip: int = 0
    is_over: bool = False

    def pull(self) -> Run:
        rows = self.rows
        while not self.is_over and self.num_waiting < rows.reach:
            self._pull_source()
        if self.waiting and self._is_long(self.waiting[0]):
            return self._windows_of_block(self.waiting[0])
        num_windows = (self.num_waiting - rows.reach) // rows.shift + 1
        if num_windows < 1:
            # At the end there may be incomplete windows.
            num_windows = 0 if rows.drop_remainder else -(-self.num_waiting // rows.shift)
        if num_windows < 1:
            raise Exhausted
        num_rows_before = sum(map(len, takewhile(lambda run: not self._is_long(run), self.waiting)))
        return self._windows(min(num_windows, -(-num_rows_before // rows.shift), _AT_ONCE))

    def _is_long(self, run: Run) -> bool:
        # Return whether a run is consecutive rows of a block with at least one window.
        return self.rows.stride == 1 and len(run) >= self.rows.size and isinstance(run, Selection) and run.is_range

    def _windows_of_block(self, run: Any) -> Groups:
        rows = self.rows
        num_windows = (len(run) - rows.size) // rows.shift + 1
        self._pass(num_windows * rows.shift)
        return WindowGroups(run.blocks[0], BlockWindows(0, run.rows.start, num_windows, rows.size, rows.shift))

    def _pull_source(self) -> None:
        try:
            run: Run = self.source.pull()
        except Exhausted:
            self.is_over = True
            return
        self.waiting.append(run)
        self.num_waiting += len(run)
        self._pass(self.to_skip)

    def _pass(self, num_rows: int) -> None:
        # Drop rows from the start of those that wait, and later those that are missing.
        self.to_skip = max(num_rows - self.num_waiting, 0)
        num_rows -= self.to_skip
        self.num_waiting -= num_rows
        while num_rows:
            run = self.waiting.pop(0)
            if num_rows < len(run):
                self.waiting.insert(0, run[num_rows:])
            num_rows -= min(num_rows, len(run))

    def _windows(self, num_windows: int) -> Groups:
        rows = self.rows
        # Rows of blocks, as the input is gathered.
        run: Any = concat(self.waiting)
        firsts = np.arange(num_windows) * rows.shift
        if rows.stride == 1:
            stops = np.minimum(firsts + rows.size, len(run))
            bounds = np.concatenate([[0], np.cumsum(stops - firsts)])
            chosen = run.spans(firsts, stops)
        else:
            places = firsts[:, None] + np.arange(rows.size) * rows.stride
            is_there = places < len(run)
            bounds = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))])
            chosen = run.take(places[is_there])
        self._pass(num_windows * rows.shift)
        return group(chosen, bounds)
