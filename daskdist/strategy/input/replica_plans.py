"""Plans with which replicas read their parts of a distributed dataset that is an argument of `Strategy.run`."""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, zip_longest
from threading import Lock
from typing import Any, Final, NamedTuple

import optree

from daskdist.cached_property import cached_property
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import walk
from daskdist.core.primitive import Epoch, Read
from daskdist.core.spec import PerReplicaSpec
from daskdist.devices import Device, named
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import is_future
from daskdist.execute.messages.pickling import futures_in
from daskdist.execute.transfer.copier import pinned_empty
from daskdist.ops.nested import Expansion
from daskdist.ops.with_options import Options, WithOptions, comes_in_any_order, merged_options
from daskdist.passes.autoshard import read_by
from daskdist.strategy.collectives.step_counts import RemotePipeline
from daskdist.strategy.input.dataset import (
    DistributedDataset,
    feed_for_pass,
    options_of,
    plans_of_feed,
    strategy_of,
)
from daskdist.strategy.input.device_maps import DeviceMaps
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.input.on_worker import OnWorker
from daskdist.strategy.input.options import InputOptions
from daskdist.strategy.input.pass_position import PassPosition, PassSource
from daskdist.strategy.input.pipeline import Cuts, Pipeline
from daskdist.strategy.input.replica_feed import ReplicaFeed
from daskdist.strategy.input.shared_reader import SharedReader, SharedReadPlan
from daskdist.strategy.replica.contract import StrategyContract, internals_of
from daskdist.strategy.values.flat import flattened
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import Refs, TaskResults, whole

# (call, worker, number of the pipeline) -> the reader that replicas of this process share; dropped with the last of
# their iterators.
_shared_readers: Final[weakref.WeakValueDictionary[tuple[str, str | None, int], SharedReader]] = (
    weakref.WeakValueDictionary()
)
_opening: Final = Lock()
_INSTEAD: Final = (
    "make the datasets on their workers, with distribute_datasets_from_function, or iterate over the distributed "
    "dataset here and give run each step"
)


@dataclass(frozen=True)
class ReplicaPlan:
    """The plan with which the replicas of one input pipeline read their parts of a distributed dataset.

    Parameters
    ----------
    read_plan
        The plan for their pipeline, and for the other pipelines, which also decide how many steps there are.
    number
        The number of their input pipeline.
    first_replica
        The first replica that the pipeline feeds; the others follow.
    element_spec
        The spec that users see.
    options
        The options for the input of replicas.
    maps
        The functions that replicas call on their devices.
    source
        The dataset, for positions.
    """

    read_plan: SharedReadPlan
    number: int
    first_replica: int
    element_spec: Any
    options: InputOptions
    maps: DeviceMaps
    source: PassSource

    @property
    def numbers(self) -> list[int]:
        """The numbers of their input pipeline, and of the others, in the order of the plan to read them."""
        return sorted(range(1 + len(self.read_plan.others)), key=lambda number: number != self.number)

    @cached_property
    def no_rows(self) -> list[Any]:
        """The leaves of a replica's element in a step in which it has no rows."""
        return [] if self.read_plan.is_alone else [leaf.zeros() for leaf in self.source.spec.leaves]

    @cached_property
    def empty(self) -> Any:
        """The element of a replica in a step in which it has no rows."""
        return None if self.read_plan.is_alone else self.source.spec.structure.pack(self.no_rows)


@dataclass(frozen=True)
class DatasetPlans:
    """The plans for a distributed dataset.

    Parameters
    ----------
    plans
        A plan for each of its input pipelines.
    futures
        key -> future of its data that the cluster has already.
    referenced
        key -> future that its functions refer to.
    """

    plans: list[ReplicaPlan]
    futures: dict[Any, Any]
    referenced: dict[Any, Any]


class DatasetArgument(NamedTuple):
    """The argument that is sent to a replica instead of a distributed dataset.

    Parameters
    ----------
    plan
        The plan, the same for every call.
    turn
        The id of the call, and the numbers of its first pass for each input pipeline.
    held
        The dataset, if it is on the worker already.
    """

    plan: Any
    turn: Any
    held: Any


def with_plans(
    strategy: StrategyContract, leaves: list[Any], treespec: Any
) -> tuple[list[Any], Any, list[SharedReader]]:
    """Replace distributed datasets among the arguments of `run` by plans; also return the readers to keep until then.

    Raises
    ------
    ArgumentError
        A dataset is of another strategy, or cannot be read by replicas; or an argument is an iterator.
    """
    kinds = set(map(type, leaves))
    if DistributedIterator in kinds:
        raise ArgumentError(
            "run: an iterator over a distributed dataset stays in its program; give the distributed dataset itself, "
            "for which each replica gets an iterator, or the result of next()"
        )
    if DistributedDataset not in kinds:
        return leaves, treespec, []
    readers: list[SharedReader] = []

    def plan(leaf: Any) -> Any:
        return _dataset_argument(strategy, leaf, readers) if type(leaf) is DistributedDataset else leaf

    return *flattened(treespec.unflatten(map(plan, leaves))), readers


