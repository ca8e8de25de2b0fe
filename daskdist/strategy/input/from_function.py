"""Distributed datasets from a function that returns the dataset of each input pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dask.base import tokenize

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.dataset_base import node_of
from daskdist.core.functions.reach import all_from
from daskdist.core.node import Node, counting
from daskdist.core.randomness.pass_numbers import JointCounter, PassCounter, PassNumber
from daskdist.core.spec import ElementSpec
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.execute.resume.position import PipelineIdentity
from daskdist.sharding import AutoShardPolicy, Decision
from daskdist.strategy.input.dataset import DistributedDataset
from daskdist.strategy.input.on_worker import DatasetSummary, OnWorker
from daskdist.strategy.input.options import InputContext, InputOptions, InputReplicationMode
from daskdist.strategy.input.pass_position import PassSource
from daskdist.strategy.input.pipeline import Pipeline, num_steps
from daskdist.strategy.input.replica_feed import ReplicaFeed
from daskdist.strategy.replica.contract import StrategyContract, internals_of


def of_function(
    strategy: StrategyContract, dataset_fn: Callable[[InputContext], Any], options: InputOptions
) -> DistributedDataset:
    """Distribute the datasets that a function returns; see `Strategy.distribute_datasets_from_function`."""
    if not callable(dataset_fn):
        raise ArgumentError(
            f"distribute_datasets_from_function: {type(dataset_fn).__name__} is not a function; give one that takes an "
            "InputContext and returns a Dataset"
        )
    # The counters are also those of the datasets that are created again after a loss.
    counters = JointCounter(_counters_in(dataset_fn)), PassCounter()
    return DistributedDataset(strategy, lambda: _make_feed(strategy, dataset_fn, options, counters), options)


def _make_feed(
    strategy: StrategyContract,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions,
    counters: tuple[PassCounter, PassCounter],
) -> ReplicaFeed:
    served = _served(strategy, options.replication_mode)
    num_replicas = strategy.num_replicas_in_sync
    contexts = [InputContext(len(served), number, num_replicas) for number in range(len(served))]
    workers = [consumers[0] for consumers in served]
    by_worker = list(zip(workers, contexts, strict=True))
    nodes, summaries, reader = internals_of(strategy).input.make_datasets(dataset_fn, by_worker)
    spec = _common_spec(summaries, workers)
    varies = any(leaf.shape is None or (leaf.shape and leaf.shape[0] is None) for leaf in spec.leaves)
    pipelines = [
        Pipeline(_counted_by(counters, node), (worker,), consumers, varies)
        for node, worker, consumers in zip(nodes, workers, served, strict=True)
    ]
    drops_uneven = any(summary.options.drop_uneven for summary in summaries)
    is_always_full = drops_uneven or UNKNOWN != num_steps(pipelines) == num_steps(pipelines, drops_uneven=True)
    return ReplicaFeed(
        1 if is_always_full else None,
        reader,
        drops_uneven,
        Decision(AutoShardPolicy.OFF, f"called once for each input pipeline, of which there are {len(served)}"),
        f"by {getattr(dataset_fn, '__qualname__', repr(dataset_fn))}",
        tuple(summary.device_maps for summary in summaries),
        PassSource(
            pipelines[0].node,
            spec,
            pipelines,
            len(served),
            "OFF",
            known_identity=_identity_of(summaries),
            obstacle=next(filter(None, (summary.obstacle for summary in summaries)), ""),
        ),
    )


def _identity_of(summaries: Sequence[DatasetSummary]) -> PipelineIdentity:
    identities = [summary.identity for summary in summaries]
    fingerprints, orders = zip(*((identity.fingerprint, identity.order) for identity in identities), strict=True)
    return PipelineIdentity(str(tokenize(fingerprints)), identities[0].operations, "; ".join(orders))


def _counters_in(function: Any) -> list[PassCounter]:
    # The pass counters of datasets that the function refers to, as copies on workers do not know earlier passes.
    datasets = [value for value in all_from(function) if isinstance(value, Dataset)]
    counters = [node.passes.counter for dataset in datasets for node in counting(node_of(dataset))]
    return list(dict.fromkeys(counters))


def _counted_by(counters: tuple[PassCounter, PassCounter], node: Node) -> Node:
    # The program counts the passes over datasets on workers, with one counter for all workers: together with those over
    # datasets that the function refers to, unless `at_epoch` begins to count anew.
    if not isinstance(node, OnWorker):
        return node
    together, alone = counters
    first = node.known.first_pass
    return replace(node, passes=PassNumber(together) if first is None else PassNumber(alone, start=first))


def _served(strategy: StrategyContract, mode: InputReplicationMode) -> list[tuple[str | None, ...]]:
    # For each input pipeline, the worker of each replica that it feeds.
    consumers = tuple(replica.worker for replica in strategy.replicas)
    if mode is InputReplicationMode.PER_REPLICA:
        return [(worker,) for worker in consumers]
    return [(worker,) * consumers.count(worker) for worker in strategy.workers]


def _common_spec(summaries: Sequence[DatasetSummary], workers: Sequence[str | None]) -> ElementSpec:
    first = summaries[0].spec
    common = first
    for number, (summary, worker) in enumerate(zip(summaries, workers, strict=True)):
        spec = summary.spec
        merged = common.most_general_common_spec(spec) if _is_like(spec, first) else None
        if merged is None:
            raise ArgumentError(
                "distribute_datasets_from_function: the datasets differ in their elements: of input pipeline 0 "
                f"({workers[0] or 'here'}) {first.packed}, of input pipeline {number} ({worker or 'here'}) "
                f"{spec.packed}; only the first length may differ"
            )
        common = merged
    return common


def _is_like(spec: ElementSpec, other: ElementSpec) -> bool:
    if spec.structure != other.structure:
        return False
    pairs = zip(spec.leaves, other.leaves, strict=True)
    # Dtypes are compared when the specs are merged.
    return all(one.of_any_length().shape == another.of_any_length().shape for one, another in pairs)
