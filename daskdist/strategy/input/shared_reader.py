"""Passes that the replicas of one process make together: input is read once, and each replica takes its own part."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, RLock
from typing import Any, Final

import numpy as np

from daskdist.core.primitive import Epoch
from daskdist.core.randomness.pass_numbers import later
from daskdist.core.selection.block_ref import BlockRef
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.stream.bundle_builder import Lane
from daskdist.execute.stream.gather import Empty
from daskdist.execute.stream.interpreter import logger
from daskdist.strategy.collectives.step_counts import PeerPipelines, RemotePipeline, RemoteSteps
from daskdist.strategy.input.pipeline import Cuts, Pipeline
from daskdist.strategy.input.pipeline_reader import ComputedSteps, CountedSteps, PipelineReader

# A replica that is ahead of one that makes no progress goes on by one stretch after so long: the other may be waiting
# for it somewhere else.
_PATIENCE_S: Final = 5.0
# Somebody who has the turn, and does not read, gives it back sooner.
_WAKE_S: Final = 0.1
# Steps looked at together beyond the end of a replica's own pipeline.
_STEPS_AT_ONCE: Final = 64
# Passes under way of one call: replicas that have not come to them yet read for themselves.
_MOST_PASSES: Final = 16


@dataclass(slots=True)
class StepSlice:
    """The elements of one replica in some consecutive steps.

    Parameters
    ----------
    ref
        The block its elements are in; None where it has none.
    places
        For each step the element's place in that block; -1 for one without rows.
    rows
        The block itself, where it was waited for already.
    """

    ref: BlockRef | None
    places: list[int]
    rows: Any = None

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes while it is kept."""
        return 0 if self.ref is None else self.ref.nbytes


