"""`DistributedDataset`: a dataset that gives each replica its part of every step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from daskdist.core.cardinality import UNKNOWN, counted
from daskdist.core.dataset_base import node_of
from daskdist.core.node import Node
from daskdist.core.primitive import Epoch
from daskdist.core.spec import (
    DatasetSpec,
    RaggedTensorSpec,
    TensorSpec,
)
from daskdist.dataset import Dataset, spec_by
from daskdist.devices import Device, named
from daskdist.display.drawing import cardinality_in_words, is_cheap_to_list
from daskdist.display.missing_methods import Advised
from daskdist.display.pages import distributed_page
from daskdist.display.plain_text import PlainText
from daskdist.display.plan import shares_table, tree
from daskdist.errors import ArgumentError, UnknownLengthError
from daskdist.execute.stream.local_iterator import first_elements, nodes_of
from daskdist.execute.transfer.gather_on_device import describe_row_order, is_on_devices
from daskdist.ops.with_options import merged_options
from daskdist.passes.autoshard import autoshard, filled
from daskdist.passes.numbering import epochs_in_pass
from daskdist.passes.plan import plan
from daskdist.passes.rebatch import rebatch
from daskdist.sharding import AutoShardPolicy, Decision
from daskdist.strategy.group import Replica
from daskdist.strategy.input.device_maps import SuppliedDataset
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.input.options import InputOptions, InputReplicationMode
from daskdist.strategy.input.pass_position import PassSource
from daskdist.strategy.input.pipeline import Pipeline, pipelines_of, shares_of
from daskdist.strategy.input.progress_steps import ProgressSteps
from daskdist.strategy.input.replica_feed import ReplicaFeed
from daskdist.strategy.replica.context import TO_REPLICAS, check_in_program
from daskdist.strategy.replica.contract import StrategyContract, internals_of

logger: Final = logging.getLogger("daskdist")
# strategy -> the sharding decisions that were logged, each with its pipeline.
_logged: Final[weakref.WeakKeyDictionary[StrategyContract, set[str]]] = weakref.WeakKeyDictionary()


class DistributedDataset(Advised):
    """A dataset for all replicas. Iterate over it: each step is one batch a replica.

    Returned by `Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`. It takes no further
    transformations: apply them to the dataset.

    After a worker is lost, an iterator continues with the remaining replicas, and every row is in one completed step;
    see `Strategy.distribute_dataset`. Datasets of a function stay on their workers: an iterator over them continues
    with the remaining ones, and fails if it needs one that was lost.

    If the scheduler is lost, and with it all workers, the function is called again on the workers of another one. An
    iterator continues from its position if there are as many replicas on as many workers, and if the function creates
    the same datasets: of the same operations, functions and data. It fails if elements come in any order, are left out
    as they fail, are those of a generator, of the data service or of Dask collections, or are shuffled before a cache.
    """

    def __init__(
        self,
        strategy: StrategyContract,
        make_feed: Callable[[], ReplicaFeed],
        options: InputOptions,
        code: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._strategy = strategy
        # Returns hashes of the code of the dataset's functions: they change when a function is redefined.
        self._code_tokens = code
        self._code_of_feed: tuple[str, ...] = ()
        # Called again after a loss, to feed the remaining replicas.
        self._make_feed = make_feed
        self._fed_replicas: Sequence[Replica] = ()
        self._last_feed: ReplicaFeed
        # The `DatasetPlans` for replicas that iterate over the dataset themselves, made at the first use.
        self._plans: Any = None
        self._options = options
        self._feed  # noqa: B018

    @property
    def _feed(self) -> ReplicaFeed:
        """The feed of the current replicas."""
        replicas = self._strategy.replicas
        if self._fed_replicas is not replicas:
            self._code_of_feed = self._code_tokens()
            self._last_feed = self._make_feed()
            self._plans = None
            self._fed_replicas = replicas
        return self._last_feed

    def _feed_for_pass(self) -> ReplicaFeed:
        internals_of(self._strategy).take_replacements()
        if self._code_tokens() != self._code_of_feed:
            # Cached data of the old functions must not mix with new data.
            self._fed_replicas = ()
        return self._feed

    def __iter__(self) -> DistributedIterator:
        return self._iterator(ReplicaFeed.begin_pass)

    def _iterator(self, epochs_of: Callable[[ReplicaFeed], list[Epoch]]) -> DistributedIterator:
        check_in_program("iter")
        feed = self._feed_for_pass()
        iterator = DistributedIterator(self._strategy, feed, epochs_of(feed), self._options, lambda: self._feed)
        internals_of(self._strategy).backend.note_iterator(iterator)
        return iterator

    def progress(self, title: str = "") -> ProgressSteps:
        """Return the steps of one pass, with progress shown on standard error.

        Progress shows steps and rows per second, the share of time spent waiting for the next step, and values that the
        program reports: ``steps.report(loss=loss)``. Nothing is shown unless standard error is a terminal or a
        notebook.

        Parameters
        ----------
        title
            A label shown first, such as ``"epoch 1"``.

        >>> from daskdist import Dataset, MirroredStrategy
        >>> steps = MirroredStrategy(["CPU:0"]).distribute_dataset(Dataset.range(6).batch(3)).progress("epoch 1")
        >>> for batch in steps:
        ...     steps.report(loss=batch.mean())
        """
        iterator = iter(self)
        feed = self._last_feed
        is_counted = all(map(is_cheap_to_list, nodes_of(iterator)))
        total = feed.cardinality() if is_counted else UNKNOWN
        return ProgressSteps(iterator, feed.source.pipelines, total if total >= 0 else None, title)

    def __reduce__(self) -> Any:
        raise TypeError(f"a distributed dataset stays in its program. {TO_REPLICAS}")

    @property
    def sharding(self) -> Decision:
        """The policy that assigns input to workers, and the reason for it."""
        return self._feed.sharding

    @property
    def element_spec(self) -> Any:
        """The spec of each leaf of a step; a `PerReplicaSpec` if there are several replicas.

        The first length is None if it varies. Other lengths of a function's results are inferred by calling it with
        sample elements, and the elements of replicas are not checked against them.

        Raises
        ------
        SpecUnknown
            A function that replicas call on their devices cannot be called here.
        """
        return self._feed.element_spec

    def cardinality(self) -> int:
        """Return the number of steps; `UNKNOWN` (-2) or `INFINITE` (-1) otherwise.

        If a function of whole batches leaves a batch without rows, there is one step less than this.
        """
        return self._feed.cardinality()

    def __len__(self) -> int:
        num_steps = self.cardinality()
        if num_steps < 0:
            raise UnknownLengthError("the number of steps is endless or unknown so far; cardinality() says which")
        return num_steps

    def __bool__(self) -> bool:
        return True

    def explain(self) -> PlainText:
        """Describe how input is divided and why, what each worker reads, and which leaves stay on the host."""
        replicas = self._strategy.replicas
        feed = self._feed
        return PlainText(
            "\n".join(
                [
                    f"{counted(len(replicas), 'replica')} on {counted(len(self._strategy.workers), 'worker')}",
                    f"sharding: {feed.sharding_title} ({feed.sharding})",
                    shares_table(shares_of(feed.source.pipelines, replicas)),
                    "pipeline:",
                    tree(feed.source.pipelines[0].node),
                    *[f"  {line}  # on the device of each replica" for line in feed.maps[0].lines],
                    *self._left_on_the_host(),
                    *self._gathered_on_devices(),
                ]
            )
        )

    def _left_on_the_host(self) -> list[str]:
        # A line about the leaves that stay on the host although replicas are on devices.
        devices = [device for replica in self._strategy.replicas if not (device := named(replica.device)).is_host]
        spec = self._feed.source.spec
        left = [
            f"{path or '(the element)'} ({reason})"
            for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True)
            if (reason := _lacking(leaf, devices))
        ]
        return [f"on the host, as devices have no such arrays: {', '.join(left)}"] if left else []

    def _gathered_on_devices(self) -> list[str]:
        pipeline = self._feed.source.pipelines[0]
        is_wanted = merged_options(pipeline.node).shuffle_on_device
        if not (is_on_devices(pipeline.primitive) if is_wanted is None else is_wanted):
            return []
        if all(named(replica.device).is_host for replica in self._strategy.replicas):
            return ["shuffle_on_device: of no effect, as all replicas are on the host"]
        where = "" if self._strategy.workers == (None,) else "in loops on replicas, "
        return [f"shuffle_on_device: {where}{describe_row_order(pipeline.primitive, self._feed.source.spec)}"]

    def _repr_html_(self) -> str:
        # Show the last feed, as asking for the current replicas may wait for workers.
        feed, replicas = self._last_feed, self._fed_replicas
        is_counted = all(is_cheap_to_list(pipeline.node) for pipeline in feed.source.pipelines)
        steps = cardinality_in_words(feed.cardinality() if is_counted else None, "step")
        return distributed_page(
            type(self).__name__,
            [steps, counted(len(replicas), "replica")],
            shares_of(feed.source.pipelines, replicas, reads_indexes=False),
            f"{feed.sharding_title} ({feed.sharding})",
            feed.source.pipelines[0].node,
            feed.source.spec,
            [f"{line}, on the device of each replica" for line in feed.maps[0].lines],
            is_counted=is_counted,
        )

    def __repr__(self) -> str:
        replicas = counted(self._strategy.num_replicas_in_sync, "replica")
        return f"<DistributedDataset over {replicas}: {self._last_feed.known_element_spec}>"

    def _advice_for(self, name: str) -> str | None:
        is_of_datasets = not name.startswith("_") and hasattr(Dataset, name)
        return f"dataset.{name} before distribute_dataset" if is_of_datasets else super()._advice_for(name)


def strategy_of(dataset: DistributedDataset) -> StrategyContract:
    """Return the strategy of a dataset."""
    return dataset._strategy


def input_pipelines_of(dataset: DistributedDataset) -> Sequence[Pipeline]:
    """Return the input pipelines; the first feeds the first replicas, and so on."""
    return dataset._feed.source.pipelines


def options_of(dataset: DistributedDataset) -> InputOptions:
    """Return the options for the input of replicas."""
    return dataset._options


def feed_for_pass(dataset: DistributedDataset) -> ReplicaFeed:
    """Return the feed for a pass that begins now, with functions as they are defined now.

    Workers that were added or restarted take the places of lost ones.
    """
    return dataset._feed_for_pass()


def iterator_in_pass(dataset: DistributedDataset, contents: Node, epoch: Epoch) -> DistributedIterator:
    """Return an iterator over a pass of the operation that the dataset is the contents of; it takes no number."""
    return dataset._iterator(
        lambda feed: epochs_in_pass(contents, epoch, [part.node for part in feed.source.pipelines])
    )


def plans_of_feed(dataset: DistributedDataset, make: Callable[[], Any]) -> Any:
    """Return the `DatasetPlans` of the last feed, made by a function at the first use."""
    if dataset._plans is None:
        dataset._plans = make()
    return dataset._plans


def _lacking(leaf: TensorSpec, devices: Sequence[Device]) -> str:
    # The kind of array or dtype that some devices lack; "" if they support the leaf.
    if not devices:
        return ""
    if isinstance(leaf, DatasetSpec):
        return "datasets"
    if isinstance(leaf, RaggedTensorSpec):
        return "ragged"
    return str(leaf.dtype) if any(device.lacks(leaf.dtype) for device in devices) else ""


def _log_once(strategy: StrategyContract, node: Node, sharding: Decision) -> None:
    # A program may distribute the same pipeline in every epoch.
    logged, notice = _logged.setdefault(strategy, set()), f"sharding by {sharding.policy.name}: {sharding}"
    key = f"{notice}\n{tree(node)}"
    if key not in logged:
        logged.add(key)
        logger.log(logging.WARNING if sharding.is_costly else logging.INFO, "%s", notice)


def _first_elements(node: Node, number: int) -> list[Any]:
    return first_elements(plan(node), number)


def of_dataset(strategy: StrategyContract, dataset: Dataset, options: InputOptions) -> DistributedDataset:
    """Distribute a dataset, each batch cut into one piece per replica; see `Strategy.distribute_dataset`."""
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise ArgumentError(
            "distribute_dataset: replication_mode PER_REPLICA is for distribute_datasets_from_function; a dataset that "
            "is given is cut for all replicas"
        )
    supplied = SuppliedDataset(dataset)
    return DistributedDataset(strategy, lambda: _make_feed(strategy, supplied), options, lambda: supplied.code)


def _make_feed(strategy: StrategyContract, dataset: SuppliedDataset) -> ReplicaFeed:
    dataset_options, node = dataset.options(), node_of(dataset)
    # The spec does not depend on the shard number: fill its placeholder with any.
    filled_node = filled(node, 0, 1)
    of_one = dataset if filled_node is node else Dataset(filled_node)
    spec = spec_by(of_one, lambda: internals_of(strategy).input.reader(of_one))
    workers = strategy.workers
    consumers = tuple(replica.worker for replica in strategy.replicas)
    policy = dataset_options.auto_shard_policy or AutoShardPolicy.AUTO

    def shared_out(node: Node, num_workers: int, num_replicas: int) -> tuple[Decision, list[Node]]:
        return autoshard(rebatch(node, spec, num_replicas), policy, num_workers, _first_elements)

    sharding, nodes = shared_out(node, len(workers), len(consumers))
    pipelines = pipelines_of(nodes, workers, consumers)
    if len(workers) > 1:
        _log_once(strategy, node, sharding)

    return ReplicaFeed(
        len(consumers) if len(workers) == 1 else None,
        lambda: internals_of(strategy).input.reader(dataset),
        bool(dataset_options.drop_uneven),
        sharding,
        sharding.policy.name if len(workers) > 1 else "none needed",
        (dataset.device_maps,) * len(pipelines),
        PassSource(node, spec, pipelines, len(workers), sharding.policy.name, shared_out),
    )
