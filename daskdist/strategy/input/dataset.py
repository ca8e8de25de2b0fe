"""Distributed datasets: the input of replicas, step by step."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.dataset_base import node_of
from daskdist.core.node import Node
from daskdist.core.primitive import Epoch
from daskdist.core.spec import (
    AnyRankSpec,
    DatasetSpec,
    ElementSpec,
    PerReplicaSpec,
    RaggedTensorSpec,
    SpecUnknown,
    TensorSpec,
)
from daskdist.dataset import Dataset, spec_by
from daskdist.devices import Device, named
from daskdist.display.drawing import cardinality_in_words, is_at_hand
from daskdist.display.pages import distributed_page
from daskdist.display.plan import count, shares_table, tree
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Caller
from daskdist.execute.stream.local_iterator import rows_of
from daskdist.execute.transfer.copy_stats import CopyStats
from daskdist.execute.transfer.gather_on_device import describe_row_order
from daskdist.ops.with_options import merged_options
from daskdist.passes.autoshard import autoshard, filled
from daskdist.passes.numbering import begin_pass, skip_passes_of_call
from daskdist.passes.plan import plan
from daskdist.passes.rebatch import rebatch
from daskdist.sharding import AutoShardPolicy, Decision
from daskdist.strategy.group import Replica
from daskdist.strategy.input.device_maps import DeviceMaps, MapsOnReplicas, SuppliedDataset
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.input.options import InputOptions, InputReplicationMode
from daskdist.strategy.input.pipeline import PassSource, Pipeline, known_shares_of, num_steps, pipelines_of, shares_of
from daskdist.strategy.input.progress_steps import ProgressSteps
from daskdist.strategy.replica.context import TO_REPLICAS, check_in_program
from daskdist.strategy.replica.contract import StrategyContract

logger: Final = logging.getLogger("daskdist")
# By strategy, the sharding decisions that were logged, each with the pipeline it is for.
_logged: Final[weakref.WeakKeyDictionary[StrategyContract, set[str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ReplicaFeed:
    """The input pipelines, spec and callers that feed the replicas of a distributed dataset.

    Parameters
    ----------
    pipelines
        The input pipelines, which serve the replicas in order.
    spec
        The spec of what a replica is given, whatever its length along the first axis.
    length
        That length, by that of an element of the dataset; None where it can vary.
    cardinality
        Gives the number of steps.
    reader
        Makes the caller for one pass.
    drops_uneven
        Whether the end is before the first step in which a replica would have nothing.
    sharding
        The policy by which what is read is shared out over workers, and why.
    how
        What plans call that.
    maps
        Of each pipeline, what its replicas call with what they are given, on their devices.
    source
        What iterators need for positions.
    """

    pipelines: Sequence[Pipeline]
    spec: ElementSpec
    length: Callable[[int | None], int | None]
    cardinality: Callable[[], int]
    reader: Callable[[], Caller]
    drops_uneven: bool
    sharding: Decision
    how: str
    maps: Sequence[DeviceMaps]
    source: PassSource

    def begin_pass(self) -> list[Epoch]:
        """Draw the numbers of a pass, the same for the same operations in all pipelines; return each pipeline's."""
        return begin_pass(*[pipeline.node for pipeline in self.pipelines])

    def begin_passes_of_call(self) -> list[Epoch]:
        """Return the numbers of the first pass that replicas make in a call; no later pass has those of the others."""
        epochs = self.begin_pass()
        for pipeline, epoch in zip(self.pipelines, epochs, strict=True):
            skip_passes_of_call(pipeline.node, epoch)
        return epochs

    @cached_property
    def mapped(self) -> MapsOnReplicas | None:
        """The functions that each replica calls with its elements; None if there are none."""
        if not any(self.maps):
            return None
        pairs = zip(self.maps, self.pipelines, strict=True)
        return MapsOnReplicas([maps for maps, pipeline in pairs for _ in pipeline.consumers])