def _dataset_argument(
    strategy: StrategyContract, dataset: DistributedDataset, readers: list[SharedReader]
) -> DatasetArgument:
    if strategy_of(dataset) is not strategy:
        raise ArgumentError(
            "run: a distributed dataset is of another strategy; distribute it with the strategy whose run you call"
        )
    # First, since this drops earlier plans after a loss, or when functions were redefined.
    feed = feed_for_pass(dataset)
    pipelines = feed.source.pipelines
    dataset_plans: DatasetPlans = plans_of_feed(dataset, lambda: plans_of(strategy, dataset, feed))
    plans: Sequence[Any] = dataset_plans.plans
    if dataset_plans.futures or dataset_plans.referenced:
        plans = internals_of(strategy).input.with_kept_blocks(plans, dataset_plans.futures, dataset_plans.referenced)
    # From here on it is certain that the call will be made.
    token = uuid.uuid4().hex
    epochs = feed.begin_passes_of_call()
    turn = f"{token}:{json.dumps(epochs)}"
    by_replica = [plan for plan, pipeline in zip(plans, pipelines, strict=True) for _ in pipeline.consumers]
    held: Any = None
    if isinstance(pipelines[0].node, OnWorker):
        futures = [pipeline.node.held for pipeline in pipelines for _ in pipeline.consumers]  # type: ignore[attr-defined]
        results = TaskResults(futures, tuple(replica.worker for replica in strategy.replicas))
        source: Any = internals_of(strategy).backend
        held = PerReplica(Refs(source, results, whole))
    elif strategy.workers == (None,):
        # Replicas of this process may begin one after the other: keep the data that was read for later ones.
        devices = [named(replica.device) for replica in strategy.replicas]
        for plan in plans:
            pipeline_devices = devices[plan.first_replica : plan.first_replica + len(plan.read_plan.pipeline.consumers)]
            readers.append(
                shared_reader(token, None, plan.number, pinned(plan, in_pass(plan, epochs), pipeline_devices))
            )
    return DatasetArgument(PerReplica(by_replica), turn, held)


def plans_of(strategy: StrategyContract, dataset: DistributedDataset, feed: ReplicaFeed) -> DatasetPlans:
    """Return the plans with which replicas read a distributed dataset themselves."""
    pipelines = feed.source.pipelines
    futures: dict[Any, Any] = {}
    referenced: dict[Any, Any] = {}
    if strategy.workers != (None,):
        for pipeline in pipelines:
            futures |= _futures_of(pipeline)
            referenced |= _referenced_futures(pipeline)
    options, spec = options_of(dataset), _spec_of_one(feed.known_element_spec)
    # Make copies without cached properties, which need not be sent.
    nothing: Any = None
    fresh = [
        replace(pipeline, node=nothing if isinstance(pipeline.node, OnWorker) else pipeline.node)
        for pipeline in pipelines
    ]
    first_replicas = list(accumulate((len(pipeline.consumers) for pipeline in pipelines), initial=0))
    step_sources = list(map(_step_source, pipelines, fresh, count(), first_replicas)) if len(pipelines) > 1 else []
    if strategy.workers != (None,):
        for pipeline, step_source in zip_longest(pipelines, step_sources):
            _check_located(strategy, pipeline, step_source)
    plans = []
    for number, (pipeline, first) in enumerate(zip(fresh, first_replicas, strict=False)):
        replicas = strategy.replicas[first : first + len(pipeline.consumers)] if options.fetch_to_device else ()
        others = tuple(step_source for place, step_source in enumerate(step_sources) if place != number)
        read_plan = SharedReadPlan(
            pipeline,
            others,
            len(strategy.replicas) == 1,
            feed.drops_uneven,
            options.per_replica_buffer_size,
            ((0,),) * len(fresh),
            devices=tuple([replica.device for replica in replicas]),
        )
        needed = [number, *[place for place, source in enumerate(step_sources) if isinstance(source, Pipeline)]]
        source = _source_for(feed.source, fresh, needed)
        plans.append(ReplicaPlan(read_plan, number, first, spec, options, feed.maps[number], source))
    return DatasetPlans(plans, futures, referenced)


