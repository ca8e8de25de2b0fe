"""Whole loops on the replicas: distributed datasets given to `Strategy.run`, as iterators over a replica's own part."""

from __future__ import annotations

import contextlib
import contextvars
import json
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count, zip_longest
from threading import Lock, RLock
from typing import Any, Final, NamedTuple

import optree

from daskdist.core.block import writable_element
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.failing.failed_elements import FailedElement, PartlyFailed, ReportedFailures, raw_item
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import walk
from daskdist.core.primitive import Epoch, Read
from daskdist.core.spec import ElementSpec, PerReplicaSpec
from daskdist.core.structure import Structure
from daskdist.devices import Device, named
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import Fetch, is_future
from daskdist.execute.callers.now import Now
from daskdist.execute.messages.pickling import futures_in
from daskdist.execute.stream.locked import locked
from daskdist.execute.transfer.copier import pinned_empty
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.ops.nested import Expansion
from daskdist.ops.with_options import merged_options
from daskdist.passes.autoshard import read_by
from daskdist.strategy.collectives.step_counts import Ask, Board, Outside, Unseen
from daskdist.strategy.group import Replica
from daskdist.strategy.input.dataset import DistributedDataset, Feeding
from daskdist.strategy.input.device_maps import DeviceMaps
from daskdist.strategy.input.iterator import DistributedIterator, ahead_of
from daskdist.strategy.input.on_worker import OnWorker
from daskdist.strategy.input.optional import Optional
from daskdist.strategy.input.options import InputOptions
from daskdist.strategy.input.pipeline import Cuts, Pipeline
from daskdist.strategy.input.shared_reader import Meeting, Reading
from daskdist.strategy.replica.contract import StrategyContract
from daskdist.strategy.values.extract import ExtractAll, PerReplicaRef
from daskdist.strategy.values.flat import flattened
from daskdist.strategy.values.per_replica import PerReplica

# Where the replicas of one process come together, by the call, the worker and the pipeline; each goes with the last of
# its iterators.
_meetings: Final[weakref.WeakValueDictionary[tuple[str, str | None, int], Meeting]] = weakref.WeakValueDictionary()
_opening: Final = Lock()
_OVER: Final = object()
_INSTEAD: Final = (
    "make the datasets on their workers, with distribute_datasets_from_function, or iterate over the distributed "
    "dataset here and give run each step"
)


@dataclass(frozen=True)
class Plan:
    """What some replicas need to read their own parts of a distributed dataset.

    Parameters
    ----------
    reading
        What their input pipeline is, and what others have a say in it.
    number
        Which input pipeline that is.
    first_replica
        The first replica that it serves; the others follow.
    spec
        The spec of what a replica is given, whatever its length along the first axis.
    element_spec
        The same as users see it.
    options
        How the replicas are fed.
    maps
        What they call with what they are given, on their devices.
    """

    reading: Reading
    number: int
    first_replica: int
    spec: ElementSpec
    element_spec: Any
    options: InputOptions
    maps: DeviceMaps

    @cached_property
    def no_rows(self) -> list[Any]:
        """The leaves of what a replica is given in a step for which it has no rows."""
        return [] if self.reading.is_alone else [leaf.zeros() for leaf in self.spec.leaves]

    @cached_property
    def empty(self) -> Any:
        """What a replica is given in a step for which it has no rows."""
        return None if self.reading.is_alone else self.spec.structure.pack(self.no_rows)


@dataclass(frozen=True)
class Plans:
    """The plans for a distributed dataset.

    Parameters
    ----------
    plans
        One for each of its input pipelines.
    futures
        By key, what of its data lies on the cluster already.
    around
        By key, what its functions refer to on the cluster.
    """

    plans: list[Plan]
    futures: dict[Any, Any]
    around: dict[Any, Any]


class Fed(NamedTuple):
    """What a replica is sent in the place of a distributed dataset.

    Parameters
    ----------
    plan
        Its plan, the same for every call.
    turn
        Which call this is, and the numbers of its first pass for each input pipeline.
    held
        The dataset, where it is on the worker already.
    """

    plan: Any
    turn: Any
    held: Any