class DistributedDataset:
    """A dataset for all replicas. Iterate over it: each step is one batch a replica.

    Made by `Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`. It takes no further
    transformations: apply them to the dataset.

    Where a worker is lost, what is iterated or run next is shared out over the replicas that are left. An iterator goes
    on with what it was made for, a part for each of the replicas there were, which `Strategy.local_results` takes.
    """

    def __init__(
        self,
        strategy: StrategyContract,
        feed: Callable[[], ReplicaFeed],
        options: InputOptions,
        code: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.strategy = strategy
        # Tokens of the functions that it calls, which change where one is defined again.
        self._code = code
        self._code_fed: tuple[str, ...] = ()
        # Called again where replicas are lost, to feed those that are left.
        self._feed = feed
        self._fed: Sequence[Replica] = ()
        self._feeding_of_those: ReplicaFeed
        # The `DatasetPlans` for replicas that read it themselves, once they are made.
        self.plans: Any = None
        self.options = options
        self._feeding  # noqa: B018

    @property
    def _feeding(self) -> ReplicaFeed:
        """The feed of the current replicas."""
        replicas = self.strategy.replicas
        if self._fed is not replicas:
            self._code_fed = self._code()
            self._feeding_of_those = self._feed()
            self.plans = None
            self.__dict__.pop("known_element_spec", None)
            self._fed = replicas
        return self._feeding_of_those

    def feeding_of_pass(self) -> ReplicaFeed:
        """Return the feed of the replicas for a pass that begins now, with the functions as they are defined now."""
        if self._code() != self._code_fed:
            # Data kept under the tokens of the old functions must not mix with data made now.
            self._fed = ()
        return self._feeding

    def __iter__(self) -> DistributedIterator:
        check_in_program("iter")
        feeding = self.feeding_of_pass()
        return DistributedIterator(
            feeding.pipelines,
            feeding.spec,
            self.known_element_spec,
            feeding.reader(),
            feeding.begin_pass(),
            options=self.options,
            devices=[named(replica.device) for replica in self.strategy.replicas if replica.worker is None],
            drops_uneven=feeding.drops_uneven,
            mapped=feeding.mapped and partial(_mapped, self.strategy, feeding.mapped),
            copied=partial(_copy_stats, self.strategy),
            at_end=self.strategy.internals.backend.raise_unseen,
            source=feeding.source,
        )

    def progress(self, title: str = "") -> ProgressSteps:
        """Return the steps of one pass, whose progress is shown on standard error.

        Shows steps and rows a second, the share of the time that the program waits for the next step, and the figures
        that it reports: ``steps.report(loss=loss)``. With tqdm if that is installed. Nothing is shown where standard
        error is neither a terminal nor a notebook's.

        Parameters
        ----------
        title
            A text before the figures, such as ``"epoch 1"``.

        >>> from daskdist import Dataset, MirroredStrategy
        >>> steps = MirroredStrategy(["CPU:0"]).distribute_dataset(Dataset.range(6).batch(3)).progress("epoch 1")
        >>> for batch in steps:
        ...     steps.report(loss=batch.mean())
        """
        iterator = iter(self)
        is_counted = all(is_at_hand(pipeline.node) for pipeline in iterator.pipelines)
        total = self._feeding_of_those.cardinality() if is_counted else UNKNOWN
        return ProgressSteps(iterator, total if total >= 0 else None, title)

    def __reduce__(self) -> Any:
        raise TypeError(f"a distributed dataset stays in its program. {TO_REPLICAS}")

    @property
    def sharding(self) -> Decision:
        """The policy by which input is shared out over workers, and the reason for it."""
        return self._feeding.sharding

    @property
    def pipelines(self) -> Sequence[Pipeline]:
        """The input pipelines, which serve the replicas in order."""
        return self._feeding.pipelines

    @property
    def element_spec(self) -> Any:
        """The spec of each leaf of a step, a `PerReplicaSpec` where there are several replicas.

        The first length is None where it can vary. Other lengths that a function gives are inferred by trying it on
        sample elements, and elements of replicas are not checked against them.

        Raises
        ------
        SpecUnknown
            A function that replicas call with it can be tried on their devices only.
        """
        num_replicas = self.strategy.num_replicas_in_sync
        spec = self._feeding.spec
        if num_replicas > 1:
            spec = spec.with_leaves(list(map(self._piece, spec.leaves)))
        spec = self._feeding.maps[0].spec_after(spec)
        if num_replicas == 1:
            return spec.packed
        return spec.structure.pack([PerReplicaSpec(*[leaf] * num_replicas) for leaf in spec.leaves])

    def _piece(self, leaf: TensorSpec) -> TensorSpec:
        # One replica's; of scalars, one that has run out has an array without any.
        if not leaf.shape:
            return leaf if self._feeding.length(1) else AnyRankSpec(dtype=leaf.dtype, name=leaf.name)
        return replace(leaf, shape=(self._feeding.length(leaf.shape[0]), *leaf.shape[1:]))

    @cached_property
    def known_element_spec(self) -> Any:
        """The same; None where it is not known before there are elements."""
        # Functions that replicas call are tried for it, and not again for each pass.
        try:
            return self.element_spec
        except SpecUnknown:
            return None

    def cardinality(self) -> int:
        """Return the number of steps; `UNKNOWN` (-2) or `INFINITE` (-1) otherwise.

        A function of whole batches that leaves some of them without any row makes as many steps fewer.
        """
        return self._feeding.cardinality()

    def explain(self) -> str:
        """Describe how the input is shared out and why, what each worker reads, and what devices leave on the host."""
        replicas = self.strategy.replicas
        feeding = self._feeding
        return "\n".join(
            [
                f"{count(len(replicas), 'replica')} on {count(len(self.strategy.workers), 'worker')}",
                f"sharding: {feeding.how} ({feeding.sharding})",
                shares_table(shares_of(feeding.pipelines, replicas)),
                "pipeline:",
                tree(feeding.pipelines[0].node),
                *[f"  {line}  # on the device of each replica" for line in feeding.maps[0].lines],
                *self._left_on_the_host(),
                *self._gathered_on_devices(),
            ]
        )

    def _left_on_the_host(self) -> list[str]:
        # For replicas on devices; empty if nothing stays on the host.
        there = [device for each in self.strategy.replicas if not (device := named(each.device)).is_host]
        spec = self._feeding.spec
        left = [
            f"{path or '(the element)'} ({what})"
            for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True)
            if (what := _lacking(leaf, there))
        ]
        return [f"on the host, as devices have no such arrays: {', '.join(left)}"] if left else []

    def _gathered_on_devices(self) -> list[str]:
        node = self._feeding.pipelines[0].node
        if not merged_options(node).shuffle_on_device:
            return []
        if all(named(replica.device).is_host for replica in self.strategy.replicas):
            return ["shuffle_on_device: of no effect, as all replicas are on the host"]
        where = "" if self.strategy.workers == (None,) else "in loops on replicas, "
        return [
            f"shuffle_on_device: {where}{describe_row_order(self._feeding.pipelines[0].primitive, self._feeding.spec)}"
        ]

    def _repr_html_(self) -> str | None:
        # Of the replicas that were fed last: to ask for those of now may wait for workers.
        feeding, replicas = self._feeding_of_those, self._fed
        is_counted = all(is_at_hand(pipeline.node) for pipeline in feeding.pipelines)
        steps = cardinality_in_words(feeding.cardinality() if is_counted else None, "step")
        return distributed_page(
            type(self).__name__,
            [steps, count(len(replicas), "replica")],
            known_shares_of(feeding.pipelines, replicas),
            f"{feeding.how} ({feeding.sharding})",
            feeding.pipelines[0].node,
            feeding.spec,
            [f"{line}, on the device of each replica" for line in feeding.maps[0].lines],
            is_counted=is_counted,
        )

    def __repr__(self) -> str:
        return f"<DistributedDataset over {self.strategy.num_replicas_in_sync} replicas: {self.known_element_spec}>"


