"""Cursors over the blocks of primitives whose elements are made by calls."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from daskdist.config import in_bytes
from daskdist.core.failing.failed_elements import FailedElement, TryEach, TryEachCarried, TryEachRead
from daskdist.core.primitive import (
    Chain,
    Compute,
    Cursor,
    Epoch,
    Exhausted,
    NotReady,
    Read,
    Split,
    payload_itself,
    same,
    value_itself,
)
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.execute.caller import Handle, SplitLocations
from daskdist.execute.resume.answers import HAS_FAILED, AnswerLog, Known, Path, PathKey
from daskdist.execute.resume.deferring import Deferred
from daskdist.execute.stream.calls import CallWithCarry, GetItem, ReadGraphValue, ReadKeptSplit
from daskdist.execute.stream.gather import bundle_size, run_bytes
from daskdist.execute.stream.runtime import Sizes, StreamRuntime

# On a cluster, parts of this many rows are read from a divisible split before they grow with the progress of the pass.
_FEW_ROWS: Final = 1024


class BlockCursor:
    """A cursor over blocks that calls make, in the order of the calls; some are requested ahead.

    Subclasses request the next block. The rows of a block are handed out as one contiguous run.
    """

    # True if blocks are handed out in the order in which they were requested.
    in_order = True
    # True if the cursor continues after its input raised an error; a source ends there.
    goes_on = False
    # True if blocks are data as it is, so that their size and the time that they take are known beforehand.
    is_plain = False

    def __init__(self, runtime: StreamRuntime, factor: int | None, path: Path, epoch: Epoch) -> None:
        self.runtime = runtime
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
        self._sizes = runtime.sizes.setdefault(path, Sizes()) if self._is_lasting else Sizes()
        self.failure: FailedElement | None = None
        # The elements of the current block that were not handed out yet, and its failed elements with their places.
        self.rest: Any = None
        self.failed: deque[tuple[int, FailedElement]] = deque()

    def pull(self) -> Run:
        while True:
            if self.rest is not None:
                return self._next_of_rest()
            self._ask_ahead()
            if not self.pending:
                failure, self.failure = self.failure, None
                raise Exhausted if failure is None else failure.error
            ref = self._first()
            if ref.num_rows < 0:
                self._count(ref)
            self.pending.remove(ref)
            if not self.in_order:
                self._note_turn(ref)
            if ref.num_rows:
                self.rest = Selection.whole(ref)
            else:
                self._came_empty()

    def _next_of_rest(self) -> Run:
        # Return the elements before the next failed one; if that comes first, raise its error and skip it.
        run, self.rest = self.rest, None
        if not self.failed:
            return run  # type: ignore[no-any-return]
        place = self.failed[0][0] - run.rows.start
        if place:
            self.rest = run[place:]
            return run[:place]  # type: ignore[no-any-return]
        failed = self.failed.popleft()[1]
        if len(run) > 1:
            self.rest = run[1:]
        raise failed.again()

    @cached_property
    def log(self) -> AnswerLog:
        """The answers that this cursor got, and got before where its stream was opened again."""
        return self.runtime.answers.open(self.path, self.epoch)

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
        return self.pending[0]

    def _recorded_first(self, number: int) -> BlockRef:
        # Return the block of a call, which may not have been made yet.
        while True:
            for ref in self.pending:
                if self._numbers[id(ref)] == number:
                    return ref
            self._push(self._ask())

    def _push(self, ref: BlockRef) -> None:
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
        return self.log.cut(self.num_cut)

    def _note_cut(self, cut: int) -> None:
        self.log.note_cut(self.num_cut, cut)
        self.num_cut += 1

    def _came_empty(self) -> None:
        # An empty block does not end the stream: the next one may have rows.
        pass

    def _count(self, ref: BlockRef) -> None:
        runtime, rows = self.runtime, self.log.rows
        if self.num_counted < len(rows) and rows[self.num_counted] != HAS_FAILED:
            ref.num_rows = rows[self.num_counted]
            self.num_counted += 1
            return
        report = runtime.caller.report(ref.handle, wait=runtime.waits)
        if report is None:
            raise NotReady
        if self.num_counted == len(rows):
            rows.append(HAS_FAILED if report.failed else report.num_rows)
        self.num_counted += 1
        ref.num_rows = report.num_rows
        self._resize(ref, report.nbytes)
        self.failed.extend(report.failed)
        runtime.note_skipped(report.skipped)

    def _resize(self, ref: BlockRef, nbytes: int) -> None:
        if ref.on_release is not None:
            self.runtime.reads[ref.worker].acquire(nbytes - ref.nbytes)
        ref.nbytes = nbytes

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
                # Blocks that were requested before the error are handed out first.
                self.failure = FailedElement(error)
                self.is_over = not self.goes_on
            else:
                self._push(ref)
                self._note_sample(ref)

    def _note_sample(self, latest: BlockRef) -> None:
        # Learn from one block at a time; if a report costs a call, only from the first one.
        if latest.is_kept or isinstance(latest.handle, Deferred):
            return
        sizes = self._sizes
        sizes.num_calls += 1
        if sizes.sample is None and (self.runtime.caller.reports_freely or not sizes.are_known):
            sizes.sample = weakref.ref(latest), latest.nbytes
        self._learn(wait=False)

    def _is_far_ahead(self) -> bool:
        # Elements may be far larger than the rows that they come from: until the size of the first ones is known, only
        # as many calls are made as keep the workers busy.
        caller, sizes = self.runtime.caller, self._sizes
        are_few = sizes.num_calls <= caller.num_ahead
        if self.is_plain or caller.reports_freely or not caller.divides or sizes.are_known or are_few:
            return False
        self._learn(wait=self.runtime.waits and not self.pending)
        return sizes.sample is not None

    def _learn(self, *, wait: bool) -> None:
        caller, sizes = self.runtime.caller, self._sizes
        if sizes.sample is not None:
            ref, expected = sizes.sample[0](), sizes.sample[1]
            if ref is None:
                sizes.sample = None
            elif (report := caller.report(ref.handle, wait=wait)) is not None:
                self._resize(ref, report.nbytes)
                sizes.growth *= max(report.nbytes, 1) / max(expected, 1)
                sizes.sample, sizes.are_known = None, True

    def _refer(self, handle: Any, num_rows: int | None, num_bytes: int, worker: str | None) -> BlockRef:
        runtime = self.runtime
        num_rows = -1 if num_rows is None or self.factor is None else num_rows * self.factor
        return runtime.refer(handle, num_rows, int(num_bytes * self._sizes.growth), worker, runtime.reads)

    def _ask(self) -> BlockRef:
        raise NotImplementedError

    def _skip_counted(self, num_rows: int, skip_inputs: Callable[[int], bool]) -> int:
        # Skip the first calls whose rows are recorded and no more than ``num_rows``; return how many rows they had.
        total, log = 0, self.log
        while self.num_cut < min(len(log.cuts), len(log.rows)) and not self.pending:
            rows = log.rows[self.num_cut]
            if not 0 <= rows <= num_rows - total or not skip_inputs(log.cuts[self.num_cut]):
                break
            total += rows
            self.num_cut, self.num_counted = self.num_cut + 1, self.num_counted + 1
        return total


class ReadCursor(BlockCursor):
    """A cursor over the blocks of a source's splits."""

    def __init__(self, runtime: StreamRuntime, read: Read, path: Path, epoch: Epoch) -> None:
        super().__init__(runtime, read.factor, path, epoch)
        self.in_order = read.in_order
        self.read = read
        self.is_plain = read.function in (payload_itself, value_itself)
        # The number of the next split, and the number of its rows that were requested already.
        self.number = 0
        self.offset = 0
        self.num_rows = self._sizes.num_rows
        self._splits: Iterator[Split] | None = None
        self._split: Split | None = None
        # The workers that have the data of splits, and the number of splits assigned to each of them.
        self._locations: SplitLocations | None = None
        self._has_asked_locations = False
        self._num_assigned: Counter[str] = Counter()
        # The handle of the data of the only split, if that is kept for all passes.
        self._kept: Handle | None = None

    def _ask(self) -> BlockRef:
        split = self._current()
        if not (self.number or self.offset):
            self._kept = self._kept_data(split)
        if self._kept is not None and self.read.function in (payload_itself, value_itself):
            self.number, self._split = self.number + 1, None
            return self._kept_block(self._kept, split)
        start, is_recorded = self.offset, not self._is_known(split)
        cut = self._next_cut() if is_recorded else None
        stop = self._stop(split) if cut is None else None if cut < 0 else cut
        if is_recorded:
            self._note_cut(-1 if stop is None else stop)
        ref = self._part(split, start, stop)
        self._pass_to(split, stop)
        return ref

    def _is_known(self, split: Split) -> bool:
        # Return whether the cuts and the number of rows of a split are known without reading it, or do not matter.
        return self.in_order and self.factor is not None and split.num_rows is not None

    def _pass_to(self, split: Split, stop: int | None) -> None:
        if stop is None or stop == split.num_rows:
            self.number, self.offset, self._split = self.number + 1, 0, None
        else:
            self.offset = stop

    def skip(self, num_rows: int) -> int:
        """Skip rows without requesting their blocks; fewer than ``num_rows`` where that needs a block."""
        total = 0
        while total < num_rows and self.in_order and not self.pending:
            try:
                split = self._current()
            except Exhausted:
                break
            if not self._is_known(split):
                skipped = self._skip_counted(num_rows - total, partial(self._skip_cut, split))
                total += skipped
                if self._split is split:
                    break
                continue
            factor, left = self.factor or 1, (split.num_rows or 0) - self.offset
            if left * factor <= num_rows - total:
                total += left * factor
                self._pass_to(split, None)
                continue
            part = (num_rows - total) // factor
            if part and self.read.divide is not None and self.runtime.caller.divides:
                total += part * factor
                self.offset += part
            break
        return total

    def _skip_cut(self, split: Split, cut: int) -> bool:
        # One call at a time: the next one may be of another split.
        if self._split is not split:
            return False
        self._pass_to(split, None if cut < 0 else cut)
        return True

    def _part(self, split: Split, start: int, stop: int | None) -> BlockRef:
        read, worker = self.read, self._worker(split)
        is_divided = stop is not None and read.divide is not None and (start, stop) != (0, split.num_rows)
        divide = read.divide if is_divided else None
        part = split if divide is None or stop is None else divide(split, start, stop)
        num_bytes = in_bytes("split-bytes") if part.num_bytes is None else part.num_bytes
        if self._kept is None:
            handle = self._handle(part, worker)
        else:
            function, without = ReadKeptSplit(TryEachRead(read.function), divide), replace(split, payload=None)
            call = self.runtime.caller.call
            handle = call(function, [self._kept], without, start, stop, worker=worker, name=read.name)
        ref = self._refer(handle, part.num_rows, num_bytes, worker)
        ref.is_kept = read.kept_for is not None and read.function is value_itself
        return ref

    def _handle(self, split: Split, worker: str | None) -> Handle:
        read, caller = self.read, self.runtime.caller
        if read.graph is None:
            return caller.source(TryEachRead(read.function), split, worker=worker, name=read.name)
        value = caller.upstream(read.graph, split.payload, worker=worker)
        if read.function is value_itself:
            return value
        return caller.call(ReadGraphValue(TryEachRead(read.function)), [value], split, worker=worker, name=read.name)

    def _kept_data(self, split: Split) -> Handle | None:
        read, runtime = self.read, self.runtime
        if read.kept_for is None or split.num_rows is None or not self._is_lasting:
            return None
        splits = read.splits()
        if not isinstance(splits, Sequence) or len(splits) > 1:
            return None
        if (split.num_bytes or 0) > runtime.most_bytes:
            return None
        return runtime.caller.kept_handle(read, split, runtime.next_worker())

    def _kept_block(self, handle: Handle, split: Split) -> BlockRef:
        # All repetitions share one reference. Each counts as a request, so that a tiny dataset is not repeated
        # thousands of times before the first element is handed out.
        runtime = self.runtime
        runtime.num_asked += 1
        ref = runtime.kept.get(self.path)
        if ref is None or ref.handle is not handle:
            ref = BlockRef(handle, split.num_rows or 0, split.num_bytes or 0, is_kept=True)
            runtime.kept[self.path] = ref
        return ref

    def _worker(self, split: Split) -> str | None:
        # Return a worker that has the data, or else the next in turn. The choice does not affect the elements or their
        # order.
        if not self._has_asked_locations:
            self._locations, self._has_asked_locations = self.runtime.caller.split_locations(self.read), True
        holders = self._locations(split) if self._locations is not None else ()
        if not holders:
            return self.runtime.next_worker()
        worker = min(holders, key=self._num_assigned.__getitem__)
        self._num_assigned[worker] += 1
        return worker

    def _current(self) -> Split:
        if self._splits is None:
            self._splits = self._splits_from(self.number)
        if self._split is None:
            self._split = next(self._splits, None)
        if self._split is None:
            raise Exhausted
        return self._split

    def _splits_from(self, number: int) -> Iterator[Split]:
        by_epoch = self.read.splits_of
        return _splits_after(number, self.read.splits() if by_epoch is None else by_epoch(self.epoch))

    def _stop(self, split: Split) -> int | None:
        # Return the row of the split at which to stop reading now; None to read the split whole.
        if self.read.divide is None or not self.runtime.caller.divides or not split.num_rows:
            return None
        row_bytes = (split.num_bytes or 0) / split.num_rows * self._sizes.growth
        num_rows = max(min(self.num_rows, int(in_bytes("split-bytes") / max(row_bytes, 1))), 1)
        self._sizes.num_read += num_rows
        if self.is_plain or self.runtime.caller.reports_freely:
            self.num_rows = 2 * num_rows
        elif self._sizes.are_known:
            # Parts grow with the progress of the pass, so that those of slow functions hold up neither the first
            # elements nor the next pass.
            self.num_rows = max(num_rows, min(2 * num_rows, max(_FEW_ROWS, self._sizes.num_read // 4)))
        if not self.runtime.caller.reports_freely:
            # Each part costs tasks, so that repetitions start with parts as large as this pass has reached.
            self._sizes.num_rows = self.num_rows
        return min(self.offset + num_rows, split.num_rows)


def _splits_after(number: int, splits: Any) -> Iterator[Split]:
    # A function rather than a method: a generator that refers to its cursor would form a cycle, so that a dropped
    # cursor and its blocks would stay until the garbage collector runs.
    for place in itertools.count(number):
        try:
            split = splits[place]
        except IndexError:
            return
        yield split


class ComputeCursor(BlockCursor):
    """A cursor over blocks computed from blocks, or from batches gathered for the purpose."""

    goes_on = True

    def __init__(self, runtime: StreamRuntime, compute: Compute, path: Path, epoch: Epoch, source: Cursor) -> None:
        super().__init__(runtime, compute.factor, path, epoch)
        self.compute = compute
        self.in_order = compute.in_order
        self.source = source
        self.waiting = RunQueue()

    def _ask(self) -> BlockRef:
        is_recorded = not self._is_known
        cut = self._next_cut() if is_recorded else None
        run = next_bundle(self.runtime, self.waiting, self.source, cut, is_full=self.compute.is_full)
        if is_recorded:
            self._note_cut(len(run))
        runtime, compute = self.runtime, self.compute
        worker = runtime.near(run)
        function = same if compute.function is same else TryEach(compute.function, compute.factor)
        handle = runtime.ask(run, worker=worker, name=compute.name, function=function, unstacked=compute.unstacked)
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

    goes_on = True

    def __init__(self, runtime: StreamRuntime, chain: Chain, path: Path, epoch: Epoch, source: Cursor) -> None:
        super().__init__(runtime, chain.factor, path, epoch)
        self.chain = chain
        self.source = source
        self.waiting = RunQueue()
        self._carried: Handle | None = None

    def _ask(self) -> BlockRef:
        number, is_new = self.num_cut, self.num_cut >= len(self.log.cuts)
        run = next_bundle(self.runtime, self.waiting, self.source, self._next_cut())
        self._note_cut(len(run))
        worker, caller = self.runtime.near(run), self.runtime.caller
        known = self.log.carried.get(number)
        if isinstance(known, Known):
            self._carried = self._handle_of(known.value, worker)
        elif self._carried is None:
            self._carried = self._handle_of(self.chain.initial, worker)
        elif is_new:
            self.log.note_carried(number, self._carried)
        both = self._both(run, self._carried, worker)
        self._carried = caller.call(GetItem(1), [both], worker=worker, name=f"{self.chain.name}-carried")
        return self._rows(run, both, worker)

    def _handle_of(self, carried: Any, worker: str | None) -> Handle:
        return self.runtime.caller.source(Constant(carried), worker=worker, name=f"{self.chain.name}-initial")

    def _both(self, run: Any, carried: Handle, worker: str | None) -> Handle:
        runtime, chain = self.runtime, self.chain
        # Passing a function, even the identity, makes gathered rows record their origin for error messages.
        rows = runtime.ask(run, worker=worker, name="gather", function=same)
        function = CallWithCarry(TryEachCarried(chain.function))
        return runtime.caller.call(function, [rows, carried], worker=worker, name=chain.name)

    def _rows(self, run: Any, both: Handle, worker: str | None) -> BlockRef:
        handle = self.runtime.caller.call(GetItem(0), [both], worker=worker, name=f"{self.chain.name}-rows")
        return self._refer(handle, len(run), int(run_bytes(run)), worker)


def next_bundle(
    runtime: StreamRuntime, waiting: RunQueue, source: Cursor, cut: int | None = None, *, is_full: bool = False
) -> Any:
    """Return as many elements of a source as one call should take; fewer may come unless ``is_full``.

    If ``cut`` is given, exactly so many come.
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
    return waiting.pop(bundle_size(runtime.caller, waiting.runs[0], runtime.most_bytes))


@dataclass(frozen=True)
class Constant:
    """A call that returns a constant."""

    value: Any

    def __call__(self) -> Any:
        return self.value
