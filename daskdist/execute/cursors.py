"""Places in the streams of primitives whose elements calls make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskdist.config import in_bytes
from daskdist.core.block import Rows
from daskdist.core.primitive import Chain, Compute, Cursor, Epoch, Exhausted, Fact, Noted, NotReady, Read, Split, Stream
from daskdist.core.selection import BlockRef, Run, RunQueue, Selection
from daskdist.execute.callers import Handle
from daskdist.execute.gather import bundle_size, run_bytes

if TYPE_CHECKING:
    from daskdist.execute.interpreter import Interpreter


class BlockCursor:
    """Blocks that calls make, in the order of the calls, some of them asked for ahead.

    Subclasses ask for the next one; a block's rows come out as one contiguous run.
    """

    # Whether blocks come in the order they were asked for.
    in_order = True

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
            ref = self._first()
            if ref.num_rows < 0:
                self._count(ref)
            self.pending.remove(ref)
            if ref.num_rows:
                return Selection.whole(ref)
            self._came_empty()

    def _first(self) -> BlockRef:
        if not self.in_order:
            for ref in self.pending:
                if self.interpreter.caller.is_done(ref.handle):
                    return ref
        return self.pending[0]

    def _came_empty(self) -> None:
        # One block without rows says nothing of the next.
        pass

    def _count(self, ref: BlockRef) -> None:
        interpreter = self.interpreter
        report = interpreter.caller.report(ref.handle, wait=interpreter.waits)
        if report is None:
            raise NotReady
        ref.num_rows = report.num_rows
        self._resize(ref, report.nbytes)
        interpreter.note_skipped(report.skipped)

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

    def __init__(self, interpreter: Interpreter, read: Read, epoch: Epoch) -> None:
        super().__init__(interpreter, read.factor)
        self.in_order = read.in_order
        self.read = read
        self.epoch = epoch
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
            by_epoch = self.read.splits_of
            self._splits = iter(self.read.splits() if by_epoch is None else by_epoch(self.epoch))
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


class StreamCursor(BlockCursor):
    """The blocks of a stream: each is pulled after the one before, and one without rows is the end."""

    def __init__(self, interpreter: Interpreter, stream: Stream) -> None:
        super().__init__(interpreter, None)
        self.stream = stream
        self._num_rows = 1
        self._latest: BlockRef | None = None
        self._pull: Callable[[int], Rows] | None = None
        self._row_bytes = 0.0

    def _ask(self) -> BlockRef:
        interpreter = self.interpreter
        if self._latest is not None and self._latest.num_rows > 0:
            self._row_bytes = self._latest.row_bytes
        if self._pull is None:
            self._pull = self.stream.start()
        worker = interpreter.next_worker()
        num_rows = max(min(self._num_rows, int(interpreter.caller.bundle_bytes // max(self._row_bytes, 1))), 1)
        self._num_rows = 2 * num_rows
        before = None if self._latest is None else self._latest.handle
        handle = interpreter.caller.stream(self._pull, num_rows, before, on=worker, name=self.stream.name)
        self._latest = self._refer(handle, None, int(num_rows * self._row_bytes), worker)
        return self._latest

    def _came_empty(self) -> None:
        self.is_over = True
        self.pending.clear()


class ComputeCursor(BlockCursor):
    """Blocks made of blocks, or of batches gathered for the purpose."""

    def __init__(self, interpreter: Interpreter, compute: Compute, source: Cursor) -> None:
        super().__init__(interpreter, compute.factor)
        self.compute = compute
        self.in_order = compute.in_order
        self.source = source
        self.waiting = RunQueue()

    def _ask(self) -> BlockRef:
        run = next_bundle(self.interpreter, self.waiting, self.source)
        interpreter, compute = self.interpreter, self.compute
        worker = interpreter.near(run)
        handle = interpreter.ask(run, on=worker, name=compute.name, function=compute.function, apart=compute.apart)
        return self._refer(handle, len(run), int(run_bytes(run)), worker)


class ChainCursor(BlockCursor):
    """Blocks made of blocks, each with what was carried on from the one before."""

    def __init__(self, interpreter: Interpreter, chain: Chain, source: Cursor) -> None:
        super().__init__(interpreter, chain.factor)
        self.chain = chain
        self.source = source
        self.waiting = RunQueue()
        self.carried: Handle | None = None

    def _ask(self) -> BlockRef:
        run = next_bundle(self.interpreter, self.waiting, self.source)
        interpreter, chain, caller = self.interpreter, self.chain, self.interpreter.caller
        worker = interpreter.near(run)
        if self.carried is None:
            self.carried = caller.source(Given(chain.initial), on=worker, name=f"{chain.name}-initial")
        rows = interpreter.ask(run, on=worker, name="gather")
        both = caller.call(OnCarried(chain.function), [rows, self.carried], on=worker, name=chain.name)
        self.carried = caller.call(Part(1), [both], on=worker, name=f"{chain.name}-carried")
        handle = caller.call(Part(0), [both], on=worker, name=f"{chain.name}-rows")
        return self._refer(handle, len(run), int(run_bytes(run)), worker)


class FactCursor:
    """Elements and a fact of them, asked for ahead where the elements lie."""

    def __init__(self, interpreter: Interpreter, fact: Fact, source: Cursor) -> None:
        self.interpreter = interpreter
        self.fact = fact
        self.source = source
        self.pending: deque[tuple[Run, Handle]] = deque()
        self.is_over = False

    def pull(self) -> Noted:
        self._ask_ahead()
        if not self.pending:
            raise Exhausted
        run, handle = self.pending[0]
        caller = self.interpreter.caller
        if not self.interpreter.waits and not caller.is_done(handle):
            raise NotReady
        fact = caller.result(handle)
        self.pending.popleft()
        if self.fact.makes_rows:
            (ref,) = run.blocks  # type: ignore[union-attr]
            ref.num_rows, skipped, fact = fact
            self.interpreter.note_skipped(skipped)
            run = Selection.whole(ref)
        return Noted(run, fact)

    def _ask_ahead(self) -> None:
        interpreter = self.interpreter
        while not self.is_over and len(self.pending) <= interpreter.caller.num_ahead:
            if self.pending and not interpreter.reads.has_room():
                return
            try:
                run: Run = self.source.pull()
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self.pending:
                    raise
                return
            else:
                self.pending.append(self._ask(run))

    def _ask(self, run: Run) -> tuple[Run, Handle]:
        interpreter, fact = self.interpreter, self.fact
        worker = interpreter.near(run)
        handle = interpreter.ask(run, on=worker, name=fact.name, function=fact.function)
        if not fact.makes_rows:
            return run, handle
        call = interpreter.caller.call
        rows = call(Part(0), [handle], on=worker, name=f"{fact.name}-rows")
        ref = interpreter.refer(rows, -1, int(run_bytes(run)), worker, interpreter.reads)
        return Selection((ref,), range(0)), call(with_report, [handle], on=worker, name=f"{fact.name}-fact")


def next_bundle(interpreter: Interpreter, waiting: RunQueue, source: Cursor) -> Any:
    """As many elements of a source as one call should take."""
    waiting.fill(source.pull, 1)
    return waiting.pop(bundle_size(interpreter.caller, waiting.runs[0]))


@dataclass(frozen=True)
class OnValue:
    """A reader of values of a Dask graph, in the form of a call on handles."""

    function: Callable[..., Any]

    def __call__(self, values: Sequence[Any], split: Split) -> Any:
        return self.function(split, values[0])


@dataclass(frozen=True)
class OnCarried:
    """A function of rows and what is carried on, in the form of a call on handles."""

    function: Callable[[Rows, Any], Any]

    def __call__(self, values: Sequence[Any]) -> Any:
        return self.function(*values)


@dataclass(frozen=True)
class Part:
    """One part of a result."""

    number: int

    def __call__(self, values: Sequence[Any]) -> Any:
        return values[0][self.number]


def with_report(values: Sequence[Any]) -> tuple[int, tuple[str, ...], Any]:
    """How many rows a fact is of, what was left out on the way to them, and the fact."""
    rows, fact = values[0]
    return len(rows), rows.skipped, fact


@dataclass(frozen=True)
class Given:
    """A value as what a call gives."""

    value: Any

    def __call__(self) -> Any:
        return self.value
