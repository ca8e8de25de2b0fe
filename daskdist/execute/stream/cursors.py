"""Cursors over the blocks of primitives whose elements are made by calls."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from daskdist.config import in_bytes
from daskdist.core.block import Rows
from daskdist.core.failing.failed_elements import FailedElement, TryEach, TryEachCarried, TryEachRead
from daskdist.core.primitive import (
    Chain,
    Compute,
    Cursor,
    Epoch,
    Exhausted,
    NotReady,
    Read,
    RowReader,
    Split,
    Stream,
    payload_itself,
    same,
    value_itself,
)
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.execute.caller import Handle, SplitLocations
from daskdist.execute.stream.calls import CallWithCarry, GetItem, ReadGraphValue, ReadKeptSplit, pulled
from daskdist.execute.stream.element_puller import MOST_PULLED, ElementPuller
from daskdist.execute.stream.element_reader import MOST_ROWS, PATIENCE_S, ElementReader
from daskdist.execute.stream.gather import bundle_size, run_bytes
from daskdist.execute.stream.lineage import Lineage, Path, PathKey, with_lineages
from daskdist.execute.stream.runtime import Sizes, StreamRuntime

# The number of elements to skip at a time when a stream has to run again.
_SKIPPED_AT_ONCE = 1024
# Blocks of a stream on a worker that are requested at a time: one is made while the one before is used.
_BLOCKS_AHEAD = 2
# Generators of one operation are pulled although nobody waits once this many elements have come without delay. Their
# first block then has that number of elements divided by ``_BRIEF_SHARE``, at most ``_MOST_AT_FIRST``.
_ENOUGH_BRIEF = 256
_BRIEF_SHARE = 8
_MOST_AT_FIRST = 64


class BlockCursor:
    """A cursor over blocks that calls make, in the order of the calls; some are requested ahead.

    Subclasses request the next block. The rows of a block are handed out as one contiguous run.
    """

    # True if blocks are handed out in the order in which they were requested.
    in_order = True
    # True if the cursor continues after its input raised an error; a source ends there.
    goes_on = False

    def __init__(self, runtime: StreamRuntime, factor: int | None, path: Path, epoch: Epoch) -> None:
        self.runtime = runtime
        self.factor = factor
        self.path = path
        self.epoch = epoch
        self.pending: deque[BlockRef] = deque()
        self.is_over = False
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

    def _first(self) -> BlockRef:
        if not self.in_order:
            if self.runtime.waits:
                self.runtime.caller.wait_for_one([ref.handle for ref in self.pending])
            for ref in self.pending:
                if self.runtime.caller.is_done(ref.handle):
                    return ref
        return self.pending[0]

    def _came_empty(self) -> None:
        # An empty block does not end the stream: the next one may have rows.
        pass

    def _count(self, ref: BlockRef) -> None:
        runtime = self.runtime
        report = runtime.caller.report(ref.handle, wait=runtime.waits)
        if report is None:
            raise NotReady
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
                self.pending.append(ref)
                self._learn(ref)

    def _learn(self, latest: BlockRef) -> None:
        # Learn from one block at a time; if a report costs a call, only from the first one.
        if latest.is_kept:
            return
        caller, sizes = self.runtime.caller, self._sizes
        if sizes.sample is None and (caller.reports_freely or not sizes.are_known):
            sizes.sample = weakref.ref(latest), latest.nbytes
        if sizes.sample is not None:
            ref, expected = sizes.sample[0](), sizes.sample[1]
            if ref is None:
                sizes.sample = None
            elif (report := caller.report(ref.handle, wait=False)) is not None:
                self._resize(ref, report.nbytes)
                sizes.growth *= max(report.nbytes, 1) / max(expected, 1)
                sizes.sample, sizes.are_known = None, True

    def _refer(
        self, handle: Any, num_rows: int | None, num_bytes: int, worker: str | None, extent: Any = None, run: Any = None
    ) -> BlockRef:
        runtime = self.runtime
        num_rows = -1 if num_rows is None or self.factor is None else num_rows * self.factor
        lineage = Lineage(self.path, self.epoch, extent, None if run is None else with_lineages(run))
        return runtime.refer(handle, num_rows, int(num_bytes * self._sizes.growth), worker, runtime.reads, lineage)

    def _ask(self) -> BlockRef:
        raise NotImplementedError

    def remake(self, extent: Any, run: Any) -> BlockRef:
        """Request the block of a lineage again."""
        raise NotImplementedError


class ReadCursor(BlockCursor):
    """A cursor over the blocks of a source's splits."""

    def __init__(self, runtime: StreamRuntime, read: Read, path: Path, epoch: Epoch) -> None:
        super().__init__(runtime, read.factor, path, epoch)
        self.in_order = read.in_order
        self.read = read
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
        start, stop = self.offset, self._stop(split)
        ref = self._part(split, self.number, start, stop)
        if stop is None or stop == split.num_rows:
            self.number, self.offset, self._split = self.number + 1, 0, None
        else:
            self.offset = stop
        return ref

    def remake(self, extent: Any, run: Any) -> BlockRef:
        number, start, stop = extent
        return self._part(next(self._splits_from(number)), number, start, stop)

    def _part(self, split: Split, number: int, start: int, stop: int | None) -> BlockRef:
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
        ref = self._refer(handle, part.num_rows, num_bytes, worker, (number, start, stop))
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
            lineage = Lineage(self.path, self.epoch, (0, 0, split.num_rows), None)
            ref = BlockRef(handle, split.num_rows or 0, split.num_bytes or 0, None, None, lineage, is_kept=True)
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
        self.num_rows = 2 * num_rows
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


