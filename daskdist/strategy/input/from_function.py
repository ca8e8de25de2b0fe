"""Distributed datasets made by a function, which makes the dataset of each input pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

from dask.base import tokenize

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.dataset_base import node_of
from daskdist.core.node import Node, counting
from daskdist.core.randomness.pass_numbers import JointCounter, PassCounter, PassNumber
from daskdist.core.spec import ElementSpec
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.execute.resume.position import PipelineIdentity
from daskdist.sharding import AutoShardPolicy, Decision
from daskdist.strategy.input.dataset import DistributedDataset, ReplicaFeed
from daskdist.strategy.input.input_backend import PipelineDataset
from daskdist.strategy.input.on_worker import OnWorker
from daskdist.strategy.input.options import InputContext, InputOptions, InputReplicationMode
from daskdist.strategy.input.pipeline import PassSource, Pipeline
from daskdist.strategy.replica.contract import StrategyContract


def of_function(
    strategy: StrategyContract, dataset_fn: Callable[[InputContext], Any], options: InputOptions
) -> DistributedDataset:
    """Distribute the datasets that a function makes; see `Strategy.distribute_datasets_from_function`."""
    if not callable(dataset_fn):
        raise ArgumentError(
            f"distribute_datasets_from_function: {type(dataset_fn).__name__} is no function; give one that takes an "
            "InputContext and returns a Dataset"
        )
    # Also where the datasets are made again, on the workers that are left.
    counter = JointCounter(_counters_in(dataset_fn))
    return DistributedDataset(strategy, lambda: _feeding_of(strategy, dataset_fn, options, counter), options)


def _feeding_of(
    strategy: StrategyContract, dataset_fn: Callable[[InputContext], Any], options: InputOptions, counter: PassCounter
) -> ReplicaFeed:
    served = _served(strategy, options.replication_mode)
    num_replicas = strategy.num_replicas_in_sync
    contexts = [InputContext(len(served), number, num_replicas) for number in range(len(served))]
    workers = [consumers[0] for consumers in served]
    made, reader = strategy.internals.input.make_datasets(dataset_fn, list(zip(workers, contexts, strict=True)))
    spec = _common_spec(made, workers)
    varies = any(leaf.shape and leaf.shape[0] is None for leaf in spec.leaves)
    pipelines = [
        Pipeline(_counted_by(counter, each.node), (worker,), consumers, varies)
        for each, worker, consumers in zip(made, workers, served, strict=True)
    ]
    drops_uneven = any(each.summary.options.drop_uneven for each in made)
    turns = [(each.summary.cardinality, len(consumers)) for each, consumers in zip(made, served, strict=True)]
    is_always_full = drops_uneven or _come_out_even(turns)
    return ReplicaFeed(
        pipelines,
        spec,
        lambda num_rows: num_rows if is_always_full else None,
        lambda: _cardinality(turns, drops_uneven=drops_uneven),
        reader,
        drops_uneven,
        Decision(AutoShardPolicy.OFF, f"called once for each input pipeline, of which there are {len(served)}"),
        f"by {getattr(dataset_fn, '__qualname__', repr(dataset_fn))}",
        tuple(each.summary.device_maps for each in made),
        PassSource(pipelines[0].node, spec, pipelines, len(served), "OFF", told=_identity_of(made)),
    )


def _identity_of(made: Sequence[PipelineDataset]) -> PipelineIdentity:
    plans = [each.summary.plan for each in made]
    return PipelineIdentity(str(tokenize(plans)), "\n".join(reversed(plans[0].splitlines())))


def _counters_in(function: Any) -> list[PassCounter]:
    # The counters of datasets that it refers to. Their copies on workers do not know of earlier iterations.
    values: list[Any] = []
    while isinstance(function, partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    if isinstance(function, FunctionType):
        names = getclosurevars(function)
        values += [*names.nonlocals.values(), *names.globals.values()]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found = [each.passes.counter for value in values if isinstance(value, Dataset) for each in counting(node_of(value))]
    return list(dict.fromkeys(found))


def _counted_by(counter: PassCounter, node: Node) -> Node:
    # Passes over datasets on workers are counted here, by one counter for all workers.
    return replace(node, passes=PassNumber(counter)) if isinstance(node, OnWorker) else node


def _served(strategy: StrategyContract, mode: InputReplicationMode) -> list[tuple[str | None, ...]]:
    # For each input pipeline, the worker of each replica that it serves.
    consumers = tuple(replica.worker for replica in strategy.replicas)
    if mode is InputReplicationMode.PER_REPLICA:
        return [(worker,) for worker in consumers]
    return [(worker,) * consumers.count(worker) for worker in strategy.workers]


def _common_spec(made: Sequence[PipelineDataset], workers: Sequence[str | None]) -> ElementSpec:
    first = made[0].summary.spec
    common = first
    for number, (each, worker) in enumerate(zip(made, workers, strict=True)):
        spec = each.summary.spec
        found = common.most_general_common_spec(spec) if _is_like(spec, first) else None
        if found is None:
            raise ArgumentError(
                "distribute_datasets_from_function: the datasets differ in their elements: of input pipeline 0 "
                f"({workers[0] or 'here'}) {first.packed}, of input pipeline {number} ({worker or 'here'}) "
                f"{spec.packed}; only the first length may differ"
            )
        common = found
    return common


def _is_like(spec: ElementSpec, other: ElementSpec) -> bool:
    if spec.structure != other.structure:
        return False
    pairs = zip(spec.leaves, other.leaves, strict=True)
    return all(one.of_any_length() == another.of_any_length() for one, another in pairs)


def _come_out_even(turns: Sequence[tuple[int, int]]) -> bool:
    # True if there is an element for every replica in every step.
    if all(number == INFINITE for number, _ in turns):
        return True
    is_known = all(number >= 0 and number % each == 0 for number, each in turns)
    return is_known and len({number // each for number, each in turns}) == 1


def _cardinality(turns: Sequence[tuple[int, int]], *, drops_uneven: bool) -> int:
    steps = [_num_steps(number, each, rounds_up=not drops_uneven) for number, each in turns]
    if UNKNOWN in steps:
        return UNKNOWN if drops_uneven or INFINITE not in steps else INFINITE
    finite = [each for each in steps if each != INFINITE]
    if drops_uneven:
        return min(finite, default=INFINITE)
    return INFINITE if INFINITE in steps else max(finite)


def _num_steps(number: int, each: int, *, rounds_up: bool) -> int:
    # The steps that so many elements come to, of which each takes some.
    if number < 0:
        return number
    return -(-number // each) if rounds_up else number // each