def _lacking(leaf: TensorSpec, devices: Sequence[Device]) -> str:
    # The part of a leaf that some devices do not have; "" if none.
    if not devices:
        return ""
    if isinstance(leaf, DatasetSpec):
        return "datasets"
    if isinstance(leaf, RaggedTensorSpec):
        return "ragged"
    return str(leaf.dtype) if any(device.lacks(leaf.dtype) for device in devices) else ""


def _log_once(strategy: StrategyContract, node: Node, sharding: Decision) -> None:
    # A program may distribute the same pipeline again in every epoch.
    logged, notice = _logged.setdefault(strategy, set()), f"sharding by {sharding.policy.name}: {sharding}"
    key = f"{notice}\n{tree(node)}"
    if key not in logged:
        logged.add(key)
        logger.log(logging.WARNING if sharding.is_costly else logging.INFO, "%s", notice)


def _mapped(strategy: StrategyContract, maps: MapsOnReplicas, value: Any) -> Any:
    return strategy.run(maps, args=(value,))


def _copy_stats(strategy: StrategyContract) -> CopyStats | None:
    input_backend: InputBackend = strategy.internals.input
    return input_backend.copy_stats([(replica.worker, replica.device) for replica in strategy.replicas])


def _first_elements(node: Node, number: int) -> list[Any]:
    return list(itertools.islice((element for rows in rows_of(plan(node)) for element in rows.elements()), number))


