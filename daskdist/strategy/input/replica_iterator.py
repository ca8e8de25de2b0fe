"""`ReplicaIterator`: a replica's part of a distributed dataset that is an argument of `Strategy.run`."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any, NamedTuple, TypeAlias

import optree

from daskdist.core.block import PartlyFailed, writable_element
from daskdist.core.dataset_base import node_of
from daskdist.core.failing.failed_element import FailedElement, must_raise
from daskdist.core.structure import Structure
from daskdist.devices import Device, named
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.stream.synchronized import synchronized
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.ops.with_options import merged_options
from daskdist.passes.numbering import epoch_of_contents, from_first_pass
from daskdist.strategy.collectives.operations import Collect
from daskdist.strategy.collectives.step_counts import AskSteps, PeerPipelines, StepCounts
from daskdist.strategy.group import Replica
from daskdist.strategy.input.device_staging import ahead_of
from daskdist.strategy.input.pass_position import PassPosition
from daskdist.strategy.input.replica_plans import (
    DatasetArgument,
    ReplicaPlan,
    in_pass,
    pinned,
    resumed,
    shared_reader,
)
from daskdist.strategy.input.shared_reader import SharedPass, SharedReader, SharedReadPlan
from daskdist.strategy.replica.call_end import CallEnd
from daskdist.strategy.replica.context import current_replica, meet
from daskdist.strategy.replica.replica_times import ReplicaTimes
from daskdist.strategy.values.optional import Optional
from daskdist.waiting import wait_intervals


class ReplicaIterator(Iterator[Any]):
    """An iterator over a replica's part of a distributed dataset, inside a function that `Strategy.run` calls.

    Several threads of the function may take steps from it: each step goes to exactly one of them.

    Its elements are the replica's parts of the steps, as arrays on the replica's device, or as NumPy arrays if
    `InputOptions` say so. After its end, iterating again makes another pass:
    ``for epoch in range(3): for batch in iterator: ...`` makes three. A loop that was left early continues where it
    was left. A shuffled dataset has another order in each pass. In the first call the orders are those of loops in the
    program; each later call begins with an order that no pass had before.

    Not created directly. It can be used until the function returns.

    Attributes
    ----------
    element_spec
        The spec of its elements; the first length is None if it varies.
    """

    # Checkpoints ask all replicas for the state.
    _is_of_all_replicas = True

    def __init__(
        self,
        plan: ReplicaPlan,
        readers: PassReaders,
        number: int,
        device: Device,
        end: CallEnd,
        times: ReplicaTimes | None,
    ) -> None:
        self.element_spec = plan.element_spec
        # Returns whether the call is to end.
        self._end = end
        self._stop_watching_end = end.on_end(readers.wake)
        # Counts its steps for the dashboard; None in the program's process.
        self._times = times
        self._plan = plan
        self._readers = readers
        self._number = number
        # The number of the pass within the call.
        self._iteration = 0
        # The number of steps that were taken in this pass, and of elements that failed in a step or between steps.
        self._num_taken = 0
        # The shared pass, once there is one.
        self._progress = _Progress()
        self._device = device
        # Copies the elements of this pass to the device.
        self._ahead: DevicePrefetch | None = None
        self._num_elements = 0
        self._is_over = self._is_closed = False
        self._reported: set[str] = set()
        # True if the raised error is of one element and others follow it.
        self._has_more = False
        self._lock = RLock()
        self._elements: Iterator[Any] = self._pass()

    @synchronized
    def __iter__(self) -> ReplicaIterator:
        if self._is_over:
            self._is_over = False
            self._iteration += 1
            self._elements = self._pass()
        return self

    @synchronized
    def __next__(self) -> Any:
        self._end.check()
        self._has_more = False
        try:
            element = self._next_good()
            if self._plan.maps:
                self._has_more = True
                element = self._plan.maps(element, self._number, self._device)
                self._has_more = False
        except StopIteration:
            # Readers end, too, if the call is to end.
            self._end.check()
            self._end.note(self._number, "the end of a pass")
            self._is_over = True
            raise
        except Exception as error:
            # Raise the failure again at the next call, unless other elements follow it.
            if not self._has_more:
                self._elements = _Failed(error)
            self._has_more = False
            raise
        self._end.note(self._number, "batch", self._num_elements)
        self._num_elements += 1
        if self._times is not None:
            self._times.count(element)
        return element

    def _next_good(self) -> Any:
        for element in self._elements:
            self._num_taken += 1
            if not isinstance(element, FailedElement):
                return element
            error = element.again()
            if must_raise(error, self._reported):
                self._has_more = True
                raise error
        raise StopIteration

    def get_next(self) -> Any:
        """Return the value of the next step.

        Raises
        ------
        StopIteration
            The pass has no more steps.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Return the value of the next step in an `Optional`, which is empty at the end of the pass."""
        try:
            return Optional(next(self), self.element_spec, has_value=True)
        except StopIteration:
            return Optional(None, self.element_spec)

    def stats(self) -> dict[str, Any]:
        """Return statistics of this pass so far.

        Returns
        -------
        dict
            ``num_elements``: the elements handed out. If they are copied to a device, ``device`` has the bytes, speed
            and overlap of the copies, see `DevicePrefetch.stats`.
        """
        stats: dict[str, Any] = {"num_elements": self._num_elements}
        return stats if self._ahead is None else {**stats, "device": self._ahead.stats()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, from which `load_state_dict` continues with exactly the remaining rows.

        All replicas must call it at the same step; they get the same state.

        Returns
        -------
        dict
            A state as of `DistributedIterator.state_dict`; both kinds of iterators can load it.

        Raises
        ------
        ArgumentError
            Replicas are at different steps, this iterator is closed, or another thread than that of the replica's
            function calls it.
        CollectiveError
            Another replica does not call it, as for `ReplicaContext.all_reduce`.
        """
        replica = current_replica()
        if replica is None or replica.replica_id_in_sync_group != self._number:
            raise ArgumentError("state_dict: call it in the function of the replica, not in a thread of its own")
        with self._lock:
            part = self._state_part()
        return self._readers.state(meet(replica, Collect("state_dict of a distributed dataset"), part))

    def _state_part(self) -> StatePart:
        if self._is_closed:
            raise ArgumentError("state_dict: this iterator is closed; take the position of one before it is closed")
        position = self._readers.position(self._iteration, self._progress, self._num_taken)
        num_steps = self._readers.num_steps_before(self._iteration) + self._num_taken
        return StatePart(self._iteration, num_steps, self._is_over, position)

    @synchronized
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position of an iterator over the same distributed dataset, taken in any process.

        All replicas must load the same one before they take steps. There may be other numbers of replicas and workers,
        and another global batch size, see `DistributedIterator.load_state_dict`. A position at the end of a pass is
        followed by the next pass. Later passes have the orders that follow that of the position.

        Raises
        ------
        ArgumentError
            The position is of another dataset or version, or this iterator has begun or is closed.
        """
        if self._is_closed:
            raise ArgumentError("load_state_dict: this iterator is closed; take a new one")
        if self._num_taken or self._iteration or self._is_over or self._readers.resumed is not None:
            raise ArgumentError("load_state_dict: this iterator has begun already; take a new one")
        if self._ahead is not None:
            self._ahead.close(lambda: None)
        self._is_over = self._readers.resume(state)
        self._elements = iter(()) if self._is_over else self._pass()

    def close(self) -> None:
        """Stop reading ahead and drop the data that was read; no step follows."""
        if not self._lock.acquire(blocking=False):
            # Another thread is taking a step, and may be waiting for other replicas.
            self._readers.wake()
            for within_s in wait_intervals("a step of this iterator in another thread", "timeouts.data"):
                if self._lock.acquire(timeout=within_s):
                    break
        try:
            self._close()
        finally:
            self._lock.release()

    def _close(self) -> None:
        self._is_closed = True
        self._stop_watching_end()
        if isinstance(self._elements, Generator):
            self._elements.close()
        self._elements = _Failed(ArgumentError("this iterator is closed: it can be used until its function returns"))
        self._is_over = False
        if self._ahead is None:
            self._readers.leave()
        else:
            # Leave the pass after the copying thread has stopped.
            self._ahead.close(self._readers.leave)

    def _pass(self) -> Iterator[Any]:
        self._num_elements = self._num_taken = 0
        self._progress = _Progress()
        plan, times = self._plan, self._times
        reader, lane = self._readers.of_pass(self._iteration)
        which = reader, lane, self._iteration, self._progress
        if self._device.is_host or not plan.options.fetch_to_device:
            is_writable = bool(merged_options(reader.plan.pipeline.node).writable)
            return _elements(plan, _slices(*which, times), is_writable)
        steps = _steps(plan, _slices(*which, None))
        self._ahead = ahead_of(steps, [self._device], plan.options, interrupt=self._readers.wake)
        pack = plan.source.spec.structure.pack
        return (pack(leaves) for (leaves,) in _timed(self._ahead, times))

    def __repr__(self) -> str:
        return f"<ReplicaIterator of replica {self._number}, pass {self._iteration}: {self.element_spec}>"


class _Failed(Iterator[Any]):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:
        raise self._error


class _Progress:
    # The state of a pass, without a reference to its iterator.
    def __init__(self) -> None:
        self.shared_pass: SharedPass | None = None


# The places and the blocks of a replica's elements.
_Slices: TypeAlias = Generator[tuple[list[int], Any], None, None]

# These are no methods, as a generator with a reference to the iterator would delay its release. Each closes the one
# from which it takes: Python would ignore an interrupt that comes while the garbage collector does.


def _slices(
    reader: SharedReader, lane: int, iteration: int, progress: _Progress, times: ReplicaTimes | None
) -> _Slices:
    progress.shared_pass = reader.begin(lane, iteration)
    parts = progress.shared_pass.parts(lane)
    with contextlib.closing(parts), contextlib.closing(_timed(parts, times)) as timed:
        for part in timed:
            places, rows = part.places, part.rows
            # Keep no reference to a part longer than needed.
            del part
            yield places, rows


def _elements(plan: ReplicaPlan, slices: _Slices, is_writable: bool) -> Generator[Any, None, None]:
    structure: Structure = plan.source.spec.structure
    with contextlib.closing(slices):
        for places, rows in slices:
            is_row = min(places[0], places[-1]) >= 0 and places[-1] - places[0] == len(places) - 1
            if rows is not None and is_row and not isinstance(rows, PartlyFailed):
                elements = rows.elements(places[0], places[-1] + 1)
                yield from map(writable_element, elements) if is_writable else elements
            else:
                for place in places:
                    item = None if place < 0 else rows.raw(place)
                    if isinstance(item, FailedElement):
                        yield item
                        continue
                    element = plan.empty if item is None else structure.pack(item)
                    yield writable_element(element) if is_writable else element


def _steps(plan: ReplicaPlan, slices: _Slices) -> Generator[Any, None, None]:
    # Yield leaves instead of the elements of `_elements`.
    with contextlib.closing(slices):
        for places, rows in slices:
            for place in places:
                yield [plan.no_rows if place < 0 else rows.item(place)]


def _timed(parts: Iterator[Any], times: ReplicaTimes | None) -> Generator[Any, None, None]:
    # Yield the parts, and count the time for which the replica waits for them. All elements of a part arrive together.
    if times is None:
        yield from parts
        return
    while True:
        times.wait()
        try:
            taken = list(itertools.islice(parts, 1))
        finally:
            times.work()
        if not taken:
            return
        # Keep no reference to a part that is used.
        yield taken.pop()


class StatePart(NamedTuple):
    """One replica's part of a state.

    Parameters
    ----------
    iteration
        The number of the pass within the call.
    num_steps
        The number of steps that were taken in that pass.
    is_over
        Whether the pass is over.
    position
        The number of an input pipeline and its position, as data, if the replica knows it.
    """

    iteration: int
    num_steps: int
    is_over: bool
    position: tuple[int, list[Any]] | None


class PassReaders:
    """The shared readers from which a replica takes its part of a distributed dataset, in one call.

    Parameters
    ----------
    token
        The token of the distributed dataset in the call.
    plan
        The plan of the replica's pipeline.
    read_plan
        The plan of the first pass.
    replica, number
        The replica.
    peers
        Returns the other workers' pipelines for a token and the number of a pipeline; None in the program's process.
    """

    def __init__(
        self,
        token: str,
        plan: ReplicaPlan,
        read_plan: SharedReadPlan,
        replica: Replica,
        number: int,
        peers: Callable[[str, int], PeerPipelines] | None,
    ) -> None:
        self._token = token
        self._plan = plan
        self._read_plan = read_plan
        self._replica = replica
        self._number = number
        self._peers = peers
        # The position from which the first pass continues; None if the call begins with a whole pass.
        self.resumed: PassPosition | None = None
        self._first = self._later = self._shared(token, read_plan, plan.first_replica)

    def _shared(self, token: str, read_plan: SharedReadPlan, first_replica: int) -> tuple[SharedReader, int]:
        # Return a reader, and the replica's place among those that it serves.
        number = self._plan.number
        if self._peers is not None:
            read_plan = replace(read_plan, peers=self._peers(token, number))
        read_plan = pinned(self._plan, read_plan, [named(self._replica.device)])
        return shared_reader(token, self._replica.worker, number, read_plan), self._number - first_replica

    def of_pass(self, iteration: int) -> tuple[SharedReader, int]:
        """Return the reader for a pass of the call, and the replica's place among those that it serves."""
        return self._later if iteration else self._first

    def resume(self, state: Any) -> bool:
        """Continue from a position; return whether it is at the end of its pass."""
        plan, (before, lane) = self._plan, self._later
        position = plan.source.position_of(state)
        first_pass = resumed(plan, self._read_plan, position)
        # All replicas of this process that load the same state share readers.
        token = f"{self._token}.{hashlib.sha256(state['position'].encode()).hexdigest()[:16]}"
        self._first = self._shared(f"{token}.first", *first_pass)
        read_plan = replace(self._read_plan, epochs=in_pass(plan, position.epochs).epochs)
        self._later = self._shared(token, read_plan, plan.first_replica)
        self.resumed = position
        before.leave(lane)
        return position.is_over

    def num_steps_before(self, iteration: int) -> int:
        """Return the number of steps of a pass that were taken before this call."""
        return self.resumed.num_steps if self.resumed is not None and not iteration else 0

    def position(self, iteration: int, progress: _Progress, num_taken: int) -> tuple[int, list[Any]] | None:
        """Return the pipeline and its position after some steps of this call; None if another replica returns them."""
        reader, lane = self.of_pass(iteration)
        if lane:
            return None
        shared_pass = progress.shared_pass
        start = reader.plan.start(0, iteration)
        at = start.as_plain(Synchronous()) if shared_pass is None else shared_pass.position(num_taken)
        return self._plan.number, at

    def state(self, parts: Sequence[StatePart]) -> dict[str, Any]:
        """Return the state of the iterators of all replicas.

        Raises
        ------
        ArgumentError
            The replicas are at different steps.
        """
        first, *_ = parts
        for number, part in enumerate(parts):
            if (part.iteration, part.num_steps) != (first.iteration, first.num_steps):
                raise ArgumentError(
                    f"state_dict: replica 0 has taken {first.num_steps} steps of pass {first.iteration}, and replica "
                    f"{number} {part.num_steps} steps of pass {part.iteration}; call it at the same step on all"
                )
        positions = [position for _, position in sorted([part.position for part in parts if part.position])]
        resumed_pass = None if first.iteration else self.resumed
        sections = [] if resumed_pass is None else resumed_pass.sections
        done: frozenset[int] = frozenset()
        if resumed_pass is not None and first.num_steps == resumed_pass.num_steps:
            done = resumed_pass.done
        is_over = any(part.is_over for part in parts)
        return self._plan.source.state(positions, sections, first.num_steps, done, is_over=is_over)

    def wake(self) -> None:
        """End the wait of another thread for steps of the replica, which gets no more."""
        for reader, lane in self._all():
            reader.wake(lane)

    def leave(self) -> None:
        """Stop taking part in all passes."""
        for reader, lane in self._all():
            reader.leave(lane)

    def _all(self) -> list[tuple[SharedReader, int]]:
        return list(dict.fromkeys((self._first, self._later)))