class ReplicaIterator(Iterator[Any]):
    """A replica's own part of a distributed dataset, in a function that `Strategy.run` calls.

    Several threads of that function may take steps from it: each step goes to exactly one of them.

    It gives what a step of the distributed dataset has for the replica, one step after the other, as arrays on the
    replica's device, or as NumPy arrays where `InputOptions` say so. At its end it can be iterated over again, which is
    another pass: ``for epoch in range(3): for batch in iterator: ...`` makes three. Leaving a loop early and coming
    back goes on where it was left. Passes of a shuffled dataset have different orders within a call; the program counts
    one for the call, so that the next call begins with the second of them. Make all epochs in one call, or one in each.

    Not made directly. It is of use until the function returns.

    Attributes
    ----------
    element_spec
        The spec of what it gives, the first length None where it can vary.
    """

    def __init__(self, plan: Plan, meeting: Meeting, lane: int, device: Device) -> None:
        self.element_spec = plan.element_spec
        self._plan = plan
        self._meeting = meeting
        self._lane = lane
        # Counted within the call.
        self._iteration = 0
        self._device = device
        # What puts elements on the device, in this pass.
        self._ahead: DevicePrefetch | None = None
        self._num_elements = 0
        self._is_over = False
        self._told = ReportedFailures()
        # Whether the error that is raised is of an element behind which there are others.
        self._goes_on = False
        self.lock = RLock()
        self._elements: Iterator[Any] = self._pass()

    @locked
    def __iter__(self) -> ReplicaIterator:
        if self._is_over:
            self._is_over = False
            self._iteration += 1
            self._elements = self._pass()
        return self

    @locked
    def __next__(self) -> Any:
        try:
            element = self._next_good()
            if self._plan.maps:
                replica = self._plan.first_replica + self._lane
                element = self._plan.maps(element, replica, self._device)
        except StopIteration:
            self._is_over = True
            raise
        except Exception as error:
            # What failed is not passed over in silence the next time, unless that is behind it.
            if not self._goes_on:
                self._elements = _Failed(error)
            self._goes_on = False
            raise
        self._num_elements += 1
        return element

    def _next_good(self) -> Any:
        while isinstance(element := next(self._elements), FailedElement):
            error = element.again()
            if self._told.is_new(error):
                self._goes_on = True
                raise error
        return element

    def get_next(self) -> Any:
        """The next step's value.

        Raises
        ------
        StopIteration
            There are no more in this pass.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """The next step's value, or at the end of the pass an `Optional` without."""
        found = next(self, _OVER)
        if found is _OVER:
            return Optional(None, self.element_spec)
        return Optional(found, self.element_spec, has_value=True)

    def stats(self) -> dict[str, Any]:
        """What came of this pass so far.

        Returns
        -------
        dict
            ``num_elements``, those handed out; and where they are put on a device, ``device``, see
            `DevicePrefetch.stats`: bytes, speed and overlap of the copies.
        """
        found: dict[str, Any] = {"num_elements": self._num_elements}
        return found if self._ahead is None else {**found, "device": self._ahead.stats()}

    def close(self) -> None:
        """Stop reading ahead and let go of what was read; nothing comes after it."""
        if not self.lock.acquire(blocking=False):
            # Another thread is in a step, and may wait there for other replicas.
            self._meeting.wake(self._lane)
            self.lock.acquire()
        try:
            self._close()
        finally:
            self.lock.release()

    def _close(self) -> None:
        if isinstance(self._elements, Generator):
            self._elements.close()
        self._elements = _Failed(ArgumentError("this iterator is closed: it is of use in the call it was given to"))
        self._is_over = False
        leave = partial(self._meeting.leave, self._lane)
        if self._ahead is None:
            leave()
        else:
            # Not while its thread takes part.
            self._ahead.close(leave)

    def _pass(self) -> Iterator[Any]:
        self._num_elements = 0
        which = self._plan, self._meeting, self._lane, self._iteration
        if self._device.is_host or not self._plan.options.fetch_to_device:
            return _elements(*which)
        self._ahead = ahead_of(
            _steps(*which),
            [self._device],
            self._plan.options,
            Now.bundle_bytes,
            interrupt=partial(self._meeting.wake, self._lane),
        )
        return _packed(self._ahead, self._plan.spec.structure)

    def __repr__(self) -> str:
        replica = self._plan.first_replica + self._lane
        return f"<ReplicaIterator of replica {replica}, pass {self._iteration}: {self.element_spec}>"


