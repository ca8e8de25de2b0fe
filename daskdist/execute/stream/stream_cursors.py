"""Cursors over elements that come one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate, takewhile
from time import perf_counter
from typing import Any

from daskdist.core.block import Rows
from daskdist.core.failing.failed_element import FAILED
from daskdist.core.primitive import Epoch, Exhausted, NotReady, RowReader, Stream
from daskdist.core.selection.block_ref import BlockRef
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Handle
from daskdist.execute.resume.deferring import Deferred
from daskdist.execute.resume.recorded_answers import AnswerLog, Path, PathKey
from daskdist.execute.stream.calls import PulledAgain, pulled
from daskdist.execute.stream.cursors import BlockCursor
from daskdist.execute.stream.element_puller import MOST_PULLED, ElementPuller
from daskdist.execute.stream.element_reader import MOST_ROWS, PATIENCE_S, ElementReader
from daskdist.execute.stream.runtime import StreamRuntime
from daskdist.watched_calls import watched

# The number of elements to skip at a time when a stream has to run again.
_SKIPPED_AT_ONCE = 1024
# Blocks of a stream on a worker that are requested at a time: one is made while the one before is used.
_BLOCKS_AHEAD = 2
# Once this many elements have come without delay, generators of one operation are pulled ahead of use. Their first
# block then has that number of elements divided by ``_BRIEF_SHARE``, at most ``_MOST_AT_FIRST``.
_ENOUGH_BRIEF = 256
_BRIEF_SHARE = 8
_MOST_AT_FIRST = 64


class StreamCursor(BlockCursor):
    """A cursor over a stream that runs in this process; each block has the elements available when it was requested.

    Its log has the number of elements so far, and `FAILED` if the last of them failed, after which there are no others;
    and whether it is at its end otherwise. A stream that is opened again runs from its start as soon as one of those
    elements or a later one is needed.
    """

    def __init__(self, runtime: StreamRuntime, stream: Stream, path: Path, epoch: Epoch) -> None:
        super().__init__(runtime, None, path, epoch, stream.name)
        self.stream = stream
        # The number of the next element, of those that were recorded before, and of those that the reader has given.
        self._number = self._num_read = 0
        self._num_recorded = self.log.rows[0] if self.log.rows else 0
        self._has_failed = FAILED in self.log.rows
        self._reader: RowReader | None = None
        # The path without keys: streams that one operation opened for its elements share it.
        self._place = tuple([step for step in path if not isinstance(step, PathKey)])
        self._is_nested = len(self._place) < len(path)
        # Recorded blocks that were not read again, each with its first element and its number of elements.
        self._unread: list[tuple[weakref.ref[Deferred], int, int]] = []

    def _ask(self) -> BlockRef:
        if self._number < self._num_recorded:
            return self._recorded_block()
        if self.log.cuts:
            raise Exhausted
        try:
            return self._ask_here() if self._is_nested else self._ask_of_reader()
        except Exhausted:
            if FAILED not in self.log.rows:
                self.log.cuts.append(self._number)
            raise

    def _ask_of_reader(self) -> BlockRef:
        # Pull as many elements at a time, and ahead of use, as were returned before: the first are pulled one by one.
        runtime, num_taken = self.runtime, self._number - self._num_recorded
        num_ahead = sum(ref.num_rows for ref in self.pending)
        num_rows = min(max(num_taken - num_ahead, 1), MOST_ROWS)
        if self.pending and num_ahead + num_rows > num_taken - num_ahead:
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
        num_rows = max(self._number - self._num_recorded, min(num_brief // _BRIEF_SHARE, _MOST_AT_FIRST), 1)
        start = perf_counter()
        block = self._block(lambda: self._elements.take(min(num_rows, MOST_PULLED), wait=True))
        runtime.num_brief[place] = num_brief + block.num_rows if perf_counter() - start < PATIENCE_S else 0
        return block

    @property
    def _elements(self) -> RowReader:
        if self._reader is None and self.stream.read is not None:
            self._reader = self.stream.read(self.epoch, self.stream.in_order)
            self.runtime.note_reader(self._reader)
        if self._reader is None:
            runtime = self.runtime
            limit_bytes = min(runtime.caller.bundle_bytes, runtime.most_bytes)
            start = partial(self.stream.start, self.epoch)
            if self._is_nested:
                self._reader = ElementPuller(start, limit_bytes)
                return self._reader
            self._reader = ElementReader(start, limit_bytes, is_ahead=runtime.caller.num_ahead > 0)
        return self._reader

    def _block(self, take: Callable[[], Rows]) -> BlockRef:
        runtime, worker = self.runtime, self.runtime.next_worker()
        self._read_again()
        self._skip_to(self._number)
        handle, block = self._handle_of(take, worker)
        self._number += len(block)
        self.log.rows[:] = [self._number, FAILED] if self._fails_in(block) else [self._number]
        return runtime.refer(handle, len(block), block.nbytes, worker, runtime.reads)

    def _handle_of(self, take: Callable[[], Rows], worker: str | None) -> tuple[Handle, Rows]:
        taken: list[Rows] = []

        def rows() -> Rows:
            taken.append(watched(self.stream.name, take))
            return taken[0]

        handle = self.runtime.caller.stream(rows, worker=worker, name=self.stream.name)
        self._num_read += len(taken[0])
        self.runtime.note_skipped(taken[0].skipped)
        return handle, taken[0]

    def _recorded_block(self) -> BlockRef:
        first, num_rows = self._number, min(self._num_recorded - self._number, MOST_PULLED)
        self._number += num_rows
        handle = Deferred((), lambda needs: self._read_again())
        self._unread.append((weakref.ref(handle), first, num_rows))
        return self.runtime.refer(handle, num_rows, 0, None, self.runtime.reads)

    def _read_again(self) -> None:
        # Read all recorded blocks that are still needed, in their order. If that fails, it fails for each of them.
        while self._unread:
            handle_of, first, num_rows = self._unread[0]
            deferred = handle_of()
            if deferred is not None:
                self._skip_to(first)
                take = partial(self._elements.take_exactly, num_rows)
                handle, block = self._handle_of(take, self.runtime.next_worker())
                self._check_again(block)
                if len(block) != num_rows:
                    raise self._is_shorter()
                deferred.become(handle)
            del self._unread[0]

    def _skip_to(self, number: int) -> None:
        try:
            while self._num_read < number:
                rows = self._elements.take_exactly(min(number - self._num_read, _SKIPPED_AT_ONCE))
                self._num_read += len(rows)
                self._check_again(rows)
        except Exhausted:
            raise self._is_shorter() from None

    def _fails_in(self, rows: Rows) -> bool:
        # Return whether the last element failed, so that there are no others.
        return self.stream.read is None and rows.has_failed

    def _check_again(self, rows: Rows) -> None:
        # Raise an error if an element fails that did not fail before the position: others would follow it.
        if self._fails_in(rows) and (self._num_read < self._num_recorded or not self._has_failed):
            raise ArgumentError(
                f"load_state_dict: element {self._num_read - 1} of {self.stream.name} fails, which did not fail before "
                "the position was taken"
            ) from rows.failed_at(len(rows) - 1).error  # type: ignore[union-attr]

    def _is_shorter(self) -> Exception:
        return ArgumentError(
            f"load_state_dict: {self.stream.name} gave {self._num_recorded} elements before the position was taken and "
            f"{self._num_read} now; it must give the same elements again"
        )


class WorkerStreamCursor(BlockCursor):
    """A cursor over a stream that runs on a worker, where its blocks are pulled one after the other.

    A block without rows ends the stream. Its log has for each counted block the number of rows, also where some failed:
    as many are pulled if the stream is opened again.
    """

    def __init__(self, runtime: StreamRuntime, stream: Stream, path: Path, epoch: Epoch) -> None:
        super().__init__(runtime, None, path, epoch, stream.name)
        self.stream = stream
        self.row_bytes = 0.0
        # The number of elements of the blocks that were counted so far.
        self.num_taken = 0
        self._worker = runtime.next_worker()
        self._latest: Handle | None = None
        # The handle of the pass.
        self._pass: Handle | None = None
        if stream.position is not None:
            runtime.worker_streams.add(self)

    def _ask(self) -> BlockRef:
        if len(self.pending) >= _BLOCKS_AHEAD:
            raise NotReady
        caller, stream = self.runtime.caller, self.stream
        if self._pass is None:
            begin: Any = stream.begin
            name, worker = f"{stream.name}-begin", self._worker
            where = self.epoch, self.log.values[0] if self.log.values else None
            self._pass = caller.call(begin, [stream.held], *where, worker=worker, is_pinned=True, name=name)
        num_rows = max(min(self.num_taken, int(caller.bundle_bytes // max(self.row_bytes, 1))), 1)
        is_recorded = self.num_cut < len(self.log.rows)
        # Elements before the position are not pulled again if the pass on the worker has a position, too.
        follows = self._latest is not None and not (is_recorded and self.log.values)
        handles = [self._pass, self._latest] if follows else [self._pass]
        if is_recorded:
            # A block without rows was pulled at the end.
            num_rows = self.log.cuts[self.num_cut] or num_rows
        self._note_cut(num_rows)
        number = self.num_cut - 1
        function: Any = _pulled_again(self.log, number) if is_recorded else pulled
        # The call also has the first row that a position still needs.
        first = () if is_recorded or stream.position is None else (self._first_needed(self.runtime.num_passed),)
        args = num_rows, *first
        again = partial(_call_again, self.log, number, is_repeatable=stream.is_repeatable)
        handle = caller.call(
            function, handles, *args, worker=self._worker, is_pinned=True, again=again, name=stream.name
        )
        self._latest = handle
        return self._refer(handle, None, int(num_rows * self.row_bytes), self._worker)

    def _first_needed(self, num_passed: int) -> int:
        # Return the number of the first element of the first block that was not handed out as a whole.
        firsts = accumulate(self.log.cuts[: self.num_counted], initial=0)
        return max(takewhile(lambda first: first <= (0 if self.path else num_passed), firsts))

    def note_position(self, num_passed: int) -> None:
        """Record the position of the pass on the worker after so many elements of the whole stream."""
        if self._pass is None or not self.num_counted:
            return
        caller, name, first = self.runtime.caller, f"{self.stream.name}-position", self._first_needed(num_passed)
        position: Any = self.stream.position
        handle = caller.call(position, [self._pass], first, worker=self._worker, is_pinned=True, name=name)
        self.log.values[:] = [caller.result(handle)]

    def _count(self, ref: BlockRef) -> None:
        number = self.num_counted
        try:
            super()._count(ref)
        except NotReady:
            raise
        except Exception:
            # The pass on the worker has ended.
            self.is_over = True
            self.pending.clear()
            raise
        self.log.cuts[number] = ref.num_rows
        self.num_taken += ref.num_rows
        self.row_bytes = ref.row_bytes

    def _came_empty(self) -> None:
        self.is_over = True
        self.pending.clear()


def _pulled_again(log: AnswerLog, number: int) -> PulledAgain:
    # The call that pulls a recorded block again.
    return PulledAgain(sum(log.cuts[:number]) if log.values else None)


def _call_again(log: AnswerLog, number: int, *, is_repeatable: bool) -> tuple[Callable[..., Any], int] | None:
    # The call that pulls a block of another pass like its own. Each may have other numbers of rows ready, and so this
    # block has to be counted.
    if not is_repeatable or number >= len(log.rows):
        return None
    return _pulled_again(log, number), log.rows[number]
