"""Sharding: one pipeline for each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daskdist.core.cardinality import INFINITE, UNKNOWN, counted
from daskdist.core.file_backed_source import FileBackedSource
from daskdist.core.node import ExpandingNode, Node, Source, walk, with_each_input
from daskdist.core.primitive import Split
from daskdist.errors import ShardingError, UserFunctionError
from daskdist.ops.shard import Shard
from daskdist.ops.with_options import merged_options
from daskdist.passes.balance_files import share_files
from daskdist.passes.remainders import drops_groups, level, remainder, uneven
from daskdist.passes.seed import of_worker
from daskdist.passes.zip_sharding import pairing, tied
from daskdist.sharding import AutoShardPolicy, Decision, FileSource, Pairing, ShardingInput, decide

# Returns the first elements of a pipeline, up to a number of them.
First = Callable[[Node, int], Sequence[Any]]


def autoshard(
    node: Node, policy: AutoShardPolicy, num_pipelines: int, first: First | None = None
) -> tuple[Decision, list[Node]]:
    """Return the policy's decision and the input pipelines: one that serves all workers, or one for each.

    Parameters
    ----------
    node
        The pipeline.
    policy
        The sharding policy.
    num_pipelines
        The number of workers.
    first
        Returns first elements, which may show whether a function reads files; None never to compute any.

    Raises
    ------
    ShardingError
        The policy cannot be followed.
    """
    num_hints = sum(upstream.is_shard_hint for upstream in walk(node))
    if num_hints and policy is not AutoShardPolicy.HINT:
        raise ShardingError(
            f"the dataset has shard(SHARD_HINT, SHARD_HINT), which AutoShardPolicy.HINT replaces, but its policy is "
            f"{policy.name}. Use Options(auto_shard_policy='hint'), or leave the shard out"
        )
    if num_pipelines == 1:
        return Decision(AutoShardPolicy.OFF, "one worker reads everything"), [filled(node, 0, 1)]
    if policy in (AutoShardPolicy.FILE, AutoShardPolicy.AUTO):
        survey = _Survey(num_pipelines, first, node)
        decision = decide(policy, survey.sharding_input())
        if decision.policy is AutoShardPolicy.FILE:
            return _by_file(node, decision, survey)
    else:
        decision = decide(policy, ShardingInput(num_pipelines, (), (), num_hints=num_hints))
    if decision.policy is AutoShardPolicy.DATA:
        return decision, [node]
    if decision.policy is AutoShardPolicy.OFF:
        return decision, [of_worker(node, index) for index in range(num_pipelines)]
    return decision, [filled(node, index, num_pipelines) for index in range(num_pipelines)]


def filled(node: Node, index: int, num_shards: int) -> Node:
    """Return the pipeline with a worker's shard in place of each ``shard(SHARD_HINT, SHARD_HINT)``."""
    changed = with_each_input(node, lambda source: filled(source, index, num_shards))
    return node if changed is node and not node.is_shard_hint else changed.on_share(index, num_shards)


def sharding_input(node: Node, num_pipelines: int, first: First | None = None) -> ShardingInput:
    """Return the facts about a pipeline on which a policy bases its decision."""
    return _Survey(num_pipelines, first, node).sharding_input()


def read_by(node: Node) -> Iterator[Sequence[Split]]:
    """Yield the splits that a pipeline reads for each source; one split for each file that a function reads."""
    if isinstance(node, ExpandingNode) and node.source.is_worker_share and node.reads_files is not False:
        number = node.source.cardinality
        label = f"a file that {node.name} reads"
        yield [Split(label, None, file=file) for file in range(number)] if number >= 0 else [Split(label, None)]
    elif isinstance(node, Source):
        if node.is_listed:
            yield node.splits()
    else:
        for source in node.inputs:
            yield from read_by(source)