class _Failed(Iterator[Any]):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:
        raise self._error


def _elements(plan: Plan, meeting: Meeting, lane: int, iteration: int) -> Iterator[Any]:
    # Not a method: an iterator that is let go of is to go at once, with what was read for it.
    structure: Structure = plan.spec.structure
    is_writable = bool(merged_options(meeting.node).writable)
    # Nothing is held on to but what is handed out.
    parts = meeting.begin(lane, iteration).parts(lane)
    try:
        for part in parts:
            places, rows = part.places, part.rows
            del part
            is_row = min(places[0], places[-1]) >= 0 and places[-1] - places[0] == len(places) - 1
            if rows is not None and is_row and not isinstance(rows, PartlyFailed):
                elements = rows.elements(places[0], places[-1] + 1)
                yield from map(writable_element, elements) if is_writable else elements
            else:
                for place in places:
                    item = None if place < 0 else raw_item(rows, place)
                    if isinstance(item, FailedElement):
                        yield item
                        continue
                    element = plan.empty if item is None else structure.pack(item)
                    yield writable_element(element) if is_writable else element
    finally:
        parts.close()  # type: ignore[attr-defined]


def _steps(plan: Plan, meeting: Meeting, lane: int, iteration: int) -> Iterator[Any]:
    # As `_elements`: the leaves, for the one replica that there is.
    parts = meeting.begin(lane, iteration).parts(lane)
    try:
        for part in parts:
            places, rows = part.places, part.rows
            del part
            for place in places:
                yield [plan.no_rows if place < 0 else rows.item(place)]
    finally:
        parts.close()  # type: ignore[attr-defined]


def _packed(ahead: DevicePrefetch, structure: Structure) -> Iterator[Any]:
    return (structure.pack(leaves) for (leaves,) in ahead)


# --- on the side of the program ---


def with_plans(strategy: StrategyContract, leaves: list[Any], treespec: Any) -> tuple[list[Any], Any, list[Meeting]]:
    """What `run` is given, with plans in the places of distributed datasets; and what is to live as long as the call.

    Raises
    ------
    ArgumentError
        One is of another strategy, or is an iterator, or cannot be read by the replicas themselves.
    """
    kinds = {type(leaf) for leaf in leaves}
    if DistributedIterator in kinds:
        raise ArgumentError(
            "run: an iterator over a distributed dataset stays in its program; give the distributed dataset itself, "
            "of which each replica has an iterator then, or what next() gives"
        )
    if DistributedDataset not in kinds:
        return leaves, treespec, []
    meetings: list[Meeting] = []

    def plan(leaf: Any) -> Any:
        return _fed(strategy, leaf, meetings) if type(leaf) is DistributedDataset else leaf

    return *flattened(treespec.unflatten(map(plan, leaves))), meetings


def _fed(strategy: StrategyContract, dataset: DistributedDataset, meetings: list[Meeting]) -> Fed:
    if dataset.strategy is not strategy:
        raise ArgumentError(
            "run: a distributed dataset is of another strategy; distribute the dataset with the one that is to run"
        )
    # First: where replicas are lost, or functions are defined again, it has other plans.
    feeding = dataset.feeding_of_pass()
    pipelines = feeding.pipelines
    found: Plans | None = dataset.plans
    if found is None:
        found = dataset.plans = _plans_of(strategy, dataset, feeding)
    plans: Sequence[Any] = found.plans
    if found.futures or found.around:
        plans = strategy.internals.input.with_kept_blocks(plans, found.futures, found.around)
    # Not before it is known that there will be a call.
    token = uuid.uuid4().hex
    epochs = feeding.begin_pass()
    turn = f"{token}:{json.dumps(epochs)}"
    by_replica = [plan for plan, pipeline in zip(plans, pipelines, strict=True) for _ in pipeline.consumers]
    held: Any = None
    if isinstance(pipelines[0].node, OnWorker):
        handles = [pipeline.node.held for pipeline in pipelines for _ in pipeline.consumers]  # type: ignore[attr-defined]
        workers = tuple(replica.worker for replica in strategy.replicas)
        held = PerReplica.of(PerReplicaRef(strategy.internals.backend, handles, ExtractAll(), workers))
    elif strategy.workers == (None,):
        # Replicas of this process, which may come one after the other, find what was read for them.
        devices = [named(replica.device) for replica in strategy.replicas]
        for plan in plans:
            own = devices[plan.first_replica : plan.first_replica + len(plan.reading.pipeline.consumers)]
            meetings.append(_meeting(token, None, plan, _pinned(plan, _in_pass(plan, epochs), own)))
    return Fed(PerReplica(by_replica), turn, held)


