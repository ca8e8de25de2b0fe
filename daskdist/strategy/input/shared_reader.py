"""`SharedReader`: reads input once for all replicas of a process that make a pass together."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, RLock
from typing import Any, Final

import numpy as np

from daskdist.core.failing.error_copy import copied_error
from daskdist.core.primitive import Epoch
from daskdist.core.randomness.pass_numbers import later
from daskdist.core.selection.block_ref import BlockRef
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import Lane
from daskdist.execute.stream.gather import Empty
from daskdist.execute.stream.interpreter import logger
from daskdist.strategy.collectives.step_counts import PeerPipelines, RemotePipeline, RemoteSteps
from daskdist.strategy.input.pipeline import Cuts, Pipeline
from daskdist.strategy.input.pipeline_reader import CountedSteps, PipelineReader

# Seconds that a replica waits for a slower one before it reads on, as the other may be waiting for it elsewhere.
_MAX_WAIT_S: Final = 5.0
# A thread that holds the condition's lock for longer than these seconds is reading.
_WAKE_S: Final = 0.1
# The number of steps that are looked at together after the end of a pipeline.
_STEPS_AT_ONCE: Final = 64
# The most shared passes of a call at a time; in further passes, each replica reads for itself.
_MOST_PASSES: Final = 16


@dataclass(slots=True)
class StepSlice:
    """The elements of one replica in some consecutive steps.

    Parameters
    ----------
    ref
        The block of its elements; None if it has none.
    places
        The element's place in the block for each step; -1 without rows.
    rows
        The block itself, once it has arrived.
    """

    ref: BlockRef | None
    places: list[int]
    rows: Any = None


@dataclass(frozen=True)
class SharedReadPlan:
    """The pipelines of a pass and how to read them.

    Parameters
    ----------
    pipeline
        The pipeline of the replicas.
    others
        The pipelines of other replicas, which also decide how many steps there are: their cuts; if those depend on
        data, the pipeline itself, or the worker that reads it.
    is_alone
        Whether there is only one replica in all.
    drops_uneven
        Whether the pass ends before the first step in which some replica has no rows.
    num_steps_ahead
        The least number of steps computed ahead of use.
    epochs
        The numbers of a call's first pass, for the pipeline and then for each other one.
    fetch
        Gets data from the cluster, on a worker.
    peers
        Exchanges with other workers in which steps their pipelines have rows.
    empty
        Allocates the arrays into which elements are gathered; pooled NumPy arrays if None.
    devices
        The names of the devices of the pipeline's replicas, if elements are copied to them.
    positions
        The positions, of the pipeline and then of each other one, from which the pass continues; empty if it begins.
    done
        The pipeline's replicas whose elements of the first step were handed out or have failed, see `PassPosition`.
    """

    pipeline: Pipeline
    others: tuple[Cuts | Pipeline | RemotePipeline, ...]
    is_alone: bool
    drops_uneven: bool
    num_steps_ahead: int
    epochs: tuple[Epoch, ...]
    fetch: Fetch | None = None
    peers: PeerPipelines | None = None
    empty: Empty | None = None
    devices: tuple[str, ...] = ()
    positions: tuple[StreamPosition, ...] = ()
    done: frozenset[int] = frozenset()

    def start(self, number: int, iteration: int) -> StreamPosition:
        """Return the position at which a pass of the call begins in the pipeline, 0, or another one, from 1."""
        if self.positions:
            return self.positions[number]
        pipeline: Any = (self.pipeline, *self.others)[number]
        return StreamPosition(later(self.epochs[number], iteration), pipeline.seeds)

    @property
    def first_step(self) -> int:
        """The number of the step with which the pass continues, counting those in which no replica has rows."""
        pipelines = (self.pipeline, *self.others)
        counts = [
            -(-position.num_elements // num_replicas_of(pipeline))
            for position, pipeline in zip(self.positions, pipelines, strict=False)
        ]
        return max(counts, default=0)


def num_replicas_of(pipeline: Pipeline | Cuts | RemotePipeline) -> int:
    """Return the number of replicas that a pipeline serves."""
    if isinstance(pipeline, Pipeline):
        return len(pipeline.consumers)
    return pipeline.num_replicas if isinstance(pipeline, Cuts) else len(pipeline.replicas)


class SharedPass:
    """One pass over a pipeline, shared by some of the replicas that it feeds.

    Each part that is read for one replica is queued for the others. A replica waits while the window's bytes are queued
    for the slowest replica that has begun. The same number of bytes is queued for replicas that have not begun, which
    may be waiting for this one to end. Replicas that begin after that read for themselves.

    Parameters
    ----------
    plan
        The plan of the pass.
    iteration
        The number of the pass within the call, from 0.
    lanes
        The replicas that may take part, by their place among those that the pipeline serves.
    """

    def __init__(self, plan: SharedReadPlan, iteration: int, lanes: Iterable[int]) -> None:
        self._plan = plan
        self._iteration = iteration
        self._queues: dict[int, deque[StepSlice]] = {lane: deque() for lane in lanes}
        self._begun: set[int] = set()
        self._woken: set[int] = set()
        self._reader = PipelineReader(
            plan.pipeline,
            plan.start(0, iteration),
            set(self._queues),
            is_alone=plan.is_alone,
            num_steps_ahead=plan.num_steps_ahead,
            fetch=plan.fetch,
            empty=plan.empty,
            devices=plan.devices,
        )
        self._other_steps: list[Cuts | CountedSteps | RemoteSteps] | None = None
        self._first_step = self._num_steps = plan.first_step
        # Steps in which no replica has rows: pairs of the number of steps queued before them, and their own number.
        self._without_rows: list[tuple[int, int]] = []
        self._num_queued = 0
        # The lanes and steps that were read and are not queued yet, and the place of the first of them.
        self._pending: tuple[list[Lane] | None, Any, int] | None = None
        # True once the pipeline is at its end.
        self._has_read_all = False
        # True while a replica waits for an answer of another worker.
        self._is_asking = False
        self._is_over = False
        self._failure: Exception | None = None
        # Reentrant: the garbage collector may close an iterator in a thread that holds the lock.
        # An interrupt at the beginning of `with self._condition` would leave it locked, as that calls Python functions.
        self._lock = RLock()
        self._condition = Condition(self._lock)
        self._num_waiting = 0

    @property
    def is_done(self) -> bool:
        """Return whether no replica can take part any more."""
        return not self._queues

    def position(self, num_steps: int) -> list[Any]:
        """Return the position of the pipeline, as plain data, after some steps that each replica got."""
        with self._lock:
            num_without_rows = sum(number for first, number in self._without_rows if first < num_steps)
            return self._reader.position(num_steps + num_without_rows)

    def begin(self, lane: int) -> bool:
        """Take part from the first step; return False if that step is gone."""
        with self._lock:
            if lane not in self._queues:
                return False
            self._begun.add(lane)
            return True

    def leave(self, lane: int) -> None:
        """Stop taking part."""
        with self._lock:
            self._drop(lane)
            self._condition.notify_all()
            if self._is_over and not self._begun:
                self._fetch_queued()
            if not self._queues:
                self._close()

    def wake(self, lane: int) -> None:
        """End the wait of another thread for parts of the replica, which gets no more."""
        self._woken.add(lane)
        # A thread that holds the lock because it reads checks `_woken` before it waits.
        if self._lock.acquire(timeout=_WAKE_S):
            try:
                self._condition.notify_all()
            finally:
                self._lock.release()

    def parts(self, lane: int) -> Generator[StepSlice, None, None]:
        """Yield the parts of a replica in order; each part is of one block."""
        try:
            while (part := self._take(lane)) is not None:
                if part.rows is None and part.ref is not None:
                    part.rows = self._reader.caller.result(part.ref.handle)
                yield part
        finally:
            self.leave(lane)

    def _take(self, lane: int) -> StepSlice | None:
        queue = self._queues[lane]
        while True:
            if queue:
                part = queue.popleft()
                if self._num_waiting:
                    with self._lock:
                        self._condition.notify_all()
                return part
            with self._lock:
                if queue:
                    continue
                if lane in self._woken:
                    return None
                if self._failure is not None:
                    raise copied_error(self._failure).with_traceback(self._failure.__traceback__)
                if self._is_over:
                    return None
                if self._is_asking:
                    self._condition.wait(_MAX_WAIT_S)
                    continue
                if self._lead_bytes(lane) > self._reader.limit_bytes and self._wait_for_others(lane):
                    continue
                unknown_steps = self._pull()
                self._is_asking = bool(unknown_steps)
            if unknown_steps:
                self._ask(unknown_steps)

    def _lead_bytes(self, lane: int) -> int:
        return max((self._kept_for(other) for other in self._begun if other != lane), default=0)

    def _wait_for_others(self, lane: int) -> bool:
        # True if the replica need not wait any more; False after a timeout.
        self._num_waiting += 1
        try:
            return self._condition.wait_for(
                lambda: (
                    bool(self._queues[lane])
                    or self._is_over
                    or lane in self._woken
                    or self._lead_bytes(lane) <= self._reader.limit_bytes
                ),
                _MAX_WAIT_S,
            )
        finally:
            self._num_waiting -= 1

    def _kept_for(self, lane: int) -> int:
        return sum(part.ref.nbytes for part in tuple(self._queues[lane]) if part.ref is not None)

    def _ask(self, unknown_steps: Sequence[RemoteSteps]) -> None:
        # Release the lock, so that others can take queued parts, or leave.
        failure: Exception | None = None
        try:
            for steps in unknown_steps:
                steps.ask(self._num_steps)
        except Exception as error:
            failure = error
        with self._lock:
            self._is_asking = False
            if failure is not None:
                self._fail(failure)
            self._condition.notify_all()

    def _fail(self, error: Exception) -> None:
        # Parts that were queued before the failure are handed out first.
        self._failure, self._is_over = error, True
        self._condition.notify_all()

    def _pull(self) -> list[RemoteSteps]:
        # Queue further steps, or return the remote pipelines whose steps have to be asked for first.
        late = [lane for lane in self._queues if lane not in self._begun]
        if sum(map(self._kept_for, late)) > self._reader.limit_bytes:
            for lane in late:
                self._drop(lane)
        try:
            remote_steps = [steps for steps in self._steps_of_others() if isinstance(steps, RemoteSteps)]
            if self._pending is None:
                self._read()
            unknown_steps = [steps for steps in remote_steps if not steps.is_known(self._num_steps)]
            if self._pending is None:
                if unknown_steps:
                    return unknown_steps
                if all(steps.is_over(self._num_steps) for steps in self._steps_of_others()):
                    self._end()
                    return []
                self._pending = None, np.zeros((_STEPS_AT_ONCE, len(self._plan.pipeline.consumers)), bool), 0
            lanes, full, begin = self._pending
            number = self._num_decided(full[begin:], remote_steps) if remote_steps else len(full) - begin
            if not number:
                return unknown_steps
            self._pending = (lanes, full, begin + number) if lanes and begin + number < len(full) else None
            self._queue_steps(lanes, full[begin : begin + number], begin)
        except Exception as error:
            self._fail(error)
        return []

    def _read(self) -> None:
        # Read the next steps of the pipeline, if there are any.
        pulled = None if self._has_read_all else self._reader.pull()
        peers = self._plan.peers
        if pulled is not None:
            self._pending = (*pulled, 0)
            if peers is not None:
                peers.step_counts.add(peers.key, self._iteration, self._num_steps, pulled[1])
        elif not self._has_read_all:
            self._has_read_all = True
            if peers is not None:
                nothing = np.zeros((0, len(self._plan.pipeline.consumers)), bool)
                peers.step_counts.add(peers.key, self._iteration, self._num_steps, nothing, is_over=True)

    def _num_decided(self, full: Any, remote_steps: Sequence[RemoteSteps]) -> int:
        # Queue the steps that need no query; another worker may be waiting for this one to take them.
        to_ask = np.flatnonzero(np.ones(len(full), bool) if self._plan.drops_uneven else ~full.any(axis=1))
        if not len(to_ask):
            return len(full)
        if to_ask[0]:
            return int(to_ask[0])
        if not all(steps.is_known(self._num_steps) for steps in remote_steps):
            return 0
        return min(steps.num_known(self._num_steps, len(full)) for steps in remote_steps)

    def _queue_steps(self, lanes: list[Lane] | None, full: Any, begin: int) -> None:
        keep = self._steps_with_rows(full)
        self._num_steps += len(full)
        keeps_all = bool(keep.all()) and len(keep) == len(full)
        if not keeps_all:
            dropped = self._num_queued + np.cumsum(keep)[~keep]
            self._without_rows += zip(*map(np.ndarray.tolist, np.unique(dropped, return_counts=True)), strict=True)
        is_first = not self._num_queued
        self._num_queued += int(keep.sum())
        for number, queue in self._queues.items():
            if lanes is None:
                places = np.full(len(full), -1)
            else:
                places = np.where(full[:, number], lanes[number].places[begin : begin + len(full)], -1)
            places = places if keeps_all else places[: len(keep)][keep]
            if is_first and number in self._plan.done:
                places[:1] = -1
            if len(places):
                queue.append(StepSlice(None if lanes is None else lanes[number].ref, places.tolist()))
        self._condition.notify_all()

    def _steps_with_rows(self, full: Any) -> Any:
        # The steps that exist, which are those in which some replica has rows.
        has_rows: Any = full.any(axis=1)
        if self._plan.drops_uneven:
            first = self._num_steps
            everywhere = [full, *(steps.full(first, first + len(full)) for steps in self._steps_of_others())]
            by_replica = np.concatenate(everywhere, axis=1)
            has_rows = by_replica.any(axis=1)
            uneven = np.flatnonzero(has_rows & ~by_replica.all(axis=1))
            if len(uneven):
                self._end()
                return has_rows[: uneven[0]]
        elif not has_rows.all():
            first = self._num_steps
            for steps in self._steps_of_others():
                has_rows |= steps.full(first, first + len(full)).any(axis=1)
        return has_rows

    def _steps_of_others(self) -> list[Cuts | CountedSteps | RemoteSteps]:
        if self._other_steps is None:
            self._other_steps = list(map(self._make_steps, self._plan.others, itertools.count(1)))
        return self._other_steps

    def _make_steps(self, other: Cuts | Pipeline | RemotePipeline, number: int) -> Cuts | CountedSteps | RemoteSteps:
        plan = self._plan
        if isinstance(other, Cuts):
            return other
        if isinstance(other, Pipeline):
            return CountedSteps(other, plan.start(number, self._iteration), plan.fetch, self._first_step)
        if plan.peers is None:
            raise ArgumentError(f"no worker can be asked about the pipeline of {other.worker} here")
        return RemoteSteps(other, self._iteration, plan.peers)

    def _end(self) -> None:
        self._is_over = True
        self._condition.notify_all()
        if num_skipped := self._reader.interpreter.num_skipped:
            logger.warning("left out %d elements in all", num_skipped)

    def _drop(self, lane: int) -> None:
        self._queues.pop(lane, None)
        self._begun.discard(lane)
        self._reader.wanted.discard(lane)

    def _fetch_queued(self) -> None:
        # Replicas that have not begun may never begin. Fetch their blocks now, so that the reader's threads can end.
        for lane, queue in list(self._queues.items()):
            try:
                for part in queue:
                    if part.rows is None and part.ref is not None:
                        part.rows = self._reader.caller.result(part.ref.handle)
            except Exception:
                # The replica will read for itself, and raise the error then.
                self._drop(lane)
        self._close()

    def _close(self) -> None:
        for steps in self._other_steps or ():
            if isinstance(steps, CountedSteps):
                steps.close()
        self._reader.close()


class SharedReader:
    """A reader for the replicas of a process that read the same pipeline in one call.

    Each pass is a `SharedPass`.

    Parameters
    ----------
    plan
        The plan of the passes.
    lanes
        These replicas, by their place among those that the pipeline feeds.
    """

    def __init__(self, plan: SharedReadPlan, lanes: Iterable[int]) -> None:
        self.plan = plan
        self._present = set(lanes)
        self._num_lanes = len(self._present)
        self._passes: dict[int, SharedPass] = {}
        self._lock = RLock()

    def begin(self, lane: int, iteration: int) -> SharedPass:
        """Begin a pass for a replica, and return the shared pass or one of its own."""
        with self._lock:
            self._drop_done()
            shared_pass = self._passes.get(iteration)
            if shared_pass is not None and shared_pass.begin(lane):
                return shared_pass
            is_shared = shared_pass is None and len(self._passes) < _MOST_PASSES
            new_pass = SharedPass(self.plan, iteration, self._present if is_shared else {lane})
            new_pass.begin(lane)
            if is_shared:
                self._passes[iteration] = new_pass
            return new_pass

    def wake(self, lane: int) -> None:
        """End the wait of another thread for parts of the replica, which gets no more."""
        for shared_pass in list(self._passes.values()):
            shared_pass.wake(lane)

    def leave(self, lane: int) -> None:
        """Stop taking part in all passes."""
        with self._lock:
            self._present.discard(lane)
            for shared_pass in self._passes.values():
                shared_pass.leave(lane)
            self._drop_done()
        peers = self.plan.peers
        if peers is not None:
            peers.step_counts.leave(peers.key, lane, self._num_lanes)

    def _drop_done(self) -> None:
        self._passes = {number: shared_pass for number, shared_pass in self._passes.items() if not shared_pass.is_done}
