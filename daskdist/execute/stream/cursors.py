"""Cursors over the blocks of primitives whose elements are made by calls."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from daskdist.cached_property import cached_property
from daskdist.core.failing.try_each import TryEach, TryEachCarried
from daskdist.core.primitive import (
    Chain,
    Compute,
    Cursor,
    Epoch,
    Exhausted,
    NotReady,
    same,
)
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.execute.caller import Handle
from daskdist.execute.resume.deferring import Deferred
from daskdist.execute.resume.recorded_answers import AnswerLog, Known, Path, PathKey
from daskdist.execute.stream.calls import CallWithCarry, Constant, GetItem, OfLength, fill_again
from daskdist.execute.stream.gather import bundle_size, run_bytes
from daskdist.execute.stream.runtime import Sizes, StreamRuntime

# The rows of the first calls whose results may be far larger than rows are.
_FEW_ROWS: Final = 4
# The bytes of batches that are worth a call of a function, however many batches they are.
_WORTH_A_CALL_BYTES: Final = 2**18


class BlockCursor:
    """A cursor over blocks that calls make, in the order of the calls; some are requested ahead.

    Subclasses request the next block. The rows of a block are handed out as one contiguous run.
    """

    # True if blocks are handed out in the order in which they were requested.
    in_order = True
    # True if the block that is measured is kept until the report on it has arrived.
    keeps_sample = False
    # True if blocks are unchanged data, so that their size and the time that they take are known beforehand.
    is_plain = False
    # The number of rows that the last call computed if its time is of interest; 0 if it is not.
    num_timed = 0

    def __init__(
        self,
        runtime: StreamRuntime,
        factor: int | None,
        path: Path,
        epoch: Epoch,
        name: str,
        *,
        may_be_large: bool = False,
    ) -> None:
        self.runtime = runtime
        self._name = name
        self.factor = factor
        self.path = path
        self.epoch = epoch
        self.pending: deque[BlockRef] = deque()
        self.is_over = False
        # The number of calls whose cut is recorded, and of blocks that were counted or whose turn was recorded.
        self.num_cut = self.num_counted = self.num_taken_in_turn = 0
        # If blocks come in any order, the number of the call of each pending one.
        self._numbers: dict[int, int] = {}
        # A cursor that an operation opened for an element is not opened again in another pass.
        self._is_lasting = not any(isinstance(step, PathKey) for step in path)
        self._may_be_large = may_be_large
        sizes = Sizes(num_rows=_FEW_ROWS) if may_be_large else Sizes()
        self._sizes = runtime.sizes.setdefault(path, sizes) if self._is_lasting else sizes
        # An error that ends the stream, raised when the blocks before it were handed out.
        self.failure: Exception | None = None

    def pull(self) -> Run:
        while True:
            self._ask_ahead()
            if not self.pending:
                failure, self.failure = self.failure, None
                raise Exhausted if failure is None else failure
            ref = self._first()
            if self._is_first_sample(ref):
                # An error of the call is raised when the block is used.
                with suppress(Exception):
                    self._learn(wait=True)
            if ref.num_rows < 0:
                self._count(ref)
            self.pending.remove(ref)
            if not self.in_order:
                self._note_turn(ref)
            if ref.num_rows:
                return Selection.whole(ref)
            self._came_empty()

    def _is_first_sample(self, ref: BlockRef) -> bool:
        # A block that was handed out may be freed before it is measured, and so may those after it.
        sizes, runtime = self._sizes, self.runtime
        if sizes.are_known or sizes.sample is None or not (runtime.waits and runtime.caller.reports_freely):
            return False
        return sizes.sample[0]() is ref

    @cached_property
    def log(self) -> AnswerLog:
        """The answers that this cursor got, including those from before its stream was opened again."""
        log = self.runtime.answers.open(self.path, self.epoch)
        self._check(log)
        return log

    def _check(self, log: AnswerLog) -> None:
        # Raise an error if the answers are of other calls than those of this cursor.
        pass

    def _first(self) -> BlockRef:
        if self.in_order:
            return self.pending[0]
        if self.num_taken_in_turn < len(self.log.order):
            return self._recorded_first(self.log.order[self.num_taken_in_turn])
        if self.runtime.waits:
            self.runtime.caller.wait_for_one([ref.handle for ref in self.pending])
        for ref in self.pending:
            if self.runtime.caller.is_done(ref.handle):
                return ref
        if not self.runtime.waits:
            # Another block may be available before the oldest one.
            raise NotReady
        return self.pending[0]

    def _recorded_first(self, number: int) -> BlockRef:
        # Return the block of a call, which may not have been made yet.
        while True:
            for ref in self.pending:
                if self._numbers[id(ref)] == number:
                    return ref
            self._push(self._ask())

    def _push(self, ref: BlockRef) -> None:
        caller = self.runtime.caller
        is_counted_later = ref.num_rows < 0 and self.num_counted + len(self.pending) >= len(self.log.rows)
        if is_counted_later and not (caller.reports_freely or isinstance(ref.handle, Deferred)):
            # If each report were requested only when its block is the next one, the program would wait for all of them.
            caller.report(ref.handle, wait=False)
        self.pending.append(ref)
        if not self.in_order:
            self._numbers[id(ref)] = self.num_cut - 1

    def _note_turn(self, ref: BlockRef) -> None:
        number = self._numbers.pop(id(ref))
        if self.num_taken_in_turn == len(self.log.order):
            self.log.order.append(number)
        self.num_taken_in_turn += 1

    def _next_cut(self) -> int | None:
        # Return how much the next call took if that is recorded; `_note_cut` is called next.
        cuts = self.log.cuts
        return cuts[self.num_cut] if self.num_cut < len(cuts) else None

    def _note_cut(self, cut: int) -> None:
        if self.num_cut == len(self.log.cuts):
            self.log.cuts.append(cut)
        self.num_cut += 1

    def _came_empty(self) -> None:
        # An empty block does not end the stream: the next one may have rows.
        pass

    def _count(self, ref: BlockRef) -> None:
        runtime, rows = self.runtime, self.log.rows
        if self.num_counted < len(rows):
            ref.num_rows = rows[self.num_counted]
            self.num_counted += 1
            function = OfLength(self._name, ref.num_rows)
            ref.handle = runtime.caller.call(function, [ref.handle], worker=ref.worker, is_cheap=True, name=self._name)
            return
        report = runtime.caller.report(ref.handle, wait=runtime.waits)
        if report is None:
            raise NotReady
        rows.append(report.num_rows)
        self.num_counted += 1
        ref.num_rows = report.num_rows
        runtime.resize(ref, report.nbytes)
        self._sizes.unmeasured.discard(ref)
        runtime.note_skipped(report.skipped)

    def _ask_ahead(self) -> None:
        caller, windows = self.runtime.caller, self.runtime.reads
        while not self.is_over and self.failure is None and len(self.pending) <= caller.num_ahead:
            if self.pending and not windows[self.pending[-1].worker].has_room(self.pending[-1].nbytes):
                return
            if self._is_far_ahead():
                if not self.pending:
                    raise NotReady
                return
            try:
                with self.runtime.waiting(not self.pending):
                    ref = self._ask()
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self.pending:
                    raise
                return
            except Exception as error:
                self.failure, self.is_over = error, True
            else:
                self._push(ref)
                self._note_sample(ref)

    def _note_sample(self, latest: BlockRef) -> None:
        # Measure one block at a time. If a report costs a call, measure only the first block, and then calls for far
        # more rows than the measured ones.
        if latest.is_kept or isinstance(latest.handle, Deferred):
            return
        sizes = self._sizes
        sizes.num_calls += 1
        is_new = not sizes.are_known or self.num_timed > 2 * sizes.num_timed
        if sizes.sample is None and (self.runtime.caller.reports_freely or is_new):
            # The time of this call decides the number of rows of the next calls. Calls of a chain wait for each other,
            # so that its blocks may be used up before the report on one has come.
            ref = (lambda: latest) if self.num_timed or self.keeps_sample else weakref.ref(latest)
            sizes.sample, sizes.num_calls = (ref, latest.nbytes, self.num_timed), 1
        self._learn(wait=False)

    @property
    def _few_calls(self) -> int:
        # The most calls to make before the report on the first of them has arrived.
        return self.runtime.caller.num_ahead + 1

    def _is_far_ahead(self) -> bool:
        # Elements may be far larger than the rows that they come from, and functions slow: until a report on the first
        # ones has arrived, only as many calls are made as keep the workers busy.
        caller, sizes = self.runtime.caller, self._sizes
        if self.is_plain or caller.reports_freely or not caller.divides or sizes.num_calls < self._few_calls:
            return False
        self._learn(wait=self.runtime.waits and not self.pending)
        return sizes.sample is not None

    def _learn(self, *, wait: bool) -> None:
        caller, sizes = self.runtime.caller, self._sizes
        if sizes.sample is not None:
            (sampled, expected, num_rows) = sizes.sample
            ref = sampled()
            if ref is None:
                sizes.sample = None
            elif (report := caller.report(ref.handle, wait=wait)) is not None:
                growth = max(report.nbytes, 1) / max(expected, 1)
                for other in sizes.unmeasured:
                    self.runtime.resize(other, int(growth * other.nbytes))
                sizes.unmeasured.clear()
                self.runtime.resize(ref, report.nbytes)
                sizes.growth *= growth
                sizes.sample, sizes.are_known = None, True
                if num_rows:
                    self._note_time(num_rows, report.seconds)

    def _note_time(self, num_rows: int, seconds: float | None) -> None:
        raise NotImplementedError

    def _next_rows(self, waiting: RunQueue, source: Cursor, cut: int | None, *, is_full: bool = False) -> Any:
        # Return the rows of the next call; those of first calls are few if results may be large.
        runtime, sizes = self.runtime, self._sizes
        if cut is not None:
            fill_again(waiting, source.pull, cut, self._name)
        if not (self._may_be_large and runtime.caller.divides):
            return next_bundle(runtime, waiting, source, cut, is_full=is_full)
        most_rows = sizes.num_rows
        run = next_bundle(runtime, waiting, source, cut, is_full=is_full, most_rows=most_rows, growth=sizes.growth)
        if sizes.are_known:
            sizes.num_rows = max(most_rows, 2 * min(most_rows, _num_rows_of(run)))
        return run

    def _refer(self, handle: Any, num_rows: int | None, num_bytes: int, worker: str | None) -> BlockRef:
        runtime = self.runtime
        num_rows = -1 if num_rows is None or self.factor is None else num_rows * self.factor
        ref = runtime.refer(handle, num_rows, int(num_bytes * self._sizes.growth), worker, runtime.reads)
        if not self._sizes.are_known:
            self._sizes.unmeasured.add(ref)
        return ref

    def _ask(self) -> BlockRef:
        raise NotImplementedError

    def _skip_counted(self, num_rows: int, skip_inputs: Callable[[int], bool]) -> int:
        # Skip the first calls whose rows are recorded and no more than ``num_rows``; return how many rows they had.
        total, log = 0, self.log
        while self.num_cut < min(len(log.cuts), len(log.rows)) and not self.pending:
            rows = log.rows[self.num_cut]
            if rows > num_rows - total or not skip_inputs(log.cuts[self.num_cut]):
                break
            total += rows
            self.num_cut, self.num_counted = self.num_cut + 1, self.num_counted + 1
        return total


class ComputeCursor(BlockCursor):
    """A cursor over blocks computed from blocks, or from batches gathered for the purpose."""

    keeps_sample = True

    def __init__(self, runtime: StreamRuntime, compute: Compute, path: Path, epoch: Epoch, source: Cursor) -> None:
        super().__init__(runtime, compute.factor, path, epoch, compute.name, may_be_large=compute.may_be_large)
        self.compute = compute
        self.in_order = compute.in_order
        self.source = source
        self.waiting = RunQueue()

    def _ask(self) -> BlockRef:
        is_recorded = not self._is_known
        cut = self._next_cut() if is_recorded else None
        runtime, compute = self.runtime, self.compute
        run = self._next_rows(self.waiting, self.source, cut, is_full=compute.is_full)
        if is_recorded:
            self._note_cut(len(run))
        worker = runtime.near(run)
        if compute.function is same:
            function: Callable[[Any], Any] = same
        else:
            function = TryEach(compute.function, compute.factor)
        handle = runtime.ask(
            run,
            worker=worker,
            name=compute.name,
            function=function,
            unstacked=compute.unstacked,
            is_costly=compute.costly is not None,
        )
        return self._refer(handle, len(run), int(run_bytes(run)), worker)

    @property
    def _is_known(self) -> bool:
        return self.in_order and self.factor is not None

    def skip(self, num_rows: int) -> int:
        """Skip elements with their inputs; fewer than ``num_rows`` where that needs a block."""
        if not self.in_order or self.pending or self.waiting:
            return 0
        if self.factor is None:
            first = self.num_cut
            total = self._skip_counted(num_rows, lambda cut: True)
            self.source.skip(sum(self.log.cuts[first : self.num_cut]))  # type: ignore[attr-defined]
            return total
        return self.source.skip(num_rows // self.factor) * self.factor if self.factor else 0  # type: ignore[attr-defined]


class ChainCursor(BlockCursor):
    """A cursor over blocks computed from blocks, each with the value carried over from the one before."""

    keeps_sample = True

    def __init__(self, runtime: StreamRuntime, chain: Chain, path: Path, epoch: Epoch, source: Cursor) -> None:
        super().__init__(runtime, chain.factor, path, epoch, chain.name, may_be_large=chain.may_be_large)
        self.chain = chain
        self.source = source
        self.waiting = RunQueue()
        self._carried: Handle | None = None

    def _ask(self) -> BlockRef:
        number = self.num_cut
        run = self._next_rows(self.waiting, self.source, self._next_cut())
        self._note_cut(len(run))
        worker, caller, name = self.runtime.near(run), self.runtime.caller, self.chain.name
        known = self.log.carried.get(number)
        if isinstance(known, Known):
            self._carried = self._handle_of(known.value, worker)
        elif self._carried is None:
            self._carried = self._handle_of(self.chain.initial, worker)
        # Passing a function, even the identity, makes gathered rows record their origin for error messages.
        rows = self.runtime.ask(run, worker=worker, name="gather", function=same)
        num_rows = self.log.rows[number] if number < len(self.log.rows) else None
        following = self.log.carried.get(number + 1)
        carried_before = following.value if isinstance(following, Known) else None
        function = CallWithCarry(TryEachCarried(self.chain.function), name, num_rows, carried_before)
        both = caller.call(function, [rows, self._carried], worker=worker, name=name)
        self._carried = caller.call(GetItem(1), [both], worker=worker, name=f"{name}-carried")
        if following is None and not self.runtime.is_trial:
            self.log.note_carried(number + 1, self._carried)
        # The rows depend on the value, so that no element is handed out before the value is known.
        needs = [both, self._carried]
        results = caller.call(GetItem(0), needs, worker=worker, name=f"{name}-rows")
        return self._refer(results, len(run), int(run_bytes(run)), worker)

    def _handle_of(self, carried: Any, worker: str | None) -> Handle:
        return self.runtime.caller.source(Constant(carried), worker=worker, name=f"{self.chain.name}-initial")


def next_bundle(
    runtime: StreamRuntime,
    waiting: RunQueue,
    source: Cursor,
    cut: int | None = None,
    *,
    is_full: bool = False,
    most_rows: int | None = None,
    growth: float = 1.0,
) -> Any:
    """Return as many elements of a source as one call should take; fewer may come unless ``is_full``.

    If ``cut`` is given, exactly so many come. Otherwise they have at most ``most_rows`` rows if they are several, and
    results that are ``growth`` times as large are worth a call.
    """
    waiting.fill(source.pull, cut or 1)
    if cut is not None:
        return waiting.pop(cut)
    if is_full:
        with suppress(Exhausted):
            while sum(map(run_bytes, waiting.runs)) < runtime.caller.bundle_bytes:
                waiting.push(source.pull())
        if len(waiting.runs) > 1:
            return waiting.pop(len(waiting))
    run = waiting.runs[0]
    most_bytes = min(runtime.caller.bundle_bytes, runtime.most_bytes) / max(growth, 1)
    number = bundle_size(runtime.caller, run, most_bytes)
    if most_rows is not None:
        # Small batches are worth a call only if they are many.
        number = max(number, int(_WORTH_A_CALL_BYTES // max(run.element_bytes, 1)))
        number = min(number, max(most_rows * len(run) // max(_num_rows_of(run), 1), 1))
    return waiting.pop(number)


def _num_rows_of(run: Any) -> int:
    return len(run.flat) if isinstance(run, Groups) else len(run)