class WorkerServices(NamedTuple):
    """The services of a worker that a replica's iterators use.

    Parameters
    ----------
    fetch
        Gets data from the cluster.
    step_counts
        Answers other workers about the steps of this worker's pipelines.
    ask
        Asks other workers about theirs.
    times
        The times of the replica's steps.
    """

    fetch: Fetch
    step_counts: StepCounts
    ask: AskSteps
    times: ReplicaTimes


def replica_iterators(
    leaves: list[Any],
    treespec: Any,
    replica: Replica,
    number: int,
    end: CallEnd,
    services: Callable[[], WorkerServices] | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the arguments of a function on a replica: iterators replace plans, and are closed at exit.

    ``end`` says whether the call is to end. On a worker, ``services`` returns its parts that iterators use.
    """
    nest = treespec.unflatten(leaves)
    is_plain = ReplicaPlan not in map(type, leaves)
    return contextlib.nullcontext(nest) if is_plain else _open_iterators(nest, replica, number, end, services)


@contextlib.contextmanager
def _open_iterators(
    nest: Any, replica: Replica, number: int, end: CallEnd, services: Callable[[], WorkerServices] | None
) -> Iterator[Any]:
    with contextlib.ExitStack() as opened:

        def iterator(argument: Any) -> Any:
            if type(argument) is not DatasetArgument:
                return argument
            replica_iterator = _iterator(argument, replica, number, end, None if services is None else services())
            opened.callback(replica_iterator.close)
            return replica_iterator

        yield optree.tree_map(iterator, nest, is_leaf=lambda leaf: type(leaf) is DatasetArgument, none_is_leaf=True)


def _iterator(
    argument: DatasetArgument, replica: Replica, number: int, end: CallEnd, services: WorkerServices | None
) -> ReplicaIterator:
    plan: ReplicaPlan = argument.plan
    token, _, numbers = argument.turn.partition(":")
    read_plan = in_pass(plan, [(tuple(pass_numbers), *rest) for pass_numbers, *rest in json.loads(numbers)])
    peers = None
    if services is not None:
        # Other workers are asked in other threads, which get the settings of the call.
        within, ask, step_counts = contextvars.copy_context(), services.ask, services.step_counts

        def peers(token: str, number: int) -> PeerPipelines:
            return PeerPipelines((token, number), step_counts, lambda *args: within.copy().run(ask, *args))

        read_plan = replace(read_plan, fetch=services.fetch)
    if argument.held is not None:
        node = node_of(argument.held)
        pipeline = replace(read_plan.pipeline, node=node)
        # The operation that replaces the whole dataset has one number for all of its operations.
        (((number_of_all,), *rest), *others) = read_plan.epochs
        epoch = epoch_of_contents(node, from_first_pass(node, (number_of_all, *rest)))
        read_plan = replace(read_plan, pipeline=pipeline, epochs=(epoch, *others))
        pipelines = list(plan.source.pipelines)
        pipelines[plan.number] = pipeline
        plan = replace(plan, source=replace(plan.source, pipelines=pipelines))
    readers = PassReaders(token, plan, read_plan, replica, number, peers)
    times = None if services is None else services.times
    return ReplicaIterator(plan, readers, number, named(replica.device), end, times)
