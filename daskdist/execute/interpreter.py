"""The interpreter: walks primitives, keeps the window, and asks a caller for every call.

It knows `Read`, `Compute` and `Arrange`, and no operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Cursor,
    Exhausted,
    NotReady,
    Opener,
    Primitive,
    Read,
    Split,
)
from daskdist.core.selection import BlockRef, Groups, Run, RunQueue, Selection
from daskdist.execute.callers import Caller
from daskdist.execute.gather import Picks, gather
from daskdist.execute.window import Window

# Rows of blocks with less than this share of them left are moved to a block of their own. Each time at most a
# third as much is copied as is given up, so all copying together stays below one copy of the data.
_FEW_ROWS_LEFT = 0.25
# The share of a worker's window for reads that moving rows has to free to be worth its call.
_WORTH_FREEING = 0.25


class Interpreter:
    """Runs one pipeline.

    Parameters
    ----------
    caller
        Who makes the calls.
    workers
        The workers that read, in turn; ``(None,)`` for this process.
    """

    def __init__(self, caller: Caller, workers: Sequence[str | None] = (None,)) -> None:
        self.caller = caller
        budget = in_bytes("window-bytes") * len(workers) // 2
        self.reads = Window(budget)
        self.bundles = Window(budget)
        # Whether a cursor may wait for a count: not while there is something to hand out already.
        self.waits = True
        self.num_workers = len(workers)
        self._turns = cycle(workers)

    def open(self, primitive: Primitive) -> Opener:
        """What starts a stream of the primitive's elements for an epoch."""
        match primitive:
            case Read():
                return lambda epoch: ReadCursor(self, primitive)
            case Compute():
                source = self.open(primitive.source)
                return lambda epoch: ComputeCursor(self, primitive, source(epoch))
            case Arrange():
                inputs = [self.open(each) for each in primitive.inputs]
                return lambda epoch: primitive.arrangement.open(inputs, epoch, self)

    def next_worker(self) -> str | None:
        """The worker whose turn it is."""
        return next(self._turns)

    def gather(self, run: Run, *, on: str | None, name: str, window: Window) -> BlockRef:
        """The rows of a run as one block, on a worker."""
        return self.refer(self.ask(run, on=on, name=name), len(run), int(run_bytes(run)), on, window)

    def ask(self, run: Run, *, on: str | None, name: str, function: Callable[[Any], Any] | None = None) -> Any:
        """Ask for the rows of a run, or what a function makes of them, as one block, on a worker."""
        run = self._brought_to(run.without_unused(), on)
        blocks = run.blocks if isinstance(run, Selection) else run.flat.blocks
        return self.caller.call(gather, [ref.handle for ref in blocks], Picks.of(run), function, on=on, name=name)

    def refer(self, handle: Any, num_rows: int, nbytes: int, on: str | None, window: Window) -> BlockRef:
        """A reference that holds its bytes of a window for as long as it lives."""
        window.acquire(nbytes)
        return BlockRef(handle, num_rows, nbytes, on, window.release)

    def _brought_to(self, run: Run, on: str | None) -> Run:
        # Rows cross workers, blocks do not: what lies elsewhere is first reduced to the rows wanted, there.
        if isinstance(run, Groups):
            return Groups(self._rows_brought_to(run.flat, on), run.bounds, run.inners)
        return self._rows_brought_to(run, on)

    def _rows_brought_to(self, selection: Selection, on: str | None) -> Selection:
        elsewhere = sorted({ref.worker for ref in selection.blocks if ref.worker not in (None, on)} if on else ())
        if not elsewhere:
            return selection
        for worker in elsewhere:
            there = [place for place, ref in enumerate(selection.blocks) if ref.worker == worker]
            selection = self._merged(selection, there, worker, "take", self.bundles)
        return selection.without_unused()

    def _merged(
        self, selection: Selection, places: list[int], worker: str | None, name: str, window: Window
    ) -> Selection:
        # The rows that are of some of the blocks, all on one worker, made a block there.
        is_one = np.zeros(len(selection.blocks), bool)
        is_one[places] = True
        at = np.flatnonzero(is_one.take(selection.places))
        if not len(at):
            return selection
        merged = self.gather(selection.take(at), on=worker, name=name, window=window)
        rows, which = selection.row_numbers.copy(), selection.places.copy()
        rows[at], which[at] = np.arange(len(at)), len(selection.blocks)
        return Selection((*selection.blocks, merged), rows, which)

    def compact(self, run: Run, in_use: Iterable[Run]) -> Run:
        """See `daskdist.core.primitive.Context`."""
        if isinstance(run, Groups):
            return Groups(self._rows_compacted(run.flat, in_use), run.bounds, run.inners)
        return self._rows_compacted(run, in_use)

    def _rows_compacted(self, selection: Selection, in_use: Iterable[Run]) -> Selection:
        if not self.caller.compacts or selection.which is None:
            return selection
        kept = {id(ref) for run in in_use for ref in (run.flat if isinstance(run, Groups) else run).blocks}
        counts = np.bincount(selection.which, minlength=len(selection.blocks)).tolist()
        few: dict[str | None, list[int]] = {}
        freed_bytes: dict[str | None, float] = {}
        for place, (ref, count) in enumerate(zip(selection.blocks, counts, strict=True)):
            if id(ref) not in kept and count < _FEW_ROWS_LEFT * ref.num_rows:
                few.setdefault(ref.worker, []).append(place)
                freed = (ref.num_rows - count) * ref.row_bytes
                freed_bytes[ref.worker] = freed_bytes.get(ref.worker, 0) + freed
        for worker, places in few.items():
            # One call for all of a worker, and only when it is worth one.
            if freed_bytes[worker] >= self.reads.limit_bytes / self.num_workers * _WORTH_FREEING:
                selection = self._merged(selection, places, worker, "compact", self.reads)
        return selection.without_unused()


