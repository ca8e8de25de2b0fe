"""The state that the cursors of one pipeline share: its caller, its budgets of bytes, and the calls it makes."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.failing.origin import Skipped
from daskdist.core.primitive import RowReader, same
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import RowIntervals
from daskdist.core.selection.lazy_shuffle import ShuffledSelection
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, Zipped
from daskdist.execute.caller import Caller
from daskdist.execute.resume.recorded_answers import Answers, Path, UsedAnswers
from daskdist.execute.stream.gather import CHEAP_BYTES, Joins, Picks, blocks_of, gather, is_view, run_bytes
from daskdist.execute.stream.window import Windows

logger: Final = logging.getLogger("daskdist")

# A function that assembles rows of blocks: ``by(blocks, picks)``.
Gather = Callable[..., Any]

# A block of which less than this share of rows is still needed is compacted: those rows move to a new block. Each time
# at most two thirds as many bytes are copied as are freed, so that all copying together stays below one copy of the
# data.
_FEW_ROWS_LEFT = 0.4
# The most rows moved to a call of a function that keep their origins, with which an error names a row.
_MOST_WITH_ORIGINS: Final = 1024
# Limit on the blocks requested for one bundle: this many per call that can run at once, and at least ``_FEW_ASKED``.
_ASKED_PER_CALL: Final = 4
_FEW_ASKED: Final = 16
# The share of a worker's memory that a window takes at most, and that a part of a split takes at most.
_WINDOWS_OF_MEMORY: Final = 8
_SPLITS_OF_MEMORY: Final = 32
# With this many rows per block on average, a random selection surely has rows of nearly every block.
_MANY_ROWS: Final = 8


@dataclass(slots=True)
class Sizes:
    """Block sizes at one place of a pipeline, shared by its repetitions.

    Parameters
    ----------
    num_rows
        The number of rows of the next call for part of a split. It starts small, so that the first elements arrive
        soon.
    num_timed
        The number of rows of the last call whose time is known.
    growth
        The actual size of blocks as a multiple of the expected size, learned from reports.
    are_known
        Whether a report has arrived.
    num_calls
        The number of calls since the sample was taken, or so far.
    sample
        A function that returns the block whose report is awaited, or None if it is gone; the block's expected size, and
        the number of rows that its call computed if the time is of interest.
    unmeasured
        The blocks whose size was expected before a report had arrived.
    """

    num_rows: int = 64
    growth: float = 1.0
    are_known: bool = False
    num_calls: int = 0
    num_timed: int = 0
    sample: tuple[Callable[[], BlockRef | None], int, int] | None = None
    unmeasured: WeakSet[BlockRef] = field(default_factory=WeakSet)


class StreamRuntime:
    """The state that all cursors of one pipeline share: its caller, its budgets, and the calls it has made.

    Parameters
    ----------
    caller
        Makes the calls.
    workers
        The workers that read, in turn; ``(None,)`` for this process.
    budget_bytes
        The limit of outstanding bytes on each worker, if lower than the setting ``window-bytes``, which all pipelines
        of this process share.
    """

    def __init__(
        self, caller: Caller, workers: Sequence[str | None] = (None,), budget_bytes: int | None = None
    ) -> None:
        self.caller = caller
        # A small worker needs the most of its memory for Python, libraries, shuffle buffers and users' functions.
        memory_bytes = caller.memory_bytes or sys.maxsize
        shared = min(in_bytes("window-bytes"), memory_bytes // _WINDOWS_OF_MEMORY)
        # The largest part of a split to read at a time.
        self.split_bytes = min(in_bytes("split-bytes"), memory_bytes // _SPLITS_OF_MEMORY)
        halves = (budget_bytes or shared) // 2, None if caller.home is None else shared // 2
        self.reads = Windows("reads", *halves)
        self.bundles = Windows("bundles", *halves)
        # The largest block or bundle of more than one element.
        self.most_bytes = halves[0] // 4
        # True if only arithmetic is done, with answers of another stream: no call is made, and nothing else changes.
        self.is_trial = False
        # Whether elements come from generators that run here, which cannot go back.
        self.runs_generators = False
        # True if cursors may wait for row counts: not while elements are ready to be handed out.
        self.waits = True
        # If cursors may not wait: True if they may still run generators that have been fast so far.
        self.is_brief = False
        # The number of elements pulled from generators since one was slow, by place in the pipeline.
        self.num_brief: Counter[Path] = Counter()
        # A function that builds blocks from the few rows that are left of others.
        self.compact_by: Gather = gather
        self.num_workers = len(workers)
        # The number of blocks requested, and the limit on requests for data that is not needed yet.
        self.num_asked = 0
        self.most_asked = max(_ASKED_PER_CALL * (caller.num_ahead + 1), _FEW_ASKED)
        self.sizes: dict[Path, Sizes] = {}
        # The blocks of sources that are single blocks kept for all passes, by the place of the source in the pipeline.
        self.kept: WeakValueDictionary[Path, BlockRef] = WeakValueDictionary()
        # The number of elements left out because reading or computing them failed, in total and by file.
        self.num_skipped = 0
        self.skipped_of: Counter[str] = Counter()
        # Answers of calls about the order of elements, which positions need.
        self.answers = Answers()
        # The facts and resume points that are used; None if they are not recorded.
        self.used: UsedAnswers | None = None
        self._turns = cycle(workers)
        self._readers: WeakSet[RowReader] = WeakSet()
        # Cursors over streams on workers, which have positions there, and the number of elements before the last
        # bundle.
        self.worker_streams: WeakSet[Any] = WeakSet()
        self.num_passed = 0

    def note_reader(self, reader: RowReader) -> None:
        """Register a reader to be closed with the pipeline."""
        self._readers.add(reader)

    def close(self) -> None:
        """Close the readers and the caller; no call is made afterwards."""
        for reader in list(self._readers):
            reader.close()
        self.caller.close()

    def note_skipped(self, notes: Sequence[Skipped]) -> None:
        """Count the elements that were left out, and log them: for each file only the first."""
        for note in notes:
            if note.file:
                self.skipped_of[note.file] += 1
            if self.skipped_of[note.file] == 1:
                logger.warning("left out %s; further unreadable parts of this file are only counted", note)
            elif not note.file:
                logger.warning("left out %s", note)
        self.num_skipped += len(notes)

    @contextmanager
    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> Iterator[None]:
        """Let cursors wait for row counts only if ``is_needed``, and run fast generators also if ``is_brief``."""
        before = self.waits, self.is_brief
        if not is_needed:
            self.is_brief = is_brief and (self.waits or self.is_brief)
        self.waits = self.waits and is_needed
        try:
            yield
        finally:
            self.waits, self.is_brief = before

    def next_worker(self) -> str | None:
        """Return the worker whose turn it is."""
        return next(self._turns)

    def gather(self, run: Run, *, worker: str | None, name: str, windows: Windows, by: Gather = gather) -> BlockRef:
        """Request the rows of a run as one block on a worker, assembled by ``by``."""
        run = _without_unused(run, worker)
        return self._assemble(self._moved_to(run, worker), worker, name, windows, by)

    def _assemble(self, run: Run, worker: str | None, name: str, windows: Windows, by: Gather = gather) -> BlockRef:
        handles, num_bytes = [ref.handle for ref in blocks_of(run)], run_bytes(run)
        is_cheap = num_bytes <= CHEAP_BYTES or is_view(run)
        handle = self.caller.call(by, handles, Picks.of(run), worker=worker, is_cheap=is_cheap, name=name)
        return self.refer(handle, len(run), int(num_bytes), worker, windows)

    def near(self, run: Run | Zipped) -> str | None:
        """Return the worker that has all blocks of a run, or else the one whose turn it is."""
        workers = {ref.worker for ref in blocks_of(run)}
        return (workers.pop() if len(workers) == 1 else None) or self.next_worker()

    def ask(
        self,
        run: Run | Zipped,
        *,
        worker: str | None,
        name: str,
        function: Callable[[Any], Any],
        unstacked: bool = False,
        is_costly: bool = True,
    ) -> Any:
        """Request the result of a function of the rows of a run, as one block, on a worker."""
        if isinstance(run, Zipped):
            parts = tuple(self._moved_to(_without_unused(part, worker), worker, origins=True) for part in run.parts)
            run = Zipped(parts, run.structure)
            picks: Joins | Picks = Joins.of(run)
        else:
            run = self._moved_to(_without_unused(run, worker), worker, origins=True)
            picks = Picks.of(run)
        handles = [ref.handle for ref in blocks_of(run)]
        call = self.caller.call
        return call(gather, handles, picks, function, unstacked, worker=worker, is_costly=is_costly, name=name)

    def refer(self, handle: Any, num_rows: int, nbytes: int, worker: str | None, windows: Windows) -> BlockRef:
        """Return a reference to a block that occupies its bytes of a window for as long as it lives."""
        self.num_asked += 1
        window = windows[worker]
        window.acquire(nbytes)
        return BlockRef(handle, num_rows, nbytes, worker, window.release)

    def resize(self, ref: BlockRef, nbytes: int) -> None:
        """Correct the size of a block that was read or computed ahead."""
        if ref.on_release is not None:
            self.reads[ref.worker].acquire(nbytes - ref.nbytes)
        ref.nbytes = nbytes

    def _moved_to(self, run: Run, worker: str | None, *, origins: bool = False) -> Run:
        # Rows cross workers, blocks do not: the needed rows of blocks on another worker are first extracted there.
        if isinstance(run, Groups):
            return Groups(self._rows_moved_to(run.flat, worker, origins), run.bounds, run.inners)
        return self._rows_moved_to(run, worker, origins)

    def _rows_moved_to(self, selection: Selection, worker: str | None, origins: bool) -> Selection:
        if not worker or not len(selection):
            return selection
        elsewhere: dict[str | None, list[int]] = {}
        for place, ref in enumerate(selection.blocks):
            if ref.worker not in (None, worker):
                elsewhere.setdefault(ref.worker, []).append(place)
        # Rows that are gathered for a function, even for `same`, record their origins.
        by = partial(gather, function=same) if origins and len(selection) <= _MOST_WITH_ORIGINS else gather
        return self._merged(selection, elsewhere, "take", self.bundles, by) if elsewhere else selection

    def _merged(
        self, selection: Selection, places: dict[str | None, list[int]], name: str, windows: Windows, by: Gather
    ) -> Selection:
        # For each worker, merge the selected rows of the blocks at some places into one new block there. Every one of
        # those blocks has selected rows. Sorted by block, they are assembled with one copy.
        intervals, num_blocks = selection.to_intervals(), len(selection.blocks)
        in_order = np.array([place for worker_places in places.values() for place in worker_places])
        rank = np.full(num_blocks, num_blocks)
        rank[in_order] = np.arange(len(in_order))
        ranks = rank.take(intervals.block_index)
        order = np.argsort(ranks.astype(np.uint16) if num_blocks < 2**16 else ranks, kind="stable")
        # In that order, the rank of the first block of each worker, and the position of its first interval.
        first_ranks = np.cumsum([0, *map(len, places.values())])
        cuts = np.searchsorted(ranks[order], first_ranks)
        order = order[: cuts[-1]]
        bounds = np.concatenate([[0], np.cumsum(np.diff(intervals.bounds)[order])])
        block_index, starts = intervals.block_index.copy(), intervals.starts.copy()
        block_index[order] = np.repeat(np.arange(len(places)) + num_blocks, np.diff(cuts))
        starts[order] = bounds[:-1] - np.repeat(bounds[cuts[:-1]], np.diff(cuts))
        blocks = list(selection.blocks)
        pieces = zip(places.items(), first_ranks.tolist(), pairwise(cuts.tolist()), strict=False)
        for (worker, worker_places), first_rank, (start, stop) in pieces:
            at = order[start:stop]
            part = RowIntervals(ranks[at] - first_rank, intervals.starts[at], bounds[start : stop + 1] - bounds[start])
            # A view would keep the whole block.
            rows = Selection.of(tuple([selection.blocks[place] for place in worker_places]), part, is_view=False)
            blocks.append(self._assemble(rows, worker, name, windows, by))
        return Selection.of(tuple(blocks), RowIntervals(block_index, starts, intervals.bounds)).without_unused()

    def compact(self, run: Run, in_use: Iterable[Run]) -> Run:
        """Move the rows of nearly unused blocks to new blocks; see `daskdist.core.primitive.Context.compact`."""
        if isinstance(run, Groups):
            return Groups(self._rows_compacted(run.flat, in_use), run.bounds, run.inners)
        return self._rows_compacted(run, in_use)

    def _rows_compacted(self, selection: Selection, in_use: Iterable[Run]) -> Selection:
        if not self.caller.compacts or selection.block_index is None:
            return selection
        kept = {id(ref) for run in in_use for ref in (run.flat if isinstance(run, Groups) else run).blocks}
        counts = np.bincount(selection.block_index, minlength=len(selection.blocks)).tolist()
        few: dict[str | None, list[int]] = {}
        freed_bytes: dict[str | None, float] = {}
        for place, (ref, count) in enumerate(zip(selection.blocks, counts, strict=True)):
            if id(ref) not in kept and not ref.is_kept and 0 < count < _FEW_ROWS_LEFT * ref.num_rows:
                few.setdefault(ref.worker, []).append(place)
                freed = (ref.num_rows - count) * ref.row_bytes
                freed_bytes[ref.worker] = freed_bytes.get(ref.worker, 0) + freed
        # One call per worker, and only if it frees enough memory to be worth a call.
        worthy = {worker: places for worker, places in few.items() if freed_bytes[worker] >= self.caller.bundle_bytes}
        if not worthy:
            return selection.without_unused()
        return self._merged(selection, worthy, "compact", self.reads, self.compact_by)


def _without_unused(run: Run, worker: str | None) -> Run:
    # Finding the blocks that a lazily shuffled selection uses requires computing its order. If no rows move between
    # workers this can be skipped: with few blocks, nearly every one is used.
    flat = run.flat if isinstance(run, Groups) else run
    can_wait = worker is None and isinstance(flat, ShuffledSelection) and len(flat) >= _MANY_ROWS * len(flat.blocks)
    return run if can_wait else run.without_unused()