@dataclass
class _Survey:
    # Facts collected from the end of a pipeline to its sources.
    num_pipelines: int
    first: First | None
    root: Node
    sources: list[FileSource] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    pairings: list[Pairing] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    row_splits: list[str] = field(default_factory=list)
    dropping_operations: list[str] = field(default_factory=list)
    group_filters: list[str] = field(default_factory=list)
    # The ids of nodes that read files whose names are elements.
    readers: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.skips_errors = merged_options(self.root).on_error == "skip"
        self.look(self.root)

    def sharding_input(self) -> ShardingInput:
        return ShardingInput(
            self.num_pipelines,
            tuple(self.sources),
            tuple(self.obstacles),
            tuple(self.pairings),
            cuts=tuple(self.cuts),
            row_splits=tuple(self.row_splits),
            dropping_operations=tuple(self.dropping_operations),
            group_filters=tuple(self.group_filters),
            drops_uneven=bool(merged_options(self.root).drop_uneven),
            remainder=lambda by_split: remainder(self.root, self._shares(by_split)),
            uneven=lambda by_split: uneven(self._shares(by_split)),
        )

    def _shares(self, by_split: bool) -> list[Node]:
        return _by_file(self.root, Decision(AutoShardPolicy.FILE, "", by_split), self)[1]

    def look(self, node: Node) -> None:
        if not node.inputs:
            self.sources.append(_source(node))
            return
        if isinstance(node, ExpandingNode) and self._reads_files(node):
            self.readers.add(id(node))
            self.sources.append(self._by_name(node))
            return
        if node.drops_remainder:
            self.dropping_operations.append(node.name)
        if isinstance(node, ExpandingNode) and level(node.source):
            # The function may return no elements for some groups, as if these were filtered.
            self.group_filters.append(node.name)
        if drops_groups(node, skips_errors=self.skips_errors):
            self.group_filters.append(f"{node.name} under on_error='skip'" if self.skips_errors else node.name)
        if node.facts.pairs:
            self.pairings.append(pairing(node))
        elif not node.facts.per_worker:
            self.obstacles.append(node.name)
            if node.facts.by_count:
                self.cuts.append(node.name)
            if node.splits_rows:
                self.row_splits.append(node.name)
        for source in node.inputs:
            self.look(source)

    def _reads_files(self, node: Node) -> bool:
        if node.reads_files is not None or not isinstance(node, ExpandingNode) or not _is_repeatable(node.source):
            return bool(node.reads_files)
        try:
            pipelines = [node.nested_pipeline(element) for element in self._first(node.source, 1)]
        except UserFunctionError:
            # Iteration will raise the error.
            return False
        return any(pipeline is None or any(map(self._reads_files, walk(pipeline))) for pipeline in pipelines)

    def _by_name(self, node: ExpandingNode) -> FileSource:
        if not _is_repeatable(node.source):
            names = ", ".join(upstream.name for upstream in walk(node.source) if not upstream.is_repeatable)
            why = f"{node.name} reads files whose names come from {names}, which may differ from worker to worker"
            advice = "Give the names with list_files or from_tensor_slices"
            return FileSource(node.name, 0, False, lambda: 0, objection=why, advice=advice)
        known = number = node.source.cardinality
        if known == UNKNOWN:
            number = len(self._first(node.source, self.num_pipelines))
        if known == INFINITE or number >= self.num_pipelines:
            label = f"{f'{known} ' if known > 0 else ''}files that {node.name} reads"
            return FileSource(node.name, max(number, self.num_pipelines), False, lambda: 0, label=label)
        why = (
            f"{node.name} reads {counted(number, 'file')} for {self.num_pipelines} workers, but files that a function "
            "reads are not split"
        )
        advice = f"Pass the files to the reader itself, which splits them, or write at least {self.num_pipelines}"
        return FileSource(node.name, number, False, lambda: 0, objection=why, advice=advice)

    def _first(self, node: Node, number: int) -> Sequence[Any]:
        if self.first is None:
            return ()
        try:
            return self.first(node, number)
        except Exception:
            # Iteration will raise the error.
            return ()


def _is_repeatable(node: Node) -> bool:
    return all(upstream.is_repeatable for upstream in walk(node))


def _source(node: Node) -> FileSource:
    if not isinstance(node, FileBackedSource):
        return FileSource(node.name, None, False, lambda: 0)
    return FileSource(node.name, len(node.paths), node.is_splittable, lambda: len(node.valid_splits()))


def _by_file(node: Node, decision: Decision, survey: _Survey) -> tuple[Decision, list[Node]]:
    number = survey.num_pipelines
    files_of: dict[int, list[FileBackedSource]] = {}
    if merged_options(node).balance == "bytes":
        decision, files_of = _balanced(node, decision, survey)

    def share(upstream: Node, index: int) -> Node:
        if id(upstream) in survey.readers:
            return upstream.with_inputs((Shard(upstream.inputs[0], number, index, is_worker_share=True),))
        if isinstance(upstream, FileBackedSource):
            known = files_of.get(id(upstream))
            return known[index] if known else upstream.shard_of_files(index, number, by_split=decision.by_split)
        return with_each_input(upstream, lambda source: share(source, index)).on_share(index, number)

    return decision, [share(node, index) for index in range(number)]


def _balanced(node: Node, decision: Decision, survey: _Survey) -> tuple[Decision, dict[int, list[FileBackedSource]]]:
    groups = list(tied(node, lambda upstream: id(upstream) in survey.readers))
    reason, files_of = decision.reason, {}
    if groups:
        shares = share_files(groups, survey.num_pipelines, by_split=decision.by_split)
        files_of = shares.by_source
        reason += f"; assigned largest first, no worker has more than {shares.excess:.2f} times the mean"
    if survey.readers:
        reason += "; files that a function reads are assigned in turn"
    return replace(decision, reason=reason), files_of
