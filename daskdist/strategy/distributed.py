"""Distributed datasets: a dataset's batches, cut and handed to replicas step by step."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

from daskdist.core.spec import ElementSpec, PerReplicaSpec, TensorSpec
from daskdist.display.plan import Share, count, shares_table, tree
from daskdist.passes.autoshard import autoshard
from daskdist.passes.rebatch import rebatch
from daskdist.sharding import AutoShardPolicy
from daskdist.strategy.iterator import DistributedIterator
from daskdist.strategy.pipeline import Pipeline, num_steps

if TYPE_CHECKING:
    from daskdist.dataset import Dataset
    from daskdist.strategy.strategy import Strategy

logger: Final = logging.getLogger("daskdist")


class DistributedDataset:
    """A dataset's batches, each cut into one piece a replica. Iterate over it: each step is one batch.

    Made by `Strategy.distribute_dataset`. It takes no further transformations: apply them to the dataset.
    """

    def __init__(self, strategy: Strategy, dataset: Dataset) -> None:
        self._strategy = strategy
        self._dataset = dataset
        self._iterations = itertools.count()
        self.spec: ElementSpec = dataset.spec_by(lambda: strategy.reader(dataset))
        policy = dataset.options().auto_shard_policy or AutoShardPolicy.AUTO
        workers = strategy.workers
        consumers = tuple(replica.worker for replica in strategy.replicas)
        rebatched = rebatch(dataset.node, self.spec, len(consumers))
        self.sharding, nodes = autoshard(rebatched, policy, len(workers))
        if len(nodes) == 1:
            self.pipelines = [Pipeline(nodes[0], workers, consumers)]
        else:
            self.pipelines = [
                Pipeline(node, (worker,), (worker,) * consumers.count(worker))
                for node, worker in zip(nodes, workers, strict=True)
            ]
        if len(workers) > 1:
            level = logging.WARNING if self.sharding.is_costly else logging.INFO
            logger.log(level, "sharding by %s: %s", self.sharding.policy.name, self.sharding.reason)

    def __iter__(self) -> DistributedIterator:
        caller = self._strategy.reader(self._dataset)
        return DistributedIterator(self.pipelines, self.spec, self.element_spec, caller, next(self._iterations))

    @property
    def element_spec(self) -> Any:
        """The spec of each leaf of a step, a `PerReplicaSpec` where there are several replicas.

        The first length is None where it can vary.
        """
        num_replicas = self._strategy.num_replicas_in_sync
        if num_replicas == 1:
            return self.spec.packed
        is_shared = len(self._strategy.workers) == 1

        def spec(leaf: TensorSpec) -> PerReplicaSpec:
            num_rows = leaf.shape[0]
            is_even = is_shared and num_rows is not None and num_rows % num_replicas == 0
            size = (num_rows or 0) // num_replicas if is_even else None
            return PerReplicaSpec(*[TensorSpec((size, *leaf.shape[1:]), leaf.dtype)] * num_replicas)

        return self.spec.structure.pack([spec(leaf) for leaf in self.spec.leaves])

    def cardinality(self) -> int:
        """The number of steps; `UNKNOWN` (-2) or `INFINITE` (-1) otherwise."""
        if len(self.pipelines) == 1:
            return self._dataset.cardinality()
        return num_steps(self.pipelines)

    def explain(self) -> str:
        """The sharding policy, why it was chosen, and what each worker reads."""
        replicas = [replica.worker for replica in self._strategy.replicas]
        shares = [
            Share(worker or "this process", replicas.count(worker), splits)
            for pipeline in self.pipelines
            for worker, splits in pipeline.splits_by_reader()
        ]
        policy = self.sharding.policy.name if len(shares) > 1 else "none needed"
        return "\n".join(
            [
                f"{count(len(replicas), 'replica')} on {count(len(shares), 'worker')}",
                f"sharding: {policy} ({self.sharding.reason})",
                shares_table(shares),
                "pipeline:",
                tree(self.pipelines[0].node),
            ]
        )

    def __repr__(self) -> str:
        return f"<DistributedDataset over {self._strategy.num_replicas_in_sync} replicas: {self.element_spec}>"