class BlockCursor:
    """Blocks that calls make, in the order of the calls, some of them asked for ahead.

    Subclasses ask for the next one; a block's rows come out as one contiguous run.
    """

    def __init__(self, interpreter: Interpreter, factor: int | None) -> None:
        self.interpreter = interpreter
        self.factor = factor
        self.pending: deque[BlockRef] = deque()
        self.is_over = False
        # What a block turned out to take, as a multiple of what was expected; learned from reports.
        self.growth = 1.0
        self._sample: tuple[BlockRef, int] | None = None
        self._has_sampled = False

    def pull(self) -> Run:
        while True:
            self._ask_ahead()
            if not self.pending:
                raise Exhausted
            ref = self.pending[0]
            if ref.num_rows < 0:
                self._count(ref)
            self.pending.popleft()
            if ref.num_rows:
                return Selection.whole(ref)

    def _count(self, ref: BlockRef) -> None:
        interpreter = self.interpreter
        report = interpreter.caller.report(ref.handle, wait=interpreter.waits)
        if report is None:
            raise NotReady
        ref.num_rows = report.num_rows
        self._resize(ref, report.nbytes)

    def _resize(self, ref: BlockRef, nbytes: int) -> None:
        self.interpreter.reads.acquire(nbytes - ref.nbytes)
        ref.nbytes = nbytes

    def _ask_ahead(self) -> None:
        caller, window = self.interpreter.caller, self.interpreter.reads
        while not self.is_over and len(self.pending) <= caller.num_ahead:
            if self.pending and not window.has_room(self.pending[-1].nbytes):
                return
            try:
                ref = self._ask()
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self.pending:
                    raise
                return
            else:
                self.pending.append(ref)
                self._learn(ref)

    def _learn(self, latest: BlockRef) -> None:
        # One block at a time; where a report is a call of its own, one in all.
        caller = self.interpreter.caller
        if self._sample is None and (caller.reports_freely or not self._has_sampled):
            self._sample = latest, latest.nbytes
            self._has_sampled = True
        if self._sample is not None:
            ref, expected = self._sample
            report = caller.report(ref.handle, wait=False)
            if report is not None:
                self._resize(ref, report.nbytes)
                self.growth *= max(report.nbytes, 1) / max(expected, 1)
                self._sample = None

    def _refer(self, handle: Any, num_rows: int | None, num_bytes: int, on: str | None) -> BlockRef:
        interpreter = self.interpreter
        num_rows = -1 if num_rows is None or self.factor is None else num_rows * self.factor
        return interpreter.refer(handle, num_rows, int(num_bytes * self.growth), on, interpreter.reads)

    def _ask(self) -> BlockRef:
        raise NotImplementedError


