"""Sharding: a pipeline as one a worker."""

from __future__ import annotations

from daskdist.core.node import Node, walk
from daskdist.ops.read_files import ReadFiles
from daskdist.sharding import AutoShardPolicy, Decision, FileSource, Outlook, decide


def autoshard(node: Node, policy: AutoShardPolicy, num_pipelines: int) -> tuple[Decision, list[Node]]:
    """What the policy comes to, and the input pipelines: one that serves all workers, or one for each.

    Raises
    ------
    ShardingError
        The policy cannot be followed.
    """
    if num_pipelines == 1:
        return Decision(AutoShardPolicy.OFF, "one worker reads everything"), [node]
    decision = decide(policy, outlook(node, num_pipelines))
    if decision.policy is AutoShardPolicy.DATA:
        return decision, [node]
    if decision.policy is AutoShardPolicy.OFF:
        return decision, [node] * num_pipelines
    return decision, [_shard(node, index, num_pipelines, decision.by_split) for index in range(num_pipelines)]


def outlook(node: Node, num_pipelines: int) -> Outlook:
    """What a policy looks at."""
    nodes = list(walk(node))
    sources = [each for each in nodes if not each.inputs]
    obstacles = [each.name for each in nodes if each.inputs and not each.facts.per_worker]
    return Outlook(num_pipelines, tuple(map(_source, sources)), tuple(obstacles))


def _source(node: Node) -> FileSource:
    if not isinstance(node, ReadFiles):
        return FileSource(node.name, None, False, lambda: 0)
    return FileSource(node.name, len(node.paths), node.format.is_splittable, lambda: len(node.lenient_splits()))


def _shard(node: Node, index: int, num_shards: int, by_split: bool) -> Node:
    if isinstance(node, ReadFiles):
        return node.sharded(index, num_shards, by_split=by_split)
    return node.with_inputs(tuple(_shard(each, index, num_shards, by_split) for each in node.inputs))
