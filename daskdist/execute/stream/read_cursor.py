"""The cursor over the blocks of a source."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from daskdist.cached_property import cached_property
from daskdist.config import in_bytes
from daskdist.core.block import Rows
from daskdist.core.failing.composed import Composed, Stage, stages_of
from daskdist.core.failing.try_each import TryEach, TryEachRead
from daskdist.core.primitive import (
    Epoch,
    Exhausted,
    LazySplits,
    NotReady,
    Read,
    Split,
    payload_itself,
    value_itself,
)
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.rows import Selection
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Handle, SplitLocations, Timed
from daskdist.execute.resume.recorded_answers import AnswerLog, Path
from daskdist.execute.stream.calls import ReadGraphValue, ReadKeptSplit
from daskdist.execute.stream.cursors import BlockCursor
from daskdist.execute.stream.runtime import StreamRuntime

# On a cluster, the time of a call for part of a split whose functions may be slow.
_CALL_S: Final = 0.25
# The least last part of a split, as a part of the others.
_PART_OF_CALL: Final = 8
# The knowledge from earlier passes, by the function that may be slow: the number of rows of such a call, the number of
# rows whose time is known, and the number of rows of a split, if only reading shows it.
_LEARNED: Final[WeakKeyDictionary[Any, tuple[int, int, int]]] = WeakKeyDictionary()


class ReadCursor(BlockCursor):
    """A cursor over the blocks of a source's splits."""

    skips_unread = True

    def __init__(self, runtime: StreamRuntime, read: Read, path: Path, epoch: Epoch, *, is_paired: bool) -> None:
        super().__init__(runtime, read.factor, path, epoch, read.name, may_be_large=read.may_be_large)
        self.in_order = read.in_order
        self.read = read
        self.is_plain = read.function in (payload_itself, value_itself)
        # Whether its elements are joined with others by their numbers.
        self._is_paired = is_paired
        # The number of the next split, and the number of its rows that were requested already.
        self.number = 0
        self.offset = 0
        # Parts of data in this process are views, so small ones at the beginning would gain nothing.
        self.num_rows = sys.maxsize if self.is_plain and runtime.caller.reports_freely else self._sizes.num_rows
        self._splits: Iterator[Split] | None = None
        self._split: Split | None = None
        # All splits, if they are created when they are accessed and have the same number of rows.
        self._even_splits: LazySplits | None = None
        # The number of splits assigned to each of the workers that have the data of some.
        self._num_assigned: Counter[str] = Counter()
        # The handle of the data of the only split, if that is kept for all passes.
        self._kept: Handle | None = None
        # True if the time of calls decides for how many rows the next ones are.
        self._is_timed = read.costly is not None and runtime.caller.divides and not runtime.caller.reports_freely
        # The number of rows of the last split whose number only reading shows.
        self._last_rows = sys.maxsize
        if self._is_timed and read.costly in _LEARNED:
            self._sizes.num_rows, self._sizes.num_timed, self._last_rows = _LEARNED[read.costly]
        # The reader of blocks, and the computations that are made for some of their rows at a time.
        is_in_parts = read.costly is not None and read.divide is None and read.kept_for is None
        stages = stages_of(read.function, read.factor) if is_in_parts else (Stage(read.function, read.factor),)
        self._read_block, self._computations = stages[0].function, Composed(stages[1:])
        # The block of the current split, if it was read for computations on some of its rows at a time.
        self._block: BlockRef | None = None

    def _ask(self) -> BlockRef:
        split = self._current()
        if not (self.number or self.offset):
            self._kept = self._kept_data(split)
        if self._kept is not None and self.read.function in (payload_itself, value_itself):
            self.number, self._split = self.number + 1, None
            return self._kept_block(self._kept, split)
        start, is_recorded = self.offset, not self._is_known(split)
        cut = self._next_cut() if is_recorded else None
        stop, is_last = self._stop(split) if cut is None else _of_cut(cut)
        self.num_timed = stop - start if self._is_timed and stop is not None else 0
        if is_recorded:
            self._note_cut(-1 if stop is None else -1 - stop if is_last else stop)
        ref = self._part(split, start, stop)
        self._pass_to(split, None if is_last else stop)
        return ref

    def _check(self, log: AnswerLog) -> None:
        split_bytes = in_bytes("split-bytes")
        noted = log.value(0, lambda: split_bytes)
        if noted != split_bytes:
            raise ArgumentError(
                f"load_state_dict: the position counts splits of {self.read.name}, that the setting "
                f"daskdist.split-bytes made, which was {noted} and is {split_bytes} here; set it to {noted}"
            )

    def _note_time(self, num_rows: int, seconds: float | None) -> None:
        longer = 2 if seconds is None else _CALL_S / max(seconds, 1e-6)
        sizes = self._sizes
        sizes.num_timed, sizes.num_rows = num_rows, max(int(num_rows * longer), 1)
        _LEARNED[self.read.costly] = sizes.num_rows, sizes.num_timed, self._last_rows

    @property
    def _few_calls(self) -> int:
        # Make a few parts of a split; the rest may take one call.
        return self.runtime.num_workers if self._is_timed and self.offset else super()._few_calls

    def _is_known(self, split: Split) -> bool:
        # Return whether the cuts and the number of rows of a split are known without reading it, or do not matter.
        return self.in_order and self.factor is not None and split.num_rows is not None

    def _pass_to(self, split: Split, stop: int | None) -> None:
        if stop is None or stop == split.num_rows:
            self.number, self.offset, self._split, self._block = self.number + 1, 0, None, None
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
            if not self.offset and left and self._even_splits is not None:
                # Skip many splits at once.
                number = min((num_rows - total) // (left * factor), len(self._even_splits) - 1 - self.number)
                if number > 0:
                    total += number * left * factor
                    self.number, self._split = self.number + number, None
                    self._splits = _splits_after(self.number, self._even_splits)
                    continue
            if left * factor <= num_rows - total:
                total += left * factor
                self._pass_to(split, None)
                continue
            part = (num_rows - total) // factor
            if part and self._is_divisible:
                total += part * factor
                self.offset += part
            break
        return total

    def _skip_cut(self, split: Split, cut: int) -> bool:
        # Make one call at a time, as the next one may be of another split.
        if self._split is not split:
            return False
        self._pass_to(split, None if cut < 0 else cut)
        return True

    def _part(self, split: Split, start: int, stop: int | None) -> BlockRef:
        if stop is not None and self._computations.stages and (start, stop) != (0, split.num_rows):
            return self._computed_part(split, start, stop)
        read, runtime, worker = self.read, self.runtime, self._worker(split)
        is_divided = stop is not None and read.divide is not None and (start, stop) != (0, split.num_rows)
        divide = read.divide if is_divided else None
        part = split if divide is None or stop is None else divide(split, start, stop)
        num_bytes = in_bytes("split-bytes") if part.num_bytes is None else part.num_bytes
        # The first splits are read whole, since the size of their rows is not known.
        is_possible = read.is_of_rows and read.is_shuffled and read.factor == 1 and read.costly is None
        by_row = is_possible and runtime.caller.reads_by_row and self._sizes.are_known and self._is_known(split)
        if self._kept is None:
            handle = self._handle(part, worker, read.function, by_row=by_row)
        else:
            tried, without = self._tried(read.function), replace(split, payload=None)
            function = ReadKeptSplit(tried, divide)
            call = runtime.caller.call
            handle = call(function, [self._kept], without, start, stop, worker=worker, name=read.name)
        ref = self._refer(handle, part.num_rows, num_bytes, worker)
        # Rows that were not read yet take no memory that moving them could free.
        ref.is_kept = by_row or (read.kept_for is not None and read.function is value_itself)
        return ref

    def _handle(
        self,
        split: Split,
        worker: str | None,
        function: Callable[..., Any],
        *,
        by_row: bool = False,
    ) -> Handle:
        read, caller = self.read, self.runtime.caller
        if read.graph is None:
            tried = self._tried(function)
            return caller.source(tried, split, worker=worker, by_row=by_row, name=read.name)
        value = caller.upstream(read.graph, split.payload, worker=worker)
        if function is value_itself:
            return value
        tried = ReadGraphValue(self._tried(function))
        return caller.call(tried, [value], split, worker=worker, name=read.name)

    def _tried(self, function: Callable[..., Rows]) -> Callable[..., Rows]:
        tried = TryEachRead(function, self._is_paired)
        return Timed(tried) if self._is_timed else tried

    def _block_of(self, split: Split) -> BlockRef:
        # Return the block of the current split without the computations.
        if self._block is None:
            runtime, worker = self.runtime, self._worker(split)
            num_bytes = in_bytes("split-bytes") if split.num_bytes is None else split.num_bytes
            handle = self._handle(split, worker, self._read_block)
            self._block = runtime.refer(handle, self._listed_rows(split), num_bytes, worker, runtime.reads)
        return self._block

    def _listed_rows(self, split: Split) -> int:
        # Return the number of rows of a split's block; -1 if only reading shows it.
        return -1 if split.num_rows is None else split.num_rows

    def _num_rows_of(self, split: Split) -> int:
        # Return the number of rows of the current split, which is read if only reading shows it.
        num_rows = self._listed_rows(split)
        if num_rows < 0 and (num_rows := self._block_of(split).num_rows) < 0:
            # Blocks that were requested before can be handed out meanwhile.
            wait = self.runtime.waits and not self.pending
            report = self.runtime.caller.report(self._block_of(split).handle, wait=wait)
            if report is None:
                raise NotReady
            if report.num_rows:
                self.runtime.note_skipped(report.skipped)
            num_rows = self._last_rows = self._block_of(split).num_rows = report.num_rows
            self.runtime.resize(self._block_of(split), report.nbytes)
        return num_rows

    def _computed_part(self, split: Split, start: int, stop: int) -> BlockRef:
        runtime, block = self.runtime, self._block_of(split)
        run, function = Selection((block,), range(start, stop)), TryEach(self._computations)
        # Slow functions should keep all workers busy.
        worker = runtime.next_worker() if start else block.worker
        handle = runtime.ask(
            run, worker=worker, name=self.read.name, function=Timed(function) if self._is_timed else function
        )
        num_bytes = block.nbytes * (stop - start) // max(block.num_rows, stop, 1)
        return self._refer(handle, None if split.num_rows is None else stop - start, num_bytes, worker)

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
        holders = self._locations(split) if self._locations is not None else ()
        if not holders:
            return self.runtime.next_worker()
        worker = min(holders, key=self._num_assigned.__getitem__)
        self._num_assigned[worker] += 1
        return worker

    @cached_property
    def _locations(self) -> SplitLocations | None:
        """The workers that have the data of splits."""
        return self.runtime.caller.split_locations(self.read)

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
        splits = self.read.splits() if by_epoch is None else by_epoch(self.epoch)
        self._even_splits = splits if isinstance(splits, LazySplits) else None
        return _splits_after(number, splits)

    def _stop(self, split: Split) -> tuple[int | None, bool]:
        # Return the row of the split at which to stop reading now, or None to read the split whole; and whether that is
        # its end.
        if not self._is_divisible or split.num_rows == 0:
            return None, True
        wanted = self._sizes.num_rows if self._is_timed else self.num_rows
        is_untouched = not self.offset and self._block is None
        if self._computations.stages and is_untouched and wanted >= (split.num_rows or self._last_rows):
            return None, True
        split_rows = self._num_rows_of(split)
        if not split_rows:
            return None, True
        row_bytes = (split.num_bytes or 0) / split_rows * self._sizes.growth
        num_rows = max(min(wanted, int(self.runtime.split_bytes / max(row_bytes, 1))), 1)
        if not self._is_timed:
            is_free = self.is_plain or (self.runtime.caller.reports_freely and not self.read.may_be_large)
            self.num_rows = 2 * num_rows if is_free or self._sizes.are_known else num_rows
            if not self.runtime.caller.reports_freely:
                # Each part costs tasks, so that repetitions start with parts as large as this pass has reached.
                self._sizes.num_rows = self.num_rows
        stop = self.offset + num_rows
        # The last part takes a few more rows rather than leave them to a call of their own.
        stop = split_rows if split_rows - stop < num_rows // _PART_OF_CALL else stop
        return stop, stop == split_rows

    @property
    def _is_divisible(self) -> bool:
        return self.runtime.caller.divides and (self.read.divide is not None or bool(self._computations.stages))


def _of_cut(cut: int) -> tuple[int | None, bool]:
    # Return what `ReadCursor._stop` returned when it was recorded.
    return (None, True) if cut == -1 else (-1 - cut, True) if cut < 0 else (cut, False)


def _splits_after(number: int, splits: Any) -> Iterator[Split]:
    # This is not a method: a generator that refers to its cursor would form a cycle, and a dropped cursor and its
    # blocks would stay until the garbage collector runs.
    for place in itertools.count(number):
        try:
            split = splits[place]
        except IndexError:
            return
        yield split