class StreamCursor(BlockCursor):
    """A cursor over a stream that runs in this process; each block has the elements available when it was requested."""

    def __init__(self, runtime: StreamRuntime, stream: Stream, path: Path, epoch: Epoch) -> None:
        super().__init__(runtime, None, path, epoch)
        self.stream = stream
        # The number of the next element, and the number taken by this cursor, which may have resumed from a position.
        self._number = self._num_taken = 0
        self._reader: RowReader | None = None
        # The path without keys: streams that one operation opened for its elements share it.
        self._place = tuple([step for step in path if not isinstance(step, PathKey)])
        self._is_nested = len(self._place) < len(path)

    def _ask(self) -> BlockRef:
        runtime = self.runtime
        if self._is_nested:
            return self._ask_here()
        # Take as many elements at a time, and as many ahead, as were handed out before: the first come one by one.
        num_ahead = sum(ref.num_rows for ref in self.pending)
        num_rows = min(max(self._num_taken - num_ahead, 1), MOST_ROWS)
        if self.pending and num_ahead + num_rows > self._num_taken - num_ahead:
            raise NotReady
        wait = runtime.waits and not self.pending
        return self._block(lambda: self._elements.take(num_rows, wait=wait))

    def _ask_here(self) -> BlockRef:
        # There may be many nested streams, each of few elements: they are pulled in this thread.
        runtime, place = self.runtime, self._place
        num_brief = runtime.num_brief[place]
        is_brief = runtime.is_brief and num_brief >= _ENOUGH_BRIEF
        if self.pending or not (runtime.waits or is_brief):
            raise NotReady
        num_rows = max(self._num_taken, min(num_brief // _BRIEF_SHARE, _MOST_AT_FIRST), 1)
        start = perf_counter()
        block = self._block(lambda: self._elements.take(min(num_rows, MOST_PULLED), wait=True))
        runtime.num_brief[place] = num_brief + block.num_rows if perf_counter() - start < PATIENCE_S else 0
        return block

    @property
    def _elements(self) -> RowReader:
        if self._reader is None and self.stream.read is not None:
            self._reader = self.stream.read(self.epoch)
            self.runtime.note_reader(self._reader)
        if self._reader is None:
            runtime = self.runtime
            limit_bytes = min(runtime.caller.bundle_bytes, runtime.most_bytes)
            if self._is_nested:
                self._reader = ElementPuller(self.stream.start, limit_bytes)
                return self._reader
            self._reader = ElementReader(self.stream.start, limit_bytes, is_ahead=runtime.caller.num_ahead > 0)
        return self._reader

    def _block(self, take: Callable[[], Rows]) -> BlockRef:
        runtime = self.runtime
        worker, taken = runtime.next_worker(), []

        def rows() -> Rows:
            taken.append(take())
            return taken[0]

        handle = runtime.caller.stream(rows, worker=worker, name=self.stream.name)
        (block,) = taken
        first, self._number = self._number, self._number + len(block)
        self._num_taken += len(block)
        runtime.note_skipped(block.skipped)
        lineage = Lineage(self.path, self.epoch, (first, len(block)), None)
        return runtime.refer(handle, len(block), block.nbytes, worker, runtime.reads, lineage)

    def remake(self, extent: Any, run: Any) -> BlockRef:
        # The stream runs again from its start; elements before the block are pulled and dropped.
        start, num_rows = extent
        self._skip_to(start)
        return self._block(lambda: self._elements.take_exactly(num_rows))

    def _skip_to(self, number: int) -> None:
        with suppress(Exhausted):
            while self._number < number:
                self._number += len(self._elements.take_exactly(min(number - self._number, _SKIPPED_AT_ONCE)))

    def saved(self) -> dict[str, Any]:
        """Return the state besides the fields that are data: the number of the next element."""
        return {"number": self._number}

    def resumed(self, saved: dict[str, Any]) -> None:
        """Skip to the saved element."""
        self._skip_to(saved["number"])


class WorkerStreamCursor(BlockCursor):
    """A cursor over a stream that runs on a worker, where its blocks are pulled one after the other.

    A block without rows ends the stream.
    """

    def __init__(self, runtime: StreamRuntime, stream: Stream, path: Path, epoch: Epoch) -> None:
        super().__init__(runtime, None, path, epoch)
        self.stream = stream
        self.row_bytes = 0.0
        # The number of elements of the blocks that were counted so far.
        self.num_taken = 0
        self._worker = runtime.next_worker()
        self._latest: Handle | None = None
        # The handle of the pass.
        self._pass: Handle | None = None

    def _ask(self) -> BlockRef:
        if len(self.pending) >= _BLOCKS_AHEAD:
            raise NotReady
        caller, stream = self.runtime.caller, self.stream
        if self._pass is None:
            begin: Any = stream.begin
            name, worker = f"{stream.name}-begin", self._worker
            self._pass = caller.call(begin, [stream.held], self.epoch, worker=worker, is_pinned=True, name=name)
        num_rows = max(min(self.num_taken, int(caller.bundle_bytes // max(self.row_bytes, 1))), 1)
        handles = [self._pass] if self._latest is None else [self._pass, self._latest]
        handle = caller.call(pulled, handles, num_rows, worker=self._worker, is_pinned=True, name=stream.name)
        self._latest = handle
        return self._refer(handle, None, int(num_rows * self.row_bytes), self._worker)

    def _count(self, ref: BlockRef) -> None:
        super()._count(ref)
        self.num_taken += ref.num_rows
        self.row_bytes = ref.row_bytes

    def _came_empty(self) -> None:
        self.is_over = True
        self.pending.clear()


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
        run = next_bundle(self.runtime, self.waiting, self.source, is_full=self.compute.is_full)
        return self.remake(None, run)

    def remake(self, extent: Any, run: Any) -> BlockRef:
        runtime, compute = self.runtime, self.compute
        worker = runtime.near(run)
        function = same if compute.function is same else TryEach(compute.function, compute.factor)
        handle = runtime.ask(run, worker=worker, name=compute.name, function=function, unstacked=compute.unstacked)
        return self._refer(handle, len(run), int(run_bytes(run)), worker, None, run)


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
        run = next_bundle(self.runtime, self.waiting, self.source)
        worker, caller = self.runtime.near(run), self.runtime.caller
        if self._carried is None:
            self._carried = self._handle_of(self.chain.initial, worker)
        before, both = self._carried, self._both(run, self._carried, worker)
        self._carried = caller.call(GetItem(1), [both], worker=worker, name=f"{self.chain.name}-carried")
        return self._rows(run, both, worker, CarryHandle(before))

    def remake(self, extent: Any, run: Any) -> BlockRef:
        worker = self.runtime.near(run)
        return self._rows(run, self._both(run, self._handle_of(extent, worker), worker), worker, extent)

    def _handle_of(self, carried: Any, worker: str | None) -> Handle:
        return self.runtime.caller.source(Constant(carried), worker=worker, name=f"{self.chain.name}-initial")

    def _both(self, run: Any, carried: Handle, worker: str | None) -> Handle:
        runtime, chain = self.runtime, self.chain
        # Passing a function, even the identity, makes gathered rows record their origin for error messages.
        rows = runtime.ask(run, worker=worker, name="gather", function=same)
        function = CallWithCarry(TryEachCarried(chain.function))
        return runtime.caller.call(function, [rows, carried], worker=worker, name=chain.name)

    def _rows(self, run: Any, both: Handle, worker: str | None, extent: Any) -> BlockRef:
        handle = self.runtime.caller.call(GetItem(0), [both], worker=worker, name=f"{self.chain.name}-rows")
        return self._refer(handle, len(run), int(run_bytes(run)), worker, extent, run)

    def saved(self) -> dict[str, Any]:
        """Return the state besides the fields that are data: the carried value."""
        return {"carried": None if self._carried is None else [self.runtime.caller.result(self._carried)]}

    def resumed(self, saved: dict[str, Any]) -> None:
        """Continue with the saved carried value."""
        if saved["carried"] is not None:
            self._carried = self._handle_of(saved["carried"][0], self.runtime.next_worker())


def next_bundle(runtime: StreamRuntime, waiting: RunQueue, source: Cursor, *, is_full: bool = False) -> Any:
    """Return as many elements of a source as one call should take; fewer may come unless ``is_full``."""
    waiting.fill(source.pull, 1)
    if is_full:
        with suppress(Exhausted):
            while sum(map(run_bytes, waiting.runs)) < runtime.caller.bundle_bytes:
                waiting.push(source.pull())
        if len(waiting.runs) > 1:
            return waiting.pop(len(waiting))
    return waiting.pop(bundle_size(runtime.caller, waiting.runs[0], runtime.most_bytes))


@dataclass(frozen=True)
class CarryHandle:
    """The handle of the value carried over to a block; a position replaces it by the value."""

    handle: Handle


@dataclass(frozen=True)
class Constant:
    """A call that returns a constant."""

    value: Any

    def __call__(self) -> Any:
        return self.value