class ReadCursor(BlockCursor):
    """The blocks of a source's splits."""

    def __init__(self, interpreter: Interpreter, read: Read) -> None:
        super().__init__(interpreter, read.factor)
        self.read = read
        self._splits: Iterator[Split] | None = None
        self._rest: Split | None = None
        # Parts of splits that can be divided begin small, so that the first elements come soon, and double.
        self._num_rows = 64

    def _ask(self) -> BlockRef:
        split = self._next_split()
        read, caller, worker = self.read, self.interpreter.caller, self.interpreter.next_worker()
        if read.graph is None:
            handle = caller.source(read.function, split, on=worker, name=read.name)
        else:
            value = caller.upstream(read.graph, split.payload, on=worker)
            handle = caller.call(OnValue(read.function), [value], split, on=worker, name=read.name)
        num_bytes = in_bytes("split-bytes") if split.num_bytes is None else split.num_bytes
        return self._refer(handle, split.num_rows, num_bytes, worker)

    def _next_split(self) -> Split:
        if self._splits is None:
            self._splits = iter(self.read.splits())
        split, self._rest = self._rest or next(self._splits, None), None
        if split is None:
            raise Exhausted
        caller, divide = self.interpreter.caller, self.read.divide
        if divide is None or not caller.divides or not split.num_rows:
            return split
        row_bytes = (split.num_bytes or 0) / split.num_rows * self.growth
        num_rows = max(min(self._num_rows, int(in_bytes("split-bytes") / max(row_bytes, 1))), 1)
        self._num_rows = 2 * num_rows
        if num_rows >= split.num_rows:
            return split
        self._rest = divide(split, num_rows, split.num_rows)
        return divide(split, 0, num_rows)


class ComputeCursor(BlockCursor):
    """Blocks made of blocks, or of batches gathered for the purpose."""

    def __init__(self, interpreter: Interpreter, compute: Compute, source: Cursor) -> None:
        super().__init__(interpreter, compute.factor)
        self.compute = compute
        self.source = source
        self.waiting = RunQueue()

    def _ask(self) -> BlockRef:
        self.waiting.fill(self.source.pull, 1)
        interpreter, compute = self.interpreter, self.compute
        run = self.waiting.pop(bundle_size(interpreter.caller, self.waiting.runs[0]))
        worker = interpreter.next_worker()
        handle = interpreter.ask(run, on=worker, name=compute.name, function=compute.function)
        return self._refer(handle, len(run), int(run_bytes(run)), worker)


@dataclass(frozen=True)
class OnValue:
    """A reader of values of a Dask graph, in the form of a call on handles."""

    function: Callable[..., Any]

    def __call__(self, values: Sequence[Any], split: Split) -> Any:
        return self.function(split, values[0])


def run_bytes(run: Run) -> float:
    """The size of all elements of a run, as far as known."""
    flat = run if isinstance(run, Selection) else run.flat
    return flat.element_bytes * len(flat)


def bundle_size(caller: Caller, run: Run) -> int:
    """How many elements of a run one call should take: up to so many bytes, and not more chunks than agreed."""
    num_elements = max(int(caller.bundle_bytes // max(run.element_bytes, 1)), 1)
    return min(num_elements, caller.bundle_chunks) if isinstance(run, Groups) else num_elements