def _plans_of(strategy: StrategyContract, dataset: DistributedDataset, feeding: Feeding) -> Plans:
    pipelines = feeding.pipelines
    futures: dict[Any, Any] = {}
    around: dict[Any, Any] = {}
    if strategy.workers != (None,):
        for pipeline in pipelines:
            futures |= _futures_of(pipeline)
            around |= _futures_around(pipeline)
    num_replicas = strategy.num_replicas_in_sync
    # Anew: what was found out of them here need not travel.
    fresh = [
        Pipeline(
            None if isinstance(each.node, OnWorker) else each.node,  # type: ignore[arg-type]
            each.readers,
            each.consumers,
            each.varies,
        )
        for each in pipelines
    ]
    first_replicas = accumulate((len(each.consumers) for each in pipelines), initial=0)
    says = list(map(_say, pipelines, fresh, count(), first_replicas)) if len(pipelines) > 1 else []
    if strategy.workers != (None,):
        for pipeline, say in zip_longest(pipelines, says):
            _check_located(strategy, pipeline, say)
    plans, first_replica = [], 0
    for number, pipeline in enumerate(fresh):
        others = tuple(say for place, say in enumerate(says) if place != number)
        reading = Reading(
            pipeline,
            others,
            num_replicas == 1,
            feeding.drops_uneven,
            dataset.options.per_replica_buffer_size,
            ((0,),) * len(fresh),
        )
        replicas = strategy.replicas[first_replica : first_replica + len(pipeline.consumers)]
        if dataset.options.fetch_to_device:
            reading = replace(reading, devices=tuple(replica.device for replica in replicas))
        spec = _spec_of_one(dataset.known_element_spec)
        maps = feeding.maps[number]
        plans.append(Plan(reading, number, first_replica, feeding.spec, spec, dataset.options, maps))
        first_replica += len(pipeline.consumers)
    return Plans(plans, futures, around)


def _say(pipeline: Pipeline, fresh: Pipeline, number: int, first_replica: int) -> Cuts | Pipeline | Unseen:
    # What tells others in which steps a pipeline has rows.
    known = Cuts.of(pipeline)
    if known is not None:
        return known
    if not isinstance(pipeline.node, OnWorker):
        return fresh
    num_replicas, num_elements = len(pipeline.consumers), pipeline.node.cardinality
    if num_elements != UNKNOWN:
        return Cuts(1, num_elements, 0, 1, num_replicas)
    return Unseen(pipeline.node.worker, number, tuple(range(first_replica, first_replica + num_replicas)))


def _check_located(strategy: StrategyContract, pipeline: Pipeline, say: Cuts | Pipeline | Unseen | None) -> None:
    # Whoever reads a file is to have it. What the data alone tells, all workers read.
    locations = merged_options(pipeline.node).locations
    if locations is None:
        return
    addresses = strategy.internals.input.addresses(locations)
    readers = strategy.workers if isinstance(say, Pipeline) else dict.fromkeys(pipeline.consumers)
    for split in (split for splits in read_by(pipeline.node) for split in splits if split.path):
        there = addresses(split.path)
        lacking = [str(worker) for worker in readers if worker not in there]
        if there and lacking:
            raise ArgumentError(
                f"run: {split.path} is on disks of some workers only (Options.locations: {', '.join(there)}), and "
                f"replicas on {', '.join(lacking)} would read it themselves; {_INSTEAD}"
            )
    for node in walk(pipeline.node):
        if isinstance(node, Expansion) and node.reads_files is not False:
            raise ArgumentError(
                "run: files of the distributed dataset are on disks of some workers only (Options.locations), and "
                f"which files the function of {node.name} reads is known when they are read; {_INSTEAD}"
            )


