"""The end of a pipeline: its elements are gathered in bundles ahead of use, on the workers that will use them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from daskdist.core.primitive import Cursor, Exhausted, NotReady, Primitive
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.execute.caller import Handle, lengths_of
from daskdist.execute.resume.deferring import real
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.gather import CHEAP_BYTES, Empty, blocks_of, bundle_size, gather, is_view, run_bytes
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.runtime import Gather
from daskdist.execute.transfer.gather_on_device import CompactOnDevices, DeviceGather

# A view of at least this many batches is worth a bundle of its own.
_MANY_BATCHES = 8
# The most bundles to build before one is handed out: the first element must not wait until the window is full.
_BUILT_AT_ONCE = 3
# Steps built ahead before any was used; later, twice as many as were used.
_FEW_STEPS = 4
# The size of the first bundle if its blocks are available already: gathering it takes about as long as the call itself.
_FIRST_BYTES = 2**20
# With more logs of cursors than this, outdated ones are searched for and dropped.
_MOST_LOGS = 256


@dataclass(slots=True)
class Lane:
    """One consumer's part of a bundle.

    Parameters
    ----------
    ref
        The block that has its elements; None if there is none.
    places
        For each step the element's place in that block; -1 for an element without rows, which is in no block.
    lengths
        The handle of the number of rows of each element of the block, if that was requested.
    num_rows
        For each step the number of rows of its element, if arithmetic gives it or it was requested.
    failed
        The places of elements that failed, if the numbers of rows were requested.
    """

    ref: BlockRef | None
    places: Sequence[int]
    lengths: Handle | None = None
    num_rows: np.ndarray[Any, Any] | None = None
    failed: frozenset[int] = frozenset()


@dataclass(slots=True)
class StepBundle:
    """Consecutive steps gathered together: in each step, every lane has one element.

    Parameters
    ----------
    lanes
        The consumers' parts, in order.
    num_elements
        The number of elements; in the last step some lanes may have none.
    num_asked
        The number of blocks that were requested to build it.
    """

    lanes: list[Lane]
    num_elements: int
    num_asked: int = 0

    def __len__(self) -> int:
        return len(self.lanes[0].places)


class _Reached(NamedTuple):
    # The row up to which a block was handed out, and the block's length, which stay valid once the block is gone.
    block: Callable[[], BlockRef | None]
    row: int
    num_rows: int


class BundleBuilder:
    """The builder of bundles: it gathers a stream's elements ahead of use and gives them to consumers in turn.

    Parameters
    ----------
    interpreter
        Runs the stream.
    primitive
        The primitive whose elements are streamed.
    start
        The position at which the stream is opened.
    workers
        For each consumer the worker that uses its elements; None for this process.
    asks_lengths
        Whether to request the number of rows of each element.
    num_steps_ahead
        The number of steps, including the next one, that are built ahead regardless of their size; with 0, each step is
        built when it is requested.
    active
        The numbers of the consumers whose elements are gathered; the collection may change. For the others only the
        places of elements with rows are reported. All consumers if None, or if lengths are requested.
    empty
        Allocates the arrays that elements are copied into, by shape and dtype; `numpy.empty` if None. Only for
        consumers in this process. It may be called from several threads at once.
    device_gathers
        For each consumer a gather function for its device; None for consumers whose elements are gathered here.
    as_views
        Whether consumers, all in this process, may get batches as views of their blocks, which then stay in memory
        while a batch is in use. This is done if at least half of the rows of those blocks go to the consumers.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        primitive: Primitive,
        start: StreamPosition,
        workers: Sequence[str | None] = (None,),
        *,
        asks_lengths: bool = False,
        num_steps_ahead: int = 1,
        active: Collection[int] | None = None,
        empty: Empty | None = None,
        device_gathers: Sequence[DeviceGather | None] = (),
        as_views: bool = False,
    ) -> None:
        self.interpreter = interpreter
        self.active = active
        self.asks_lengths = asks_lengths
        self.num_steps_ahead = num_steps_ahead
        self.workers = workers
        self.waiting = RunQueue()
        self.ready: deque[StepBundle] = deque()
        self.is_over = False
        # Bundles begin small, so that the first elements come soon, and double.
        self.num_steps = 1
        gather_here: Gather = gather if empty is None else partial(gather, empty=empty)
        self._device_gathers = [device_gather for device_gather in device_gathers if device_gather is not None]
        self._by = [
            gather_here if device_gather is None else partial(device_gather, empty=empty)
            for device_gather in device_gathers or [None] * len(workers)
        ]
        if self._device_gathers:
            interpreter.compact_by = CompactOnDevices(self._device_gathers)
        self._as_views = partial(gather_here, as_views=True) if as_views and not self._device_gathers else None
        self._reached = _Reached(lambda: None, 0, 0)
        # The number of steps that were handed out.
        self._num_used = 0
        # The number of steps of the first bundle if its blocks are available already.
        self._num_available = 0
        # An error that ends the pass, raised when the elements before it were handed out.
        self.failure: Exception | None = None
        # The number of elements in the bundles before the last one that was handed out, and in that one.
        self._num_passed, self._num_last = start.num_elements, 0
        self._most_logs = _MOST_LOGS
        self.start = start
        interpreter.stream_of_positions = primitive, start
        self.source: Cursor = interpreter.open_at(primitive, start)

    def __iter__(self) -> Iterator[StepBundle]:
        while True:
            try:
                yield self.pull()
            except Exhausted:
                return

    def pull(self) -> StepBundle:
        """Return the next bundle, and build more while it is in use.

        Raises
        ------
        Exhausted
            There are no more elements.
        """
        self._build_ahead()
        if self.ready:
            bundle = self.ready.popleft()
            self._num_used += len(bundle)
            self._num_passed, self._num_last = self._num_passed + self._num_last, bundle.num_elements
            self.interpreter.num_passed = self._num_passed
            if len(self.interpreter.answers.logs) > self._most_logs:
                self._drop_old_answers()
            return bundle
        failure, self.failure = self.failure, None
        raise Exhausted if failure is None else failure

    def _drop_old_answers(self) -> None:
        self.interpreter.drop_answers_before(self._num_passed)
        self._most_logs = max(_MOST_LOGS, 2 * len(self.interpreter.answers.logs))

    def _build_ahead(self) -> None:
        num_built = 0
        while not self.is_over and (not self.ready or self._has_room(num_built)):
            try:
                self.ready.append(self._build())
                num_built += 1
            except Exhausted:
                self.is_over = True
            except NotReady:
                return

    def _has_room(self, num_built: int) -> bool:
        num_ready = sum(map(len, self.ready))
        if not self.num_steps_ahead or num_ready < self.num_steps_ahead:
            return bool(self.num_steps_ahead)
        interpreter = self.interpreter
        if num_built >= _BUILT_AT_ONCE or len(self.ready) > interpreter.caller.num_ahead:
            return False
        num_asked = sum(bundle.num_asked for bundle in self.ready)
        is_within_limits = num_ready < self._most_ahead and num_asked < interpreter.most_asked
        return is_within_limits and interpreter.bundles.has_room()

    @property
    def _most_ahead(self) -> int:
        return max(2 * self._num_used, _FEW_STEPS, 2 * self._num_available)

    def _build(self) -> StepBundle:
        interpreter = self.interpreter
        before = interpreter.num_asked
        bundle = self._next_bundle(lambda: interpreter.num_asked - before >= interpreter.most_asked)
        bundle.num_asked = interpreter.num_asked - before
        return bundle

    def _next_bundle(self, has_asked_enough: Callable[[], bool]) -> StepBundle:
        num_lanes, waiting, pull = len(self.workers), self.waiting, self._pulled
        # Wait only for the step that the consumer needs now; the bundle takes further steps if they are available.
        self.interpreter.waits, self.interpreter.is_brief = not self.ready, True
        try:
            waiting.fill(pull, num_lanes)
            self.interpreter.waits = False
            if self._lies_here(waiting.runs[0]):
                return self._without_gathering(waiting.pop(len(waiting.runs[0])))
            most_steps = self._bundle_size(waiting.runs[0])
            num_steps = min(max(self.num_steps, self._count_available(waiting.runs[0])), most_steps)
            self.num_steps = min(2 * num_steps, self._most_ahead) if self.num_steps_ahead else 1
            while len(waiting) < num_steps * num_lanes and not has_asked_enough():
                waiting.push(pull())
                if self._lies_here(waiting.runs[-1]):
                    # Elements that need no copy are left for a bundle of their own.
                    num_steps = (len(waiting) - len(waiting.runs[-1])) // num_lanes
                    break
            num_steps = min(num_steps, len(waiting) // num_lanes)
        except Exhausted:
            if not waiting:
                raise
            num_steps = min(self.num_steps, -(-len(waiting) // num_lanes))
        except NotReady:
            num_steps = len(waiting) // num_lanes
            if not num_steps:
                raise
        return self._gathered(waiting.pop(num_steps * num_lanes))

    def _count_available(self, run: Run) -> int:
        # Return the number of steps to build at once although none was used yet: those of kept blocks, which need no
        # waiting.
        blocks = blocks_of(run)
        is_elsewhere = self.workers[0] is not None
        if not (is_elsewhere and self.num_steps_ahead and blocks and all(ref.is_kept for ref in blocks)):
            return 0
        self._num_available = min(int(_FIRST_BYTES // max(run.element_bytes, 1)), self._bundle_size(run))
        return self._num_available

    def _bundle_size(self, run: Run) -> int:
        # Return the number of steps, at least one whatever its size.
        interpreter = self.interpreter
        return bundle_size(interpreter.caller, run, max(interpreter.most_bytes, run.element_bytes))

    def _pulled(self) -> Run:
        if self.failure is not None:
            raise Exhausted
        try:
            return self.source.pull()  # type: ignore[no-any-return]
        except (Exhausted, NotReady):
            raise
        except Exception as error:
            self.failure = error
            raise Exhausted from None

    def _lies_here(self, run: Run) -> bool:
        # Consecutive rows of a block that is on the consumer's worker need no gathering.
        if len(self.workers) > 1 or self._device_gathers or not is_view(run):
            return False
        if isinstance(run, Groups):
            # The batches are views of the block; a few of them are not worth a bundle of their own.
            return self.workers[0] is None and (len(run) >= _MANY_BATCHES or run_bytes(run) >= CHEAP_BYTES)
        (ref,) = run.blocks
        return self.workers[0] in (None, ref.worker)

    def _without_gathering(self, run: Run) -> StepBundle:
        if isinstance(run, Groups):
            return self._gathered(run)
        (ref,) = run.blocks
        # The block now serves as a bundle, and so counts against the bundles' half of the window.
        bundles = self.interpreter.bundles
        ready = self.interpreter.refer(real(ref.handle), ref.num_rows, ref.nbytes, ref.worker, bundles)
        ready.is_kept = ref.is_kept
        return StepBundle([Lane(ready, run.rows, self._lengths(ready))], len(run))  # type: ignore[arg-type]

    def _gathered(self, run: Run) -> StepBundle:
        num_lanes = len(self.workers)
        num_steps = -(-len(run) // num_lanes)
        parts = [run] if num_lanes == 1 else [run.take(np.arange(k, len(run), num_lanes)) for k in range(num_lanes)]
        are_all_active = self.active is None or self.asks_lengths
        active = range(num_lanes) if are_all_active else tuple(self.active or ())
        all_by = self._by
        if self._as_views is not None and num_lanes > 1 and isinstance(run, Groups):
            num_rows, num_unused = len(run.flat), self._num_unused(run.flat)
            # At least half of the memory that views keep must be rows that consumers here use.
            if 2 * num_rows * len(active) >= num_lanes * (num_rows + num_unused):
                all_by = [self._as_views] * num_lanes
        return StepBundle(
            [
                self._lane(part, worker, num_steps, by, is_active=number in active)
                for number, (part, worker, by) in enumerate(zip(parts, self.workers, all_by, strict=True))
            ],
            len(run),
        )

    def _num_unused(self, selection: Selection) -> int:
        # Return the number of rows between the selected intervals, and before the first one since the last call: if
        # the selection is one shard of the batches, for example, those of other shards.
        intervals = selection.intervals
        if intervals is None or not len(selection):
            return 0
        sizes = np.array([ref.num_rows for ref in selection.blocks]).take(intervals.block_index)
        starts, stops = intervals.starts, intervals.starts + np.diff(intervals.bounds)
        is_same_block = intervals.block_index[1:] == intervals.block_index[:-1]
        between = starts[1:] - stops[:-1] + np.where(is_same_block, 0, sizes[:-1])
        first, last = (selection.blocks[intervals.block_index[place]] for place in (0, -1))
        before = starts[0] - self._reached.row + (0 if self._reached.block() is first else self._reached.num_rows)
        self._reached = _Reached(weakref.ref(last), int(stops[-1]), last.num_rows)
        # A negative number of rows before the first means that rows are selected again.
        return int(max(before, 0) + np.maximum(between, 0).sum())

    def _lane(self, run: Run, worker: str | None, num_steps: int, by: Gather, *, is_active: bool) -> Lane:
        has_rows = run.lengths > 0 if isinstance(run, Groups) else np.ones(len(run), bool)
        full = np.flatnonzero(has_rows).tolist()
        places = [-1] * num_steps
        for number, place in enumerate(full):
            places[place] = number if is_active else 0
        num_rows = None
        if isinstance(run, Groups):
            num_rows = np.zeros(num_steps, np.intp)
            num_rows[: len(run)] = run.lengths
        if not full or not is_active:
            return Lane(None, places, None, num_rows)
        interpreter = self.interpreter
        run = run if len(full) == len(run) else run.take(np.array(full))
        ref = interpreter.gather(run, worker=worker, name="gather", windows=interpreter.bundles, by=by)
        return Lane(ref, places, self._lengths(ref), num_rows)

    def _lengths(self, ref: BlockRef) -> Handle | None:
        if not self.asks_lengths:
            return None
        return self.interpreter.caller.call(lengths_of, [ref.handle], worker=ref.worker, name="lengths")
