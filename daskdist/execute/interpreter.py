"""The interpreter: walks primitives, keeps the window, and asks a caller for every call.

It knows the primitives, and no operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import cycle
from typing import Any, Final

import numpy as np

from daskdist.config import in_bytes
from daskdist.core.origin import Skipped
from daskdist.core.primitive import Arrange, Chain, Compute, Epoch, Fact, Opener, Primitive, Read, Stream
from daskdist.core.selection import BlockRef, Groups, Run, Selection, Zipped
from daskdist.execute.callers import Caller
from daskdist.execute.cursors import ChainCursor, ComputeCursor, FactCursor, ReadCursor, StreamCursor
from daskdist.execute.gather import LIGHT_BYTES, Joins, Picks, blocks_of, gather, is_view, run_bytes
from daskdist.execute.recipe import Key, Path, Recipe, described, traced_back
from daskdist.execute.window import Window

logger: Final = logging.getLogger("daskdist")

# Rows of blocks with less than this share of them left are moved to a block of their own. Each time at most two
# thirds of what is given up are copied, so all copying together stays below one copy of the data.
_FEW_ROWS_LEFT = 0.4


class Interpreter:
    """Runs one pipeline.

    Parameters
    ----------
    caller
        Who makes the calls.
    workers
        The workers that read, in turn; ``(None,)`` for this process.
    budget_bytes
        Bytes that may be outstanding on each; the setting ``window-bytes`` if None.
    """

    def __init__(
        self, caller: Caller, workers: Sequence[str | None] = (None,), budget_bytes: int | None = None
    ) -> None:
        self.caller = caller
        budget = (budget_bytes or in_bytes("window-bytes")) * len(workers) // 2
        self.reads = Window(budget)
        self.bundles = Window(budget)
        # Whether a cursor may wait for a count: not while there is something to hand out already.
        self.waits = True
        self.num_workers = len(workers)
        # What was left out because it could not be read or its computation failed, and of it what is of files.
        self.num_skipped = 0
        self.skipped_of: Counter[str] = Counter()
        self._turns = cycle(workers)

    def open(self, primitive: Primitive, path: Path = ()) -> Opener:
        """What starts a stream of the primitive's elements for an epoch; ``path`` is how it is reached."""
        make = self._maker(primitive, path)

        def opener(epoch: Epoch) -> Any:
            cursor = make(epoch)
            # A position tells by it what to open; where an arrangement opened something else, that.
            if not hasattr(cursor, "born"):
                cursor.born = path, epoch
            return cursor

        return opener

    def _maker(self, primitive: Primitive, path: Path) -> Callable[[Epoch], Any]:
        match primitive:
            case Read():
                return lambda epoch: ReadCursor(self, primitive, path, epoch)
            case Stream():
                return lambda epoch: StreamCursor(self, primitive, path, epoch)
            case Compute() | Chain() | Fact():
                source = self.open(primitive.source, (*path, 0))
                kind: Any = {Compute: ComputeCursor, Chain: ChainCursor, Fact: FactCursor}[type(primitive)]
                return lambda epoch: kind(self, primitive, path, epoch, source(epoch))
            case Arrange():
                inputs = [self.open(each, (*path, number)) for number, each in enumerate(primitive.inputs)]
                context = Here(self, primitive.arrangement, path)
                return lambda epoch: primitive.arrangement.open(inputs, epoch, context)

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

    def next_worker(self) -> str | None:
        """The worker whose turn it is."""
        return next(self._turns)

    def gather(self, run: Run, *, on: str | None, name: str, window: Window) -> BlockRef:
        """The rows of a run as one block, on a worker."""
        recipe = Recipe(None, (), None, described(run))
        return self.refer(self.ask(run, on=on, name=name), len(run), int(run_bytes(run)), on, window, recipe)

    def near(self, run: Run | Zipped) -> str | None:
        """The worker that has all blocks of a run, else the one whose turn it is."""
        workers = {ref.worker for ref in blocks_of(run)}
        return workers.pop() if len(workers) == 1 else self.next_worker()

    def ask(
        self,
        run: Run | Zipped,
        *,
        on: str | None,
        name: str,
        function: Callable[[Any], Any] | None = None,
        apart: bool = False,
    ) -> Any:
        """Ask for the rows of a run, or what a function makes of them, as one block, on a worker."""
        if isinstance(run, Zipped):
            run = Zipped(tuple(self._brought_to(part.without_unused(), on) for part in run.parts), run.structure)
            picks: Joins | Picks = Joins.of(run)
        else:
            run = self._brought_to(run.without_unused(), on)
            picks = Picks.of(run)
        handles = [ref.handle for ref in blocks_of(run)]
        is_light = function is None and (is_view(run) or run_bytes(run) <= LIGHT_BYTES)
        return self.caller.call(gather, handles, picks, function, apart, on=on, is_light=is_light, name=name)

    def refer(
        self, handle: Any, num_rows: int, nbytes: int, on: str | None, window: Window, recipe: Recipe
    ) -> BlockRef:
        """A reference that holds its bytes of a window for as long as it lives."""
        window.acquire(nbytes)
        return BlockRef(handle, num_rows, nbytes, on, window.release, recipe)

    def _brought_to(self, run: Run, on: str | None) -> Run:
        # Rows cross workers, blocks do not: what lies elsewhere is first reduced to the rows wanted, there.
        if isinstance(run, Groups):
            return Groups(self._rows_brought_to(run.flat, on), run.bounds, run.inners)
        return self._rows_brought_to(run, on)

    def _rows_brought_to(self, selection: Selection, on: str | None) -> Selection:
        elsewhere = sorted({ref.worker for ref in selection.blocks if ref.worker not in (None, on)} if on else ())
        if not elsewhere or not len(selection):
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
        # Block by block they are put together by one copy.
        at = at[np.argsort(selection.places[at], kind="stable")]
        merged = self.gather(selection.take(at), on=worker, name=name, window=window)
        merged.recipe.run = traced_back(merged.recipe.run)
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
            # One call for all of a worker, and only when it frees as much as is worth one.
            if freed_bytes[worker] >= self.caller.bundle_bytes:
                selection = self._merged(selection, places, worker, "compact", self.reads)
        return selection.without_unused()


def stats_of(interpreters: Sequence[Interpreter], num_elements: int) -> dict[str, Any]:
    """What came of a pass so far, as iterators tell it: see `daskdist.execute.embedded.ElementIterator.stats`."""
    by_file: Counter[str] = Counter()
    for interpreter in interpreters:
        by_file.update(interpreter.skipped_of)
    return {
        "num_elements": num_elements,
        "num_skipped": sum(interpreter.num_skipped for interpreter in interpreters),
        "skipped_by_file": dict(by_file),
    }


class Here:
    """What the cursors of one arrangement may ask; see `daskdist.core.primitive.Context`."""

    def __init__(self, interpreter: Interpreter, arrangement: Any, path: Path) -> None:
        self._interpreter = interpreter
        self._arrangement = arrangement
        self._path = path
        self.compact = interpreter.compact

    @property
    def home(self) -> Hashable | None:
        return self._interpreter.caller.home

    def open(self, key: Any) -> Opener:
        return self._interpreter.open(self._arrangement.primitive_of(key), (*self._path, Key(key)))