@dataclass(frozen=True)
class SharedReadPlan:
    """The pipelines of a pass, and how they are read.

    Parameters
    ----------
    pipeline
        Serves the replicas.
    others
        The pipelines of other replicas, which have a say in what a step is: how they are cut; or where only their data
        tells, they themselves, or who can tell.
    is_alone
        Whether there is one replica in all.
    drops_uneven
        Whether the end is before the first step in which a replica would have nothing.
    num_steps_ahead
        Steps that are built ahead of use whatever that takes.
    epochs
        The first pass of a call: of the pipeline, and then of each other one.
    fetch
        Brings what the cluster has, on a worker.
    peers
        Tells others what only this worker can tell, and asks them.
    empty
        Makes the arrays into which elements are copied; NumPy's if None.
    devices
        The names of the devices of the replicas that the pipeline serves, where elements are put on them.
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


class SharedPass:
    """One pass over a pipeline, by some of the replicas it serves.

    What one asks for is kept for the others until they take it. A replica that is ahead waits for the slowest of those
    that take part, once a window's bytes are kept for them. Those that have not begun, which may be waiting for it to
    end, are kept as much for, and read for themselves when they begin later than that.

    Parameters
    ----------
    plan
        What it is of.
    iteration
        Which pass of the call, from 0 on.
    lanes
        The replicas that may take part, by their place among those that the pipeline serves.
    """

    def __init__(self, plan: SharedReadPlan, iteration: int, lanes: Iterable[int]) -> None:
        self._plan = plan
        self._iteration = iteration
        self._queues: dict[int, deque[StepSlice]] = {lane: deque() for lane in lanes}
        self._begun: set[int] = set()
        self._ending: set[int] = set()
        self._reader = PipelineReader(
            plan.pipeline,
            later(plan.epochs[0], iteration),
            set(self._queues),
            is_alone=plan.is_alone,
            num_steps_ahead=plan.num_steps_ahead,
            fetch=plan.fetch,
            empty=plan.empty,
            devices=plan.devices,
        )
        self._watched: list[ComputedSteps | CountedSteps | RemoteSteps] | None = None
        self._num_steps = 0
        # The lanes and steps that were read and are not handed on yet, and from which place on.
        self._rest: tuple[list[Lane] | None, Any, int] | None = None
        # True once there is no more to read.
        self._is_read = False
        # True while a replica waits for the answer of another worker.
        self._is_asking = False
        self._is_over = False
        self._failure: Exception | None = None
        # One thread may come here twice: iterators are let go of by the garbage collector too.
        self._turn = Condition(RLock())
        self._num_waiting = 0

    @property
    def is_done(self) -> bool:
        """Return whether no replica takes part any more, or may."""
        return not self._queues

    @property
    def num_bytes_for_late(self) -> int:
        """The bytes that are kept for replicas that have not begun."""
        with self._turn:
            return sum(self._kept_for(lane) for lane in self._queues if lane not in self._begun)

    def begin(self, lane: int) -> bool:
        """Take part from the first step on; False where that is no longer to be had."""
        with self._turn:
            if lane not in self._queues:
                return False
            self._begun.add(lane)
            return True

    def leave(self, lane: int) -> None:
        """Take no further part."""
        with self._turn:
            self._drop(lane)
            self._turn.notify_all()
            if self._is_over and not self._begun:
                self._settle()
            if not self._queues:
                self._close()

    def wake(self, lane: int) -> None:
        """End the waiting of a replica, which another thread takes parts for: nothing more comes for it."""
        self._ending.add(lane)
        # Whoever has the turn looks before it waits; it may also be reading, which is not waited for.
        if self._turn.acquire(timeout=_WAKE_S):
            try:
                self._turn.notify_all()
            finally:
                self._turn.release()

    def parts(self, lane: int) -> Iterator[StepSlice]:
        """Yield the parts of a replica in order; elements of one block come together."""
        try:
            while (part := self._take(lane)) is not None:
                if part.rows is None and part.ref is not None:
                    part.rows = self._reader.caller.result(part.ref.handle)
                yield part
        finally:
            self.leave(lane)

    def drop_late(self) -> None:
        """Keep nothing for those that have not begun."""
        with self._turn:
            for lane in [each for each in self._queues if each not in self._begun]:
                self._drop(lane)

    def _take(self, lane: int) -> StepSlice | None:
        queue = self._queues[lane]
        while True:
            if queue:
                part = queue.popleft()
                if self._num_waiting:
                    with self._turn:
                        self._turn.notify_all()
                return part
            with self._turn:
                if queue:
                    continue
                if lane in self._ending:
                    return None
                if self._failure is not None:
                    raise _like(self._failure)
                if self._is_over:
                    return None
                if self._is_asking:
                    self._turn.wait(_PATIENCE_S)
                    continue
                if self._lead_bytes(lane) > self._reader.limit_bytes and self._waited(lane):
                    continue
                asked = self._pull()
                self._is_asking = bool(asked)
            if asked:
                self._ask(asked)

    def _lead_bytes(self, lane: int) -> int:
        return max((self._kept_for(each) for each in self._begun if each != lane), default=0)

    def _waited(self, lane: int) -> bool:
        # True if the others came nearer.
        self._num_waiting += 1
        try:
            return self._turn.wait_for(
                lambda: (
                    bool(self._queues[lane])
                    or self._is_over
                    or lane in self._ending
                    or self._lead_bytes(lane) <= self._reader.limit_bytes
                ),
                _PATIENCE_S,
            )
        finally:
            self._num_waiting -= 1

    def _kept_for(self, lane: int) -> int:
        return sum(part.num_bytes for part in tuple(self._queues[lane]))

    def _ask(self, asked: Sequence[RemoteSteps]) -> None:
        # Without the turn: others may take what there is, or leave.
        failure: Exception | None = None
        try:
            for each in asked:
                each.ask(self._num_steps)
        except Exception as error:
            failure = error
        with self._turn:
            self._is_asking = False
            if failure is not None:
                self._fail(failure)
            self._turn.notify_all()

    def _fail(self, error: Exception) -> None:
        # Parts that came before it are handed out first.
        self._failure, self._is_over = error, True
        self._turn.notify_all()

    def _pull(self) -> list[RemoteSteps]:
        # Read on; return the remote pipelines that must be asked first, if any.
        if self.num_bytes_for_late > self._reader.limit_bytes:
            self.drop_late()
        try:
            told = [each for each in self._others() if isinstance(each, RemoteSteps)]
            if self._rest is None:
                self._read()
            if self._rest is None:
                if asked := [each for each in told if not each.is_known(self._num_steps)]:
                    return asked
                if all(each.is_over(self._num_steps) for each in self._others()):
                    self._end()
                    return []
                self._rest = None, np.zeros((_STEPS_AT_ONCE, len(self._plan.pipeline.consumers)), bool), 0
            lanes, full, begin = self._rest
            number = self._num_decided(full[begin:], told) if told else len(full) - begin
            if not number:
                return [each for each in told if not each.is_known(self._num_steps)]
            self._rest = (lanes, full, begin + number) if lanes and begin + number < len(full) else None
            self._hand_on(lanes, full[begin : begin + number], begin)
        except Exception as error:
            self._fail(error)
        return []

    def _read(self) -> None:
        # The next steps of the pipeline, if there are any.
        pulled = None if self._is_read else self._reader.pull()
        peers = self._plan.peers
        if pulled is not None:
            self._rest = (*pulled, 0)
            if peers is not None:
                peers.add(self._iteration, self._num_steps, pulled[1])
        elif not self._is_read:
            self._is_read = True
            if peers is not None:
                nothing = np.zeros((0, len(self._plan.pipeline.consumers)), bool)
                peers.add(self._iteration, self._num_steps, nothing, is_over=True)

    def _num_decided(self, full: Any, told: Sequence[RemoteSteps]) -> int:
        # The number of steps that need no question; another worker may wait for this one to take them.
        to_ask = np.flatnonzero(np.ones(len(full), bool) if self._plan.drops_uneven else ~full.any(axis=1))
        if not len(to_ask):
            return len(full)
        if to_ask[0]:
            return int(to_ask[0])
        if not all(each.is_known(self._num_steps) for each in told):
            return 0
        return min(each.num_known(self._num_steps, len(full)) for each in told)

    def _hand_on(self, lanes: list[Lane] | None, full: Any, begin: int) -> None:
        keep = self._steps(full)
        self._num_steps += len(full)
        are_all = bool(keep.all()) and len(keep) == len(full)
        for number, queue in self._queues.items():
            if lanes is None:
                places = np.full(len(full), -1)
            else:
                places = np.where(full[:, number], lanes[number].places[begin : begin + len(full)], -1)
            places = places if are_all else places[: len(keep)][keep]
            if len(places):
                queue.append(StepSlice(None if lanes is None else lanes[number].ref, places.tolist()))
        self._turn.notify_all()

    def _steps(self, full: Any) -> Any:
        # Which of some steps there are: those in which any replica has rows.
        has_rows: Any = full.any(axis=1)
        if self._plan.drops_uneven:
            first = self._num_steps
            everywhere = [full, *(each.full(first, first + len(full)) for each in self._others())]
            found = np.concatenate(everywhere, axis=1)
            has_rows = found.any(axis=1)
            uneven = np.flatnonzero(has_rows & ~found.all(axis=1))
            if len(uneven):
                self._end()
                return has_rows[: uneven[0]]
        elif not has_rows.all():
            first = self._num_steps
            for each in self._others():
                has_rows |= each.full(first, first + len(full)).any(axis=1)
        return has_rows

    def _others(self) -> list[ComputedSteps | CountedSteps | RemoteSteps]:
        if self._watched is None:
            plan = self._plan
            self._watched = list(map(self._other, plan.others, plan.epochs[1:]))
        return self._watched

    def _other(
        self, other: Cuts | Pipeline | RemotePipeline, epoch: Epoch
    ) -> ComputedSteps | CountedSteps | RemoteSteps:
        plan = self._plan
        if isinstance(other, Cuts):
            return ComputedSteps(other)
        if isinstance(other, Pipeline):
            return CountedSteps(other, later(epoch, self._iteration), plan.fetch)
        if plan.peers is None:
            raise ArgumentError(f"nobody here can tell of the pipeline of {other.worker}")
        return RemoteSteps(other, self._iteration, plan.peers)

    def _end(self) -> None:
        self._is_over = True
        self._turn.notify_all()
        if num_skipped := self._reader.interpreter.num_skipped:
            logger.warning("left out %d elements in all", num_skipped)

    def _drop(self, lane: int) -> None:
        self._queues.pop(lane, None)
        self._begun.discard(lane)
        self._reader.wanted.discard(lane)

    def _settle(self) -> None:
        # Nobody may come to take what is left; its threads are not to wait for that.
        for lane, queue in list(self._queues.items()):
            try:
                for part in queue:
                    if part.rows is None and part.ref is not None:
                        part.rows = self._reader.caller.result(part.ref.handle)
            except Exception:
                # It reads for itself, and finds so too.
                self._drop(lane)
        self._close()

    def _close(self) -> None:
        for each in self._watched or ():
            if isinstance(each, CountedSteps):
                each.close()
        self._reader.close()


class SharedReader:
    """The shared passes of the replicas of one process that read the same pipeline in one call.

    Parameters
    ----------
    plan
        What they are given.
    lanes
        Those replicas, by their place among those that the pipeline serves.
    """

    def __init__(self, plan: SharedReadPlan, lanes: Iterable[int]) -> None:
        self._plan = plan
        self.node = plan.pipeline.node
        self._present = set(lanes)
        self._num_lanes = len(self._present)
        self._passes: dict[int, SharedPass] = {}
        self._lock = RLock()

    def begin(self, lane: int, iteration: int) -> SharedPass:
        """Return the pass that a replica takes part in."""
        with self._lock:
            self._tidy()
            found = self._passes.get(iteration)
            if found is not None and found.begin(lane):
                return found
            is_shared = found is None and len(self._passes) < _MOST_PASSES
            made = SharedPass(self._plan, iteration, self._present if is_shared else {lane})
            made.begin(lane)
            if is_shared:
                self._passes[iteration] = made
            return made

    def wake(self, lane: int) -> None:
        """End the waiting of a replica, which another thread takes parts for."""
        for each in list(self._passes.values()):
            each.wake(lane)

    def leave(self, lane: int) -> None:
        """Take part in no pass any more."""
        with self._lock:
            self._present.discard(lane)
            for each in self._passes.values():
                each.leave(lane)
            self._tidy()
        if self._plan.peers is not None:
            self._plan.peers.leave(lane, self._num_lanes)

    def _tidy(self) -> None:
        self._passes = {number: each for number, each in self._passes.items() if not each.is_done}


def _like(error: Exception) -> Exception:
    # An equal error for each replica, which adds its own note to it and its own traceback.
    try:
        found = copy.copy(error)
    except Exception:
        return error
    if hasattr(error, "__notes__"):
        found.__notes__ = list(error.__notes__)
    found.__cause__, found.__suppress_context__ = error.__cause__, True
    return found.with_traceback(error.__traceback__)
