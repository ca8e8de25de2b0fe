"""FILE: each worker reads its own files, and nothing is sent between workers.

File i goes to worker i mod n. If there are fewer files than workers, the splits of the files are distributed in the
same way. With ``Options.balance="bytes"`` the largest go first instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from daskdist.core.cardinality import counted
from daskdist.errors import ShardingError
from daskdist.sharding import AutoShardPolicy, Decision, FileSource, Remainder, ShardingInput

_ALTERNATIVES = "Use AutoShardPolicy.DATA, which shards any dataset, or OFF"


def decide(sharding_input: ShardingInput) -> Decision:
    """Shard by file, or raise if that is not possible."""
    decision = try_to(sharding_input)
    if decision.policy is not AutoShardPolicy.FILE:
        advice = f"{decision.advice}. " if decision.advice else ""
        raise ShardingError(f"FILE: {decision.reason}. {advice}{_ALTERNATIVES}")
    losses_by_file = list(losses(sharding_input, decision.by_split))
    reason = "; ".join([decision.reason, *(loss.reason for loss in losses_by_file)])
    return replace(decision, reason=reason, is_costly=bool(losses_by_file))


@dataclass(frozen=True)
class Loss:
    """Rows that are dropped under `FILE` and kept without sharding.

    Parameters
    ----------
    reason
        The cause and the amount, as a clause.
    advice
        An alternative, as a clause.
    is_small
        Whether it is certainly at most 1 % of the rows that are kept without sharding.
    """

    reason: str
    advice: str
    is_small: bool


def losses(sharding_input: ShardingInput, by_split: bool) -> Iterator[Loss]:
    """Yield the losses of a pipeline that can be sharded by file."""
    if sharding_input.group_filters:
        names = ", ".join(dict.fromkeys(sharding_input.group_filters))
        reason = f"{names} would drop whole batches, which differ on each worker's files"
        yield Loss(reason, f"apply {names} before batching", is_small=False)
    if sharding_input.dropping_operations:
        names = ", ".join(dict.fromkeys(sharding_input.dropping_operations))
        drops = f"{names} with drop_remainder=True drops"
        yield from _loss(
            drops, "each worker's last partial batch", "leave drop_remainder out", sharding_input.remainder(by_split)
        )
    if sharding_input.drops_uneven:
        drops, advice = "drop_uneven drops", "leave drop_uneven out"
        yield from _loss(
            drops, "each worker's steps that others have none for", advice, sharding_input.uneven(by_split)
        )


def _loss(drops: str, rest: str, advice: str, remainder: Remainder | None) -> Iterator[Loss]:
    if remainder is None:
        yield Loss(f"{drops} {rest}, and how much that is depends on the data", advice, is_small=False)
    elif remainder.num_lost:
        dropped, of_whole = remainder.num_rows - remainder.num_kept_by_file, remainder.num_rows - remainder.num_kept
        yield Loss(
            f"{drops} {dropped} of {remainder.num_rows} {remainder.unit}, {rest}; without sharding it drops {of_whole}",
            advice,
            remainder.is_small,
        )


def try_to(sharding_input: ShardingInput) -> Decision:
    """Return FILE if possible, else DATA with the reason and a remedy."""
    # Without files there is nothing to gain.
    is_costly = any(source.num_files is not None for source in sharding_input.sources)
    for source in sharding_input.sources:
        if source.num_files is None:
            advice = "Write its elements to files too" if is_costly else ""
            return _refusal(f"{source.name} reads no files", is_costly, advice)
        if source.objection:
            return _refusal(source.objection, is_costly, source.advice)
    if sharding_input.obstacles:
        names = ", ".join(dict.fromkeys(sharding_input.obstacles))
        if sharding_input.row_splits == sharding_input.obstacles:
            advice = f"To shard by file, {names} by a key of the rows"
            return _refusal(f"{names} goes by the numbers of all rows", False, advice)
        return _refusal(
            f"{names} would have another result on each worker's files",
            is_costly,
            f"To shard by file, apply {names} to the names of the files",
        )
    by_split = False
    for source in sharding_input.sources:
        problem = _too_few(source, sharding_input.num_pipelines)
        if problem is not None:
            return problem
        by_split |= (source.num_files or 0) < sharding_input.num_pipelines
    for pairing in sharding_input.pairings:
        why = pairing.mismatch(by_split)
        if why is not None:
            advice = "Write both as files with the same numbers of rows"
            return _refusal(
                f"{pairing.name} would pair different rows on each worker's files: {why}", is_costly, advice
            )
    files = ", ".join(
        dict.fromkeys(source.label or counted(source.num_files or 0, "file") for source in sharding_input.sources)
    )
    reason = f"{files} for {sharding_input.num_pipelines} workers"
    reason += ", so sharded by splits within files" if by_split else ""
    return Decision(AutoShardPolicy.FILE, reason, by_split)


def _too_few(source: FileSource, num_workers: int) -> Decision | None:
    num_files = source.num_files or 0
    if num_files >= num_workers:
        return None
    if not source.is_splittable:
        return _refusal(
            f"{source.name} has {counted(num_files, 'file')} for {num_workers} workers, but its files cannot be split",
            True,
            f"Write at least {num_workers} files, or use fewer workers",
        )
    num_splits = source.num_splits()
    if num_splits >= num_workers:
        return None
    return _refusal(
        f"{source.name} has {counted(num_files, 'file')} with {counted(num_splits, 'split')} in all for {num_workers} "
        "workers",
        True,
        "Write more files, or files with more splits (for text, ranges of the setting daskdist.split-bytes; for "
        "Parquet row groups), or use fewer workers",
    )


def _refusal(reason: str, is_costly: bool, advice: str) -> Decision:
    return Decision(AutoShardPolicy.DATA, reason, is_costly=is_costly, advice=advice)