def of_dataset(strategy: StrategyContract, dataset: Dataset, options: InputOptions) -> DistributedDataset:
    """Distribute a dataset, each batch cut into one piece a replica; see `Strategy.distribute_dataset`."""
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise ArgumentError(
            "distribute_dataset: replication_mode PER_REPLICA is for distribute_datasets_from_function; a dataset that "
            "is given is cut for all replicas"
        )
    supplied = SuppliedDataset(dataset)
    return DistributedDataset(strategy, lambda: _feeding_of(strategy, supplied), options, lambda: supplied.code)


def _feeding_of(strategy: StrategyContract, dataset: SuppliedDataset) -> ReplicaFeed:
    given = dataset.options()
    # The spec is the same whatever a place for a shard is filled with.
    node = filled(node_of(dataset), 0, 1)
    of_one = dataset if node is node_of(dataset) else Dataset(node)
    spec = spec_by(of_one, lambda: strategy.reader(of_one))
    workers = strategy.workers
    consumers = tuple(replica.worker for replica in strategy.replicas)
    policy = given.auto_shard_policy or AutoShardPolicy.AUTO

    def shared_out(node: Node, num_workers: int, num_replicas: int) -> tuple[Decision, list[Node]]:
        return autoshard(rebatch(node, spec, num_replicas), policy, num_workers, _first_elements)

    sharding, nodes = shared_out(node_of(dataset), len(workers), len(consumers))
    pipelines = pipelines_of(nodes, workers, consumers)
    if len(workers) > 1:
        _log_once(strategy, node_of(dataset), sharding)

    def length(num_rows: int | None) -> int | None:
        is_even = len(workers) == 1 and num_rows is not None and num_rows % len(consumers) == 0
        return (num_rows or 0) // len(consumers) if is_even else None

    def cardinality() -> int:
        return num_steps(pipelines, drops_uneven=bool(given.drop_uneven))

    def named_shares(node: Node, num_workers: int, num_replicas: int) -> tuple[str, list[Node]]:
        decision, shares = shared_out(node, num_workers, num_replicas)
        return decision.policy.name, shares

    return ReplicaFeed(
        pipelines,
        spec,
        length,
        cardinality,
        lambda: strategy.reader(dataset),
        bool(given.drop_uneven),
        sharding,
        sharding.policy.name if len(workers) > 1 else "none needed",
        (dataset.device_maps,) * len(pipelines),
        PassSource(node_of(dataset), spec, pipelines, len(workers), sharding.policy.name, named_shares),
    )
