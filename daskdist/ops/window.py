"""``window``: consecutive elements as nested datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.block import Batches, Block, Bundle
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Compute, Context, Cursor, Epoch, Exhausted, Opener, Primitive, gathered
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run, concat, group
from daskdist.core.spec import DatasetSpec, ElementSpec, MakeDataset, known_spec
from daskdist.core.structure import LONE

# The most windows of one pull.
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
        num_windows = (self.num_waiting - rows.reach) // rows.shift + 1
        if num_windows < 1:
            # At the end there may be incomplete windows.
            num_windows = 0 if rows.drop_remainder else -(-self.num_waiting // rows.shift)
        if num_windows < 1:
            raise Exhausted
        return self._windows(min(num_windows, _AT_ONCE))

    def _pull_source(self) -> None:
        try:
            run: Run = self.source.pull()
        except Exhausted:
            self.is_over = True
            return
        skipped = min(self.to_skip, len(run))
        self.to_skip -= skipped
        if skipped < len(run):
            self.waiting.append(run[skipped:])
            self.num_waiting += len(run) - skipped

    def _windows(self, num_windows: int) -> Groups:
        rows = self.rows
        # Rows of blocks, as the input is gathered.
        run: Any = concat(self.waiting)
        firsts = np.arange(num_windows) * rows.shift
        if rows.stride == 1:
            stops = np.minimum(firsts + rows.size, len(run))
            bounds = np.concatenate([[0], np.cumsum(stops - firsts)])
            is_contiguous = rows.shift == rows.size
            chosen = run[: int(bounds[-1])] if is_contiguous else run.spans(firsts, stops)
        else:
            places = firsts[:, None] + np.arange(rows.size) * rows.stride
            is_there = places < len(run)
            bounds = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))])
            chosen = run.take(places[is_there])
        passed = num_windows * rows.shift
        self.to_skip = max(passed - len(run), 0)
        rest = run[passed:] if passed < len(run) else None
        self.waiting, self.num_waiting = ([], 0) if rest is None else ([rest], len(rest))
        return group(chosen, bounds)