def _futures_of(pipeline: Pipeline) -> dict[Any, Any]:
    sources = [node.lower(()) for node in walk(pipeline.node) if not node.inputs]
    graphs = [source.graph for source in sources if isinstance(source, Read) and source.graph is not None]
    tasks = (task for graph in graphs for task in graph().values())
    return {task.key: task for task in tasks if is_future(task)}


def _futures_around(pipeline: Pipeline) -> dict[Any, Any]:
    functions = [each for node in walk(pipeline.node) for each in vars(node).values() if isinstance(each, UserFunction)]
    return futures_in(functions) if functions else {}


def _spec_of_one(element_spec: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.specs[0] if isinstance(leaf, PerReplicaSpec) else leaf, element_spec)


# --- on the side of the replica ---


class Around(NamedTuple):
    """What there is around a replica on a worker.

    Parameters
    ----------
    fetch
        Brings what the cluster has.
    board
        Where the worker's pipelines are told of.
    ask
        Asks other workers of theirs.
    """

    fetch: Fetch
    board: Board
    ask: Ask


def fed(
    leaves: list[Any], treespec: Any, replica: Replica, number: int, around: Callable[[], Around] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """What a function is called with on a replica, with iterators in the places of plans; they end with the block.

    On a worker ``around`` gives what there is around it.
    """
    nest = treespec.unflatten(leaves)
    is_plain = Plan not in map(type, leaves)
    return contextlib.nullcontext(nest) if is_plain else _with_iterators(nest, replica, number, around)


@contextlib.contextmanager
def _with_iterators(nest: Any, replica: Replica, number: int, around: Callable[[], Around] | None) -> Iterator[Any]:
    with contextlib.ExitStack() as opened:

        def iterator(each: Any) -> Any:
            if type(each) is not Fed:
                return each
            made = _iterator(each, replica, number, None if around is None else around())
            opened.callback(made.close)
            return made

        yield optree.tree_map(iterator, nest, is_leaf=lambda each: type(each) is Fed, none_is_leaf=True)


def _iterator(given: Fed, replica: Replica, number: int, around: Around | None) -> ReplicaIterator:
    plan: Plan = given.plan
    token, _, numbers = given.turn.partition(":")
    reading = _in_pass(plan, [(tuple(each), *rest) for each, *rest in json.loads(numbers)])
    if around is not None:
        # Those that ask are other threads; the settings of the call count for them, too.
        within = contextvars.copy_context()
        ask = around.ask
        outside = Outside(token, plan.number, around.board, lambda *args: within.copy().run(ask, *args))
        reading = replace(reading, fetch=around.fetch, outside=outside)
    if given.held is not None:
        pipeline = replace(reading.pipeline, node=given.held.node)
        # The number of the one operation that stands for all of the dataset.
        (((number_of_all,), *rest), *others) = reading.epochs
        reading = replace(reading, pipeline=pipeline, epochs=((number_of_all, *rest), *others))
    device = named(replica.device)
    meeting = _meeting(token, replica.worker, plan, _pinned(plan, reading, [device]))
    return ReplicaIterator(plan, meeting, number - plan.first_replica, device)


def _in_pass(plan: Plan, epochs: Sequence[Epoch]) -> Reading:
    # Those of the other pipelines are in the order of these.
    own = epochs[plan.number]
    others = [epoch for number, epoch in enumerate(epochs) if number != plan.number]
    return replace(plan.reading, epochs=(own, *others))


def _pinned(plan: Plan, reading: Reading, devices: Sequence[Device]) -> Reading:
    # Elements that go to devices are put together where those copy from.
    first = devices[0]
    if not plan.options.fetch_to_device or any(each.is_host or each.kind != first.kind for each in devices):
        return reading
    return replace(reading, empty=pinned_empty(first))


def _meeting(token: str, worker: str | None, plan: Plan, reading: Reading) -> Meeting:
    key = token, worker, plan.number
    with _opening:
        found = _meetings.get(key)
        if found is None:
            consumers = reading.pipeline.consumers
            found = Meeting(reading, [lane for lane, each in enumerate(consumers) if each == worker])
            _meetings[key] = found
        return found
