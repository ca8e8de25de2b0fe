"""The state that the cursors of one pipeline share: its caller, its budgets of bytes, and the calls it makes."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.origin import Skipped
from daskdist.core.primitive import RowReader
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import RowIntervals
from daskdist.core.selection.lazy_shuffle import ShuffledSelection
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, Zipped
from daskdist.execute.caller import Caller
from daskdist.execute.stream.gather import CHEAP_BYTES, Joins, Picks, blocks_of, gather, is_view, run_bytes
from daskdist.execute.stream.lineage import Lineage, Path, with_lineages, without_moves
from daskdist.execute.stream.window import Windows

logger: Final = logging.getLogger("daskdist")

# Puts rows of blocks together: ``by(blocks, picks)``.
Gather = Callable[..., Any]

# Rows of blocks with less than this share of them left are moved to a block of their own. Each time at most two
# thirds of what is given up are copied, so all copying together stays below one copy of the data.
_FEW_ROWS_LEFT = 0.4
# Blocks asked for ahead of need, besides those that cursors have asked for: so many for each call that can be under
# way, and in any case so many.
_ASKED_PER_CALL: Final = 4
_FEW_ASKED: Final = 16
# So many rows a block, on the average.
_MANY_ROWS: Final = 8


@dataclass(slots=True)
class Sizes:
    """Sizes at one place of a pipeline, which its repetitions have in common.

    Parameters
    ----------
    num_rows
        Rows of the next part of a split that can be divided: they begin small, so that the first elements come soon,
        and double.
    growth
        What a block turned out to take, as a multiple of what was expected; learned from reports.
    are_known
        Whether one report has told.
    sample
        The block that is to tell next, and what it was expected to take. Weak: it is not kept for that.
    """

    num_rows: int = 64
    growth: float = 1.0
    are_known: bool = False
    sample: tuple[weakref.ref[BlockRef], int] | None = None


class StreamRuntime:
    """The state that all cursors of one pipeline share: its caller, its budgets, and the calls it has made.

    Parameters
    ----------
    caller
        Who makes the calls.
    workers
        The workers that read, in turn; ``(None,)`` for this process.
    budget_bytes
        Bytes that may be outstanding on each, if less than the setting ``window-bytes``, which all pipelines of this
        process share.
    """

    def __init__(
        self, caller: Caller, workers: Sequence[str | None] = (None,), budget_bytes: int | None = None
    ) -> None:
        self.caller = caller
        shared = in_bytes("window-bytes")
        halves = (budget_bytes or shared) // 2, None if caller.home is None else shared // 2
        self.reads = Windows("reads", *halves)
        self.bundles = Windows("bundles", *halves)
        # One block or bundle of many elements takes but a part of that.
        self.most_bytes = halves[0] // 4
        # Whether a cursor may wait for a count: not while there is something to hand out already.
        self.waits = True
        # Where it may not, whether a cursor may yet run what has taken moments so far.
        self.is_brief = False
        # Of each place in the pipeline, how many elements of generators were pulled there since one was slow.
        self.num_brief: Counter[Path] = Counter()
        # What makes blocks of the few rows that are left of others.
        self.compact_by: Gather = gather
        self.num_workers = len(workers)
        # Blocks that were asked for, and how many at most for what is not needed yet.
        self.num_asked = 0
        self.most_asked = max(_ASKED_PER_CALL * (caller.num_ahead + 1), _FEW_ASKED)
        self.sizes: dict[Path, Sizes] = {}
        # The block that a source is all of, by its place in the pipeline, where that is kept for all passes.
        self.kept: WeakValueDictionary[Path, BlockRef] = WeakValueDictionary()
        # What was left out because it could not be read or its computation failed, and of it what is of files.
        self.num_skipped = 0
        self.skipped_of: Counter[str] = Counter()
        self._turns = cycle(workers)
        # What gives elements that come one after the other.
        self._readers: WeakSet[RowReader] = WeakSet()

    def note_reader(self, reader: RowReader) -> None:
        """Have a reader closed at the end."""
        self._readers.add(reader)

    def close(self) -> None:
        """Make no calls any more, and let go of what gives elements."""
        for reader in list(self._readers):
            reader.close()
        self.caller.close()

    def note_skipped(self, notes: Sequence[Skipped]) -> None:
        """Log what was left out, of each file the first only, and count it."""
        for note in notes:
            if note.file:
                self.skipped_of[note.file] += 1
            if self.skipped_of[note.file] == 1:
                logger.warning("left out %s; what else cannot be read of this file is counted only", note)
            elif not note.file:
                logger.warning("left out %s", note)
        self.num_skipped += len(notes)

    @contextmanager
    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> Iterator[None]:
        """Let cursors wait for counts only if what they give is needed now, and run only what is brief besides."""
        before = self.waits, self.is_brief
        if not is_needed:
            self.is_brief = is_brief and (self.waits or self.is_brief)
        self.waits = self.waits and is_needed
        try:
            yield
        finally:
            self.waits, self.is_brief = before

    def next_worker(self) -> str | None:
        """The worker whose turn it is."""
        return next(self._turns)

    def gather(self, run: Run, *, worker: str | None, name: str, windows: Windows, by: Gather = gather) -> BlockRef:
        """The rows of a run as one block, on a worker; put together by what does so as `gather` does."""
        run = _with_used(run, worker)
        return self._put_together(self._brought_to(run, worker), with_lineages(run), worker, name, windows, by)

    def _put_together(
        self, run: Run, lineages: Any, worker: str | None, name: str, windows: Windows, by: Gather = gather
    ) -> BlockRef:
        handles, num_bytes = [ref.handle for ref in blocks_of(run)], run_bytes(run)
        is_cheap = num_bytes <= CHEAP_BYTES or is_view(run)
        handle = self.caller.call(by, handles, Picks.of(run), worker=worker, is_cheap=is_cheap, name=name)
        return self.refer(handle, len(run), int(num_bytes), worker, windows, Lineage(None, (), None, lineages))

    def near(self, run: Run | Zipped) -> str | None:
        """The worker that has all blocks of a run, else the one whose turn it is."""
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
    ) -> Any:
        """Ask for what a function makes of the rows of a run, as one block, on a worker."""
        if isinstance(run, Zipped):
            run = Zipped(tuple(self._brought_to(_with_used(part, worker), worker) for part in run.parts), run.structure)
            picks: Joins | Picks = Joins.of(run)
        else:
            run = self._brought_to(_with_used(run, worker), worker)
            picks = Picks.of(run)
        handles = [ref.handle for ref in blocks_of(run)]
        return self.caller.call(gather, handles, picks, function, unstacked, worker=worker, name=name)

    def refer(
        self, handle: Any, num_rows: int, nbytes: int, worker: str | None, windows: Windows, lineage: Lineage
    ) -> BlockRef:
        """A reference that holds its bytes of a window for as long as it lives."""
        self.num_asked += 1
        window = windows[worker]
        window.acquire(nbytes)
        return BlockRef(handle, num_rows, nbytes, worker, window.release, lineage)

    def _brought_to(self, run: Run, worker: str | None) -> Run:
        # Rows cross workers, blocks do not: what lies elsewhere is first reduced to the rows wanted, there.
        if isinstance(run, Groups):
            return Groups(self._rows_brought_to(run.flat, worker), run.bounds, run.inners)
        return self._rows_brought_to(run, worker)

    def _rows_brought_to(self, selection: Selection, worker: str | None) -> Selection:
        if not worker or not len(selection):
            return selection
        elsewhere: dict[str | None, list[int]] = {}
        for place, ref in enumerate(selection.blocks):
            if ref.worker not in (None, worker):
                elsewhere.setdefault(ref.worker, []).append(place)
        return self._merged(selection, elsewhere, "take", self.bundles, gather) if elsewhere else selection

    def _merged(
        self, selection: Selection, places: dict[str | None, list[int]], name: str, windows: Windows, by: Gather
    ) -> Selection:
        # Of each worker the rows that are of some of its blocks, which all have some, made a block there. Block by
        # block they are put together by one copy.
        intervals, num_blocks = selection.to_intervals(), len(selection.blocks)
        in_order = np.array([place for each in places.values() for place in each])
        rank = np.full(num_blocks, num_blocks)
        rank[in_order] = np.arange(len(in_order))
        ranks = rank.take(intervals.block_index)
        order = np.argsort(ranks.astype(np.uint16) if num_blocks < 2**16 else ranks, kind="stable")
        # In that order: at which rank the blocks of each worker begin, and at which place their stretches.
        first_ranks = np.cumsum([0, *map(len, places.values())])
        cuts = np.searchsorted(ranks[order], first_ranks)
        order = order[: cuts[-1]]
        bounds = np.concatenate([[0], np.cumsum(np.diff(intervals.bounds)[order])])
        block_index, starts = intervals.block_index.copy(), intervals.starts.copy()
        block_index[order] = np.repeat(np.arange(len(places)) + num_blocks, np.diff(cuts))
        starts[order] = bounds[:-1] - np.repeat(bounds[cuts[:-1]], np.diff(cuts))
        blocks = list(selection.blocks)
        pieces = zip(places.items(), first_ranks.tolist(), pairwise(cuts.tolist()), strict=False)
        for (worker, own), first_rank, (start, stop) in pieces:
            at = order[start:stop]
            part = RowIntervals(ranks[at] - first_rank, intervals.starts[at], bounds[start : stop + 1] - bounds[start])
            # A view would keep the whole block.
            rows = Selection.of(tuple([selection.blocks[place] for place in own]), part, is_view=False)
            blocks.append(self._put_together(rows, without_moves(with_lineages(rows)), worker, name, windows, by))
        return Selection.of(tuple(blocks), RowIntervals(block_index, starts, intervals.bounds)).without_unused()

    def compact(self, run: Run, in_use: Iterable[Run]) -> Run:
        """See `daskdist.core.primitive.Context`."""
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
        # One call for all of a worker, and only when it frees as much as is worth one.
        worthy = {worker: each for worker, each in few.items() if freed_bytes[worker] >= self.caller.bundle_bytes}
        if not worthy:
            return selection.without_unused()
        return self._merged(selection, worthy, "compact", self.reads, self.compact_by)


def _with_used(run: Run, worker: str | None) -> Run:
    # To know which blocks rows in a random order are of, that has to be worked out. Where nothing is brought anywhere,
    # that can wait: there are surely some of nearly each of few blocks.
    flat = run.flat if isinstance(run, Groups) else run
    can_wait = worker is None and isinstance(flat, ShuffledSelection) and len(flat) >= _MANY_ROWS * len(flat.blocks)
    return run if can_wait else run.without_unused()