def _source_for(source: PassSource, fresh: Sequence[Pipeline], needed: Sequence[int]) -> PassSource:
    # Leave out pipelines that replicas read only if a pass is divided again.
    nothing: Any = None
    pipelines = [
        pipeline if number in needed else replace(pipeline, node=nothing) for number, pipeline in enumerate(fresh)
    ]
    node: Any = source.node
    if isinstance(node, OnWorker):
        # Loops read the dataset itself, whose positions differ from those of the stream of its elements.
        identity = source.identity
        known = replace(identity, fingerprint=f"{identity.fingerprint} in loops")
        return replace(source, node=nothing, pipelines=pipelines, known_identity=known)
    if comes_in_any_order(node):
        node = WithOptions(node, Options(deterministic=True))
    return replace(source, node=node, pipelines=pipelines)


def _step_source(
    pipeline: Pipeline, fresh: Pipeline, number: int, first_replica: int
) -> Cuts | Pipeline | RemotePipeline:
    # Return the object that says in which steps a pipeline has rows.
    known = Cuts.of(pipeline)
    if known is not None:
        return known
    if not isinstance(pipeline.node, OnWorker):
        return fresh
    num_replicas, num_elements = len(pipeline.consumers), pipeline.node.cardinality
    if num_elements != UNKNOWN:
        return Cuts.of_elements(num_elements, num_replicas)
    return RemotePipeline(pipeline.node.worker, number, tuple(range(first_replica, first_replica + num_replicas)))


def _check_located(
    strategy: StrategyContract, pipeline: Pipeline, step_source: Cuts | Pipeline | RemotePipeline | None
) -> None:
    # Check that each reader of a file has it. If only reading shows the steps of a pipeline, all workers read it.
    locations = merged_options(pipeline.node).locations
    if locations is None:
        return
    addresses = internals_of(strategy).input.addresses(locations)
    readers = strategy.workers if isinstance(step_source, Pipeline) else dict.fromkeys(pipeline.consumers)
    for split in (split for splits in read_by(pipeline.node) for split in splits if split.path):
        addresses_with_file = addresses(split.path)
        lacking = [str(worker) for worker in readers if worker not in addresses_with_file]
        if addresses_with_file and lacking:
            raise ArgumentError(
                f"run: {split.path} is on disks of some workers only (Options.locations: "
                f"{', '.join(addresses_with_file)}), and replicas on {', '.join(lacking)} would read it "
                f"themselves; {_INSTEAD}"
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


def _referenced_futures(pipeline: Pipeline) -> dict[Any, Any]:
    functions = [
        value for node in walk(pipeline.node) for value in vars(node).values() if isinstance(value, UserFunction)
    ]
    return futures_in(functions) if functions else {}


def _spec_of_one(element_spec: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.specs[0] if isinstance(leaf, PerReplicaSpec) else leaf, element_spec)


def in_pass(plan: ReplicaPlan, epochs: Sequence[Epoch]) -> SharedReadPlan:
    """Return the plan for a pass, given the numbers of the pass for each pipeline."""
    return replace(plan.read_plan, epochs=tuple([epochs[number] for number in plan.numbers]))


def pinned(plan: ReplicaPlan, read_plan: SharedReadPlan, devices: Sequence[Device]) -> SharedReadPlan:
    """Return the plan, with elements gathered in pinned memory if they are copied to devices."""
    first = devices[0]
    if not plan.options.fetch_to_device or any(device.is_host or device.kind != first.kind for device in devices):
        return read_plan
    return replace(read_plan, empty=pinned_empty(first))


def resumed(plan: ReplicaPlan, read_plan: SharedReadPlan, position: PassPosition) -> tuple[SharedReadPlan, int]:
    """Return the plan of the rest of a pass, and the first replica that its pipeline serves."""
    pipelines = position.pipelines
    if position.sections:
        read_plan, numbers, first_replica = replace(read_plan, pipeline=pipelines[0], others=()), [0], 0
    else:
        numbers, first_replica = plan.numbers, plan.first_replica
        others = [
            pipelines[number] if isinstance(other, Pipeline) else other
            for number, other in zip(numbers[1:], read_plan.others, strict=True)
        ]
        read_plan = replace(read_plan, pipeline=pipelines[plan.number], others=tuple(others))
    positions = tuple([position.positions[number] for number in numbers])
    done = frozenset([replica - first_replica for replica in position.done])
    return replace(read_plan, positions=positions, done=done), first_replica


def shared_reader(token: str, worker: str | None, number: int, read_plan: SharedReadPlan) -> SharedReader:
    """Return the reader of a pipeline that replicas of this process share in a call, created at the first use."""
    key = token, worker, number
    with _opening:
        reader = _shared_readers.get(key)
        if reader is None:
            consumers = read_plan.pipeline.consumers
            reader = SharedReader(read_plan, [lane for lane, consumer in enumerate(consumers) if consumer == worker])
            _shared_readers[key] = reader
        return reader
